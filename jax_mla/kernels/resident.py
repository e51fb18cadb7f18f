"""The kernel for many heads and tokens: a CTA keeps its tokens while a head's weights pass by."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.cluster import WARPS, ClusterQuery
from jax_mla.kernels.convert import (
    chain_sum,
    dot,
    floats,
    new_chains,
    normed_words,
    rounded,
    store_values,
)
from jax_mla.kernels.options import Options
from jax_mla.kernels.pair_order import NONE, PAIRS
from jax_mla.kernels.plan import q_row
from jax_mla.kernels.rope import load_angle, load_position, rotate, store_pair, table_row
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK
from jax_mla.variants import Variant

X_STRIDE = Q_RANK + 32
"""Row stride of the normed tokens: 8 rows x 4 quarters of 16 bytes hit all banks evenly."""
NOPE_STRIDE = NOPE + 8
"""Row stride of the nope values: the eight rows of a matrix load fall into different banks."""
CHUNKS = Q_RANK // 32
"""A fragment load covers 32 columns: 4 quarters of 8. Both operands use this order of columns, so
the MMA's own order does not matter."""
AHEAD = 6
"""Chunks of Q_B in flight."""
UK_AHEAD = 3
"""Steps of 16 nope rows of W_UK in flight."""
TILES = 3
"""MMA column tiles of a warp's 24 rows of Q_B: two of nope, one of rope rows."""
NORM_TOKENS = 2
"""Tokens a warp norms at once."""


class ResidentQuery(ClusterQuery):
    """Queries and KV rows of `tokens` tokens of one head, by one CTA, on tensor cores.

    Warp w multiplies all tokens by nope rows 16 w.., rope rows 8 w.. of Q_B and latent columns
    64 w.. of W_UK. Weights go from global memory straight into MMA fragments, each once.

    Fixed at build: tokens T (a multiple of 16).
    Free at run time: batch, heads, row stride of qkv, cache size, eps, options.
    Reads  all of a head's w_qb and w_uk, T whole query latents: once each.
    Writes q: every byte by one thread; cache: a row by one warp (insert); q_latent: a value by one
        thread (write_latent).
    Sync   Block barriers: after the tokens are normed, after the nope values are stored.
    """

    blocks_per_sm = 1

    def __init__(self, variant: Variant):
        super().__init__(variant)
        if self.cluster != 1 or self.tokens % 16:
            raise ValueError(f"cluster 1 and a multiple of 16 tokens expected, got {variant}")
        self.m_tiles = self.tokens // 16
        self.x_at = self.shared.add(self.tokens * X_STRIDE * 2, align=128)
        self.nope_at = self.shared.add(self.tokens * NOPE_STRIDE * 2)

    @cute.jit
    def norm(self, qkv, q_norm, x, stride, options, first, batch, eps, heads, head, warp, lane):
        """bf16(x * r * gamma) of every token to shared memory, a warp a token."""
        at = 8 * lane
        gamma = [ptx.load_constant_16(q_norm + (256 * c + at)) for c in range(6)]
        at_once: cutlass.Constexpr = min(NORM_TOKENS, self.tokens // WARPS)
        for start in range(warp, self.tokens, WARPS * at_once):
            tokens = [start + WARPS * i for i in range(at_once)]
            # A token past the batch repeats the last one and is not stored.
            rows = [
                qkv + Int64(cutlass.min(first + token, batch - 1)) * stride + at for token in tokens
            ]
            words = [[ptx.load_global_16(row + 256 * c) for c in range(6)] for row in rows]
            for token, chunks in zip(tokens, words, strict=True):
                normed = self.norm_token(chunks, gamma, x + (token * X_STRIDE + at), eps)
                if cutlass.const_expr(options is not None):
                    if first + token < batch:
                        self.write_latent(options, normed, 256, first + token, at, heads, 0, head)

    def norm_token(self, chunks, gamma, out, eps):
        """One token by one warp: a lane holds, and returns, eight columns of each 256."""
        chains = new_chains()
        for chunk in chunks:
            values = floats(chunk)
            chains = dot(values, values, chains)
        total = cute.arch.warp_reduction_sum(chain_sum(chains))
        r = ptx.rsqrt(cute.math.fma(total, Float32(1 / Q_RANK), eps))
        normed = []
        for c, chunk in enumerate(chunks):
            words = normed_words(floats(chunk), r, floats(gamma[c]))
            ptx.store_shared_16(out + 256 * c, words)
            normed.append(floats(words))
        return normed

    def multiply_chunk(self, acc, window, c, x, column, lane):
        """acc[m, n] += 32 columns of the tokens times 24 rows of Q_B, which window[c] holds."""
        weights = [[window[c, n, i] for i in range(4)] for n in range(TILES)]
        for m in range(self.m_tiles):
            at = x + ((16 * m + lane // 4) * X_STRIDE + column + 8 * (lane % 4))
            low, high = ptx.load_shared_16(at), ptx.load_shared_16(at + 8 * X_STRIDE)
            for s in range(2):
                a = (low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1])
                for n in range(TILES):
                    b = weights[n][2 * s : 2 * s + 2]
                    sums = ptx.mma([acc[m, n, i] for i in range(4)], a, b)
                    for i in range(4):
                        acc[m, n, i] = sums[i]

    def qb_rows(self, w_qb, options, head, warp, lane):
        """Where this lane's fragments of the warp's 24 rows of Q_B start."""
        group = lane // 4
        rows = [
            16 * warp + group,
            16 * warp + 8 + group,
            self.rope_row(options, NOPE + 8 * warp + group),
        ]
        return [w_qb + ((Int64(head) * HEAD_ROWS + row) * Q_RANK + 8 * (lane % 4)) for row in rows]

    @cute.jit
    def project(self, rows, window, x, lane):
        """Q_B: all tokens times this warp's 24 rows, [token tile, tile, 4] of sums.

        `window` holds the first chunks of `rows`; it moves over the others.
        """
        acc = cute.make_rmem_tensor((self.m_tiles, TILES, 4), Float32)
        acc.fill(0)
        # No branch around a load: merging its result with the old value would wait for it.
        for start in range(0, CHUNKS - AHEAD, AHEAD):
            for c in cutlass.range_constexpr(AHEAD):
                self.multiply_chunk(acc, window, c, x, 32 * (start + c), lane)
                self.load_chunk(window, c, rows, 32 * (start + AHEAD + c))
        for c in cutlass.range_constexpr(AHEAD):
            self.multiply_chunk(acc, window, c, x, 32 * (CHUNKS - AHEAD + c), lane)
        return acc

    def load_chunk(self, window, c, rows, column):
        """Requests 32 columns of this warp's rows of Q_B."""
        for n, row in enumerate(rows):
            words = ptx.load_constant_16(row + column)
            for i in range(4):
                window[c, n, i] = words[i]

    def load_position(self, options, first, batch, tid):
        """Position of token tid of the tile, modulo its size."""
        return load_position(options, cutlass.min(first + tid % self.tokens, batch - 1))

    @cute.jit
    def prefetch_table(self, options, position, tid):
        """Brings the tile's rows of the table to L2, two lines of cosines and of sines each."""
        if cutlass.const_expr(options is not None):
            if (options.style != NONE) & (tid < 2 * self.tokens):
                ptx.prefetch_l2(table_row(options, position) + tid // self.tokens * PAIRS)

    def load_angles(self, options, first, batch, warp, lane):
        """(cos, sin) of this lane's pair for its tokens lane // 4 + 8 i, [i]."""
        if options is None:
            return None
        tokens = [
            cutlass.min(first + lane // 4 + 8 * i, batch - 1) for i in range(2 * self.m_tiles)
        ]
        positions = [load_position(options, token) for token in tokens]
        return [load_angle(options, position, 4 * warp + lane % 4) for position in positions]

    def load_uk(self, w_uk, head, k, warp, lane):
        """Nope rows 16 k + 2 quarter + {0, 1, 8, 9}, the lane's eight latent columns of each."""
        at = w_uk + (
            (Int64(head) * NOPE + 16 * k + 2 * (lane % 4)) * KV_RANK + 64 * warp + 8 * (lane // 4)
        )
        return [ptx.load_constant_16(at + row * KV_RANK) for row in (0, 1, 8, 9)]

    def absorb(self, nope, w_uk, window, head, warp, lane):
        """W_UK: all tokens times this warp's 64 latent columns, [token tile][j] of four sums.

        Column n of MMA j is latent 8 n + j: a lane's eight latents of a row are one 16-byte load,
        and the sums of its eight MMAs are 16 neighbouring latents of a token.
        """
        acc = [[[Float32(0)] * 4 for _ in range(8)] for _ in range(self.m_tiles)]
        for k in range(NOPE // 16):
            p0, p1, p8, p9 = window[k]
            if k + UK_AHEAD < NOPE // 16:
                window.append(self.load_uk(w_uk, head, k + UK_AHEAD, warp, lane))
            low = [ptx.pair_halves(p0[j // 2], p1[j // 2], j % 2) for j in range(8)]
            high = [ptx.pair_halves(p8[j // 2], p9[j // 2], j % 2) for j in range(8)]
            for m in range(self.m_tiles):
                row = 16 * m + lane % 16
                a = ptx.load_matrices(nope + (row * NOPE_STRIDE + 16 * k + 8 * (lane // 16)))
                for j in range(8):
                    acc[m][j] = ptx.mma(acc[m][j], a, (low[j], high[j]))
        return acc

    @cute.kernel
    def kernel(
        self,
        qkv: cute.Pointer,
        q_norm: cute.Pointer,
        kv_norm: cute.Pointer,
        w_qb: cute.Pointer,
        w_uk: cute.Pointer,
        cache: cute.Pointer,
        slots: cute.Pointer,
        q_scale: cute.Pointer,
        k_scale: cute.Pointer,
        q: cute.Pointer,
        stride: Int64,
        cache_rows: Int64,
        batch: Int32,
        eps: Float32,
        options: Options | None,
    ):
        tid, _, _ = cute.arch.thread_idx()
        _, block_head, block_tile = cute.arch.block_idx()
        _, heads, tiles = cute.arch.grid_dim()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        # Tiles of one head run side by side, so that its weights come from memory once.
        index = block_tile * heads + block_head
        head, tile = index // tiles, index % tiles
        first = tile * self.tokens
        base = cute.arch.get_dyn_smem(Uint8, alignment=128)
        x = self.shared.view(base, self.x_at, BFloat16)
        nope = self.shared.view(base, self.nope_at, BFloat16)

        # Weights before the wait: a launch that overlaps the previous kernel, which the launcher
        # chooses and by default does not, promises that it did not write them.
        rows = self.qb_rows(w_qb, options, head, warp, lane)
        window = cute.make_rmem_tensor((AHEAD, TILES, 4), Uint32)
        for c in cutlass.range_constexpr(AHEAD):
            self.load_chunk(window, c, rows, 32 * c)
        self.prefetch_kv_norm(kv_norm, tid)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        position = self.load_position(options, first, batch, tid)
        self.norm(qkv, q_norm, x, stride, options, first, batch, eps, heads, head, warp, lane)
        self.prefetch_table(options, position, tid)
        cute.arch.sync_threads()
        acc = self.project(rows, window, x, lane)
        uk_window = [self.load_uk(w_uk, head, k, warp, lane) for k in range(UK_AHEAD)]
        angles = self.load_angles(options, first, batch, warp, lane)
        inverse = self.load_inverse(q_scale)
        for m in cutlass.range_constexpr(self.m_tiles):
            for half in cutlass.range_constexpr(2):
                token = 16 * m + lane // 4 + 8 * half
                words = [
                    ptx.pack_bf16(acc[m, n, 2 * half], acc[m, n, 2 * half + 1])
                    for n in range(TILES)
                ]
                for n in cutlass.range_constexpr(TILES - 1):
                    column = 16 * warp + 8 * n + 2 * (lane % 4)
                    ptx.store_shared_b32(nope + (token * NOPE_STRIDE + column), words[n])
                if first + token < batch:
                    out = q_row(q, first + token, heads, head)
                    word = words[TILES - 1]
                    if cutlass.const_expr(options is None):
                        out = out + (KV_RANK + 8 * warp + 2 * (lane % 4))
                        store_values(out, floats([word]), inverse)
                    else:
                        word = rotate(options, word, angles[2 * m + half])
                        store_pair(options, out + KV_RANK, 4 * warp + lane % 4, word, inverse)
        cute.arch.sync_threads()
        position = self.load_insert_position(options, first, batch, heads, 0, head, warp)
        sums = self.absorb(nope, w_uk, uk_window, head, warp, lane)
        for m in cutlass.range_constexpr(self.m_tiles):
            for half in cutlass.range_constexpr(2):
                token = first + 16 * m + lane // 4 + 8 * half
                # Columns n = 2 quarter, then 2 quarter + 1.
                latents = [sums[m][j][2 * half + n] for n in range(2) for j in range(8)]
                values = rounded(latents, inverse)
                if token < batch:
                    store_values(
                        q_row(q, token, heads, head) + (64 * warp + 16 * (lane % 4)),
                        values,
                        inverse,
                    )
        self.insert(
            qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options,
            position, first, heads, 0, head, warp, lane,
        )  # fmt: skip
