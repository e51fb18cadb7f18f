"""Making a mailbox: what the processes of its mesh agree on and do in order."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax import Device

from jax_mla import runtime
from jax_mla.dcp.boxes import map_boxes
from jax_mla.dcp.capacity import Capacity, described
from jax_mla.dcp.groups import Groups
from jax_mla.dcp.rank import Rank, make_rank
from jax_mla.errors import WITHOUT_MAILBOX, UnsupportedError
from jax_mla.runtime import device as driver
from jax_mla.runtime import library, peer_memory
from jax_mla.runtime.rendezvous import Meeting

PATIENCE = 60.0
"""Seconds that a process waits for the others to come to the same line of the program."""

_HOST = Path("/proc/sys/kernel/random/boot_id")

_lock = threading.Lock()
_next_number = 0
_made: collections.Counter[tuple[int, ...]] = collections.Counter()
"""How many mailboxes this process has made, or tried to, together with which processes."""


@dataclasses.dataclass(kw_only=True)
class Made:
    """A mailbox that calls can use.

    Attributes:
        number: by which programs name it; the same in all processes.
        key: of its meetings.
        ranks: one for each device of this process.
        undo: frees the memory that ranks publish to. Control blocks and report words stay for good:
            captured CUDA graphs hold their addresses.
    """

    number: int
    key: str
    ranks: tuple[Rank, ...]
    undo: contextlib.ExitStack

    def register(self) -> None:
        """Lets calls run."""
        for rank in self.ranks:
            library.add_mailbox(
                rank.gpu.ordinal,
                self.number,
                control=rank.control,
                report=rank.report,
                half_bytes=rank.half_bytes,
                ranks=len(rank.group),
            )

    def unregister(self) -> None:
        """Makes calls fail from now on."""
        for rank in self.ranks:
            library.remove_mailbox(rank.gpu.ordinal, self.number)


def check_devices(groups: Groups, process: int) -> None:
    """Checks that this process can take part.

    Raises:
        UnsupportedError: a device is no GPU.
        ValueError: this process has no device of the mesh.
    """
    for device in groups.mesh.devices.flat:
        if device.platform != "gpu":
            raise UnsupportedError(
                f"a mailbox needs NVIDIA GPUs, got {device} in the mesh. Use GPUs, or"
                f" {WITHOUT_MAILBOX}"
            )
    if not groups.owned(process):
        raise ValueError(
            f"mesh must have devices of this process, {process}, got those of"
            f" {', '.join(map(str, groups.processes))} only. Make the mailbox there."
        )


def make(capacity: Capacity, groups: Groups, process: int) -> Made:
    """Makes a mailbox together with the other processes of its mesh, or nothing at all."""
    with _lock:
        processes = groups.processes
        key = f"jax_mla/mailbox/{'-'.join(map(str, processes))}/{_made[processes]}"
        _made[processes] += 1
        with (
            contextlib.ExitStack() as kept,
            contextlib.ExitStack() as undo,
            Meeting(f"{key}/make", process, processes, PATIENCE) as meeting,
        ):
            gpus = {device: _ready(device) for device in groups.owned(process)}
            for group in groups.members:
                peer_memory.check_peers([gpus[device] for device in group if device in gpus])
            size = peer_memory.padded(2 * capacity.half_bytes, [*gpus.values()])
            number = _agreed_number(capacity, groups, meeting, size)
            boxes = map_boxes(groups, meeting, gpus, size, undo)
            ranks = _ranks(capacity, groups, gpus, boxes, kept)
            # A call publishes to its whole group: none may run before all mailboxes are empty.
            meeting.exchange("empty")
            kept.pop_all()
            made = Made(number=number, key=key, ranks=ranks, undo=undo.pop_all())
        made.register()
        return made


def agree(meeting: Meeting, same: Mapping[str, Any], **other: Any) -> dict[int, dict[str, Any]]:
    """Takes a step in which processes compare what must be the same in all of them.

    Args:
        meeting: of the processes.
        same: by the names that errors use.
        other: what may differ.

    Returns:
        `other` of each process.

    Raises:
        ValueError: something is not the same.
    """
    found = meeting.exchange({"same": dict(same), "other": other})
    for process, record in found.items():
        for name, value in same.items():
            if record["same"][name] != value:
                raise ValueError(
                    f"DcpMailbox must have the same {name} in all processes of its mesh, got"
                    f" {value} in process {meeting.process}, {record['same'][name]} in process"
                    f" {process}. Make, reset and close mailboxes alike and in the same order."
                )
    return {process: record["other"] for process, record in found.items()}


def _ready(device: Device) -> driver.Device:
    """Returns a GPU with its kernel loaded: loading must not wait for a kernel that spins."""
    ordinal = device.local_hardware_id
    runtime.load("exchange", ordinal)
    return driver.device(ordinal)


def _agreed_number(capacity: Capacity, groups: Groups, meeting: Meeting, size: int) -> int:
    """Checks that all processes make the same mailbox, and returns a number for it that is new."""
    global _next_number
    same = {
        "mesh": described(capacity.mesh),
        "axis": capacity.axis,
        "max_batch": capacity.max_batch,
        "heads": capacity.heads,
        "q_dtype": capacity.q_dtype,
        "timeout": capacity.timeout,
        "size": size,
    }
    host = _HOST.read_text().strip()
    found = agree(meeting, same, host=host, number=_next_number)
    for partner in groups.partners(meeting.process):
        if found[partner]["host"] != host:
            raise UnsupportedError(
                f"a mailbox reaches GPUs of one host, got processes {meeting.process} and"
                f" {partner} on two. Place axis {capacity.axis!r} within a host, or"
                f" {WITHOUT_MAILBOX}"
            )
    number = max(int(other["number"]) for other in found.values())
    _next_number = number + 1
    return number


def _ranks(
    capacity: Capacity,
    groups: Groups,
    gpus: Mapping[Device, driver.Device],
    boxes: Mapping[Device, int],
    undo: contextlib.ExitStack,
) -> tuple[Rank, ...]:
    return tuple(
        make_rank(
            device,
            gpu,
            groups.of(device),
            [boxes[member] for member in groups.of(device)],
            capacity.half_bytes,
            capacity.timeout,
            undo,
        )
        for device, gpu in gpus.items()
    )
