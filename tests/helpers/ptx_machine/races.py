"""Which accesses to shared memory are ordered: vector clocks of warps and mbarriers.

Each warp counts its releases (barriers that it arrives at) and knows, for every other warp, up to
which count it has been told of what that warp did. Threads of a warp count as ordered. Bytes that a
copy writes belong to the mbarrier that counts them, by its phase: who has not waited for it, or met
somebody at a barrier who has, may not touch them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ptx_machine.parse import PtxError

Indices = npt.NDArray[np.intp]
Clock = npt.NDArray[np.int32]

MAX_BARRIERS = 32
"""mbarriers of a CTA."""


class Races:
    """Clocks of the warps of a cluster and, by word of shared memory, its last accesses."""

    def __init__(self, ctas: int, warps: int, words: int) -> None:
        """For CTAs of `warps` warps and `words` words of shared memory each."""
        self.ctas, self.warps, self.words = ctas, warps, words
        units = ctas * warps + ctas * MAX_BARRIERS
        self.clocks: Clock = np.zeros((ctas * warps, units), np.int32)
        self.writer = np.zeros(ctas * words, np.int32)
        self.write_clock: Clock = np.zeros(ctas * words, np.int32)
        self.write_line = np.zeros(ctas * words, np.int32)
        # By warp of the CTA that the word belongs to: no instruction loads another CTA's.
        self.read_clock: Clock = np.zeros((ctas * words, warps), np.int32)
        self.read_line = np.zeros(ctas * words, np.int32)

    def reset(self) -> None:
        for array in (self.clocks, self.writer, self.write_clock, self.read_clock):
            array.fill(0)
        own = np.arange(self.ctas * self.warps)
        self.clocks[own, own] = 1

    def release(self, warps: Indices) -> Clock:
        """What the warps know so far, together; what they do from now on is not part of it."""
        warps = np.unique(warps)
        told: Clock = self.clocks[warps].max(axis=0)
        self.clocks[warps, warps] += 1
        return told

    def acquire(self, warps: Indices, told: Clock) -> None:
        """The warps learn what others told."""
        warps = np.unique(warps)
        self.clocks[warps] = np.maximum(self.clocks[warps], told)

    def load(self, words: Indices, warps: Indices, line: int) -> None:
        """Records that each of `warps` loads its row of `words`."""
        self.check_load(words, warps, line)
        self.read_clock[words, (warps % self.warps)[:, None]] = self.clocks[warps, warps][:, None]
        self.read_line[words] = line

    def check_load(self, words: Indices, warps: Indices, line: int) -> None:
        late = self.clocks[warps[:, None], self.writer[words]] < self.write_clock[words]
        self.report(late, words, warps, f"is loaded in line {line}", self.write_line, "stored")

    def store(self, words: Indices, warps: Indices, line: int) -> None:
        """Records that each of `warps` stores its row of `words`."""
        self.check_store(words, warps, line)
        self.writer[words] = warps[:, None]
        self.write_clock[words] = self.clocks[warps, warps][:, None]
        self.write_line[words] = line
        both = self.writer[words] != warps[:, None]
        self.report(both, words, warps, f"is stored in line {line}", self.write_line, "stored")

    def check_store(self, words: Indices, warps: Indices, line: int) -> None:
        self.check_load(words, warps, line)
        readers = (words // self.words * self.warps)[:, :, None] + np.arange(self.warps)
        late = self.read_clock[words] > self.clocks[warps[:, None, None], readers]
        action = f"is stored in line {line}"
        self.report(late.any(axis=2), words, warps, action, self.read_line, "loaded")

    def store_async(self, words: Indices, unit: int, clock: int, line: int) -> None:
        """Records that a copy has written words, which phase `clock` of an mbarrier tells of."""
        self.writer[words] = self.ctas * self.warps + unit
        self.write_clock[words] = clock
        self.write_line[words] = line

    def report(
        self,
        wrong: npt.NDArray[np.bool_],
        words: Indices,
        warps: Indices,
        action: str,
        lines: npt.NDArray[np.int32],
        before: str,
    ) -> None:
        if not wrong.any():
            return
        row, column = np.argwhere(wrong)[0]
        word = int(words[row, column])
        cta, number = divmod(word, self.words)
        raise PtxError(
            f"race: shared byte {4 * number} of CTA {cta} {action} by warp"
            f" {warps[row] % self.warps} of CTA {warps[row] // self.warps} and {before} in line"
            f" {lines[word]} by another one, with nothing between that orders them"
        )
