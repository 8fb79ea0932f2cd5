"""Where the rows of a table lie: a hash table of ids in NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.arrays.hashes import hashes

Ids = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]

_FIRST_SLOTS = 1 << 10
#: Rows of a part at most: places are 32-bit numbers.
ROWS_MAX = (1 << 31) - 1


def shards_of(ids: Any, shards: int) -> npt.NDArray[np.int64]:
    """Return the shard that holds each row. The bits used here are not those of ``RowIndex``."""
    found: npt.NDArray[np.uint64] = (hashes(ids) >> np.uint64(32)) % np.uint64(shards)
    return found.astype(np.int64)


class RowIndex:
    """Gives each id a place, 0, 1, 2 and so on. ``count``: how many have one.

    Memory: 8 bytes for each id and 4 for each slot; at most 7 of 10 slots are taken.
    """

    def __init__(self, expected: int = 0) -> None:
        self.count = 0
        self._ids = np.empty(max(16, expected), np.int64)
        self._slots = np.full(_FIRST_SLOTS, -1, np.int32)
        if expected:
            self._grow(expected)

    @property
    def ids(self) -> Ids:
        """The ids by place. Its elements never change."""
        return self._ids[: self.count]

    def find(self, ids: Ids) -> Places:
        """Return the place of each id, and -1 for unknown ones."""
        places = np.full(len(ids), -1, np.int64)
        left = np.arange(len(ids))
        mask = len(self._slots) - 1
        slots = self._first(ids)
        while left.size:
            found = self._slots[slots]
            taken = found >= 0
            left, slots, found = left[taken], slots[taken], found[taken]
            same = self._ids[found] == ids[left]
            places[left[same]] = found[same]
            other = ~same
            left, slots = left[other], (slots[other] + 1) & mask
        return places

    def add(self, ids: Ids) -> Places:
        """Give ids a place that have none; they are different. Return the places."""
        total = self.count + len(ids)
        if total > len(self._ids) or total * 10 > len(self._slots) * 7:
            self._grow(total)
        places = np.arange(self.count, total)
        self._ids[self.count : total] = ids
        self.count = total
        self._insert(ids, places)
        return places

    def _first(self, ids: Ids) -> Places:
        slots: npt.NDArray[np.uint64] = hashes(ids) & np.uint64(len(self._slots) - 1)
        return slots.astype(np.int64)

    def _insert(self, ids: Ids, places: Places) -> None:
        mask = len(self._slots) - 1
        slots = self._first(ids)
        while places.size:
            free = self._slots[slots] < 0
            self._slots[slots[free]] = places[free]
            # Of several ids at one slot the last has it now; the others go on to the next slot.
            open_ones = self._slots[slots] != places
            places, slots = places[open_ones], (slots[open_ones] + 1) & mask

    def _grow(self, total: int) -> None:
        if total > ROWS_MAX:
            raise ValueError(f"{total} rows in one part: expected at most {ROWS_MAX}")
        if total > len(self._ids):
            more = np.empty(max(total, len(self._ids) * 3 // 2), np.int64)
            more[: self.count] = self.ids
            self._ids = more
        slots = len(self._slots)
        while total * 10 > slots * 7:
            slots *= 2
        if slots > len(self._slots):
            self._slots = np.full(slots, -1, np.int32)
            self._insert(self.ids, np.arange(self.count))


class HotIds:
    """Counts the ids that occur most, in bounded memory.

    Source: the summary of Misra and Gries (1982), merged batch by batch. A count is too small by at
    most the number of ids seen, divided by ``kept``.
    """

    def __init__(self, kept: int = 1024) -> None:
        self.seen = 0
        self._kept = kept
        self._ids = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)
        self._new: list[Ids] = []
        self._waiting = 0

    def note(self, ids: Ids) -> None:
        """Count ids, which may repeat."""
        self.seen += len(ids)
        self._new.append(np.array(ids, np.int64))
        self._waiting += len(ids)
        if self._waiting >= 64 * self._kept:
            self._merge()

    def _merge(self) -> None:
        ids, total = np.unique(np.concatenate([*self._new, self._ids[:0]]), return_counts=True)
        self._new, self._waiting = [], 0
        if not len(ids):
            return
        # Few ids are kept, so they are searched among the new ones, which need no second sort.
        places = np.minimum(np.searchsorted(ids, self._ids), len(ids) - 1)
        again = ids[places] == self._ids
        total[places[again]] += self._counts[again]
        ids = np.concatenate([ids, self._ids[~again]])
        total = np.concatenate([total, self._counts[~again]])
        if len(total) > self._kept:
            total = total - np.partition(total, -self._kept - 1)[-self._kept - 1]
        self._ids, self._counts = ids[total > 0], total[total > 0]

    def top(self, count: int) -> list[tuple[int, int]]:
        """Return the ``count`` ids that occurred most, with their counts, the most frequent one
        first."""
        if self._new:
            self._merge()
        order = np.lexsort((self._ids, -self._counts))[:count]
        return [(int(self._ids[one]), int(self._counts[one])) for one in order]
