"""The pipelined chain: rank r sends each tile to rank r+1 while it receives the next tile.

The chain takes many steps, but every rank receives and sends each byte once, so long messages move
at link speed for any number of ranks. A reduction along the chain is the left fold in rank order.
All rank-ordered algorithms must equal this reference bit by bit.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005). In the costs below p is the number of ranks and n the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish, onward
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer


def folding(size: int, only: int | None, start: int = 0, first: int = 0) -> Iterator[Transfer]:
    """Rank r combines its value with the result of ranks ``first`` .. r-1 and sends it to r+1."""
    for source, destination in onward(size, 1, only):
        if source >= first:
            yield Transfer(start + source - first, 0, source, destination, REDUCE)


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Pipelined chain broadcast (Thakur et al. 2005) that starts at the root and wraps around.

    Cost: p-1 steps, n bytes sent and n received per rank.
    """
    places = onward(size, 1, None if only is None else (only - root) % size)
    hops = (Transfer(v, 0, (v + root) % size, (w + root) % size) for v, w in places)
    return finish(Collective.BROADCAST, size, hops, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Pipelined chain reduce (Thakur et al. 2005); the last rank sends the result to the root.

    Cost: p-1 steps, one more unless the last rank is the root; n bytes sent and n received per
    rank.
    """
    home = [Transfer(size - 1, 0, size - 1, root)] if root != size - 1 else []
    return finish(Collective.REDUCE, size, chain(folding(size, only), home), root=root, only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Chain all_reduce (Thakur et al. 2005): a fold to the last rank, then copies back.

    The fold runs on lane 0 and the copies on lane 1. Cost: 2(p-1) steps, 2n bytes per rank.
    """
    back = (
        Transfer(2 * (size - 1) - destination, 0, destination, source, lane=1)
        for source, destination in onward(size, 1, only)
    )
    return finish(Collective.ALL_REDUCE, size, chain(folding(size, only), back), only=only)


def scan(size: int, *, only: int | None = None) -> Schedule:
    """Chain scan (Thakur et al. 2005): the partial result that passes a rank is its output.

    Cost: p-1 steps, n bytes per rank.
    """
    return finish(Collective.SCAN, size, folding(size, only), only=only)


def exscan(size: int, *, only: int | None = None) -> Schedule:
    """Chain exscan (Thakur et al. 2005): every value moves to the next rank, then ranks 1.. scan.

    Cost: p-1 steps, 2n bytes per rank.
    """
    moved = (Transfer(0, 0, source, destination) for source, destination in onward(size, 1, only))
    both = chain(moved, folding(size, only, start=1, first=1))
    return finish(Collective.EXSCAN, size, both, only=only)
