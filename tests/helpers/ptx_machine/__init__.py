"""Runs the PTX of a kernel on the CPU and checks what it does to memory.

    memory = GlobalMemory({"x": x, "y": y})
    run(text, grid=(8, 1, 1), cluster=8, shared_bytes=1024, parameters=["x", "y", 3], memory=memory)
    memory.bytes("y")

A parameter is the name of a buffer, whose address is passed, or a number. An access outside of a
buffer, a misaligned one, a load of what nobody stored, a data race, a deadlock and an instruction
that is not modelled raise PtxError with the line of the text. `run_streams` runs several launches
at once, whose CTAs may wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ptx_machine.machine import Machine
from ptx_machine.memory import GlobalMemory
from ptx_machine.parse import PtxError, parse
from ptx_machine.streams import Launch, run_streams

__all__ = ["GlobalMemory", "Launch", "PtxError", "run", "run_streams"]


def run(
    text: str,
    *,
    grid: Sequence[int],
    cluster: int,
    shared_bytes: int,
    parameters: Sequence[str | int | float],
    memory: GlobalMemory,
    block: int = 256,
) -> None:
    """Runs a kernel, its clusters one after the other.

    Args:
        text: PTX of a module with one entry.
        grid: CTAs in x, y and z.
        cluster: CTAs of a cluster, all in x.
        shared_bytes: dynamic shared memory of a CTA.
        parameters: in order; names of buffers of `memory` or numbers.
        memory: what the kernel works on.
        block: threads of a CTA.

    Raises:
        PtxError: the kernel does what it may not do, or something that is not modelled.
    """
    program = parse(text)
    if len(parameters) != len(program.parameters):
        raise PtxError(f"{len(program.parameters)} parameters expected, got {len(parameters)}")
    if grid[0] % cluster:
        raise PtxError(f"a grid of {grid[0]} CTAs is not made of clusters of {cluster}")
    bits = {
        name: _bits(value, kind, memory)
        for (name, kind), value in zip(program.parameters.items(), parameters, strict=True)
    }
    memory.begin(memory.names)
    with np.errstate(all="ignore"):
        machine = Machine(
            program,
            ctas=cluster,
            block=block,
            grid=grid,
            shared_bytes=shared_bytes,
            parameters=bits,
            memory=memory,
        )
        for z, y, x in itertools.product(
            range(grid[2]), range(grid[1]), range(0, grid[0], cluster)
        ):
            try:
                machine.run((x, y, z))
            except PtxError as error:
                raise PtxError(f"cluster at {(x, y, z)}: {error}") from error


def _bits(value: str | int | float, kind: str, memory: GlobalMemory) -> int:
    if isinstance(value, str):
        return memory.address(value)
    if kind == "f32":
        return int(np.float32(value).view(np.uint32))
    return int(value) % (1 << int(kind[1:]))
