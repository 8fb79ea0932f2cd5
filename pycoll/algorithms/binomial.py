"""The binomial tree: the informed ranks double in every step.

    broadcast from 0 over 8:   0 -> 4;   0 -> 2, 4 -> 6;   0 -> 1, 2 -> 3, 4 -> 5, 6 -> 7

Below a rank hang the ranks that follow it, so gather and scatter move neighbouring blocks
together, and a reduction to rank 0 keeps rank order. log2 steps, but the root's link carries the
whole message log2 times: for short messages. Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms import ring
from pycoll.algorithms.pattern import binomial_edges, finish, log2_ceil
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, Schedule, Transfer


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """L steps, the root sends L*n bytes."""
    last = log2_ceil(size) - 1
    edges = binomial_edges(size, root, only)
    down = (Transfer(last - level, 0, parent, child) for level, child, parent in edges)
    return finish(Collective.BROADCAST, size, down, root=root, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """L steps, the root receives and folds L*n bytes."""
    edges = binomial_edges(size, root, only)
    up = (Transfer(level, 0, child, parent, REDUCE, before=False) for level, child, parent in edges)
    return finish(Collective.REDUCE, size, up, root=root, only=only)


def subtree(size: int, root: int, rank: int, level: int) -> list[int]:
    """The ranks at and below ``rank``, which hangs on an edge of ``level``."""
    place = (rank - root) % size
    return [(v + root) % size for v in range(place, min(place + (1 << level), size))]


def gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """L steps; a child sends the blocks of its whole subtree."""
    up = (
        Transfer(level, block, child, parent)
        for level, child, parent in binomial_edges(size, root, only)
        for block in subtree(size, root, child, level)
    )
    return finish(Collective.GATHER, size, up, root=root, only=only)


def scattering(size: int, root: int, only: int | None) -> Iterator[Transfer]:
    """A parent sends a child the blocks of its whole subtree."""
    last = log2_ceil(size) - 1
    for level, child, parent in binomial_edges(size, root, only):
        for block in subtree(size, root, child, level):
            yield Transfer(last - level, block, parent, child)


def scatter(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """L steps, n(p-1)/p bytes."""
    return finish(Collective.SCATTER, size, scattering(size, root, only), root=root, only=only)


def scatter_all_gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Broadcast as scatter, then a ring's all_gather: L+p-1 steps, 2n(p-1)/p bytes.

    Van de Geijn's broadcast (Barnett et al., "Interprocessor collective communication library",
    SHPCC 1994). The root has all chunks, so nothing is sent to it.
    """
    around = ring.gathering(size, only, start=log2_ceil(size))
    spread = (t for t in around if t.destination != root)
    both = chain(scattering(size, root, only), spread)
    return finish(Collective.BROADCAST, size, both, parts=size, root=root, only=only)
