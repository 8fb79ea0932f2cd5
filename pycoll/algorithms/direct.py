"""Direct exchange: every value moves from its source to its destination in one hop.

    one-shot:  every rank sends all data to every rank and folds all       1 step,  (p-1)n
    two-shot:  rank d receives every chunk d, folds and sends it to all    2 steps, 2n(p-1)/p
    star:      rank 0 receives all data, folds it and sends it to all      2 steps, 2n(p-1)

Direct exchange suits full-mesh media (shared memory, NVSwitch), where the number of peers has no
cost. The destination folds the values, always as the left fold in rank order. All ranks therefore
get the same bits, which are also the bits of a chain. The star takes the fewest messages, 2(p-1) in
all, each of them to or from one rank. It suits oversubscribed hosts, where the core of that rank
also runs other ranks.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005). In the costs below p is the number of ranks and n the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import all_pairs, finish, from_all, to_all
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, TOKEN, Schedule, Transfer


def scattering(size: int, only: int | None) -> Iterator[Transfer]:
    """One step: every rank sends its chunk d to rank d, which folds the chunks."""
    for source, destination in all_pairs(size, only):
        yield Transfer(0, destination, source, destination, REDUCE, before=source < destination)


def gathering(size: int, only: int | None, start: int = 0) -> Iterator[Transfer]:
    """One step: every rank sends its own chunk to every other rank."""
    for source, destination in all_pairs(size, only):
        yield Transfer(start, source, source, destination)


def reduce_scatter(size: int, *, only: int | None = None) -> Schedule:
    """Direct reduce_scatter (Thakur et al. 2005).

    Cost: 1 step, n(p-1)/p bytes per rank.
    """
    return finish(Collective.REDUCE_SCATTER, size, scattering(size, only), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """Direct all_gather (Thakur et al. 2005).

    Cost: 1 step, n(p-1)/p bytes per rank.
    """
    return finish(Collective.ALL_GATHER, size, gathering(size, only), only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Two-shot all_reduce (Thakur et al. 2005): reduce_scatter, then all_gather.

    Cost: 2 steps, 2n(p-1)/p bytes per rank.
    """
    both = chain(scattering(size, only), gathering(size, only, start=1))
    return finish(Collective.ALL_REDUCE, size, both, parts=size, only=only)


def one_shot(size: int, *, only: int | None = None) -> Schedule:
    """One-shot all_reduce (Thakur et al. 2005): every rank does the same fold in rank order.

    Cost: 1 step, n(p-1) bytes per rank.
    """
    exchange = (
        Transfer(0, 0, source, destination, REDUCE, before=source < destination)
        for source, destination in all_pairs(size, only)
    )
    return finish(Collective.ALL_REDUCE, size, exchange, only=only)


def star(size: int, *, only: int | None = None) -> Schedule:
    """All_reduce through rank 0 (Thakur et al. 2005).

    Cost: 2 steps; rank 0 receives and folds n(p-1) bytes and sends n(p-1), every other rank sends
    and receives n.
    """
    values = (
        Transfer(0, 0, source, root, REDUCE, before=source < root)
        for source, root in from_all(size, 0, only)
    )
    results = (Transfer(1, 0, root, r) for root, r in to_all(size, 0, only))
    return finish(Collective.ALL_REDUCE, size, chain(values, results), only=only)


def all_to_all(size: int, *, only: int | None = None) -> Schedule:
    """Direct all_to_all (Thakur et al. 2005): block i*size + j moves from rank i to rank j.

    Cost: 1 step, n(p-1)/p bytes per rank.
    """
    blocks = (Transfer(0, s * size + d, s, d) for s, d in all_pairs(size, only))
    return finish(Collective.ALL_TO_ALL, size, blocks, only=only)


def reduce(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Direct reduce (Thakur et al. 2005).

    Cost: 1 step; the root receives and folds n(p-1) bytes.
    """
    values = (
        Transfer(0, 0, source, root, REDUCE, before=source < root)
        for source, root in from_all(size, root, only)
    )
    return finish(Collective.REDUCE, size, values, root=root, only=only)


def broadcast(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Direct broadcast (Thakur et al. 2005).

    Cost: 1 step; the root sends n(p-1) bytes.
    """
    values = (Transfer(0, 0, root, r) for root, r in to_all(size, root, only))
    return finish(Collective.BROADCAST, size, values, root=root, only=only)


def gather(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Direct gather (Thakur et al. 2005): every rank sends its block to the root.

    Cost: 1 step; the root receives n(p-1)/p bytes.
    """
    blocks = (Transfer(0, source, source, root) for source, root in from_all(size, root, only))
    return finish(Collective.GATHER, size, blocks, root=root, only=only)


def scatter(size: int, *, root: int = 0, only: int | None = None) -> Schedule:
    """Direct scatter (Thakur et al. 2005): the root sends every rank its block.

    Cost: 1 step; the root sends n(p-1)/p bytes.
    """
    blocks = (Transfer(0, r, root, r) for root, r in to_all(size, root, only))
    return finish(Collective.SCATTER, size, blocks, root=root, only=only)


def barrier(size: int, *, only: int | None = None) -> Schedule:
    """Direct barrier (Thakur et al. 2005): every rank signals every other rank.

    Cost: 1 step, p-1 tokens per rank, no data.
    """
    tokens = (Transfer(0, TOKEN, s, d) for s, d in all_pairs(size, only))
    return finish(Collective.BARRIER, size, tokens, only=only)
