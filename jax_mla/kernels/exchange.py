"""The kernel that gathers the queries of a group's ranks through their mailboxes."""

from __future__ import annotations

from cutlass import Int32, Int64, Uint32, cute

from jax_mla.kernels import mailbox
from jax_mla.kernels.plan import SharedPlan
from jax_mla.variants import THREADS, Variant


class ExchangeQueries:
    """Publishes a rank's queries to its peers and collects theirs.

    Free at run time: batch, words a token and rank, ranks, CTAs (all must run at once).
    Reads  q once; its own mailbox until all words are there.
    Writes out, every word by one thread; the peers' mailboxes; its own mailbox, EMPTY again; the
        control block.
    Sync   `jax_mla.kernels.mailbox` is the protocol and its proof.
    """

    blocks_per_sm = 1

    def __init__(self, variant: Variant):
        self.cluster = variant.cluster
        self.shared = SharedPlan()

    @cute.kernel
    def kernel(
        self,
        q: Int64,
        out: Int64,
        control: Int64,
        batch: Int32,
        words: Int32,
        replacement: Uint32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        thread, threads = cta * THREADS + tid, ctas * THREADS
        # Were this launched early, the call before it might still be using the mailbox.
        cute.arch.griddepcontrol_wait()
        box = mailbox.look_up(control)
        mailbox.publish(box, q, out, batch, words, replacement, thread, threads)
        mailbox.collect(box, out, batch, words, replacement, thread, threads)
        mailbox.finish(box, tid, ctas)
