"""A deadline named ranks that only waited, other ones from run to run, together with or instead of
the one rank that stood still.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import HANG_S, ProcessWorld, fresh_world

import pycoll

Comm = pycoll.Communicator
#: What is called, and its communicator.
Way = tuple[Comm, Callable[[], Any]]

DEADLINE_S = 2.0
#: So long survivors may take on a loaded machine to find out; then the stopped rank goes on.
FOUND_S = 60.0


def reduce_long(comm: Comm) -> Way:
    x = np.ones(1 << 20, np.float32)
    return comm, lambda: comm.all_reduce(x, out=x)


def reduce_short(comm: Comm) -> Way:
    x = np.ones(4, np.float32)
    return comm, lambda: comm.all_reduce(x, out=x)


def broadcast_long(comm: Comm) -> Way:
    x = np.ones(1 << 20, np.float32)
    return comm, lambda: comm.broadcast(x, root=0)


def in_part(comm: Comm) -> Way:
    part = comm.split(0 if comm.rank == 0 else 1)
    x = np.ones(1 << 18, np.float32)
    return part, lambda: part.all_reduce(x, out=x)


def message_ring(comm: Comm) -> Way:
    x, y = np.ones(1 << 18, np.float32), np.empty(1 << 18, np.float32)
    following, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    return comm, lambda: comm.sendrecv(x, following, y, before)


WAYS: dict[str, Callable[[Comm], Way]] = {
    "reduce_long": reduce_long,
    "reduce_short": reduce_short,
    "broadcast_long": broadcast_long,
    "in_part": in_part,
    "message_ring": message_ring,
}


def until_it_fails(comm: Comm, way: str, victim: int, folder: str) -> tuple[str, Any]:
    called, call = WAYS[way](comm)
    call()
    called.timeout_s = DEADLINE_S
    (Path(folder) / f"ready {comm.rank}").touch()
    found: tuple[str, Any] = "", ()
    alone = way == "in_part" and comm.rank == 0
    end = time.monotonic() + HANG_S
    while not alone and time.monotonic() < end:
        try:
            call()
        except pycoll.PycollError as error:
            found = str(error), error.ranks
            break
    (Path(folder) / f"failed {comm.rank}").touch()
    # Nobody's end is to be what the stopped rank hears.
    while comm.rank != victim and not (Path(folder) / f"failed {victim}").exists():
        time.sleep(0.02)
    return found


def await_files(folder: Path, word: str, ranks: list[int]) -> None:
    end = time.monotonic() + FOUND_S
    while not all((folder / f"{word} {rank}").exists() for rank in ranks):
        assert time.monotonic() < end, f"not all of {ranks} are {word}"
        time.sleep(0.01)


def stop_midway(
    folder: Path, way: str, victim: int, seed: int, size: int, transports: str, hosts: Any = ()
) -> list[Any]:
    world = ProcessWorld(
        size, until_it_fails, way, victim, str(folder), transports=transports, hosts=hosts
    )
    process = world.processes[victim]
    others = [rank for rank in range(size) if rank != victim]
    if way == "in_part":
        others.remove(0)
    try:
        await_files(folder, "ready", list(range(size)))
        time.sleep(random.Random(seed).uniform(0, 0.1))
        process.send_signal(signal.SIGSTOP)
        await_files(folder, "failed", others)
    finally:
        process.send_signal(signal.SIGCONT)
    return world.outcomes()


@pytest.mark.parametrize(
    ("transports", "hosts", "way", "victim"),
    [
        ("shm", "", "reduce_long", 2),
        ("shm", "", "message_ring", 1),
        ("tcp", "", "reduce_long", 0),
        ("tcp", "", "broadcast_long", 2),
        ("shm,tcp", "aabb", "reduce_long", 3),
    ],
)
def test_all_name_the_rank_that_was_stopped(
    tmp_path: Path, transports: str, hosts: str, way: str, victim: int
) -> None:
    found = stop_midway(tmp_path, way, victim, victim, 4, transports, tuple(hosts))
    assert all(one == found[0] for one in found), found
    assert found[0][1] == (victim,), found


def test_in_a_part(tmp_path: Path) -> None:
    found = stop_midway(tmp_path, "in_part", 2, 2, 4, "shm")[1:]
    assert all(one == found[0] for one in found), found
    assert found[0][1] == (1,), found  # its number there


def test_the_chain_is_followed_to_its_end() -> None:
    """Rank 0 waits for rank 1, which waits for a message of rank 2, which stays away."""
    world = fresh_world(3)
    try:
        for comm in world.communicators:
            comm.timeout_s = DEADLINE_S if comm.rank == 0 else 20 * DEADLINE_S

        def wait(comm: Comm) -> Any:
            if comm.rank == 0:
                comm.recv(np.empty(3), 1)
            elif comm.rank == 1:
                comm.recv(np.empty(3), 2)

        errors = world.outcomes(wait)
        assert str(errors[0]) == str(errors[1]) and errors[0].ranks == (2,), errors
        assert "rank 2 " in str(errors[0]) and "did not arrive" in str(errors[0]), errors
    finally:
        world.close()


def test_who_waits_elsewhere_is_named_where_nobody_stands_still() -> None:
    """Each of two ranks waits for the other: one in a collective, one in a recv."""
    world = fresh_world(2)
    try:
        for comm in world.communicators:
            comm.timeout_s = DEADLINE_S if comm.rank == 0 else 20 * DEADLINE_S
        errors = world.outcomes(
            lambda comm: comm.barrier() if comm.rank == 0 else comm.recv(np.empty(3), 0)
        )
        assert str(errors[0]) == str(errors[1]), errors
        assert errors[0].ranks == (1,) and "did not arrive" in str(errors[0]), errors
    finally:
        world.close()
