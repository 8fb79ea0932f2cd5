"""Messages of device arrays, run as on_device.py is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import failure_of, ranks_of, text_of
from harness import ThreadWorld, fresh_world

import pycoll
from pycoll import MismatchError, PeerLostError
from pycoll import TimeoutError as LateError
from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream, array

SIZE = 3


def met(size: int) -> ThreadWorld:
    """Ranks whose devices know each other."""
    world = fresh_world(size)
    ranks_of(world, lambda comm: comm.all_reduce(array(np.ones(1))).get())
    return world


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = met(SIZE)
    yield made
    made.close()


@pytest.fixture
def broken() -> Iterator[ThreadWorld]:
    made = met(2)
    yield made
    made.close()


@pytest.mark.parametrize("count", [0, 1, 37, 9_000, 300_000])
def test_a_message_goes_round(world: ThreadWorld, count: int) -> None:
    """Of bytes: the receiver may see them as another type."""
    values = np.arange(count, dtype=np.uint16)

    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        out = array(np.zeros(count, np.int16))
        if comm.rank == 0:
            comm.send(array(values), right, 5)
            assert comm.recv(out, left, 5) is out
        else:
            assert comm.recv(out, left, 5) is out
            comm.send(out, right, 5)
        np.testing.assert_array_equal(out.get(), values.view(np.int16))

    ranks_of(world, run)


def test_all_exchange_with_all_in_one_group(world: ThreadWorld) -> None:
    """Messages of several lengths, far more than channels hold."""

    def run(comm: pycoll.Communicator) -> None:
        peers = [rank for rank in range(SIZE) if rank != comm.rank]
        lengths = {rank: 60_000 * (comm.rank + rank) + 3 for rank in peers}
        outs = {rank: array(np.zeros(lengths[rank])) for rank in peers}
        with comm.group():
            for rank in peers:
                comm.send(array(np.full(lengths[rank], 10.0 * comm.rank + rank)), rank)
            works = [comm.recv(outs[rank], rank) for rank in peers]
        for rank, work in zip(peers, works, strict=True):
            assert work.wait() is outs[rank]
            expected = np.full(lengths[rank], 10.0 * rank + comm.rank)
            np.testing.assert_array_equal(outs[rank].get(), expected)

    ranks_of(world, run)


def test_many_messages_of_a_pair_are_ordered_by_tags_in_a_group(world: ThreadWorld) -> None:
    """One of both ranks need not group them, or not all."""

    def run(comm: pycoll.Communicator) -> None:
        tags = [7, 3, 3, 0]
        if comm.rank == 0:
            with comm.group():
                for place, tag in enumerate(tags):
                    comm.isend(array(np.full(place + 1, 100 * tag + place)), 1, tag)
        elif comm.rank == 1:
            outs = {place: array(np.zeros(place + 1, np.int64)) for place in range(4)}
            comm.recv(outs[3], 0, 0)
            comm.recv(outs[1], 0, 3)
            with comm.group():
                comm.recv(outs[0], 0, 7)
                comm.recv(outs[2], 0, 3)
            for place, tag in enumerate(tags):
                np.testing.assert_array_equal(
                    outs[place].get(), np.full(place + 1, 100 * tag + place)
                )

    ranks_of(world, run)


def test_a_rank_sends_to_itself_in_a_group(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        mine, other = array(np.zeros(70)), array(np.zeros(3))
        with comm.group():
            comm.recv(mine, comm.rank, 2)
            comm.send(array(np.full(3, float(comm.rank))), right)
            comm.send(array(np.arange(70.0)), comm.rank, 2)
            comm.recv(other, left)
        np.testing.assert_array_equal(mine.get(), np.arange(70))
        np.testing.assert_array_equal(other.get(), np.full(3, left))
        x = array(np.ones(2))
        assert text_of(lambda: comm.send(x, comm.rank, 4)) == (
            "the send with tag 4 is between this rank and itself, on a device: put the send and "
            "the recv in one group"
        )

        def unequal() -> None:
            with comm.group():
                comm.send(x, comm.rank)
                comm.recv(array(np.ones(1)), comm.rank)

        assert "is of 16 bytes to this rank itself, but the recv takes 8" in text_of(unequal)

    ranks_of(world, run)


def test_messages_next_to_their_streams_and_on_others(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        x = array(np.arange(50.0))
        cuda.current().synchronize()  # type: ignore[union-attr] # ranks_of made one
        for number in range(4):
            if comm.rank == 0:
                work = comm.isend(array(np.full(40, number)), 1)
                array(np.full(40, -1))  # the same memory, if anybody let it go
                assert work.wait() is None
                comm.send(x, 2, stream=other)
            elif comm.rank == 1:
                out = array(np.zeros(40, np.int64))
                assert comm.irecv(out, 0).synchronize(30) is out
                np.testing.assert_array_equal(out.get(), np.full(40, number))
            else:
                out = array(np.zeros(50))
                cuda.current().synchronize()  # type: ignore[union-attr] # as above
                comm.recv(out, 0, stream=other)
                with other:
                    np.testing.assert_array_equal(out.get(), np.arange(50))

    ranks_of(world, run)


def test_groups_of_messages_on_several_streams_and_of_the_host(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        other = Stream()
        out, host = array(np.zeros(30)), np.zeros(30)
        x = array(np.full(30, comm.rank + 1.0))
        cuda.current().synchronize()  # type: ignore[union-attr] # ranks_of made one
        with comm.group():
            comm.send(x, right, stream=other)
            comm.recv(out, left)
            comm.send(np.full(30, float(comm.rank)), right)
            total = comm.all_reduce(x)
            comm.recv(host, left)
        np.testing.assert_array_equal(out.get(), np.full(30, left + 1))
        np.testing.assert_array_equal(total.wait().get(), np.full(30, 6))
        np.testing.assert_array_equal(host, np.full(30, left))

    ranks_of(world, run)


def test_exchanges_are_captured_and_replayed(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        stream = cuda.current()
        assert stream is not None
        x, out = array(np.full(20, 2.0**comm.rank)), array(np.zeros(20))
        comm.barrier()
        with stream.capture() as graph:
            with comm.group():
                comm.send(x, right)
                comm.recv(out, left)
            comm.all_reduce(out, out=x)
        comm.barrier()
        for _ in range(3):
            graph.launch()
        np.testing.assert_array_equal(out.get(), np.full(20, 7.0 * 3))

    ranks_of(world, run)


# Bad input and failures


def test_arguments_that_are_wrong(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        assert text_of(lambda: comm.send(np.ones(2), 0, stream=Stream())) == (
            "stream is for device arrays, but x is in host memory: omit it"
        )
        assert text_of(lambda: comm.recv(np.ones(2), 0, stream=Stream())) == (
            "stream is for device arrays, but out is in host memory: omit it"
        )
        assert text_of(lambda: comm.send(array(np.ones(2)), SIZE)) == (
            f"dest is {SIZE}: expected a rank from 0 to {SIZE - 1}"
        )

    ranks_of(world, run)


@pytest.mark.parametrize(("tag", "length"), [(1, 4), (0, 60_000)])
def test_another_tag_or_length_is_a_mismatch(broken: ThreadWorld, tag: int, length: int) -> None:
    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 0:
            work = comm.isend(array(np.ones(4)), 1)
            # A short one is on its way; its sender hears of it.
            error = failure_of(lambda: (work.done(), comm.isend(array(np.ones(4)), 1)))
        else:
            error = failure_of(comm.irecv(array(np.ones(length)), 0, tag).synchronize)
            assert f"recv of {8 * length} bytes from rank 0, tag {tag}" in str(error)
        assert isinstance(error, MismatchError), error

    ranks_of(broken, run)


def test_a_message_that_nobody_sends_is_late(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 0:
            comm.timeout_s = 0.4
            error = failure_of(comm.irecv(array(np.ones(4)), 1, 3).synchronize)
            text = "device recv of 32 bytes from rank 1, tag 3 did not finish within 0.4 s"
            assert text in str(error)
        else:
            error = failure_of(comm.barrier)
        assert isinstance(error, LateError)
        assert error.ranks == (1,)

    ranks_of(broken, run)


def test_a_rank_that_leaves_sends_nothing(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 1:
            comm.close()
            return
        error = failure_of(comm.irecv(array(np.ones(4)), 1).synchronize)
        assert isinstance(error, PeerLostError)
        assert error.rank == 1

    ranks_of(broken, run)


def test_ranks_that_send_nothing_are_not_counted_as_missing() -> None:
    """Who waits for a message is not taken for one that has missed a collective of the host."""
    world = met(3)

    def run(comm: pycoll.Communicator) -> Any:
        import time

        if comm.rank == 2:
            return comm.all_reduce(np.ones(1))[0]
        for _ in itertools.repeat(None, 3):
            if comm.rank == 0:
                comm.send(array(np.ones(3)), 1)
            else:
                time.sleep(0.6)
                comm.recv(array(np.zeros(3)), 0)
        return comm.all_reduce(np.ones(1))[0]

    assert ranks_of(world, run) == [3.0] * 3
    world.close()
