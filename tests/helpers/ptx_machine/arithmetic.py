"""Instructions in which every thread works on its own registers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from ptx_machine.operations import TYPES, Action, Selection, operation
from ptx_machine.parse import Instruction, PtxError, Vector

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

Match = re.Match[str]

INTEGER = r"[us](?:16|32|64)"
BITS = r"b(?:16|32|64)"


def _elementwise(
    machine: Machine, instruction: Instruction, kinds: list[str], compute: Callable[..., Any]
) -> Action:
    """destination = compute(sources): the type of the destination, then of each source."""
    destination, *operands = instruction.operands
    target = machine.target(destination, TYPES[kinds[0]])
    sources = [
        machine.source(operand, TYPES[kind])
        for operand, kind in zip(operands, kinds[1:], strict=True)
    ]

    def act(threads: Selection) -> None:
        target[threads] = compute(*[source[threads] for source in sources])

    return act


def _quotient(a: Any, b: Any) -> Any:
    if (b == 0).any():
        raise PtxError("an integer is divided by 0")
    magnitude = np.abs(a) // np.abs(b)  # towards zero
    return np.where((a < 0) != (b < 0), -magnitude, magnitude)


_BINARY: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@operation(rf"(?P<name>add|sub|mul\.lo|min|max|div|rem)\.(?P<kind>{INTEGER})")
@operation(rf"(?P<name>and|or|xor)\.(?P<kind>{BITS}|pred)")
@operation(r"(?P<name>add|sub)\.(?:rn\.)?(?P<kind>f32)")
def _binary(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, [match["kind"]] * 3, _BINARY[match["name"]])


@operation(r"mul\.(?:rn\.)?(?P<kind>f32)")
def _multiply(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, ["f32"] * 3, np.multiply)


@operation(r"(?P<name>min|max)\.relu\.s32")
def _extreme_from_zero(machine: Machine, instruction: Instruction, match: Match) -> Action:
    extreme = _BINARY[match["name"]]

    def compute(a: Any, b: Any) -> Any:
        return np.maximum(extreme(a, b), 0)

    return _elementwise(machine, instruction, ["s32"] * 3, compute)


@operation(r"(?P<name>min|max)\.f32")
def _float_extreme(machine: Machine, instruction: Instruction, match: Match) -> Action:
    # A NaN gives way to a number.
    compute = np.fmin if match["name"] == "min" else np.fmax
    return _elementwise(machine, instruction, ["f32"] * 3, compute)


def _fused(a: Any, b: Any, c: Any) -> Any:
    # The product is exact in float64; the sum is rounded there and once more.
    return np.multiply(a, b, dtype=np.float64) + c


@operation(r"fma\.rn\.f32")
def _fma(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, ["f32"] * 4, _fused)


@operation(rf"mad\.lo\.(?P<kind>{INTEGER})")
def _mad(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, [match["kind"]] * 4, lambda a, b, c: a * b + c)


@operation(r"(?P<name>mul|mad)\.wide\.(?P<sign>[us])(?P<bits>16|32)")
def _wide(machine: Machine, instruction: Instruction, match: Match) -> Action:
    narrow, wide = match["sign"] + match["bits"], f"{match['sign']}{2 * int(match['bits'])}"

    def compute(a: Any, b: Any, c: Any = 0) -> Any:
        return a.astype(TYPES[wide]) * b + c

    kinds = [wide, narrow, narrow] + [wide] * (match["name"] == "mad")
    return _elementwise(machine, instruction, kinds, compute)


_UNARY: dict[str, Callable[..., Any]] = {"neg": np.negative, "abs": np.abs, "not": np.invert}


@operation(r"(?P<name>neg|abs)\.(?P<kind>s(?:16|32|64)|f32)")
@operation(rf"(?P<name>not)\.(?P<kind>{BITS}|pred)")
def _unary(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, [match["kind"]] * 2, _UNARY[match["name"]])


@operation(r"rcp\.rn\.f32")
def _reciprocal(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, ["f32"] * 2, lambda x: np.float32(1) / x)


@operation(r"rsqrt\.approx(?P<flush>\.ftz)?\.f32")
def _rsqrt(machine: Machine, instruction: Instruction, match: Match) -> Action:
    # The hardware's is within 2**-22.9; this one is rounded correctly.
    def compute(x: Any) -> Any:
        if match["flush"]:
            x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)
        return 1 / np.sqrt(x, dtype=np.float64)

    return _elementwise(machine, instruction, ["f32"] * 2, compute)


@operation(r"(?P<name>shl)\.b(?P<bits>16|32|64)")
@operation(r"(?P<name>shr)\.(?P<sign>[bus])(?P<bits>16|32|64)")
def _shift(machine: Machine, instruction: Instruction, match: Match) -> Action:
    bits = int(match["bits"])
    kind = f"s{bits}" if match.groupdict().get("sign") == "s" else f"b{bits}"
    shift = np.left_shift if match["name"] == "shl" else np.right_shift
    most = TYPES[kind].type(bits - 1)

    def compute(a: Any, amount: Any) -> Any:
        shifted = shift(a, np.minimum(amount, bits - 1).astype(a.dtype))
        gone = (a < 0) * a.dtype.type(-1) if kind[0] == "s" else a.dtype.type(0)
        return np.where(amount > most.astype(np.uint32), gone, shifted)

    return _elementwise(machine, instruction, [kind, kind, "b32"], compute)


_COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@operation(r"setp\.(?P<name>eq|ne|lt|le|gt|ge)\.(?P<kind>[bus](?:16|32|64)|f32)")
def _setp(machine: Machine, instruction: Instruction, match: Match) -> Action:
    compute = _COMPARE[match["name"]]
    if match["kind"] == "f32" and match["name"] == "ne":  # ordered, as the others are

        def compute(a: Any, b: Any) -> Any:
            return (a < b) | (a > b)

    return _elementwise(machine, instruction, ["pred", match["kind"], match["kind"]], compute)


@operation(r"selp\.(?P<kind>[bus](?:16|32|64)|f32)")
def _selp(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def compute(a: Any, b: Any, choice: Any) -> Any:
        return np.where(choice, a, b)

    kind = match["kind"]
    return _elementwise(machine, instruction, [kind, kind, kind, "pred"], compute)


@operation(r"mov\.(?P<kind>pred|[bus](?:16|32|64)|f32)")
def _move(machine: Machine, instruction: Instruction, match: Match) -> Action:
    kind = match["kind"]
    if any(isinstance(operand, Vector) for operand in instruction.operands):
        return _move_parts(machine, instruction, kind)
    return _elementwise(machine, instruction, [kind, kind], lambda a: a)


def _move_parts(machine: Machine, instruction: Instruction, kind: str) -> Action:
    """Between a register and two that hold its halves."""
    destination, source = instruction.operands
    half = np.dtype(f"u{TYPES[kind].itemsize // 2}")
    if isinstance(source, Vector):
        parts = [machine.source(item, half) for item in source.items]
        whole = _halves(machine.target(destination, TYPES[kind]), half)

        def pack(threads: Selection) -> None:
            whole[threads] = np.stack([part[threads] for part in parts], axis=1)

        return pack
    assert isinstance(destination, Vector)
    targets = [machine.target(item, half) for item in destination.items]
    halves = _halves(machine.source(source, TYPES[kind]), half)

    def unpack(threads: Selection) -> None:
        for i, target in enumerate(targets):
            target[threads] = halves[threads, i]

    return unpack


def _halves(values: Any, dtype: Any) -> Any:
    """[thread, 2] halves of [thread] values."""
    return np.ascontiguousarray(values).view(dtype).reshape(-1, 2)


_PACKED: dict[str, Callable[..., Any]] = {"add": np.add, "mul": np.multiply, "fma": _fused}


@operation(r"(?P<name>add|mul|fma)\.rn\.f32x2")
def _packed(machine: Machine, instruction: Instruction, match: Match) -> Action:
    compute = _PACKED[match["name"]]
    destination, *operands = instruction.operands
    target = _halves(machine.target(destination, TYPES["b64"]), np.float32)
    sources = [_halves(machine.source(operand, TYPES["b64"]), np.float32) for operand in operands]

    def act(threads: Selection) -> None:
        target[threads] = compute(*[source[threads] for source in sources])

    return act


@operation(r"cvt\.(?P<to>[us](?:8|16|32|64))\.(?P<of>[us](?:8|16|32|64))")
@operation(r"cvt\.rn\.(?P<to>f32)\.(?P<of>[us](?:8|16|32|64))")
def _convert(machine: Machine, instruction: Instruction, match: Match) -> Action:
    kind = match["to"]
    return _elementwise(machine, instruction, [kind, match["of"]], lambda a: a.astype(TYPES[kind]))


def to_bf16(x: Any) -> Any:
    """Bits of the nearest bf16, ties to even; any NaN is 0x7FFF."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint32)


@operation(r"cvt\.rn\.bf16x2\.f32")
def _convert_bf16x2(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def compute(high: Any, low: Any) -> Any:
        return to_bf16(high) << 16 | to_bf16(low)

    return _elementwise(machine, instruction, ["b32", "f32", "f32"], compute)


@operation(r"cvt\.rn\.bf16\.f32")
def _convert_bf16(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, ["b16", "f32"], to_bf16)


@operation(r"cvt\.f32\.bf16")
def _convert_from_bf16(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return _elementwise(machine, instruction, ["b32", "b16"], lambda a: a.astype(np.uint32) << 16)


@operation(r"cvt\.rn\.satfinite\.e4m3x2\.f32")
def _convert_e4m3x2(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def byte(x: Any) -> Any:
        rounded = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        return np.where(np.isnan(x), 0x7F, rounded).astype(np.uint16)

    def compute(high: Any, low: Any) -> Any:
        return byte(high) << 8 | byte(low)

    return _elementwise(machine, instruction, ["b16", "f32", "f32"], compute)


@operation(r"prmt\.b32")
def _permute(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def compute(a: Any, b: Any, selector: Any) -> Any:
        both = b.astype(np.uint64) << np.uint64(32) | a
        result = np.zeros_like(a)
        for i in range(4):
            choice = selector >> (4 * i)
            byte = (both >> (8 * (choice & 7)).astype(np.uint64)).astype(np.uint32) & 0xFF
            sign = np.where(byte & 0x80, np.uint32(0xFF), np.uint32(0))
            result |= np.where(choice & 8, sign, byte) << (8 * i)
        return result

    return _elementwise(machine, instruction, ["b32"] * 4, compute)


@operation(r"lop3\.b32")
def _lop3(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def compute(a: Any, b: Any, c: Any, table: Any) -> Any:
        result = np.zeros_like(a)
        for i in range(8):
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result |= np.where(table >> i & 1, term, np.uint32(0))
        return result

    return _elementwise(machine, instruction, ["b32"] * 5, compute)
