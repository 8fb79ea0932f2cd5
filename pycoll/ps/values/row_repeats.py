"""Predicts which rows a worker pulls again while an earlier answer is still allowed.

Each id has a score from 0 to 3. A pull that an earlier answer could serve raises the score, and a
later pull lowers it. A score of 2 or 3 predicts that the next answer serves another pull.

Source: the two-bit counters of branch predictors (Smith, "A study of branch prediction strategies",
ISCA 1981).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pycoll.ps.values.id_sets import WAYS, IdSets
from pycoll.ps.values.row_index import Ids

#: The highest score, and the lowest score of an id whose rows are kept.
_SCORE_MAX, _PAYS = 3, 2
#: The first and the largest number of ids with a score. The largest takes 17 MiB.
_FIRST_IDS, _IDS_MAX = 1 << 12, 1 << 20
#: Multiples of it are spread evenly, modulo any number of ids.
_STEP = 0x9E3779B1
_NEVER = np.iinfo(np.int64).min


class RowRepeats:
    """The scores of the ids that a worker pulls. Threads: one at a time.

    ``fetched`` counts the rows of ``note_answers``. ``repeated`` counts those of them that an
    earlier answer could have served.
    """

    def __init__(self) -> None:
        self.fetched = 0
        self.repeated = 0
        self._sets = IdSets(_FIRST_IDS)
        self._turn = 0

    def note_hits(self, ids: Ids) -> None:
        """Note different ids whose cached rows have answered a pull."""
        slots = self._sets.find(ids)
        here = slots[slots >= 0]
        self._sets.scores[here] = np.minimum(self._sets.scores[here] + 1, _SCORE_MAX)

    def note_invalid(self, ids: Ids) -> None:
        """Note different ids whose answers no later pull may use."""
        slots = self._sets.find(ids)
        self._sets.stamps[slots[slots >= 0]] = _NEVER

    def note_answers(self, ids: Ids, stamp: int, oldest: int) -> npt.NDArray[np.bool_]:
        """Note different ids whose rows servers have sent; return a mask of those to keep.

        ``stamp``: of the answer. ``oldest``: the lowest stamp that a pull may use now.
        """
        sets = self._sets
        slots = sets.find(ids)
        known = slots >= 0
        here = slots[known]
        again = sets.stamps[here] >= oldest
        self.fetched += len(ids)
        self.repeated += int(np.count_nonzero(again))
        sets.scores[here] = np.clip(sets.scores[here] + np.where(again, 1, -1), 0, _SCORE_MAX)
        sets.stamps[here] = stamp
        pays = np.zeros(len(ids), bool)
        pays[known] = sets.scores[here] >= _PAYS
        new = ids[~known]
        while len(sets) < _IDS_MAX and sets.needs_growth(len(new), oldest):
            sets.double()
        # Rotate, so that each id gets a turn if there are more new ids than slots.
        self._turn += 1
        new = np.roll(new, self._turn * _STEP % max(1, len(new)))
        for _ in range(WAYS):
            new = self._enter(new, stamp, oldest)
        return pays

    def _enter(self, ids: Ids, stamp: int, oldest: int) -> Ids:
        """Begin the scores of an id of each set, and return the other ids.

        A score that is not 0 stays while its answer may be used.
        """
        sets = self._sets
        slots = sets.slots(ids)
        chosen = sets.one_per_set(slots)
        mine, slots = ids[chosen], slots[chosen]
        is_old = (sets.ids[slots] < 0) | (sets.stamps[slots] < oldest)
        value = sets.scores[slots] - np.where(is_old, _SCORE_MAX + 1, 0)
        place = slots[np.arange(len(mine)), value.argmin(axis=1)]
        enters = value.min(axis=1) <= 0
        place = place[enters]
        sets.ids[place] = mine[enters]
        sets.stamps[place] = stamp
        sets.scores[place] = 0
        return ids[~chosen]
