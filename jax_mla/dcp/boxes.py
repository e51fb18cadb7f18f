"""The memory that the ranks of a group publish to, as this process reaches it."""

import contextlib
from collections.abc import Mapping
from typing import Any

from jax import Device

from jax_mla.dcp.groups import Groups
from jax_mla.runtime import device as driver
from jax_mla.runtime import peer_memory
from jax_mla.runtime.rendezvous import Meeting, exchanged_files


def map_boxes(
    groups: Groups,
    meeting: Meeting,
    gpus: Mapping[Device, driver.Device],
    size: int,
    undo: contextlib.ExitStack,
) -> dict[Device, int]:
    """Makes the memory of this process's devices, and maps that of all members of their groups.

    Args:
        groups: of the mesh.
        meeting: of all processes of the mesh; takes two steps.
        gpus: the devices of this process.
        size: bytes of each device's memory, padded; the same in all processes.
        undo: takes it all back.

    Returns:
        Addresses in this process, by device. What a group has in them, all of its devices here may
        read and write.
    """
    handles = {device: peer_memory.create(gpu, size, undo) for device, gpu in gpus.items()}
    with contextlib.ExitStack() as exported:
        outgoing = {
            partner: [
                peer_memory.export_file(handles[device], exported)
                for device in groups.reached(meeting.process, partner)
            ]
            for partner in groups.partners(meeting.process)
        }
        with exchanged_files(meeting, outgoing) as incoming:
            handles |= _imported(groups, meeting.process, incoming, undo)
    readers = {
        device: [gpus[member] for member in groups.of(device) if member in gpus]
        for device in handles
    }
    return {
        device: peer_memory.map_memory(handle, size, readers[device], undo)
        for device, handle in handles.items()
    }


def _imported(
    groups: Groups, process: int, incoming: Mapping[int, list[int]], undo: contextlib.ExitStack
) -> dict[Device, Any]:
    """Returns handles of the memory whose files came from other processes."""
    return {
        device: peer_memory.import_file(file, undo)
        for partner, files in incoming.items()
        for device, file in zip(groups.reached(partner, process), files, strict=True)
    }
