"""Branches, barriers and what else decides when a thread goes on.

An action here may end a block: it sets where its threads go on and whether they can.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from ptx_machine.operations import TYPES, Action, Selection, operation
from ptx_machine.parse import Immediate, Instruction, PtxError

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

Match = re.Match[str]

SHARED = r"(?:\.shared(?:::cta)?)?"

ENDS_BLOCK = re.compile(
    r"bra|ret|exit|(?:bar|barrier)(?:\.cta)?\.sync|barrier\.cluster\.wait"
    r"|mbarrier\.(?:try|test)_wait"
)
"""Starts of the opcodes after which threads may part, or before which they may have to wait."""

WAITS = re.compile(r"mbarrier\.(?:try|test)_wait|barrier\.cluster\.wait")
"""Of these, those that a thread executes again when it wakes up."""

NEEDS_WARP = re.compile(r"bar\.(?:warp\.)?sync|shfl|vote|mma|ldmatrix|.*\.aligned")
"""Those that all threads of a warp execute together."""


@operation(r"bra(?:\.uni)?")
def _branch(machine: Machine, instruction: Instruction, match: Match) -> Action:
    target = machine.block_of(str(instruction.operands[0]))
    following = machine.block_after(instruction)
    if instruction.guard is None:

        def jump(threads: Selection) -> None:
            machine.at[threads] = target

        return jump
    register, negated = instruction.guard
    predicate = machine.source(register, TYPES["pred"])

    def branch(threads: Selection) -> None:
        machine.at[threads] = np.where(predicate[threads] != negated, target, following)

    return branch


@operation(r"ret|exit")
def _return(machine: Machine, instruction: Instruction, match: Match) -> Action:
    following = machine.block_after(instruction)

    def act(threads: Selection) -> None:
        machine.at[threads] = following
        machine.ready[threads] = False
        machine.ended[threads] = True

    return act


@operation(r"griddepcontrol\.(?:wait|launch_dependents)|fence\.proxy\.async(?:\.[\w:]+)*")
@operation(r"(?:fence|membar)\.(?:acq_rel|sc|cta|gl|sys)(?:\.(?:cta|cluster|gpu|sys))?")
def _nothing(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return lambda threads: None


@operation(r"bar\.sync|barrier(?:\.cta)?\.sync(?:\.aligned)?")
def _block_barrier(machine: Machine, instruction: Instruction, match: Match) -> Action:
    if len(instruction.operands) != 1 or not isinstance(instruction.operands[0], Immediate):
        raise PtxError(f"line {instruction.line}: a barrier of all threads was expected")
    number = instruction.operands[0].value
    following = machine.block_after(instruction)

    def act(threads: Selection) -> None:
        chosen = machine.threads[threads]
        machine.at[threads] = following
        machine.ready[threads] = False
        for cta in np.unique(machine.cta_of[chosen]):
            machine.arrive(int(cta), number, chosen[machine.cta_of[chosen] == cta])

    return act


@operation(r"barrier\.cluster\.arrive(?P<relaxed>\.relaxed|\.release)?(?:\.aligned)?")
def _cluster_arrive(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def act(threads: Selection) -> None:
        if match["relaxed"] == ".relaxed" and machine.unfenced[threads].any():
            raise PtxError("a relaxed arrival after mbarrier.init without fence.mbarrier_init")
        chosen = machine.threads[threads]
        machine.cluster.arrive(chosen, machine.warp_of[chosen], machine.ready)

    return act


@operation(r"barrier\.cluster\.wait(?:\.acquire)?(?:\.aligned)?")
def _cluster_wait(machine: Machine, instruction: Instruction, match: Match) -> Action:
    following = machine.block_after(instruction)

    def act(threads: Selection) -> None:
        chosen = machine.threads[threads]
        passing = machine.cluster.passes(chosen)
        if passing.any():
            machine.at[chosen[passing]] = following
            machine.races.acquire(machine.warp_of[chosen[passing]], machine.cluster.completed)
        if not passing.all():
            machine.ready[chosen[~passing]] = False
            machine.cluster.waiting.append(chosen[~passing])

    return act


@operation(r"fence\.mbarrier_init\.release\.cluster")
def _fence(machine: Machine, instruction: Instruction, match: Match) -> Action:
    def act(threads: Selection) -> None:
        machine.unfenced[threads] = False

    return act


@operation(rf"mbarrier\.init{SHARED}\.b64")
def _init(machine: Machine, instruction: Instruction, match: Match) -> Action:
    base, offset = machine.address(instruction.operands[0], TYPES["b32"])
    counts = machine.source(instruction.operands[1], TYPES["b32"])

    def act(threads: Selection) -> None:
        chosen = machine.threads[threads]
        own, warps = machine.cta_of[chosen], machine.warp_of[chosen]
        places = machine.shared.places(base[chosen] + offset, own, 8)
        for i, place in enumerate(places):
            count = int(counts[chosen[i]])
            machine.barriers.init(int(place), count, warps[i : i + 1], instruction.line)
        machine.unfenced[threads] = True

    return act


@operation(
    rf"mbarrier\.arrive(?P<expects>\.expect_tx)?(?:\.release\.(?:cta|cluster))?{SHARED}\.b64"
)
def _arrive(machine: Machine, instruction: Instruction, match: Match) -> Action:
    # The state that it returns serves waits that are not by parity, which are not modelled.
    _, address, *operand = instruction.operands
    base, offset = machine.address(address, TYPES["b32"])
    amounts = machine.source(operand[0] if operand else Immediate(1), TYPES["b32"])

    def act(threads: Selection) -> None:
        chosen = machine.threads[threads]
        own, warps = machine.cta_of[chosen], machine.warp_of[chosen]
        places = machine.shared.places(base[chosen] + offset, own, 8)
        for i, place in enumerate(places):
            warp, amount = warps[i : i + 1], int(amounts[chosen[i]])
            barrier = machine.barriers.at(int(place), warp, instruction.line)
            if match["expects"]:
                machine.barriers.expect(barrier, amount)
            machine.barriers.arrive(barrier, 1 if match["expects"] else amount, warp)

    return act


@operation(rf"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire\.(?:cta|cluster))?{SHARED}\.b64")
def _wait(machine: Machine, instruction: Instruction, match: Match) -> Action:
    result, address, parity = instruction.operands[:3]
    target = machine.target(result, TYPES["pred"])
    base, offset = machine.address(address, TYPES["b32"])
    parities = machine.source(parity, TYPES["b32"])
    following = machine.block_after(instruction)

    def act(threads: Selection) -> None:
        # Tells a thread once that the phase is not complete, as the hardware may; a thread that
        # tries again sleeps until it is.
        chosen = machine.threads[threads]
        places = machine.shared.places(base[chosen] + offset, machine.cta_of[chosen], 8)
        for place in np.unique(places):
            group = chosen[places == place]
            warps = machine.warp_of[group]
            barrier = machine.barriers.at(int(place), warps, instruction.line)
            done = np.where(parities[group] & 1, barrier.done(1), barrier.done(0))
            sleeps = ~done & machine.refused[group]
            target[group] = done
            machine.refused[group] = ~done
            machine.at[group[~sleeps]] = following
            if done.any():
                machine.races.acquire(warps[done], barrier.completed)
            if sleeps.any():
                machine.ready[group[sleeps]] = False
                barrier.waiting.append(group[sleeps])

    return act
