"""The ring: every rank sends to its right neighbour only, and every link is busy in every step.

    0 -> 1 -> 2 -> 3 -> 0       chunk c of a reduce_scatter: starts at c+1, ends complete at c
                                chunk c of an all_gather: starts at c, ends everywhere

The ring is bandwidth-optimal for any size; the number of steps grows with the number of ranks.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69 (2009). In the costs below p is the number of ranks and n the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish, shift_pairs
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer


def scattering(size: int, only: int | None) -> Iterator[Transfer]:
    """p-1 steps: every chunk collects contributions around the ring and ends at its owner."""
    for step in range(size - 1):
        for source, destination in shift_pairs(size, 1, only):
            yield Transfer(step, (source - step - 1) % size, source, destination, REDUCE)


def gathering(size: int, only: int | None, start: int = 0) -> Iterator[Transfer]:
    """p-1 steps: every rank sends its own chunk first, then the chunk that it received last."""
    for step in range(size - 1):
        for source, destination in shift_pairs(size, 1, only):
            yield Transfer(start + step, (source - step) % size, source, destination)


def reduce_scatter(size: int, *, only: int | None = None) -> Schedule:
    """Ring reduce_scatter (Patarasu and Yuan 2009); the fold of chunk c runs c+1, c+2, ... c.

    Cost: p-1 steps, n(p-1)/p bytes per rank.
    """
    return finish(Collective.REDUCE_SCATTER, size, scattering(size, only), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """Ring all_gather (Patarasu and Yuan 2009).

    Cost: p-1 steps, n(p-1)/p bytes per rank.
    """
    return finish(Collective.ALL_GATHER, size, gathering(size, only), only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Ring all_reduce (Patarasu and Yuan 2009): reduce_scatter, then all_gather.

    Cost: 2(p-1) steps, 2n(p-1)/p bytes per rank.
    """
    both = chain(scattering(size, only), gathering(size, only, start=size - 1))
    return finish(Collective.ALL_REDUCE, size, both, parts=size, only=only)
