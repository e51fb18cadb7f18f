"""Where things lie: a kernel's shared memory and the rows of q."""

from __future__ import annotations

from cutlass import Int64, cute

from jax_mla.rules import ROW

SHARED_BYTES = 232_448
"""Dynamic shared memory that a CTA may opt in to on compute capability 9.0 and 10.x (227 KiB)."""


class SharedPlan:
    """Dynamic shared memory as offsets that are known before anything is compiled."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size: int, align: int = 16) -> int:
        """Reserves `size` bytes and returns their offset."""
        offset = -(-self.bytes // align) * align
        self.bytes = offset + size
        if self.bytes > SHARED_BYTES:
            raise ValueError(f"shared memory: {self.bytes} bytes planned, {SHARED_BYTES} exist")
        return offset

    @staticmethod
    def view(base, offset, dtype, align: int = 16):
        """The place at `offset` as a pointer to `dtype`."""
        return cute.recast_ptr((base + offset).align(align), dtype=dtype)


def q_row(q, token, heads, head):
    """Pointer to the row of `head` of `token` in q [B, H, 576]."""
    return q + (Int64(token) * heads + head) * ROW
