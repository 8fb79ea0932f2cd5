"""Direct exchange: whoever needs a value gets it from its source, in one hop.

    one-shot:  everybody sends all of it to everybody, everybody folds it all     1 step,  (p-1)n
    two-shot:  everybody sends chunk d to rank d; d folds it and sends it to all  2 steps, 2n(p-1)/p

Best on full-mesh media (shared memory, NVSwitch), where the number of peers costs nothing. A value
is folded where it arrives. A row folds three arriving values around the rank's own, so

* one-shot serves at most four ranks (with more, no order of folding is common to all of them);
* a sum in exact rank order needs help once more than three ranks stand in front: `in_order`.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
IJHPCA 19 (2005).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pycoll.algorithms.pattern import all_pairs, finish, from_all, to_all
from pycoll.schedule import FAN_MAX, REDUCE, TOKEN, Collective, Schedule, Transfer


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
    """All_reduce in 1 step, n(p-1) bytes, p <= 4; every rank does the same fold in rank order."""
    exchange = (
        Transfer(0, 0, source, destination, REDUCE, before=source < destination)
        for source, destination in all_pairs(size, only)
    )
    return finish(Collective.ALL_REDUCE, size, exchange, only=only)


def helper_of(chunk: int, size: int) -> int:
    """Who folds the contributions in front of rank ``chunk``'s own: itself where one row can.

    Otherwise somebody whose own value is not among them, or who is first among them.
    """
    return chunk if chunk <= FAN_MAX else (chunk + 1) % size


def temporary_of(chunk: int, size: int) -> int:
    """Where the helper keeps the fold; rank 0 begins with its own value, so it is there."""
    return chunk if helper_of(chunk, size) == 0 else size + chunk - FAN_MAX - 1


def in_order(size: int, only: int | None) -> Iterator[Transfer]:
    """Four steps: a helper folds chunk c up to rank c-1 (copies the first value, then combines);
    rank c puts that in front of its own value, then adds the higher ranks' values behind.
    """
    for chunk in range(size):
        helper, place = helper_of(chunk, size), temporary_of(chunk, size)
        near = only is None or only in (chunk, helper)
        if near and helper != chunk:
            yield Transfer(2, place, helper, chunk, REDUCE, into=chunk)
        for source in range(size) if near or only is None else (only,):
            if source < chunk != helper and source != helper:
                first = source == 0
                step = int(not first)
                yield Transfer(step, chunk, source, helper, not first, place, before=False)
            elif source != chunk and (source > chunk or helper == chunk):
                yield Transfer(3, chunk, source, chunk, REDUCE, before=source < chunk)


def reduce_scatter_in_order(size: int, *, only: int | None = None) -> Schedule:
    """Every block is the exact left fold in rank order: 4 steps beyond four ranks, else 1."""
    ordered, spare, _ = fold_in_order(size, only)
    return finish(Collective.REDUCE_SCATTER, size, ordered, temporaries=spare, only=only)


def all_reduce_in_order(size: int, *, only: int | None = None) -> Schedule:
    """The exact left fold in rank order: reduce_scatter in order, then all_gather."""
    ordered, spare, steps = fold_in_order(size, only)
    both = chain(ordered, gathering(size, only, start=steps))
    return finish(Collective.ALL_REDUCE, size, both, parts=size, temporaries=spare, only=only)


def fold_in_order(size: int, only: int | None) -> tuple[Iterator[Transfer], range, int]:
    """(transfers, what their temporaries are sized by, steps)."""
    if size <= FAN_MAX + 1:
        return scattering(size, only), range(0), 1
    return in_order(size, only), range(FAN_MAX + 1, size - 1), 4


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
