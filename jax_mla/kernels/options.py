"""What a call may ask of a kernel of a general form, and how it reaches the kernel."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32, cute


class Options(NamedTuple):
    """The parameters of a general form after `eps`, in order: three pointers, three int32.

    Parameters 0 to 13 are those of the plain form. `q` and `cache` have the call's formats. Form
    "bf16" does not read `q_scale`, and `k_scale` counts for a cache of e4m3 only; both must be
    valid pointers all the same.

    Attributes:
        cos_sin: [table_rows, 64] f32, a position's 32 cosines, then its sines. Not read where style
            is 0.
        positions: [batch] int32, rows of cos_sin; the first or last row for those outside. Not read
            where style is 0.
        q_latent: [batch, 1536] bf16, written: the normed query latent. Null where not wanted.
        table_rows: int32, at least 1 where style is not 0.
        style: int32, 0 without RoPE, else 1 + its place in `jax_mla.formats.STYLES`.
        cache_format: int32, its place in `jax_mla.formats.CACHE_FORMATS`. Form "fp8", which writes
            e4m3 only, does not look at it.
    """

    cos_sin: cute.Pointer
    positions: cute.Pointer
    q_latent: cute.Pointer
    table_rows: Int32
    style: Int32
    cache_format: Int32
