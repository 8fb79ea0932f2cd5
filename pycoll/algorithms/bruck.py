"""Bruck's algorithms: log2 steps for any size, each talking to one peer at a power of two.

Blocks keep their names here, so the rotations of the textbook's buffers vanish.
Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all communications in
multiport message-passing systems", IEEE TPDS 8 (1997). The barrier is the dissemination barrier of
Hensgen, Finkel and Manber (1988).
"""

from __future__ import annotations

from collections.abc import Iterator

from pycoll.algorithms.pattern import finish, log2_ceil, shifted
from pycoll.collective import Collective
from pycoll.schedule import TOKEN, Schedule, Transfer


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """L steps, n(p-1)/p bytes: in step k rank r sends the blocks r .. r+2^k-1 to r-2^k."""

    def doubling() -> Iterator[Transfer]:
        for step in range(log2_ceil(size)):
            have = 1 << step
            for source, destination in shifted(size, -have, only):
                for distance in range(min(have, size - have)):
                    yield Transfer(step, (source + distance) % size, source, destination)

    return finish(Collective.ALL_GATHER, size, doubling(), only=only)


def all_to_all(size: int, *, only: int | None = None) -> Schedule:
    """L steps, about nL/2 bytes: a block bound d ranks ahead hops 2^k for each bit k of d.

    Before step k it has come d mod 2^k ranks far.
    """

    def hopping() -> Iterator[Transfer]:
        for step in range(log2_ceil(size)):
            hop = 1 << step
            ahead = [d for d in range(size) if d & hop]
            for at, onto in shifted(size, hop, only):
                for distance in ahead:
                    origin = (at - distance % hop) % size
                    block = origin * size + (origin + distance) % size
                    yield Transfer(step, block, at, onto)

    return finish(Collective.ALL_TO_ALL, size, hopping(), only=only)


def barrier(size: int, *, only: int | None = None) -> Schedule:
    """Dissemination: in step k rank r tells r+2^k; L steps."""
    tokens = (
        Transfer(step, TOKEN, source, destination)
        for step in range(log2_ceil(size))
        for source, destination in shifted(size, 1 << step, only)
    )
    return finish(Collective.BARRIER, size, tokens, only=only)
