"""Arrays from pycoll.empty: peers on this host read and write them where they lie.

Nobody can tell by the results.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_processes, world_in_threads

import pycoll

Comm = pycoll.Communicator
#: Bytes: too few for a zero-copy read, one segment, several tiles. 4 ranks of float32 divide each.
SIZES = (4_096, 48_000, 3_000_000)


def filled(comm: Comm, count: int, salt: int) -> tuple[Any, list[Any]]:
    """This rank's array in reachable memory, and what every rank has."""
    every = [
        (np.arange(count) % 251 + 3 * rank + salt).astype(np.float32) for rank in range(comm.size)
    ]
    mine = pycoll.empty(count)
    mine[:] = every[comm.rank]
    return mine, every


def check_collectives(comm: Comm) -> None:
    for salt, nbytes in enumerate(SIZES * 2):  # the first long message of a pair is a copy
        count = nbytes // 4 // comm.size * comm.size
        own = slice(count // comm.size * comm.rank, count // comm.size * (comm.rank + 1))
        mine, every = filled(comm, count, salt)
        total, kept = sum(every), mine.copy()
        assert np.array_equal(comm.all_reduce(mine), total)
        assert np.array_equal(comm.reduce_scatter(mine), total[own])
        assert np.array_equal(comm.all_gather(mine), np.concatenate(every))
        sent = np.concatenate([one[own] for one in every])
        assert np.array_equal(comm.all_to_all(mine), sent)
        assert np.array_equal(comm.scan(mine), sum(every[: comm.rank + 1]))
        assert np.array_equal(mine, kept)
        for algorithm in ("direct", "ring", "recursive_doubling", "tree"):
            mine[:] = kept
            assert comm.all_reduce(mine, out=mine, algorithm=algorithm) is mine
            assert np.array_equal(mine, total), (algorithm, nbytes)
        root = salt % comm.size
        mine[:] = kept
        found = comm.reduce(mine, root)
        assert comm.rank != root or np.array_equal(found, total)
        comm.broadcast(mine, root, out=mine)
        assert np.array_equal(mine, every[root])


def check_results_there(comm: Comm) -> None:
    for salt, nbytes in enumerate(SIZES * 2):
        count = nbytes // 4 // comm.size * comm.size
        mine, every = filled(comm, count, salt)
        total, kept = sum(every), mine.copy()
        part = count // comm.size
        own = slice(part * comm.rank, part * (comm.rank + 1))
        out = pycoll.empty(count)
        for algorithm in (None, "direct", "ring", "tree", "one_shot"):
            out[:] = -1
            assert np.array_equal(comm.all_reduce(mine, out=out, algorithm=algorithm), total)
        every_out = pycoll.empty(count * comm.size)
        comm.all_gather(mine, out=every_out)
        assert np.array_equal(every_out, np.concatenate(every))
        comm.all_to_all(mine, out=out)
        assert np.array_equal(out, np.concatenate([one[own] for one in every]))
        root = salt % comm.size
        comm.broadcast(mine, root, out=out)
        assert np.array_equal(out, every[root])
        comm.gather(mine, root, out=every_out if comm.rank == root else None)
        assert comm.rank != root or np.array_equal(every_out, np.concatenate(every))
        comm.scatter(mine if comm.rank == root else None, root, out=out[:part])
        assert np.array_equal(out[:part], every[root][own])
        assert np.array_equal(mine, kept)


def check_one_there_one_elsewhere(comm: Comm) -> None:
    """Ranks need not have the same kind of memory."""
    for turn in range(6):
        mine, every = filled(comm, 300_000, turn)
        if turn >> comm.rank & 1:
            mine = mine.copy()
        comm.all_reduce(mine, out=mine, op="max" if turn % 2 else "sum")
        assert np.array_equal(mine, np.max(every, axis=0) if turn % 2 else sum(every))


def check_arrays_that_go_at_once(comm: Comm) -> None:
    """When a call returns, nobody reads its array any more: it may change or end."""
    for turn in range(30):
        mine, every = filled(comm, 20_000, turn)
        work = comm.all_reduce(mine, out=mine, async_op=True) if turn % 2 else None
        found = work.wait() if work is not None else comm.all_gather(mine)
        right = sum(every) if turn % 2 else np.concatenate(every)
        kept = found.copy()
        mine[:] = -1
        del mine, work
        assert np.array_equal(kept, right), turn


def check_many_at_once(comm: Comm) -> None:
    arrays = [filled(comm, count, salt) for salt, count in enumerate((5_000, 300_000, 7))]
    comm.all_reduce([mine for mine, _ in arrays], out=[mine for mine, _ in arrays])
    assert all(np.array_equal(mine, sum(every)) for mine, every in arrays)


CHECKS = (
    check_collectives,
    check_results_there,
    check_one_there_one_elsewhere,
    check_arrays_that_go_at_once,
    check_many_at_once,
)


@pytest.mark.parametrize("check", CHECKS)
def test_on_threads(check: Any) -> None:
    for size in (1, 2, 4):
        world_in_threads(size).run(check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("size", [2, 3])
def test_on_processes(check: Any, size: int) -> None:
    world_in_processes(size, check)


def test_memory_goes_with_the_last_array() -> None:
    def maps() -> int:
        with open("/proc/self/maps") as file:
            return sum("memfd:pycoll" in line for line in file)

    before = maps(), len(os.listdir("/proc/self/fd"))
    world = fresh_world(2, "shm")
    world.run(check_arrays_that_go_at_once)
    world.close()
    del world
    assert (maps(), len(os.listdir("/proc/self/fd"))) == before


def test_a_forked_child_leaves_its_parents_arrays_alone() -> None:
    mine = pycoll.empty(100_000)
    mine[:] = 5
    other = pycoll.empty(100_000)
    child = os.fork()
    if child == 0:
        del other
        fresh = pycoll.empty(100_000)
        fresh[:] = 6
        os._exit(0 if mine[0] == 5 and fresh[-1] == 6 else 1)
    other[:] = 7
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.min() == mine.max() == 5
    assert other.min() == other.max() == 7
