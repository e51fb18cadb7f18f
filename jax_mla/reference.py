"""The operation in plain jax.numpy: the specification that kernels are held to.

Values stay FP32 between the rounding points. Rounding to BF16 is written as `reduce_precision`,
which the compiler keeps; it may drop a pair of casts.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jax_mla.formats import BF16, FP8_DS_MLA, PLAIN, TILE, Form

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
    cos_sin: jax.Array | None = None,
    positions: jax.Array | None = None,
    *,
    eps: float,
    form: Form = PLAIN,
) -> tuple[jax.Array, ...]:
    """Returns what `jax_mla.q_absorb` does; arguments as there, already checked."""
    size = form.geometry
    x = qkv[:, : size.qkv_columns].astype(jnp.float32)
    q_latent, kv_latent, k_pe = jnp.split(x, [size.q_rank, size.q_rank + size.kv_rank], axis=1)
    q_latent = rms_norm(q_latent, q_norm, eps)
    nope, q_pe = absorbed_query(q_latent, w_qb, w_uk)
    if cos_sin is not None and positions is not None:
        angles = cos_sin[jnp.clip(positions, 0, cos_sin.shape[0] - 1)]
        q_pe = rotate(q_pe, angles[:, None], form.style)
        k_pe = rotate(k_pe, angles, form.style)
    q = jnp.concatenate([nope, q_pe], axis=2)
    q = quantize(q, q_scale) if form.q_dtype == "float8_e4m3fn" else q.astype(jnp.bfloat16)
    row = stored_row(rms_norm(kv_latent, kv_norm, eps), k_pe, k_scale, form)
    results = q, insert(cache, row, slots)
    return (*results, q_latent.astype(jnp.bfloat16)) if form.q_latent else results


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Returns the rows of x [B, N] f32 with RMS 1, times weight [N]: BF16 values as f32."""
    mean = jnp.sum(x * x, axis=1, keepdims=True) / x.shape[1]
    return _round_to_bf16(x * lax.rsqrt(mean + eps) * weight.astype(jnp.float32))


def absorbed_query(x: jax.Array, w_qb: jax.Array, w_uk: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the queries' two parts before rotation and quantisation, BF16 values as f32.

    Args:
        x: [B, 1536] normalised query latent, BF16 values as f32.
        w_qb: [H * 192, 1536] bf16.
        w_uk: [H, 128, 512] bf16.

    Returns:
        Absorbed nope [B, H, 512] and rope rows [B, H, 64].
    """
    heads, nope_rows, _ = w_uk.shape
    q = _round_to_bf16(_dot("bc,rc->br", x, w_qb.astype(jnp.float32)))
    nope, q_pe = jnp.split(q.reshape(x.shape[0], heads, w_qb.shape[0] // heads), [nope_rows], 2)
    return _round_to_bf16(_dot("bhp,hpl->bhl", nope, w_uk.astype(jnp.float32))), q_pe


def rotate(x: jax.Array, angles: jax.Array, style: str | None) -> jax.Array:
    """Returns columns rotated by RoPE in FP32: BF16 values as f32.

    A pair (x0, x1) becomes (x0 cos - x1 sin, x1 cos + x0 sin); pairs stay where they are.

    Args:
        x: [..., R] BF16 values as f32.
        angles: [..., R] f32, cos then sin of the R/2 pairs.
        style: pairs are columns 2i and 2i + 1 ("interleaved"), or i and i + R/2 ("half").
    """
    cos, sin = jnp.split(angles, 2, axis=-1)
    half = x.shape[-1] // 2
    pairs = (half, 2) if style == "interleaved" else (2, half)
    element = -1 if style == "interleaved" else -2
    x0, x1 = jnp.unstack(x.reshape(*x.shape[:-1], *pairs), axis=element)
    rotated = jnp.stack([x0 * cos - x1 * sin, x1 * cos + x0 * sin], axis=element)
    return _round_to_bf16(rotated.reshape(x.shape))


def quantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns e4m3(x * (1/scale)): to nearest even, saturating at +-448, any NaN as 0x7F.

    Args:
        x: f32, any shape.
        scale: f32; values are stored in units of it.
    """
    x = x * (1 / scale)
    # A cast alone turns what is above 464 into NaN and keeps a NaN's sign.
    saturated = jnp.where(jnp.isnan(x), jnp.nan, jnp.clip(x, -E4M3_MAX, E4M3_MAX))
    return saturated.astype(jnp.float8_e4m3fn)


def stored_row(latent: jax.Array, k_pe: jax.Array, scale: jax.Array, form: Form) -> jax.Array:
    """Returns cache rows [B, columns] in the cache's format.

    Args:
        latent: [B, 512] normalised KV latent, BF16 values as f32.
        k_pe: [B, 64] BF16 values as f32.
        scale: [] f32 that e4m3 rows are in units of.
        form: names the format.
    """
    if form.cache is FP8_DS_MLA:
        tiles = latent.reshape(latent.shape[0], latent.shape[1] // TILE, TILE)
        scales = tile_scales(tiles)
        parts = quantize(tiles, scales[:, :, None]), scales, k_pe.astype(jnp.bfloat16)
        return jnp.concatenate([_as_bytes(part) for part in parts], axis=1)
    row = jnp.concatenate([latent, k_pe], axis=1)
    return row.astype(jnp.bfloat16) if form.cache is BF16 else quantize(row, scale)


def tile_scales(tiles: jax.Array) -> jax.Array:
    """Returns the scale [B, T] f32 of each tile of values [B, T, 128]: a power of two.

    The smallest one in units of which no finite value is above 448, but at least 2**-13.
    """
    finite = jnp.where(jnp.isfinite(tiles), jnp.abs(tiles), 0)
    bits = lax.bitcast_convert_type(finite.max(axis=2), jnp.int32)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 carries into the exponent.
    bits = ((bits + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    smallest = (127 - 13) << 23
    return lax.bitcast_convert_type(jnp.maximum(bits, smallest), jnp.float32)


def insert(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns the cache with each token's row at its slot.

    Slots outside of the cache drop their row; of several tokens with one slot the last one wins.

    Args:
        cache: [P, S, columns].
        rows: [B, columns] of the same dtype.
        slots: [B] int32.
    """
    count = cache.shape[0] * cache.shape[1]
    same = slots[:, None] == slots[None, :]
    overwritten = jnp.triu(same, k=1).any(axis=1)
    # An index below zero would count from the end, even where indices beyond the end are dropped.
    written = (slots >= 0) & ~overwritten
    target = jnp.where(written, slots, count)
    # As integers: XLA converts e4m3 to scatter it, which would change NaN bytes of other rows.
    stored, values = as_integers(cache), as_integers(rows)
    flat = stored.reshape(count, rows.shape[1]).at[target].set(values, mode="drop")
    return lax.bitcast_convert_type(flat.reshape(cache.shape), cache.dtype)


def as_integers(x: jax.Array) -> jax.Array:
    """Returns the bits of 8-bit or 16-bit values as unsigned integers of that size."""
    return lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def _as_bytes(x: jax.Array) -> jax.Array:
    """Returns the bytes of each row of x [B, ...]."""
    raw = lax.bitcast_convert_type(x, jnp.uint8)
    return raw.reshape(x.shape[0], math.prod(raw.shape[1:]))


def _round_to_bf16(x: jax.Array) -> jax.Array:
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
