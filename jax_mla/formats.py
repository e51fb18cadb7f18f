"""What a call stores and how: the part of it that a kernel must know when it is compiled.

Imports neither jax nor numpy: the kernel build reads it too.
"""

from dataclasses import dataclass

from jax_mla.geometry import DEEPSEEK, Geometry

TILE = 128
"""Latent columns of a cache row that share a scale in the format fp8_ds_mla."""

STYLES = ("interleaved", "half")
"""Which of R columns RoPE rotates together: 2i and 2i + 1 (GPT-J), or i and i + R/2 (NeoX)."""


@dataclass(frozen=True, kw_only=True)
class CacheFormat:
    """How a row of the cache is stored.

    Attributes:
        name: as in the documentation.
        dtype: of the cache.
        q_dtypes: of the queries that attention over such a cache takes, the default first.
    """

    name: str
    dtype: str
    q_dtypes: tuple[str, ...]

    def columns(self, geometry: Geometry) -> int:
        """Elements of a row."""
        if self is FP8_DS_MLA:
            return geometry.kv_rank + 4 * (geometry.kv_rank // TILE) + 2 * geometry.rope
        return geometry.row

    def row_bytes(self, geometry: Geometry) -> int:
        """Bytes of a row."""
        return self.columns(geometry) * (2 if self is BF16 else 1)


E4M3 = CacheFormat(name="e4m3", dtype="float8_e4m3fn", q_dtypes=("float8_e4m3fn", "bfloat16"))
"""Latent and k_pe as e4m3 in units of one scale."""

BF16 = CacheFormat(name="bf16", dtype="bfloat16", q_dtypes=("bfloat16",))
"""Latent and k_pe as BF16."""

FP8_DS_MLA = CacheFormat(name="fp8_ds_mla", dtype="uint8", q_dtypes=("bfloat16",))
"""Bytes of a row: the latent as e4m3, a float32 scale for each 128 of them, k_pe as BF16. The
layout is FlashMLA's ("FP8 with scale"), the scales are powers of two as vLLM's writer has them."""

CACHE_FORMATS = (E4M3, BF16, FP8_DS_MLA)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a call computes, its sizes aside.

    Attributes:
        geometry: of the model.
        cache: how its rows are stored.
        q_dtype: of the queries; e4m3 ones are in units of a scale.
        style: one of STYLES for queries and keys rotated by RoPE, None for NoPE.
        q_latent: whether the normalised query latent is returned too.
    """

    geometry: Geometry = DEEPSEEK
    cache: CacheFormat = E4M3
    q_dtype: str = "float8_e4m3fn"
    style: str | None = None
    q_latent: bool = False

    @property
    def q_bytes(self) -> int:
        """Bytes of the query of one head."""
        return self.geometry.row * (2 if self.q_dtype == "bfloat16" else 1)


PLAIN = Form()
"""FP8 queries without RoPE, and an FP8 cache."""
