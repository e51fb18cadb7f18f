"""KV insert: one warp writes one token's row of the paged cache."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Constexpr, Float32, Int32, Int64, cute

from jax_mla.formats import BF16, CACHE_FORMATS, E4M3, FP8_DS_MLA, TILE
from jax_mla.geometry import DEEPSEEK
from jax_mla.kernels import ptx
from jax_mla.kernels.convert import (
    chain_sum,
    dot,
    e4m3_words,
    floats,
    new_chains,
    normed_words,
    store_values,
)
from jax_mla.kernels.rope import load_angle, load_pair, rotate, store_pair
from jax_mla.rules import KV_RANK, Q_RANK, ROPE, ROW

FP8_DS_MLA_ROW = FP8_DS_MLA.row_bytes(DEEPSEEK)
"""Bytes: 512 e4m3, four float32 scales, 64 bf16."""
TILE_LANES = TILE // 8
EXPONENT = 23
"""Where the exponent of a float32 starts."""


@cute.jit
def insert_row(
    qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options, bf16: Constexpr,
    position, token: Int32, lane: Int32,
):  # fmt: skip
    """Norms token's KV latent and writes it with k_pe, rotated or not, to cache row slots[token].

    Called by whole warps with one `token` < batch each, which is at `position`. Rows are dropped
    where the slot is outside [0, cache_rows) and where a later token names the same slot, so
    exactly one token writes a row.
    """
    row = qkv + Int64(token) * stride + Q_RANK
    # Columns 8 * lane of each half: the two stores below each cover 256 contiguous values.
    latent = [ptx.load_global_16(row + half * 256 + 8 * lane) for half in range(2)]
    if cutlass.const_expr(options is None):
        k_pe = ptx.load_global_16(row + KV_RANK + 8 * (lane % 8))
    else:
        k_pe = load_pair(options, row + KV_RANK, lane)
        angle = load_angle(options, position, lane)
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
        if cutlass.const_expr(options is None):
            out = cache + Int64(slot) * ROW
            store_latent(out, values, r, weights, scale, lane)
            if lane < 8:
                ptx.store_global(out + KV_RANK + 8 * lane, e4m3_words(floats(k_pe), scale))
        else:
            k_pe = rotate(options, k_pe, angle)
            if cutlass.const_expr(bf16):
                if options.cache_format == CACHE_FORMATS.index(E4M3):
                    store_row(options, cache, slot, values, r, weights, k_pe, scale, lane)
                elif options.cache_format == CACHE_FORMATS.index(BF16):
                    rows = cute.recast_ptr(cache, dtype=BFloat16)
                    store_row(options, rows, slot, values, r, weights, k_pe, None, lane)
                else:
                    store_fp8_ds_mla(options, cache, slot, values, r, weights, k_pe, lane)
            else:
                store_row(options, cache, slot, values, r, weights, k_pe, scale, lane)


def normed_half(values, r, weights, half):
    """A lane's eight normed values of columns 256 * half.., as words of bf16."""
    part = slice(8 * half, 8 * half + 8)
    return normed_words(values[part], r, weights[part])


def store_latent(out, values, r, weights, scale, lane):
    """The normed latent: e4m3 of it times `scale`, or as it is if None."""
    for half in range(2):
        words = normed_half(values, r, weights, half)
        normed = words if scale is None else floats(words)
        store_values(out + half * 256 + 8 * lane, normed, scale)


def store_row(options, cache, slot, values, r, weights, k_pe, scale, lane):
    """A row of 576 values: e4m3 of them times `scale`, or bf16 if None."""
    out = cache + Int64(slot) * ROW
    store_latent(out, values, r, weights, scale, lane)
    store_pair(options, out + KV_RANK, lane, k_pe, scale)


@cute.jit
def store_fp8_ds_mla(options, cache, slot, values, r, weights, k_pe, lane):
    """A row of fp8_ds_mla: 128 of its e4m3 values share a scale, k_pe is stored as it is."""
    out = cache + Int64(slot) * FP8_DS_MLA_ROW
    for half in cutlass.range_constexpr(2):
        words = normed_half(values, r, weights, half)
        bits = tile_scale(floats(words))
        # The reciprocal of a power of two: its exponent with the other sign.
        inverse = Int32((2 * 127 << EXPONENT) - bits).bitcast(Float32)
        store_values(out + half * 256 + 8 * lane, floats(words), inverse)
        if lane % TILE_LANES == 0:
            ptx.store_global(out + KV_RANK + 4 * (2 * half + lane // TILE_LANES), [bits])
    rope = cute.recast_ptr(out + FP8_DS_MLA_ROW - 2 * ROPE, dtype=BFloat16)
    store_pair(options, rope, lane, k_pe, None)


@cute.jit
def tile_scale(values):
    """Bits of a tile's scale; each of its 16 lanes holds eight of the values.

    The smallest power of two in units of which no finite value is above 448, but at least 2**-13.
    """
    largest = Int32(0)
    for value in values:
        bits = value.bitcast(Int32) & 0x7FFFFFFF
        largest = cutlass.max(largest, bits if bits < 0xFF << EXPONENT else 0)
    largest = cute.arch.warp_reduction_max(largest, threads_in_group=TILE_LANES)
    # 448 is 1.75 * 2**8: a mantissa above 1.75 carries into the exponent.
    carried = (largest + 0x1FFFFF) & (0xFF << EXPONENT)
    return cutlass.max(carried - (8 << EXPONENT), 127 - 13 << EXPONENT)
