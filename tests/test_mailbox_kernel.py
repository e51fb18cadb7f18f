"""The gather through mailboxes without a GPU: its PTX, run for all ranks at once on the CPU.

JAX_MLA_PTX names the folder that the build's jax_mla/aot.py has written. Without it nothing here
runs; with it nothing is skipped.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from emulated_calls import built_kernel
from ptx_machine import GlobalMemory, Launch, PtxError, run_streams

from jax_mla import mailbox_layout as layout
from jax_mla.dcp.rank import control_block
from jax_mla.variants import EXCHANGE, THREADS

FOLDER = os.environ.get("JAX_MLA_PTX")

pytestmark = pytest.mark.skipif(not FOLDER, reason="JAX_MLA_PTX names no folder with PTX")

Words = npt.NDArray[np.uint32]
NAN_WORD = 0x7F7F7F7F
POISON = 0xEEEEEEEE
FOREVER = 100.0
REARM = r"st\.global\.v4\.b32 \[%rd\d+\], \{-1, -1, -1, -1\};"


@functools.cache
def kernel() -> str:
    assert FOLDER
    return built_kernel(Path(FOLDER), EXCHANGE.key, "sm_90a").text


class Group:
    """The ranks of a mailbox that has just been made, and the calls that they will run.

    Args:
        ranks: how many.
        batches: of each call, the tokens.
        words: 16-byte words of a rank's queries of a token.
        timeout: seconds that a call waits.
        ctas: of each call.
    """

    def __init__(
        self,
        ranks: int,
        batches: Sequence[int],
        *,
        words: int = 5,
        timeout: float = FOREVER,
        ctas: int = 2,
    ) -> None:
        self.ranks, self.batches, self.words, self.ctas = ranks, batches, words, ctas
        self.half_bytes = max(batches) * ranks * words * layout.WORD_BYTES
        numbers = np.random.default_rng(ranks)
        self.sent = [numbers.integers(0, 2**32, (b, ranks, words, 4), np.uint32) for b in batches]
        for sent in self.sent:  # whole rows and lone words that look as if nobody had sent them
            sent[numbers.random(sent.shape[:2]) < 0.2] = layout.EMPTY
            sent[numbers.random(sent.shape) < 0.05] = layout.EMPTY
        empty = np.full(2 * self.half_bytes // 4, layout.EMPTY, np.uint32)
        buffers: dict[str, Any] = {}
        for rank in range(ranks):
            for call, sent in enumerate(self.sent):
                buffers[f"q{call} {rank}"] = sent[:, rank]
                buffers[f"out{call} {rank}"] = np.full_like(sent, POISON)
            buffers[f"box {rank}"] = empty
            buffers[f"control {rank}"] = np.zeros(layout.CONTROL_BYTES, np.uint8)
            buffers[f"report {rank}"] = np.zeros(1, np.uint32)
        flags = [f"{name} {rank}" for name in ("control", "report") for rank in range(ranks)]
        self.memory = GlobalMemory(buffers, flags)
        self.reset(timeout)

    def reset(self, timeout: float) -> None:
        """Makes mailboxes and control blocks as before the first call; no call may run."""
        boxes = [self.memory.address(f"box {rank}") for rank in range(self.ranks)]
        for rank in range(self.ranks):
            report = self.memory.address(f"report {rank}")
            block = control_block(rank, boxes, self.half_bytes, timeout, report)
            self.memory.write(f"control {rank}", np.frombuffer(block, np.uint8))
            self.memory.write(f"report {rank}", np.zeros(1, np.uint32))
            empty = np.full(2 * self.half_bytes // 4, layout.EMPTY, np.uint32)
            self.memory.write(f"box {rank}", empty)

    def launch(self, rank: int, call: int) -> Launch:
        q, out = f"q{call} {rank}", f"out{call} {rank}"
        return Launch(
            ctas=self.ctas,
            parameters=(q, out, f"control {rank}", self.batches[call], self.words, NAN_WORD),
            owned=(q, out, f"box {rank}"),
        )

    def run(
        self, order: Sequence[int], *, seed: int = 0, text: str | None = None, absent: int = 0
    ) -> None:
        """Runs calls in this order on all ranks but the last `absent` ones."""
        streams = [
            [self.launch(rank, call) for call in order] for rank in range(self.ranks - absent)
        ]
        run_streams(text or kernel(), streams, self.memory, seed=seed, block=THREADS)

    def found(self, rank: int, call: int) -> Words:
        out = self.memory.bytes(f"out{call} {rank}").view(np.uint32)
        return out.reshape(self.sent[call].shape)

    def expected(self, call: int) -> Words:
        sent = self.sent[call]
        return np.where(sent == layout.EMPTY, np.uint32(NAN_WORD), sent)

    def check(self, calls: int) -> None:
        """All results are right, and the mailboxes are as before the first of `calls` calls."""
        for rank in range(self.ranks):
            for call in range(len(self.batches)):
                assert np.array_equal(self.found(rank, call), self.expected(call)), (rank, call)
            assert self.number(rank, layout.EPOCH) == calls
            assert self.number(rank, layout.TICKET) == 0
            assert self.state(rank) == layout.OPEN
            assert (self.memory.bytes(f"box {rank}") == 0xFF).all()

    def number(self, rank: int, at: int) -> int:
        return int(self.memory.bytes(f"control {rank}")[at : at + 4].view(np.uint32)[0])

    def state(self, rank: int) -> int:
        """What device and host were told of a rank, which must be one thing."""
        [report] = self.memory.bytes(f"report {rank}").view(np.uint32)
        assert self.number(rank, layout.STATE) == report
        return int(report)


@pytest.mark.parametrize("ranks", range(1, 1 + layout.MAX_RANKS))
def test_any_number_of_ranks(ranks: int) -> None:
    group = Group(ranks, [3, 1], ctas=1)
    group.run([0, 1])
    group.check(2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_of_all_sizes_in_any_order_of_ctas(ranks: int, seed: int) -> None:
    group = Group(ranks, [2, 7, 1], words=36, ctas=3)
    order = [0, 1, 2, 2, 0, 1, 0]
    group.run(order, seed=seed)
    group.check(len(order))


def test_a_thread_handles_several_rounds_of_words() -> None:
    """One CTA, more words than its threads have under way together."""
    group = Group(2, [64], words=36, ctas=1)
    group.run([0, 0])
    group.check(2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_missing_rank_gives_nan_and_closes_the_mailbox_until_it_is_reset(ranks: int) -> None:
    group = Group(ranks, [2, 3], timeout=20e-6)
    missing = ranks - 1
    group.run([0], absent=1)
    for rank in range(missing):
        expected = group.expected(0)
        expected[:, missing] = NAN_WORD
        assert np.array_equal(group.found(rank, 0), expected)
        assert group.state(rank) == 1 + missing
    boxes = [group.memory.bytes(f"box {rank}") for rank in range(ranks)]
    group.run([1], absent=1)
    for rank in range(missing):
        expected = np.full_like(group.sent[1], NAN_WORD)
        expected[:, rank] = group.expected(1)[:, rank]
        assert np.array_equal(group.found(rank, 1), expected)
        assert group.number(rank, layout.EPOCH) == 2
    for rank in range(ranks):
        assert np.array_equal(group.memory.bytes(f"box {rank}"), boxes[rank])
    group.reset(FOREVER)
    group.run([0, 1, 0])
    group.check(3)


def test_a_closed_mailbox_is_not_touched() -> None:
    group = Group(2, [2])
    for rank in range(2):
        block = bytearray(control_block(rank, [0, 0], group.half_bytes, FOREVER, 0))
        block[layout.STATE : layout.STATE + 4] = layout.CLOSED.to_bytes(4, "little")
        group.memory.write(f"control {rank}", np.frombuffer(block, np.uint8))
    group.run([0])
    for rank in range(2):
        expected = np.full_like(group.sent[0], NAN_WORD)
        expected[:, rank] = group.expected(0)[:, rank]
        assert np.array_equal(group.found(rank, 0), expected)


def wrong(text: str, order: Sequence[int] = (0, 0, 0, 0)) -> bool:
    """Whether a kernel is seen to fail."""
    group = Group(2, [3], timeout=1e-3)
    try:
        group.run(order, text=text)
        group.check(len(order))
    except (PtxError, AssertionError):
        return True
    return False


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        pytest.param(REARM, "", id="a word is not emptied again"),
        pytest.param(r"(and\.b32\s+%r\d+, %r\d+), 1;", r"\1, 0;", id="one half serves all calls"),
        pytest.param(
            r"setp\.eq\.b32(\s+%p\d+, %r\d+), -1;\s+selp\.b32",
            r"setp.eq.b32\1, -2;\n selp.b32",
            id="an empty word is published",
        ),
        pytest.param(r"st\.relaxed\.sys(\.global\.v4)", r"st\1", id="words are published weakly"),
        pytest.param(r"ld\.relaxed\.sys(\.global\.v4)", r"ld\1", id="words are polled weakly"),
        pytest.param(r"atom\S+ (%r\d+), .*", r"mov.b32 \1, 1;", id="each CTA ends the epoch"),
    ],
)
def test_a_broken_kernel_is_seen(pattern: str, instead: str) -> None:
    broken, count = re.subn(pattern, instead, kernel())
    assert count
    assert wrong(broken)
    assert not wrong(kernel())
