"""The index of a table's rows: a hash table in NumPy arrays, which native code searches."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.arrays.hashes import hashes
from pycoll.ps.values.buffer_pool import BufferPool

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_FIRST_SLOTS = 1 << 10
#: The most rows of a part, since places are 32-bit numbers.
ROWS_MAX = (1 << 31) - 1


#: The buffers for results of ``spread_ids``.
_SPREADS = BufferPool(8 << 20)


def shards_of(ids: Any, shards: int) -> npt.NDArray[np.int64]:
    """Return the shard that holds each row. It uses other bits of the hash than ``RowIndex``."""
    found: npt.NDArray[np.uint64] = (hashes(ids) >> np.uint64(32)) % np.uint64(shards)
    return found.astype(np.int64)


class SpreadIds(NamedTuple):
    """Ids without repeats, by shard, and within a shard in the order in which they occur first.

    ``different``: these ids. ``places``: of each given id its index there. ``firsts``: of each
    different id the index at which it was given first. ``bounds``: where the ids of each shard
    begin, and the end of all.
    """

    different: Ids
    places: Places
    firsts: Places
    bounds: list[int]


def spread_ids(ids: Ids, shards: int) -> SpreadIds:
    """Return the different ids, by the shards of ``shards_of``."""
    memory = _SPREADS.take(3 * ids.nbytes).view(np.int64).reshape(3, -1)
    different, places, firsts = memory
    bounds = np.empty(shards + 1, np.int64)
    slots = _SPREADS.take(4 << (2 * len(ids)).bit_length()).view(np.int32)
    results = (_core.view(one) for one in (different, places, firsts, bounds, slots))
    count = _core.spread_ids(_core.view(ids), shards, *results)
    return SpreadIds(different[:count], places, firsts[:count], bounds.tolist())


class RowIndex:
    """Gives each id a place, 0, 1, 2 and so on. ``count``: how many have one.

    Memory: 8 bytes for each id and each slot; at most 7 of 8 slots are taken.
    """

    def __init__(self, expected: int = 0) -> None:
        self.count = 0
        self._ids = np.empty(max(16, expected), np.int64)
        self._slots = np.full(_FIRST_SLOTS, -1, np.int64)
        if expected:
            self._grow(expected)

    @property
    def ids(self) -> Ids:
        """The ids by place. Its elements never change."""
        return self._ids[: self.count]

    def find(self, ids: Ids) -> Places:
        """Return the place of each id, and -1 for unknown ones."""
        places = np.empty(len(ids), np.int64)
        views = _core.view(self._slots), _core.view(self._ids)
        _core.find_rows(*views, self.count, _core.view(ids), _core.view(places))
        return places

    def add(self, ids: Ids) -> Places:
        """Return the place of each id; unknown ones get the next places, in their order."""
        places = self.find(ids)
        unknown = int(np.count_nonzero(places < 0))
        if unknown:
            total = self.count + unknown
            if total > len(self._ids) or total * 8 > len(self._slots) * 7:
                self._grow(total)
            views = _core.view(self._slots), _core.view(self._ids)
            self.count = _core.add_ids(*views, self.count, _core.view(ids), _core.view(places))
        return places

    def _grow(self, total: int) -> None:
        if total > ROWS_MAX:
            raise ValueError(f"{total} rows in one part: expected at most {ROWS_MAX}")
        if total > len(self._ids):
            more = np.empty(max(total, len(self._ids) * 3 // 2), np.int64)
            more[: self.count] = self.ids
            self._ids = more
        slots = len(self._slots)
        while total * 8 > slots * 7:
            slots *= 2
        if slots > len(self._slots):
            self._slots = np.full(slots, -1, np.int64)
            _core.fill_slots(_core.view(self._slots), _core.view(self._ids), self.count)


class HotIds:
    """Counts the ids that occur most, in bounded memory. Threads: any.

    Source: the summary of Misra and Gries (1982), in batches. A count is too small by at most the
    number of ids seen, divided by ``kept``.
    """

    def __init__(self, kept: int = 1024) -> None:
        self.seen = 0
        self._kept = kept
        self._lock = threading.Lock()
        #: A hash table; a count of 0 is a free entry.
        size = 1 << (4 * kept - 1).bit_length()
        self._ids, self._counts = np.zeros(size, np.int64), np.zeros(size, np.int64)

    def note(self, ids: Ids) -> None:
        """Count ids, which may repeat."""
        with self._lock:
            self.seen += len(ids)
            views = _core.view(self._ids), _core.view(self._counts)
            _core.count_ids(*views, self._kept, _core.view(ids))

    def top(self, count: int) -> list[tuple[int, int]]:
        """Return the ``count`` ids that occurred most, with their counts, the most frequent one
        first."""
        with self._lock:
            used = np.flatnonzero(self._counts)
            ids, counts = self._ids[used], self._counts[used]
        order = np.lexsort((ids, -counts))[:count]
        return [(int(ids[one]), int(counts[one])) for one in order]
