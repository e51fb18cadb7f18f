"""Rotated queries, other dtypes and cache rows, the query latent, and other models' sizes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from meshes import (
    AXES,
    BATCH,
    SCALES,
    assert_same,
    cpu_mesh,
    exact_inputs,
    mesh_slots,
    place,
)

import jax_mla
from jax_mla import MeshAxes, reference, testing
from jax_mla.formats import CACHE_FORMATS, STYLES, CacheFormat
from jax_mla.geometry import GEOMETRIES, Geometry
from jax_mla.testing import bytes_of, make_inputs

BF16, E4M3 = jnp.bfloat16, jnp.float8_e4m3fn
by_name = pytest.mark.parametrize("cache", CACHE_FORMATS, ids=lambda stored: stored.name)


def absorb(inputs: dict[str, Any], **options: Any) -> Any:
    return jax_mla.q_absorb(**inputs, **options)


def check(inputs: dict[str, Any], q_dtype: Any = None, **scales: Any) -> None:
    expected = testing.oracle(inputs, q_dtype=q_dtype, **scales)
    q, cache, q_latent = absorb(inputs, q_dtype=q_dtype, return_q_norm=True, **scales)
    testing.check_query(q, expected)
    testing.check_cache(cache, expected)
    testing.check_q_latent(q_latent, expected)


@by_name
@pytest.mark.parametrize("style", [None, *STYLES])
def test_every_form_agrees_with_float64(style: str | None, cache: CacheFormat) -> None:
    for q_dtype in cache.q_dtypes:
        inputs = make_inputs(19, 3, rope=style, cache=cache.name, seed=len(q_dtype))
        check(inputs, q_dtype)


@pytest.mark.parametrize(
    ("heads", "style", "cache", "seed"),
    [(24, "interleaved", "e4m3", 24), (64, "half", "bf16", 65)],
)
def test_pairs_that_cancel_agree_with_float64(
    heads: int, style: str, cache: str, seed: int
) -> None:
    """Rotated values of 1/15 of the RMS that are two e4m3 steps, or 1/60 of it as BF16, away."""
    inputs = make_inputs(67, heads, pages=5, page_size=37, rope=style, cache=cache, seed=seed)
    check(inputs, **({"q_scale": 0.8, "k_scale": 0.9} if cache == "e4m3" else {}))


@by_name
@pytest.mark.parametrize("model", GEOMETRIES, ids=lambda geometry: geometry.name)
def test_every_model_agrees_with_float64(model: Geometry, cache: CacheFormat) -> None:
    inputs = make_inputs(9, 2, rope="interleaved", cache=cache.name, model=model.name, page_size=7)
    check(inputs)
    scales = {"q_scale": 0.02, "k_scale": 0.3}
    check(make_inputs(5, 2, rope="half", model=model.name, columns=4000), **scales)


def test_geometries_are_told_apart_by_the_weights() -> None:
    assert len({(size.q_rank, size.kv_rank, size.nope) for size in GEOMETRIES}) == len(GEOMETRIES)


def test_positions_outside_of_the_table_count_as_its_ends() -> None:
    inputs = make_inputs(4, 2, rope="half")
    rope = inputs["rope"]
    last = rope.cos_sin.shape[0] - 1
    beyond = rope.at(jnp.array([-(2**31), -1, last + 1, 2**31 - 1], jnp.int32))
    ends = rope.at(jnp.array([0, 0, last, last], jnp.int32))
    assert_same(absorb(inputs | {"rope": beyond}), absorb(inputs | {"rope": ends}))


def test_a_rotation_by_nothing_changes_nothing() -> None:
    inputs = make_inputs(4, 2, rope="half")
    still = jnp.concatenate([jnp.ones((1, 32)), jnp.zeros((1, 32))], axis=1)
    for style in STYLES:
        rope = jax_mla.Rope(still, inputs["rope"].positions, style)
        assert_same(absorb(inputs | {"rope": rope}), absorb(inputs | {"rope": None}))


def test_styles_differ_by_a_permutation_of_columns() -> None:
    inputs = make_inputs(6, 1, rope="interleaved")
    order = np.arange(64).reshape(32, 2).T.ravel()  # the columns 2i, then the columns 2i + 1
    head, key = np.r_[:128, 128 + order], np.r_[:2048, 2048 + order]
    row = np.r_[:512, 512 + order]
    permuted = inputs | {
        "w_qb": inputs["w_qb"][head],
        "qkv": inputs["qkv"][:, key],
        "cache": inputs["cache"][:, :, row],
        "rope": replace(inputs["rope"], style="half"),
    }
    q, cache = absorb(inputs)
    assert_same(absorb(permuted), (q[:, :, row], cache[:, :, row]))


def test_scores_depend_on_the_distance_of_positions_only() -> None:
    x = reference._round_to_bf16(jax.random.normal(jax.random.key(0), (2, 64)))
    for style in STYLES:
        rope = jax_mla.Rope.default(max_positions=400, style=style)

        def score(query: int, key: int, rope: jax_mla.Rope = rope) -> float:
            turned = reference.rotate(x, rope.cos_sin[jnp.array([query, key])], rope.style)
            return float(turned[0] @ turned[1])

        assert abs(score(317, 300) - score(17, 0)) < 0.1 < abs(score(317, 300) - score(317, 301))


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 2.0**-13),
        (448 * 2.0**-13, 2.0**-13),
        (450 * 2.0**-13, 2.0**-12),
        (448.0, 1.0),
        (450.0, 2.0),  # the next BF16 value
        (3.0e38, 2.0**120),
        (float("nan"), 2.0**-13),
        (float("inf"), 2.0**-13),
    ],
)
def test_scales_of_tiles_are_the_smallest_powers_of_two_that_fit(
    largest: float, scale: float
) -> None:
    tiles = jnp.zeros((1, 4, 128), jnp.float32).at[0, 2, 77].set(-largest)
    assert reference.tile_scales(tiles).tolist() == [[2.0**-13, 2.0**-13, scale, 2.0**-13]]


def test_bytes_of_a_row_of_fp8_ds_mla() -> None:
    """A latent of RMS 1 in one column: 512**0.5 in a tile of scale 1/16, other tiles empty."""
    inputs = make_inputs(1, 1, cache="fp8_ds_mla") | {"slots": jnp.array([0], jnp.int32)}
    qkv = jnp.zeros((1, 2112), BF16).at[0, 1536 + 130].set(-3).at[0, 2048:].set(0.3)
    given = {"qkv": qkv, "kv_norm": jnp.ones(512, BF16)}
    row = bytes_of(absorb(inputs | given, eps=0.0)[1])[0, 0]
    latent = np.zeros(512, np.float32)
    latent[130] = -np.float32(22.625) * 16  # BF16 of 512**0.5, in units of the scale
    np.testing.assert_array_equal(row[:512], bytes_of(latent.astype(E4M3)))
    assert row[512:528].view(np.float32).tolist() == [2.0**-13, 2.0**-4, 2.0**-13, 2.0**-13]
    assert set(row[528:].view(np.uint16)) == {0x3E9A}


@by_name
def test_a_nan_row_changes_no_other_row(cache: CacheFormat) -> None:
    inputs = make_inputs(5, 2, rope="half", cache=cache.name)
    q, stored, latent = absorb(inputs, return_q_norm=True)
    bad = inputs | {"qkv": inputs["qkv"].at[2].set(jnp.nan)}
    got_q, got, got_latent = absorb(bad, return_q_norm=True)
    others = np.arange(5) != 2
    assert_same((got_q[others], got_latent[others]), (q[others], latent[others]))
    assert np.isnan(np.asarray(got_latent[2], np.float32)).all()
    rows = np.delete(np.arange(got.shape[0] * got.shape[1]), inputs["slots"][2])
    assert_same(*([x.reshape(-1, x.shape[2])[rows]] for x in (got, stored)))


@by_name
def test_jit_scan_vmap_and_no_tokens(cache: CacheFormat) -> None:
    inputs = make_inputs(6, 2, rope="interleaved", cache=cache.name)
    rope = inputs["rope"]
    together = jax.jit(lambda given: absorb(given, return_q_norm=True))(inputs)
    assert_same(together, absorb(inputs, return_q_norm=True))
    expected = testing.oracle(inputs)

    def step(cache: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
        token = {"qkv": xs[0], "slots": xs[1], "rope": rope.at(xs[2])}
        q, cache, latent = absorb(inputs | token | {"cache": cache}, return_q_norm=True)
        return cache, (q, latent)

    lanes = [
        x.reshape(3, 2, *x.shape[1:]) for x in (inputs["qkv"], inputs["slots"], rope.positions)
    ]
    last, stacked = jax.jit(lambda xs: jax.lax.scan(step, inputs["cache"], xs))(lanes)
    mapped = jax.vmap(lambda xs: step(inputs["cache"], xs), in_axes=0, out_axes=(None, 0))(lanes)
    for got_cache, got in ((last, stacked), mapped):
        q, latent = (x.reshape(6, *x.shape[2:]) for x in got)
        # Not bit for bit: XLA may sum in another order for another number of tokens.
        testing.check_query(q, expected)
        testing.check_cache(got_cache, expected)
        testing.check_q_latent(latent, expected)

    none = {"qkv": inputs["qkv"][:0], "slots": inputs["slots"][:0]}
    none_rope = {"rope": rope.at(rope.positions[:0])}
    q, stored, latent = absorb(inputs | none | none_rope, return_q_norm=True)
    assert (q.shape, q.dtype, latent.shape) == ((0, 2, 576), together[0].dtype, (0, 1536))
    np.testing.assert_array_equal(bytes_of(stored), bytes_of(inputs["cache"]))


def test_vmap_wants_each_lane_to_have_positions() -> None:
    inputs = make_inputs(6, 2, rope="interleaved")
    lanes = {name: inputs[name].reshape(3, 2, *inputs[name].shape[1:]) for name in ("qkv", "slots")}
    rope = inputs["rope"].at(inputs["rope"].positions[:2])
    with pytest.raises(NotImplementedError, match=r"positions, qkv, slots mapped .*got qkv, slots"):
        jax.vmap(lambda lane: absorb(inputs | lane | {"rope": rope}))(lanes)


def quarter_turns(style: str) -> jax_mla.Rope:
    """A table of exact rotations, by 0, 90, 180 or 270 degrees."""
    turns = np.random.default_rng(7).integers(0, 4, (50, 32))
    cos, sin = np.array([1, 0, -1, 0])[turns], np.array([0, 1, 0, -1])[turns]
    table = np.concatenate([cos, sin], axis=1, dtype=np.float32)
    return jax_mla.Rope(table, np.arange(BATCH, dtype=np.int32), style)


@pytest.mark.parametrize("style", STYLES)
def test_a_mesh_gives_the_bytes_of_one_device(style: str) -> None:
    mesh, rope = cpu_mesh(), quarter_turns(style)
    one = exact_inputs() | {"slots": mesh_slots(1, 1)[0], "rope": rope}
    expected = absorb(one, return_q_norm=True, **SCALES)
    assert (bytes_of(expected[0]) != bytes_of(absorb(one | {"rope": None}, **SCALES)[0])).any()

    # Every rank stores into its own pages: compare the rows that are stored.
    inputs = exact_inputs() | {"slots": mesh_slots(2, 2)}
    placed = place(inputs, AXES, mesh)
    at = AXES.shardings(mesh)
    placed["rope"] = jax_mla.Rope(
        jax.device_put(rope.cos_sin, at.cos_sin),
        jax.device_put(rope.positions, at.positions),
        style,
    )
    with jax.set_mesh(mesh):
        step = jax.jit(lambda given: absorb(given, axes=AXES, return_q_norm=True, **SCALES))
        q, cache, latent = step(placed)
    assert_same((q, latent), (expected[0], expected[2]))
    assert latent.sharding.is_equivalent_to(at.q_latent, 2)
    blocks = bytes_of(cache).reshape(2, 2, -1, 576)  # batch shard, rank, row
    reference_rows = bytes_of(expected[1]).reshape(-1, 576)
    for rank, slots in enumerate(inputs["slots"]):
        for token in np.flatnonzero((slots >= 0) & (one["slots"] >= 0)):
            row = blocks[token // (BATCH // 2), rank, slots[token]]
            np.testing.assert_array_equal(row, reference_rows[one["slots"][token]])


@by_name
def test_gathered_queries_keep_their_dtype_and_latents_their_type(cache: CacheFormat) -> None:
    mesh = cpu_mesh()
    inputs = make_inputs(4, 8, rope="half", cache=cache.name, pages=8, page_size=4)
    slots = np.full((2, 4), -1, np.int32)
    expected = absorb(inputs | {"slots": slots[0]}, return_q_norm=True)
    axes = MeshAxes(heads="tp", dcp="dcp", mesh=mesh)
    results = jax.jit(lambda given: absorb(given, axes=axes, return_q_norm=True))(
        inputs | {"slots": slots}
    )
    assert [x.dtype for x in results] == [x.dtype for x in expected]
    testing.check_query(results[0], testing.oracle(inputs))
    assert_same(results[1:], expected[1:])
    specs = MeshAxes(batch="dp", heads="tp").specs(mesh)
    assert (specs.cos_sin, specs.positions, specs.q_latent) == (P(), P("dp"), P("dp"))


@by_name
def test_a_program_with_a_rope_among_its_arguments_is_saved(cache: CacheFormat) -> None:
    inputs = make_inputs(3, 2, rope="half", cache=cache.name)
    step = jax.jit(lambda given: absorb(given, return_q_norm=True))
    checks = jax_mla.export_checks()
    exported = jax.export.export(step, platforms=("cpu",), disabled_checks=checks)(inputs)
    again = jax.export.deserialize(exported.serialize())
    assert_same(again.call(inputs), step(inputs))
