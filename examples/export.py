"""Exports the sharded call for GPUs on a machine without one, and loads it again.

The mesh is abstract while exporting: names and sizes of axes, no devices. The file runs on any mesh
of 8 devices, in a process that imports jax_mla and has none of the code below. Here it is loaded
again and its program must have one custom call, one gather of queries and the cache in place.

Then the exported call is run, on 8 GPUs or, exported once more for CPUs, on 8 made-up CPU devices.
It must give the bytes of the call itself; otherwise the exit status is 1. Saving an exported
program needs the package flatbuffers, which jax does not install.

    python examples/export.py
    python examples/export.py --out step.bin        # keeps the file for GPUs
"""

import argparse
import importlib.util
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_mla
from jax_mla import dcp
from jax_mla.testing import make_inputs

NAMES, SIZES, RANKS = ("data", "tensor", "dcp"), (2, 2, 2), 2
AXES = jax_mla.MeshAxes(batch="data", heads="tensor", dcp="dcp")
DEVICES = 8


@jax.jit(donate_argnames="cache")
def step(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The call to export, on the mesh in context; arguments as in jax_mla.q_absorb."""
    return jax_mla.q_absorb(
        qkv, q_norm, kv_norm, w_qb, w_uk, cache, slots, q_scale=0.02, k_scale=0.02, axes=AXES
    )


def example_arguments() -> dict[str, Any]:
    """Arguments of `step` by name: 8 heads, 16 pages of 16 rows, 4 tokens of 2 data shards."""
    arguments = make_inputs(4, 8, pages=16, page_size=16)
    block_tables = jnp.array([[0, 3], [1, 2], [2, 3], [1, 0]], jnp.int32)
    positions = jnp.array([0, 33, -1, 7], jnp.int32)
    return arguments | {"slots": dcp.local_slots(block_tables, positions, 16, RANKS)}


def export_step(arguments: Mapping[str, Any], platform: str) -> bytearray:
    """The call as a file for 8 devices of a platform, of which this machine needs none."""
    explicit = (jax.sharding.AxisType.Explicit,) * len(NAMES)
    mesh = jax.sharding.AbstractMesh(SIZES, NAMES, axis_types=explicit)
    shardings = AXES.shardings(mesh)
    types = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(shardings, name))
        for name, x in arguments.items()
    }
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(
            step, platforms=[platform], disabled_checks=jax_mla.export_checks()
        )(**types)
    return exported.serialize()


def is_right_for_gpus(exported: jax.export.Exported) -> bool:
    """Prints what is in the program; whether that is all that a step needs."""
    program = exported.mlir_module()
    calls = program.count("@jax_mla_q_absorb")
    gathers = program.count('"stablehlo.all_gather"')
    in_place = "jax.buffer_donor = true" in program and "output_operand_alias<" in program
    print(
        f"for {exported.nr_devices} {'/'.join(exported.platforms)} devices: {calls} custom call,"
        f" {gathers} gather, cache {'updated in place' if in_place else 'COPIED'}"
    )
    return (exported.nr_devices, calls, gathers, in_place) == (DEVICES, 1, 1, True)


def runs_right(exported: jax.export.Exported, arguments: Mapping[str, Any]) -> bool:
    """Prints the comparison; whether the loaded program gives the bytes of `step`."""
    devices = jax.devices(exported.platforms[0])[:DEVICES]
    mesh = jax.make_mesh(SIZES, NAMES, devices=devices)
    shardings = AXES.shardings(mesh)

    def placed() -> dict[str, Any]:  # anew for each call: the cache is donated
        return {
            name: jax.device_put(np.asarray(x), getattr(shardings, name))
            for name, x in arguments.items()
        }

    loaded = jax.jit(exported.call, donate_argnames="cache")(**placed())
    with jax.set_mesh(mesh):
        direct = step(**placed())
    differing = sum(
        np.count_nonzero(np.asarray(a).view(np.uint8) != np.asarray(b).view(np.uint8))
        for a, b in zip(loaded, direct, strict=True)
    )
    print(f"run on {DEVICES} x {devices[0].device_kind}: {differing} bytes differ")
    return differing == 0


def main(options: Sequence[str] | None = None) -> int:
    """The exit status: 0 when the exported program is right, else 1."""
    parser = argparse.ArgumentParser(description="Export jax_mla.q_absorb on a mesh of GPUs.")
    parser.add_argument("--out", type=pathlib.Path, help="where to keep the file for GPUs")
    out = parser.parse_args(options).out
    if importlib.util.find_spec("flatbuffers") is None:
        parser.exit(2, "jax.export saves programs with flatbuffers: pip install flatbuffers\n")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    arguments = example_arguments()
    file = export_step(arguments, "cuda")
    if out:
        out.write_bytes(file)
    exported = jax.export.deserialize(file)
    right = is_right_for_gpus(exported)
    if jax.default_backend() != "gpu" or jax.device_count() < DEVICES:
        exported = jax.export.deserialize(export_step(arguments, "cpu"))
    right &= runs_right(exported, arguments)
    print("ok" if right else "FAILED: the exported program is not the one that was written")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
