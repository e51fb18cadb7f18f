"""What a sharded decode step compiles to: its collectives, copies, donation and custom calls."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from meshes import (
    AXES,
    NAMES,
    PAGE_SIZE,
    PAGES,
    SCALES,
    SHAPES,
    Inputs,
    assert_same,
    cpu_mesh,
    exact_inputs,
    mesh_slots,
    model,
    place,
)

import jax_mla

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)

Step = Callable[..., tuple[jax.Array, jax.Array]]


def with_axes(mesh: Any) -> Step:
    return functools.partial(jax_mla.q_absorb, **SCALES, axes=replace(AXES, mesh=mesh))


def with_dcp_axis(mesh: Any) -> Step:
    """The same from the user's own shard_map."""
    specs = AXES.specs(mesh)
    names = list(exact_inputs())

    def local(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        given: Inputs = dict(zip(names, arrays, strict=True))
        given["slots"] = given["slots"][0]
        return jax_mla.q_absorb(**given, **SCALES, dcp_axis="dcp")

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(getattr(specs, name) for name in names),
        out_specs=(specs.q, specs.cache),
    )
    return lambda **given: mapped(*(given[name] for name in names))


def operations(text: str, name: str) -> list[str]:
    """Lines with an operation of compiled text, or the start of one that runs beside others."""
    return re.findall(rf"^.* = .* {name}(?:-start)?\(.*$", text, re.MULTILINE)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("step_on", [with_axes, with_dcp_axis])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_gathers_queries_and_moves_nothing_else(
    shape: tuple[int, int, int], step_on: Callable[[Any], Step], kind: AxisType
) -> None:
    batch_shards, head_shards, ranks = shape
    mesh = cpu_mesh(shape, kind)
    inputs = exact_inputs() | {"slots": mesh_slots(batch_shards, ranks)}
    given = place(inputs, AXES, mesh)
    step = jax.jit(step_on(mesh), donate_argnames="cache").lower(**given).compile()
    text = step.as_text() or ""
    found = {name: lines for name in COLLECTIVES if (lines := operations(text, name))}
    if ranks == 1:
        assert not found
    else:
        assert {name: len(lines) for name, lines in found.items()} == {"all-gather": 1}
        gathered = f"u8[{16 // batch_shards},{8 // head_shards},576]"
        assert gathered in found["all-gather"][0]
    pages = PAGES // (batch_shards * ranks)
    cache = re.compile(rf"\[({pages},{PAGE_SIZE}|{pages * PAGE_SIZE}),576\]")
    assert not [line for line in operations(text, "copy") if cache.search(line)]
    assert "input_output_alias={ {1}: (0, {}, may-alias) }" in text
    # JAX may use numpy's memory for an array made from it, and then donates a copy.
    given["cache"] = jnp.array(given["cache"], copy=True)
    places = addresses(given["cache"])
    results = step(**given)
    assert given["cache"].is_deleted()
    assert addresses(results[1]) == places
    assert_same(results, model(inputs, batch_shards, ranks))


def addresses(array: jax.Array) -> dict[Any, int]:
    return {part.device: part.data.unsafe_buffer_pointer() for part in array.addressable_shards}


def lowered_for_cuda(shape: tuple[int, ...], kind: AxisType) -> str:
    """The step for GPUs that nobody has."""
    mesh = AbstractMesh(shape, NAMES, axis_types=(kind,) * 3)
    inputs: Inputs = exact_inputs() | {"slots": mesh_slots(shape[0], shape[2])}
    shardings = AXES.shardings(mesh)
    with jax.sharding.use_abstract_mesh(mesh):
        given = {
            name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(shardings, name))
            for name, a in inputs.items()
        }
        step = functools.partial(jax_mla.q_absorb, **SCALES, axes=AXES)
        traced = jax.jit(step, donate_argnames="cache").trace(**given)
        return str(traced.lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="lowering looks at the GPUs of the process"
)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_program_for_gpus_is_one_call_a_device(
    shape: tuple[int, int, int], kind: AxisType
) -> None:
    batch_shards, head_shards, ranks = shape
    text = lowered_for_cuda(shape, kind)
    calls = [line for line in text.splitlines() if "@jax_mla_q_absorb(" in line]
    assert len(calls) == 1
    pages, batch = PAGES // (batch_shards * ranks), 16 // batch_shards
    heads = 8 // (head_shards * ranks)
    cache = f"tensor<{pages}x{PAGE_SIZE}x576xf8E4M3FN>"
    assert "output_tuple_indices = [1], operand_index = 5" in calls[0]
    assert calls[0].endswith(f" -> (tensor<{batch}x{heads}x576xf8E4M3FN>, {cache})")
    used = re.findall(r"= \"?stablehlo\.(\w+)", text)
    # Slots lose their rank's axis; queries travel as bytes.
    assert set(used) <= {"constant", "custom_call", "reshape", "bitcast_convert", "all_gather"}
    assert used.count("all_gather") == (ranks > 1)
    assert len(re.findall(r"jax\.buffer_donor = true|tf\.aliasing_output = 1", text)) == 1


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_a_sharded_step_is_exported(platform: str) -> None:
    mesh = cpu_mesh()
    inputs = exact_inputs() | {"slots": mesh_slots(2, 2)}
    given = place(inputs, AXES, mesh)
    exported = jax.export.export(
        jax.jit(with_axes(mesh), donate_argnames="cache"),
        platforms=[platform],
        disabled_checks=jax_mla.export_checks(),
    )(**given)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.nr_devices == 8
    if platform == "cuda":
        assert loaded.mlir_module().count("@jax_mla_q_absorb(") == 1
        return
    again = jax.jit(loaded.call, donate_argnames="cache")
    assert "input_output_alias={ {1}: " in (again.lower(**given).compile().as_text() or "")
    assert_same(again(**given), model(inputs, 2, 2))


def test_the_result_of_a_step_is_laid_out_for_the_next() -> None:
    """The cache goes round; attention's layout of q is that of the heads' tensor parallelism."""
    mesh = cpu_mesh(kind=AxisType.Explicit)
    inputs = exact_inputs() | {"slots": mesh_slots(2, 2)}
    given = place(inputs, AXES, mesh)
    step = with_axes(mesh)

    @jax.jit
    def twice(arrays: Inputs) -> tuple[jax.Array, jax.Array]:
        _, cache = step(**arrays)
        return step(**arrays | {"cache": cache})

    assert_same(twice(given), model(inputs, 2, 2))
    q, cache = jax.eval_shape(step, **given)
    assert q.sharding == NamedSharding(mesh.abstract_mesh, jax.P("dp", "tp", None))
    assert cache.sharding == NamedSharding(mesh.abstract_mesh, jax.P(("dp", "dcp"), None, None))
