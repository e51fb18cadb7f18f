"""What the kernels share: a head divided among a cluster, the copy of W_UK, the KV insert."""

from __future__ import annotations

import cutlass
from cutlass import Int64, cute

from jax_mla.kernels import ptx
from jax_mla.kernels.convert import rounded, store_values
from jax_mla.kernels.insert import insert_row
from jax_mla.kernels.pair_order import column
from jax_mla.kernels.plan import SharedPlan
from jax_mla.kernels.rope import load_position
from jax_mla.rules import KV_RANK, NOPE, Q_RANK, ROPE
from jax_mla.variants import THREADS, Variant

WARPS = THREADS // 32


class ClusterQuery:
    """A kernel in which a cluster of C CTAs computes one head's queries for T tokens.

    CTA `part` owns nope rows 128/C * part.., rope rows 64/C * part.. of Q_B and latent columns
    512/C * part.. of W_UK: the same work for every CTA. In the general forms, whose kernels get
    `options`, rope rows are counted in the pair order of the style.
    """

    def __init__(self, variant: Variant):
        self.tokens, self.cluster = variant.tokens, variant.cluster
        self.bf16 = variant.form == "bf16"
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

    def rope_row(self, options, row):
        """Row of a head of Q_B, 128 to 191, that is taken as rope row `row`."""
        if options is None:
            return row
        return NOPE + column((row - NOPE) // 2, row % 2, options.style)

    def load_inverse(self, q_scale):
        """1/q_scale, which queries are multiplied by; None where they are stored as bf16."""
        return None if self.bf16 else ptx.reciprocal(ptx.load_global_f32(q_scale))

    @cute.jit
    def write_latent(
        self, options, chunks, distance: cutlass.Constexpr, token, column, heads, part, head
    ):
        """Writes a thread's share of a token's normed query latent, if a result is wanted.

        Of the CTAs that hold the token, number c writes chunk c, eight floats at `column` +
        `distance` * c, and the last one all chunks from its own on.
        """
        cta, last = head * self.cluster + part, heads * self.cluster - 1
        if options.q_latent.toint() != 0:
            out = options.q_latent + (Int64(token) * Q_RANK + column)
            for c in cutlass.range_constexpr(len(chunks)):
                if cutlass.min(c, last) == cta:
                    # Rounded once more: a store of the MMA's fragments themselves would make the
                    # compiler hold them in its order, and move them before each MMA.
                    store_values(out + distance * c, rounded(chunks[c], None), None)

    @cute.jit
    def prefetch_kv_norm(self, kv_norm, tid):
        """Brings kv_norm to L2, so that the insert does not wait for memory."""
        if tid < KV_RANK // 64:
            ptx.prefetch_l2(kv_norm + 64 * tid)

    def insert_tokens(self, heads, part, head, warp):
        """The first token of the tile whose KV row this warp inserts, and the step to the next."""
        ctas = heads * self.cluster
        return head * self.cluster + part + warp * ctas, WARPS * ctas

    def load_insert_position(self, options, first, batch, heads, part, head, warp):
        """Position of the first of those tokens; early, since its row of the table waits for it."""
        token, _ = self.insert_tokens(heads, part, head, warp)
        return load_position(options, cutlass.min(first + token, batch - 1))

    @cute.jit
    def insert(
        self, qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options,
        position, first, heads, part, head, warp, lane,
    ):  # fmt: skip
        """Inserts the tile's KV rows, a warp a token, spread over all CTAs of the tile."""
        start, step = self.insert_tokens(heads, part, head, warp)
        for token in range(start, self.tokens, step):
            if first + token < batch:
                insert_row(
                    qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options,
                    self.bf16, position, first + token, lane,
                )  # fmt: skip
            if cutlass.const_expr(options is not None):
                position = load_position(options, cutlass.min(first + token + step, batch - 1))
