"""New processes join a communicator that grows, and errors leave the old one usable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from harness import ROOT, ProcessWorld, world_in_processes

import pycoll

NEW = """
import numpy as np, pycoll
comm = pycoll.init()
print(comm.rank, comm.size, comm.all_reduce(np.full(2, comm.rank)).tolist(), flush=True)
comm.barrier()
"""


def start(ticket: str) -> subprocess.Popen[str]:
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYCOLL_")}
    for name in ("PYCOLL_TRANSPORTS", "PYCOLL_TUNING"):
        keep[name] = os.environ[name]
    environment = {**keep, "PYCOLL_TICKET": ticket, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", NEW], env=environment, stdout=subprocess.PIPE, text=True
    )


def growing(comm: pycoll.Communicator, count: int) -> Any:
    started: list[subprocess.Popen[str]] = []
    names = comm.names
    bigger = comm.grow(count, lambda tickets: started.extend(map(start, tickets)))
    total = bigger.all_reduce(np.full(2, bigger.rank)).tolist()
    bigger.barrier()
    assert pycoll.world() is bigger
    assert bigger.names[: len(names)] == names
    said = [process.communicate(timeout=60)[0].strip() for process in started]
    return bigger.rank, bigger.size, total, said


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("count", [1, 2])
def test_new_ranks_come_behind_the_old_ones(count: int, transports: str) -> None:
    found = world_in_processes(2, growing, count, transports=transports)
    size, total = 2 + count, [sum(range(2 + count))] * 2
    said = [f"{rank} {size} {total}" for rank in range(2, size)]
    assert found == [(0, size, total, said), (1, size, total, [])]


def shrinking_and_growing(comm: pycoll.Communicator) -> Any:
    """A rank dies, the others go on, and a new one takes its place."""
    comm.barrier()
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(pycoll.PeerLostError):
        comm.barrier()
    return growing(comm.shrink(), 1)


def test_a_lost_rank_is_replaced() -> None:
    found = ProcessWorld(3, shrinking_and_growing).outcomes()
    assert found[1:] == [(0, 3, [3, 3], ["2 3 [3, 3]"]), (1, 3, [3, 3], [])]


def failing(comm: pycoll.Communicator) -> Any:
    """What each failure says; the communicator goes on after each of them."""
    texts = []

    def refuse(tickets: list[str]) -> None:
        raise OSError("no more processes")

    for count, invite, seconds in ((1, refuse, 5.0), (1, print_nothing, 1.0)):
        with pytest.raises((OSError, pycoll.PycollError)) as caught:
            comm.grow(count, invite, seconds)
        texts.append(str(caught.value))
        assert comm.all_reduce(1) == comm.size
    with pytest.raises(pycoll.InvalidArgumentError) as wrong:
        comm.grow(1 + comm.rank, print_nothing)
    texts.append(str(wrong.value))
    assert comm.all_reduce(1) == comm.size
    return texts


def print_nothing(tickets: list[str]) -> None:
    assert all(isinstance(one, str) for one in tickets)


def test_failures_leave_the_communicator_as_it_was() -> None:
    first, second = world_in_processes(2, failing)
    assert first[0] == "no more processes"
    assert "rank 0 could not invite new ranks: OSError: no more processes" in second[0]
    for texts in (first, second):
        assert "rank 2 never arrived" in texts[1] or "for rank 2 of 3" in texts[1]
    assert "count is 1 on rank 0 and 2 on rank 1" in first[2]


@pytest.mark.parametrize("count", [0, -1, 4096, "one", 1.5])
def test_wrong_counts_are_named(count: Any) -> None:
    (comm,) = pycoll.local_world(1)
    with comm, pytest.raises(pycoll.InvalidArgumentError, match="count is"):
        comm.grow(count, print)


def test_what_cannot_be_called_is_named() -> None:
    (comm,) = pycoll.local_world(1)
    invite: Any = "start.sh"
    with comm, pytest.raises(pycoll.InvalidArgumentError, match="invite is a str"):
        comm.grow(1, invite)


@pytest.mark.parametrize("ticket", ["", "x", "e30=", 7, "\N{SNOWMAN}"])
def test_damaged_tickets_are_refused_and_not_quoted(ticket: Any) -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match=r"ticket .* cannot be read") as caught:
        pycoll.init(ticket=ticket)
    assert "grow()" in str(caught.value)


def test_a_ticket_stands_alone() -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match="give nothing else"):
        pycoll.init(ticket="x", rank=0, size=2)
