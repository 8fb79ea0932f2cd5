"""Communication patterns: lists of (source, destination) pairs, for all ranks or for one rank.

Every function takes ``only``: None for all ranks, or the one rank whose pairs are returned. The
relative order of the pairs is the same in both cases. The part of a schedule that belongs to one
rank therefore does not depend on how it was built.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import Schedule, Transfer

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
    servers: int = 0,
) -> Schedule:
    """The schedule of these transfers: sorted by step, with the order within a step kept."""
    kept = [t for t in transfers if only is None or only in (t.source, t.destination)]
    kept.sort(key=attrgetter("step"))
    return Schedule(collective, size, parts, tuple(kept), root, tuple(temporaries), only, servers)


def log2_ceil(size: int) -> int:
    """The rounds of doubling that cover ``size`` ranks: ceil(log2 size)."""
    return (size - 1).bit_length()


def shift_pairs(size: int, distance: int, only: int | None) -> list[Pair]:
    """(r, r + distance mod size) for every rank r."""
    distance %= size
    if distance == 0:
        return []
    sources = range(size) if only is None else sorted({only, (only - distance) % size})
    return [(source, (source + distance) % size) for source in sources]


def onward(size: int, distance: int, only: int | None) -> list[Pair]:
    """(r, r + distance) for every rank r whose destination exists; there is no wrap-around."""
    sources = range(size) if only is None else (only - distance, only)
    return [(s, s + distance) for s in sources if s >= 0 and s + distance < size]


def all_pairs(size: int, only: int | None) -> Iterator[Pair]:
    """Every ordered pair of different ranks.

    A source starts with its right neighbour, so that no destination receives from all ranks at
    once. The sources of one destination come in ascending order, so its fold has rank order.
    """
    for source in range(size):
        if only is None or source == only:
            for distance in range(1, size):
                yield source, (source + distance) % size
        else:
            yield source, only


def from_all(size: int, root: int, only: int | None) -> list[Pair]:
    """(r, root) for every other rank r, ascending."""
    sources: Iterable[int] = range(size) if only is None or only == root else (only,)
    return [(source, root) for source in sources if source != root]


def to_all(size: int, root: int, only: int | None) -> list[Pair]:
    """(root, r) for every other rank r, starting with root + 1."""
    reached = [(root + distance) % size for distance in range(1, size)]
    return [(root, r) for r in reached if only in (None, root, r)]


def binomial_edges(size: int, root: int, only: int | None) -> Iterator[tuple[int, int, int]]:
    """(level, child, parent) of the binomial tree over ranks numbered from the root.

    The place of a rank is v = (rank - root) mod size. The parent of place v is v without its lowest
    set bit, 2^level; the subtree below v holds the places v+1 .. v+2^level-1. Edges are ordered by
    the place of the child.
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
