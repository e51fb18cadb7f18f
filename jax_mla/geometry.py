"""Sizes of Multi-head Latent Attention in released models.

Imports neither jax nor numpy: the kernel build reads them too.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a model's checkpoint fixes.

    Attributes:
        name: the model that brought them up.
        q_rank: columns of the query latent (`q_lora_rank`).
        kv_rank: columns of the KV latent, and of an absorbed query (`kv_lora_rank`).
        nope: Q_B rows of a head that W_UK absorbs (`qk_nope_head_dim`).
        rope: Q_B rows of a head, and columns of a key, that positions may rotate
            (`qk_rope_head_dim`).
    """

    name: str
    q_rank: int
    kv_rank: int
    nope: int
    rope: int

    @property
    def head_rows(self) -> int:
        """Q_B rows of a head."""
        return self.nope + self.rope

    @property
    def row(self) -> int:
        """Values of a query of one head and of a cache row."""
        return self.kv_rank + self.rope

    @property
    def qkv_columns(self) -> int:
        """Columns of qkv that are read."""
        return self.q_rank + self.kv_rank + self.rope


DEEPSEEK = Geometry(name="DeepSeek", q_rank=1536, kv_rank=512, nope=128, rope=64)
"""DeepSeek V2, V3, R1, V3.1, V3.2; Kimi K2, K3; LongCat. The kernels are compiled for it."""

GEOMETRIES = (
    DEEPSEEK,
    Geometry(name="GLM-5", q_rank=2048, kv_rank=512, nope=192, rope=64),
    Geometry(name="GLM-4.7-Flash", q_rank=768, kv_rank=512, nope=192, rope=64),
    Geometry(name="Mistral-4", q_rank=1024, kv_rank=256, nope=64, rope=64),
    Geometry(name="MiniCPM3", q_rank=768, kv_rank=256, nope=64, rope=32),
)
"""Those that the reference serves. No two have the same q_rank, kv_rank and nope."""


def nearest_geometry(
    q_ranks: Iterable[int], kv_ranks: Iterable[int], nopes: Iterable[int]
) -> Geometry:
    """Returns the geometry that agrees with most of the sizes that arrays have.

    Args:
        q_ranks: columns of w_qb, size of q_norm.
        kv_ranks: columns of w_uk, size of kv_norm.
        nopes: rows of a head of w_uk.
    """

    def agreement(geometry: Geometry) -> int:
        expected = (geometry.q_rank, q_ranks), (geometry.kv_rank, kv_ranks), (geometry.nope, nopes)
        return sum(size == found for size, sizes in expected for found in sizes)

    return max(GEOMETRIES, key=agreement)
