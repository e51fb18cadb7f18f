"""Chains of calls on virtual ranks, each chain a CUDA graph that has a branch for every rank.

A call of a chain meets weights that are cold in the L2 cache, as in workload.py. The ranks of a
layer share its matrices: rank r has the heads from r * heads on, and one rank could have them all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from clock import Program
from virtual_ranks import Bytes, VirtualRanks, gathered
from workload import PAGE_SIZE, PAGES, Workload

import jax_mla
from jax_mla import mailbox_layout as layout
from jax_mla import variants
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW
from jax_mla.testing import bytes_of

CALLS = 64
"""Calls of a rank in a chain, at least: a chain meets every layer equally often."""
EPS = 1e-6
POISON = 0xEE
OURS = functools.partial(jax_mla.q_absorb, implementation="cuda")

Weights = list[tuple[jax.Array, ...]]


class Chains:
    """Buffers of a shape, and the chains that can be timed with them.

    Args:
        group: the ranks.
        heads: of each rank.
        batch: tokens.
        weights: of `Workload(ranks * heads, 1)`.
    """

    def __init__(self, group: VirtualRanks, heads: int, batch: int, weights: Weights) -> None:
        self.group, self.heads, self.batch, self.weights = group, heads, batch, weights
        self.ranks = len(group.ranks)
        self.calls = len(weights) * -(-CALLS // len(weights))
        state = Workload(self.ranks * heads, batch, alone=True).state()
        self.rows, self.slots, self.scale = (state[name] for name in ("rows", "slots", "scale"))
        jax.block_until_ready((weights, self.rows, self.slots, self.scale))
        self.size = batch * heads * ROW
        """Bytes of a rank's queries."""
        self.q = [group.allocate(self.size) for _ in range(self.ranks)]
        self.out = [group.allocate(self.ranks * self.size) for _ in range(self.ranks)]
        self.caches = [group.allocate(PAGES * PAGE_SIZE * ROW) for _ in range(self.ranks)]
        self.whole = group.allocate(self.ranks * self.size)
        self.met = [group.allocate(self.ranks * layout.WORD_BYTES) for _ in range(self.ranks)]
        self.own = self._kernel(heads)
        self.all = self._kernel(self.ranks * heads)

    def _kernel(self, heads: int) -> tuple[Any, Any]:
        return self.group.load(variants.choose(self.batch, heads).key)

    @property
    def words(self) -> int:
        """16-byte words of a token's queries on one rank."""
        return self.heads * ROW // layout.WORD_BYTES

    def check_room(self) -> None:
        """Ends the run where the GPU cannot run all exchanges of a call at once, and a meeting."""
        needed = self.ranks * (self.group.ctas(self.batch, self.words) + 1)
        if (room := self.group.resident_ctas()) < needed:
            raise SystemExit(
                f"{self.ranks} virtual ranks need {needed} CTAs at once, the GPU runs {room}."
                " Use fewer ranks."
            )

    def programs(self) -> dict[str, Program]:
        """The chains by name, each of `calls` calls."""
        steps: dict[str, Callable[[int], None]] = {
            "q_absorb": self._absorb_all,
            "q_absorb and exchange": self._absorb_and_exchange,
            "exchange": lambda _: self._exchange(),
            "one rank": self._absorb_one,
            "all heads": self._absorb_whole,
        }
        return {name: self._program(step) for name, step in steps.items()}

    def _program(self, step: Callable[[int], None]) -> Program:
        with self.group.captured() as launches:
            for i in range(self.calls):
                step(i)
        return Program(call=launches[0], wait=self._wait, layers=self.calls)

    def _wait(self) -> None:
        self.group.wait()
        self.group.check()

    def _absorb_all(self, i: int) -> None:
        for rank, q in enumerate(self.q):
            self._absorb(rank, i % len(self.weights), rank, self.heads, q)
        # A call of one word holds no rank's q_absorb back, which many polling CTAs would.
        for rank, q in enumerate(self.q):
            self.group.launch(rank, q, self.met[rank], 1, 1)

    def _absorb_and_exchange(self, i: int) -> None:
        self._absorb_all(i)
        self._exchange()

    def _exchange(self) -> None:
        for rank, (q, out) in enumerate(zip(self.q, self.out, strict=True)):
            self.group.launch(rank, q, out, self.batch, self.words)

    def _absorb_one(self, i: int) -> None:
        # The heads of all ranks in turns: those of one rank might stay in the L2 cache.
        layer, part = divmod(i % (len(self.weights) * self.ranks), self.ranks)
        self._absorb(0, layer, part, self.heads, self.whole)

    def _absorb_whole(self, i: int) -> None:
        self._absorb(0, i % len(self.weights), 0, self.ranks * self.heads, self.whole)

    def _absorb(self, rank: int, layer: int, part: int, heads: int, q: int) -> None:
        """Queues q_absorb on a rank's stream, of `heads` heads from those of rank `part` on."""
        kernel, function = self.own if heads == self.heads else self.all
        rows, (q_norm, kv_norm, w_qb, w_uk) = self.rows[layer], self.weights[layer]
        skipped = 2 * part * self.heads
        addresses = [
            _address(rows),
            _address(q_norm),
            _address(kv_norm),
            _address(w_qb) + skipped * HEAD_ROWS * Q_RANK,
            _address(w_uk) + skipped * NOPE * KV_RANK,
            self.caches[rank],
            _address(self.slots),
            _address(self.scale),
            _address(self.scale),
            q,
        ]
        parameters = [
            *np.array(addresses, np.uint64),
            *np.array([QKV_COLUMNS, PAGES * PAGE_SIZE], np.int64),
            np.int32(self.batch),
            np.float32(EPS),
        ]
        grid = kernel.cluster, heads, -(-self.batch // kernel.tokens)
        self.group.queue(rank, kernel, function, grid, parameters)

    def check(self, chain: Program) -> None:
        """Runs the chain with exchange and compares all bytes; SystemExit where one is wrong.

        Queries are compared with those of `jax_mla.q_absorb`, what is gathered with the queries.
        """
        for out in self.out:
            self.group.write(out, bytes([POISON]) * (self.ranks * self.size))
        chain.call()
        chain.wait()
        queries = [self.group.read(q, self.size).reshape(self.batch, -1) for q in self.q]
        together = gathered(queries)
        for rank, out in enumerate(self.out):
            found = self.group.read(out, together.size).reshape(together.shape)
            if not np.array_equal(found, together):
                raise SystemExit(f"virtual rank {rank} gathered other bytes than were published")
            if not np.array_equal(queries[rank], self._expected(rank)):
                raise SystemExit(f"virtual rank {rank} has other queries than jax_mla.q_absorb")

    def _expected(self, rank: int) -> Bytes:
        """[batch, bytes], a rank's queries of the last call of a chain."""
        q_norm, kv_norm, w_qb, w_uk = self.weights[-1]
        q, _ = _jitted()(
            self.rows[len(self.weights) - 1],
            q_norm,
            kv_norm,
            w_qb.reshape(self.ranks, -1, Q_RANK)[rank],
            w_uk.reshape(self.ranks, -1, NOPE, KV_RANK)[rank],
            jax.numpy.zeros((PAGES, PAGE_SIZE, ROW), jax.numpy.float8_e4m3fn),
            self.slots,
            q_scale=self.scale,
            k_scale=self.scale,
            eps=EPS,
        )
        return bytes_of(q).reshape(self.batch, -1)


@functools.cache
def _jitted() -> Any:
    return jax.jit(OURS, static_argnames="eps")


def _address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()
