"""Messages that hosts carry are in the order of streams, and no host waits; run as on_device.py is.

Streams are held up by a gate that only the test opens. Where a host waited for its stream, or for a
message, these tests would hang.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from device_ranks import Gate, failure_of, on_stream, ranks_of, text_of
from harness import ProcessWorld, ThreadWorld, fresh_world

import pycoll
from pycoll import TimeoutError as LateError
from pycoll.device import host_staging
from pycoll.tools.bench.cuda import Array, Stream, array, current


@pytest.fixture
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(2)
    ranks_of(made, load_kernels)
    yield made
    made.close()


def load_kernels(comm: pycoll.Communicator) -> None:
    """A driver that loads kernels waits for what streams hold, and tests hold streams up."""
    x = array(np.zeros(1))
    if comm.rank == 0:
        comm.send(x, 1, 99)
    else:
        comm.recv(x, 0, 99)
    x.get()


def mine() -> Stream:
    """The stream of this rank."""
    stream = current()
    assert stream is not None
    return stream


def check(out: Array, value: float) -> None:
    np.testing.assert_array_equal(out.get(), np.full(out.shape, value))


def test_a_send_returns_while_its_stream_is_held_up(world: ThreadWorld) -> None:
    """What is sent is what the stream makes, not what is there before or behind."""
    gate = Gate()

    def run(comm: pycoll.Communicator) -> None:
        x, out = array(np.zeros(5000)), array(np.zeros(5000))
        if comm.rank == 0:
            gate.hold(mine())
            x.put(np.full(5000, 1.0))
            comm.send(x, 1)
            x.put(np.full(5000, 2.0))
            work = comm.isend(x, 1, 7)
            assert work.wait() is None
            x.put(np.full(5000, 3.0))
            assert not work.done()
            comm.barrier()
            gate.open()
            assert work.synchronize(30) is None
        else:
            comm.recv(out, 0)
            late = array(np.zeros(5000))
            comm.recv(late, 0, 7)
            comm.barrier()
            check(out, 1.0)
            check(late, 2.0)

    ranks_of(world, run)


def test_a_recv_returns_before_its_message_exists(world: ThreadWorld) -> None:
    """Only the stream waits, and of irecv only that which waits for the Work."""

    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        out, on_stream = array(np.zeros(70)), array(np.zeros(70))
        mine().synchronize()
        if comm.rank == 1:
            comm.recv(out, 0)
            with other:
                work = comm.irecv(on_stream, 0, 1)
                check(array(np.full(3, 5.0)), 5.0)  # other goes on
            assert not work.done()
            comm.barrier()
            check(out, 4.0)
            assert work.wait() is on_stream
            check(on_stream, 6.0)
            assert work.synchronize(30) is on_stream
        else:
            comm.barrier()
            comm.send(array(np.full(70, 4.0)), 1)
            comm.send(array(np.full(70, 6.0)), 1, 1)

    ranks_of(world, run)


def test_a_pair_and_tag_keep_their_order_and_hold_up_no_other(world: ThreadWorld) -> None:
    gate = Gate()

    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        if comm.rank == 0:
            arrays = [array(np.full(40, 1.0 + number)) for number in range(3)]
            mine().synchronize()
            gate.hold(mine())
            comm.send(arrays[0], 1)
            comm.send(arrays[1], 1, stream=other)
            comm.send(arrays[2], 1, 1, stream=other)
            comm.barrier()
            gate.open()
        else:
            outs = [array(np.zeros(40)) for _ in range(3)]
            works = [comm.irecv(outs[number], 0) for number in range(2)]
            check(comm.recv(outs[2], 0, 1), 3.0)
            assert not works[1].done()
            comm.barrier()
            works[1].wait()
            check(outs[1], 2.0)
            works[0].wait()
            check(outs[0], 1.0)

    ranks_of(world, run)


def test_messages_are_under_way_while_devices_meet(world: ThreadWorld) -> None:
    gate = Gate()

    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        x, out = array(np.full(90, 1.0)), array(np.zeros(90))
        mine().synchronize()
        if comm.rank == 0:
            gate.hold(other)
            comm.send(x, 1, stream=other)
        else:
            work = comm.irecv(out, 0, stream=other)
        check(comm.all_reduce(array(np.ones(4))), 2.0)
        if comm.rank == 0:
            comm.send(array(np.full(90, 2.0)), 1)
            comm.barrier()
            gate.open()
        else:
            check(comm.recv(array(np.zeros(90)), 0), 2.0)
            assert not work.done()
            comm.barrier()
            assert work.synchronize(30) is out
            check(out, 1.0)
        check(comm.all_reduce(array(np.ones(4))), 2.0)

    ranks_of(world, run)


def test_the_deadline_counts_from_when_the_stream_is_there(world: ThreadWorld) -> None:
    """Then the stream goes on, and all later calls tell what happened."""
    gate = Gate()

    def run(comm: pycoll.Communicator) -> None:
        comm.timeout_s = 0.4
        if comm.rank == 0:
            gate.hold(mine())
            work = comm.irecv(array(np.ones(4)), 1, 3)
            work.wait()
            time.sleep(0.7)
            assert comm.failure is None
            gate.open()
            mine().synchronize()
            error = failure_of(work.synchronize)
            assert isinstance(error, LateError)
            assert (
                "recv from rank 1 with tag 3 of device arrays did not finish within 0.4 s"
                in str(error)
            )
            for call in (lambda: comm.send(array(np.ones(4)), 1), comm.barrier):
                assert isinstance(failure_of(call), LateError)
        else:
            comm.timeout_s = 30
            error = failure_of(comm.barrier)
            assert isinstance(error, LateError)
        assert error.ranks == (1,)

    ranks_of(world, run)


def test_streams_in_which_ranks_would_wait_for_each_other(world: ThreadWorld) -> None:
    """And such as are captured."""
    streams: list[Stream] = []

    def run(comm: pycoll.Communicator) -> None:
        if comm.rank == 0:
            streams.append(mine())
            work = comm.isend(array(np.ones(4)), 1)
        comm.barrier()
        if comm.rank == 1:
            out = array(np.zeros(4))
            text = text_of(lambda: comm.recv(out, 0, stream=streams[0]))
            assert "ranks 1 and 0 use the same stream" in text
            text = text_of(lambda: comm.recv(out, 0, stream=1))
            assert "ranks 1 and 0 are threads on one device" in text
            work = comm.irecv(out, 0)
            with mine().capture():
                text = text_of(work.wait)
            assert "began before the capture cannot be waited for in it" in text
        work.synchronize(30)

    ranks_of(world, run)


def lose_in_process(comm: pycoll.Communicator) -> tuple[str, int | None, bool]:
    with Stream():
        x, out = array(np.ones(30)), array(np.zeros(30))
        if comm.rank == 1:
            comm.send(x, 0)
            comm.recv(out, 0)
            mine().synchronize()
            os.kill(os.getpid(), signal.SIGKILL)
        comm.send(x, 1)
        comm.recv(out, 1)
        begin = time.monotonic()
        work = comm.irecv(out, 1)
        comm.recv(x, 1)
        mine().synchronize()  # the stream goes on
        error = failure_of(work.synchronize)
        assert failure_of(lambda: comm.send(x, 1)).rank == 1
        return type(error).__name__, error.rank, time.monotonic() - begin < 20


def test_a_process_that_is_killed_is_lost() -> None:
    outcomes = ProcessWorld(2, lose_in_process).outcomes()
    assert outcomes[0] == ("PeerLostError", 1, True)
    assert isinstance(outcomes[1], AssertionError)


def test_closing_with_messages_under_way(
    world: ThreadWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail, and streams go on; of what a stream is still to copy the memory is left alone."""
    monkeypatch.setattr(host_staging, "_LEAVES_WITHIN_S", 0.1)
    gate = Gate()
    has_closed = threading.Event()

    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        works = []
        if comm.rank == 0:
            gate.hold(other)
            works.append(comm.isend(array(np.ones(9)), 1, stream=other))
            works.append(comm.irecv(array(np.ones(9)), 1))
            comm.recv(array(np.ones(9)), 1)
        comm.barrier()
        if comm.rank == 1:
            has_closed.wait(30)
        comm.close()
        has_closed.set()
        mine().synchronize()
        for work in works:
            assert isinstance(failure_of(work.synchronize), pycoll.ClosedError)
        with pytest.raises(pycoll.ClosedError):
            comm.send(array(np.ones(9)), 1 - comm.rank)
        gate.open()
        other.synchronize()

    ranks_of(world, run)


def counts() -> tuple[int, int]:
    """Threads and descriptors of this process, but for what is the tests' driver's memory."""
    gc.collect()
    threads = len(list(Path("/proc/self/task").iterdir()))
    names = [os.readlink(f"/proc/self/fd/{name}") for name in range(1000) if is_open(name)]
    return threads, sum("fake-cuda" not in name for name in names)


def grown(known: tuple[int, int]) -> str:
    """What there is more of than was known; nothing where there is no more."""
    more = [now - then for now, then in zip(counts(), known, strict=True)]
    return f"{more} threads and descriptors are left" if max(more) > 0 else ""


def is_open(descriptor: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def exchange(comm: pycoll.Communicator) -> None:
    other = Stream()
    for count in (1, 3000, 300_000):
        works = [comm.isend(array(np.full(count, 2.0)), 1 - comm.rank, stream=other)]
        works.append(comm.irecv(array(np.zeros(count)), 1 - comm.rank))
        for work in works:
            work.wait()
        works[1].synchronize(30)


@pytest.mark.parametrize("closes", [True, False])
def test_nothing_is_left(closes: bool) -> None:
    """Of a communicator that is closed, and of one that is let go."""

    def once() -> None:
        world = fresh_world(2)
        ranks_of(world, exchange)
        if closes:
            world.close()
        world.communicators.clear()
        world._pool.shutdown()

    once()
    known = counts()
    for _ in range(3):
        once()
    deadline = time.monotonic() + 10
    while grown(known) and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that was joined leaves /proc a moment later
    assert not grown(known)


def test_a_forked_child_is_told_and_leaves(world: ThreadWorld) -> None:
    """It has no driver: nothing here may call that."""
    gate = Gate()
    left, right = world.communicators

    def begin(comm: pycoll.Communicator) -> pycoll.Work:
        if comm.rank == 0:
            gate.hold(mine())
            return comm.isend(array(np.full(6, 3.0)), 1)
        return comm.irecv(array(np.zeros(6)), 0)

    works = world.run(on_stream(begin))
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(pycoll.ClosedError, match="belongs to the parent process"):
                works[0].done()
            left.close()
            del left, right, world
            works.clear()
            gc.collect()
            os._exit(7)
        finally:
            os._exit(1)
    gate.open()
    limit = time.monotonic() + 20
    status = (0, 0)
    while status[0] == 0 and time.monotonic() < limit:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if status[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status[1]) == 7
    assert [work.synchronize(30) is not None for work in works] == [False, True]
