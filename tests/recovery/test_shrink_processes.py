"""Processes shrink their communicator after one of them was killed, stopped, or on demand."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ProcessWorld, fresh_world, succeeded, world_in_processes

import pycoll

#: The promise is 3 s; a loaded machine may take longer to run the processes at all.
SECONDS = 20.0


def exact(comm: pycoll.Communicator) -> bool:
    """Whether an all_reduce of values that differ by rank and element is right."""
    x = np.arange(5000, dtype=np.int64) * (comm.rank + 1)
    expected = np.arange(5000, dtype=np.int64) * (comm.size * (comm.size + 1) // 2)
    return bool(np.array_equal(comm.all_reduce(x), expected))


def until_lost(comm: pycoll.Communicator) -> None:
    """Run collectives until one says that a peer is lost."""
    try:
        while True:
            comm.all_reduce(np.ones(100))
    except pycoll.PeerLostError:
        return


def killed(comm: pycoll.Communicator, victims: list[int], stamp: str) -> Any:
    comm.barrier()
    if comm.rank in victims:
        time.sleep(0.2)
        Path(stamp).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(comm)
    smaller = comm.shrink()
    right = exact(smaller)
    seconds = time.monotonic() - float(Path(stamp).read_text())
    assert pycoll.world() is smaller
    assert exact(pycoll.world())
    with pytest.raises(pycoll.PeerLostError):  # what ended it
        comm.barrier()
    return smaller.rank, smaller.size, smaller.names == comm_names(comm, victims), right, seconds


def comm_names(comm: pycoll.Communicator, without: list[int]) -> list[str]:
    return [name for rank, name in enumerate(comm.names) if rank not in without]


@pytest.mark.parametrize("victims", [[0], [2], [0, 3]])
@pytest.mark.parametrize("way", ["shm", "tcp", "hosts"])
def test_survivors_go_on(way: str, victims: list[int], tmp_path: Path) -> None:
    hosts = ("a", "a", "b", "b") if way == "hosts" else ()
    transports = "shm,tcp" if way == "hosts" else way
    stamp = str(tmp_path / "stamp")
    world = ProcessWorld(4, killed, victims, stamp, transports=transports, hosts=hosts)
    found = [one for rank, one in enumerate(world.outcomes()) if rank not in victims]
    for place, (rank, size, same, right, seconds) in enumerate(succeeded(found)):
        assert (rank, size, same, right) == (place, 4 - len(victims), True, True)
        assert seconds < SECONDS
    slowest = max(seconds for *_, seconds in found)
    print(f"{way}, victims {victims}: {slowest:.3f} s from the kill to an exact all_reduce")


def dying(comm: pycoll.Communicator, delay: float) -> Any:
    """Rank 3 dies first, and rank 0, which leads the decision, while it shrinks."""
    comm.barrier()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(comm)
    if comm.rank == 0:
        threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    smaller = comm.shrink()
    until_lost(smaller) if smaller.size == 4 - 1 else None
    if smaller.size == 3:
        smaller = smaller.shrink()
    return smaller.rank, smaller.size, exact(smaller)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_rank_that_dies_while_it_shrinks_is_dropped(delay: float) -> None:
    found = ProcessWorld(4, dying, delay).outcomes()
    assert found[1:3] == [(0, 2, True), (1, 2, True)]


def stopped(comm: pycoll.Communicator, victim: int, others_end: bool, folder: str) -> Any:
    """The victim is stopped until the others have shrunk, or given up if ``others_end``."""
    found, done = Path(folder, "found"), Path(folder, "done")
    comm.barrier()
    if comm.rank == victim:
        wait = f"until [ -e {found} ]; do sleep 0.05; done; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wait])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(0.3)
    try:
        smaller = comm.shrink(3.0)
        right = exact(smaller)
    finally:
        (done if comm.rank == victim else found).touch()
    # The one that comes back has to find the others alive.
    until = time.monotonic() + SECONDS
    while not (others_end or done.exists()) and time.monotonic() < until:
        time.sleep(0.02)
    return smaller.size, right


@pytest.mark.parametrize(("size", "victim"), [(3, 0), (3, 2), (2, 1)])
def test_a_rank_that_comes_back_late_learns_that_it_was_left_out(
    tmp_path: Path, size: int, victim: int
) -> None:
    found = ProcessWorld(size, stopped, victim, False, str(tmp_path)).outcomes()
    error = found.pop(victim)
    assert isinstance(error, pycoll.LeftOutError), error
    assert f"rank {victim} (" in str(error)
    assert "gone on without" in str(error) or "was left out" in str(error)
    assert found == [(size - 1, True)] * (size - 1)


def test_half_of_the_ranks_without_the_lowest_do_not_go_on(tmp_path: Path) -> None:
    found = ProcessWorld(2, stopped, 0, True, str(tmp_path)).outcomes()
    assert isinstance(found[1], pycoll.LeftOutError), found[1]
    assert "too few ranks" in str(found[1]) and "no answer of rank 0" in str(found[1])


def on_demand(comm: pycoll.Communicator) -> Any:
    """Rank 0 shrinks while the others wait in a collective; then all do it again."""
    if comm.rank != 0:
        with pytest.raises(pycoll.PeerLostError, match=r"it called shrink\(\)"):
            comm.barrier()
    again = comm.shrink()
    once_more = again.shrink()
    half = once_more.split(once_more.rank % 2)
    assert half is not None
    return once_more.size, exact(once_more), exact(half), exact(half.shrink())


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_on_demand_nobody_is_lost(transports: str) -> None:
    found = world_in_processes(4, on_demand, transports=transports)
    assert found == [(4, True, True, True)] * 4


def in_a_part(comm: pycoll.Communicator) -> Any:
    part = comm.split(comm.rank % 2)
    assert part is not None
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank != 1:
        return exact(part)
    until_lost(part)
    alone = part.shrink()
    return alone.size, exact(alone)


def test_a_part_shrinks_by_itself() -> None:
    found = ProcessWorld(4, in_a_part).outcomes()
    assert found[:3] == [True, (1, True), True]


def aborts_from_a_thread(comm: pycoll.Communicator) -> Any:
    if comm.rank == 1:
        threading.Timer(0.3, lambda: comm.abort("a thread saw bad input")).start()
    with pytest.raises(pycoll.PeerLostError, match="a thread saw bad input"):
        comm.recv(bytearray(8), (comm.rank + 1) % 3)
    smaller = comm.shrink()
    return smaller.size, exact(smaller)


def test_any_thread_aborts_and_the_others_shrink() -> None:
    world = ProcessWorld(3, aborts_from_a_thread)
    found = world.outcomes()
    assert world.processes[1].returncode == 1
    assert [found[0], found[2]] == [(2, True)] * 2


def test_ranks_that_are_threads_shrink() -> None:
    world = fresh_world(3)
    try:
        smaller = world.run(lambda comm: comm.shrink())
        assert [one.size for one in smaller] == [3] * 3
        for one in smaller:
            one.close()
    finally:
        world.close()


@pytest.mark.parametrize("timeout_s", [0, -1, "soon", float("inf"), float("nan"), 4000])
def test_wrong_timeouts_are_named(timeout_s: Any) -> None:
    (comm,) = pycoll.local_world(1)
    with comm, pytest.raises(pycoll.InvalidArgumentError, match="timeout_s"):
        comm.shrink(timeout_s)


def test_a_single_rank_and_a_closed_communicator() -> None:
    (comm,) = pycoll.local_world(1)
    alone = comm.shrink()
    assert exact(alone)
    alone.close()
    for one in (comm, alone):
        with pytest.raises(pycoll.ClosedError):
            one.shrink()
    left, right = pycoll.local_world(2)
    left.close()
    with pytest.raises(pycoll.ClosedError):
        left.shrink()
    right.close()


def in_a_child(comm: pycoll.Communicator) -> Any:
    """A forked child does not decide for its parent, nor keep its mailbox open."""
    child = os.fork()
    if child == 0:
        try:
            comm.shrink()
        except pycoll.ClosedError:
            # It outlives the time in which the others have to shrink.
            time.sleep(4 if comm.rank == 1 else 0)
            os._exit(7)
        os._exit(8)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    until_lost(comm)
    begin = time.monotonic()
    smaller = comm.shrink()
    assert time.monotonic() - begin < 3.5  # the patience would take 10 s
    return smaller.size, exact(smaller), os.waitpid(child, 0)[1] >> 8


def test_children_have_no_part() -> None:
    found = ProcessWorld(3, in_a_child).outcomes()
    assert [found[0], found[2]] == [(2, True, 7)] * 2
