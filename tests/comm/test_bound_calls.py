"""Calls that are bound to their arguments, and calls of communicators that end, in groups, in
children and between processes; what methods look like.

Ranks that are processes import this file, so only tests that need torch import it.
"""

from __future__ import annotations

import inspect
import os
import pickle
import pydoc
import re
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from call_ways import defined, frames_of, outcome
from harness import fresh_world, world_in_processes, world_in_threads

import pycoll
from pycoll import ClosedError, InvalidArgumentError

Comm = pycoll.Communicator


# ---- bound calls


def test_bound_calls_are_the_calls() -> None:
    def rank(comm: Comm) -> None:
        x, out, rows = np.ones(4), np.zeros(4), np.zeros(2)
        sums = comm.all_reduce.bind(x, out=out)
        parts = comm.reduce_scatter.bind(x, op="max", out=rows)
        first = comm.broadcast.bind(x)
        late = comm.all_reduce.bind(x, async_op=True)
        everything = comm.all_gather.bind(rows, lengths=[2, 2])
        halt = comm.barrier.bind()
        for number in range(5):
            x[:] = number + comm.rank
            assert sums() is out and out.tolist() == [2 * number + 1] * 4
            assert parts() is rows and rows.tolist() == [number + 1] * 2
            assert first().tolist() == [number] * 4 and halt() is None
            assert late().wait().tolist() == out.tolist()
            assert everything().tolist() == [number + 1] * 4
        assert frames_of(sums) == []
        to_one = comm.gather.bind(x)  # without a native way
        assert (to_one() is None) == (comm.rank != 0)
        with pytest.raises(TypeError, match="takes no arguments"):
            sums(x)

    world_in_threads(2).run(rank)


def test_bound_calls_read_their_arrays_anew() -> None:
    import torch

    def rank(comm: Comm) -> None:
        x = np.ones(4)
        operation = comm.all_reduce.bind(x)
        assert operation().tolist() == [2] * 4
        x.resize(6, refcheck=False)
        assert operation().tolist() == [2, 2, 2, 2, 0, 0]
        x.shape = (3, 2)
        assert operation().shape == (3, 2)
        tensor = torch.ones(2)
        both = comm.all_reduce.bind(tensor, out=tensor)
        assert both() is tensor and tensor.tolist() == [2, 2]
        tensor.resize_(5)
        tensor.fill_(1)
        assert both().tolist() == [2] * 5
        out = np.zeros(4)
        other = comm.all_reduce.bind(np.ones(4), out=out)
        other()
        out.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="read-only"):
            other()

    world_in_threads(2).run(rank)


def test_bind_refuses_arguments_that_fit_no_parameter() -> None:
    comm = world_in_threads(1).communicators[0]
    for args, words in (((), {}), ((1, 2, 3), {}), ((1,), {"nope": 1}), ((1,), {"x": 2})):
        with pytest.raises(TypeError):
            comm.all_reduce.bind(*args, **words)


# ---- communicators that end, groups, forks


def test_closed_and_failed_communicators_say_so() -> None:
    world = fresh_world(2)
    first, second = world.communicators
    x = np.ones(2)
    world.run(lambda comm: comm.all_reduce(np.ones(2)))
    operation = first.all_reduce.bind(x)
    second.close()
    errors = [outcome(lambda: first.all_reduce(x)), outcome(operation)]
    errors.append(outcome(lambda: defined(first, "all_reduce")(x)))
    assert errors[0][0] is pycoll.PeerLostError and errors[0][2] == "all_reduce"
    assert errors[1][0] is pycoll.PeerLostError and errors[1] == errors[2]
    with pytest.raises(pycoll.PeerLostError) as caught:
        first.all_reduce(x)
    assert caught.value.host and caught.value.how and caught.value.rank == 1
    with pytest.raises(pycoll.PeerLostError):
        first.all_reduce(x, async_op=True).wait()
    for call in (lambda: second.all_reduce(x), second.barrier, second.all_reduce.bind(x)):
        with pytest.raises(ClosedError, match="was closed"):
            call()
    world.close()


def test_mismatches_are_found() -> None:
    world = fresh_world(2)
    try:
        world.run(lambda comm: [comm.all_reduce(np.ones(n)) for n in (3, 4)])
        errors = world.outcomes(lambda comm: comm.all_reduce(np.ones(3 + comm.rank)))
        assert all(isinstance(one, pycoll.MismatchError) for one in errors), errors
        assert all(one.operation == "all_reduce" for one in errors)
    finally:
        world.close()


def test_calls_inside_a_group_wait_for_its_end() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones(3)
        comm.all_reduce(x)
        operation = comm.all_reduce.bind(x)
        with comm.group():
            works = [comm.all_reduce(x), operation(), comm.barrier()]
            assert not any(work.done() for work in works)
        assert [work.wait() is None for work in works] == [False, False, True]
        assert works[1].wait().tolist() == [2, 2, 2]
        assert comm.all_reduce(x).tolist() == [2, 2, 2]

    world_in_threads(2).run(rank)


def test_ranks_fuse_alike_however_their_arrays_are_read() -> None:
    """Of one rank native code reads the members, of the other Python does, some or all."""
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            comm.all_reduce(np.ones(5))
            for odd in (lambda n: True, lambda n: n % 2 == 0, lambda n: n == 0):
                arrays = [
                    np.full(10, float(n))[:: 2 if comm.rank and odd(n) else 1][:5] for n in range(9)
                ]
                outs = [np.zeros(5) for _ in arrays]
                with comm.group():
                    for x, out in zip(arrays, outs, strict=True):
                        comm.all_reduce(x, "sum" if comm.rank else "".join(("s", "um")), out=out)
                    others = [comm.all_reduce(x, "max") for x in arrays]
                    comm.barrier()
                assert [out.tolist() for out in outs] == [[2.0 * n] * 5 for n in range(9)]
                assert [one.wait().tolist() for one in others] == [[1.0 * n] * 5 for n in range(9)]
            comm.all_reduce(np.ones(3 + comm.rank))

        for error in world.outcomes(rank):  # one, and three times a sum, a maximum and a barrier
            assert isinstance(error, pycoll.MismatchError) and "operation 11:" in str(error), error
    finally:
        world.close()


def test_members_of_a_group_keep_their_arrays_and_long_ones_are_alone() -> None:
    import torch

    def rank(comm: Comm) -> None:
        long = np.ones(200_000)
        comm.all_reduce(long), comm.all_reduce(np.ones(5))
        with comm.group():
            works = [comm.all_reduce(np.full(5, float(n))) for n in range(100)]
            works.append(comm.all_reduce(long, out=long))
            tensor = comm.all_reduce(torch.ones(4), "avg", deterministic=True)
        assert [work.wait()[0] for work in works] == [2.0 * n for n in range(100)] + [2]
        assert works[-1].wait() is long and tensor.wait().tolist() == [1] * 4

    world_in_threads(2).run(rank)


def test_a_child_of_fork_is_told() -> None:
    comm = world_in_threads(1).communicators[0]
    x = np.ones(2)
    operation = comm.all_reduce.bind(x, out=x)
    operation()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover
        told = [outcome(lambda: comm.all_reduce(x)), outcome(operation)]
        os.write(write, pickle.dumps([(one[0].__name__, one[1]) for one in told]))
        os._exit(0)
    os.waitpid(child, 0)
    told = pickle.loads(os.read(read, 65536))
    os.close(read), os.close(write)
    assert [name for name, _ in told] == ["ClosedError"] * 2
    assert "belongs to the parent process" in told[0][1]
    assert operation() is x


def test_threads_share_a_communicator() -> None:
    """Each thread's own order is the same on all ranks only if the others' calls are alike."""

    def rank(comm: Comm) -> None:
        def many() -> None:
            for _ in range(300):
                assert comm.all_reduce(np.ones(4)).tolist() == [2] * 4

        threads = [threading.Thread(target=many) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    world_in_threads(2).run(rank)


def in_processes(comm: Comm) -> list[Any]:
    """Run by every process of a world."""
    x, y = np.full(4, comm.rank + 1.0), np.arange(4.0)
    found: list[Any] = []
    for _ in range(200):
        out = comm.all_reduce(x)
        works = [comm.all_reduce(y, async_op=True) for _ in range(8)]
        parts = comm.reduce_scatter(y)
        whole = comm.all_gather(parts, lengths=[2, 2])
        comm.barrier()
        found = [out.tolist(), whole.tolist(), [work.wait().tolist() for work in works]]
    return found


def test_calls_between_processes() -> None:
    for transports in ("shm", "tcp"):
        found = world_in_processes(2, in_processes, transports=transports)
        assert found == [[[3.0] * 4, [0, 2, 4, 6], [[0, 2, 4, 6]] * 8]] * 2


def interrupted_wait(comm: Comm) -> tuple[str, float]:
    """The first rank waits for one that sleeps, and is interrupted."""
    comm.all_reduce(np.ones(1))
    if comm.rank == 1:
        time.sleep(10)
        return ("", 0)
    begin = time.monotonic()
    try:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        comm.all_reduce(np.ones(1))
    except KeyboardInterrupt:
        return ("interrupted", time.monotonic() - begin)
    return ("went on", 0)


def test_ctrl_c_stops_a_waiting_rank_at_once() -> None:
    (said, seconds), _ = world_in_processes(2, interrupted_wait)
    assert said == "interrupted" and seconds < 5


# ---- what methods look like


def test_methods_look_like_methods() -> None:
    comm = world_in_threads(1).communicators[0]
    assert str(inspect.signature(comm.all_reduce)).startswith("(x: ")
    assert str(inspect.signature(Comm.all_reduce)).startswith("(self")
    assert str(inspect.signature(pycoll.all_reduce)).startswith("(x: ")
    assert comm.all_reduce.__name__ == "all_reduce" and comm.all_reduce.__self__ is comm
    assert comm.all_reduce.__doc__ == Comm.all_reduce.__doc__ == pycoll.all_reduce.__doc__
    assert inspect.isroutine(Comm.all_reduce) and inspect.isroutine(comm.all_reduce)
    assert comm.all_reduce == comm.all_reduce != comm.reduce
    assert len({comm.all_reduce, comm.all_reduce}) == 1
    assert "all_reduce of <pycoll.Communicator" in repr(comm.all_reduce)
    assert repr(pycoll.all_reduce) == "<function pycoll.all_reduce>"
    assert Comm.all_reduce(comm, 2) == 2 and Comm.all_reduce is vars(Comm)["all_reduce"]


def test_subclasses_may_override() -> None:
    class Louder(Comm):
        def all_reduce(self, x: Any, *args: Any, **words: Any) -> Any:
            return 2 * super().all_reduce(x, *args, **words)

    world = fresh_world(1)
    try:
        comm = world.communicators[0]
        comm.__class__ = Louder
        assert comm.all_reduce(np.ones(2)).tolist() == [2, 2]
        assert comm.all_reduce(3) == 6
    finally:
        world.close()


def test_help_and_representations_say_what_they_are() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones(2)
        assert "bind(" in pydoc.render_doc(comm.all_reduce.bind)
        assert comm.all_reduce.__module__ == pycoll.all_reduce.__module__
        assert re.fullmatch(r"<bound call of \w+\.all_reduce>", repr(comm.all_reduce.bind(x)))
        work = comm.all_reduce(x, async_op=True)
        assert re.fullmatch("<Work(, done| of all_reduce, (running|done))>", repr(work))
        work.wait()
        assert repr(work) == "<Work, done>"
        with comm.group():
            work = comm.all_reduce(x)
            assert repr(work) == "<Work of a group, not started>"

    world_in_threads(2).run(rank)
