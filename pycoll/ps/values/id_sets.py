"""A set-associative table of ids in bounded memory: the hash of an id names a set of four slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pycoll.arrays.hashes import hashes
from pycoll.ps.values.row_index import Ids, Places

#: The slots of a set.
WAYS = 4


class IdSets:
    """Slots for ids. An id lies in a slot of its set, or in none. Threads: one at a time.

    ``size``: the number of slots, at least 1; several sets are rounded down to a power of two.
    ``ids``: by slot its id, or -1. ``stamps``: by slot a time, in a unit of the caller.
    ``scores``: by slot how much the caller wants to keep the id.

    Memory: 17 bytes a slot.
    """

    def __init__(self, size: int) -> None:
        self._sets = 1 << max(0, (size // WAYS).bit_length() - 1)
        self._ways = min(size, WAYS)
        slots = self._sets * self._ways
        self.ids = np.full(slots, -1, np.int64)
        self.stamps = np.zeros(slots, np.int64)
        self.scores = np.zeros(slots, np.int8)
        #: An upper bound of the slots in use with recent stamps, since the last exact count.
        self._taken = 0

    def __len__(self) -> int:
        return len(self.ids)

    def slots(self, ids: Ids) -> Places:
        """Return the slots of the set of each id, a row for each."""
        found: npt.NDArray[np.uint64] = hashes(ids) & np.uint64(self._sets - 1)
        return found.astype(np.int64)[:, None] * self._ways + np.arange(self._ways)

    def find(self, ids: Ids) -> Places:
        """Return the slot of each id, and -1 for ids without a slot."""
        slots = self.slots(ids)
        same = self.ids[slots] == ids[:, None]
        selected = slots[np.arange(len(ids)), same.argmax(axis=1)]
        return np.where(same.any(axis=1), selected, -1)

    def one_per_set(self, slots: Places) -> npt.NDArray[np.bool_]:
        """Select the last id of each set; return a mask of the selected ids.

        ``slots``: the result of ``slots`` for the ids.
        """
        owners = np.empty(len(self.ids), np.int64)
        owners[slots[:, 0]] = np.arange(len(slots))
        selected: npt.NDArray[np.bool_] = owners[slots[:, 0]] == np.arange(len(slots))
        return selected

    def needs_growth(self, more: int, oldest: int) -> bool:
        """Return whether new and recent ids need over half of the slots.

        ``more``: the number of new ids. ``oldest``: the lowest stamp of a recent id.
        """
        self._taken += more
        if 2 * self._taken > len(self.ids):
            live = np.count_nonzero((self.ids >= 0) & (self.stamps >= oldest))
            self._taken = int(live) + more
        return 2 * self._taken > len(self.ids)

    def double(self) -> tuple[Places, Places]:
        """Double the number of sets; return the old slots of all ids, and their new ones.

        Each id keeps its position within its set, so no two ids collide.
        """
        old = np.flatnonzero(self.ids >= 0)
        ids, stamps, scores = self.ids[old], self.stamps[old], self.scores[old]
        self._sets *= 2
        new = self.slots(ids)[np.arange(len(old)), old % self._ways]
        size = 2 * len(self.ids)
        self.ids, self.stamps = np.full(size, -1, np.int64), np.zeros(size, np.int64)
        self.scores = np.zeros(size, np.int8)
        self.ids[new], self.stamps[new], self.scores[new] = ids, stamps, scores
        return old, new
