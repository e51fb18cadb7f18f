"""The threads of one cluster: their registers, and who runs next."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx_machine import arithmetic, control, transfers, warps  # noqa: F401  fill the table
from ptx_machine.barriers import Barriers, ClusterBarrier, CopyGroups
from ptx_machine.memory import SHARED_START, GlobalMemory, Indices, SharedMemory
from ptx_machine.operations import TYPES, Action, Selection, build
from ptx_machine.parse import Address, Immediate, Instruction, Program, PtxError, Register
from ptx_machine.races import Races

LANES = warps.LANES
MOST_STEPS = 200_000
"""Blocks after which a cluster is taken to be in an endless loop; kernels take a few thousand."""
_NOWHERE = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True)
class Block:
    """Instructions that threads execute one after the other, the last may make them part."""

    instructions: list[Instruction]
    actions: list[Action]
    needs_warp: bool
    jumps: bool


class Machine:
    """A cluster of `ctas` CTAs of `block` threads each, which run one program in step.

    All threads at the place that comes first in the program run next, so threads that parted meet
    again. Warps and CTAs therefore do not run ahead of each other; that they may is what `Races`
    checks.
    """

    def __init__(
        self,
        program: Program,
        *,
        ctas: int,
        block: int,
        grid: Sequence[int],
        shared_bytes: int,
        parameters: dict[str, int],
        memory: GlobalMemory,
    ) -> None:
        if block % LANES:
            raise PtxError(f"a CTA must have whole warps, got {block} threads")
        self.program, self.parameters, self.memory = program, parameters, memory
        self.ctas, self.block = ctas, block
        self.count = ctas * block
        self.threads: Indices = np.arange(self.count)
        self.cta_of: Indices = self.threads // block
        self.warp_of: Indices = self.threads // LANES
        self.races = Races(ctas, block // LANES, -(-shared_bytes // 128) * 32)
        self.shared = SharedMemory(ctas, shared_bytes, self.races)
        self.ready = np.zeros(self.count, np.bool_)
        self.ended = np.zeros(self.count, np.bool_)
        self.refused = np.zeros(self.count, np.bool_)
        self.unfenced = np.zeros(self.count, np.bool_)
        self.at = np.zeros(self.count, np.int32)
        self.barriers = Barriers(self.shared, self.races, self.ready, self.has_ended)
        self.groups = CopyGroups(self.shared, memory, self.warp_of)
        self.cluster = ClusterBarrier(self.races, self.count)
        self.number = 1
        self.registers = self._registers()
        self.special = self._special(grid)
        self.blocks = self._blocks()

    def _registers(self) -> dict[str, Any]:
        by_type: dict[Any, list[str]] = {}
        for name, kind in self.program.registers.items():
            if kind not in TYPES:
                raise PtxError(f"{name}: registers of type {kind} are not modelled")
            size = TYPES[kind].itemsize
            by_type.setdefault(TYPES[kind] if kind == "pred" else np.dtype(f"u{size}"), []).append(
                name
            )
        self.files = {
            kind: np.empty((len(names), self.count), kind) for kind, names in by_type.items()
        }
        return {
            name: self.files[kind][i]
            for kind, names in by_type.items()
            for i, name in enumerate(names)
        }

    def _special(self, grid: Sequence[int]) -> dict[str, Any]:
        def all_threads(value: Any) -> Any:
            return np.broadcast_to(np.asarray(value, np.uint32), (self.count,))

        self.cta_index = np.zeros((3, self.count), np.uint32)
        self.clock = np.zeros(self.count, np.uint64)
        found = {
            "%tid.x": all_threads(self.threads % self.block),
            "%tid.y": all_threads(0),
            "%tid.z": all_threads(0),
            "%ntid.x": all_threads(self.block),
            "%ntid.y": all_threads(1),
            "%ntid.z": all_threads(1),
            "%laneid": all_threads(self.threads % LANES),
            "%cluster_ctarank": all_threads(self.cta_of),
            "%cluster_ctaid.x": all_threads(self.cta_of),
            "%cluster_nctarank": all_threads(self.ctas),
            "%cluster_nctaid.x": all_threads(self.ctas),
            "%globaltimer": self.clock,
        }
        for i, axis in enumerate("xyz"):
            found[f"%ctaid.{axis}"] = self.cta_index[i]
            found[f"%nctaid.{axis}"] = all_threads(grid[i])
        for name in self.program.shared:
            found[name] = all_threads(SHARED_START)
        return found

    def _blocks(self) -> list[Block]:
        instructions = self.program.instructions
        starts = {0, len(instructions), *self.program.labels.values()}
        for i, instruction in enumerate(instructions):
            name = ".".join(instruction.opcode)
            if control.ENDS_BLOCK.match(name):
                starts.add(i + 1)
            if control.WAITS.match(name):
                starts.add(i)
        order = sorted(starts)
        self.block_at = {start: i for i, start in enumerate(order)}
        self.index_of = {id(instruction): i for i, instruction in enumerate(instructions)}
        blocks = []
        for start, end in itertools.pairwise(order):
            inside = instructions[start:end]
            names = [".".join(instruction.opcode) for instruction in inside]
            blocks.append(
                Block(
                    instructions=inside,
                    actions=[self._action(instruction) for instruction in inside],
                    needs_warp=any(control.NEEDS_WARP.match(name) for name in names),
                    jumps=bool(control.ENDS_BLOCK.match(names[-1])),
                )
            )
        return blocks

    def _action(self, instruction: Instruction) -> Action:
        action = build(self, instruction)
        if instruction.guard is None or instruction.opcode[0] == "bra":
            return action
        name = ".".join(instruction.opcode)
        if control.ENDS_BLOCK.match(name) or control.NEEDS_WARP.match(name):
            raise PtxError(f"line {instruction.line}: not modelled with a predicate")
        register, negated = instruction.guard
        predicate = self.source(register, TYPES["pred"])

        def guarded(threads: Selection) -> None:
            chosen = self.threads[threads][predicate[threads] != negated]
            if chosen.size:
                action(chosen)

        return guarded

    # What builders of instructions ask for.

    def source(self, operand: Any, dtype: Any) -> Any:
        """[thread] values of an operand, as they are when it is indexed."""
        if isinstance(operand, Register):
            values = self.registers[operand.name]
            if dtype == np.bool_ or values.dtype == np.bool_:
                if dtype != values.dtype:
                    raise PtxError(f"{operand.name}: a predicate among other registers")
                return values
            parts = values.itemsize // dtype.itemsize
            if not parts:
                raise PtxError(f"{operand.name}: {dtype.itemsize} bytes are wanted, it is smaller")
            return values.view(dtype)[::parts]
        if isinstance(operand, Immediate):
            if operand.width not in (None, 8 * dtype.itemsize):
                raise PtxError(f"a constant of {operand.width} bits where {dtype} is wanted")
            if dtype == np.bool_:
                value = np.asarray(bool(operand.value))
            else:
                unsigned = np.dtype(f"u{dtype.itemsize}")
                value = np.asarray(operand.value % (1 << 8 * dtype.itemsize), unsigned).view(dtype)
            return np.broadcast_to(value, (self.count,))
        if operand in self.special:
            return self.special[operand].view(dtype)
        raise PtxError(f"{operand} is not modelled")

    def target(self, operand: Any, dtype: Any) -> Any:
        """[thread] places of a register of just this size, or what nobody reads for `_`."""
        if operand == "_":
            return np.empty(self.count, dtype)
        if not isinstance(operand, Register):
            raise PtxError(f"{operand}: a register was expected")
        values = self.registers[operand.name]
        if values.itemsize != dtype.itemsize or (values.dtype == np.bool_) != (dtype == np.bool_):
            raise PtxError(f"{operand.name}: a register of {dtype} was expected")
        return values.view(dtype)

    def wide_target(self, operand: Any, dtype: Any) -> Any:
        """[thread] places of a register of at least this size; values are extended to it."""
        if not isinstance(operand, Register):
            raise PtxError(f"{operand}: a register was expected")
        values = self.registers[operand.name]
        if values.itemsize == dtype.itemsize:
            return self.target(operand, dtype)
        if values.itemsize < dtype.itemsize or dtype.kind == "f":
            raise PtxError(f"{operand.name}: a register of {dtype} was expected")
        return values.view(np.dtype(f"{dtype.kind}{values.itemsize}"))

    def address(self, operand: Any, dtype: Any) -> tuple[Any, Any]:
        """[thread] base of an address and the offset to add to it."""
        if not isinstance(operand, Address):
            raise PtxError(f"{operand}: an address was expected")
        base = Immediate(0) if operand.base is None else operand.base
        offset = np.asarray(operand.offset % (1 << 8 * dtype.itemsize), dtype)
        return self.source(base, dtype), offset

    def block_of(self, label: str) -> int:
        return self.block_at[self.program.labels[label]]

    def block_after(self, instruction: Instruction) -> int:
        return self.block_at[self.index_of[id(instruction)] + 1]

    def has_ended(self, cta: int) -> bool:
        return bool(self.ended[self.cta_of == cta].all())

    def arrive(self, cta: int, number: int, threads: Indices) -> None:
        """Threads of a CTA arrive at one of its barriers."""
        waiting = self.waiting.setdefault((cta, number), [])
        waiting.append(threads)
        if sum(len(part) for part in waiting) == self.block:
            del self.waiting[cta, number]
            everyone = np.unique(self.warp_of[self.cta_of == cta])
            self.races.acquire(everyone, self.races.release(everyone))
            self.ready[self.cta_of == cta] = True

    # Running.

    def run(self, first: Sequence[int]) -> None:
        """Runs a cluster whose first CTA has this index."""
        self.start(first)
        for _ in range(MOST_STEPS):
            if not self.advance():
                break
        else:
            raise PtxError(f"an endless loop: {self._whereabouts()}")
        self.finish()
        self.number += self.count

    def advance(self) -> bool:
        """Runs some threads up to where they may part; False where none can run."""
        return self._step() or self.barriers.deliver()

    def finish(self) -> None:
        """Raises PtxError where a cluster that cannot advance has not come to its end."""
        if not self.ended.all():
            raise PtxError(f"deadlock: {self._whereabouts()}")
        lines = [copy.line for copy in self.barriers.copies]
        lines += [copy.line for copy in self.groups.copies]
        if lines:
            raise PtxError(f"line {lines[0]}: nobody waits for the bytes of a copy")

    def start(self, first: Sequence[int]) -> None:
        """Places a cluster whose first CTA has this index before its first instruction."""
        for kind, file in self.files.items():
            file.fill(False if kind == np.bool_ else 0xFFF0DEAD % (1 << 8 * kind.itemsize))
        for i in range(3):
            self.cta_index[i] = first[i]
        self.cta_index[0] += self.cta_of.astype(np.uint32)
        self.ready.fill(True)
        for flags in (self.ended, self.refused, self.unfenced):
            flags.fill(False)
        self.at.fill(0)
        self.waiting: dict[tuple[int, int], list[Indices]] = {}
        for part in (self.races, self.shared, self.barriers, self.groups, self.cluster):
            part.reset()

    def _step(self) -> bool:
        """Runs the threads at the first place where some can; False where there is none."""
        places = np.where(self.ready, self.at, _NOWHERE)
        first = places.min()
        if first == _NOWHERE:
            return False
        if places.max() == first:
            self._execute(int(first), slice(0, self.count))
            return True
        for place in np.unique(places[self.ready]):
            chosen = places == place
            if self.blocks[place].needs_warp:
                chosen &= np.repeat(chosen.reshape(-1, LANES).all(axis=1), LANES)
            found = np.flatnonzero(chosen)
            if found.size:
                whole = found[-1] - found[0] + 1 == found.size
                self._execute(
                    int(place), slice(int(found[0]), int(found[-1]) + 1) if whole else found
                )
                return True
        return False

    def _execute(self, place: int, threads: Selection) -> None:
        block = self.blocks[place]
        if not block.jumps:
            self.at[threads] = place + 1
        done = 0
        try:
            for action in block.actions:
                action(threads)
                done += 1
        except PtxError as error:
            instruction = block.instructions[done]
            raise PtxError(f"line {instruction.line}: {instruction.text}: {error}") from error

    def _whereabouts(self) -> str:
        """Where the threads are that have not ended."""
        parts = []
        for place in np.unique(self.at[~self.ended]):
            there = np.flatnonzero(~self.ended & (self.at == place))
            ctas = np.unique(self.cta_of[there])
            if place < len(self.blocks):
                instruction = self.blocks[place].instructions[0]
                where = f"line {instruction.line}: {instruction.text}"
            else:
                where = "the end"
            parts.append(f"{len(there)} threads of CTAs {ctas.tolist()} at or just before {where}")
        return "; ".join(parts)
