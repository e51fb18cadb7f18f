"""Inside the user's own shard_map: types that tell along which axes results differ, and bytes."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from meshes import (
    AXES,
    NAMES,
    SCALES,
    SHAPES,
    Inputs,
    assert_same,
    cpu_mesh,
    exact_inputs,
    mesh_slots,
    model,
)

import jax_mla

GATHERED = P("dp", "tp"), P(("dp", "dcp"))


def own_slots(inputs: Inputs) -> Inputs:
    return inputs | {"slots": inputs["slots"][0]}


def absorb(
    inputs: Inputs, dcp_axis: str | None = "dcp", **options: Any
) -> tuple[jax.Array, jax.Array]:
    return jax_mla.q_absorb(**own_slots(inputs), **SCALES | options, dcp_axis=dcp_axis)


def mapped(
    call: Callable[..., Any], mesh: Any, out_specs: Any = GATHERED, **options: Any
) -> Callable[..., Any]:
    specs = AXES.specs(mesh)
    in_specs = {name: getattr(specs, name) for name in exact_inputs()}
    return jax.shard_map(call, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, **options)


@pytest.fixture
def inputs() -> Inputs:
    return exact_inputs() | {"slots": mesh_slots(2, 2)}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_heads_are_in_order_of_ranks(shape: tuple[int, int, int], check_vma: bool) -> None:
    batch_shards, _, ranks = shape
    inputs = exact_inputs() | {"slots": mesh_slots(batch_shards, ranks)}
    step = jax.jit(mapped(absorb, cpu_mesh(shape), check_vma=check_vma))
    assert_same(step(inputs), model(inputs, batch_shards, ranks))


def test_every_rank_holds_all_heads_of_its_group(inputs: Inputs) -> None:
    """Each device's q, one after another along the heads."""

    def ranks_apart(given: Inputs) -> Any:
        q, _ = absorb(given)
        return jax.lax.pcast(q, "dcp", to="varying")

    queries = jax.jit(mapped(ranks_apart, cpu_mesh(), P("dp", ("dcp", "tp"))))(inputs)
    expected, _ = model(inputs, 2, 2)
    assert_same([queries], [np.concatenate([expected, expected], axis=1)])


def test_without_an_axis_nothing_is_gathered(inputs: Inputs) -> None:
    call = functools.partial(absorb, dcp_axis=None)
    own_heads = P("dp", ("tp", "dcp")), GATHERED[1]
    text = jax.jit(mapped(call, cpu_mesh(), own_heads)).lower(inputs).compile().as_text()
    assert "all-gather" not in (text or "all-gather")
    assert_same(jax.jit(mapped(call, cpu_mesh(), own_heads))(inputs), model(inputs, 2, 2))


def test_eager_scan_and_vmap_gather_too(inputs: Inputs) -> None:
    expected = model(inputs, 2, 2)
    assert_same(mapped(absorb, cpu_mesh())(inputs), expected)

    def scanned(given: Inputs) -> tuple[jax.Array, jax.Array]:
        def step(cache: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            q, cache = absorb(given | {"cache": cache})
            return cache, q

        cache, queries = jax.lax.scan(step, given["cache"], length=2)
        return queries[1], cache

    def mapped_lanes(given: Inputs) -> tuple[jax.Array, jax.Array]:
        def lane(qkv: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
            return absorb(given | {"qkv": qkv, "slots": slots[None]})

        lanes = given["qkv"].reshape(2, 4, -1), given["slots"].reshape(2, 4)
        q, cache = jax.vmap(lane, out_axes=(0, None))(*lanes)
        return q.reshape(8, *q.shape[2:]), cache

    for call in (scanned, mapped_lanes):
        assert_same(jax.jit(mapped(call, cpu_mesh()))(inputs), expected)


def abstract(shape: tuple[int, ...] = (2, 2, 2)) -> AbstractMesh:
    return AbstractMesh(shape, NAMES, axis_types=(AxisType.Auto,) * 3)


def avals(inputs: Inputs, ranks: int = 2) -> Inputs:
    given = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs.items()}
    return given | {"slots": jax.ShapeDtypeStruct((ranks, inputs["qkv"].shape[0]), jnp.int32)}


@pytest.mark.parametrize("shape", [(2, 2, 2), (2, 4, 1)], ids=str)
def test_out_specs_that_would_return_one_ranks_data_are_refused(
    inputs: Inputs, shape: tuple[int, ...]
) -> None:
    """One rank is no exception: a program must not break when it gets more."""
    given = avals(inputs, shape[2])
    q, cache = jax.eval_shape(mapped(absorb, abstract(shape)), given)
    assert (q.shape, cache.shape) == ((16, 8, 576), (16, 10, 576))
    q_spec, cache_spec = GATHERED
    for wrong in (
        (P("dp"), cache_spec),
        (P(None, "tp"), cache_spec),
        (q_spec, P("dp")),
        (q_spec, P("dcp")),
        (q_spec, P()),
    ):
        with pytest.raises(ValueError, match="out_specs"):
            jax.eval_shape(mapped(absorb, abstract(shape), wrong), given)
    ungathered = functools.partial(absorb, dcp_axis=None)
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(mapped(ungathered, abstract(shape)), given)


def varying_axes(inputs: Inputs, dcp_axis: str | None, varying: str) -> list[set[str]]:
    """Axes along which q and cache differ where one argument differs along all, no other does."""
    found: list[set[str]] = []

    def call(given: Inputs) -> None:
        given = own_slots(given) | {name: jnp.float32(1) for name in SCALES}
        given[varying] = jax.lax.pcast(given[varying], NAMES, to="varying")
        results = jax_mla.q_absorb(**given, dcp_axis=dcp_axis)
        found.extend(set(jax.typeof(x).manual_axis_type.varying) for x in results)

    in_specs = dict.fromkeys(inputs, P())
    jax.eval_shape(
        jax.shard_map(call, mesh=abstract(), in_specs=(in_specs,), out_specs=None), avals(inputs)
    )
    return found


@pytest.mark.parametrize(
    ("name", "cache_differs"),
    [
        ("qkv", True),
        ("q_norm", False),
        ("kv_norm", True),
        ("w_qb", False),
        ("w_uk", False),
        ("cache", True),
        ("slots", True),
        ("q_scale", False),
        ("k_scale", True),
    ],
)
def test_results_differ_along_the_axes_of_their_sources(
    inputs: Inputs, name: str, cache_differs: bool
) -> None:
    cache = set(NAMES) if cache_differs else set()
    assert varying_axes(inputs, "dcp", name) == [{"dp", "tp"}, cache]
    assert varying_axes(inputs, None, name) == [set(NAMES), cache]


def refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is checked below
        call()
    assert re.match(message, str(caught.value)), str(caught.value)


def test_dcp_axis_outside_of_shard_map_is_refused(inputs: Inputs) -> None:
    message = r"dcp_axis must be an axis of the jax\.shard_map around the call, got 'dcp' outside"
    message += r" of any\. For arrays of a whole mesh pass axes=MeshAxes\(dcp='dcp'\)"
    refused(message, lambda: absorb(inputs))
    with jax.set_mesh(cpu_mesh()):
        refused(message, lambda: jax.jit(absorb)(inputs))


@pytest.mark.parametrize("axis", ["model", ("tp", "dcp")])
def test_an_unknown_dcp_axis_is_refused(inputs: Inputs, axis: Any) -> None:
    call = mapped(functools.partial(absorb, dcp_axis=axis), abstract())
    message = (
        rf"dcp_axis must be one of the mesh axes 'dp', 'tp', 'dcp', got {re.escape(repr(axis))}\."
    )
    refused(message, lambda: jax.eval_shape(call, avals(inputs)))


@pytest.mark.parametrize("dcp_axis", ["dcp", None])
def test_a_partial_shard_map_is_refused(inputs: Inputs, dcp_axis: str | None) -> None:
    call = functools.partial(absorb, dcp_axis=dcp_axis)
    specs = P(), P("dcp")
    in_specs = dict.fromkeys(inputs, P()) | {"w_qb": P("dcp"), "w_uk": P("dcp"), "cache": P("dcp")}
    partial = jax.shard_map(
        call, mesh=cpu_mesh(), in_specs=(in_specs,), out_specs=specs, axis_names={"dcp"}
    )
    message = r"jax\.shard_map around q_absorb must map all mesh axes, got 'dp', 'tp' left to"
    message += r" the compiler.*\. Leave out axis_names"
    refused(message, lambda: jax.jit(partial)(inputs))


def test_nested_maps_that_cover_the_mesh_are_fine(inputs: Inputs) -> None:
    specs = AXES.specs(cpu_mesh())
    inner_specs = {
        name: P() if name in ("qkv", "q_norm", "kv_norm") else getattr(specs, name)
        for name in inputs
    } | {"cache": P("dcp"), "slots": P("dcp")}

    def outer(given: Inputs) -> Any:
        inner = jax.shard_map(
            absorb,
            in_specs=(inner_specs,),
            out_specs=(P(None, "tp"), P("dcp")),
            axis_names={"tp", "dcp"},
        )
        return inner(given)

    outer_specs = dict.fromkeys(inputs, P()) | {
        "qkv": P("dp"), "cache": P("dp"), "slots": P(None, "dp"),
    }  # fmt: skip
    with jax.set_mesh(cpu_mesh()):
        step = jax.shard_map(
            outer, in_specs=(outer_specs,), out_specs=(P("dp"), P("dp")), axis_names={"dp"}
        )
        assert_same(jax.jit(step)(inputs), model(inputs, 2, 2))
