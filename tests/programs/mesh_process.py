"""One of several processes with 8 CPU devices between them: a call on a mesh, as bytes in a file.

python mesh_process.py PROCESSES PROCESS PORT FOLDER
"""

import pathlib
import sys
from typing import Any

import jax
import numpy as np

import jax_mla
from jax_mla import dcp
from jax_mla.testing import make_inputs

NAMES, SIZES = ("data", "tensor", "dcp"), (2, 2, 2)
AXES = jax_mla.MeshAxes(batch="data", heads="tensor", dcp="dcp")
Q_SCALE, K_SCALE = 0.02, 0.03


def global_inputs() -> dict[str, Any]:
    """NumPy arguments of the whole mesh: 8 heads, 4 pages a rank, 16 tokens a data shard."""
    inputs = make_inputs(32, 8, pages=16, page_size=8)
    block_tables = np.repeat(np.array([[0, 3], [2, 1]], np.int32), 16, axis=0)
    positions = np.tile(np.arange(9, 25, dtype=np.int32), 2)
    positions[[5, 31]] = -1
    slots = dcp.local_slots(block_tables, positions, page_size=8, dcp=2, interleave=4)
    return {name: np.asarray(value) for name, value in (inputs | {"slots": slots}).items()}


def spanning_mesh() -> jax.sharding.Mesh:
    """A mesh whose dcp groups lie across processes, which own consecutive devices."""
    devices = np.array(jax.devices()).reshape(SIZES).transpose()
    explicit = (jax.sharding.AxisType.Explicit,) * len(NAMES)
    return jax.sharding.Mesh(devices, NAMES, axis_types=explicit)


def run(mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Bytes of q and cache on each device of this process, by the device's place in the mesh."""
    shardings = AXES.shardings(mesh)
    inputs = {
        name: jax.make_array_from_callback(x.shape, getattr(shardings, name), x.__getitem__)
        for name, x in global_inputs().items()
    }
    step = jax.jit(
        lambda **inputs: jax_mla.q_absorb(**inputs, q_scale=Q_SCALE, k_scale=K_SCALE, axes=AXES),
        donate_argnames="cache",
    )
    with jax.set_mesh(mesh):
        q, cache = step(**inputs)
    places = {device: place for place, device in enumerate(mesh.devices.flat)}
    return {
        f"{name} {places[shard.device]}": np.asarray(shard.data).view(np.uint8)
        for name, result in (("q", q), ("cache", cache))
        for shard in result.addressable_shards
    }


def main(processes: int, process: int, port: int, folder: pathlib.Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)
    assert jax.device_count() == 8
    np.savez(folder / f"{process}.npz", **run(spanning_mesh()))


if __name__ == "__main__":
    processes, process, port, folder = sys.argv[1:]
    main(int(processes), int(process), int(port), pathlib.Path(folder))
