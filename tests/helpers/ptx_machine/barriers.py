"""mbarriers, the copies that they count, copy groups and the barrier of a cluster."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ptx_machine.memory import BARRIER, Bytes, GlobalMemory, Indices, SharedMemory
from ptx_machine.parse import PtxError
from ptx_machine.races import MAX_BARRIERS, Clock, Races

MAX_TRANSACTIONS = 2**20 - 1


@dataclass(kw_only=True)
class MBarrier:
    """One mbarrier.

    Attributes:
        place: of its 8 bytes in `SharedMemory.data`.
        unit: number of its clock among those of the cluster's mbarriers.
        count: arrivals that a phase needs.
        pending: arrivals that the current phase still needs.
        transactions: bytes that it still needs.
        phase: of phases that are complete.
        told: what the threads that arrived told.
        completed: what who sees the last phase complete learns.
        waiting: threads that wait for the current phase.
    """

    place: int
    unit: int
    count: int
    pending: int
    told: Clock
    completed: Clock
    transactions: int = 0
    phase: int = 0
    waiting: list[Indices] = field(default_factory=list)

    def done(self, parity: int) -> bool:
        """Whether the phase of this parity, the current one or the one before, is complete."""
        return self.phase % 2 != parity


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A copy that is on its way and that an mbarrier will count."""

    place: int
    size: int
    data: Callable[[], Bytes]
    barrier: MBarrier
    line: int


class Barriers:
    """The mbarriers of a cluster and the copies on their way.

    Copies arrive as late as they can: when no thread can run before one does.
    """

    def __init__(
        self,
        shared: SharedMemory,
        races: Races,
        ready: npt.NDArray[np.bool_],
        exited: Callable[[int], bool],
    ) -> None:
        self.shared, self.races, self.ready, self.exited = shared, races, ready, exited
        self.reset()

    def reset(self) -> None:
        self.known: dict[int, MBarrier] = {}
        self.copies: deque[Copy] = deque()
        self.units = [0] * self.shared.ctas

    def init(self, place: int, count: int, warp: Indices, line: int) -> None:
        cta = place // self.shared.room
        if place in self.known:
            raise PtxError("an mbarrier is initialised twice")
        if self.units[cta] == MAX_BARRIERS:
            raise PtxError(f"more than {MAX_BARRIERS} mbarriers of a CTA are not modelled")
        at = np.array([place])
        self.shared.store(at, np.zeros((1, 1), np.uint64), warp, line)
        self.shared.state[place : place + 8] = BARRIER
        empty = np.zeros_like(self.races.clocks[0])
        self.known[place] = MBarrier(
            place=place,
            unit=cta * MAX_BARRIERS + self.units[cta],
            count=count,
            pending=count,
            told=empty,
            completed=empty,
        )
        self.units[cta] += 1

    def at(self, place: int, warps: Indices, line: int) -> MBarrier:
        """The mbarrier at a place, whose initialisation must be known to the warps."""
        if place not in self.known:
            cta, offset = divmod(place, self.shared.room)
            raise PtxError(f"no mbarrier was initialised at shared byte {offset} of CTA {cta}")
        words = np.array([[place // 4, place // 4 + 1]])
        for warp in np.unique(warps):
            self.races.check_load(words, np.array([warp]), line)
        return self.known[place]

    def expect(self, barrier: MBarrier, size: int) -> None:
        barrier.transactions += size
        if barrier.transactions > MAX_TRANSACTIONS:
            raise PtxError(f"an mbarrier expects {barrier.transactions} bytes")

    def arrive(self, barrier: MBarrier, count: int, warps: Indices) -> None:
        if count > barrier.pending:
            raise PtxError(f"an mbarrier of {barrier.count} arrivals gets too many in a phase")
        barrier.pending -= count
        barrier.told = np.maximum(barrier.told, self.races.release(warps))
        self.settle(barrier)

    def settle(self, barrier: MBarrier) -> None:
        """Completes the phase if nothing is missing."""
        if barrier.pending or barrier.transactions:
            return
        barrier.phase += 1
        barrier.pending = barrier.count
        barrier.completed = barrier.told.copy()
        barrier.completed[self.races.ctas * self.races.warps + barrier.unit] = barrier.phase
        for threads in barrier.waiting:
            self.ready[threads] = True
        barrier.waiting.clear()

    def begin(self, copy: Copy) -> None:
        self.copies.append(copy)

    def deliver(self) -> bool:
        """Lets one copy arrive, if one is on its way."""
        if not self.copies:
            return False
        copy = self.copies.popleft()
        cta = copy.place // self.shared.room
        if self.exited(cta):
            raise PtxError(f"line {copy.line}: the bytes arrive after CTA {cta} has ended")
        self.shared.end_copy(copy.place, copy.data())
        words = SharedMemory.words(np.array([copy.place]), copy.size)
        self.races.store_async(words, copy.barrier.unit, copy.barrier.phase + 1, copy.line)
        copy.barrier.transactions -= copy.size
        self.settle(copy.barrier)
        return True


@dataclass(frozen=True, kw_only=True)
class _GroupCopy:
    """What threads copy by one cp.async: [thread] each."""

    threads: Indices
    groups: Indices
    places: Indices
    sources: Indices
    width: int
    line: int

    def part(self, chosen: npt.NDArray[np.bool_]) -> _GroupCopy:
        return _GroupCopy(
            threads=self.threads[chosen],
            groups=self.groups[chosen],
            places=self.places[chosen],
            sources=self.sources[chosen],
            width=self.width,
            line=self.line,
        )


class CopyGroups:
    """cp.async of all threads. The bytes arrive when their thread waits for them."""

    def __init__(self, shared: SharedMemory, memory: GlobalMemory, warp_of: Indices) -> None:
        self.shared, self.memory, self.warp_of = shared, memory, warp_of
        self.reset()

    def reset(self) -> None:
        self.commits = np.zeros(len(self.warp_of), np.intp)
        self.copies: list[_GroupCopy] = []

    def copy(
        self, threads: Indices, places: Indices, sources: Indices, width: int, line: int
    ) -> None:
        self.copies.append(
            _GroupCopy(
                threads=threads,
                groups=self.commits[threads],
                places=places,
                sources=sources,
                width=width,
                line=line,
            )
        )

    def commit(self, threads: Indices) -> None:
        self.commits[threads] += 1

    def wait(self, threads: Indices, kept: int) -> None:
        """Completes all but the last `kept` committed groups of each thread."""
        waits = np.zeros(len(self.commits), np.bool_)
        waits[threads] = True
        remaining = []
        for copy in self.copies:
            done = waits[copy.threads] & (copy.groups < self.commits[copy.threads] - kept)
            if done.any():
                self.finish(copy.part(done))
            if not done.all():
                remaining.append(copy.part(~done))
        self.copies = remaining

    def finish(self, copy: _GroupCopy) -> None:
        places = copy.places[:, None] + np.arange(copy.width)
        for place, source in zip(copy.places, copy.sources, strict=True):
            self.shared.end_copy(int(place), self.memory.copied(int(source), copy.width))
        self.shared.races.store(
            self.shared.words(places[:, 0], copy.width), self.warp_of[copy.threads], copy.line
        )


class ClusterBarrier:
    """barrier.cluster: arrive, then wait for all threads' arrivals."""

    def __init__(self, races: Races, count: int) -> None:
        self.races, self.count = races, count
        self.reset()

    def reset(self) -> None:
        self.phase = 0
        self.arrived = np.full(self.count, -1)
        self.told = np.zeros_like(self.races.clocks[0])
        self.completed = self.told
        self.waiting: list[Indices] = []

    def arrive(self, threads: Indices, warps: Indices, ready: npt.NDArray[np.bool_]) -> None:
        if (self.arrived[threads] == self.phase).any():
            raise PtxError("a thread arrives twice at the barrier of its cluster")
        self.arrived[threads] = self.phase
        self.told = np.maximum(self.told, self.races.release(warps))
        if (self.arrived == self.phase).all():
            self.phase += 1
            self.completed = self.told
            for waiting in self.waiting:
                ready[waiting] = True
            self.waiting.clear()

    def passes(self, threads: Indices) -> npt.NDArray[np.bool_]:
        """Which of the threads may go on."""
        if (self.arrived[threads] < 0).any():
            raise PtxError("a thread waits at the barrier of its cluster without having arrived")
        passing: npt.NDArray[np.bool_] = self.arrived[threads] < self.phase
        return passing
