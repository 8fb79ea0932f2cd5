"""Who talks to whom: the patterns that algorithms are drawn with, whole or for one rank.

Every function takes ``only``: None for all ranks, or the one rank whose pairs are wanted. Either
way the pairs come in the same relative order, so a rank's part of a schedule does not depend on
how it was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from pycoll.collective import Collective
from pycoll.schedule import Schedule, Transfer

Pair = tuple[int, int]


def finish(
    collective: Collective,
    size: int,
    transfers: Iterable[Transfer],
    *,
    parts: int = 1,
    root: int = 0,
    temporaries: Iterable[int] = (),
    only: int | None = None,
) -> Schedule:
    """The schedule of these transfers: sorted by step, order within a step kept."""
    kept = [t for t in transfers if only is None or only in (t.source, t.destination)]
    kept.sort(key=attrgetter("step"))
    return Schedule(collective, size, parts, tuple(kept), root, tuple(temporaries), only)


def log2_ceil(size: int) -> int:
    """Rounds of doubling until ``size`` is covered."""
    return (size - 1).bit_length()


def shifted(size: int, distance: int, only: int | None) -> list[Pair]:
    """(r, r + distance) around the circle, for every r."""
    distance %= size
    if distance == 0:
        return []
    sources = range(size) if only is None else sorted({only, (only - distance) % size})
    return [(source, (source + distance) % size) for source in sources]


def onward(size: int, distance: int, only: int | None) -> list[Pair]:
    """(r, r + distance) along the line: nobody past the last rank."""
    sources = range(size) if only is None else (only - distance, only)
    return [(s, s + distance) for s in sources if s >= 0 and s + distance < size]


def all_pairs(size: int, only: int | None) -> Iterator[Pair]:
    """Every ordered pair; a source starts with its right neighbour, so nobody is overrun.

    The sources that one destination hears from come in ascending order: its fold has rank order.
    """
    for source in range(size):
        if only is None or source == only:
            for distance in range(1, size):
                yield source, (source + distance) % size
        else:
            yield source, only


def from_all(size: int, root: int, only: int | None) -> list[Pair]:
    """(r, root) for every other rank, ascending."""
    sources: Iterable[int] = range(size) if only is None or only == root else (only,)
    return [(source, root) for source in sources if source != root]


def to_all(size: int, root: int, only: int | None) -> list[Pair]:
    """(root, r) for every other rank, beginning behind the root."""
    reached = [(root + distance) % size for distance in range(1, size)]
    return [(root, r) for r in reached if only in (None, root, r)]


def binomial_edges(size: int, root: int, only: int | None) -> Iterator[tuple[int, int, int]]:
    """(level, child, parent) of the binomial tree over places behind the root.

    The place v = (rank - root) mod size hangs below v without its lowest set bit, 2^level; below it
    hang the places v+1 .. v+2^level-1. Children are reached through their parent's rank.
    """
    if only is None:
        places: Iterable[int] = range(1, size)
    else:
        own = (only - root) % size
        reach = own & -own if own else size
        below = [own + (1 << j) for j in range(log2_ceil(size) + 1) if 1 << j < reach]
        places = [place for place in (own, *below) if 0 < place < size]
    for place in places:
        low = place & -place
        yield low.bit_length() - 1, (place + root) % size, (place - low + root) % size
