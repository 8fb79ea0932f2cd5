"""Halving-doubling: as bandwidth-optimal as the ring, in log2 steps.

    halving over 4 cores:   distance 1: 0 keeps chunks 0, 2 and sends 1, 3 to core 1
                            distance 2: 0 keeps chunk 0 and sends 2 to core 2
    doubling:               the same steps in reverse order, copying

The textbook halves between the most distant cores first. Here the nearest cores come first. Large
messages then stay between neighbours, and combined values cover consecutive ranks, so rank order is
kept.

A size other than 2^k folds pairs of ranks into cores (see recursive.py): the even rank receives the
whole vector of the odd rank before halving and returns the result afterwards. Rabenseifner and
Träff (EuroPVM/MPI 2004) split this fold between both ranks. Their variant moves the same number of
bytes, saves half of the arithmetic of the fold and costs one more step.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004. The all_gather
is the recursive doubling of Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). In the costs below p
is the number of ranks, 2^k the largest power of two up to p, and n the message in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish
from pycoll.algorithms.recursive import Cores, folding, unfolding
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import REDUCE, Schedule, Transfer

#: Maps a core to the chunks that it owns after halving and before doubling.
Owned = Callable[[int], range]


def one_each(core: int) -> range:
    """Core i owns chunk i."""
    return range(core, core + 1)


def halving(cores: Cores, owned: Owned, start: int) -> Iterator[Transfer]:
    """k steps: a core sends its partner the chunks that the partner's half will own."""
    for k in range(cores.rounds):
        for i, j in cores.partners(1 << k):
            source, destination = cores.rank(i), cores.rank(j)
            for core in range(j % (2 << k), cores.working, 2 << k):
                for chunk in owned(core):
                    yield Transfer(start + k, chunk, source, destination, REDUCE, before=i < j)


def doubling(cores: Cores, owned: Owned, start: int) -> Iterator[Transfer]:
    """k steps: a core sends its partner all chunks that it has."""
    for step, k in enumerate(reversed(range(cores.rounds))):
        for i, j in cores.partners(1 << k):
            source, destination = cores.rank(i), cores.rank(j)
            for core in range(i % (2 << k), cores.working, 2 << k):
                for chunk in owned(core):
                    yield Transfer(start + step, chunk, source, destination)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Halving-doubling all_reduce (Rabenseifner 2004): fold, halve, double, unfold.

    Cost: 2k steps, 2n(1-1/2^k) bytes per rank; a fold adds 2 steps and n bytes each way.
    """
    cores = Cores(size, only)
    first = cores.fold_steps
    phases = (
        folding(cores, cores.working),
        halving(cores, one_each, first),
        doubling(cores, one_each, first + cores.rounds),
        unfolding(cores, first + 2 * cores.rounds, cores.working),
    )
    return finish(Collective.ALL_REDUCE, size, chain(*phases), parts=cores.working, only=only)


def reduce_scatter(size: int, *, only: int | None = None) -> Schedule:
    """Recursive halving (Rabenseifner 2004): fold, halve, send odd ranks their blocks.

    Cost: k steps, n(p-1)/p bytes per rank; a fold adds 2 steps and about n bytes received.
    """
    cores = Cores(size, only)
    first = cores.fold_steps
    handing = (Transfer(first + cores.rounds, odd, even, odd) for even, odd in cores.pairs())
    phases = (folding(cores, size), halving(cores, cores.blocks, first), handing)
    return finish(Collective.REDUCE_SCATTER, size, chain(*phases), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """Recursive doubling (Thakur et al. 2005); odd ranks send their block to the even rank first.

    Cost: k steps, n(p-1)/p bytes per rank; pairs add 2 steps and about n bytes sent.
    """
    cores = Cores(size, only)
    first = cores.fold_steps
    collecting = (Transfer(0, odd, odd, even) for even, odd in cores.pairs())
    returning = (
        Transfer(first + cores.rounds, block, even, odd)
        for even, odd in cores.pairs()
        for block in range(size)
        if block != odd
    )
    phases = (collecting, doubling(cores, cores.blocks, first), returning)
    return finish(Collective.ALL_GATHER, size, chain(*phases), only=only)
