"""What the kernel of a mailbox knows and does, on the GPUs of `fake_gpu`."""

import ctypes
import struct
from typing import NamedTuple

from fake_gpu import FakeDriver
from fake_setup import Registered

from jax_mla import mailbox_layout as layout


class Kernel(NamedTuple):
    """A call on one device, which knows where its control block is."""

    driver: FakeDriver
    ordinal: int
    control: int

    @property
    def block(self) -> bytes:
        return self.driver.load(self.ordinal, self.control, layout.CONTROL_BYTES)

    def number(self, at: int, code: str = "I") -> int:
        found: int = struct.unpack_from(code, self.block, at)[0]
        return found

    @property
    def boxes(self) -> tuple[int, ...]:
        return struct.unpack_from(f"{self.number(layout.RANKS)}Q", self.block, layout.BOXES)

    @property
    def own_box(self) -> bytes:
        address = self.boxes[self.number(layout.RANK)]
        return self.driver.load(self.ordinal, address, 2 * self.number(layout.HALF_BYTES, "Q"))

    def publish(self, tag: int) -> None:
        """Writes to each rank's mailbox, in the 16 bytes of this one: its own rank, that, a tag."""
        rank = self.number(layout.RANK)
        for peer, address in enumerate(self.boxes):
            self.driver.store(self.ordinal, address + 16 * rank, bytes([rank, peer, tag]))

    def came(self) -> list[list[int]]:
        """What each rank published to this one."""
        ranks = range(self.number(layout.RANKS))
        return [list(self.own_box[16 * rank : 16 * rank + 3]) for rank in ranks]

    def is_empty(self) -> bool:
        return self.own_box.strip(b"\xff") == b""

    def set(self, at: int, number: int) -> None:
        self.driver.store(self.ordinal, self.control + at, struct.pack("I", number))

    def give_up(self, rank: int) -> None:
        """Does what a call does that waited too long for a rank."""
        self.set(layout.STATE, 1 + rank)
        report = self.number(layout.REPORT, "Q")
        self.driver.store(self.ordinal, report, struct.pack("I", 1 + rank))


def kernels(driver: FakeDriver, registered: Registered, number: int) -> dict[int, Kernel]:
    """The devices with a mailbox of a number, by ordinal."""
    return {
        ordinal: Kernel(driver, ordinal, mailbox["control"])
        for (ordinal, found), mailbox in registered.items()
        if found == number
    }


def report_of(mailbox: dict[str, int]) -> int:
    """What the FFI library reads of a registered mailbox."""
    return ctypes.c_uint32.from_address(mailbox["report"]).value
