"""Launches of several streams at once, whose CTAs take turns in an order drawn at random."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ptx_machine.machine import Machine
from ptx_machine.memory import GlobalMemory
from ptx_machine.parse import Program, PtxError, parse

MOST_TURNS = 500_000
"""After which the streams are taken to wait for what never comes."""
TURNS_A_SKEW = 200
"""Turns after which other CTAs become the fast ones."""
NANOSECONDS_A_TURN = 10


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch of a kernel without clusters or shared memory.

    Attributes:
        ctas: of its grid, all in x.
        parameters: in order; names of buffers or numbers.
        owned: names of the buffers that no other stream accesses but strongly.
    """

    ctas: int
    parameters: tuple[str | int, ...]
    owned: tuple[str, ...]


def run_streams(
    text: str,
    streams: Sequence[Sequence[Launch]],
    memory: GlobalMemory,
    *,
    seed: int = 0,
    block: int = 256,
) -> None:
    """Runs the launches of each stream one after the other, all streams at once.

    Args:
        text: PTX of a module with one entry.
        streams: launches in order.
        memory: what all of them work on.
        seed: of the order in which CTAs take turns.
        block: threads of a CTA.

    Raises:
        PtxError: the kernel does what it may not do, or something that is not modelled; or a
            launch does not end.
    """
    program, order = parse(text), random.Random(seed)
    running = [_Stream(program, launches, memory, block, i) for i, launches in enumerate(streams)]
    with np.errstate(all="ignore"):
        for turn in range(MOST_TURNS):
            running = [stream for stream in running if stream.begin()]
            if not running:
                return
            if turn % TURNS_A_SKEW == 0:
                speeds = defaultdict[int, float](lambda: order.expovariate(1) ** 3)
            ctas = [(stream, machine) for stream in running for machine in stream.running]
            weights = [speeds[machine.number] for _, machine in ctas]
            [(stream, machine)] = order.choices(ctas, weights)
            stream.advance(machine, turn * NANOSECONDS_A_TURN)
    raise PtxError(f"{len(running)} streams do not end")


class _Stream:
    """The launches of a stream, of which one runs."""

    def __init__(
        self,
        program: Program,
        launches: Sequence[Launch],
        memory: GlobalMemory,
        block: int,
        index: int,
    ) -> None:
        self.program, self.memory, self.block, self.index = program, memory, block, index
        self.waiting = list(launches)
        self.running: list[Machine] = []
        self.machines: dict[tuple[Launch, int], Machine] = {}

    def begin(self) -> bool:
        """Begins the next launch where none runs; False where none is left."""
        if self.running:
            return True
        if not self.waiting:
            return False
        launch = self.waiting.pop(0)
        self.memory.begin(launch.owned)
        self.running = [self._machine(launch, cta) for cta in range(launch.ctas)]
        for cta, machine in enumerate(self.running):
            machine.start((cta, 0, 0))
        return True

    def _machine(self, launch: Launch, cta: int) -> Machine:
        """Runs a CTA of a launch; kept, since launches recur."""
        if (launch, cta) not in self.machines:
            kinds = self.program.parameters.items()
            machine = Machine(
                self.program,
                ctas=1,
                block=self.block,
                grid=(launch.ctas, 1, 1),
                shared_bytes=0,
                parameters={
                    name: self.memory.address(value)
                    if isinstance(value, str)
                    else value % (1 << int(kind[1:]))
                    for (name, kind), value in zip(kinds, launch.parameters, strict=True)
                },
                memory=self.memory,
            )
            # No two threads of streams and CTAs that run at once have the same number.
            machine.number = 1 + (self.index << 20) + cta * self.block
            self.machines[launch, cta] = machine
        return self.machines[launch, cta]

    def advance(self, machine: Machine, now: int) -> None:
        """Gives a CTA of the running launch a turn at this time."""
        machine.clock[:] = now
        if not machine.advance():
            machine.finish()
            self.running.remove(machine)
