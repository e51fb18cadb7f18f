"""The MMA kernel that holds its tokens in registers: every CTA norms them for itself."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, Uint64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.cluster import WARPS, MmaQuery
from jax_mla.kernels.convert import chain_sum, dot, e4m3_pair, floats, new_chains, normed_words
from jax_mla.kernels.plan import q_row
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK
from jax_mla.variants import THREADS, Variant

SLICE = Q_RANK // WARPS
"""Split-K: warp w multiplies columns 192 w .. 192 w + 191 of the query latent."""
CHUNKS = SLICE // 32
"""A fragment load covers 32 columns: 4 quarters of 8. Both operands use this order of columns, so
the MMA's own order does not matter."""
QB_STRIDE = Q_RANK + 32
"""Row stride of Q_B in shared memory: 8 rows x 4 quarters of 16 bytes hit all banks evenly."""


class TiledQuery(MmaQuery):
    """Queries and KV rows of `tokens` tokens of one head, by a cluster, on tensor cores.

    Fixed at build: tokens T (8, 16 or 32), cluster size C.
    Free at run time: batch, heads, row stride of qkv, cache size, eps.
    Reads  its own part of w_qb and w_uk once, T whole query latents straight into MMA fragments.
    Writes q: latent columns and rope columns of its part, every byte by one thread; cache: a row by
        one warp (insert_row).
    Sync   rows_full: the bulk copies of the CTA's Q_B rows have landed.
        nope_full: all C CTAs' nope blocks have landed here (st.async).
        cluster phase 1: nope_full of every peer is initialised and every CTA has read its Q_B rows
        for the last time, so `nope`, which takes that place, may be filled.
        No CTA needs another one after that: each waits for all that is stored to it, and sends
        from registers.
        Block barriers: after `gamma` and the sums of squares; for each 16 tokens, after the partial
        products and, where more follow, after their sums; after `block` is filled (all threads send
        it, and all threads' copies of W_UK have landed).
    """

    def __init__(self, variant: Variant):
        super().__init__(variant)
        if self.tokens not in (8, 16, 32):
            raise ValueError(f"tokens: 8, 16 or 32 expected, got {self.tokens}")
        # Tokens a lane holds a fragment of; those of 32 leave registers for one CTA an SM only.
        self.lane_rows = self.m_tiles * self.halves
        self.blocks_per_sm = 2 if self.tokens <= 16 and self.cluster >= 8 else 1
        self.nope_tiles, self.rope_tiles = self.nope // 8, -(-self.rope // 8)
        self.tiles = self.nope_tiles + self.rope_tiles
        self.partial_items = self.tiles * self.halves * 32
        self.qb_at = self.shared.add(self.rows * QB_STRIDE * 2, align=128)
        self.nope_at = self.qb_at
        self.uk_at = self.shared.add(NOPE * self.uk_stride * 2)
        self.partial_at = self.shared.add(WARPS * self.partial_items * 8)
        self.block_at = self.shared.add(self.block_bytes)
        self.gamma_at = self.shared.add(Q_RANK * 2)
        self.square_at = self.shared.add(self.tokens * WARPS * 4)
        self.rows_full_at = self.shared.add(8)
        self.nope_full_at = self.shared.add(8)

    @cute.jit
    def copy_w_qb(self, w_qb, qb, rows_full, part, head, lane):
        """One warp starts the copy of this CTA's Q_B rows, a row a lane."""
        for row in range(lane, self.rows, 32):
            source = part * self.nope + row
            if row >= self.nope:
                source = NOPE + part * self.rope + row - self.nope
            ptx.copy_bulk(
                qb + row * QB_STRIDE,
                w_qb + (Int64(head) * HEAD_ROWS + source) * Q_RANK,
                Q_RANK * 2,
                rows_full,
            )

    def load_tokens(self, qkv, stride, first, batch, warp, lane):
        """This warp's slice of the tokens: [chunk][i] of words, token lane // 4 + 8 i."""
        # A token past the batch repeats the last one and is not stored.
        rows = [
            qkv
            + Int64(cutlass.min(first + lane // 4 + 8 * i, batch - 1)) * stride
            + (SLICE * warp + 8 * (lane % 4))
            for i in range(self.lane_rows)
        ]
        return [[ptx.load_global_16(row + 32 * c) for row in rows] for c in range(CHUNKS)]

    def square_sums(self, words, squares, warp, lane):
        """Leaves each token's sum of squares over this warp's slice in squares[token, warp]."""
        for i in range(self.lane_rows):
            chains = new_chains()
            for c in range(CHUNKS):
                values = floats(words[c][i])
                chains = dot(values, values, chains)
            # All four quarters hold the sum; they store the same value to the same word.
            total = cute.arch.warp_reduction_sum(chain_sum(chains), threads_in_group=4)
            squares[(lane // 4 + 8 * i) * WARPS + warp] = total

    def normed(self, words, squares, gamma, eps, warp, lane):
        """bf16(x * r * gamma) of the fragments, r from the sums of squares of all warps."""
        scales = []
        for i in range(self.lane_rows):
            row = squares + (lane // 4 + 8 * i) * WARPS
            s = [*ptx.load_shared_f32x4(row), *ptx.load_shared_f32x4(row + 4)]
            total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
            scales.append(ptx.rsqrt(cute.math.fma(total, Float32(1 / Q_RANK), eps)))
        x = []
        for c in range(CHUNKS):
            weights = floats(ptx.load_shared_16(gamma + (SLICE * warp + 32 * c + 8 * (lane % 4))))
            x.append([normed_words(floats(words[c][i]), r, weights) for i, r in enumerate(scales)])
        return x

    def project(self, x, qb, warp, lane):
        """This warp's share of Q_B over its slice: [token tile][tile] of four sums."""
        group = lane // 4
        # A lone token tile gets two chains a tile: half the latency of dependent MMAs.
        chains = 2 // self.m_tiles
        acc = [
            [[[Float32(0)] * 4 for _ in range(chains)] for _ in range(self.tiles)]
            for _ in range(self.m_tiles)
        ]
        for c in range(CHUNKS):
            for n in range(self.tiles):
                # With 4 rope rows a CTA the upper half of their tile repeats the lower one.
                row = 8 * n + group if self.rope >= 8 or n < self.nope_tiles else 8 * n + group % 4
                at = qb + (row * QB_STRIDE + SLICE * warp + 32 * c + 8 * (lane % 4))
                b = ptx.load_shared_16(at)
                for s in range(2):
                    for m in range(self.m_tiles):
                        low = x[c][self.halves * m]
                        high = x[c][2 * m + 1] if self.halves == 2 else [Uint32(0)] * 4
                        a = (low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1])
                        chain = s % chains
                        acc[m][n][chain] = ptx.mma(acc[m][n][chain], a, b[2 * s : 2 * s + 2])
        return [
            [[sum(values[1:], values[0]) for values in zip(*tile, strict=True)] for tile in m_tile]
            for m_tile in acc
        ]

    def store_partial(self, sums, partial, warp, lane):
        """This warp's products of 16 tokens, a pair of neighbouring rows of Q_B a word pair."""
        for n in range(self.tiles):
            for half in range(self.halves):
                item = warp * self.partial_items + (n * self.halves + half) * 32 + lane
                ptx.store_shared_f32x2(partial + 2 * item, *sums[n][2 * half : 2 * half + 2])

    @cute.jit
    def reduce(self, partial, block, q, inverse, m, first, batch, heads, part, head, tid):
        """Sums the warps' products in a fixed order: nope values to `block`, rope bytes to q."""
        for item in range(tid, self.partial_items, THREADS):
            lane, fragment = item % 32, item // 32
            tile, half = fragment // self.halves, fragment % self.halves
            low, high = Float32(0), Float32(0)
            for w in cutlass.range_constexpr(WARPS):
                x, y = ptx.load_shared_f32x2(partial + 2 * (w * self.partial_items + item))
                low, high = low + x, high + y
            word = ptx.pack_bf16(low, high)
            token = 16 * m + lane // 4 + 8 * half
            column = 8 * tile + 2 * (lane % 4)
            if tile < self.nope_tiles:
                ptx.store_shared_b32(block + (token * self.nope_stride + column), word)
            elif (first + token < batch) & (column < self.rows):
                out = q_row(q, first + token, heads, head) + (KV_RANK + part * self.rope)
                ptx.store_global_b16(
                    out + (column - self.nope), e4m3_pair(*ptx.unpack_bf16(word), inverse)
                )

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
    ):
        tid, _, _ = cute.arch.thread_idx()
        part, head, tile = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        first = tile * self.tokens
        base = cute.arch.get_dyn_smem(Uint8, alignment=128)
        qb = self.shared.view(base, self.qb_at, BFloat16)
        uk = self.shared.view(base, self.uk_at, BFloat16)
        partial = self.shared.view(base, self.partial_at, Float32)
        block = self.shared.view(base, self.block_at, BFloat16)
        nope = self.shared.view(base, self.nope_at, BFloat16)
        gamma = self.shared.view(base, self.gamma_at, BFloat16)
        squares = self.shared.view(base, self.square_at, Float32)
        rows_full = self.shared.view(base, self.rows_full_at, Uint64)
        nope_full = self.shared.view(base, self.nope_full_at, Uint64)

        # Weights first: they do not depend on the previous kernel.
        norm_words = ptx.load_constant_16(q_norm + 8 * cutlass.min(tid, Q_RANK // 8 - 1))
        if warp == 0:
            if lane == 0:
                cute.arch.mbarrier_init(rows_full, 1)
                cute.arch.mbarrier_init(nope_full, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(rows_full, self.rows * Q_RANK * 2)
                cute.arch.mbarrier_arrive_and_expect_tx(nope_full, self.nope_bytes)
            cute.arch.sync_warp()
            self.copy_w_qb(w_qb, qb, rows_full, part, head, lane)
        self.prefetch_kv_norm(kv_norm, tid)
        self.copy_w_uk(w_uk, uk, self.uk_stride, part, head, tid)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = self.load_tokens(qkv, stride, first, batch, warp, lane)
        inverse = ptx.reciprocal(ptx.load_global_f32(q_scale))
        if tid < Q_RANK // 8:
            ptx.store_shared_16(gamma + 8 * tid, norm_words)
        self.square_sums(words, squares, warp, lane)
        cute.arch.sync_threads()
        x = self.normed(words, squares, gamma, eps, warp, lane)
        # KV rows while the weights are on their way.
        self.insert(
            qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, first, heads, part,
            head, warp, lane,
        )  # fmt: skip
        cute.arch.mbarrier_wait(rows_full, 0)
        sums = self.project(x, qb, warp, lane)
        cute.arch.cluster_arrive_relaxed()
        for m in cutlass.range_constexpr(self.m_tiles):
            if cutlass.const_expr(m > 0):
                cute.arch.sync_threads()
            self.store_partial(sums[m], partial, warp, lane)
            cute.arch.sync_threads()
            self.reduce(partial, block, q, inverse, m, first, batch, heads, part, head, tid)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        self.send_nope(nope, block, nope_full, part, tid)
        cute.arch.mbarrier_wait(nope_full, 0)
        self.absorb(nope, uk, q, inverse, first, batch, heads, part, head, warp, lane)
