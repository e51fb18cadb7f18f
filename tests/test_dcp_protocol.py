"""The mailbox protocol in every order that a few calls can have, and what it needs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pytest
from mailbox_model import (
    CLEAR,
    DEADLOCK,
    DIRTY,
    LOAD_AGAIN,
    MEET,
    OUTPUT,
    POLL,
    REARM,
    REARM_NEXT,
    WRONG_DATA,
    Call,
    Found,
    Program,
    Protocol,
    explore,
)

MAKE = (CLEAR, MEET)
"""All words are EMPTY on all ranks before the first call of any."""


def calls(*sizes: int, first: int = 0) -> Program:
    return tuple(Call(first + i, words) for i, words in enumerate(sizes))


one_cta = functools.partial(Protocol, ctas=1, ctas_at_once=1)


@pytest.mark.parametrize(
    ("protocol", "ranks", "sizes", "least"),
    [
        pytest.param(one_cta(), 2, (1, 1, 1, 1), 100, id="two ranks, four calls"),
        pytest.param(one_cta(), 2, (2, 1, 2, 1), 700, id="sizes that change"),
        pytest.param(Protocol(), 2, (2, 1, 2), 600, id="two CTAs"),
        pytest.param(one_cta(), 3, (1, 1, 1), 20_000, id="three ranks"),
        pytest.param(one_cta(parts=2), 2, (1, 1), 70, id="words that are stored in two parts"),
    ],
)
def test_every_word_is_right_in_every_order(
    protocol: Protocol, ranks: int, sizes: Sequence[int], least: int
) -> None:
    found = explore(protocol, ((*MAKE, *calls(*sizes)),) * ranks)
    assert not found.failures
    assert found.ends == 1  # whatever the order was
    assert found.states >= least
    assert found.results == {(call, False) for call in range(len(sizes))}


EMPTY_QUERIES = (*MAKE, Call(0, 1, queries_are_empty=True))


def test_queries_that_look_empty_arrive() -> None:
    found = explore(one_cta(), (EMPTY_QUERIES,) * 2)
    assert not found.failures
    assert found.results == {(0, False)}


THREE = ((*MAKE, *calls(1, 1, 1)),) * 2
FIRST, SECOND = calls(1, 1)


@pytest.mark.parametrize(
    ("protocol", "programs", "failure"),
    [
        pytest.param(
            Protocol(calls_wait=False), ((*MAKE, *calls(1, 1)),) * 2, WRONG_DATA,
            id="A1: a call starts beside the one before it",
        ),
        pytest.param(
            one_cta(end_performs_stores=False), THREE, WRONG_DATA,
            id="A1: a kernel ends before its stores",
        ),
        pytest.param(
            one_cta(), ((*MAKE, FIRST, SECOND), (*MAKE, SECOND, FIRST)), WRONG_DATA,
            id="A1: a rank has another order of calls",
        ),
        pytest.param(
            one_cta(parts=2, parts_polled=1), THREE, WRONG_DATA, id="A2: half a word is taken"
        ),
        pytest.param(
            one_cta(replaces_empty=False), (EMPTY_QUERIES,) * 2, DEADLOCK,
            id="A3: an EMPTY is published",
        ),
        pytest.param(
            Protocol(ctas_at_once=1), ((*MAKE, *calls(2)),) * 3, DEADLOCK,
            id="A4: a CTA waits for another to end",
        ),
        pytest.param(
            one_cta(), ((CLEAR, *calls(1, 1)),) * 2, DEADLOCK,
            id="A5: a rank starts before all are ready",
        ),
        pytest.param(
            one_cta(), ((*MAKE, *calls(2, 1)), (*MAKE, *calls(1, 2))), DEADLOCK,
            id="A6: ranks differ in sizes",
        ),
        pytest.param(one_cta(halves=1), THREE, WRONG_DATA, id="one half"),
        pytest.param(one_cta(graph_calls=1), THREE, WRONG_DATA, id="an epoch frozen in a graph"),
        pytest.param(
            one_cta(graph_calls=3), ((*MAKE, *calls(1, 1, 1, 1, 1, 1)),) * 2, WRONG_DATA,
            id="a graph of an odd number of calls",
        ),
        pytest.param(
            one_cta(for_each_word=(POLL, OUTPUT)), THREE, DIRTY, id="words stay when taken"
        ),
        pytest.param(
            one_cta(for_each_word=(POLL, REARM, LOAD_AGAIN, OUTPUT)), THREE, WRONG_DATA,
            id="a word is emptied before it is taken",
        ),
        pytest.param(
            one_cta(for_each_word=(POLL, OUTPUT, REARM_NEXT)),
            ((*MAKE, *calls(2, 2, 2)),) * 2, WRONG_DATA,
            id="a thread empties another's word",
        ),
    ],
)  # fmt: skip
def test_what_the_proof_assumes_is_needed(
    protocol: Protocol, programs: tuple[Program, ...], failure: str
) -> None:
    assert failure in explore(protocol, programs).failures


AGAIN = Call(9, 1)


def resetting(protocol: Protocol, ranks: int, sizes: Sequence[int], reset: Program) -> Found:
    """Calls that may give up at any time, a reset, and a call that waits."""
    before = (*MAKE, *calls(*sizes))
    protocol = dataclasses.replace(protocol, patient_from=len(before))
    return explore(protocol, ((*before, *reset, AGAIN),) * ranks)


@pytest.mark.parametrize(
    ("protocol", "ranks", "sizes"),
    [
        pytest.param(one_cta(), 2, (2, 1), id="two ranks"),
        pytest.param(Protocol(), 2, (2, 1), id="two CTAs"),
        pytest.param(one_cta(), 3, (1,), id="three ranks"),
    ],
)
def test_a_call_that_gives_up_gives_nan_and_a_reset_opens_the_mailbox(
    protocol: Protocol, ranks: int, sizes: Sequence[int]
) -> None:
    found = resetting(protocol, ranks, sizes, (MEET, CLEAR, MEET))
    assert not found.failures
    # Words come in time or do not, but for those after the reset.
    both = {(call, late) for call in range(len(sizes)) for late in (False, True)}
    assert found.results == {*both, (AGAIN.number, False)}


@pytest.mark.parametrize(
    ("protocol", "reset", "failure"),
    [
        pytest.param(
            one_cta(meetings_drain=False), (MEET, CLEAR, MEET), WRONG_DATA,
            id="A7: stores are under way",
        ),
        pytest.param(one_cta(), (CLEAR, MEET), WRONG_DATA, id="a peer still runs calls"),
        pytest.param(one_cta(), (MEET, CLEAR), DEADLOCK, id="a peer has not emptied its mailbox"),
    ],
)  # fmt: skip
def test_a_reset_needs_what_it_waits_for(protocol: Protocol, reset: Program, failure: str) -> None:
    assert failure in resetting(protocol, 2, (1, 1), reset).failures
