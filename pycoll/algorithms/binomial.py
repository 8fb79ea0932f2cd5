"""The binomial tree: the number of ranks that hold the data doubles in every step.

    broadcast from 0 over 8:   0 -> 4;   0 -> 2, 4 -> 6;   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7

The subtree of a rank consists of the ranks that follow it. Gather and scatter therefore move
neighbouring blocks together, and a reduction to rank 0 keeps rank order. The tree takes L =
ceil(log2 p) steps, but the link of the root moves the whole message L times, so the tree suits
short messages.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005). In the costs below p is the number of ranks and n the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms import ring
from pycoll.algorithms.pattern import binomial_edges, finish, log2_ceil
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Binomial broadcast (Thakur et al. 2005).

    Cost: L steps; the root sends L*n bytes, every other rank receives n.
    """
    last = log2_ceil(size) - 1
    edges = binomial_edges(size, root, only)
    down = (Transfer(last - level, 0, parent, child) for level, child, parent in edges)
    return finish(Collective.BROADCAST, size, down, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Binomial reduce (Thakur et al. 2005).

    Cost: L steps; the root receives and folds L*n bytes, every other rank sends n.
    """
    edges = binomial_edges(size, root, only)
    up = (Transfer(level, 0, child, parent, REDUCE, before=False) for level, child, parent in edges)
    return finish(Collective.REDUCE, size, up, root=root, only=only)


def subtree(size: int, root: int, rank: int, level: int) -> list[int]:
    """The ranks of the subtree of ``rank``, including it; ``level`` is that of its parent edge."""
    place = (rank - root) % size
    return [(v + root) % size for v in range(place, min(place + (1 << level), size))]


def gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Binomial gather (Thakur et al. 2005): a child sends the blocks of its whole subtree.

    Cost: L steps; the root receives n(p-1)/p bytes.
    """
    up = (
        Transfer(level, block, child, parent)
        for level, child, parent in binomial_edges(size, root, only)
        for block in subtree(size, root, child, level)
    )
    return finish(Collective.GATHER, size, up, root=root, only=only)


def scattering(size: int, root: int, only: int | None) -> Iterator[Transfer]:
    """The transfers of a scatter: a parent sends a child the blocks of the child's subtree."""
    last = log2_ceil(size) - 1
    for level, child, parent in binomial_edges(size, root, only):
        for block in subtree(size, root, child, level):
            yield Transfer(last - level, block, parent, child)


def scatter(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Binomial scatter (Thakur et al. 2005).

    Cost: L steps; the root sends n(p-1)/p bytes.
    """
    return finish(Collective.SCATTER, size, scattering(size, root, only), root=root, only=only)


def scatter_all_gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Van de Geijn's broadcast: a binomial scatter, then the all_gather of a ring.

    No rank sends to the root, which has all chunks. Cost: L+p-1 steps, at most 2n(p-1)/p bytes sent
    per rank. Source: Barnett et al., "Interprocessor collective communication library", SHPCC 1994.
    """
    around = ring.gathering(size, only, start=log2_ceil(size))
    rest = (t for t in around if t.destination != root)
    both = chain(scattering(size, root, only), rest)
    return finish(Collective.BROADCAST, size, both, parts=size, root=root, only=only)
