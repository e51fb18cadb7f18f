"""Loads, stores and asynchronous copies."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_machine.barriers import Copy
from ptx_machine.memory import CTA_BITS, SHARED_START
from ptx_machine.operations import TYPES, Action, Selection, operation
from ptx_machine.parse import Address, Immediate, Instruction, PtxError, Vector

if TYPE_CHECKING:
    from ptx_machine.machine import Machine

Match = re.Match[str]

KIND = r"(?:\.v(?P<count>[24]))?\.(?P<kind>[bus](?:8|16|32|64)|f32)"


def _items(operand: Any) -> list[Any]:
    return list(operand.items) if isinstance(operand, Vector) else [operand]


@operation(r"ld\.param\.(?P<kind>[bus](?:32|64)|f32)")
def _load_parameter(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, address = instruction.operands
    assert isinstance(address, Address)
    if address.offset or address.base not in machine.parameters:
        raise PtxError(f"line {instruction.line}: a whole parameter was expected")
    bits = Immediate(machine.parameters[str(address.base)])
    value = machine.source(bits, np.dtype(f"u{TYPES[match['kind']].itemsize}"))
    target = machine.target(destination, value.dtype)

    def act(threads: Selection) -> None:
        target[threads] = value[threads]

    return act


@operation(rf"ld\.(?P<strong>relaxed\.sys)\.(?P<space>global){KIND}")
@operation(rf"ld\.(?P<space>global|shared)(?:::cta)?(?P<constant>\.nc)?{KIND}")
def _load(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, address = instruction.operands
    dtype, count = TYPES[match["kind"]], int(match["count"] or 1)
    # A register may be wider than the value, which is then extended.
    targets = [machine.wide_target(item, dtype) for item in _items(destination)]
    shared, how = match["space"] == "shared", match.groupdict()
    load = machine.memory.load_strong if how.get("strong") else machine.memory.load
    base, offset = machine.address(address, TYPES["b32" if shared else "b64"])

    def act(threads: Selection) -> None:
        chosen, addresses = machine.threads[threads], base[threads] + offset
        if shared:
            own, warps = machine.cta_of[threads], machine.warp_of[threads]
            places = machine.shared.places(addresses, own, dtype.itemsize * count)
            if (places // machine.shared.room != own).any():
                raise PtxError("ld.shared of another CTA's memory")
            values = machine.shared.load(places, dtype, count, warps, instruction.line)
        elif how.get("constant"):
            values = machine.memory.load_constant(addresses, dtype, count)
        else:
            values = load(addresses, dtype, count, machine.number + chosen)
        for i, target in enumerate(targets):
            target[threads] = values[:, i]

    return act


@operation(rf"st\.(?P<strong>relaxed\.sys)\.(?P<space>global){KIND}")
@operation(rf"st\.(?P<space>global|shared)(?:::cta)?{KIND}")
def _store(machine: Machine, instruction: Instruction, match: Match) -> Action:
    address, source = instruction.operands
    dtype = TYPES[match["kind"]]
    sources = [machine.source(item, dtype) for item in _items(source)]
    shared, strong = match["space"] == "shared", match.groupdict().get("strong")
    store = machine.memory.store_strong if strong else machine.memory.store
    base, offset = machine.address(address, TYPES["b32" if shared else "b64"])

    def act(threads: Selection) -> None:
        values = np.stack([source[threads] for source in sources], axis=1)
        chosen, addresses = machine.threads[threads], base[threads] + offset
        if shared:
            own, warps = machine.cta_of[threads], machine.warp_of[threads]
            width = dtype.itemsize * len(sources)
            places = machine.shared.places(addresses, own, width)
            if (places // machine.shared.room != own).any():
                raise PtxError("st.shared to another CTA's memory")
            machine.shared.store(places, values, warps, instruction.line)
        else:
            store(addresses, values, machine.number + chosen)

    return act


@operation(r"atom\.relaxed\.gpu\.global\.inc\.u32")
def _count_up(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, address, limit = instruction.operands
    target, most = machine.target(destination, TYPES["u32"]), machine.source(limit, TYPES["u32"])
    base, offset = machine.address(address, TYPES["b64"])

    def act(threads: Selection) -> None:
        for thread in machine.threads[threads]:
            one = np.array([thread])
            arguments = base[one] + offset, machine.number + one
            [[old]] = machine.memory.load_strong(arguments[0], TYPES["u32"], 1, arguments[1])
            new = 0 if old >= most[thread] else old + 1
            machine.memory.store_strong(arguments[0], np.array([[new]], np.uint32), arguments[1])
            target[thread] = old

    return act


@operation(r"prefetch\.global\.L[12]")
def _prefetch(machine: Machine, instruction: Instruction, match: Match) -> Action:
    base, offset = machine.address(instruction.operands[0], TYPES["b64"])

    def act(threads: Selection) -> None:
        machine.memory.places(base[threads] + offset, 1)

    return act


@operation(r"mapa\.shared::cluster\.u32")
def _map(machine: Machine, instruction: Instruction, match: Match) -> Action:
    destination, address, rank = instruction.operands
    target = machine.target(destination, TYPES["u32"])
    own, cta = machine.source(address, TYPES["u32"]), machine.source(rank, TYPES["u32"])

    def act(threads: Selection) -> None:
        ranks = cta[threads]
        if (ranks >= machine.ctas).any():
            raise PtxError(f"the cluster has no CTA {ranks.max()}")
        if ((own[threads] >> CTA_BITS) != 0).any() or (own[threads] < SHARED_START).any():
            raise PtxError("mapa of what is no address of this CTA's shared memory")
        target[threads] = own[threads] | (ranks + 1) << CTA_BITS

    return act


@operation(r"cp\.async\.(?:ca|cg)\.shared(?:::cta)?\.global(?P<hint>\.L2::cache_hint)?")
def _copy(machine: Machine, instruction: Instruction, match: Match) -> Action:
    to, of, size, *policy = instruction.operands
    if len(policy) != bool(match["hint"]) or not isinstance(size, Immediate):
        raise PtxError(f"line {instruction.line}: a copy of a constant size was expected")
    width = size.value
    shared, shared_offset = machine.address(to, TYPES["b32"])
    source, source_offset = machine.address(of, TYPES["b64"])

    def act(threads: Selection) -> None:
        own, warps = machine.cta_of[threads], machine.warp_of[threads]
        places = machine.shared.places(shared[threads] + shared_offset, own, width)
        sources = machine.memory.places(source[threads] + source_offset, width)
        machine.shared.begin_copy(places, width, warps, instruction.line)
        machine.groups.copy(machine.threads[threads], places, sources, width, instruction.line)

    return act


@operation(r"cp\.async\.commit_group")
def _commit(machine: Machine, instruction: Instruction, match: Match) -> Action:
    return lambda threads: machine.groups.commit(machine.threads[threads])


@operation(r"cp\.async\.wait_group")
def _wait(machine: Machine, instruction: Instruction, match: Match) -> Action:
    kept = instruction.operands[0]
    if not isinstance(kept, Immediate):
        raise PtxError(f"line {instruction.line}: a constant was expected")
    return lambda threads: machine.groups.wait(machine.threads[threads], kept.value)


@operation(
    r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes(?:\.L2::cache_hint)?"
)
def _copy_bulk(machine: Machine, instruction: Instruction, match: Match) -> Action:
    to, of, size, barrier = instruction.operands[:4]
    shared, shared_offset = machine.address(to, TYPES["b32"])
    source, source_offset = machine.address(of, TYPES["b64"])
    widths = machine.source(size, TYPES["b32"])
    signal, signal_offset = machine.address(barrier, TYPES["b32"])

    def act(threads: Selection) -> None:
        for thread in machine.threads[threads]:
            one, width = np.array([thread]), int(widths[thread])
            if width % 16:
                raise PtxError(f"a bulk copy of {width} bytes, no multiple of 16")
            own = machine.cta_of[one]
            place = machine.shared.places(shared[one] + shared_offset, own, width, 16)
            start = int(machine.memory.places(source[one] + source_offset, width, 16)[0])
            bar = machine.shared.places(signal[one] + signal_offset, own, 8)
            machine.shared.begin_copy(place, width, machine.warp_of[one], instruction.line)
            machine.barriers.begin(
                Copy(
                    place=int(place[0]),
                    size=width,
                    data=partial(machine.memory.copied, start, width),
                    barrier=machine.barriers.at(
                        int(bar[0]), machine.warp_of[one], instruction.line
                    ),
                    line=instruction.line,
                )
            )

    return act


@operation(rf"st\.async(?:\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes{KIND}")
def _store_async(machine: Machine, instruction: Instruction, match: Match) -> Action:
    to, source, barrier = instruction.operands
    dtype = TYPES[match["kind"]]
    sources = [machine.source(item, dtype) for item in _items(source)]
    shared, shared_offset = machine.address(to, TYPES["b32"])
    signal, signal_offset = machine.address(barrier, TYPES["b32"])
    width = dtype.itemsize * len(sources)

    def act(threads: Selection) -> None:
        own, warps = machine.cta_of[threads], machine.warp_of[threads]
        places = machine.shared.places(shared[threads] + shared_offset, own, width)
        bars = machine.shared.places(signal[threads] + signal_offset, own, 8)
        if (places // machine.shared.room != bars // machine.shared.room).any():
            raise PtxError("st.async to one CTA that signals another")
        values = np.stack([source[threads] for source in sources], axis=1)
        machine.shared.begin_copy(places, width, warps, instruction.line)
        for place, bar, warp, row in zip(places, bars, warps, values, strict=True):
            machine.barriers.begin(
                Copy(
                    place=int(place),
                    size=width,
                    data=partial(row.view, np.uint8),
                    barrier=machine.barriers.at(int(bar), np.array([warp]), instruction.line),
                    line=instruction.line,
                )
            )

    return act
