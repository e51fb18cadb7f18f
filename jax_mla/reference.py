"""The operation in plain jax.numpy: the specification that kernels are held to.

Values stay FP32 between the rounding points. Rounding to BF16 is written as `reduce_precision`,
which the compiler keeps; it may drop a pair of casts.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW

E4M3_MAX = 448.0


def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    q_scale: jax.Array,
    k_scale: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Returns (q, cache) of `jax_mla.q_absorb`; arguments as there, already checked."""
    x = qkv.astype(jnp.float32)
    q_latent, kv_latent, k_pe = jnp.split(x[:, :QKV_COLUMNS], [Q_RANK, Q_RANK + KV_RANK], axis=1)
    q = absorbed_query(rms_norm(q_latent, q_norm, eps), w_qb, w_uk)
    row = jnp.concatenate([rms_norm(kv_latent, kv_norm, eps), k_pe], axis=1)
    return quantize(q, q_scale), insert(cache, quantize(row, k_scale), slots)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the rows of x [B, N] f32 with RMS 1, times weight [N]: BF16 values as f32."""
    mean = jnp.sum(x * x, axis=1, keepdims=True) / x.shape[1]
    return _round_to_bf16(x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32))


def absorbed_query(x: jax.Array, w_qb: jax.Array, w_uk: jax.Array) -> jax.Array:
    """Returns the queries [B, H, 576] before quantisation, BF16 values as f32.

    Args:
        x: [B, 1536] normalised query latent, BF16 values as f32.
        w_qb: [H * 192, 1536] bf16.
        w_uk: [H, 128, 512] bf16.
    """
    q = _round_to_bf16(_dot("bc,rc->br", x, w_qb.astype(jnp.float32)))
    q = q.reshape(x.shape[0], w_uk.shape[0], HEAD_ROWS)
    nope = _round_to_bf16(_dot("bhp,hpl->bhl", q[:, :, :NOPE], w_uk.astype(jnp.float32)))
    return jnp.concatenate([nope, q[:, :, NOPE:]], axis=2)


def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns e4m3(x * (1/scale)): to nearest even, saturating at +-448, any NaN as 0x7F.

    Args:
        x: f32, any shape.
        scale: [] f32; values are stored in units of it.
    """
    x = x * (1 / scale)
    # A cast alone turns what is above 464 into NaN and keeps a NaN's sign.
    saturated = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -E4M3_MAX, E4M3_MAX))
    return saturated.astype(jnp.float8_e4m3fn)


def insert(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the cache with each token's row at its slot.

    Slots outside of the cache drop their row; of several tokens with one slot the last one wins.

    Args:
        cache: [P, S, 576] e4m3.
        rows: [B, 576] e4m3.
        slots: [B] int32.
    """
    count = cache.shape[0] * cache.shape[1]
    same = slots[:, None] == slots[None, :]
    overwritten = jnp.triu(same, k=1).any(axis=1)
    # An index below zero would count from the end, even where indices beyond the end are dropped.
    written = (slots >= 0) & ~overwritten
    target = jnp.where(written, slots, count)
    # As bytes: XLA converts e4m3 to scatter it, which would change NaN bytes of other rows.
    bytes_ = _as_bytes(cache).reshape(count, ROW).at[target].set(_as_bytes(rows), mode="drop")
    return lax.bitcast_convert_type(bytes_.reshape(cache.shape), jnp.float8_e4m3fn)


def _as_bytes(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint8)


def _round_to_bf16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
