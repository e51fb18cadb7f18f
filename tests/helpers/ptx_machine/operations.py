"""The table of what opcodes do; other modules fill it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptx_machine.parse import Instruction, PtxError

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

Selection = slice | npt.NDArray[np.intp]
"""Threads that execute an instruction, in order."""

Action = Callable[[Selection], None]
Builder = Callable[["Machine", Instruction, "re.Match[str]"], Action]
"""Turns an instruction into what it does to a machine."""

TYPES: dict[str, Any] = {
    "pred": np.dtype(np.bool_),
    **{f"{letter}{bits}": np.dtype(f"u{bits // 8}") for letter in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}

_table: list[tuple[re.Pattern[str], Builder]] = []


def operation(pattern: str) -> Callable[[Builder], Builder]:
    """Registers a builder for the opcodes that a regular expression matches whole."""

    def register(builder: Builder) -> Builder:
        _table.append((re.compile(pattern), builder))
        return builder

    return register


def build(machine: Machine, instruction: Instruction) -> Action:
    """What an instruction does.

    Raises:
        PtxError: its opcode is not modelled.
    """
    name = ".".join(instruction.opcode)
    for pattern, builder in _table:
        if match := pattern.fullmatch(name):
            return builder(machine, instruction, match)
    raise PtxError(f"line {instruction.line}: {name} is not modelled")
