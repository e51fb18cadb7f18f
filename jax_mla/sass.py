"""Reads a cubin's machine code: what its launch needs, and whether it may be shipped.

The build runs this on every cubin. It refuses spills, local memory and uniform registers that are
read but never written (compilers before CUDA 13.4 emit them for `cp.async` with an L2 policy).
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
UNIFORM = re.compile(r"\bUR(\d+)")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the machine code says: registers a thread, parameters as {"offset", "size"} in bytes."""

    registers: int
    params: list[dict[str, int]]


class LintError(RuntimeError):
    """A cubin that must not be shipped."""


def _nvdisasm() -> Path:
    """Returns the tool's path. An isolated build has its packages beside the interpreter's own."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return Path(str(file.locate()))
    raise LintError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")


def disassemble(cubin: Path) -> str:
    """Returns nvdisasm's text of `cubin`, sections and attributes included."""
    tool = _nvdisasm()
    result = subprocess.run([tool, cubin], capture_output=True, text=True, check=False)
    if result.returncode:
        raise LintError(f"{cubin.name}: nvdisasm failed: {result.stderr.strip()}")
    return result.stdout


def instructions(text: str) -> list[tuple[str, list[str]]]:
    """Returns (opcode, operands) of every instruction of a disassembly."""
    found = (INSTRUCTION.match(line) for line in text.splitlines())
    return [
        (match[1], [operand.strip() for operand in match[2].split(",")]) for match in found if match
    ]


def uniform_writes(opcode: str, operands: list[str]) -> tuple[set[int], list[str]]:
    """Returns the uniform registers an instruction writes and the operands that are sources."""
    # Predicate results come first, in front of the register result.
    first = next((i for i, o in enumerate(operands) if not re.fullmatch(r"U?P(\d+|T)", o)), None)
    if first is None or not re.fullmatch(r"UR\d+", operands[first]):
        return set(), operands
    register = int(operands[first][2:])
    width = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    return set(range(register, register + width)), operands[first + 1 :]


def undefined_uniforms(text: str) -> list[str]:
    """Returns the instructions that read a uniform register which no instruction writes."""
    written: set[int] = set()
    reads: list[tuple[set[int], str]] = []
    for opcode, operands in instructions(text):
        results, sources = uniform_writes(opcode, operands)
        written |= results
        joined = ", ".join(sources)
        used = {int(number) for number in UNIFORM.findall(joined)}
        # A memory descriptor is a pair of registers named by its first.
        used |= {int(number) + 1 for number in re.findall(r"desc\[UR(\d+)\]", joined)}
        reads.append((used, f"{opcode} {', '.join(operands)}"))
    return [instruction for used, instruction in reads if used - written]


def attribute_words(text: str, attribute: str) -> list[list[int]]:
    """Returns the 32-bit-padded numbers of each occurrence of a kernel attribute."""
    values = []
    for block in re.split(r"//----- nvinfo : ", text)[1:]:
        if block.split(maxsplit=1)[0] == attribute:
            groups = re.findall(r"\.(?:word|short|byte)\s+((?:0x\w+(?:, )?)+)", block)
            values.append([int(number, 16) for group in groups for number in group.split(", ")])
    return values


def report(text: str) -> Report:
    """Returns what a disassembly says about the launch."""
    registers = [words[-1] for words in attribute_words(text, "EIATTR_REGCOUNT")]
    params = []
    for words in attribute_words(text, "EIATTR_KPARAM_INFO"):
        # Format, code, index, ordinal, offset, then four bytes whose upper 14 bits are the size.
        ordinal, offset, flags = words[-6], words[-5], words[-4:]
        size = int.from_bytes(bytes(flags), "little") >> 18
        params.append((ordinal, {"offset": offset, "size": size}))
    return Report(
        registers=max(registers), params=[entry for _, entry in sorted(params, key=lambda p: p[0])]
    )


def lint(cubin: Path) -> Report:
    """Returns the report of `cubin`; raises LintError where its code may not be shipped."""
    text = disassemble(cubin)
    undefined = undefined_uniforms(text)
    if undefined:
        raise LintError(
            f"{cubin}: a uniform register is read but never written (a miscompile): {undefined[0]}"
        )
    local = [opcode for opcode, _ in instructions(text) if opcode.startswith(("LDL", "STL"))]
    frames: list[Any] = [words[-1] for words in attribute_words(text, "EIATTR_FRAME_SIZE")]
    if local or any(frames):
        raise LintError(
            f"{cubin}: registers spill: {len(local)} local memory accesses, frames {frames}"
        )
    return report(text)
