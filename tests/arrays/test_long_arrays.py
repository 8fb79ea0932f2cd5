"""Arrays that fit in no core's caches, which are copied and stored in ways of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from harness import world_in_threads

import pycoll

Comm = pycoll.Communicator

#: Elements of 4 bytes: 9 MiB, and a last segment of odd length.
COUNT = 9 * (1 << 18) + 13


def made(rank: int) -> np.ndarray:
    """What differs by element and rank; so small that sums of some ranks stay exact."""
    return ((np.arange(COUNT, dtype=np.int64) * 2654435761 + rank * 40503) % 65521).astype(np.int32)


def total(size: int) -> np.ndarray:
    return sum((made(rank) for rank in range(size)), np.zeros(COUNT, np.int32))


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("size", [2, 3, 6])
def test_long_sums_are_exact_in_place_and_apart(size: int, empty: bool) -> None:
    expected = total(size)

    def rank(comm: Comm) -> None:
        x = pycoll.empty(COUNT, np.int32) if empty else np.empty(COUNT, np.int32)
        for turn in range(2):
            x[:] = made(comm.rank)
            out = x if turn == 0 else np.zeros(COUNT, np.int32)
            assert comm.all_reduce(x, out=out) is out
            assert np.array_equal(out, expected)
        assert np.array_equal(x, made(comm.rank))

    world_in_threads(size).run(rank)


def broadcast(comm: Comm) -> None:
    x = made(comm.rank)
    comm.broadcast(x, root=comm.size - 1, out=x)
    assert np.array_equal(x, made(comm.size - 1))


def all_gather(comm: Comm) -> None:
    out = np.zeros(comm.size * COUNT, np.int32)
    comm.all_gather(made(comm.rank), out=out)
    for peer, block in enumerate(np.split(out, comm.size)):
        assert np.array_equal(block, made(peer))


def reduce_scatter(comm: Comm) -> None:
    whole = COUNT // comm.size * comm.size
    out = np.zeros(whole // comm.size, np.int32)
    comm.reduce_scatter(made(comm.rank)[:whole], out=out)
    assert np.array_equal(out, np.split(total(comm.size)[:whole], comm.size)[comm.rank])


def all_to_all(comm: Comm) -> None:
    whole = COUNT // comm.size * comm.size
    out = np.zeros(whole, np.int32)
    comm.all_to_all(made(comm.rank)[:whole], out=out)
    blocks = [np.split(made(peer)[:whole], comm.size)[comm.rank] for peer in range(comm.size)]
    assert np.array_equal(out, np.concatenate(blocks))


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("check", [broadcast, all_gather, reduce_scatter, all_to_all])
def test_long_blocks_arrive(size: int, check: Callable[[Comm], None]) -> None:
    def rank(comm: Comm) -> None:
        for _ in range(2):
            check(comm)

    world_in_threads(size).run(rank)
