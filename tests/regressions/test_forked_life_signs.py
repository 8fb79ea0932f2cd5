"""A forked child held the sockets whose end tells peers that its parent is dead, so that a killed
rank with a living child was missed only at the deadline of the operation."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
from harness import HANG_S, ProcessWorld, world_in_processes

import pycoll

#: The promise of ARCHITECTURE.md.
NOTICED_S = 2.0
DOOMED = 1


def linger() -> None:
    """A child that outlives its parent, until the test has ended for sure."""
    # Nobody reads what it says: the harness reads the parent's output to its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    time.sleep(HANG_S)
    os._exit(0)


def by_os() -> int:
    child = os.fork()
    if child == 0:
        linger()
    return child


def by_multiprocessing() -> int:
    worker = multiprocessing.get_context("fork").Process(target=linger)
    worker.start()
    assert worker.pid is not None
    return worker.pid


def by_c() -> int:
    """As a library in C does it, of which Python knows nothing."""
    child = int(ctypes.PyDLL(None).fork())
    if child == 0:
        linger()
    return child


WAYS: dict[str, Callable[[], int]] = {"os": by_os, "worker": by_multiprocessing, "C": by_c}


def leave_a_child_and_die(comm: pycoll.Communicator, way: str) -> tuple[float, str]:
    """What a survivor hears: after how many seconds, and its text."""
    comm.all_reduce(np.ones(4))
    part = comm.split(0)  # has descriptors of its own
    assert part is not None
    child = WAYS[way]() if comm.rank == DOOMED else 0
    children = comm.all_gather(child)
    if comm.rank == DOOMED:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for one in (comm, part):
            with pytest.raises(pycoll.PeerLostError) as caught:
                one.all_reduce(np.ones(4))
            assert caught.value.rank == DOOMED, caught.value
        return time.monotonic() - begin, str(caught.value)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(children[DOOMED]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("transports", "way"), [("shm", "worker"), ("shm", "C"), ("tcp", "os"), ("tcp", "C")]
)
def test_a_killed_rank_with_a_living_child_is_noticed(transports: str, way: str) -> None:
    world = ProcessWorld(2, leave_a_child_and_die, way, transports=transports, timeout_s=20)
    heard = world.outcomes()
    assert isinstance(heard.pop(DOOMED), AssertionError)  # it left no result
    for one in heard:
        assert isinstance(one, tuple), one
        assert one[0] < NOTICED_S, one


def sockets() -> int:
    """How many of this process's descriptors are sockets that are connected to somebody."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as sock:
            sock.getpeername()
            count += 1
    return count


def use_all_in_child(comm: pycoll.Communicator) -> None:
    mine = np.full(1 << 18, comm.rank + 1.0)
    reached = pycoll.empty(1 << 18)
    reached[:] = 3
    comm.all_reduce(mine[:4])
    before = sockets()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with pytest.raises(pycoll.ClosedError, match="belongs to the parent"):
                comm.all_reduce(mine)
            with pytest.raises(pycoll.ClosedError, match="forked from process"):
                pycoll.barrier()
            with pytest.raises(pycoll.ClosedError):
                comm.split(0)
            assert (mine == comm.rank + 1).all()
            assert (reached == 3).all()
            left = sockets()
            # Of the peers' ends, that nobody's life depends on, it may hold some.
            assert left < before, (left, before)
            opened = [os.memfd_create(f"mine {number}") for number in range(8)]
            fresh = pycoll.init(rank=0, size=1)
            assert (fresh.all_reduce(mine) == mine).all()
            pycoll.finalize()
            comm.close()
            del comm
            for number, one in enumerate(opened):  # nothing has closed the child's own
                assert f"mine {number} " in os.readlink(f"/proc/self/fd/{one}")
            left, right = pycoll.local_world(2)
            work = left.all_reduce(np.ones(9), async_op=True)
            assert right.all_reduce(np.ones(9)).sum() == work.wait().sum() == 18
            left.close(), right.close()
            status = 0
        finally:
            if status:
                import traceback

                traceback.print_exc()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for _ in range(3):
        assert comm.all_reduce(np.ones(1 << 16))[0] == comm.size


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_a_child_is_usable_and_its_parent_undisturbed(transports: str) -> None:
    world_in_processes(2, use_all_in_child, transports=transports)
