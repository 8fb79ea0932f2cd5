"""Direct exchange: whoever needs a value gets it from its source, in one hop.

    one-shot:  everybody sends all of it to everybody, everybody folds it all     1 step,  (p-1)n
    two-shot:  everybody sends chunk d to rank d; d folds it and sends it to all  2 steps, 2n(p-1)/p
    star:      everybody sends all of it to rank 0, which folds it and sends it   2 steps, 2n(p-1)

Best on full-mesh media (shared memory, NVSwitch), where the number of peers costs nothing. A value
is folded where it arrives, always as the left fold in rank order: all ranks get the same bits, and
the same as from a chain. Of these a star takes the fewest messages, 2(p-1) in all, each of them to
or from one rank: best where that rank's core has the work of others to do, too.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import all_pairs, finish, from_all, to_all
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, TOKEN, Schedule, Transfer


def scattering(size: int, only: int | None) -> Iterator[Transfer]:
    """One step: chunk d of every rank goes to rank d, which folds them."""
    for source, destination in all_pairs(size, only):
        yield Transfer(0, destination, source, destination, REDUCE, before=source < destination)


def gathering(size: int, only: int | None, start: int = 0) -> Iterator[Transfer]:
    """One step: every rank sends its chunk to all."""
    for source, destination in all_pairs(size, only):
        yield Transfer(start, source, source, destination)


def reduce_scatter(size: int, *, only: int | None = None) -> Schedule:
    """1 step, n(p-1)/p bytes."""
    return finish(Collective.REDUCE_SCATTER, size, scattering(size, only), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """1 step, n(p-1)/p bytes."""
    return finish(Collective.ALL_GATHER, size, gathering(size, only), only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Two-shot: reduce_scatter, then all_gather; 2 steps, 2n(p-1)/p bytes."""
    both = chain(scattering(size, only), gathering(size, only, start=1))
    return finish(Collective.ALL_REDUCE, size, both, parts=size, only=only)


def one_shot(size: int, *, only: int | None = None) -> Schedule:
    """All_reduce in 1 step, n(p-1) bytes; every rank does the same fold in rank order."""
    exchange = (
        Transfer(0, 0, source, destination, REDUCE, before=source < destination)
        for source, destination in all_pairs(size, only)
    )
    return finish(Collective.ALL_REDUCE, size, exchange, only=only)


def star(size: int, *, only: int | None = None) -> Schedule:
    """All_reduce by way of rank 0, in 2 steps; it receives and folds n(p-1), and sends as much."""
    values = (
        Transfer(0, 0, source, root, REDUCE, before=source < root)
        for source, root in from_all(size, 0, only)
    )
    results = (Transfer(1, 0, root, r) for root, r in to_all(size, 0, only))
    return finish(Collective.ALL_REDUCE, size, chain(values, results), only=only)


def all_to_all(size: int, *, only: int | None = None) -> Schedule:
    """1 step; block i*size + j goes from i to j, n(p-1)/p bytes."""
    blocks = (Transfer(0, s * size + d, s, d) for s, d in all_pairs(size, only))
    return finish(Collective.ALL_TO_ALL, size, blocks, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """1 step; the root receives and folds n(p-1) bytes."""
    values = (
        Transfer(0, 0, source, root, REDUCE, before=source < root)
        for source, root in from_all(size, root, only)
    )
    return finish(Collective.REDUCE, size, values, root=root, only=only)


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """1 step; the root sends n(p-1) bytes."""
    values = (Transfer(0, 0, root, r) for root, r in to_all(size, root, only))
    return finish(Collective.BROADCAST, size, values, root=root, only=only)


def gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """1 step; every rank sends its block to the root."""
    blocks = (Transfer(0, source, source, root) for source, root in from_all(size, root, only))
    return finish(Collective.GATHER, size, blocks, root=root, only=only)


def scatter(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """1 step; the root sends every rank its block."""
    blocks = (Transfer(0, r, root, r) for root, r in to_all(size, root, only))
    return finish(Collective.SCATTER, size, blocks, root=root, only=only)


def barrier(size: int, *, only: int | None = None) -> Schedule:
    """1 step; everybody tells everybody."""
    tokens = (Transfer(0, TOKEN, s, d) for s, d in all_pairs(size, only))
    return finish(Collective.BARRIER, size, tokens, only=only)
