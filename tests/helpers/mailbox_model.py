"""An exhaustive model of the mailbox protocol, which `jax_mla.kernels.mailbox` states and proves.

All interleavings of a few short calls on two or three ranks are tried. Memory is weaker than that
of a GPU: a store waits in a buffer of its CTA and is performed at any later time, in any order but
that of one CTA at one address. Nothing waits for stores but the end of a kernel, and that only for
those to memory of its own rank: stores to a peer may outlive their kernel. Loads and the count of
the ticket happen at once. A CTA is one thread, which takes its words in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

EMPTY, JUNK, NAN, FIRST_WORD = 0, 1, 2, 3
"""What a cell holds: EMPTY, memory as it was found, what replaces an EMPTY; words from here on."""
EPOCH, TICKET, STATE, CONTROL = 0, 1, 2, 3
"""Cells at the start of a rank's memory, all 0 before the first call, and how many they are."""
POLL, LOAD_AGAIN, OUTPUT, REARM, REARM_NEXT = range(5)
"""What a thread does with a word: the last re-arms the word after it, which is another thread's."""
WRONG_DATA, DEADLOCK, DIRTY = "wrong data", "deadlock", "dirty"


class Call(NamedTuple):
    """A call gathers so many words of each rank; `number` tells them from those of other calls."""

    number: int
    words: int
    queries_are_empty: bool = False


CLEAR, MEET = Call(-1, 0), Call(-2, 0)
"""What the host does between calls: empties its rank's memory; waits until no call of its own runs
and all ranks have come as far."""
Program = tuple[Call, ...]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The protocol; the defaults are right.

    Attributes:
        halves: of a mailbox.
        ctas: of a call.
        ctas_at_once: that run together (A4: all).
        for_each_word: what a thread does to collect a word, in order.
        replaces_empty: whether `publish` replaces queries that are EMPTY (A3).
        parts: stores that a word takes.
        parts_polled: parts that must have come for a word to be taken (A2: all).
        calls_wait: whether a call starts only once the one before it has ended (A1).
        end_performs_stores: whether a kernel ends only with its stores to its own memory (A1).
        meetings_drain: whether no store is under way from a rank that has come to meet.
        graph_calls: calls of a replayed graph whose arguments hold the epoch; None if memory does.
        patient_from: step from which calls wait for ever; before it they may give up any time.
    """

    halves: int = 2
    ctas: int = 2
    ctas_at_once: int = 2
    for_each_word: tuple[int, ...] = (POLL, OUTPUT, REARM)
    replaces_empty: bool = True
    parts: int = 1
    parts_polled: int = 2
    calls_wait: bool = True
    end_performs_stores: bool = True
    meetings_drain: bool = True
    graph_calls: int | None = None
    patient_from: int = 0


class Cta(NamedTuple):
    """Where a CTA is: `left` are its words and what is next for each; None before it begins."""

    step: int
    epoch: int = 0
    left: tuple[tuple[int, int], ...] | None = None


Stores = tuple[tuple[int, int], ...]
"""Addresses and values: sorted by address, as issued at one address."""
State = tuple[tuple[int, ...], tuple[Stores, ...], tuple[Cta, ...]]
"""Memory of all ranks, stores under way from each CTA, CTAs; of one rank after the other."""


@dataclass
class Found:
    """What all runs together have shown.

    Attributes:
        states: number of states.
        ends: number of states in which all programs have ended.
        failures: kinds of failures.
        results: (number of a call, whether NaN stood for a word that did not come).
    """

    states: int = 0
    ends: int = 0
    failures: set[str] = field(default_factory=set)
    results: set[tuple[int, bool]] = field(default_factory=set)


def explore(protocol: Protocol, programs: tuple[Program, ...]) -> Found:
    """Visits every state that ranks with these programs can reach."""
    model = _Model(protocol, programs)
    todo, seen = [model.start], {model.start}
    while todo:
        state = todo.pop()
        at_an_end = True
        for following in model.following(state):
            at_an_end = False
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
        if at_an_end:
            model.judge_end(state)
    model.found.states = len(seen)
    return model.found


class _Model:
    """What does not change in a run, and which actions are possible in a state."""

    def __init__(self, protocol: Protocol, programs: tuple[Program, ...]) -> None:
        self.protocol, self.programs, self.ranks = protocol, programs, len(programs)
        self.most_words = max(call.words for program in programs for call in program)
        self.half_cells = self.most_words * self.ranks * protocol.parts
        self.cells = CONTROL + protocol.halves * self.half_cells
        self.ordered = protocol.calls_wait and protocol.end_performs_stores
        ctas = self.ranks * protocol.ctas
        self.start: State = ((JUNK,) * (self.cells * self.ranks), ((),) * ctas, (Cta(0),) * ctas)
        self.found = Found()

    def following(self, state: State) -> Iterator[State | None]:
        """The states one action later; None where a result was wrong.

        A private action is the only one tried: others may come before it, but they neither see nor
        prevent nor change it, so that the same states follow.
        """
        memory, stores, ctas = state
        beginning = [who for who in range(len(ctas)) if self.may_begin(state, who)]
        private = [who for who in beginning if self.begins_in_private(ctas[who], who)]
        for who in private[:1] or beginning:
            yield _Turn(self, state, who).begin()
        if private:
            return
        for who, cta in enumerate(ctas):
            for at, (address, _) in enumerate(stores[who]):
                if at == 0 or stores[who][at - 1][0] != address:
                    yield _Turn(self, state, who).perform(at)
            for index, stage in cta.left or ():
                loaded = [memory[cell] for cell in self.polled(who, cta.epoch, index)]
                polls = self.protocol.for_each_word[stage] == POLL
                if not polls or EMPTY not in loaded[: self.protocol.parts_polled]:
                    yield _Turn(self, state, who).collect(index, stage, loaded)
                elif cta.step < self.protocol.patient_from:
                    yield _Turn(self, state, who).give_up(index, stage)

    def may_begin(self, state: State, who: int) -> bool:
        """Whether a CTA, for all of its rank if it is the host's turn, can begin its next step."""
        _, stores, ctas = state
        rank, place = divmod(who, self.protocol.ctas)
        step, group = ctas[who].step, self.group(rank)
        if ctas[who].left is not None or step == len(self.programs[rank]):
            return False
        none_runs = all(cta.step == step and cta.left is None for cta in ctas[group])
        call = self.programs[rank][step]
        if call.number < 0:
            return none_runs and place == 0 and (call != MEET or self.all_have_come(state, step))
        not_done = sum(cta.step == step for cta in ctas[group][:place])
        if not_done >= self.protocol.ctas_at_once:
            return False
        if not self.protocol.calls_wait:
            return True
        if not none_runs:  # the call has begun, unless the one before it goes on
            return all(cta.step >= step for cta in ctas[group])
        to_itself = (address // self.cells == rank for s in stores[group] for address, _ in s)
        return not (self.protocol.end_performs_stores and any(to_itself))

    def all_have_come(self, state: State, step: int) -> bool:
        """Whether all ranks are where they meet, or have been there."""
        return all(
            cta.step > step
            or (cta.step == step and not (self.protocol.meetings_drain and under_way))
            for under_way, cta in zip(*state[1:], strict=True)
        )

    def begins_in_private(self, cta: Cta, who: int) -> bool:
        """Whether no action can see, prevent or change how a CTA begins its next step.

        Who meets others had come already. A call reads the epoch and the state, and puts stores in
        its own buffer. If it waits for the one before it, the epoch stays as it is; and so does the
        state, unless another CTA of the call gives up.
        """
        call = self.programs[who // self.protocol.ctas][cta.step]
        none_gives_up = self.protocol.ctas == 1 or cta.step >= self.protocol.patient_from
        return call == MEET or (call.number >= 0 and self.ordered and none_gives_up)

    def judge_end(self, state: State) -> None:
        """Judges a state that nothing follows."""
        memory, stores, ctas = state
        ends = [len(program) for program in self.programs for _ in range(self.protocol.ctas)]
        if any(stores) or [cta.step for cta in ctas] != ends:
            self.found.failures.add(DEADLOCK)
            return
        self.found.ends += 1
        for start in range(0, len(memory), self.cells):
            if memory[start + STATE] == 0 and any(memory[start + CONTROL : start + self.cells]):
                self.found.failures.add(DIRTY)

    def group(self, rank: int) -> slice:
        """The CTAs of a rank."""
        return slice(rank * self.protocol.ctas, (rank + 1) * self.protocol.ctas)

    def cells_of(self, owner: int, epoch: int, token: int, sender: int) -> range:
        """Where a word lies in the mailbox of a rank."""
        word = (token * self.ranks + sender) * self.protocol.parts
        half = epoch % self.protocol.halves * self.half_cells
        start = owner * self.cells + CONTROL + half + word
        return range(start, start + self.protocol.parts)

    def sender(self, rank: int, index: int) -> tuple[int, int]:
        """The token and the rank of a word among those of all peers of a rank."""
        token, peer = divmod(index, self.ranks - 1)
        return token, peer + (peer >= rank)

    def polled(self, who: int, epoch: int, index: int) -> range:
        """Where a CTA polls a word."""
        rank = who // self.protocol.ctas
        return self.cells_of(rank, epoch, *self.sender(rank, index))

    def word(self, call: Call, token: int, sender: int) -> int:
        """What a rank's query is once an EMPTY is replaced."""
        number = (call.number * self.most_words + token) * self.ranks + sender
        return NAN if call.queries_are_empty else FIRST_WORD + number


class _Turn:
    """An action of a CTA, on a copy of a state. Each gives the state after it."""

    def __init__(self, model: _Model, state: State, who: int) -> None:
        self.model, self.protocol, self.who = model, model.protocol, who
        memory, stores, ctas = state
        self.memory, self.stores, self.ctas = list(memory), list(stores), list(ctas)
        self.rank, self.place = divmod(who, self.protocol.ctas)
        self.control = self.rank * model.cells
        self.step, self.epoch, self.left = self.ctas[who]
        self.wrong = False

    def begin(self) -> State | None:
        """Looks up and publishes; or does all of a step of the host."""
        if self.call.number < 0:
            return self.host_step()
        mine = range(self.place, self.call.words * (self.model.ranks - 1), self.protocol.ctas)
        frozen = self.protocol.graph_calls
        self.epoch = self.call.number % frozen if frozen else self.memory[self.control + EPOCH]
        self.left = ()
        if self.memory[self.control + STATE] == 0:
            self.publish()
            for index in mine:
                self.carry_on(index, 0, [])
        elif mine:
            self.model.found.results.add((self.call.number, True))
        return self.state()

    def host_step(self) -> State:
        if self.call == CLEAR:
            own = slice(self.control, self.control + self.model.cells)
            self.memory[own] = [EMPTY] * self.model.cells
        self.ctas[self.model.group(self.rank)] = [Cta(self.step + 1)] * self.protocol.ctas
        return tuple(self.memory), tuple(self.stores), tuple(self.ctas)

    def publish(self) -> None:
        for token in range(self.place, self.call.words, self.protocol.ctas):
            word = self.model.word(self.call, token, self.rank)
            if self.call.queries_are_empty and not self.protocol.replaces_empty:
                word = EMPTY
            for peer in range(self.model.ranks):
                if peer != self.rank:
                    for cell in self.model.cells_of(peer, self.epoch, token, self.rank):
                        self.store(cell, word)

    def collect(self, index: int, stage: int, loaded: list[int]) -> State | None:
        """Goes on with a word that was loaded."""
        self.drop(index, stage)
        self.carry_on(index, stage + 1, loaded)
        return self.state()

    def give_up(self, index: int, stage: int) -> State | None:
        """Gives NaN for a word that has not come, and latches that."""
        self.drop(index, stage)
        self.store(self.control + STATE, 1)
        self.model.found.results.add((self.call.number, True))
        return self.state()

    def perform(self, at: int) -> State | None:
        """Performs one of the stores under way."""
        address, value = self.stores[self.who][at]
        self.stores[self.who] = self.stores[self.who][:at] + self.stores[self.who][at + 1 :]
        self.memory[address] = value
        return self.state()

    def carry_on(self, index: int, stage: int, loaded: list[int]) -> None:
        """Does what comes for a word until it must be loaded; only the thread itself sees that."""
        for doing in self.protocol.for_each_word[stage:]:
            if doing in (POLL, LOAD_AGAIN):
                self.left = tuple(sorted((*(self.left or ()), (index, stage))))
                return
            if doing == OUTPUT:
                self.output(index, loaded)
            else:
                other = (index + (doing == REARM_NEXT)) % (self.call.words * (self.model.ranks - 1))
                for cell in self.model.polled(self.who, self.epoch, other):
                    self.store(cell, EMPTY)
            stage += 1

    def output(self, index: int, loaded: list[int]) -> None:
        right = self.model.word(self.call, *self.model.sender(self.rank, index))
        self.model.found.results.add((self.call.number, False))
        if any(part != right for part in loaded):
            self.model.found.failures.add(WRONG_DATA)
            self.wrong = True

    def drop(self, index: int, stage: int) -> None:
        self.left = tuple(word for word in self.left or () if word != (index, stage))

    def store(self, address: int, value: int) -> None:
        """Issues a store.

        One to the control block is performed at once if calls wait for it: the call itself reads
        only the state, when a CTA begins, which can then do so earlier just as well. A reset that
        does not wait for stores could meet it late: then another kind of failure may go unseen.
        """
        if self.model.ordered and address - self.control in range(CONTROL):
            self.memory[address] = value
        else:
            under_way = (*self.stores[self.who], (address, value))
            self.stores[self.who] = tuple(sorted(under_way, key=lambda store: store[0]))

    @property
    def call(self) -> Call:
        return self.model.programs[self.rank][self.step]

    def state(self) -> State | None:
        """A CTA with nothing left counts the ticket up, and the last one the epoch."""
        if self.left == ():
            before = self.memory[self.control + TICKET]
            self.memory[self.control + TICKET] = (before + 1) % self.protocol.ctas
            if before == self.protocol.ctas - 1:
                self.store(self.control + EPOCH, self.epoch + 1)
            self.step, self.epoch, self.left = self.step + 1, 0, None
        self.ctas[self.who] = Cta(self.step, self.epoch, self.left)
        return None if self.wrong else (tuple(self.memory), tuple(self.stores), tuple(self.ctas))
