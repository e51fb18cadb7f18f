"""Ranks that share the GPU gather queries through mailboxes: python virtual_ranks.py CASE RANKS

Set CUDA_DEVICE_MAX_CONNECTIONS=32. Ends with an error where a byte is wrong.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
from virtual_ranks import Bytes, VirtualRanks, gathered  # benchmarks is on the path

from jax_mla import mailbox_layout as layout
from jax_mla.rules import ROW

HEADS = 12
TOKEN = HEADS * ROW  # bytes of e4m3
MOST_TOKENS = 64
POISON = 0xEE


class Calls:
    """Buffers for calls of a group, and what they must give."""

    def __init__(self, group: VirtualRanks, seed: int = 0) -> None:
        self.group, self.numbers = group, np.random.default_rng(seed)
        self.ranks = len(group.ranks)
        self.q = [group.allocate(MOST_TOKENS * TOKEN) for _ in range(self.ranks)]
        self.out = [group.allocate(MOST_TOKENS * self.ranks * TOKEN) for _ in range(self.ranks)]
        self.sent: list[Bytes] = []

    def draw(self, batch: int, nan: float = 0.01) -> None:
        """New queries, some of whose rows are NaN of one byte or the other."""
        self.sent = []
        for q in self.q:
            values = self.numbers.integers(0, 256, (batch, TOKEN), dtype=np.uint8)
            for byte in (0x7F, 0xFF):
                values[self.numbers.random(batch) < nan] = byte
            self.group.write(q, values.tobytes())
            self.sent.append(values)

    def launch(self, rank: int) -> None:
        batch = len(self.sent[0])
        size = batch * self.ranks * TOKEN
        self.group.fill_later(rank, self.out[rank], POISON, size)
        self.group.launch(rank, self.q[rank], self.out[rank], batch, TOKEN // layout.WORD_BYTES)

    def found(self, rank: int) -> Bytes:
        shape = len(self.sent[0]), self.ranks, TOKEN
        return self.group.read(self.out[rank], math.prod(shape)).reshape(shape)

    def check(self) -> None:
        """Words of four 0xFF come as NaN of another bit pattern, all others as they are."""
        expected = gathered(self.sent).view(np.uint32)
        expected = np.where(expected == layout.EMPTY, 0x7F7F7F7F, expected)
        for rank in range(self.ranks):
            assert np.array_equal(self.found(rank).view(np.uint32), expected), f"rank {rank}"


@contextlib.contextmanager
def group_of(ranks: int, timeout: float = 20.0) -> Iterator[VirtualRanks]:
    with contextlib.ExitStack() as undo:
        yield VirtualRanks(ranks, MOST_TOKENS * ranks * TOKEN, timeout, undo)


def ranks_come_in_any_order(ranks: int, count: int = 300) -> None:
    order = random.Random(ranks)
    with group_of(ranks) as group:
        calls = Calls(group)
        for i in range(count):
            calls.draw(order.choice((1, 1, 2, 3, 8, 17, 64)), nan=0.2)
            for rank in order.sample(range(ranks), ranks):
                calls.launch(rank)
                if i % 5 == 0:
                    time.sleep(order.random() * 1e-3)
            group.wait()
            calls.check()
        for rank in range(ranks):
            assert group.is_empty(rank)
            assert group.number(rank, layout.EPOCH) == count
            assert group.number(rank, layout.TICKET) == 0
            assert group.number(rank, layout.STATE) == layout.OPEN


def graphs_are_replayed(ranks: int, replays: int = 2000) -> None:
    """Graphs of one, two and three calls, in turns: the epoch must not be frozen in them."""
    order = random.Random(ranks)
    with group_of(ranks) as group:
        graphs: list[tuple[Callable[[], None], list[Calls]]] = []
        for batches in ((1,), (8, 1), (3, 64, 2)):
            calls = [Calls(group, seed=len(graphs) * 10 + i) for i in range(len(batches))]
            for call, batch in zip(calls, batches, strict=True):
                call.draw(batch)
            with group.captured() as launches:
                for rank in range(ranks):
                    for call in calls:
                        call.launch(rank)
            graphs.append((launches[0], calls))
        for i in range(replays):
            launch, calls = order.choice(graphs)
            launch()
            if i % 20 == 0:
                group.wait()
                for call in calls:
                    call.check()
        group.wait()
        assert all(group.is_empty(rank) for rank in range(ranks))


def a_missing_rank_is_not_waited_for(ranks: int) -> None:
    seconds = 0.2
    with group_of(ranks, seconds) as group:
        calls = Calls(group)
        calls.draw(2)
        missing = ranks - 1
        for expected_wait in (seconds, 0.0):  # the second call does not wait at all
            start = time.monotonic()
            for rank in range(missing):
                calls.launch(rank)
            group.wait()
            waited = time.monotonic() - start
            assert expected_wait <= waited < expected_wait + 1, waited
            for rank in range(missing):
                found = calls.found(rank)
                assert (found[:, missing] == 0x7F).all()
                assert np.array_equal(found[:, rank], calls.sent[rank])
                assert group.number(rank, layout.STATE) == group.ranks[rank].reported == 1 + missing
        group.reset()
        for _ in range(3):
            for rank in range(ranks):
                calls.launch(rank)
            group.wait()
            calls.check()


CASES: dict[str, Callable[[int], None]] = {
    "any_order": ranks_come_in_any_order,
    "few": lambda ranks: ranks_come_in_any_order(ranks, count=10),
    "graphs": graphs_are_replayed,
    "missing": a_missing_rank_is_not_waited_for,
}

if __name__ == "__main__":
    CASES[sys.argv[1]](int(sys.argv[2]))
    print("done")
