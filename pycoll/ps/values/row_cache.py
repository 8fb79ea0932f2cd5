"""A worker's cache of pulled rows, which answers later pulls without a message.

A use protects a row from some other ids that need its slot, so the most used rows stay. With
``HOT`` the cache keeps only rows that ``RowRepeats`` selects, and takes as many slots as they need.

The cache answers with a row while the consistency allows it. With "bsp", Backup and SSP(s), the
answer of a server carries the version of its rows, which contain all pushes of that many rounds. A
worker at clock c may see a row while its version is at least c - s. With "asp" the cache answers
with a row until this worker ends its round, in at most ``PULLS_MAX`` pulls of the table.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError
from pycoll.ps.consistency import Consistency
from pycoll.ps.messages import REPEATED, STEPPED
from pycoll.ps.values.id_sets import WAYS, IdSets
from pycoll.ps.values.row_index import Ids, Places
from pycoll.ps.values.row_repeats import RowRepeats
from pycoll.ps.values.row_terms import TableTerms
from pycoll.types import numpy_dtype

Array = npt.NDArray[Any]

#: The most rows of a cache.
ROWS_MAX = 1 << 30
#: With "asp": after so many pulls of the table the worker pulls a row again.
PULLS_MAX = 16
#: The value of ``cache_rows`` that keeps the rows which ``RowRepeats`` selects.
HOT = "hot"
#: The first number of slots for hot rows, the most slots, and the most bytes of rows.
_HOT_FIRST, _HOT_MAX, _HOT_BYTES_MAX = 64, 1 << 18, 64 << 20
#: The number of other ids from which a use protects a row.
_USES_MAX = 7


def check_cache(rows: Any) -> None:
    """Raise InvalidArgumentError unless ``rows`` is a number of rows that a cache may keep, or
    ``HOT``."""
    is_whole = isinstance(rows, int) and not isinstance(rows, bool)
    is_hot = isinstance(rows, str) and rows == HOT
    if not is_hot and (not is_whole or not 0 <= rows <= ROWS_MAX):
        raise InvalidArgumentError(
            f'cache_rows is {rows!r}: expected a whole number from 0 to {ROWS_MAX}, or "{HOT}"'
        )


class Lookup(NamedTuple):
    """The result of a lookup. ``hits``: a mask of the ids whose rows the cache had. ``stamp`` and
    ``pushes``: the time of the lookup, for ``insert``."""

    hits: npt.NDArray[np.bool_]
    stamp: int
    pushes: int


class RowCache:
    """The rows of one table that a worker keeps. Threads: any.

    ``rows``: how many at most, at least 1; several sets are rounded down to a power of two of them.
    ``HOT`` for those that repeat. ``hits`` and ``misses`` count the rows of lookups.
    """

    def __init__(self, terms: TableTerms, rows: int | str, consistency: Consistency) -> None:
        self.hits = 0
        self.misses = 0
        self._folds, self._staleness = consistency.folds, consistency.staleness
        self._lock = threading.Lock()
        self._repeats = None if isinstance(rows, int) else RowRepeats()
        if isinstance(rows, int):
            first = most = rows
        else:
            most = max(1, min(_HOT_MAX, _HOT_BYTES_MAX // terms.row_bytes))
            first = min(_HOT_FIRST, most)
        #: The most slots.
        self._most = most
        #: Stamps are versions of rows; with "asp" numbers of pulls. Scores count protection.
        self._sets = IdSets(first)
        self._rows = np.empty((len(self._sets), terms.dim), numpy_dtype(terms.dtype))
        self._pulls = 0
        #: The worker's newest clock, and the number of the first pull at that clock.
        self._clock, self._since = 0, 0
        #: Grows when a push of this worker begins, and when it has been sent. An answer to a pull
        #: before either may lack the push.
        self._pushes = 0
        #: The number of pushes that are being sent now. An answer may lack them.
        self._sending = 0
        #: Whether servers add pushes, or step by them; None until a server has answered one.
        self._adds: bool | None = None

    def counts(self) -> dict[str, int]:
        """Return the figures for ``Store.stats``."""
        with self._lock:
            kept = int(np.count_nonzero(self._sets.ids >= 0))
            most = len(self._sets) if self._repeats is None else self._most
            facts = {"kept": kept, "most": most, "bytes": self._rows.nbytes}
            facts |= {"hits": self.hits, "misses": self.misses}
            if self._repeats is not None:
                facts |= {"fetched": self._repeats.fetched, "repeated": self._repeats.repeated}
            return facts

    def _oldest(self, clock: int) -> int:
        """Return the smallest version that a worker at this clock may see."""
        if self._staleness is not None:
            return clock - self._staleness
        if clock > self._clock:
            self._clock, self._since = clock, self._pulls + 1
        return max(self._since, self._pulls - PULLS_MAX)

    def lookup(self, ids: Ids, clock: int, target: Array) -> Lookup:
        """Copy cached rows to their places in ``target``. ``clock``: the worker's clock."""
        with self._lock:
            self._oldest(clock)
            self._pulls += 1
            slots = self._sets.find(ids)
            hits = (slots >= 0) & (self._sets.stamps[slots] >= self._oldest(clock))
            used = slots[hits]
            self._sets.scores[used] = _USES_MAX
            target[hits] = self._rows[used]
            if self._repeats is not None:
                self._repeats.note_hits(ids[hits])
            self.hits += len(used)
            self.misses += len(ids) - len(used)
            return Lookup(hits, self._pulls, self._pushes)

    def insert(self, ids: Ids, rows: Array, version: int, clock: int, lookup: Lookup) -> None:
        """Keep rows of different ids from a server's answer.

        ``version``: of the answer. ``clock``: the worker's clock now. ``lookup``: the one ahead of
        the pull.
        """
        stamp = lookup.stamp if self._staleness is None else version
        with self._lock:
            oldest = self._oldest(clock)
            if stamp < oldest or self._sending or lookup.pushes != self._pushes:
                return
            if self._repeats is not None:
                pays = self._repeats.note_answers(ids, stamp, oldest)
                ids, rows = ids[pays], rows[pays]
                self._grow(ids, oldest)
            for _ in range(WAYS):
                taken = self._enter(ids, rows, stamp, oldest)
                ids, rows = ids[~taken], rows[~taken]
                if not len(ids):
                    return

    def _grow(self, ids: Ids, oldest: int) -> None:
        """Double the slots while these ids and the usable rows need over half of them."""
        sets = self._sets
        new = int(np.count_nonzero(sets.find(ids) < 0))
        while 2 * len(sets) <= self._most and sets.needs_growth(new, oldest):
            old, places = sets.double()
            rows = np.empty((len(sets), self._rows.shape[1]), self._rows.dtype)
            rows[places] = self._rows[old]
            self._rows = rows

    def _enter(self, ids: Ids, rows: Array, stamp: int, oldest: int) -> npt.NDArray[np.bool_]:
        """Insert or refuse one id of each set; return a mask of these ids."""
        sets = self._sets
        slots = sets.slots(ids)
        chosen = sets.one_per_set(slots)
        slots, ids, rows = slots[chosen], ids[chosen], rows[chosen]
        found = sets.find(ids)
        is_old = (sets.ids[slots] < 0) | (sets.stamps[slots] < oldest)
        value = np.where(is_old, -1, sets.scores[slots])
        slots = np.where(found >= 0, found, slots[np.arange(len(ids)), value.argmin(axis=1)])
        stays = (found < 0) & (value.min(axis=1) > 0)
        sets.scores[slots[stays]] -= 1
        slots, ids, rows = slots[~stays], ids[~stays], rows[~stays]
        sets.ids[slots] = ids
        sets.stamps[slots] = stamp
        sets.scores[slots] = 0
        self._rows[slots] = rows
        return chosen

    def note_push(self, ids: Ids, rows: Array, rows_of_ids: Places) -> None:
        """Apply a push that begins to the cached rows, so that later pulls of this worker see it.

        ``rows[rows_of_ids]``: the pushed rows of the ids, which are different. With "bsp" and
        Backup this does nothing, since a pull sees no push of an open round.
        """
        if self._folds:
            return
        with self._lock:
            self._pushes += 1
            if not self._adds:
                self._drop(ids)
                return
            slots = self._sets.find(ids)
            here = slots >= 0
            self._rows[slots[here]] += rows[rows_of_ids[here]]

    def _drop(self, ids: Ids) -> None:
        """Remove rows whose values on the servers this worker cannot compute."""
        slots = self._sets.find(ids)
        self._sets.ids[slots[slots >= 0]] = -1
        if self._repeats is not None:
            self._repeats.note_invalid(ids)

    @contextlib.contextmanager
    def hold_answers(self) -> Iterator[None]:
        """Keep no answers while the block notes and sends a push.

        Another thread may send a pull in between, whose answer may lack the push.
        """
        with self._lock:
            self._sending += not self._folds
        try:
            yield
        finally:
            with self._lock:
                self._sending -= not self._folds
                self._pushes += not self._folds

    def step(self) -> None:
        """Note that the table gets an optimizer, so servers do not add later pushes."""
        with self._lock:
            self._adds = False

    def note_failure(self, ids: Ids) -> None:
        """Note that a push of these ids has failed, so servers may lack it."""
        self.note_answer(ids, REPEATED)

    def note_answer(self, ids: Ids, flags: int) -> None:
        """Note the flags of the answer to a push of these ids."""
        if self._folds:
            return
        with self._lock:
            if flags & STEPPED:
                self._adds = False
            elif self._adds is None and not flags & REPEATED:
                self._adds = True
            if flags & (STEPPED | REPEATED):
                self._drop(ids)
