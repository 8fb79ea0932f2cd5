"""A rank that came after all others had given up an operation was told that it had succeeded."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld, fresh_world, world_in_processes

import pycoll

SIZE = 3
LATE = 1
#: Of the ranks that are in time. The late one has a longer one, which must not pass.
DEADLINE_S, PATIENCE_S = 0.3, 10.0

Comm = pycoll.Communicator


def grouped(comm: Comm) -> None:
    one, other = np.ones(3), np.ones(5)
    with comm.group():
        comm.all_reduce(one, out=one)
        comm.all_reduce(other, out=other)


def bound(comm: Comm) -> None:
    array = np.ones(4)
    comm.all_reduce.bind(array, out=array)()


CALLS: dict[str, Callable[[Comm], Any]] = {
    "barrier": lambda comm: comm.barrier(),
    "in place": lambda comm: comm.all_reduce(x := np.ones(3), out=x),
    "long": lambda comm: comm.all_reduce(np.ones(200_000)),
    "list": lambda comm: comm.all_reduce([np.ones(3), np.ones(5)]),
    "group": grouped,
    "bound": bound,
    "from the late rank": lambda comm: comm.broadcast(np.ones(3), root=LATE),
    "to the late rank": lambda comm: comm.gather(np.ones(3), root=LATE),
    "two at once": lambda comm: [
        work.wait() for work in [comm.all_reduce(np.ones(3), async_op=True) for _ in range(2)]
    ],
}


def in_time_then_late(world: ThreadWorld, call: Callable[[Comm], Any]) -> list[Any]:
    """What each rank raised, the late one after the others."""
    for comm in world.communicators:
        comm.timeout_s = PATIENCE_S if comm.rank == LATE else DEADLINE_S
    found: list[Any] = world.outcomes(lambda comm: None if comm.rank == LATE else call(comm))
    found[LATE] = world.outcomes(lambda comm: call(comm) if comm.rank == LATE else None)[LATE]
    return found


def warm(world: ThreadWorld, call: Callable[[Comm], Any]) -> None:
    world.run(lambda comm: [call(comm) for _ in range(3)])


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("name", CALLS)
def test_who_comes_late_fails_as_the_others_did(transports: str, name: str) -> None:
    world = fresh_world(SIZE, transports)
    try:
        warm(world, CALLS[name])
        begin = time.monotonic()
        errors = in_time_then_late(world, CALLS[name])
        # The late rank hears it; it does not wait for its own deadline.
        assert time.monotonic() - begin < PATIENCE_S / 2
        assert all(isinstance(one, pycoll.TimeoutError) for one in errors), errors
        assert all(one.ranks == (LATE,) for one in errors), errors
        assert len({str(one) for one in errors}) == 1, errors
        with pytest.raises(pycoll.TimeoutError):
            world.communicators[LATE].barrier()
    finally:
        world.close()


def test_an_operation_that_the_others_have_ended_well_ends_well_for_the_late_rank_too() -> None:
    """The failure that it finds then is of the operation behind it."""
    world = fresh_world(2)
    early, late = world.communicators
    try:
        warm(world, CALLS["list"])
        early.timeout_s = DEADLINE_S
        # Its part of the first is with the early rank before that begins to wait.
        work = late.all_reduce(np.full(3, 2.0), async_op=True)

        def both(comm: Comm) -> Any:
            if comm is late:
                return None
            total = comm.all_reduce(np.ones(3))
            with pytest.raises(pycoll.TimeoutError):
                comm.barrier()
            return total

        total = world.run(both)[0]
        assert total.tolist() == [3.0] * 3
        assert work.wait().tolist() == [3.0] * 3
        with pytest.raises(pycoll.TimeoutError):
            late.barrier()
    finally:
        world.close()


def stay_away(comm: Comm) -> Any:
    comm.barrier()
    if comm.rank != LATE:
        comm.timeout_s = DEADLINE_S
    else:
        time.sleep(2)
    try:
        return comm.all_reduce(np.ones(3)).tolist()
    except pycoll.TimeoutError as error:
        if comm.rank != LATE:
            time.sleep(4)  # its end must not be what the late rank hears
        return str(error), error.ranks


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_processes(transports: str) -> None:
    found = world_in_processes(SIZE, stay_away, transports=transports)
    assert all(one == found[0] for one in found) and found[0][1] == (LATE,), found
