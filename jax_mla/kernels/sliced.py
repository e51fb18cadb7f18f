"""The kernel for many tokens: each CTA of a cluster multiplies one slice of the query latent."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.cluster import MmaQuery
from jax_mla.kernels.convert import chain_sum, dot, e4m3_pair, floats, new_chains, normed_words
from jax_mla.kernels.plan import q_row
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK
from jax_mla.variants import THREADS, Variant

SLICE = Q_RANK // 8
"""Columns of the query latent a CTA handles: 192."""
CHUNKS = SLICE // 32
"""A fragment load covers 32 columns: 4 quarters of 8. Both operands use this order of columns, so
the MMA's own order does not matter."""
X_STRIDE = SLICE + 32
"""Row stride of the normed slice: 8 rows x 4 quarters of 16 bytes hit all banks evenly."""
TILES = 3
"""MMA column tiles of the 24 Q_B rows that one CTA owns: two of nope, one of rope rows."""
M_TILES = 2
"""Token tiles multiplied at once: 32 tokens share every load of Q_B from registers."""


class SlicedQuery(MmaQuery):
    """Queries and KV rows of `tokens` tokens of one head, by a cluster of 8, on tensor cores.

    CTA `part` norms and multiplies latent columns 192 part.. for all 192 rows of Q_B, so a cluster
    reads each token's latent once; warp w computes the rows that CTA w owns and sends it the
    partial products, which the owner sums.

    Fixed at build: tokens T (a multiple of 32).
    Free at run time: batch, heads, row stride of qkv, cache size, eps.
    Reads  a slice of w_qb into registers, its columns of w_uk, a slice of T query latents, once.
    Writes q: latent columns and rope columns of its part, every byte by one thread; cache: a row by
        one warp (insert_row).
    Sync   squares_full: all 8 CTAs' sums of squares have landed here (st.async).
        partial_full: all 8 CTAs' products for this CTA's rows have landed here (st.async).
        nope_full: all 8 CTAs' nope blocks have landed here (st.async).
        cluster phase 1: every peer's barriers are initialised before anyone sends.
        cluster phase 2: every CTA has read its x for the last time, so `nope`, which takes that
        place, may be filled.
        No CTA needs another one after that: each waits for all that is stored to it, and sends
        from registers.
        Block barriers: after `gamma` is filled, after x is normed (all warps read it), after
        `block` is filled (all threads send it, and all threads' copies of W_UK have landed).
    """

    blocks_per_sm = 2

    def __init__(self, variant: Variant):
        super().__init__(variant)
        if self.cluster != 8 or self.tokens % (16 * M_TILES):
            raise ValueError(f"cluster 8 and a multiple of 32 tokens expected, got {variant}")
        self.partial_items = self.tokens // 16 * TILES * 32
        self.uk_at = self.shared.add(NOPE * self.uk_stride * 2, align=128)
        self.x_at = self.shared.add(max(self.tokens * X_STRIDE * 2, self.block_bytes * 8))
        self.nope_at = self.x_at
        self.partial_at = self.shared.add(8 * self.partial_items * 16)
        self.block_at = self.shared.add(self.block_bytes)
        self.gamma_at = self.shared.add(SLICE * 2)
        self.square_at = self.shared.add(self.tokens * 8 * 4)
        self.squares_full_at = self.shared.add(8)
        self.partial_full_at = self.shared.add(8)
        self.nope_full_at = self.shared.add(8)

    def load_weights(self, w_qb, head, part, warp, lane):
        """The 24 rows that CTA `warp` owns, this CTA's columns, as MMA fragments [chunk][tile]."""
        group, quarter = lane // 4, lane % 4
        rows = [warp * self.nope + group, warp * self.nope + 8 + group, NOPE + warp * 8 + group]
        at = [
            w_qb + ((Int64(head) * HEAD_ROWS + row) * Q_RANK + (SLICE * part + 8 * quarter))
            for row in rows
        ]
        return [[ptx.load_constant_16(row + 32 * c) for row in at] for c in range(CHUNKS)]

    def load_tokens(self, qkv, stride, first, batch, part, warp, lane):
        """Eight lanes a token, three 16-byte chunks a lane: [pass of 32 tokens][chunk] of words."""
        words = []
        for i in range(self.tokens // 32):
            # A token past the batch repeats the last one and is not stored.
            token = cutlass.min(first + 32 * i + 4 * warp + lane // 8, batch - 1)
            at = qkv + Int64(token) * stride + (SLICE * part + 8 * (lane % 8))
            words.append([ptx.load_global_16(at + 64 * j) for j in range(3)])
        return words

    def share_squares(self, words, x, squares, squares_full, part, warp, lane):
        """Sends each token's sum of squares over this slice to all CTAs, lane j to CTA j.

        The tokens wait in shared memory: the registers are full of weights in flight.
        """
        for i, token_words in enumerate(words):
            chains = new_chains()
            for chunk in token_words:
                values = floats(chunk)
                chains = dot(values, values, chains)
            total = chain_sum(chains)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=8)
            token = 32 * i + 4 * warp + lane // 8
            for j, chunk in enumerate(token_words):
                ptx.store_shared_16(x + (token * X_STRIDE + 64 * j + 8 * (lane % 8)), chunk)
            cute.arch.store_async_dsmem(
                squares + (token * 8 + part), total.bitcast(Int32), squares_full, lane % 8
            )

    def norm(self, x, gamma, squares, eps, warp, lane):
        """x = bf16(x * r * gamma) in place, each value by the thread that stored it."""
        for i in range(self.tokens // 32):
            token = 32 * i + 4 * warp + lane // 8
            s = [
                *ptx.load_shared_f32x4(squares + token * 8),
                *ptx.load_shared_f32x4(squares + token * 8 + 4),
            ]
            total = ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]))
            r = ptx.rsqrt(cute.math.fma(total, Float32(1 / Q_RANK), eps))
            for j in range(3):
                at = x + (token * X_STRIDE + 64 * j + 8 * (lane % 8))
                values = floats(ptx.load_shared_16(at))
                weights = floats(ptx.load_shared_16(gamma + (64 * j + 8 * (lane % 8))))
                normed = normed_words(values, r, weights)
                ptx.store_shared_16(at, normed)

    def project(self, weights, x, m_first, lane):
        """32 tokens times 24 rows over this slice: [token tile][tile] of four sums."""
        acc = [[[Float32(0)] * 4 for _ in range(TILES)] for _ in range(M_TILES)]
        for c in range(CHUNKS):
            for m in range(M_TILES):
                at = x + ((16 * (m_first + m) + lane // 4) * X_STRIDE + 32 * c + 8 * (lane % 4))
                low, high = ptx.load_shared_16(at), ptx.load_shared_16(at + 8 * X_STRIDE)
                for s in range(2):
                    a = (low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1])
                    for n in range(TILES):
                        b = weights[c][n][2 * s : 2 * s + 2]
                        acc[m][n] = ptx.mma(acc[m][n], a, b)
        return acc

    @cute.jit
    def reduce(self, partial, block, q, inverse, first, batch, heads, part, head, tid):
        """Sums the slices in a fixed order: nope values to `block`, rope bytes to q."""
        # An item holds rows lane // 4 and lane // 4 + 8 of a tile: a pair of columns each.
        pairs: cutlass.Constexpr = 2 * self.partial_items
        for pair in range(tid, pairs, THREADS):
            half, item = pair % 2, pair // 2
            lane, tile, m = item % 32, (item // 32) % TILES, item // (32 * TILES)
            low, high = Float32(0), Float32(0)
            for source in cutlass.range_constexpr(8):
                x, y = ptx.load_shared_f32x2(partial + 2 * (source * pairs + pair))
                low, high = low + x, high + y
            word = ptx.pack_bf16(low, high)
            token = 16 * m + lane // 4 + 8 * half
            column = 2 * (lane % 4)
            if tile < TILES - 1:
                ptx.store_shared_b32(block + (token * self.nope_stride + 8 * tile + column), word)
            elif first + token < batch:
                ptx.store_global_b16(
                    q_row(q, first + token, heads, head) + (KV_RANK + 8 * part + column),
                    e4m3_pair(*ptx.unpack_bf16(word), inverse),
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
        uk = self.shared.view(base, self.uk_at, BFloat16)
        x = self.shared.view(base, self.x_at, BFloat16)
        nope = self.shared.view(base, self.nope_at, BFloat16)
        partial = self.shared.view(base, self.partial_at, Float32)
        block = self.shared.view(base, self.block_at, BFloat16)
        gamma = self.shared.view(base, self.gamma_at, BFloat16)
        squares = self.shared.view(base, self.square_at, Float32)
        squares_full = self.shared.view(base, self.squares_full_at, Uint64)
        partial_full = self.shared.view(base, self.partial_full_at, Uint64)
        nope_full = self.shared.view(base, self.nope_full_at, Uint64)

        if tid == 0:
            cute.arch.mbarrier_init(squares_full, 1)
            cute.arch.mbarrier_init(partial_full, 1)
            cute.arch.mbarrier_init(nope_full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(squares_full, self.tokens * 8 * 4)
            cute.arch.mbarrier_arrive_and_expect_tx(partial_full, 8 * self.partial_items * 16)
            cute.arch.mbarrier_arrive_and_expect_tx(nope_full, self.nope_bytes)
        cute.arch.cluster_arrive_relaxed()
        # Weights first: they do not depend on the previous kernel.
        norm_words = ptx.load_constant_16(
            q_norm + (SLICE * part + 8 * cutlass.min(tid, SLICE // 8 - 1))
        )
        weights = self.load_weights(w_qb, head, part, warp, lane)
        self.prefetch_kv_norm(kv_norm, tid)
        self.copy_w_uk(w_uk, uk, self.uk_stride, part, head, tid)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        words = self.load_tokens(qkv, stride, first, batch, part, warp, lane)
        if tid < SLICE // 8:
            ptx.store_shared_16(gamma + 8 * tid, norm_words)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        self.share_squares(words, x, squares, squares_full, part, warp, lane)
        cute.arch.mbarrier_wait(squares_full, 0)
        self.norm(x, gamma, squares, eps, warp, lane)
        cute.arch.sync_threads()
        for pair in cutlass.range_constexpr(self.tokens // (16 * M_TILES)):
            acc = self.project(weights, x, M_TILES * pair, lane)
            for m in cutlass.range_constexpr(M_TILES):
                for n in cutlass.range_constexpr(TILES):
                    item = ((M_TILES * pair + m) * TILES + n) * 32 + lane
                    ptx.store_to_peer_16(
                        partial + 4 * (part * self.partial_items + item),
                        acc[m][n],
                        partial_full,
                        warp,
                    )
        cute.arch.cluster_arrive_relaxed()
        # KV rows while the products travel.
        self.insert(
            qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, first, heads, part,
            head, warp, lane,
        )  # fmt: skip
        inverse = ptx.reciprocal(ptx.load_global_f32(q_scale))
        cute.arch.mbarrier_wait(partial_full, 0)
        self.reduce(partial, block, q, inverse, first, batch, heads, part, head, tid)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        self.send_nope(nope, block, nope_full, part, tid)
        cute.arch.mbarrier_wait(nope_full, 0)
        self.absorb(nope, uk, q, inverse, first, batch, heads, part, head, warp, lane)
