"""The MMA kernel that holds its tokens in registers: every CTA norms them for itself."""

from __future__ import annotations

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, Uint64, cute
from cutlass.cutlass_dsl import select_

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
from jax_mla.kernels.pair_order import NONE
from jax_mla.kernels.plan import q_row
from jax_mla.kernels.rope import load_angle, load_position, rotate, store_pair
from jax_mla.rules import HEAD_ROWS, KV_RANK, NOPE, Q_RANK
from jax_mla.variants import THREADS, Variant

SLICE = Q_RANK // WARPS
"""Split-K: warp w multiplies columns 192 w .. 192 w + 191 of the query latent."""
CHUNKS = SLICE // 32
"""A fragment load covers 32 columns: 4 quarters of 8. Both operands use this order of columns, so
the MMA's own order does not matter."""
QB_STRIDE = Q_RANK + 32
"""Row stride of Q_B in shared memory: 8 rows x 4 quarters of 16 bytes hit all banks evenly."""
BLOCK_NOPE, BLOCK_ROPE = 16, 8
BLOCK_ROWS = BLOCK_NOPE + BLOCK_ROPE
"""Rows of Q_B multiplied at once: 24."""
TILES = BLOCK_ROWS // 8
BLOCK_BYTES = BLOCK_ROWS * QB_STRIDE * 2


class TiledQuery(ClusterQuery):
    """Queries and KV rows of `tokens` tokens of one head, by a cluster, on tensor cores.

    A CTA's rows of Q_B come in blocks of 24. Where there are more than two, the blocks and then
    pieces of W_UK pass through two slots of shared memory, refilled once their block is multiplied.

    Fixed at build: tokens T (8, 16 or 32), cluster size C; each CTA owns 128/C nope and 64/C rope
        rows of Q_B and 512/C latent columns.
    Free at run time: batch, heads, row stride of qkv, cache size, eps, options.
    Reads  its own part of w_qb and w_uk once, T whole query latents straight into MMA fragments.
    Writes q: latent columns and rope columns of its part, every byte by one thread; cache: a row by
        one warp (insert); q_latent: a value by one thread (write_latent).
    Sync   full[slot]: the bulk copies into the slot have landed; phase: how often it was filled.
        nope_full: all C CTAs' nope blocks have landed here (st.async).
        cluster phase 1: nope_full of every peer is initialised and every CTA has read its rows of
        Q_B for the last time, so the nope values may take the place of the first ones. No CTA
        needs another one after that: each waits for all that is stored to it, and sends from
        registers.
        Block barriers: after `gamma` and the sums of squares; after the partial products of a block
        and 16 tokens, which also says that the block's slot may be refilled and, as two buffers
        take turns, that the sums before the last are read; after all nope values are stored.
    """

    def __init__(self, variant: Variant):
        super().__init__(variant)
        if self.tokens not in (8, 16, 32) or self.cluster not in (1, 2, 4, 8):
            raise ValueError(f"8, 16 or 32 tokens and cluster 1, 2, 4 or 8 expected, got {variant}")
        # An MMA has 16 token rows; with 8 tokens the upper half is left empty.
        self.m_tiles, self.halves = -(-self.tokens // 16), min(self.tokens // 8, 2)
        self.blocks = self.rows // BLOCK_ROWS
        # Everything at once where it fits, else pieces of W_UK follow the blocks through the slots.
        self.at_once = self.blocks <= 2
        self.lane_rows = self.m_tiles * self.halves
        # With 8 tokens there are registers, and use, for a second CTA an SM.
        self.blocks_per_sm = 2 if self.tokens == 8 and self.at_once else 1
        self.piece = min(self.latent, 256)
        self.pieces = self.latent // self.piece
        slots = [self.shared.add(BLOCK_BYTES, align=128) for _ in range(min(self.blocks, 2))]
        self.slots_at = slots
        if self.at_once:
            self.uk_at = self.shared.add(NOPE * (self.piece + 8) * 2, align=128)
        # A stride for which the eight rows of a matrix load fall into different banks; the rows of
        # W_UK, of piece + 8 columns, do so too.
        self.nope_stride = self.nope + 8
        self.block_bytes = self.tokens * self.nope_stride * 2
        self.partial_items = TILES * self.halves * 32
        self.buffers = min(2, self.blocks * self.m_tiles)
        self.partial_at = self.shared.add(self.buffers * WARPS * self.partial_items * 8)
        # A slot that is not filled again holds the nope values after its block.
        nope_bytes = self.block_bytes * self.cluster
        self.nope_at = slots[0] if self.at_once else self.shared.add(nope_bytes)
        # A lone CTA gathers from nobody: its block is the whole.
        self.block_at = self.shared.add(self.block_bytes) if self.cluster > 1 else self.nope_at
        self.gamma_at = self.shared.add(Q_RANK * 2)
        self.square_at = self.shared.add(self.tokens * WARPS * 4)
        self.full_at = [self.shared.add(8) for _ in slots]
        self.nope_full_at = self.shared.add(8)

    def item_place(self, item):
        """Slot of an item (a block, or a piece after the blocks) and the parity of its filling."""
        return item % len(self.slots_at), item // len(self.slots_at) % 2

    @cute.jit
    def fill(self, item: cutlass.Constexpr, w_qb, w_uk, options, base, part, head, lane):
        """One warp starts the copies of an item into its slot."""
        slot, _ = self.item_place(item)
        full = self.shared.view(base, self.full_at[slot], Uint64)
        place = self.shared.view(base, self.slots_at[slot], BFloat16)
        if cutlass.const_expr(item < self.blocks):
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, BLOCK_ROWS * Q_RANK * 2)
            cute.arch.sync_warp()
            if lane < BLOCK_ROWS:
                row = part * self.nope + item * BLOCK_NOPE + lane
                if lane >= BLOCK_NOPE:
                    row = NOPE + part * self.rope + item * BLOCK_ROPE + lane - BLOCK_NOPE
                    row = self.rope_row(options, row)
                source = w_qb + (Int64(head) * HEAD_ROWS + row) * Q_RANK
                ptx.copy_bulk(place + lane * QB_STRIDE, source, Q_RANK * 2, full)
        elif cutlass.const_expr(not self.at_once and item < self.blocks + self.pieces):
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(full, NOPE * self.piece * 2)
            cute.arch.sync_warp()
            column = part * self.latent + (item - self.blocks) * self.piece
            source = w_uk + (Int64(head) * NOPE * KV_RANK + column)
            for p in range(lane, NOPE, 32):
                ptx.copy_bulk(
                    place + p * (self.piece + 8), source + p * KV_RANK, self.piece * 2, full
                )

    @cute.jit
    def wait_for(self, item: cutlass.Constexpr, base):
        """Waits until an item is in its slot and returns the place."""
        slot, parity = self.item_place(item)
        cute.arch.mbarrier_wait(self.shared.view(base, self.full_at[slot], Uint64), parity)
        return self.shared.view(base, self.slots_at[slot], BFloat16)

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
        """This warp's share of a block of Q_B, over its slice: [token tile][tile] of four sums."""
        # A lone token tile gets two chains a tile: half the latency of dependent MMAs.
        chains = 2 // self.m_tiles
        acc = [
            [[[Float32(0)] * 4 for _ in range(chains)] for _ in range(TILES)]
            for _ in range(self.m_tiles)
        ]
        for c in range(CHUNKS):
            for n in range(TILES):
                row = 8 * n + lane // 4
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
        for n in range(TILES):
            for half in range(self.halves):
                item = warp * self.partial_items + (n * self.halves + half) * 32 + lane
                ptx.store_shared_f32x2(partial + 2 * item, *sums[n][2 * half : 2 * half + 2])

    def fragment_token(self, m, tid):
        """Token of the tile whose sums of token tile m a thread adds up."""
        return 16 * m + tid % 32 // 4 + 8 * (tid // 32 % self.halves)

    @cute.jit
    def reduce(
        self, partial, nope, q, inverse, options, angle, m: cutlass.Constexpr, first, batch, heads,
        rope, head, tid,
    ):  # fmt: skip
        """Sums the warps' products in a fixed order: nope values to `nope`, rope values to q."""
        if tid < self.partial_items:
            lane, fragment = tid % 32, tid // 32
            tile, half = fragment // self.halves, fragment % self.halves
            low, high = Float32(0), Float32(0)
            for w in cutlass.range_constexpr(WARPS):
                x, y = ptx.load_shared_f32x2(partial + 2 * (w * self.partial_items + tid))
                low, high = low + x, high + y
            word = ptx.pack_bf16(low, high)
            token, column = 16 * m + lane // 4 + 8 * half, 2 * (lane % 4)
            if tile < TILES - 1:
                ptx.store_shared_b32(nope + (token * self.nope_stride + 8 * tile + column), word)
            elif first + token < batch:
                out = q_row(q, first + token, heads, head)
                if cutlass.const_expr(options is None):
                    out = out + (KV_RANK + rope + column)
                    store_values(out, floats([word]), inverse)
                else:
                    word = rotate(options, word, angle)
                    store_pair(options, out + KV_RANK, (rope + column) // 2, word, inverse)

    def rotating(self, options, tid):
        """The options of the threads that rotate queries; for the others, without RoPE."""
        if options is None:
            return None
        rotates = tid // 32 // self.halves == TILES - 1
        return options._replace(style=select_(rotates, options.style, Int32(NONE)))

    def load_positions(self, options, first, batch, tid):
        """Positions of the tokens whose rope values this thread adds up, [token tile]."""
        tokens = [first + self.fragment_token(m, tid) for m in range(self.m_tiles)]
        return [load_position(options, cutlass.min(token, batch - 1)) for token in tokens]

    def load_angles(self, options, positions, item, part, lane):
        """(cos, sin) of this thread's pair of a block at those positions, [token tile]."""
        if options is None:
            return [None] * self.m_tiles
        pair = (part * self.rope + item * BLOCK_ROPE) // 2 + lane % 4
        return [load_angle(options, position, pair) for position in positions]

    @cute.jit
    def write_latents(self, options, x, first, batch, heads, part, head, warp, lane):
        """Writes this warp's slice of the normed query latents."""
        for i in cutlass.range_constexpr(self.lane_rows):
            token = first + lane // 4 + 8 * i
            if token < batch:
                chunks = [floats(x[c][i]) for c in range(CHUNKS)]
                column = SLICE * warp + 8 * (lane % 4)
                self.write_latent(options, chunks, 32, token, column, heads, part, head)

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
    def absorb(self, nope, uk, q, inverse, first, batch, heads, latent, head, warp, lane):
        """W_UK: a warp multiplies all tokens by eight latent columns at a time.

        `uk` holds the piece of W_UK that starts at column `latent`.
        """
        for column in range(8 * warp, self.piece, 8 * WARPS):
            weights = []
            for k in cutlass.range_constexpr(NOPE // 32):
                at = uk + ((32 * k + lane) * (self.piece + 8) + column)
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
                        store_values(
                            q_row(q, row, heads, head) + (latent + column + 2 * (lane % 4)),
                            rounded(out[2 * half : 2 * half + 2], inverse),
                            inverse,
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
        options: Options | None,
    ):
        tid, _, _ = cute.arch.thread_idx()
        part, head, tile = cute.arch.block_idx()
        _, heads, _ = cute.arch.grid_dim()
        lane, warp = tid % 32, cute.arch.make_warp_uniform(tid // 32)
        first = tile * self.tokens
        base = cute.arch.get_dyn_smem(Uint8, alignment=128)
        partial = self.shared.view(base, self.partial_at, Float32)
        block = self.shared.view(base, self.block_at, BFloat16)
        nope = self.shared.view(base, self.nope_at, BFloat16)
        gamma = self.shared.view(base, self.gamma_at, BFloat16)
        squares = self.shared.view(base, self.square_at, Float32)
        nope_full = self.shared.view(base, self.nope_full_at, Uint64)

        # Weights before the wait: a launch that overlaps the previous kernel, which the launcher
        # chooses and by default does not, promises that it did not write them.
        norm_words = ptx.load_constant_16(q_norm + 8 * cutlass.min(tid, Q_RANK // 8 - 1))
        if warp == 0:
            if lane == 0:
                for at in self.full_at:
                    cute.arch.mbarrier_init(self.shared.view(base, at, Uint64), 1)
                cute.arch.mbarrier_init(nope_full, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(nope_full, self.tokens * NOPE * 2)
            cute.arch.sync_warp()
            for item in cutlass.range_constexpr(len(self.slots_at)):
                self.fill(item, w_qb, w_uk, options, base, part, head, lane)
        if cutlass.const_expr(self.at_once):
            self.copy_w_uk(
                w_uk, self.shared.view(base, self.uk_at, BFloat16), self.piece + 8, part, head, tid
            )
        self.prefetch_kv_norm(kv_norm, tid)

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        position = self.load_insert_position(options, first, batch, heads, part, head, warp)
        rotating = self.rotating(options, tid)
        positions = self.load_positions(rotating, first, batch, tid)
        words = self.load_tokens(qkv, stride, first, batch, warp, lane)
        inverse = self.load_inverse(q_scale)
        if tid < Q_RANK // 8:
            ptx.store_shared_16(gamma + 8 * tid, norm_words)
        self.square_sums(words, squares, warp, lane)
        cute.arch.sync_threads()
        x = self.normed(words, squares, gamma, eps, warp, lane)
        if cutlass.const_expr(options is not None):
            self.write_latents(options, x, first, batch, heads, part, head, warp, lane)
        # KV rows while the weights are on their way.
        self.insert(
            qkv, kv_norm, cache, slots, k_scale, stride, cache_rows, batch, eps, options,
            position, first, heads, part, head, warp, lane,
        )  # fmt: skip
        for item in cutlass.range_constexpr(self.blocks):
            angles = self.load_angles(rotating, positions, item, part, lane)
            sums = self.project(x, self.wait_for(item, base), warp, lane)
            for m in cutlass.range_constexpr(self.m_tiles):
                turn = (item * self.m_tiles + m) % self.buffers
                buffer = partial + turn * (2 * WARPS * self.partial_items)
                self.store_partial(sums[m], buffer, warp, lane)
                cute.arch.sync_threads()
                if cutlass.const_expr(item == self.blocks - 1 and m == 0):
                    # All sums are stored, so all reads of the slots that they came from are over.
                    cute.arch.cluster_arrive_relaxed()
                if cutlass.const_expr(m == 0):
                    if warp == 0:
                        following = item + len(self.slots_at)
                        self.fill(following, w_qb, w_uk, options, base, part, head, lane)
                self.reduce(
                    buffer, block + item * BLOCK_NOPE, q, inverse, options, angles[m], m, first,
                    batch, heads, part * self.rope + item * BLOCK_ROPE, head, tid,
                )  # fmt: skip
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        if cutlass.const_expr(self.cluster > 1):
            self.send_nope(nope, block, nope_full, part, tid)
            cute.arch.mbarrier_wait(nope_full, 0)
        for piece in cutlass.range_constexpr(self.pieces):
            if cutlass.const_expr(self.at_once):
                uk = self.shared.view(base, self.uk_at, BFloat16)
            else:
                uk = self.wait_for(self.blocks + piece, base)
            self.absorb(
                nope, uk, q, inverse, first, batch, heads,
                part * self.latent + piece * self.piece, head, warp, lane,
            )  # fmt: skip
