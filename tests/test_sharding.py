"""Calls on the arrays of a whole mesh, bit for bit against NumPy, and what is refused."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from meshes import (
    AXES,
    BATCH,
    HEADS,
    NAMES,
    SCALES,
    SHAPES,
    Inputs,
    assert_same,
    bytes_of,
    cpu_mesh,
    exact_inputs,
    mesh_slots,
    model,
    place,
)

import jax_mla
from jax_mla import MeshAxes, config

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


@pytest.fixture
def inputs() -> Inputs:
    """For a mesh of 2 x 2 x 2 with all axes named."""
    return exact_inputs() | {"slots": mesh_slots(2, 2)}


def absorb(inputs: Inputs, axes: MeshAxes | None = AXES, **options: Any) -> Any:
    return jax_mla.q_absorb(**inputs, **SCALES, axes=axes, **options)


def test_sums_of_exact_inputs_have_no_order() -> None:
    inputs = exact_inputs() | {"slots": mesh_slots(1, 1)[0]}
    assert_same(jax_mla.q_absorb(**inputs, **SCALES), model(inputs, 1, 1))
    query = model(inputs, 1, 1)[0]
    assert len(np.unique(query)) > 100


@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mesh_gives_the_bytes_of_one_device(shape: tuple[int, int, int], kind: AxisType) -> None:
    batch_shards, _, ranks = shape
    mesh = cpu_mesh(shape, kind)
    inputs = exact_inputs() | {"slots": mesh_slots(batch_shards, ranks)}
    expected = model(inputs, batch_shards, ranks)
    with jax.set_mesh(mesh):
        q, cache = jax.jit(absorb)(place(inputs, AXES, mesh))
    assert_same((q, cache), expected)
    shardings = AXES.shardings(mesh)
    assert q.sharding.is_equivalent_to(shardings.q, 3)
    assert cache.sharding.is_equivalent_to(shardings.cache, 3)


@KINDS
@pytest.mark.parametrize("in_context", [True, False], ids=["set_mesh", "mesh="])
@pytest.mark.parametrize("placed", [True, False], ids=["placed", "whole"])
@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_arrays_may_be_placed_or_whole_in_jit_or_not(
    inputs: Inputs,
    kind: AxisType,
    in_context: bool,
    placed: bool,
    transform: Callable[..., Any],
) -> None:
    mesh = cpu_mesh(kind=kind)
    given = place(inputs, AXES, mesh) if placed else {n: jnp.asarray(a) for n, a in inputs.items()}
    axes = AXES if in_context else replace(AXES, mesh=mesh)
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        got = transform(lambda arrays: absorb(arrays, axes))(given)
    assert_same(got, model(inputs, 2, 2))


@KINDS
@pytest.mark.parametrize(
    "axes",
    [
        MeshAxes(),
        MeshAxes(batch="dp"),
        MeshAxes(heads="tp"),
        MeshAxes(dcp="dcp"),
        MeshAxes(batch="dp", heads="tp"),
        MeshAxes(batch="dp", dcp="dcp"),
        MeshAxes(heads="tp", dcp="dcp"),
        MeshAxes(batch=("dp", "dcp"), heads="tp"),
        MeshAxes(heads=("tp", "dp"), dcp="dcp"),
    ],
    ids=lambda axes: f"{axes.batch}-{axes.heads}-{axes.dcp}",
)
def test_any_axes_may_be_named(axes: MeshAxes, kind: AxisType) -> None:
    mesh = cpu_mesh(kind=kind)
    shards: dict[Any, int] = {None: 1, "dp": 2, ("dp", "dcp"): 4}
    batch_shards = shards[axes.batch]
    ranks = 2 if axes.dcp else 1
    slots = mesh_slots(batch_shards, ranks)
    inputs = exact_inputs() | {"slots": slots if axes.dcp else slots[0]}
    with jax.set_mesh(mesh):
        got = jax.jit(lambda arrays: absorb(arrays, axes))(place(inputs, axes, mesh))
    assert_same(got, model(inputs, batch_shards, ranks))


def test_a_mesh_may_mix_automatic_and_explicit_axes(inputs: Inputs) -> None:
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = jax.make_mesh((2, 2, 2), NAMES, axis_types=kinds, devices=jax.devices("cpu")[:8])
    axes = replace(AXES, mesh=mesh)
    for given in (inputs, place(inputs, AXES, mesh)):
        got = jax.jit(lambda arrays: absorb(arrays, axes))(given)
        assert_same(got, model(inputs, 2, 2))
        assert_same(absorb(given, axes), model(inputs, 2, 2))


def test_traced_scales_wide_rows_and_no_tokens(inputs: Inputs) -> None:
    axes = replace(AXES, mesh=cpu_mesh())
    wide = inputs | {"qkv": np.pad(inputs["qkv"], ((0, 0), (0, 8)))}
    step = jax.jit(lambda arrays, scales: jax_mla.q_absorb(**arrays, **scales, axes=axes))
    scales = {name: jnp.float32(scale) for name, scale in SCALES.items()}
    assert_same(step(wide, scales), model(inputs, 2, 2))
    none = inputs | {"qkv": inputs["qkv"][:0], "slots": inputs["slots"][:, :0]}
    q, cache = absorb(none, axes)
    assert q.shape == (0, HEADS, 576)
    np.testing.assert_array_equal(bytes_of(cache), bytes_of(inputs["cache"]))


def test_specs_and_shardings_name_every_array() -> None:
    mesh = cpu_mesh()
    specs = AXES.specs(mesh)
    assert (specs.qkv, specs.q_norm, specs.kv_norm) == (P("dp"), P(), P())
    assert specs.w_qb == specs.w_uk == P(("tp", "dcp"))
    assert specs.cache == P(("dp", "dcp"))
    assert specs.slots == P("dcp", "dp")
    assert specs.q == P("dp", "tp")
    assert MeshAxes(batch="dp").specs(mesh).slots == P("dp")
    assert AXES.shardings(mesh).q == NamedSharding(mesh, P("dp", "tp"))
    assert replace(AXES, mesh=mesh).shardings() == AXES.shardings(mesh)
    with jax.set_mesh(mesh):
        assert AXES.specs() == specs
        assert AXES.shardings() == AXES.shardings(mesh)
        inside = []
        jax.jit(lambda: inside.append(AXES.shardings().q.spec))()
    assert inside == [specs.q]


def refused(message: str, call: Callable[[], Any], error: type[Exception] = ValueError) -> None:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert re.match(message, text), text
    assert re.search(r"got .+[.:] .+\.$", text), f"no finding or remedy in: {text}"


def test_axes_need_a_mesh_that_has_them(inputs: Inputs) -> None:
    none = r"MeshAxes must have a mesh, got none in context\. Call under jax\.set_mesh"
    refused(none, lambda: absorb(inputs))
    refused(none, lambda: jax.jit(absorb)(inputs))
    refused(none, AXES.specs)
    refused(none, AXES.shardings)
    unknown = MeshAxes(heads="model", mesh=cpu_mesh())
    message = r"MeshAxes must name axes of the mesh, 'dp', 'tp', 'dcp', got 'model'\. Leave out"
    refused(message, lambda: absorb(inputs, unknown))
    refused(message, unknown.shardings)


def test_an_axis_is_named_once_by_a_string() -> None:
    again = r"MeshAxes must name a mesh axis once, got 'dcp' again\. .* it is added .* the last\."
    refused(again, lambda: MeshAxes(heads=("dcp", "tp"), dcp="dcp"))
    refused(again, lambda: MeshAxes(batch="dcp", dcp="dcp"))
    wrong: Any
    for wrong in ({"dcp": ("tp", "dcp")}, {"heads": ["tp"]}, {"batch": 0}):
        message = r"MeshAxes must have names of mesh axes, got .+\. Pass strings"
        refused(message, functools.partial(MeshAxes, **wrong), TypeError)


def test_axes_and_dcp_axis_exclude_each_other(inputs: Inputs) -> None:
    message = r"dcp_axis must be None where axes are given, got 'dcp'\. .*MeshAxes\(dcp=\.\.\.\)"
    refused(message, lambda: absorb(inputs, dcp_axis="dcp"))


def test_axes_inside_of_shard_map_are_refused(inputs: Inputs) -> None:
    mesh = cpu_mesh()
    for names in ({*NAMES}, {"dp"}):
        mapped = jax.shard_map(
            absorb, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=names, check_vma=False
        )
        message = r"axes must be .* whole mesh, got them inside jax\.shard_map.*dcp_axis='dcp'"
        refused(message, functools.partial(jax.jit(mapped), inputs))


@pytest.mark.parametrize(
    ("axes", "name", "keep", "message"),
    [
        (AXES, "qkv", 15, r"qkv must have a multiple of 2 tokens, the size of .*'dp', got 15\."),
        (AXES, "w_uk", 6, r"w_uk must have a multiple of 4 heads, .* 'tp', 'dcp', got 6\."),
        (AXES, "cache", 10, r"cache must have a multiple of 4 pages, .* 'dp', 'dcp', got 10\."),
        (MeshAxes(heads="tp"), "w_uk", 7, r"w_uk must have a multiple of 2 heads, .*'tp', got 7"),
    ],
    ids=["tokens", "heads", "pages", "heads without dcp"],
)
def test_sizes_must_be_shared_out_evenly(
    inputs: Inputs, axes: MeshAxes, name: str, keep: int, message: str
) -> None:
    inputs[name] = inputs[name][:keep]
    inputs["w_qb"] = inputs["w_qb"][: 192 * inputs["w_uk"].shape[0]]
    inputs["slots"] = inputs["slots"][:, : inputs["qkv"].shape[0]]
    if not axes.dcp:
        inputs["slots"] = inputs["slots"][0]
    refused(message, lambda: absorb(inputs, replace(axes, mesh=cpu_mesh())))


def test_each_rank_has_a_row_of_slots(inputs: Inputs) -> None:
    axes = replace(AXES, mesh=cpu_mesh())
    message = r"slots must be \[D, B\] .* each of the 2 ranks of mesh axis 'dcp', got \[{}\]\. Use"
    refused(message.format(16), lambda: absorb(inputs | {"slots": inputs["slots"][0]}, axes))
    three = np.concatenate([inputs["slots"], inputs["slots"][:1]])
    refused(message.format("3, 16"), lambda: absorb(inputs | {"slots": three}, axes))
    short = inputs | {"slots": inputs["slots"][:, :3]}
    refused(
        r"slots must be \[B\] with B as in qkv = \[16\], got \[3\]", lambda: absorb(short, axes)
    )
    wrong: Any
    for wrong in ([0] * BATCH, inputs["slots"].astype(np.int64)):
        given = inputs | {"slots": wrong}
        with pytest.raises(TypeError, match=r"slots must .* int32"):
            absorb(given, axes)
    without = MeshAxes(batch="dp", heads="tp", mesh=axes.mesh)
    refused(r"slots must be \[B\] .* got \[2, 16\]", lambda: absorb(inputs, without))


def test_limits_hold_for_each_device(inputs: Inputs) -> None:
    def avals(heads: int) -> Inputs:
        given = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs.items()}
        return given | {
            "w_qb": jax.ShapeDtypeStruct((heads * 192, 1536), jnp.bfloat16),
            "w_uk": jax.ShapeDtypeStruct((heads, 128, 512), jnp.bfloat16),
        }

    axes = replace(AXES, mesh=cpu_mesh())
    q, _ = jax.eval_shape(lambda arrays: absorb(arrays, axes), avals(512))
    assert q.shape == (BATCH, 512, 576)
    message = r"w_uk must have 1 to 128 heads on a device, got 129\. .*more devices\."
    refused(message, lambda: jax.eval_shape(lambda arrays: absorb(arrays, axes), avals(516)))


WRONG_LAYOUTS = [
    ("w_qb", P(("dcp", "tp"))),
    ("w_uk", P("tp")),
    ("w_uk", P(None, "tp")),
    ("cache", P("dp")),
    ("cache", P(("dcp", "dp"))),
    ("qkv", P("dp", "tp")),
    ("slots", P(None, "dp")),
    ("q_norm", P("tp")),
]


@KINDS
@pytest.mark.parametrize(("name", "spec"), WRONG_LAYOUTS, ids=str)
def test_arrays_split_otherwise_are_refused(
    inputs: Inputs, name: str, spec: P, kind: AxisType
) -> None:
    mesh = cpu_mesh(kind=kind)
    given = place(inputs, AXES, mesh)
    given[name] = jax.device_put(inputs[name], NamedSharding(mesh, spec))
    wanted = getattr(AXES.specs(mesh), name)
    message = (
        rf"{name} must be split as {re.escape(str(wanted))}, got P.*: a step would have to move"
    )
    last = ", which splits by dcp last" if len(wanted) else ""
    message += rf".*axes\.shardings\(\)\.{name} says{last}\.$"
    axes = replace(AXES, mesh=mesh)
    refused(message, lambda: absorb(given, axes))
    captured = given.pop(name)
    refused(message, lambda: jax.jit(lambda rest: absorb(rest | {name: captured}, axes))(given))
    if kind == AxisType.Explicit:
        given[name] = captured
        refused(message, lambda: jax.jit(lambda arrays: absorb(arrays, axes))(given))


@KINDS
def test_axes_of_one_device_split_nothing(kind: AxisType) -> None:
    """A layout may or may not name them."""
    mesh = cpu_mesh((1, 8, 1), kind)
    inputs = exact_inputs() | {"slots": mesh_slots(1, 1)}
    given = place(inputs, AXES, mesh)
    for name, spec in (("w_qb", P("tp")), ("cache", P()), ("qkv", P(None, "dcp"))):
        given[name] = jax.device_put(inputs[name], NamedSharding(mesh, spec))
    axes = replace(AXES, mesh=mesh)
    for transformed in (absorb, jax.jit(absorb, static_argnums=1)):
        assert_same(transformed(given, axes), model(inputs, 1, 1))


def test_an_array_of_a_mesh_without_axes_is_refused(inputs: Inputs) -> None:
    given = inputs | {"slots": inputs["slots"][0]}
    mesh = cpu_mesh()
    given["w_uk"] = jax.device_put(inputs["w_uk"], NamedSharding(mesh, P("tp")))
    message = r"w_uk must be whole on each device, got it sharded as P.*'tp'.*\. Name .*axes="
    refused(message, lambda: absorb(given, None))


def test_slots_beyond_a_device_are_reported_on_request(
    inputs: Inputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """40 rows are a device's, of the 160 of the mesh."""
    slots = np.full((2, BATCH), -1, np.int32)
    slots[1, 9] = 40
    monkeypatch.setattr(config, "OPTIONS", config.Options(check_slots=True))
    axes = replace(AXES, heads=None, mesh=cpu_mesh((2, 1, 2)))
    with caplog.at_level(logging.WARNING, "jax_mla"):
        jax.block_until_ready(jax.jit(lambda a: absorb(a, axes))(inputs | {"slots": slots}))
        jax.effects_barrier()
    assert {record.getMessage() for record in caplog.records} == {
        "slots must be below P * S = 40, got slots[1] = 40; 1 of 8 rows were not stored."
        " Use -1 for a row that must not be stored."
    }
