"""Messages before the ranks' devices have met, which the hosts carry; run as on_device.py is."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from device_ranks import failure_of, ranks_of, text_of
from harness import ThreadWorld, fresh_world
from jax_stand_in import ArrayImpl
from on_layouts import Strided

import pycoll
from pycoll import MismatchError
from pycoll.tools.bench.cuda import Stream, array, current

SIZE = 3


@pytest.fixture
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


@pytest.mark.parametrize("takes_part", [True, False])
def test_messages_go_round_first_of_all(world: ThreadWorld, takes_part: bool) -> None:
    """Also while another rank is in a collective of the host."""
    members = SIZE if takes_part else SIZE - 1

    def run(comm: pycoll.Communicator) -> None:
        for count in (0, 1, 100_000) if comm.rank < members else ():
            right, left = (comm.rank + 1) % members, (comm.rank - 1) % members
            out = array(np.zeros(count, np.int16))
            x = array(np.arange(count, dtype=np.int16)) if comm.rank == 0 else out
            if comm.rank == 0:
                comm.send(x, right, 5)
            assert comm.recv(out, left, 5) is out
            if comm.rank != 0:
                comm.send(x, right, 5)
            np.testing.assert_array_equal(out.get(), np.arange(count, dtype=np.int16))
        assert comm.all_reduce(np.ones(1))[0] == SIZE

    ranks_of(world, run)


def test_groups_works_and_streams(world: ThreadWorld) -> None:
    """In addition to messages of the host with the same tags, which are others."""

    def run(comm: pycoll.Communicator) -> None:
        right, left = (comm.rank + 1) % SIZE, (comm.rank - 1) % SIZE
        other = Stream()
        out, mine, host = array(np.zeros(40)), array(np.zeros(7)), np.zeros(40)
        x = array(np.full(40, comm.rank + 1.0))
        cuda_done()
        with comm.group():
            comm.recv(host, left)
            comm.recv(out, left)
            comm.recv(mine, comm.rank, 2)
            comm.send(array(np.arange(7.0)), comm.rank, 2)
            comm.send(x, right, stream=other)
            comm.send(np.full(40, 9.0), right)
        np.testing.assert_array_equal(host, np.full(40, 9.0))
        np.testing.assert_array_equal(out.get(), np.full(40, left + 1.0))
        np.testing.assert_array_equal(mine.get(), np.arange(7))
        work = comm.isend(array(np.full(40, 5.0 + comm.rank)), right, 1)
        array(np.full(40, -1.0))  # the same memory, if anybody let it go
        with other:
            late = array(np.zeros(40))
        got = comm.irecv(late, left, 1, stream=other)
        assert got.wait() is late
        assert work.synchronize(30) is None
        with other:
            np.testing.assert_array_equal(late.get(), np.full(40, 5.0 + left))
        assert got.synchronize(30) is late
        assert got.done()

    ranks_of(world, run)


def cuda_done() -> None:
    stream = current()
    assert stream is not None
    stream.synchronize()


def test_strided_arrays_and_such_as_others_order(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        values = np.arange(15, dtype=np.float32).reshape(5, 3)
        out, dense = Strided(np.zeros_like(values)), array(np.zeros_like(values))
        if comm.rank == 0:
            x = Strided(values)
            cuda_done()
            comm.send(x, 1)
            comm.send(x, 1, stream=other)
            comm.send(ArrayImpl(values), 2)
        elif comm.rank == 1:
            comm.recv(dense, 0)
            cuda_done()
            comm.recv(out, 0, stream=other)
            np.testing.assert_array_equal(dense.get(), values)
            with other:
                np.testing.assert_array_equal(out.get(), values)
        else:
            comm.recv(dense, 0)
            np.testing.assert_array_equal(dense.get(), values)

    ranks_of(world, run)


@pytest.mark.parametrize("sender_is_late", [True, False])
def test_one_end_begins_before_devices_meet_and_the_other_behind(
    world: ThreadWorld, sender_is_late: bool
) -> None:
    """Both ends agree which messages go through host staging, so each finds its other end."""

    def run(comm: pycoll.Communicator) -> None:
        outs = [array(np.zeros(6)) for _ in range(4)]
        works = []

        def go(first: int, last: int) -> None:
            for number in range(first, last):
                if comm.rank == 0:
                    works.append(comm.isend(array(np.full(6, 1.0 + number)), 1, number))
                elif comm.rank == 1:
                    works.append(comm.irecv(outs[number], 0, number))

        late = sender_is_late == (comm.rank == 0)
        go(0, 1 if late else 3)
        comm.all_reduce(array(np.ones(3)))
        go(1 if late else 3, 4)
        for work in works:
            work.synchronize(30)
        if comm.rank == 1:
            for number, out in enumerate(outs):
                np.testing.assert_array_equal(out.get(), np.full(6, 1.0 + number))
        # From now on no message goes through host staging, which a capture excludes.
        comm.barrier()
        stream = current()
        assert stream is not None
        if comm.rank < 2:
            with stream.capture() as graph:
                comm.send(outs[0], 1) if comm.rank == 0 else comm.recv(outs[0], 0)
            graph.launch()
            stream.synchronize()

    ranks_of(world, run)


def test_what_cannot_be_is_refused_before_anything_is_sent(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream = current()
        assert stream is not None
        x = array(np.ones(2))
        texts = []
        with stream.capture():
            texts.append(text_of(lambda: comm.send(x, (comm.rank + 1) % SIZE)))
        assert "devices have not met yet, so that the host carries messages" in texts[0]
        assert "call a collective on device arrays before the capture begins" in texts[0]
        assert text_of(lambda: comm.send(x, comm.rank, 4)) == (
            "the send with tag 4 is between this rank and itself, on a device: put the send and "
            "the recv in one group"
        )
        np.testing.assert_array_equal(comm.all_reduce(x).get(), np.full(2, SIZE))

    ranks_of(world, run)


def test_another_length_is_a_mismatch(world: ThreadWorld) -> None:
    """It ends the communicator, since a recv has returned when that is found."""

    def run(comm: pycoll.Communicator) -> None:
        stream = current()
        assert stream is not None
        if comm.rank == 1:
            work = comm.irecv(array(np.ones(5)), 0, 3)
            work.wait()
        comm.barrier()  # a wait would tell of a failure that is known already
        if comm.rank == 0:
            comm.send(array(np.ones(4)), 1, 3)
        elif comm.rank == 1:
            error = failure_of(work.synchronize)
            assert "with tag 3 of device arrays: the message has 32 bytes" in str(error), error
            assert isinstance(failure_of(lambda: comm.send(array(np.ones(2)), 2)), MismatchError)
        stream.synchronize()
        error = failure_of(lambda: comm.all_reduce(array(np.ones(2))))
        assert isinstance(error, MismatchError)
        assert error.rank == 0

    ranks_of(world, run)


def test_a_rank_that_leaves_has_sent(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 0:
            comm.send(array(np.arange(200_000.0)), 1)
            comm.close()
        elif comm.rank == 1:
            time.sleep(0.2)
            out = array(np.zeros(200_000))
            comm.recv(out, 0)
            np.testing.assert_array_equal(out.get(), np.arange(200_000.0))
            assert isinstance(failure_of(comm.irecv(out, 0).synchronize), pycoll.PeerLostError)

    ranks_of(world, run)
