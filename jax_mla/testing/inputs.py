"""Random arguments of q_absorb."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_mla import scalars
from jax_mla.formats import CACHE_FORMATS
from jax_mla.geometry import GEOMETRIES
from jax_mla.rope import Rope

TABLE_ROWS = 96
"""Positions of the RoPE table; some tokens are beyond it."""


def make_inputs(
    batch: int,
    heads: int,
    *,
    pages: int | None = None,
    page_size: int = 64,
    columns: int | None = None,
    rope: str | None = None,
    cache: str = "e4m3",
    model: str = "DeepSeek",
    seed: int = 0,
) -> dict[str, Any]:
    """Returns random arguments of q_absorb, scaled so that queries and cache rows have RMS near 1.

    Args:
        batch: B.
        heads: H.
        pages: P; None for about twice the rows that the batch needs.
        page_size: S.
        columns: W; None for the columns that are read.
        rope: style of a rotation, with positions before and beyond its table too; None for none.
        cache: format of its rows, "e4m3", "bf16" or "fp8_ds_mla".
        model: whose sizes, as for `jax_mla.supported`.
        seed: of the random numbers.

    Returns:
        qkv, q_norm, kv_norm, w_qb, w_uk, cache and slots by name, and rope where there is one. The
        cache is full of random bytes without NaN; no two slots are equal.

    Raises:
        ValueError: the cache has fewer rows than the batch, or there is no such format or model.
    """
    size = scalars.named("model", model, GEOMETRIES)
    stored = scalars.named("cache", cache, CACHE_FORMATS)
    if pages is None:
        pages = max(2, -(-2 * batch // page_size))
    if pages * page_size < batch:
        raise ValueError(
            f"pages * page_size must be at least batch = {batch}, got {pages} * {page_size}."
            " Give the cache more pages."
        )
    rng = np.random.default_rng(seed)

    def normal(*shape: int, mean: float = 0.0, deviation: float = 1.0) -> jax.Array:
        values = mean + deviation * rng.standard_normal(shape, np.float32)
        return jnp.asarray(values.astype(jnp.bfloat16))

    cached = rng.integers(0, 256, (pages, page_size, stored.row_bytes(size)), np.uint8)
    # No NaN, which is 0x7F and 0xFF as e4m3; as BF16 its higher byte is one of these.
    cached[(cached & 0x7F) == 0x7F] = 0
    inputs = {
        "qkv": normal(batch, size.qkv_columns if columns is None else columns),
        "q_norm": normal(size.q_rank, mean=1.0, deviation=0.1),
        "kv_norm": normal(size.kv_rank, mean=1.0, deviation=0.1),
        "w_qb": normal(heads * size.head_rows, size.q_rank, deviation=size.q_rank**-0.5),
        "w_uk": normal(heads, size.nope, size.kv_rank, deviation=size.nope**-0.5),
        "cache": jnp.asarray(cached.view(jnp.dtype(stored.dtype))),
        "slots": jnp.asarray(rng.choice(pages * page_size, batch, replace=False).astype(np.int32)),
    }
    if rope is None:
        return inputs
    angles = rng.uniform(0, 2 * np.pi, (TABLE_ROWS, size.rope // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1, dtype=np.float32)
    positions = rng.integers(-2, TABLE_ROWS + 8, batch, np.int32)
    return inputs | {"rope": Rope(jnp.asarray(table), jnp.asarray(positions), rope)}
