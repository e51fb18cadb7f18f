"""Instructions that the 32 threads of a warp execute together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_machine.operations import TYPES, Action, Selection, operation
from ptx_machine.parse import Immediate, Instruction, PtxError, Vector

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

LANES = 32
Match = re.Match[str]


def require_all_lanes(instruction: Instruction, mask: Any) -> None:
    """A constant that names all lanes: other masks are not modelled."""
    if not (isinstance(mask, Immediate) and mask.value & 0xFFFFFFFF == 0xFFFFFFFF):
        raise PtxError(f"line {instruction.line}: a mask of all lanes was expected, got {mask}")


def _constant(instruction: Instruction, operand: Any) -> int:
    if not isinstance(operand, Immediate):
        raise PtxError(f"line {instruction.line}: a constant was expected, got {operand}")
    return operand.value


@operation(r"bar\.warp\.sync")
def _warp_barrier(machine: Machine, instruction: Instruction, match: Match) -> Action:
    require_all_lanes(instruction, instruction.operands[0])
    return lambda threads: None


@operation(r"shfl\.sync\.(?P<mode>bfly|idx|up|down)\.b32")
def _shuffle(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, source, distance, bounds, mask = instruction.operands
    require_all_lanes(instruction, mask)
    by, c = _constant(instruction, distance), _constant(instruction, bounds)
    clamp, segment = c & 31, c >> 8 & 31
    lane = np.arange(LANES)
    last = (lane & segment) | (clamp & ~segment)
    partner = {
        "bfly": lane ^ by,
        "idx": (lane & segment) | (by & ~segment),
        "up": lane - by,
        "down": lane + by,
    }[match["mode"]]
    inside = partner >= last if match["mode"] == "up" else partner <= last
    partner = np.where(inside, partner, lane)
    value = machine.source(source, TYPES["b32"])
    target = machine.target(destination, TYPES["b32"])

    def act(threads: Selection) -> None:
        target[threads] = value[threads].reshape(-1, LANES)[:, partner].reshape(-1)

    return act


@operation(r"vote\.sync\.(?P<mode>any|all)\.pred")
def _vote(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, source, mask = instruction.operands
    require_all_lanes(instruction, mask)
    value = machine.source(source, TYPES["pred"])
    target = machine.target(destination, TYPES["pred"])
    reduce = np.any if match["mode"] == "any" else np.all

    def act(threads: Selection) -> None:
        target[threads] = np.repeat(reduce(value[threads].reshape(-1, LANES), axis=1), LANES)

    return act


@operation(r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>[124])(?P<turned>\.trans)?\.shared\.b16")
def _load_matrices(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, address = instruction.operands
    count = int(match["count"])
    assert isinstance(destination, Vector)
    targets = [machine.target(item, TYPES["b32"]) for item in destination.items]
    base, offset = machine.address(address, TYPES["b32"])
    half = np.dtype(np.uint16)

    def act(threads: Selection) -> None:
        # Lane i names row i % 8 of matrix i // 8.
        chosen = machine.threads[threads].reshape(-1, LANES)[:, : 8 * count].reshape(-1)
        places = machine.shared.places(base[chosen] + offset, machine.cta_of[chosen], 16)
        warps = machine.warp_of[chosen]
        rows = machine.shared.load(places, half, 8, warps, instruction.line)
        matrices = rows.reshape(-1, count, 8, 8)
        if match["turned"]:
            matrices = matrices.transpose(0, 1, 3, 2)
        # Lane 4 r + q holds columns 2 q, 2 q + 1 of row r.
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, LANES)
        for i, target in enumerate(targets):
            target[threads] = words[:, i].reshape(-1)

    return act


def _floats(words: Any) -> Any:
    """[..., 2] float32 of words of two bf16, the low one first."""
    halves = np.stack([words << 16, words & np.uint32(0xFFFF0000)], axis=-1)
    return halves.view(np.float32)


@operation(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32")
def _multiply(machine: Machine, instruction: Instruction, match: Match) -> Action:
    vectors = [operand for operand in instruction.operands if isinstance(operand, Vector)]
    targets = [machine.target(item, TYPES["f32"]) for item in vectors[0].items]
    a, b = ([machine.source(i, TYPES["b32"]) for i in vector.items] for vector in vectors[1:3])
    c = [machine.source(item, TYPES["f32"]) for item in vectors[3].items]

    def act(threads: Selection) -> None:
        # Lane 4 g + t. a: word (column half, row half) holds row g + 8 half, columns 2 t, 2 t + 1.
        words = np.stack([source[threads] for source in a]).reshape(2, 2, -1, 8, 4)
        left = _floats(words).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        # b: word (row half) holds column g, rows 2 t, 2 t + 1.
        words = np.stack([source[threads] for source in b]).reshape(2, -1, 8, 4)
        right = _floats(words).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        # c: value (row half, i) is of row g + 8 half, column 2 t + i.
        values = np.stack([source[threads] for source in c]).reshape(2, 2, -1, 8, 4)
        start = values.transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        # One rounding; the hardware's are its own.
        product = np.matmul(left, right, dtype=np.float64) + start
        result = product.astype(np.float32).reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
        for i, target in enumerate(targets):
            target[threads] = result[i // 2, i % 2].reshape(-1)

    return act
