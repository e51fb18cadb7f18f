"""What the kernels share: a head divided among a cluster, the copy of W_UK, the KV insert."""

from __future__ import annotations

import cutlass
from cutlass import Int64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.insert import insert_row
from jax_mla.kernels.plan import SharedPlan
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
        """Inserts the tile's KV rows, a warp a token, spread over all CTAs of the tile."""
        ctas = heads * self.cluster
        for i in range(head * self.cluster + part + warp * ctas, self.tokens, WARPS * ctas):
            if first + i < batch:
                insert_row(
                    qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, first + i,
                    lane,
                )  # fmt: skip
