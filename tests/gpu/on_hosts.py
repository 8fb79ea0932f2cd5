"""Ranks out of each other's reach: what the host carries; run as on_device.py is.

Two hosts of two ranks each, so that every operation goes over peer memory and over tcp.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import coded_sums
import numpy as np
import pytest
from device_ranks import failure_of, leave_or_lose, on_stream
from harness import ProcessWorld, ThreadWorld

import pycoll
from pycoll.compress import BF16, FP8, Block, Feedback, Sign, TopK
from pycoll.tools.bench.cuda import Stream, array, current, driver

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


CODECS = [BF16(), FP8(block=64), Block("int4", block=32), Sign(block=64)]
CODECS.append(Block("int8", block=64, rounding="stochastic", seed=3))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_hosts_sum_up_their_values_before_they_encode(world: ThreadWorld, codec: Any) -> None:
    """The bits are the oracle's, and those of arrays in host memory; residuals are, too."""
    counts = (3, 700, 9001)
    xs = [[coded_values(rank, count) for rank in range(SIZE)] for count in counts]
    expected = [coded_sums.all_reduce_between_hosts(codec, one, HOSTS) for one in xs]

    def run(comm: pycoll.Communicator) -> None:
        mine = [one[comm.rank] for one in xs]
        listed = comm.all_reduce([array(x) for x in mine], compress=codec)
        kept, other = Feedback(), Feedback()
        for x, many, right in zip(mine, listed, expected, strict=True):
            assert coded_sums.same(comm.all_reduce(array(x), compress=codec).get(), right)
            assert coded_sums.same(many.get(), right)
        x = mine[1]
        for _ in range(3):
            words = {"compress": codec, "op": "avg"}
            right = comm.all_reduce(x, feedback=kept, **words)
            found = comm.all_reduce(array(x), feedback=other, **words)
            assert coded_sums.same(found.get(), right)
            assert coded_sums.same(np.asarray(other.residual), kept.residual)
        half = (x / 1024).astype(np.float16)
        right = comm.all_reduce(half, compress=codec)
        found = comm.all_reduce(array(half), compress=codec)
        assert coded_sums.same(found.get(), right, np.float16)
        rows = x.reshape(100, 7)
        for splits in (None, [40, 0, 25, 35]):
            kept, other = Feedback(), Feedback()
            for _ in range(2):
                right = comm.reduce_scatter(rows, "avg", splits, compress=codec, feedback=kept)
                found = comm.reduce_scatter(
                    array(rows), "avg", splits, compress=codec, feedback=other
                )
                assert coded_sums.same(found.get(), right), splits
                assert coded_sums.same(np.asarray(other.residual), kept.residual), splits
        for call in (comm.all_gather, comm.broadcast):
            assert coded_sums.same(call(array(x), compress=codec).get(), call(x, compress=codec))

    ranks_of(world, run)


def test_top_k_sends_the_values_of_each_rank(world: ThreadWorld) -> None:
    """Not the sums of hosts: ranks encode their own values, and all are added in rank order."""
    xs = [coded_values(rank, 700) for rank in range(SIZE)]
    total = np.zeros(700, np.float32)
    for x in xs:
        places = np.argsort(-np.abs(x), kind="stable")[:35]
        total[places] += x[places]

    def run(comm: pycoll.Communicator) -> None:
        x = xs[comm.rank]
        feedback = Feedback()
        found = comm.all_reduce(array(x), compress=TopK(0.05), feedback=feedback)
        assert coded_sums.same(found.get(), total)
        left = x.copy()
        left[np.argsort(-np.abs(x), kind="stable")[:35]] = 0
        assert coded_sums.same(np.asarray(feedback.residual), left)

    ranks_of(world, run)


def coded_values(rank: int, count: int) -> Any:
    random = np.random.default_rng(1000 * count + rank)
    values = random.standard_normal(count) * 2.0 ** random.integers(-20, 20, count)
    return values.astype(np.float32)


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


def test_sub_communicators_within_and_across_hosts(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for color in (comm.rank // 2, comm.rank % 2):
            part = comm.split(color)
            assert part is not None
            made = part.all_reduce(array(np.full(9, comm.rank)))
            expected = part.all_reduce(np.full(9, comm.rank))
            np.testing.assert_array_equal(made.get(), expected)
            part.close()

    ranks_of(world, run)


def exchange_all(comm: pycoll.Communicator, lengths: dict[tuple[int, int], int]) -> None:
    """One group in which every pair exchanges; of a rank to itself, too."""
    ranks = range(comm.size)
    outs = {rank: array(np.zeros(lengths[rank, comm.rank])) for rank in ranks}
    with comm.group():
        for rank in ranks:
            comm.recv(outs[rank], rank, 3)
            comm.send(array(message(comm.rank, rank, lengths)), rank, 3)
    for rank in ranks:
        np.testing.assert_array_equal(outs[rank].get(), message(rank, comm.rank, lengths))


def message(source: int, dest: int, lengths: dict[tuple[int, int], int]) -> Any:
    return np.arange(lengths[source, dest]) + 1000.0 * source + 100.0 * dest


def test_messages_within_and_across_hosts(world: ThreadWorld) -> None:
    """Short ones and such as are far longer than channels, in one group."""
    draw = np.random.default_rng(8)
    pairs = [(source, dest) for source in range(SIZE) for dest in range(SIZE)]
    for most in (3, 20_000):
        lengths = {pair: int(draw.integers(0, most)) for pair in pairs}
        ranks_of(world, lambda comm, lengths=lengths: exchange_all(comm, lengths))


def test_messages_go_round_between_collectives(world: ThreadWorld) -> None:
    """One by one, so that each rank's device waits for the one before."""
    values = np.arange(9_000, dtype=np.uint16)

    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        for count in (0, 1, 9_000):
            out = array(np.zeros(count, np.int16))
            if comm.rank == 0:
                comm.send(array(values[:count]), right, 5)
                comm.recv(out, left, 5)
            else:
                comm.recv(out, left, 5)
                comm.send(out, right, 5)
            total = comm.all_reduce(out)
            np.testing.assert_array_equal(out.get(), values[:count].view(np.int16))
            np.testing.assert_array_equal(total.get(), SIZE * values[:count].view(np.int16))

    ranks_of(world, run)


def test_messages_overtake_by_tags_in_groups_and_run_next_to_streams(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 1:
            with comm.group():
                for tag in (4, 2, 9):
                    comm.send(array(np.full(tag, 10.0 * tag)), 2, tag)
            work = comm.isend(array(np.full(700, 7.0)), 2)
            array(np.full(700, -1.0))  # the same memory, if anybody let it go
            work.synchronize(30)
        elif comm.rank == 2:
            outs = {tag: array(np.zeros(tag)) for tag in (2, 4, 9)}
            for tag, out in outs.items():
                comm.recv(out, 1, tag)
            long = array(np.zeros(700))
            assert comm.irecv(long, 1).wait() is long
            for tag, out in outs.items():
                np.testing.assert_array_equal(out.get(), np.full(tag, 10.0 * tag))
            np.testing.assert_array_equal(long.get(), np.full(700, 7.0))

    ranks_of(world, run)


def test_messages_are_captured_and_replayed(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        stream = current()
        assert stream is not None
        x, out = array(np.full(600, 2.0**comm.rank)), array(np.zeros(600))
        comm.all_reduce(x)
        with stream.capture() as graph:
            with comm.group():
                comm.send(x, right)
                comm.recv(out, left)
            comm.all_reduce(out, out=x)
        for _ in range(3):
            graph.launch()
        np.testing.assert_array_equal(out.get(), np.full(600, 15.0 * 4))

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


@pytest.mark.parametrize(("tag", "length"), [(1, 4), (0, 20_000)])
def test_another_tag_or_length_is_a_mismatch(broken: ThreadWorld, tag: int, length: int) -> None:
    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(1)))
        if comm.rank == 0:
            work = comm.isend(array(np.ones(4)), 1)
            error = failure_of(lambda: (work.done(), comm.isend(array(np.ones(4)), 1)))
        else:
            error = failure_of(comm.irecv(array(np.ones(length)), 0, tag).synchronize)
            assert f"recv of {8 * length} bytes from rank 0, tag {tag}" in str(error)
        assert isinstance(error, pycoll.MismatchError), error

    ranks_of(broken, run)


def test_a_message_that_nobody_sends_is_late(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(1)))
        if comm.rank == 0:
            comm.timeout_s = 0.4
            error = failure_of(comm.irecv(array(np.ones(4)), 1, 3).synchronize)
            assert "device recv of 32 bytes from rank 1, tag 3 did not finish" in str(error)
        else:
            error = failure_of(comm.barrier)
        assert isinstance(error, pycoll.TimeoutError)
        assert error.ranks == (1,)

    ranks_of(broken, run)


def test_a_message_that_nobody_receives_is_sent_before_its_rank_leaves(
    broken: ThreadWorld,
) -> None:
    """More than its channel holds: the receiver takes it, or hears of the loss."""

    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(1)))
        if comm.rank == 1:
            comm.send(array(np.arange(30_000.0)), 0)
            comm.close()
            return
        time.sleep(0.3)
        out = array(np.zeros(30_000))
        comm.recv(out, 1)
        np.testing.assert_array_equal(out.get(), np.arange(30_000.0))
        error = failure_of(comm.irecv(out, 1).synchronize)
        assert isinstance(error, pycoll.PeerLostError)
        assert error.rank == 1

    ranks_of(broken, run)


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
        return *results, type(error).__name__, error.rank, time.monotonic() - begin < 20


def test_processes_on_two_hosts_of_which_one_is_killed() -> None:
    hosts = [str(host) for host in HOSTS]
    outcomes = ProcessWorld(SIZE, die_in_process, transports="shm,tcp", hosts=hosts).outcomes()
    assert outcomes[:3] == [(2, 10.0, 20.0, "PeerLostError", 3, True)] * 3
    assert isinstance(outcomes[3], AssertionError)
