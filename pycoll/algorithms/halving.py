"""Halving-doubling: bandwidth-optimal like the ring, in log2 steps.

    halving over 4 cores:   distance 1: 0 keeps chunks 0, 2 and sends 1, 3 to core 1
                            distance 2: 0 keeps chunk 0 and sends 2 to core 2
    doubling:               the same backwards, copying

The textbook halves between the farthest cores first. Here the nearest come first: the big messages
stay near, and combined values cover consecutive ranks, so rank order is kept.

Other sizes than 2^k fold pairs of ranks into cores whole (see recursive.py): the even rank takes
the odd one's vector before and gives it its result after. Splitting the fold between both, as
Rabenseifner and Träff do (EuroPVM/MPI 2004), moves as many bytes, saves half of its arithmetic and
costs a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from pycoll.algorithms.pattern import finish
from pycoll.algorithms.recursive import Cores, folding, unfolding
from pycoll.collective import Collective
from pycoll.schedule import REDUCE, Schedule, Transfer

#: The chunks that a core ends with in halving and starts from in doubling.
Owned = Callable[[int], range]


def one_each(core: int) -> range:
    """Chunk i belongs to core i."""
    return range(core, core + 1)


def halving(cores: Cores, owned: Owned, start: int) -> Iterator[Transfer]:
    """k steps: a core sends its partner what the partner and its successors are to own."""
    for k in range(cores.rounds):
        for i, j in cores.partners(1 << k):
            source, destination = cores.rank(i), cores.rank(j)
            for core in range(j % (2 << k), cores.working, 2 << k):
                for chunk in owned(core):
                    yield Transfer(start + k, chunk, source, destination, REDUCE, before=i < j)


def doubling(cores: Cores, owned: Owned, start: int) -> Iterator[Transfer]:
    """k steps: a core sends its partner all that it has."""
    for step, k in enumerate(reversed(range(cores.rounds))):
        for i, j in cores.partners(1 << k):
            source, destination = cores.rank(i), cores.rank(j)
            for core in range(i % (2 << k), cores.working, 2 << k):
                for chunk in owned(core):
                    yield Transfer(start + step, chunk, source, destination)


def all_reduce(size: int, *, only: int | None = None) -> Schedule:
    """Fold, halve, double, unfold: 2k steps, 2n(1-1/2^k) bytes; a fold adds 2 steps and 2n."""
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
    """Fold, halve, give odd ranks theirs: k steps, n(p-1)/p bytes; a fold adds 2 steps and n."""
    cores = Cores(size, only)
    first = cores.fold_steps
    handing = (Transfer(first + cores.rounds, odd, even, odd) for even, odd in cores.pairs())
    phases = (folding(cores, size), halving(cores, cores.blocks, first), handing)
    return finish(Collective.REDUCE_SCATTER, size, chain(*phases), only=only)


def all_gather(size: int, *, only: int | None = None) -> Schedule:
    """Recursive doubling: k steps, n(p-1)/p bytes; pairs add 2 steps and n."""
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
