"""The pipelined chain: 0 -> 1 -> 2 -> ... along the ranks, one tile behind the other.

Many steps, but every rank receives and sends each byte once, so long messages run at link speed
whatever the size. A reduction along the chain is the left fold in rank order: the reference that
all rank-ordered algorithms equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish, onward
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, Schedule, Transfer


def folding(size: int, only: int | None, start: int = 0, first: int = 0) -> Iterator[Transfer]:
    """Rank r adds its value to what the ranks ``first`` .. r-1 have combined and passes it on."""
    for source, destination in onward(size, 1, only):
        if source >= first:
            yield Transfer(start + source - first, 0, source, destination, REDUCE)


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """p-1 steps, n bytes; the chain starts at the root and wraps around."""
    places = onward(size, 1, None if only is None else (only - root) % size)
    hops = (Transfer(v, 0, (v + root) % size, (w + root) % size) for v, w in places)
    return finish(Collective.BROADCAST, size, hops, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """p-1 steps, n bytes, and one hop more unless the last rank is the root."""
    home = [Transfer(size - 1, 0, size - 1, root)] if root != size - 1 else []
    return finish(Collective.REDUCE, size, chain(folding(size, only), home), root=root, only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """To the last rank folding (lane 0), and back copying (lane 1): 2(p-1) steps, 2n bytes."""
    back = (
        Transfer(2 * (size - 1) - destination, 0, destination, source, lane=1)
        for source, destination in onward(size, 1, only)
    )
    return finish(Collective.ALL_REDUCE, size, chain(folding(size, only), back), only=only)


def scan(size: int, *, only: int | None = None) -> Schedule:
    """p-1 steps, n bytes: what passes through is the result."""
    return finish(Collective.SCAN, size, folding(size, only), only=only)


def exscan(size: int, *, only: int | None = None) -> Schedule:
    """Every value moves one rank up, then a scan from rank 1: p-1 steps, 2n bytes."""
    moved = (Transfer(0, 0, source, destination) for source, destination in onward(size, 1, only))
    both = chain(moved, folding(size, only, start=1, first=1))
    return finish(Collective.EXSCAN, size, both, only=only)
