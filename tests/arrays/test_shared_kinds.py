"""Collectives and messages on both kinds of arrays, ordinary and shared, against exact values."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import ProcessWorld, world_in_processes

import pycoll
from pycoll import _core

#: Bytes: short, about what is shared, some segments, more than a tile.
LENGTHS = (64, 8192, 8200, 300_000, 5_000_000)


def check_operations(comm: pycoll.Communicator, shared: bool) -> None:
    size, rank = comm.size, comm.rank
    for nbytes in LENGTHS:
        x = np.arange(nbytes // 8, dtype=np.int64) * 3 + rank
        lies = _core.is_reachable(x.ctypes.data, x.nbytes)
        assert lies == (shared and nbytes >= _core.SHARED_BYTES_MIN)
        total = np.arange(nbytes // 8, dtype=np.int64) * 3 * size + size * (size - 1) // 2
        assert (comm.all_reduce(x) == total).all()
        assert (comm.broadcast(x, root=size - 1) == np.arange(len(x)) * 3 + size - 1).all()
        gathered = comm.all_gather(x)
        assert (
            gathered.reshape(size, -1) == np.arange(len(x)) * 3 + np.arange(size)[:, None]
        ).all()
        work = comm.isend(x, (rank + 1) % size)
        assert (
            comm.recv(np.empty_like(x), (rank - 1) % size) == x - rank + (rank - 1) % size
        ).all()
        work.wait()
        with comm.group():
            works = [comm.all_reduce(part) for part in np.array_split(x, 4)]
        assert (np.concatenate([one.wait() for one in works]) == total).all()
        comm.all_reduce(x, out=x)
        assert (x == total).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_all_operations_give_the_same(size: int, shared: bool) -> None:
    if shared and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1):
        pytest.skip("huge pages of shared memory need Linux 6.1 or newer")
    setting = {"PYCOLL_SHARED_ARRAYS": "1" if shared else "0"}
    world_in_processes(size, check_operations, shared, **setting)


def killed_while_others_read(comm: Any) -> Any:
    """Sums of 16 MiB until the last rank is killed, from a thread of its own."""
    size, rank, count = comm.size, comm.rank, 1 << 22
    x = pycoll.empty(count, np.float32)
    x[...] = np.arange(count) % 1000 + rank
    total = size * (np.arange(count, dtype=np.float32) % 1000) + size * (size - 1) // 2
    made = pycoll.empty(count, np.float32)
    assert _core.is_reachable(x.ctypes.data, x.nbytes)
    comm.all_reduce(x, out=made)
    comm.barrier()
    if rank == size - 1:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while True:
        made[...] = 0
        begin = time.monotonic()
        try:
            comm.all_reduce(x, out=made)
        except pycoll.PeerLostError as error:
            waited = time.monotonic() - begin
            assert np.array_equal(x, np.arange(count, dtype=np.float32) % 1000 + rank)
            return error.ranks, waited
        assert np.array_equal(made, total)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_is_killed_while_others_read_its_array(size: int) -> None:
    """Sums are whole or refused, and what the survivors gave is what it was."""
    world = ProcessWorld(size, killed_while_others_read, PYCOLL_SHARED_ARRAYS="1")
    *survivors, killed = world.outcomes()
    assert isinstance(killed, AssertionError) and "status -9" in str(killed)
    for ranks, waited in survivors:
        assert ranks == (size - 1,) and waited < 2.0
