"""KV insert: one warp writes one token's row of the paged cache."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.convert import chain_sum, dot, e4m3_words, floats, new_chains, normed_words
from jax_mla.rules import KV_RANK, Q_RANK, ROW


@cute.jit
def insert_row(
    qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, token: Int32, lane: Int32
):
    """Norms token's KV latent and writes it with k_pe to cache row slots[token], as e4m3.

    Called by whole warps with one `token` < batch each. Rows are dropped where the slot is outside
    [0, cache_rows) and where a later token names the same slot, so exactly one token writes a row.
    """
    row = qkv + Int64(token) * stride + Q_RANK
    # Columns 8 * lane of each half: the two stores below each cover 256 contiguous bytes.
    latent = [ptx.load_global_16(row + half * 256 + 8 * lane) for half in range(2)]
    rope = ptx.load_global_16(row + KV_RANK + 8 * (lane % 8))
    gamma = [ptx.load_constant_16(kv_norm + half * 256 + 8 * lane) for half in range(2)]
    slot = ptx.load_global_i32(slots + token)
    scale = ptx.reciprocal(ptx.load_global_f32(k_scale))
    superseded = Int32(0)
    for later in range(token + 1 + lane, batch, 32):
        if ptx.load_global_i32(slots + later) == slot:
            superseded = Int32(1)

    values = floats(latent[0]) + floats(latent[1])
    weights = floats(gamma[0]) + floats(gamma[1])
    total = chain_sum(dot(values, values, new_chains()))
    total = cute.arch.warp_reduction_sum(total)
    r = ptx.rsqrt(cute.math.fma(total, Float32(1 / KV_RANK), eps))

    lost = cute.arch.vote_any_sync(superseded != 0)
    if (slot >= 0) & (Int64(slot) < cache_rows) & (not lost):
        out = cache + Int64(slot) * ROW
        for half in cutlass.range_constexpr(2):
            part = slice(8 * half, 8 * half + 8)
            normed = floats(normed_words(values[part], r, weights[part]))
            ptx.store_global(out + half * 256 + 8 * lane, e4m3_words(normed, scale))
        if lane < 8:
            ptx.store_global(out + KV_RANK + 8 * lane, e4m3_words(floats(rope), scale))
