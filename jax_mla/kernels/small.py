"""The kernel for one token: FP32 FMA, no tile to fill."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.cluster import WARPS, ClusterQuery
from jax_mla.kernels.convert import (
    chain_sum,
    dot,
    floats,
    fma_pair,
    new_chains,
    normed_words,
    rounded,
    store_values,
)
from jax_mla.kernels.options import Options
from jax_mla.kernels.plan import q_row
from jax_mla.kernels.rope import load_angle, load_position, rotate, store_pair
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK
from jax_mla.variants import THREADS, Variant

CHUNKS = Q_RANK // 256
"""A warp reads a row of 1536 as 6 chunks of 32 lanes x 8 values."""


class SmallQuery(ClusterQuery):
    """The query and KV row of one token and one head, by a cluster.

    Fixed at build: cluster size C.
    Free at run time: batch (a cluster a token and head), heads, row stride of qkv, cache size, eps,
        options.
    Reads  its own part of w_qb and w_uk once; the token's query latent once a warp.
    Writes q: latent columns and rope columns of its part, every byte by one thread; cache: a row by
        one warp (insert_row); q_latent: a value by one thread (write_latent).
    Sync   rows_full: the bulk copies of the CTA's Q_B rows have landed.
        nope_full: all C CTAs' nope values have landed here (st.async).
        cluster phase 1: rows_full is initialised before the CTA's other threads wait for it, and
        nope_full of every peer before anyone stores to it. No CTA needs another one after that:
        each waits for all that is stored to it, and sends from registers.
        Block barriers: before other warps' row values are sent (W_UK copies of all threads have
        landed too), before other threads' column sums are read.
    """

    blocks_per_sm = 2

    def __init__(self, variant: Variant):
        super().__init__(variant)
        if self.tokens != 1:
            raise ValueError(f"tokens: 1 expected, got {self.tokens}")
        # A thread absorbs into two neighbouring columns; the threads of a group share nope rows.
        self.pairs = self.latent // 2
        self.groups = THREADS // self.pairs
        self.qb_at = self.shared.add(self.rows * Q_RANK * 2, align=128)
        self.uk_at = self.shared.add(NOPE * self.latent * 2)
        self.row_at = self.shared.add(self.rows * 4)
        self.nope_at = self.shared.add(NOPE * 4)
        self.sum_at = self.shared.add(self.groups * self.latent * 4)
        self.rows_full_at = self.shared.add(8)
        self.nope_full_at = self.shared.add(8)

    def copy_w_qb(self, w_qb, qb, rows_full, options, part, head):
        """One thread starts the copies of this CTA's nope rows and rope rows of Q_B."""
        head_qb = w_qb + Int64(head) * (HEAD_ROWS * Q_RANK)
        nope_size, rope_size = self.nope * Q_RANK * 2, self.rope * Q_RANK * 2
        ptx.copy_bulk(qb, head_qb + part * self.nope * Q_RANK, nope_size, rows_full)
        # In the pair order neighbouring rows may be far apart.
        runs = 1 if options is None else self.rope
        for run in range(runs):
            place = run * (self.rope // runs)
            row = self.rope_row(options, NOPE + part * self.rope + place)
            ptx.copy_bulk(
                qb + (self.nope + place) * Q_RANK,
                head_qb + row * Q_RANK,
                rope_size // runs,
                rows_full,
            )

    def normed(self, row, gamma, eps, lane):
        """The token's normed query latent, [chunk] of eight values; each warp for itself."""
        words = [ptx.load_global_16(row + (256 * c + 8 * lane)) for c in range(CHUNKS)]
        chains = new_chains()
        for c in range(CHUNKS):
            values = floats(words[c])
            chains = dot(values, values, chains)
        total = cute.arch.warp_reduction_sum(chain_sum(chains))
        r = ptx.rsqrt(cute.math.fma(total, Float32(1 / Q_RANK), eps))
        return [floats(normed_words(floats(words[c]), r, floats(gamma[c]))) for c in range(CHUNKS)]

    @cute.jit
    def project(self, x, qb, row_values, warp, lane):
        """Q_B: a warp multiplies every eighth of the CTA's rows."""
        for row in range(warp, self.rows, WARPS):
            chains = new_chains()
            for c in cutlass.range_constexpr(CHUNKS):
                weights = floats(ptx.load_shared_16(qb + (row * Q_RANK + 256 * c + 8 * lane)))
                chains = dot(weights, x[c], chains)
            value = cute.arch.warp_reduction_sum(chain_sum(chains))
            rounded, _ = ptx.unpack_bf16(ptx.pack_bf16(value, Float32(0)))
            if lane == 0:
                row_values[row] = rounded

    @cute.jit
    def send_nope(self, row_values, nope_values, nope_full, part, tid):
        """Stores this CTA's nope values in every CTA of the cluster, itself included."""
        for i in range(tid, self.nope * self.cluster, THREADS):
            peer, j = i % self.cluster, i // self.cluster
            cute.arch.store_async_dsmem(
                nope_values + (part * self.nope + j), row_values[j].bitcast(Int32), nope_full, peer
            )

    @cute.jit
    def absorb(self, nope_values, uk, sums, out, inverse, part, tid):
        """W_UK: partial sums of column pairs by groups of nope rows, then four columns a thread."""
        pair, group = tid % self.pairs, tid // self.pairs
        group_rows: cutlass.Constexpr = NOPE // self.groups
        columns = (Float32(0), Float32(0))
        for i in cutlass.range_constexpr(group_rows):
            p = group * group_rows + i
            weights = ptx.unpack_bf16(ptx.load_shared_b32(uk + (p * self.latent + 2 * pair)))
            value = nope_values[p]
            columns = fma_pair((value, value), weights, columns)
        ptx.store_shared_f32x2(sums + (group * self.latent + 2 * pair), *columns)
        cute.arch.sync_threads()
        column = 4 * tid
        if column < self.latent:
            total = [Float32(0)] * 4
            for g in cutlass.range_constexpr(self.groups):
                values = ptx.load_shared_f32x4(sums + (g * self.latent + column))
                total = [total[k] + values[k] for k in range(4)]
            values = rounded(total, inverse)
            store_values(out + (part * self.latent + column), values, inverse)

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
        part, head, token = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        base = cute.arch.get_dyn_smem(Uint8, alignment=128)
        qb = self.shared.view(base, self.qb_at, BFloat16)
        uk = self.shared.view(base, self.uk_at, BFloat16)
        row_values = self.shared.view(base, self.row_at, Float32)
        nope_values = self.shared.view(base, self.nope_at, Float32)
        sums = self.shared.view(base, self.sum_at, Float32)
        rows_full = self.shared.view(base, self.rows_full_at, Uint64)
        nope_full = self.shared.view(base, self.nope_full_at, Uint64)

        # Weights before the wait: a launch that overlaps the previous kernel, which the launcher
        # chooses and by default does not, promises that it did not write them.
        if tid == 0:
            cute.arch.mbarrier_init(rows_full, 1)
            cute.arch.mbarrier_init(nope_full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(rows_full, self.rows * Q_RANK * 2)
            cute.arch.mbarrier_arrive_and_expect_tx(nope_full, NOPE * 4)
            self.copy_w_qb(w_qb, qb, rows_full, options, part, head)
        cute.arch.cluster_arrive_relaxed()
        self.prefetch_kv_norm(kv_norm, tid)
        self.copy_w_uk(w_uk, uk, self.latent, part, head, tid)
        gamma = [ptx.load_constant_16(q_norm + (256 * c + 8 * lane)) for c in range(CHUNKS)]

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        position = load_position(options, token)
        inverse = self.load_inverse(q_scale)
        x = self.normed(qkv + Int64(token) * stride, gamma, eps, lane)
        if cutlass.const_expr(options is not None):
            pair = part * (self.rope // 2) + tid % (self.rope // 2)
            angle = load_angle(options, position, pair)
            if warp == 0:
                self.write_latent(options, x, 256, token, 8 * lane, heads, part, head)
        # The KV row while the weights are on their way.
        self.insert(
            qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options,
            position, token, heads, part, head, warp, lane,
        )  # fmt: skip
        cute.arch.cluster_wait()
        cute.arch.mbarrier_wait(rows_full, 0)
        self.project(x, qb, row_values, warp, lane)
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        self.send_nope(row_values, nope_values, nope_full, part, tid)
        out = q_row(q, token, heads, head)
        if cutlass.const_expr(options is None):
            if 4 * tid < self.rope:
                rope = [row_values[self.nope + 4 * tid + k] for k in range(4)]
                store_values(out + (KV_RANK + part * self.rope + 4 * tid), rope, inverse)
        else:
            if 2 * tid < self.rope:
                rope = [row_values[self.nope + 2 * tid + k] for k in range(2)]
                word = rotate(options, ptx.pack_bf16(*rope), angle)
                store_pair(options, out + KV_RANK, pair, word, inverse)
        cute.arch.mbarrier_wait(nope_full, 0)
        self.absorb(nope_values, uk, sums, out, inverse, part, tid)
