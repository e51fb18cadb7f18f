"""Ownership of tokens and the merge of partial attention, against NumPy."""

import doctest
import inspect
import re
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.sharding import PartitionSpec as P

from jax_mla import dcp
from jax_mla.dcp import ownership

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

LAYOUTS = pytest.mark.parametrize(
    ("ranks", "interleave", "page_size"),
    [(1, 1, 4), (2, 1, 4), (2, 16, 16), (3, 2, 4), (4, 1, 1), (8, 4, 64), (8, 16, 16)],
)


def cpu_mesh(size: int, axis: str) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), (axis,), devices=jax.devices("cpu")[:size])


def owners(length: int, ranks: int, interleave: int) -> list[int]:
    """The rank of each position, by dealing out runs in turn."""
    dealt: list[int] = []
    while len(dealt) < length:
        dealt += [len(dealt) // interleave % ranks] * interleave
    return dealt[:length]


@LAYOUTS
def test_runs_of_positions_are_dealt_to_ranks_in_turn(
    ranks: int, interleave: int, page_size: int
) -> None:
    owner = dcp.owner(jnp.arange(300), ranks, interleave)
    assert owner.dtype == jnp.int32
    assert owner.tolist() == owners(300, ranks, interleave)


@LAYOUTS
def test_a_rank_stores_its_positions_in_order_in_the_pages_of_the_sequence(
    ranks: int, interleave: int, page_size: int
) -> None:
    pages_each, batch = 3, 2
    length = pages_each * page_size * ranks
    tables = np.random.default_rng(0).permutation(batch * pages_each).reshape(batch, pages_each)
    expected = np.full((ranks, batch, length), -1)
    for sequence, pages in enumerate(tables):
        stored = [0] * ranks
        for position, rank in enumerate(owners(length, ranks, interleave)):
            page, row = divmod(stored[rank], page_size)
            expected[rank, sequence, position] = pages[page] * page_size + row
            stored[rank] += 1
    slots = dcp.local_slots(
        jnp.asarray(np.repeat(tables, length, axis=0)),
        jnp.asarray(np.tile(np.arange(length), batch)),
        page_size,
        ranks,
        interleave,
    )
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, expected.reshape(ranks, -1))


@LAYOUTS
def test_lengths_count_the_positions_of_a_rank(ranks: int, interleave: int, page_size: int) -> None:
    lengths = np.array([[0, 1, 2, 15, 16], [17, 63, 64, 65, 300]])
    expected = [
        [[owners(length, ranks, interleave).count(rank) for length in row] for row in lengths]
        for rank in range(ranks)
    ]
    local = dcp.local_lengths(jnp.asarray(lengths), ranks, interleave)
    assert local.dtype == jnp.int32
    assert local.tolist() == expected


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_no_rank_owns_padding(ranks: int) -> None:
    """-1 % D is D - 1: taken literally the last rank would store padding in page table[-1]."""
    padding = jnp.array([-1, -2, -16, -(2**31)])
    tables = jnp.zeros((4, 2), jnp.int32)
    assert (dcp.owner(padding, ranks, 4) == -1).all()
    assert (dcp.local_slots(tables, padding, 16, ranks, 4) == -1).all()
    assert (dcp.local_lengths(padding, ranks, 4) == 0).all()


def test_a_position_without_a_page_has_no_slot() -> None:
    tables = jnp.array([[5, -1], [5, 6], [-1, 6]])
    positions = jnp.array([8, 16, 0])  # in a missing page, past the table, in a missing page
    assert (dcp.local_slots(tables, positions, 4, 2) == -1).all()
    assert (dcp.local_slots(tables[:, :0], positions, 4, 2) == -1).all()


@pytest.mark.parametrize("integer", [np.int8, np.uint32, np.int64])
def test_every_integer_type_gives_int32(integer: Any) -> None:
    tables: Ints = np.ones((2, 1), integer)
    positions: Ints = np.array([3, 4], integer)
    slots = dcp.local_slots(tables, positions, 4, 2)
    assert slots.dtype == jnp.int32
    assert slots.tolist() == [[-1, 6], [5, -1]]


def test_ownership_partitions_over_the_batch_without_communication() -> None:
    mesh = cpu_mesh(4, "data")
    tables = jnp.arange(64, dtype=jnp.int32).reshape(8, 8)
    positions = jnp.arange(8, dtype=jnp.int32) * 9
    expected = dcp.local_slots(tables, positions, 4, 2)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in (tables, positions)
        ]
        slots = jax.jit(lambda t, p: dcp.local_slots(t, p, 4, 2))
        compiled = slots.lower(*placed).compile()
    np.testing.assert_array_equal(compiled(*placed), expected)
    assert not re.search("all-|collective-", compiled.as_text() or "")


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: dcp.owner(jnp.zeros(2), 2), TypeError, ("position", "float32")),
        (lambda: dcp.owner(jnp.arange(2), 0), ValueError, ("dcp", "at least 1", "0")),
        (lambda: dcp.owner(jnp.arange(2), 2, 0), ValueError, ("interleave", "at least 1", "0")),
        (
            lambda: dcp.local_lengths(jnp.arange(2), cast(int, 2.0)),
            TypeError,
            ("dcp", "int", "float"),
        ),
        (
            lambda: dcp.local_slots(jnp.zeros((2, 1), int), jnp.arange(2), 24, 2, 16),
            ValueError,
            ("page_size", "multiple", "16", "24"),
        ),
        (
            lambda: dcp.local_slots(jnp.zeros((3, 1), int), jnp.arange(2), 16, 2),
            ValueError,
            ("block_tables", "batch = 2", "[3, 1]"),
        ),
        (
            lambda: dcp.local_slots(jnp.zeros((2, 1), int), jnp.zeros((2, 1), int), 16, 2),
            ValueError,
            ("positions", "[batch]", "[2, 1]"),
        ),
    ],
    ids=["float", "dcp", "interleave", "count type", "page size", "tables", "positions"],
)
def test_wrong_ownership_arguments_are_named(
    call: Callable[[], Any], error: type[Exception], names: tuple[str, ...]
) -> None:
    with pytest.raises(error) as raised:
        call()
    assert all(name in str(raised.value) for name in names), str(raised.value)


def softmax_attention(scores: Doubles, values: Doubles) -> tuple[Doubles, Doubles]:
    """Out [H, V] and lse [H] of scores [H, T], values [T, V]; NaN and -Inf for T = 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = scores.max(axis=1, initial=-1e30, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(axis=1, keepdims=True)
        return weights @ values / total, (largest + np.log(total))[:, 0]


def merge_on_mesh(outs: Any, lses: Any, **options: Any) -> tuple[Floats, Floats]:
    """Merges outs [D, H, V] and lses [D, H]: on a mesh each rank holds one, then some heads."""
    mesh = cpu_mesh(len(outs), "dcp")

    def body(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dcp.merge(out[0], lse[0], "dcp", **options)

    merged = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dcp"), out_specs=P("dcp")))
    out, lse = merged(*jax.device_put((outs, lses), jax.NamedSharding(mesh, P("dcp"))))
    return np.asarray(out), np.asarray(lse)


def shards(lengths: list[int], heads: int = 8, seed: int = 0) -> tuple[Doubles, Doubles, Any]:
    """Partial outs and lses of ranks with so many tokens, and (out, lse) over all tokens."""
    rng = np.random.default_rng(seed)
    parts = [
        (3 * rng.standard_normal((heads, length)) + 5, rng.standard_normal((length, 16)))
        for length in lengths
    ]
    outs, lses = zip(*(softmax_attention(*part) for part in parts), strict=True)
    scores, values = zip(*parts, strict=True)
    whole = softmax_attention(np.concatenate(scores, axis=1), np.concatenate(values))
    return np.stack(outs), np.stack(lses), whole


@pytest.mark.parametrize("base2", [False, True])
@pytest.mark.parametrize("lengths", [[7], [3, 9], [0, 5], [4, 0, 1, 0], [9, 8, 7, 6, 5, 4, 3, 2]])
def test_merged_shards_are_attention_over_all_tokens(lengths: list[int], base2: bool) -> None:
    outs, lses, (expected, expected_lse) = shards(lengths)
    unit = np.log(2) if base2 else 1.0
    out, lse = merge_on_mesh(np.float32(outs), np.float32(lses / unit), base2=base2)
    np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
    np.testing.assert_allclose(lse * unit, expected_lse, rtol=2e-6)


@pytest.mark.parametrize("none", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, 7.0])
def test_an_empty_shard_contributes_nothing(none: float, rubbish: float) -> None:
    """Whatever a kernel reports for no tokens, the result has the bits of the only other shard."""
    outs, lses, _ = shards([5, 0])
    outs[1], lses[1] = rubbish, none
    out, lse = merge_on_mesh(np.float32(outs), np.float32(lses))
    np.testing.assert_array_equal(out, np.float32(outs[0]))
    np.testing.assert_array_equal(lse, np.float32(lses[0]))


@pytest.mark.parametrize("none", [-np.inf, np.inf, np.nan])
def test_no_tokens_at_all_give_zero(none: float) -> None:
    out, lse = merge_on_mesh(
        np.full((2, 4, 16), np.nan, np.float32), np.full((2, 4), none, np.float32)
    )
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_one_head_may_be_empty_where_another_is_not() -> None:
    outs, lses, (expected, _) = shards([5, 6])
    outs[1, 3], lses[1, 3] = np.nan, np.nan
    out, _ = merge_on_mesh(np.float32(outs), np.float32(lses))
    np.testing.assert_array_equal(out[3], np.float32(outs[0, 3]))
    others = np.arange(len(expected)) != 3
    np.testing.assert_allclose(out[others], expected[others], atol=2e-6, rtol=0)


@pytest.mark.parametrize("base2", [False, True])
def test_large_scores_do_not_overflow(base2: bool) -> None:
    outs, lses, (expected, _) = shards([5, 6])
    unit = np.log(2) if base2 else 1.0
    for shift in (-3e4, 3e4):
        out, lse = merge_on_mesh(np.float32(outs), np.float32((lses + shift) / unit), base2=base2)
        assert np.isfinite(lse).all()
        np.testing.assert_allclose(out, expected, atol=0.02, rtol=0)  # FP32 steps of 1/256 in lse


def test_bf16_is_merged_in_float32() -> None:
    outs, lses, _ = shards([5, 6, 7, 8])
    halves = jnp.asarray(outs, jnp.bfloat16)
    out, lse = merge_on_mesh(halves, np.float32(lses))
    weights = np.exp(lses - lses.max(axis=0))
    exact = (weights[..., None] * np.asarray(halves).astype(np.float64)).sum(axis=0) / weights.sum(
        axis=0
    )[:, None]
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=2**-8 * 1.01, atol=1e-6)


def test_results_merge_again() -> None:
    """Twice two ranks, for example of two kinds of cache, are four."""
    outs, lses, (expected, _) = shards([5, 0, 7, 8])
    pairs = [
        merge_on_mesh(np.float32(outs[i : i + 2]), np.float32(lses[i : i + 2])) for i in (0, 2)
    ]
    out, _ = merge_on_mesh(*(np.stack(part) for part in zip(*pairs, strict=True)))
    np.testing.assert_allclose(out, expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("outs", "lses", "error", "names"),
    [
        (((2, 4, 8), "i4"), ((2, 4), "f4"), TypeError, ("outs", "floats", "int32")),
        (((2, 4, 8), "f4"), ((2, 4), "i4"), TypeError, ("lses", "floats", "int32")),
        (((2, 4, 8), "f4"), ((4, 2), "f4"), ValueError, ("lses", "[2, 4]", "[4, 2]")),
        (((4,), "f4"), ((), "f4"), ValueError, ("outs", "[..., heads, columns]", "[4]")),
        (((2, 3, 8), "f4"), ((2, 3), "f4"), ValueError, ("outs", "2 ranks", "'dcp'", "3 heads")),
    ],
    ids=["outs type", "lses type", "lses shape", "outs shape", "heads"],
)
def test_wrong_merge_arguments_are_named(
    outs: Any, lses: Any, error: type[Exception], names: tuple[str, ...]
) -> None:
    mesh = cpu_mesh(2, "dcp")

    def body(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dcp.merge(out, lse, "dcp")

    merge = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(None, "dcp"))
    with pytest.raises(error) as raised:
        jax.eval_shape(merge, jax.ShapeDtypeStruct(*outs), jax.ShapeDtypeStruct(*lses))
    assert all(name in str(raised.value) for name in names), str(raised.value)


def test_the_documentation_is_whole_and_runs() -> None:
    for module in (ownership, inspect.getmodule(dcp.merge)):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
    for name in dcp.__all__:
        function = getattr(dcp, name)
        explained = re.findall(r"^ {8}(\w+): ", function.__doc__, re.MULTILINE)
        assert set(inspect.signature(function).parameters) <= set(explained), name
