"""The mailbox: how the ranks of a group give each other their queries, and why that is right.

A Lamport mailbox: a word of the data is its own flag. Each rank has a mailbox of two halves in its
own memory, laid out as the gathered queries are, and a control block (`jax_mla.mailbox_layout`).
All words are EMPTY at first. Call e of a rank works in half e mod 2, and each of its threads

    P  publishes: stores words of its rank's queries to the mailboxes of all peers, never an EMPTY;
    Q  polls: loads words of the peers' queries from its own mailbox until they are not EMPTY;
    C  re-arms: stores EMPTY to the words that it has polled, once they are in the result;

and the last CTA of the call adds one to the epoch e. P, Q, C of call e on rank r are P_r^e and so
on; K_r^e is the whole call.

Assumptions. A1: every rank has the same calls in the same order, and K_r^(e+1) touches mailboxes
only once K_r^e has ended and its stores to its own memory are performed (kernels of one stream
without programmatic launches, as the runtime launches them). A2: an aligned word of 4 bytes is
stored and loaded at once, and its owner's L2 keeps its stores in one order. A3: no published word
is EMPTY (`publish` replaces it). A4: all CTAs of a call run while others of it poll (the launch has
fewer CTAs than the device has SMs). A5: all words are EMPTY before the first call of any rank.
A6: a call has the same sizes on all ranks. A7: a rank that has waited for its device has no store
under way, not even to a peer.

L1, skew: K_s^e ends only once all ranks have published e, so all have started e, so all have ended
e-1. No rank is two calls ahead of another.
L2, the place is empty: P_r^e to s is issued after K_r^(e-1) has ended. By L1 s had started e-1 by
then, so K_s^(e-2), which used the same half, had ended and its C was performed. Nobody else stores
there.
L3, the right word: P_r^(e+2) to s is issued after K_r^(e+1) has ended, so s has published e+1, so
K_s^e has ended with its Q and C. Q_s^e can see nothing but EMPTY and the word of call e.
L4, clean again: C follows Q at one address in one thread.
L5, no deadlock: all threads publish everything before they poll anything (A4).

Nothing orders one word after another: no fence, no flag, no barrier. Batches of any size share a
mailbox, because a call re-arms just what it polls, and which CTA handles a word does not matter.

What PTX does not promise: that C_s^(e-2) comes before P_r^e at that word follows by causality
through relaxed words of call e-1 (L2), and PTX asks for fences on such a path. On hardware the
re-arming store is performed in the owner's L2 when its kernel has ended, before anything of call
e-1 is published; TensorRT-LLM, FlashInfer and NCCL count on the same.

Where words do not come in time (`Box.timeout`), the rank latches STATE and REPORT and stores NaN
for them; from then on its calls give NaN for all peers' words and neither publish nor wait, since
its mailbox may hold words of any call. Only a collective reset opens it: all ranks have waited for
their devices (A7) before the first empties its mailbox, and all have emptied theirs before the next
call (A5).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.cutlass_dsl import select_

from jax_mla import mailbox_layout as layout
from jax_mla.kernels import ptx

AT_ONCE = 4
"""16-byte words whose loads a thread has under way together."""
POLLS_A_LOOK = 64
"""Polls between two looks at the clock."""


class Box(NamedTuple):
    """A rank's control block as a call finds it.

    Attributes:
        control: address of the block.
        epoch: calls before this one.
        open: whether the mailbox is OPEN.
        rank, ranks: this rank and how many there are.
        half: bytes from the start of a mailbox to the half that this call uses.
        own: address of that half of this rank's mailbox.
        deadline: `globaltimer` at which the call gives up.
    """

    control: Int64
    epoch: Uint32
    open: Boolean
    rank: Int32
    ranks: Int32
    half: Int64
    own: Int64
    deadline: Int64


def look_up(control):
    """Loads what a call needs of the control block at an address, all in one latency."""
    epoch = ptx.load_global(control + layout.EPOCH, Uint32)
    state = ptx.load_global(control + layout.STATE, Uint32)
    rank = ptx.load_global(control + layout.RANK, Int32)
    ranks = ptx.load_global(control + layout.RANKS, Int32)
    half_bytes = ptx.load_global(control + layout.HALF_BYTES, Int64)
    timeout = ptx.load_global(control + layout.TIMEOUT, Int64)
    half = Int64(epoch & 1) * half_bytes
    return Box(
        control=control,
        epoch=epoch,
        open=state == layout.OPEN,
        rank=rank,
        ranks=ranks,
        half=half,
        own=_mailbox(control, rank) + half,
        deadline=cute.arch.globaltimer() + timeout,
    )


def _mailbox(control, rank):
    """Address of a rank's mailbox."""
    return ptx.load_global(control + layout.BOXES + Int64(rank) * 8, Int64)


def _is_empty(words):
    """Whether one of the four words has not come yet."""
    w0, w1, w2, w3 = (word == layout.EMPTY for word in words)
    return w0 | w1 | w2 | w3


@cute.jit
def publish(box, q, out, batch, words, replacement, thread, threads: Int32):
    """Stores this rank's queries in the result and in the mailboxes of all peers.

    Args:
        box: from `look_up`.
        q: address of [batch, words] 16-byte words, this rank's.
        out: address of [batch, ranks, words] 16-byte words, the result.
        replacement: stands for a word that is EMPTY.
        thread, threads: of the grid: who handles what.
    """
    total = batch * words
    for start in range(thread, total, AT_ONCE * threads):
        indices = [start + i * threads for i in range(AT_ONCE)]
        inside = [index < total for index in indices]
        loaded = [
            ptx.load_global_16_if(inside[i], q + Int64(indices[i]) * layout.WORD_BYTES)
            for i in range(AT_ONCE)
        ]
        never_empty = [_replaced(values, replacement) for values in loaded]
        places = [_own_place(box, index, words) for index in indices]
        for i in cutlass.range_constexpr(AT_ONCE):
            if inside[i]:
                ptx.store_global(out + places[i], never_empty[i])
        if box.open:
            for distance in cutlass.range(1, box.ranks, unroll=1):
                # Each rank starts with another peer.
                peer = (box.rank + distance) % box.ranks
                half = _mailbox(box.control, peer) + box.half
                for i in cutlass.range_constexpr(AT_ONCE):
                    if inside[i]:
                        ptx.store_system_16(half + places[i], never_empty[i])


def _replaced(values, replacement):
    """The words, `replacement` for those that are EMPTY."""
    return [select_(word == layout.EMPTY, replacement, word) for word in values]


def _divided(a, b):
    """Quotient and remainder of what is not negative."""
    quotient = Int32(Uint32(a) // Uint32(b))
    return quotient, a - quotient * b


def _own_place(box, index, words):
    """Byte of word `index` of this rank's queries in the gathered ones."""
    token, word = _divided(index, words)
    return (Int64(token * box.ranks + box.rank) * words + word) * layout.WORD_BYTES


def _peers_place(box, index, words):
    """The rank that publishes word `index` of all peers' queries, and its byte."""
    run, word = _divided(index, words)
    token, rank = _divided(run, box.ranks - 1)
    rank += Int32(rank >= box.rank)
    return rank, (Int64(token * box.ranks + rank) * words + word) * layout.WORD_BYTES


@cute.jit
def collect(box, out, batch, words, replacement, thread, threads: Int32):
    """Moves the words of all peers from this rank's mailbox to the result, as they come.

    Args: as for `publish`, which comes before it.
    """
    total = batch * words * (box.ranks - 1)
    for start in range(thread, total, AT_ONCE * threads):
        indices = [start + i * threads for i in range(AT_ONCE)]
        inside = [index < total for index in indices]
        sources = [_peers_place(box, index, words) for index in indices]
        # The memory of a mailbox that is not open may be gone.
        loaded = [
            ptx.load_system_16_if(inside[i] & box.open, box.own + sources[i][1])
            for i in range(AT_ONCE)
        ]
        for i in cutlass.range_constexpr(AT_ONCE):
            if inside[i]:
                rank, place = sources[i]
                _take(box, out + place, box.own + place, loaded[i], rank, replacement)


@cute.jit
def _take(box, target, source, loaded, rank, replacement):
    """Waits for four words and moves them, or gives NaN."""
    w0, w1, w2, w3 = loaded
    polls = Int32(0)
    waiting = box.open & _is_empty((w0, w1, w2, w3))
    while waiting:
        w0, w1, w2, w3 = ptx.load_system_16(source)
        waiting = _is_empty((w0, w1, w2, w3))
        polls += 1
        if polls % POLLS_A_LOOK == 0:
            if cute.arch.globaltimer() >= box.deadline:
                waiting = Boolean(False)
    if box.open & (not _is_empty((w0, w1, w2, w3))):
        ptx.store_global(target, [w0, w1, w2, w3])
        ptx.store_global(source, [Uint32(layout.EMPTY)] * 4)
    else:
        ptx.store_global(target, [replacement] * 4)
        if box.open:
            _give_up(box, rank)


def _give_up(box, rank):
    """Latches, on the device and for the host, that a rank's words did not come."""
    reason = Uint32(rank) + 1
    ptx.store_system_b32(box.control + layout.STATE, reason)
    ptx.store_system_b32(ptx.load_global(box.control + layout.REPORT, Int64), reason)


@cute.jit
def finish(box, tid, ctas):
    """Ends a CTA's part of the call: the last one of the grid makes it the next call's turn.

    No order is needed between CTAs here: the end of the kernel is what later calls wait for.
    """
    cute.arch.sync_threads()
    if tid == 0:
        before = ptx.count_up(box.control + layout.TICKET, Uint32(ctas - 1))
        if before == Uint32(ctas - 1):
            ptx.store_global(box.control + layout.EPOCH, [box.epoch + 1])
