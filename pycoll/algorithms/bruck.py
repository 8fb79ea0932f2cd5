"""Bruck's algorithms: L = ceil(log2 p) steps for any size p, with one peer per step.

In step k every rank exchanges with peers at distance 2^k. Blocks keep their numbers here, so the
buffer rotations of the textbook are not needed.

Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications
in multiport message-passing systems", IEEE TPDS 8 (1997). The barrier is the dissemination barrier
of Hensgen, Finkel and Manber, IJPP 17 (1988). In the costs below n is the message in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.algorithms.pattern import finish, log2_ceil, shift_pairs
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import TOKEN, Schedule, Transfer


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """Bruck's all_gather (Bruck et al. 1997): in step k rank r sends blocks r .. r+2^k-1 to r-2^k.

    Cost: L steps, n(p-1)/p bytes per rank.
    """

    def doubling() -> Iterator[Transfer]:
        for step in range(log2_ceil(size)):
            have = 1 << step
            for source, destination in shift_pairs(size, -have, only):
                for distance in range(min(have, size - have)):
                    yield Transfer(step, (source + distance) % size, source, destination)

    return finish(Collective.ALL_GATHER, size, doubling(), only=only)


def all_to_all(size: int, *, only: int | None = None) -> Schedule:
    """Bruck's all_to_all (Bruck et al. 1997).

    A block for the rank d ranks ahead moves 2^k ranks for each set bit k of d. Before step k it has
    moved d mod 2^k ranks. Cost: L steps, about nL/2 bytes per rank.
    """

    def hopping() -> Iterator[Transfer]:
        for step in range(log2_ceil(size)):
            hop = 1 << step
            ahead = [d for d in range(size) if d & hop]
            for at, onto in shift_pairs(size, hop, only):
                for distance in ahead:
                    origin = (at - distance % hop) % size
                    block = origin * size + (origin + distance) % size
                    yield Transfer(step, block, at, onto)

    return finish(Collective.ALL_TO_ALL, size, hopping(), only=only)


def barrier(size: int, *, only: int | None = None) -> Schedule:
    """Dissemination barrier (Hensgen, Finkel and Manber 1988): in step k rank r signals r+2^k.

    Cost: L steps, L tokens per rank, no data.
    """
    tokens = (
        Transfer(step, TOKEN, source, destination)
        for step in range(log2_ceil(size))
        for source, destination in shift_pairs(size, 1 << step, only)
    )
    return finish(Collective.BARRIER, size, tokens, only=only)
