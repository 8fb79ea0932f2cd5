"""The native table of calls forgot its entries while Python kept its own, and a group then ran
nothing and said nothing."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from harness import world_in_processes, world_in_threads

import pycoll
from pycoll import _core

Comm = pycoll.Communicator


def reduced_in_group(comm: Comm) -> Any:
    x = np.full(4, comm.rank + 1.0)
    with comm.group():
        work = comm.all_reduce(x, out=x)
    assert work.done() and work.wait() is x
    return x.tolist()


def many_shapes(comm: Comm) -> list[Any]:
    """More preparations than the table holds."""
    found = [reduced_in_group(comm)]
    for width in range(1, 4200):
        comm.reduce_scatter(np.ones((comm.size, width), np.uint8))
    found += [reduced_in_group(comm), reduced_in_group(comm)]
    xs = [np.full(3, comm.rank + 1.0), np.full(2, 10.0 * (comm.rank + 1))]
    comm.all_reduce(xs, out=xs)
    return [*found, xs[0].tolist(), xs[1].tolist()]


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_groups_run_behind_thousands_of_shapes(transports: str) -> None:
    expected = [*[[3.0] * 4] * 3, [3.0] * 3, [30.0] * 2]
    assert world_in_processes(2, many_shapes, transports=transports) == [expected] * 2


def test_calls_of_all_kinds_run_after_their_preparations_are_forgotten() -> None:
    def rank(comm: Comm) -> None:
        x = np.full(5, comm.rank + 1.0)
        again = comm.all_reduce.bind(x, out=x)
        for step in range(4):
            for forgets in (False, True):
                if forgets and step % comm.size == comm.rank:
                    _core.forget(comm)
                x[:] = comm.rank + 1.0
                again()
                assert x.tolist() == [3.0] * 5
                assert reduced_in_group(comm) == [3.0] * 4
                assert comm.exscan(np.ones(2)).tolist() == [float(comm.rank)] * 2
                assert comm.all_gather(np.full(comm.rank, 7)).tolist() == [7]
                work = comm.all_reduce(x, out=x, async_op=True)
                assert work.wait().tolist() == [6.0] * 5

    world_in_threads(2).run(rank)


def test_a_group_one_of_whose_members_does_not_run_says_so(monkeypatch: Any) -> None:
    """What cannot happen: run() forgets a fusion. The block raises, and so does the Work."""
    (comm,) = pycoll.local_world(1)
    monkeypatch.setattr(_core, "run_fusion", lambda *_: None)
    with pytest.raises(RuntimeError, match="did not run"), comm.group():
        work = comm.all_reduce(np.ones(2))
        comm.barrier()
    with pytest.raises(RuntimeError, match="did not run"):
        work.wait()


class Calling:
    """An array-like whose end calls again, with other lengths for the same place of the table."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def __del__(self) -> None:
        for count in range(1, 200):
            x = np.ones(count)
            self.comm.all_reduce(x, out=x)
        _core.forget(self.comm)


def test_what_is_let_go_of_in_the_middle_of_a_call_may_call() -> None:
    """A call lets go of what earlier ones kept, and looks at the table behind that, not before."""
    (comm,) = pycoll.local_world(1)
    x = np.full(3, 2.0)
    comm.all_reduce(x, out=x)
    for _ in range(3):
        # recv_any keeps its Work's array and user until the next call sees that it is done.
        inbox = np.zeros(1).view(Kept)
        inbox.end = Calling(comm)
        got = comm.irecv(inbox, 0)
        del inbox
        comm.isend(np.ones(1), 0).wait()
        del got
        gc.collect()
        assert comm.all_reduce(x, out=x) is x
        assert x.tolist() == [2.0] * 3


class Kept(np.ndarray):  # type: ignore[type-arg]
    """An array with attributes."""

    end: Any
