"""Which compiled kernel serves a call.

A variant fixes only what the compiler must know: the algorithm, the tokens a cluster handles
and the CTAs of a cluster. Batch and heads are run-time values, so a handful of variants serves
every call. The choice depends on nothing but the call, so all ranks of a mesh choose alike and
an exported program does not depend on the machine that traced it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ABI = 1
"""Version of the kernel parameters and FFI attributes; a change breaks exported programs."""

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Targets that cubins are built for. Only sm_90a has run on hardware."""

THREADS = 256
"""Threads of every kernel's CTA."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled kernel.

    Attributes:
        kernel: "small" multiplies one token with FP32 FMA, "tiled" a few tokens and "sliced" many
            tokens with BF16 tensor-core MMA.
        cluster: CTAs that share one head; above 8 the cluster size is non-portable.
        tokens: tokens a cluster handles; the grid has ceil(B / tokens) clusters a head.
    """

    kernel: Literal["small", "tiled", "sliced"]
    cluster: int
    tokens: int

    @property
    def key(self) -> str:
        """The stable name under which programs refer to this variant."""
        return f"{self.kernel}_c{self.cluster}_t{self.tokens}"


SMALL = Variant(kernel="small", cluster=8, tokens=1)
SMALL_WIDE = Variant(kernel="small", cluster=16, tokens=1)
TILED_8 = Variant(kernel="tiled", cluster=8, tokens=8)
TILED_16 = Variant(kernel="tiled", cluster=8, tokens=16)
TILED_16_NARROW = Variant(kernel="tiled", cluster=4, tokens=16)
TILED_32_NARROW = Variant(kernel="tiled", cluster=4, tokens=32)
SLICED_32 = Variant(kernel="sliced", cluster=8, tokens=32)
SLICED_64 = Variant(kernel="sliced", cluster=8, tokens=64)

SHIPPED = (
    SMALL,
    SMALL_WIDE,
    TILED_8,
    TILED_16,
    TILED_16_NARROW,
    TILED_32_NARROW,
    SLICED_32,
    SLICED_64,
)
"""Every variant that is built, linted and installed, for each architecture."""

NARROW_SLOTS = 30
"""Clusters of 4 that an H200 runs at once, one CTA an SM; of 8 it runs 15."""


def choose(batch: int, heads: int) -> Variant:
    """Returns the variant that serves `batch` tokens and `heads` heads on one device.

    The thresholds are measured on an H200 with cold weights (benchmarks/NOTES.md).
    """
    if batch <= 1:
        # 16 CTAs a head where 8 would leave more than half of the SMs idle.
        return SMALL_WIDE if heads <= 7 else SMALL
    if batch <= 8:
        return TILED_8
    if batch <= 16:
        one_round = 15 < heads <= NARROW_SLOTS
        return TILED_16_NARROW if one_round or heads >= 48 else TILED_16
    if batch <= 32:
        if heads <= 8:
            return TILED_16
        return TILED_16_NARROW if 2 * heads <= NARROW_SLOTS else TILED_32_NARROW
    if batch <= 64 and heads <= 8:
        return SLICED_32
    return TILED_32_NARROW if -(-batch // 32) * heads <= NARROW_SLOTS else SLICED_64
