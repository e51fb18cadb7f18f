"""What the kernels share: a head divided among a cluster, copies, the gather, the absorption."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.convert import e4m3_pair
from jax_mla.kernels.insert import insert_row
from jax_mla.kernels.plan import SharedPlan, q_row
from jax_mla.rules import KV_RANK, NOPE, ROPE
from jax_mla.variants import THREADS, Variant

WARPS = THREADS // 32


class ClusterQuery:
    """A kernel in which a cluster of C CTAs computes one head's queries for T tokens.

    CTA `part` owns nope rows 128/C * part.., rope rows 64/C * part.. of Q_B and latent columns
    512/C * part.. of W_UK: the same work for every CTA.
    """

    def __init__(self, variant: Variant):
        self.tokens, self.cluster = variant.tokens, variant.cluster
        self.nope, self.rope = NOPE // self.cluster, ROPE // self.cluster
        self.rows = self.nope + self.rope
        self.latent = KV_RANK // self.cluster
        self.shared = SharedPlan()

    @cute.jit
    def copy_w_uk(self, w_uk, uk, stride: cutlass.Constexpr, part, head, tid):
        """Starts the copy of this CTA's columns of W_UK to shared rows of `stride` values."""
        source = w_uk + Int64(head) * (NOPE * KV_RANK) + part * self.latent
        row_chunks: cutlass.Constexpr = self.latent // 8
        for chunk in range(tid, NOPE * row_chunks, THREADS):
            p, j = chunk // row_chunks, chunk % row_chunks
            ptx.copy_async_16(uk + p * stride + 8 * j, source + p * KV_RANK + 8 * j)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def prefetch_kv_norm(self, kv_norm, tid):
        """Brings kv_norm to L2, so that the insert does not wait for memory."""
        if tid < KV_RANK // 64:
            ptx.prefetch_l2(kv_norm + 64 * tid)

    @cute.jit
    def insert(
        self, qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, first, heads,
        part, head, warp, lane,
    ):  # fmt: skip
        """Inserts the tile's KV rows, a warp a token, spread over its 8 C heads >= T warps."""
        token = first + head * self.cluster + part + warp * heads * self.cluster
        if token < cutlass.min(first + self.tokens, batch):
            insert_row(
                qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, token, lane
            )


class MmaQuery(ClusterQuery):
    """A cluster kernel whose absorption runs on tensor cores."""

    def __init__(self, variant: Variant):
        super().__init__(variant)
        # An MMA has 16 token rows; with 8 tokens the upper half is left empty.
        self.m_tiles, self.halves = -(-self.tokens // 16), min(self.tokens // 8, 2)
        # Strides for which the eight rows of a matrix load fall into different banks.
        self.uk_stride = self.latent + 8
        self.nope_stride = self.nope + 8 if self.nope > 8 else 8
        self.block_bytes = self.tokens * self.nope_stride * 2
        self.nope_bytes = self.tokens * NOPE * 2

    @cute.jit
    def send_nope(self, nope, block, nope_full, part, tid):
        """Sends this CTA's nope block to every CTA of the cluster, itself included.

        From registers: the source may change, and the CTA end, before the bytes have arrived.
        """
        row_chunks: cutlass.Constexpr = self.nope // 8
        for i in range(tid, self.tokens * row_chunks * self.cluster, THREADS):
            peer, chunk = i % self.cluster, i // self.cluster
            at = (chunk // row_chunks) * self.nope_stride + 8 * (chunk % row_chunks)
            ptx.store_to_peer_16(
                nope + (part * self.tokens * self.nope_stride + at),
                ptx.load_shared_16(block + at),
                nope_full,
                peer,
            )

    @cute.jit
    def absorb(self, nope, uk, q, inverse, first, batch, heads, part, head, warp, lane):
        """W_UK: a warp multiplies all tokens by eight latent columns at a time."""
        for column in range(8 * warp, self.latent, 8 * WARPS):
            weights = []
            for k in cutlass.range_constexpr(NOPE // 32):
                at = uk + ((32 * k + lane) * self.uk_stride + column)
                weights += list(ptx.load_matrices_transposed(at))
            for m in cutlass.range_constexpr(self.m_tiles):
                token = 16 * m + lane % (8 * self.halves)
                acc = [[Float32(0)] * 4, [Float32(0)] * 4]
                for k in cutlass.range_constexpr(NOPE // 16):
                    p = 16 * k + 8 * (lane // 16)
                    row = (p // self.nope) * self.tokens + token
                    a = ptx.load_matrices(nope + (row * self.nope_stride + p % self.nope))
                    acc[k % 2] = ptx.mma(acc[k % 2], a, weights[2 * k : 2 * k + 2])
                out = [acc[0][i] + acc[1][i] for i in range(4)]
                for half in cutlass.range_constexpr(self.halves):
                    row = first + 16 * m + lane // 4 + 8 * half
                    if row < batch:
                        word = ptx.pack_bf16(out[2 * half], out[2 * half + 1])
                        ptx.store_global_b16(
                            q_row(q, row, heads, head)
                            + (part * self.latent + column + 2 * (lane % 4)),
                            e4m3_pair(*ptx.unpack_bf16(word), inverse),
                        )
