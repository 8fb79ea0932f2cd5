"""The ring: every rank talks to its right neighbour only, and every link is busy in every step.

    0 -> 1 -> 2 -> 3 -> 0       chunk c of a reduce_scatter: starts at c+1, ends complete at c
                                chunk c of an all_gather: starts at c, ends everywhere

Bandwidth-optimal for any size; the number of steps grows with the ranks. Patarasu and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish, shifted
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, Schedule, Transfer


def scattering(size: int, only: int | None) -> Iterator[Transfer]:
    """size-1 steps: every chunk collects contributions on its way around, ending at its owner."""
    for step in range(size - 1):
        for source, destination in shifted(size, 1, only):
            yield Transfer(step, (source - step - 1) % size, source, destination, REDUCE)


def gathering(size: int, only: int | None, start: int = 0) -> Iterator[Transfer]:
    """size-1 steps: every rank passes on what it got last, beginning with its own chunk."""
    for step in range(size - 1):
        for source, destination in shifted(size, 1, only):
            yield Transfer(start + step, (source - step) % size, source, destination)


def reduce_scatter(size: int, *, only: int | None = None) -> Schedule:
    """size-1 steps, n(p-1)/p bytes; the fold of chunk c runs c+1, c+2, ... c."""
    return finish(Collective.REDUCE_SCATTER, size, scattering(size, only), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """size-1 steps, n(p-1)/p bytes."""
    return finish(Collective.ALL_GATHER, size, gathering(size, only), only=only)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Reduce_scatter, then all_gather: 2(p-1) steps, 2n(p-1)/p bytes."""
    both = chain(scattering(size, only), gathering(size, only, start=size - 1))
    return finish(Collective.ALL_REDUCE, size, both, parts=size, only=only)
