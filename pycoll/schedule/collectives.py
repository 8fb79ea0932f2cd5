"""The collectives and their numbers.

This module imports nothing else, so code that only names a collective does not load schedules.
"""

from __future__ import annotations

from enum import IntEnum


class Collective(IntEnum):
    """A collective; its value is the number that the plan format uses."""

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


#: The collectives that combine contributions of several ranks with a reduction.
REDUCING = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.REDUCE,
        Collective.REDUCE_SCATTER,
        Collective.SCAN,
        Collective.EXSCAN,
    }
)
#: The collectives whose data starts at the root.
FROM_ROOT = frozenset({Collective.BROADCAST, Collective.SCATTER})
#: The collectives whose data ends at the root.
TO_ROOT = frozenset({Collective.REDUCE, Collective.GATHER})
#: The collectives that take a root.
ROOTED = FROM_ROOT | TO_ROOT
#: The collectives in which several ranks end with the same value. With a codec they hold what its
#: codes decode to.
SHARING = frozenset({Collective.ALL_REDUCE, Collective.BROADCAST, Collective.ALL_GATHER})
#: The collectives whose data may travel as codes.
CODED = SHARING | {Collective.REDUCE_SCATTER}
#: The collectives whose ranks all hold the same block; in these, ranks may serve.
SERVABLE = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.REDUCE,
        Collective.BROADCAST,
        Collective.SCAN,
        Collective.EXSCAN,
    }
)
