"""What a device of this process has of a mailbox: its control block, report word and words."""

import contextlib
import ctypes
import dataclasses
import struct
from collections.abc import Sequence

from jax import Device

from jax_mla import mailbox_layout as layout
from jax_mla.runtime import device as driver
from jax_mla.runtime import peer_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rank:
    """One device's part of a mailbox.

    Attributes:
        device: as JAX knows it.
        gpu: as the driver knows it.
        group: the devices that gather queries from each other, in order of ranks.
        control: address of its control block, on the device.
        report: address of its report word, on the host.
        block: what the control block holds before the first call.
        box: address of the words that its peers publish to.
        half_bytes: size of each of the two halves of `box`.
    """

    device: Device
    gpu: driver.Device
    group: tuple[Device, ...]
    control: int
    report: int
    block: bytes
    box: int
    half_bytes: int

    def clear(self) -> None:
        """Makes everything as it is before the first call, the report word aside. Waits for it."""
        peer_memory.fill(self.gpu, self.box, 0xFF, 2 * self.half_bytes)
        peer_memory.write(self.gpu, self.control, self.block)
        peer_memory.synchronize(self.gpu)

    def drain(self) -> None:
        """Waits for the calls that the device was given."""
        peer_memory.synchronize(self.gpu)

    def shut(self) -> None:
        """Makes every further call give NaN and touch no mailbox. Waits for it."""
        state = struct.pack("<I", layout.CLOSED)
        peer_memory.write(self.gpu, self.control + layout.STATE, state)
        peer_memory.synchronize(self.gpu)

    @property
    def reported(self) -> int:
        """What the device last said of its state; as new as the last call that has completed."""
        return ctypes.c_uint32.from_address(self.report).value

    def set_report(self, state: int) -> None:
        ctypes.c_uint32.from_address(self.report).value = state

    @property
    def missing(self) -> Device | None:
        """The peer for which a call waited too long."""
        waits_no_more = self.reported not in (layout.OPEN, layout.CLOSED)
        return self.group[self.reported - 1] if waits_no_more else None


def make_rank(
    device: Device,
    gpu: driver.Device,
    group: tuple[Device, ...],
    boxes: Sequence[int],
    half_bytes: int,
    timeout: float,
    undo: contextlib.ExitStack,
) -> Rank:
    """Returns a device's part of a mailbox, in use by nobody yet.

    Args:
        boxes: addresses of the words of all ranks of its group, in order, as this device sees them.
        timeout: seconds that a call waits for its peers.
        undo: takes back what is made here: the control block and the report word.
    """
    rank = group.index(device)
    control = peer_memory.allocate(gpu, layout.CONTROL_BYTES, undo)
    report, seen_report = peer_memory.allocate_word(gpu, undo)
    made = Rank(
        device=device,
        gpu=gpu,
        group=group,
        control=control,
        report=report,
        block=control_block(rank, boxes, half_bytes, timeout, seen_report),
        box=boxes[rank],
        half_bytes=half_bytes,
    )
    made.set_report(layout.OPEN)
    made.clear()
    return made


def control_block(
    rank: int, boxes: Sequence[int], half_bytes: int, timeout: float, report: int
) -> bytes:
    """What the kernel finds before the first call, as `jax_mla.mailbox_layout` has it.

    Args:
        rank, boxes, half_bytes, timeout: as for `make_rank`.
        report: address of the report word, as the device sees it.
    """
    block = bytearray(layout.CONTROL_BYTES)  # epoch and ticket 0, state OPEN
    for at, number in ((layout.RANK, rank), (layout.RANKS, len(boxes))):
        struct.pack_into("<I", block, at, number)
    for at, number in (
        (layout.HALF_BYTES, half_bytes),
        (layout.TIMEOUT, max(1, round(timeout * 1e9))),
        (layout.REPORT, report),
    ):
        struct.pack_into("<Q", block, at, number)
    struct.pack_into(f"<{len(boxes)}Q", block, layout.BOXES, *boxes)
    return bytes(block)
