"""What goes wrong on devices, and ranks that are processes; run as on_device.py is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_of
from harness import ProcessWorld, ThreadWorld, fresh_world, world_in_processes

import pycoll
from pycoll import MismatchError, PycollError
from pycoll import TimeoutError as LateError
from pycoll.bench.cuda import Stream, array


@pytest.fixture
def broken() -> Iterator[ThreadWorld]:
    made = fresh_world(2)
    yield made
    made.close()


def failure_of(call: Callable[[], Any], seconds: float = 10) -> PycollError:
    """What a call raises, sooner or later."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            call()
        except PycollError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing is raised")


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


def test_a_rank_that_leaves_is_lost(broken: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        comm.all_reduce(x)
        if comm.rank == 1:
            comm.close()
            return
        error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
        assert isinstance(error, pycoll.PeerLostError)
        assert error.rank == 1

    ranks_of(broken, run)


# Processes


def reduce_in_process(comm: pycoll.Communicator) -> list[float]:
    with Stream():
        x = array(np.full(300, comm.rank + 1.0))
        comm.all_reduce(x, out=x)
        gathered = comm.all_gather(array(np.full(comm.rank + 1, comm.rank)))
        return [float(x.get()[0]), float(gathered.get().sum())]


def test_processes_share_a_device_by_ipc() -> None:
    assert world_in_processes(2, reduce_in_process) == [[3.0, 2.0]] * 2


def die_in_process(comm: pycoll.Communicator) -> tuple[str, int | None, bool]:
    with Stream():
        x = array(np.ones(30))
        comm.all_reduce(x, out=x)
        x.get()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
        return type(error).__name__, error.rank, time.monotonic() - begin < 5


def test_a_process_that_is_killed_is_lost() -> None:
    outcomes = ProcessWorld(2, die_in_process).outcomes()
    assert outcomes[0] == ("PeerLostError", 1, True)
    assert isinstance(outcomes[1], AssertionError)
