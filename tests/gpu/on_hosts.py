"""Ranks out of each other's reach: what the host carries; run as on_device.py is.

Two hosts of two ranks each, so that every operation goes over peer memory and over tcp.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import failure_of, leave_or_lose, on_stream
from harness import ProcessWorld, ThreadWorld

import pycoll
from pycoll.bench.cuda import Stream, array, current, driver

SIZE = 4
HOSTS = (0, 0, 1, 1)


def stream_of(comm: pycoll.Communicator) -> Stream:
    """On a device of its own within its host, where there are two."""
    return Stream(comm.local_rank % driver().count())


def ranks_of(world: ThreadWorld, function: Callable[[pycoll.Communicator], Any]) -> list[Any]:
    return world.run(on_stream(function, stream_of))


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = ThreadWorld(SIZE, "shm,tcp", HOSTS)
    yield made
    made.close()


@pytest.fixture
def broken() -> Iterator[ThreadWorld]:
    made = ThreadWorld(2, "shm,tcp", (0, 1))
    yield made
    made.close()


def test_every_collective(world: ThreadWorld) -> None:
    lengths = np.random.default_rng(3).integers(1, 400, size=4)

    def run(comm: pycoll.Communicator) -> None:
        assert (comm.local_size, comm.cross_size) == (2, 2)
        for length in lengths:
            mine = np.random.default_rng(comm.rank).normal(size=(4 * length, 2))
            rows = mine[: comm.rank + 1]
            calls: list[tuple[Callable[[Any], Any], Any]] = [
                (comm.all_reduce, mine),
                (lambda x: comm.all_reduce(x, "max"), mine),
                (lambda x: comm.all_reduce(x, algorithm="hierarchical"), mine),
                (lambda x: comm.broadcast(x, 1), mine),
                (lambda x: comm.reduce(x, 2), mine),
                (comm.reduce_scatter, mine),
                (comm.all_gather, rows),
                (lambda x: comm.gather(x, 3), rows),
                (lambda x: comm.scatter(x, 1), mine),
                (comm.all_to_all, mine),
                (comm.scan, mine),
                (comm.exscan, mine),
            ]
            for call, values in calls:
                made, expected = call(array(values)), call(values)
                if expected is None:
                    assert made is None
                else:
                    assert made.get().tobytes() == expected.tobytes()

    ranks_of(world, run)


def test_long_messages(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        values = np.arange(100_000, dtype=np.float32) + comm.rank
        made = comm.all_reduce(array(values), "avg")
        np.testing.assert_array_equal(made.get(), np.arange(100_000, dtype=np.float32) + 1.5)

    ranks_of(world, run)


def test_graphs_are_replayed_between_calls(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream = current()
        assert stream is not None
        x, y = array(np.ones(20)), array(np.zeros(20))
        comm.all_reduce([x], out=[x])
        with stream.capture() as graph:
            comm.all_reduce(x, out=x)
            comm.all_reduce(x, out=y, async_op=True).wait()
            comm.broadcast(y, comm.size - 1, out=y)
        factor = 4.0
        for _ in range(3):
            graph.launch()
            comm.all_reduce(x, out=x)
            factor *= 16
        np.testing.assert_array_equal(x.get(), np.full(20, factor))
        np.testing.assert_array_equal(y.get(), np.full(20, factor))

    ranks_of(world, run)


def test_parts_of_a_communicator_within_and_across_hosts(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for color in (comm.rank // 2, comm.rank % 2):
            part = comm.split(color)
            assert part is not None
            made = part.all_reduce(array(np.full(9, comm.rank)))
            expected = part.all_reduce(np.full(9, comm.rank))
            np.testing.assert_array_equal(made.get(), expected)
            part.close()

    ranks_of(world, run)


# What goes wrong


def test_a_rank_that_does_not_come_is_named(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        comm.all_reduce(x)
        if comm.rank == 1:
            time.sleep(1)
            assert isinstance(failure_of(comm.barrier), pycoll.TimeoutError)
            return
        comm.timeout_s = 0.4
        error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
        assert isinstance(error, pycoll.TimeoutError)
        assert error.ranks == (1,)

    ranks_of(broken, run)


def test_ranks_that_disagree(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(4)))
        comm.timeout_s = 5
        work = comm.all_reduce(array(np.ones(4)), ["sum", "max"][comm.rank], async_op=True)
        error = failure_of(work.synchronize)
        assert isinstance(error, pycoll.MismatchError), error

    ranks_of(broken, run)


def test_a_rank_that_leaves_is_lost(broken: ThreadWorld) -> None:
    ranks_of(broken, leave_or_lose)


# Processes


def die_in_process(comm: pycoll.Communicator) -> tuple[int, float, float, str, int | None, bool]:
    with stream_of(comm):
        x = array(np.full(3000, comm.rank + 1.0))
        comm.all_reduce(x, out=x)
        gathered = comm.all_gather(array(np.full(comm.rank + 1, comm.rank)))
        results = comm.local_size, float(x.get()[0]), float(gathered.get().sum())
        comm.barrier()
        if comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
        return *results, type(error).__name__, error.rank, time.monotonic() - begin < 5


def test_processes_on_two_hosts_of_which_one_is_killed() -> None:
    hosts = [str(host) for host in HOSTS]
    outcomes = ProcessWorld(SIZE, die_in_process, transports="shm,tcp", hosts=hosts).outcomes()
    assert outcomes[:3] == [(2, 10.0, 20.0, "PeerLostError", 3, True)] * 3
    assert isinstance(outcomes[3], AssertionError)
