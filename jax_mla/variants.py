"""Which compiled kernel serves a call.

A variant fixes only what the compiler must know: the algorithm, the tokens a cluster handles,
the CTAs of a cluster and what the call computes. Batch and heads are run-time values, so a handful
serves every call. The choice depends on nothing but the call, so all ranks of a mesh choose alike
and an exported program does not depend on the machine that traced it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from jax_mla.formats import E4M3, PLAIN, Form
from jax_mla.geometry import DEEPSEEK

ABI = 2
"""Version of the kernel parameters and FFI attributes; a change breaks exported programs."""

RUN_ON_HARDWARE = frozenset({"sm_90a"})
"""Those whose cubins a GPU has run."""

THREADS = 256
"""Threads of every kernel's CTA."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One compiled kernel.

    Attributes:
        kernel: "small" multiplies one token with FP32 FMA, "tiled" a few with BF16 tensor-core MMA
            while the weights lie in shared memory, "resident" many while the tokens do. "exchange"
            gathers queries through mailboxes; what follows means nothing there.
        cluster: CTAs that share one head; above 8 the cluster size is non-portable.
        tokens: tokens a cluster handles; the grid has ceil(B / tokens) clusters a head.
        form: "plain" has FP8 queries without RoPE and an FP8 cache. The general forms take more
            parameters (`jax_mla.kernels.options`), for RoPE and the query latent: "fp8" with FP8
            queries and cache, "bf16" with BF16 queries and a cache of any format.
    """

    kernel: Literal["small", "tiled", "resident", "exchange"]
    cluster: int = 1
    tokens: int = 1
    form: Literal["plain", "fp8", "bf16"] = "plain"

    @property
    def key(self) -> str:
        """The stable name under which programs refer to this variant."""
        if self.kernel == "exchange":
            return self.kernel
        suffix = "" if self.form == "plain" else f"_{self.form}"
        return f"{self.kernel}_c{self.cluster}_t{self.tokens}{suffix}"


SMALL = Variant(kernel="small", cluster=8, tokens=1)
SMALL_WIDE = Variant(kernel="small", cluster=16, tokens=1)
RESIDENT = Variant(kernel="resident", cluster=1, tokens=64)
EXCHANGE = Variant(kernel="exchange")

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

PLAIN_VARIANTS = (SMALL, SMALL_WIDE, *_TILED_ROUND, RESIDENT)
"""Those of the form "plain"; the other forms have the same ones."""

_GENERAL_VARIANTS = (
    *(replace(variant, form="fp8") for variant in PLAIN_VARIANTS),
    *(replace(variant, form="bf16") for variant in PLAIN_VARIANTS),
)

SHIPPED = {
    "sm_90a": (*PLAIN_VARIANTS, *_GENERAL_VARIANTS, EXCHANGE),
    "sm_100a": (*PLAIN_VARIANTS, EXCHANGE),
    "sm_103a": (*PLAIN_VARIANTS, EXCHANGE),
}
"""Every variant that is built, linted and installed, by the target of its cubin."""

ARCHS = tuple(SHIPPED)

RUN_FORMS = frozenset({"plain"})
"""Forms of variants that a GPU has run."""


def choose(batch: int, heads: int, form: Form = PLAIN) -> Variant:
    """Returns the variant that serves `batch` tokens and `heads` heads on one device.

    More CTAs a head are faster as long as all clusters run in one round; of two tile sizes that do,
    the smaller one is. Measured on an H200 with cold weights (benchmarks/NOTES.md).

    Args:
        batch, heads: of the call.
        form: what it computes, of the geometry that the kernels are compiled for.
    """
    return replace(_fastest(batch, heads), form=variant_form(form))


def _fastest(batch: int, heads: int) -> Variant:
    if batch <= 1 and heads < 48:
        # 16 CTAs a head where 8 would leave more than half of the SMs idle.
        return SMALL_WIDE if heads <= 7 else SMALL
    for variant, clusters in _TILED_ROUND.items():
        fits = heads * -(-batch // variant.tokens) <= clusters
        if fits and (variant.tokens == 8) == (batch <= 8):
            return variant
    return RESIDENT


def variant_form(form: Form) -> Literal["plain", "fp8", "bf16"]:
    """Returns the form of the variants that do what a call computes."""
    if form.q_dtype != E4M3.dtype:
        return "bf16"
    return "plain" if form == PLAIN else "fp8"


def unsupported_reason(form: Form) -> str | None:
    """Says why no shipped kernel does what a call computes, or None when one does."""
    if form.geometry == DEEPSEEK:
        return None
    return (
        f"no kernel is shipped for the sizes of {form.geometry.name}, only for those of"
        f' {DEEPSEEK.name}. Use implementation="reference" for plain jax.numpy.'
    )


def unproven_reason(form: Form) -> str | None:
    """Says why "auto" does not use the kernel that there is, or None when it does."""
    if variant_form(form) in RUN_FORMS:
        return None
    return (
        "kernels for other calls than FP8 queries and cache rows without RoPE compile, and their"
        " bytes are checked on CPUs, but no GPU has run them."
        ' Use implementation="cuda" to run them all the same.'
    )
