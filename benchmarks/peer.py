"""The same work in plain jax.numpy: what a JAX user writes without jax_mla."""

import jax
import jax.numpy as jnp

from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK, QKV_COLUMNS, ROW

KV_END = Q_RANK + KV_RANK
E4M3_MAX = 448.0


def q_absorb(
    qkv: jax.Array,
    q_norm: jax.Array,
    kv_norm: jax.Array,
    w_qb: jax.Array,
    w_uk: jax.Array,
    cache: jax.Array,
    slots: jax.Array,
    *,
    q_scale: jax.Array,
    k_scale: jax.Array,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array]:
    """jax_mla.q_absorb for a GPU, in BF16 with whatever GEMMs XLA picks; slots are in range."""
    heads = w_uk.shape[0]
    latent = _rms_norm(qkv[:, :Q_RANK], q_norm, eps)
    q = (latent @ w_qb.T).reshape(-1, heads, HEAD_ROWS)
    absorbed = jnp.einsum("bhp,hpl->bhl", q[..., :NOPE], w_uk)
    q = _quantise(jnp.concatenate([absorbed, q[..., NOPE:]], axis=-1), q_scale)
    kv = _rms_norm(qkv[:, Q_RANK:KV_END], kv_norm, eps)
    rows = _quantise(jnp.concatenate([kv, qkv[:, KV_END:QKV_COLUMNS]], axis=-1), k_scale)
    # As bytes: XLA converts e4m3 to scatter it, the whole cache each time.
    flat = _as_bytes(cache).reshape(-1, ROW).at[slots].set(_as_bytes(rows), mode="drop")
    return q, jax.lax.bitcast_convert_type(flat.reshape(cache.shape), jnp.float8_e4m3fn)


def _as_bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * scale * weight.astype(jnp.float32)).astype(jnp.bfloat16)


def _quantise(x: jax.Array, scale: jax.Array) -> jax.Array:
    scaled = x.astype(jnp.float32) * (1 / scale)
    return jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
