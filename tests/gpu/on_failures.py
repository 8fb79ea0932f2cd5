"""What goes wrong on devices, and ranks that are processes; run as on_device.py is."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from device_ranks import failure_of, leave_or_lose, ranks_of
from harness import ProcessWorld, ThreadWorld, fresh_world, world_in_processes

import pycoll
from pycoll import MismatchError, _core
from pycoll import TimeoutError as LateError
from pycoll.tools.bench.cuda import Stream, array


@pytest.fixture
def broken() -> Iterator[ThreadWorld]:
    made = fresh_world(2)
    yield made
    made.close()


def test_a_rank_that_does_not_come_is_named_on_all_others(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.timeout_s = 0.4
            error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
            assert isinstance(error, LateError)
            assert error.ranks == (1,)
            assert "device all_reduce of 4 float64, op sum did not finish within 0.4 s" in str(
                error
            )
            assert isinstance(failure_of(lambda: comm.all_reduce(np.ones(1))), LateError)
        else:
            time.sleep(1)  # in a collective of the host it would be found elsewhere
            assert isinstance(failure_of(comm.barrier), LateError)

    ranks_of(broken, run)


def test_ranks_that_disagree(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(4)))
        comm.timeout_s = 5
        work = comm.all_reduce(array(np.ones(4)), ["sum", "max"][comm.rank], async_op=True)
        error = failure_of(work.synchronize)
        assert isinstance(error, MismatchError), error
        assert "all ranks must call alike" in str(error)

    ranks_of(broken, run)


@pytest.mark.parametrize(("on_host", "odd"), [({2}, 2), ({0, 1}, 2), ({0}, 0)])
def test_host_and_device_arrays_in_one_collective(on_host: set[int], odd: int) -> None:
    """Found long before the deadline, and told alike by all."""
    world = fresh_world(3)

    def run(comm: pycoll.Communicator) -> tuple[str, int | None, bool]:
        comm.all_reduce(array(np.ones(4)))
        begin = time.monotonic()
        if comm.rank in on_host:
            error = failure_of(lambda: comm.all_reduce(np.ones(4)))
        else:
            error = failure_of(comm.all_reduce(array(np.ones(4)), async_op=True).synchronize)
        assert isinstance(error, MismatchError), error
        return str(error), error.rank, time.monotonic() - begin < 20

    outcomes = ranks_of(world, run)
    world.close()
    for text, rank, was_quick in outcomes:
        assert was_quick
        assert rank == odd
        name, _, rest = text.removeprefix("the communicator has failed: ").partition(" (")
        assert name == f"rank {odd}"
        assert "all_reduce of 4 float64, op sum) with arrays in host memory" in rest
        assert "at device all_reduce of 4 float64, op sum" in rest
        assert "all ranks must call alike, with arrays of the host or of devices" in rest


def test_waiting_next_to_a_collective_of_the_host_is_no_mistake(broken: ThreadWorld) -> None:
    """The others wait on the host or on the device; what counts is the order of the calls."""

    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        comm.all_reduce(x)
        early = comm.all_reduce(np.ones(3), async_op=True)
        if comm.rank == 1:
            time.sleep(1.5)
        works = [comm.all_reduce(x, async_op=True) for _ in range(2)]
        barrier = comm.barrier(async_op=True)
        works.append(comm.all_reduce(x, async_op=True))
        if comm.rank == 0:
            works[1].synchronize(30)
        barrier.wait()
        np.testing.assert_array_equal(works[2].synchronize(30).get(), np.full(4, 2.0))
        early.wait()

    ranks_of(broken, run)


def test_a_rank_that_leaves_is_lost(broken: ThreadWorld) -> None:
    ranks_of(broken, leave_or_lose)


# Processes


def reduce_in_process(comm: pycoll.Communicator) -> tuple[float, float, list[str]]:
    with Stream(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = array(np.full(300, comm.rank + 1.0))
        comm.all_reduce(x, out=x)
        gathered = comm.all_gather(array(np.full(comm.rank + 1, comm.rank)))
        told = [str(one.message) for one in caught]
        return float(x.get()[0]), float(gathered.get().sum()), told


def test_processes_share_a_device() -> None:
    assert world_in_processes(2, reduce_in_process) == [(3.0, 2.0, [])] * 2


def test_processes_that_get_no_ipc_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors do instead, and without those the host. The tests' own driver listens to this."""
    fake = "Fake" in _core.device_summary()
    monkeypatch.setenv("FAKE_CUDA_IPC", "0")
    assert world_in_processes(2, reduce_in_process) == [(3.0, 2.0, [])] * 2
    monkeypatch.setenv("FAKE_CUDA_DESCRIPTORS", "0")
    outcomes = world_in_processes(2, reduce_in_process)
    assert [outcome[:2] for outcome in outcomes] == [(3.0, 2.0)] * 2
    (_, _, told), (_, _, nothing) = outcomes
    assert not nothing
    assert len(told) == int(fake)
    for line in told:
        assert "do not share memory: the CUDA driver cannot share memory of devices" in line
        assert "CUDA_ERROR_NOT_SUPPORTED" in line
        assert line.endswith("the host carries what they send to each other, more slowly")


def die_in_process(comm: pycoll.Communicator) -> tuple[str, int | None, bool]:
    with Stream():
        x = array(np.ones(30))
        comm.all_reduce(x, out=x)
        x.get()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
        return type(error).__name__, error.rank, time.monotonic() - begin < 20


def test_a_process_that_is_killed_is_lost() -> None:
    outcomes = ProcessWorld(2, die_in_process).outcomes()
    assert outcomes[0] == ("PeerLostError", 1, True)
    assert isinstance(outcomes[1], AssertionError)
