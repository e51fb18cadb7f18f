"""What `dcp_decode.py --mailbox` runs: queries gathered through a mailbox, without a collective.

Where one process has a GPU for each rank, a mailbox is all that changes. Where it has fewer, two
processes share a GPU, which JAX's collectives refuse. The GPU's program then ends before the merge:
each process copies its attention to a CPU, where JAX has collectives between processes, and a
program there merges.

    python examples/dcp_decode.py --mailbox                # 8 GPUs, or one that is shared
    python examples/dcp_decode.py --mailbox --mesh 1 1 2   # 2 GPUs, or one that is shared
"""

import argparse
import contextlib
import math
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from dcp_layer import AXES, NAMES, Ints, Layer, OnMesh, attend_by_rank, merge, place
from jax.experimental import multihost_utils

import jax_mla

Compare = Callable[..., bool]
"""`dcp_decode.compare`; passed, since dcp_decode builds on this file."""


def agrees(options: argparse.Namespace, compare: Compare) -> bool:
    """Whether GPUs that gather through a mailbox do what one device does."""
    # Two more processes may each want such a part of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".2")
    # A kernel that is loaded late may wait for a GPU whose kernel waits for this one.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    try:
        gpus = jax.devices("cuda")
    except RuntimeError as error:
        raise SystemExit(f"--mailbox needs an NVIDIA GPU, got none: {error}") from error
    ranks = math.prod(options.mesh)
    if len(gpus) < ranks:
        return in_two_processes(options, compare)
    mesh = jax.make_mesh(options.mesh, NAMES, devices=gpus[:ranks])
    with mailbox_of(mesh, options) as mailbox:
        return compare(options, mesh, mailbox)


def mailbox_of(mesh: jax.sharding.Mesh, options: argparse.Namespace) -> jax_mla.DcpMailbox:
    """One for all calls, of which the prefill has most tokens."""
    most = options.batch * max(options.prefill, 1)
    return jax_mla.DcpMailbox(mesh, "dcp", max_batch=most, heads=options.heads)


def in_two_processes(options: argparse.Namespace, compare: Compare, platform: str = "cuda") -> bool:
    """Whether both processes find that they do what one device does."""
    options.mesh = 1, 1, 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # a fork would share this process's GPU client
    shared = options, compare, platform, port
    pair = [
        context.Process(target=one_of_two, args=(*shared, process), daemon=True)
        for process in range(2)
    ]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    return all(process.exitcode == 0 for process in pair)


def one_of_two(
    options: argparse.Namespace, compare: Compare, platform: str, port: int, process: int
) -> None:
    """Ends this process, with status 0 where it agrees; on CPUs without a mailbox."""
    jax.config.update("jax_platforms", "cuda,cpu" if platform == "cuda" else platform)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # One that fails waits so long for the other, which may wait for it.
    jax.distributed.initialize(
        f"127.0.0.1:{port}", 2, process, local_device_ids=[0], shutdown_timeout_seconds=10
    )
    mesh = jax.make_mesh(options.mesh, NAMES, devices=jax.devices(platform))
    with mailbox_of(mesh, options) if platform == "cuda" else contextlib.nullcontext() as mailbox:
        agree = compare(options, mesh, mailbox, OnSharedGpu)
    sys.exit(0 if agree else 1)


class OnSharedGpu(OnMesh):
    """The layer on a mesh of which each process has one device, without its collectives."""

    def __init__(self, layer: Layer, mesh: jax.sharding.Mesh, *pages: int, **options: Any) -> None:
        super().__init__(layer, mesh, *pages, **options)
        cpus = {device.process_index: device for device in jax.devices("cpu")}
        beside = [cpus[device.process_index] for device in mesh.devices.flat]
        ranks = np.reshape(beside, mesh.axis_sizes)
        self._cpus = jax.sharding.Mesh(ranks, mesh.axis_names, axis_types=mesh.axis_types)
        self._w_uv = place(layer.w_uv, AXES.shardings(self._cpus).w_uk)
        self._attend, self._merge = self._jit(attend_by_rank), jax.jit(merge)

    def step(self, qkv: Any, tables: Ints, positions: Ints) -> tuple[Any, Any]:
        outs, lses, q, self.cache = self._call(self._attend, qkv, tables, positions)
        with jax.set_mesh(self._cpus):
            return self._merge(self._beside(outs), self._beside(lses), self._w_uv), q

    def to_host(self, x: Any) -> npt.NDArray[Any]:
        """All of an array; what all processes have is this one's copy."""
        whole: npt.NDArray[Any] = multihost_utils.process_allgather(self._beside(x), tiled=True)
        return whole

    def _beside(self, x: jax.Array) -> jax.Array:
        """The same array on the CPUs of the processes, each of which copies its part."""
        at = jax.NamedSharding(self._cpus, jax.typeof(x).sharding.spec)
        part = np.asarray(x.addressable_data(0))
        whole: jax.Array = jax.make_array_from_process_local_data(at, part, x.shape)
        return whole
