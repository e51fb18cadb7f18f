"""Which compiled kernel serves a call.

A variant fixes only what the compiler must know: the algorithm, the tokens a cluster handles,
the CTAs of a cluster and the form of the call. Batch and heads are run-time values, so a handful
serves every call of a form. The choice depends on nothing but the call, so all ranks of a mesh
choose alike and an exported program does not depend on the machine that traced it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jax_mla.formats import E4M3, Form
from jax_mla.geometry import DEEPSEEK

ABI = 1
"""Version of the kernel parameters and FFI attributes; a change breaks exported programs."""

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Targets that cubins are built for."""

RUN_ON_HARDWARE = frozenset({"sm_90a"})
"""Those whose cubins a GPU has run."""

THREADS = 256
"""Threads of every kernel's CTA."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled kernel.

    Attributes:
        kernel: "small" multiplies one token with FP32 FMA, "tiled" a few with BF16 tensor-core MMA
            while the weights lie in shared memory, "resident" many while the tokens do.
        cluster: CTAs that share one head; above 8 the cluster size is non-portable.
        tokens: tokens a cluster handles; the grid has ceil(B / tokens) clusters a head.
        form: "plain" has FP8 queries without RoPE and an FP8 cache. The general forms take more
            parameters (`jax_mla.kernels.options`), for RoPE and the query latent: "fp8" with FP8
            queries and cache, "bf16" with BF16 queries and a cache of any format.
    """

    kernel: Literal["small", "tiled", "resident"]
    cluster: int
    tokens: int
    form: Literal["plain", "fp8", "bf16"] = "plain"

    @property
    def key(self) -> str:
        """The stable name under which programs refer to this variant."""
        suffix = "" if self.form == "plain" else f"_{self.form}"
        return f"{self.kernel}_c{self.cluster}_t{self.tokens}{suffix}"


SMALL = Variant(kernel="small", cluster=8, tokens=1)
SMALL_WIDE = Variant(kernel="small", cluster=16, tokens=1)
RESIDENT = Variant(kernel="resident", cluster=1, tokens=64)

# Clusters of each kernel that an H200 runs in one round: as many as fit at one CTA an SM, except
# that 8 tokens in clusters of 8 lose little when two CTAs share an SM.
_TILED_ROUND = {
    Variant(kernel="tiled", cluster=8, tokens=8): 30,
    Variant(kernel="tiled", cluster=2, tokens=8): 66,
    Variant(kernel="tiled", cluster=1, tokens=8): 132,
    Variant(kernel="tiled", cluster=8, tokens=16): 15,
    Variant(kernel="tiled", cluster=4, tokens=16): 30,
    Variant(kernel="tiled", cluster=4, tokens=32): 30,
    Variant(kernel="tiled", cluster=2, tokens=16): 66,
    Variant(kernel="tiled", cluster=2, tokens=32): 66,
    Variant(kernel="tiled", cluster=1, tokens=16): 132,
    Variant(kernel="tiled", cluster=1, tokens=32): 132,
}

SHIPPED = (SMALL, SMALL_WIDE, *_TILED_ROUND, RESIDENT)
"""Every variant that is built, linted and installed, for each architecture."""

CANDIDATES = (
    *(replace(variant, form="fp8") for variant in SHIPPED),
    *(replace(variant, form="bf16") for variant in SHIPPED),
)
"""Variants that compile but that no GPU has run: not installed, never chosen."""


def choose(batch: int, heads: int) -> Variant:
    """Returns the variant that serves `batch` tokens and `heads` heads on one device.

    More CTAs a head are faster as long as all clusters run in one round; of two tile sizes that do,
    the smaller one is. Measured on an H200 with cold weights (benchmarks/NOTES.md).
    """
    if batch <= 1 and heads < 48:
        # 16 CTAs a head where 8 would leave more than half of the SMs idle.
        return SMALL_WIDE if heads <= 7 else SMALL
    for variant, clusters in _TILED_ROUND.items():
        fits = heads * -(-batch // variant.tokens) <= clusters
        if fits and (variant.tokens == 8) == (batch <= 8):
            return variant
    return RESIDENT


def unsupported_reason(form: Form) -> str | None:
    """Says what of a call no shipped kernel does, or None when one does it all."""
    lacking = [
        what
        for what, asked in (
            (f"{form.geometry.name}'s geometry", form.geometry != DEEPSEEK),
            ("RoPE", form.style is not None),
            (f"{form.q_dtype} queries", form.q_dtype != E4M3.dtype),
            (f"{form.cache.name} cache rows", form.cache != E4M3),
            ("the query latent as a result", form.q_latent),
        )
        if asked
    ]
    if not lacking:
        return None
    return (
        f"no kernel is shipped for {' and '.join(lacking)}: kernels are for {DEEPSEEK.name}'s"
        " geometry without RoPE, FP8 queries and FP8 cache rows."
        ' Use implementation="reference" for plain jax.numpy.'
    )
