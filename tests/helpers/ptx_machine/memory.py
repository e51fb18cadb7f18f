"""Global and shared memory whose every access is checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ptx_machine.parse import PtxError
from ptx_machine.races import Races

Bytes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]
Values = npt.NDArray[Any]

SHARED_START = 0x400
"""Shared address of a CTA's dynamic shared memory: the first KiB is the system's."""
CTA_BITS = 24
"""Address of offset `o` of CTA `r` in the cluster's shared window: (r + 1) << 24 | o."""

_START = 1 << 46
_SPACING_BITS = 36


class GlobalMemory:
    """Buffers by name, each at an address of its own with 64 GiB of nothing behind it.

    Reports accesses outside of a buffer and misaligned ones; in one launch also a byte that two
    threads store, that one stores and another loads, and that is loaded by `ld.global.nc` although
    a thread stores it. Strong accesses (`.relaxed.sys`) of several threads may meet; a weak one of
    a byte that another thread stores strongly may not, unless its thread has loaded it strongly.

    Args:
        buffers: what each holds at first.
        flags: names of buffers whose bytes any thread may access at any time.
    """

    def __init__(self, buffers: Mapping[str, Values], flags: Collection[str] = ()) -> None:
        self.names = list(buffers)
        raw = [
            np.ascontiguousarray(buffer).reshape(-1).view(np.uint8) for buffer in buffers.values()
        ]
        self.sizes = np.array([len(buffer) for buffer in raw], np.int64)
        room = -(-self.sizes // 256) * 256
        self.starts = np.cumsum(room) - room
        self.data: Bytes = np.zeros(int(room.sum()) + 256, np.uint8)
        for start, buffer in zip(self.starts, raw, strict=True):
            self.data[start : start + len(buffer)] = buffer
        # By byte: number of the thread, from 1; 0 is none, -1 several.
        self.stored_by = np.zeros(len(self.data), np.int32)
        self.loaded_by = np.zeros(len(self.data), np.int32)
        self.constant = np.zeros(len(self.data), np.bool_)
        # The same of strong accesses: the last thread that loaded, and whether one stored.
        self.polled_by = np.zeros(len(self.data), np.int32)
        self.published = np.zeros(len(self.data), np.bool_)
        self.free = np.zeros(len(self.data), np.bool_)
        for name in flags:
            self.free[self.extent(name)] = True

    def begin(self, names: Iterable[str]) -> None:
        """Starts a launch that these buffers belong to: what earlier ones stored is there."""
        marks = (self.stored_by, self.loaded_by, self.constant, self.polled_by, self.published)
        for name in names:
            for mark in marks:
                mark[self.extent(name)] = 0

    def extent(self, name: str) -> slice:
        """Where a buffer is in `data`."""
        i = self.names.index(name)
        return slice(self.starts[i], self.starts[i] + self.sizes[i])

    def address(self, name: str) -> int:
        """Address of the first byte of a buffer."""
        return _START + (self.names.index(name) << _SPACING_BITS)

    def bytes(self, name: str) -> Bytes:
        """What a buffer holds now, a copy."""
        return self.data[self.extent(name)].copy()

    def write(self, name: str, content: Values) -> None:
        """Replaces what a buffer holds."""
        self.data[self.extent(name)] = np.ascontiguousarray(content).reshape(-1).view(np.uint8)

    def places(self, addresses: Values, width: int, alignment: int | None = None) -> Indices:
        """Index into `data` of each address, of which `width` bytes are to be accessed."""
        which = (addresses - np.uint64(_START)) >> np.uint64(_SPACING_BITS)
        offsets = (addresses & np.uint64((1 << _SPACING_BITS) - 1)).astype(np.int64)
        known = which < len(self.names)
        which = np.where(known, which, 0).astype(np.intp)
        bad = ~known | (offsets + width > self.sizes[which])
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            where = (
                f"{self.names[which[i]]} of {self.sizes[which[i]]} bytes at {offsets[i]}"
                if known[i]
                else f"address {int(addresses[i]):#x}"
            )
            raise PtxError(f"{width} bytes outside of every buffer: {where}")
        if (addresses % np.uint64(alignment or width)).any():
            raise PtxError(f"a global address is not a multiple of {alignment or width}")
        places: Indices = self.starts[which] + offsets
        return places

    def load(self, addresses: Values, dtype: Any, count: int, threads: Indices) -> Values:
        """Returns [address, count] values."""
        width = dtype.itemsize * count
        places = self.places(addresses, width)
        spread = places[:, None] + np.arange(width)
        thread = self.marked(spread, threads)
        if (self.published[spread] & (thread != 0)).any():
            raise PtxError("a global byte is loaded weakly that a thread stores strongly")
        self.note_load(spread, thread)
        return self._items(places, dtype, count)

    def marked(self, places: Indices, threads: Indices) -> Values:
        """The threads, [address], for each of their [address, byte] places; 0 where it is free."""
        marked: Values = np.where(self.free[places], 0, threads[:, None])
        return marked

    def load_strong(self, addresses: Values, dtype: Any, count: int, threads: Indices) -> Values:
        """Returns [address, count] values."""
        width = dtype.itemsize * count
        places = self.places(addresses, width)
        spread = places[:, None] + np.arange(width)
        thread = self.marked(spread, threads)
        self.refuse_others((self.stored_by,), spread, thread, "is loaded")
        self.polled_by[spread] = thread
        return self._items(places, dtype, count)

    def store_strong(self, addresses: Values, values: Values, threads: Indices) -> None:
        """Stores [address, count] values."""
        width = values.itemsize * values.shape[1]
        places = self.places(addresses, width)
        spread = places[:, None] + np.arange(width)
        thread = self.marked(spread, threads)
        self.refuse_others((self.stored_by, self.loaded_by), spread, thread, "is stored")
        self.published[spread] = thread != 0
        self._put(places, values)

    @staticmethod
    def refuse_others(marks: Iterable[Values], places: Indices, thread: Values, verb: str) -> None:
        """Raises where another thread has left a mark."""
        for mark in marks:
            others = mark[places]
            if ((others != 0) & (others != thread) & (thread != 0)).any():
                raise PtxError(f"a global byte {verb} that another thread accesses weakly")

    def note_load(self, places: Indices, thread: Any) -> None:
        """Records loads, by `thread` each, of bytes that may not be another thread's store."""
        stored = self.stored_by[places]
        if ((stored != 0) & (stored != thread)).any():
            raise PtxError("a global byte is loaded that another thread stores in this launch")
        loaded = self.loaded_by[places]
        self.loaded_by[places] = np.where((loaded == 0) | (loaded == thread), thread, -1)
        # Of the threads of this instruction that load a byte only one is recorded.
        self.loaded_by[places] = np.where(self.loaded_by[places] == thread, thread, -1)

    def load_constant(self, addresses: Values, dtype: Any, count: int) -> Values:
        """Returns [address, count] values that nothing may store in this launch."""
        width = dtype.itemsize * count
        places = self.places(addresses, width)
        spread = places[:, None] + np.arange(width)
        if self.stored_by[spread].any():
            raise PtxError("ld.global.nc of a byte that a thread stores in this launch")
        self.constant[spread] = True
        return self._items(places, dtype, count)

    def copied(self, start: int, size: int) -> Bytes:
        """The bytes from a place on, which no thread may store in this launch."""
        if self.stored_by[start : start + size].any():
            raise PtxError("a global byte is copied that a thread stores in this launch")
        self.loaded_by[start : start + size] = -1
        return self.data[start : start + size]

    def store(self, addresses: Values, values: Values, threads: Indices) -> None:
        """Stores [address, count] values."""
        width = values.itemsize * values.shape[1]
        places = self.places(addresses, width)
        spread = places[:, None] + np.arange(width)
        thread = self.marked(spread, threads)
        if (self.published[spread] & (self.polled_by[spread] != thread)).any():
            raise PtxError("a global byte is stored weakly that another thread stores strongly")
        if self.constant[spread].any():
            raise PtxError("a thread stores a byte that ld.global.nc loads in this launch")
        for others in (self.stored_by[spread], self.loaded_by[spread]):
            if ((others != 0) & (others != thread)).any():
                raise PtxError("a global byte is stored that another thread accesses")
        self.stored_by[spread] = thread
        if (self.stored_by[spread] != thread).any():
            raise PtxError("two threads store a global byte")
        self._put(places, values)

    def _items(self, places: Indices, dtype: Any, count: int) -> Values:
        """[place, count] values."""
        items: Values = self.data.view(dtype)[places[:, None] // dtype.itemsize + np.arange(count)]
        return items

    def _put(self, places: Indices, values: Values) -> None:
        """Replaces [place, count] values."""
        at = places[:, None] // values.itemsize + np.arange(values.shape[1])
        self.data.view(values.dtype)[at] = values


UNDEFINED, DEFINED, COPYING, BARRIER = range(4)
"""What a byte of shared memory holds: nothing, data, data on its way, an mbarrier."""
_STATES = ("never written", "data", "still being copied", "an mbarrier")


class SharedMemory:
    """The dynamic shared memory of the CTAs of a cluster, [CTA][byte] in one array."""

    def __init__(self, ctas: int, size: int, races: Races) -> None:
        self.ctas, self.size = ctas, size
        self.room = -(-size // 128) * 128
        self.data: Bytes = np.zeros(ctas * self.room, np.uint8)
        self.state: Bytes = np.zeros(ctas * self.room, np.uint8)
        self.races = races

    def reset(self) -> None:
        self.data.fill(0xFF)
        self.state.fill(UNDEFINED)

    def places(
        self, addresses: Values, own: Indices, width: int, alignment: int | None = None
    ) -> Indices:
        """Index into `data` of each address as CTA `own` sees it."""
        window = (addresses >> np.uint32(CTA_BITS)).astype(np.intp)
        offsets = (addresses & np.uint32((1 << CTA_BITS) - 1)).astype(np.intp) - SHARED_START
        bad = (window > self.ctas) | (offsets < 0) | (offsets + width > self.size)
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            raise PtxError(
                f"{width} bytes at {offsets[i]} (window {window[i]}) are outside of the"
                f" {self.size} bytes of shared memory"
            )
        if (offsets % (alignment or width)).any():
            raise PtxError(f"a shared address is not a multiple of {alignment or width}")
        return np.where(window == 0, own, window - 1) * self.room + offsets

    def load(self, places: Indices, dtype: Any, count: int, warps: Indices, line: int) -> Values:
        """Returns [place, count] values."""
        at = places[:, None] // dtype.itemsize + np.arange(count)
        self.require(places, at, dtype, (DEFINED,))
        self.races.load(self.words(places, dtype.itemsize * count), warps, line)
        items: Values = self.data.view(dtype)[at]
        return items

    def store(self, places: Indices, values: Values, warps: Indices, line: int) -> None:
        """Stores [place, count] values."""
        at = places[:, None] // values.itemsize + np.arange(values.shape[1])
        self.require(places, at, values.dtype, (UNDEFINED, DEFINED))
        self.races.store(self.words(places, values.itemsize * values.shape[1]), warps, line)
        self.data.view(values.dtype)[at] = values
        self.state.view(_unsigned(values.dtype))[at] = _repeated(DEFINED, values.itemsize)

    def begin_copy(self, places: Indices, size: int, warps: Indices, line: int) -> None:
        """Bytes that a copy will write: nobody may touch them until it has."""
        spread = places[:, None] + np.arange(size)
        wrong = self.state[spread] >= COPYING
        if wrong.any():
            i = np.argwhere(wrong)[0]
            self.refuse(int(spread[tuple(i)]))
        self.races.check_store(self.words(places, size), warps, line)
        self.state[spread] = COPYING

    def end_copy(self, place: int, data: Bytes) -> None:
        """The bytes of a copy arrive."""
        self.data[place : place + len(data)] = data
        self.state[place : place + len(data)] = DEFINED

    def require(self, places: Indices, at: Indices, dtype: Any, states: tuple[int, ...]) -> None:
        found = self.state.view(_unsigned(dtype))[at]
        good = np.isin(found, [_repeated(state, dtype.itemsize) for state in states])
        if UNDEFINED in states:  # bytes of an item may differ
            good |= found & _repeated(2, dtype.itemsize) == 0
        if not good.all():
            row = int(np.flatnonzero(~good.all(axis=1))[0])
            first = int(places[row])
            bad = ~np.isin(self.state[first : first + dtype.itemsize * at.shape[1]], states)
            self.refuse(first + int(np.flatnonzero(bad)[0]))

    def refuse(self, place: int) -> None:
        cta, offset = divmod(place, self.room)
        raise PtxError(f"shared byte {offset} of CTA {cta} is {_STATES[self.state[place]]}")

    @staticmethod
    def words(places: Indices, width: int) -> Indices:
        """[place, word] numbers of the 4-byte words of accesses."""
        words: Indices = places[:, None] // 4 + np.arange(max(1, width // 4))
        return words


def _unsigned(dtype: Any) -> Any:
    return np.dtype(f"u{dtype.itemsize}")


def _repeated(state: int, width: int) -> Any:
    return _unsigned(np.dtype(f"u{width}")).type(int.from_bytes(bytes([state]) * width, "little"))
