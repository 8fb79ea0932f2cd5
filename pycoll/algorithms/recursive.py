"""Recursive doubling and halving: log2 steps between partners whose distance doubles.

    distance 1:  0-1 2-3 4-5 6-7      distance 2:  0-2 1-3 ...      distance 4:  0-4 1-5 ...

The exchange runs on 2^k *cores*. In a size p = 2^k + r, the first 2r ranks form r pairs. The even
rank of a pair is a core. The odd rank sends its part to the even rank before the exchange (fold)
and receives the result afterwards (unfold). Pairs are neighbours and distances grow, so every
combined value covers consecutive ranks in rank order. Both partners put the value of the lower
ranks first and so get equal bits.

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005); Ruefenacht, Bull and Booth,
"Generalisation of recursive doubling for allreduce", Parallel Computing 69 (2017) (radix 4); Hillis
and Steele, CACM 29 (1986) (scan). In the costs below n is the message in bytes and L = ceil(log2
p).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from pycoll.algorithms.pattern import Pair, finish, log2_ceil, onward
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, TOKEN, Schedule, Transfer


class Cores(NamedTuple):
    """The 2^k ranks that take part in the exchange (``working``), and the ``pair_count`` others."""

    size: int
    only: int | None

    @property
    def rounds(self) -> int:
        """k, the rounds of a doubling exchange."""
        return self.size.bit_length() - 1

    @property
    def working(self) -> int:
        """2^k, the largest power of two up to size."""
        return 1 << self.rounds

    @property
    def pair_count(self) -> int:
        """r, the number of pairs."""
        return self.size - self.working

    @property
    def fold_steps(self) -> int:
        """The steps of the fold: 1 if there are pairs, else 0."""
        return min(self.pair_count, 1)

    def rank(self, core: int) -> int:
        """The rank of core number ``core``."""
        return core + min(core, self.pair_count)

    def blocks(self, core: int) -> range:
        """The ranks that this core represents: itself, and the odd rank of its pair."""
        return range(self.rank(core), self.rank(core + 1))

    def pairs(self) -> list[Pair]:
        """(even rank, odd rank) of every pair."""
        if self.only is None:
            return [(2 * i, 2 * i + 1) for i in range(self.pair_count)]
        even = self.only & ~1
        return [(even, even + 1)] if even < 2 * self.pair_count else []

    def partners(self, *distances: int) -> Iterator[Pair]:
        """(core, core ^ distance) for every core; the sources of a core come in ascending order."""
        cores: list[int] = list(range(self.working))
        if self.only is not None:
            own = self.only - min(self.pair_count, (self.only + 1) // 2)
            if self.rank(own) != self.only:
                return
            cores = sorted(own ^ distance for distance in (0, *distances))
        for core in cores:
            for distance in distances:
                yield core, core ^ distance


def exchanging(cores: Cores, distances: tuple[int, ...], step: int) -> Iterator[Transfer]:
    """Partners exchange the values that they have combined so far."""
    for i, j in cores.partners(*distances):
        yield Transfer(step, 0, cores.rank(i), cores.rank(j), REDUCE, before=i < j)


def folding(cores: Cores, chunks: int = 1) -> Iterator[Transfer]:
    """Step 0 of a size other than 2^k: the odd rank sends its value to its even neighbour."""
    for even, odd in cores.pairs():
        for chunk in range(chunks):
            yield Transfer(0, chunk, odd, even, REDUCE, before=False)


def unfolding(cores: Cores, step: int, chunks: int = 1) -> Iterator[Transfer]:
    """The even rank of every pair sends the result to the odd rank."""
    for even, odd in cores.pairs():
        for chunk in range(chunks):
            yield Transfer(step, chunk, even, odd)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Recursive doubling all_reduce (Thakur et al. 2005); every rank folds all values.

    Cost: k steps, kn bytes per rank; a fold adds 2 steps and n bytes.
    """
    cores = Cores(size, only)
    first = cores.fold_steps
    doubling = (exchanging(cores, (1 << k,), first + k) for k in range(cores.rounds))
    end = unfolding(cores, first + cores.rounds)
    return finish(Collective.ALL_REDUCE, size, chain(folding(cores), *doubling, end), only=only)


def multiplying(size: int, *, only: int | None = None) -> Schedule:
    """All_reduce with radix 4 (Ruefenacht, Bull and Booth 2017).

    One row receives the messages of all three partners, so a step costs one row. If k is odd, the
    last step has one partner. Cost: ceil(k/2) steps, 3n bytes per rank in each (n in the last if k
    is odd); a fold adds 2 steps and n bytes.
    """
    cores = Cores(size, only)
    steps = [
        (1 << k, 2 << k, 3 << k) if k + 1 < cores.rounds else (1 << k,)
        for k in range(0, cores.rounds, 2)
    ]
    first = cores.fold_steps
    swaps = (exchanging(cores, step, first + i) for i, step in enumerate(steps))
    end = unfolding(cores, first + len(steps))
    return finish(Collective.ALL_REDUCE, size, chain(folding(cores), *swaps, end), only=only)


def scan(size: int, *, only: int | None = None) -> Schedule:
    """Recursive doubling scan (Hillis and Steele 1986).

    In step k rank r adds the partial sum of rank r-2^k. Cost: L steps, at most Ln bytes sent per
    rank (rank 0).
    """
    return finish(Collective.SCAN, size, summing(size, only), only=only)


def summing(size: int, only: int | None, start: int = 0, first: int = 0) -> Iterator[Transfer]:
    """The transfers of a scan over the ranks ``first`` and above."""
    for k in range(log2_ceil(size - first) if size > first else 0):
        for source, destination in onward(size, 1 << k, only):
            if source >= first:
                yield Transfer(start + k, 0, source, destination, REDUCE)


def exscan(size: int, *, only: int | None = None) -> Schedule:
    """Every value moves to the next rank, then ranks 1.. scan (Hillis and Steele 1986).

    Cost: one step and n bytes more than a scan of p-1 ranks.
    """
    moved = (Transfer(0, 0, source, destination) for source, destination in onward(size, 1, only))
    both = chain(moved, summing(size, only, start=1, first=1))
    return finish(Collective.EXSCAN, size, both, only=only)


def barrier(size: int, *, only: int | None = None) -> Schedule:
    """Recursive doubling barrier (Thakur et al. 2005).

    Cost: k steps, k tokens per rank, no data; a fold adds 2 steps and one token.
    """
    cores = Cores(size, only)
    first = cores.fold_steps

    def telling() -> Iterator[Transfer]:
        for even, odd in cores.pairs():
            yield Transfer(0, TOKEN, odd, even)
            yield Transfer(first + cores.rounds, TOKEN, even, odd)
        for k in range(cores.rounds):
            for i, j in cores.partners(1 << k):
                yield Transfer(first + k, TOKEN, cores.rank(i), cores.rank(j))

    return finish(Collective.BARRIER, size, telling(), only=only)
