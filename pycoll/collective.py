"""The collectives by number; apart from schedules, for those who name one and build none."""

from __future__ import annotations

from enum import IntEnum


class Collective(IntEnum):
    """The collectives; the values are those of the plan format."""

    ALL_REDUCE = 0
    REDUCE = 1
    BROADCAST = 2
    REDUCE_SCATTER = 3
    ALL_GATHER = 4
    GATHER = 5
    SCATTER = 6
    ALL_TO_ALL = 7
    SCAN = 8
    EXSCAN = 9
    BARRIER = 10


REDUCING = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.REDUCE,
        Collective.REDUCE_SCATTER,
        Collective.SCAN,
        Collective.EXSCAN,
    }
)
#: Whose data comes from the root, and whose goes there.
FROM_ROOT = frozenset({Collective.BROADCAST, Collective.SCATTER})
TO_ROOT = frozenset({Collective.REDUCE, Collective.GATHER})
ROOTED = FROM_ROOT | TO_ROOT
