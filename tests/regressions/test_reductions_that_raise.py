"""A user's reduction that raised on one rank ended the communicator on all, and a function of one
argument was found only when the first operation called it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_processes

import pycoll
from pycoll import InvalidArgumentError, ReductionError

OPERATIONS = ["all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "list", "async", "group"]


def call(comm: Any, name: str, op: str) -> Any:
    x = np.arange(3000.0) + comm.rank
    if name == "list":
        return comm.all_reduce([x, x[:7].copy()], op)
    if name == "async":
        return comm.all_reduce(x, op, async_op=True).wait()
    if name == "group":
        with comm.group():
            work = comm.all_reduce(x, op)
        return work.wait()
    return getattr(comm, name)(x, op=op)


@pytest.mark.parametrize("name", OPERATIONS)
def test_all_ranks_raise_the_same_and_go_on(name: str) -> None:
    lock = threading.Lock()

    def broken_once(a: Any, b: Any) -> Any:
        if lock.acquire(blocking=False):
            raise LookupError("no such thing")
        return a + b

    pycoll.register_op("broken once", broken_once, identity=0.0)
    world = fresh_world(3)
    try:
        errors = world.outcomes(lambda comm: call(comm, name, "broken once"))
        assert all(isinstance(one, ReductionError) for one in errors), errors
        (text,) = {str(one) for one in errors}
        (rank,) = {one.rank for one in errors}
        assert f"raised LookupError: no such thing on rank {rank}" in text
        assert "'broken once'" in text
        causes = [isinstance(one.__cause__, LookupError) for one in errors]
        assert causes == [one == rank for one in range(3)]
        assert world.is_usable()
        # The lock is held now, so that the function works.
        world.run(lambda comm: call(comm, name, "broken once"))
        total = world.run(lambda comm: comm.all_reduce(np.ones(5), "broken once"))
        assert [one.tolist() for one in total] == [[3.0] * 5] * 3
    finally:
        world.close()


def test_several_ranks_that_raise_are_all_named() -> None:
    def broken(a: Any, b: Any) -> Any:
        raise ZeroDivisionError("x" * 1000)

    pycoll.register_op("broken", broken)
    world = fresh_world(4)
    try:
        errors = world.outcomes(lambda comm: comm.all_reduce(np.ones(4), "broken"))
        (ranks,) = {one.ranks for one in errors}
        assert len(ranks) > 1
        assert all(f"on ranks {list(ranks[1:])}" in str(one) for one in errors)
        assert all("ZeroDivisionError: xxx" in str(one) for one in errors)
        world.run(lambda comm: comm.barrier())
    finally:
        world.close()


def raise_on_rank_one(comm: Any) -> str:
    def fold(a: Any, b: Any) -> Any:
        if comm.rank == 1:
            raise OSError("disk full")
        return np.maximum(a, b)

    pycoll.register_op("fold", fold)
    with pytest.raises(ReductionError, match=r"OSError: disk full on rank 1"):
        comm.all_reduce(np.arange(100_000.0), "fold", algorithm="ring")
    return str(comm.all_reduce(comm.rank, "max"))


def test_processes_go_on() -> None:
    assert world_in_processes(3, raise_on_rank_one) == ["2"] * 3


def test_what_is_no_exception_comes_out_where_it_was_raised() -> None:
    lock = threading.Lock()

    def stop(a: Any, b: Any) -> Any:
        if lock.acquire(blocking=False):
            raise KeyboardInterrupt
        return a + b

    pycoll.register_op("stop", stop)
    world = fresh_world(2)
    try:
        errors = world.outcomes(lambda comm: comm.all_reduce(np.ones(4), "stop"))
        kinds = {type(one) for one in errors}
        assert KeyboardInterrupt in kinds, errors
        world.run(lambda comm: comm.barrier())
    finally:
        world.close()


@pytest.mark.parametrize(
    "function", [lambda a: a, lambda: 0, lambda a, b, c: a, np.negative, lambda *, a, b: a]
)
def test_functions_that_cannot_take_two_arrays_are_refused(function: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be called with two arrays"):
        pycoll.register_op("wrong", function)


@pytest.mark.parametrize(
    "function", [np.add, max, lambda a, b: a, lambda *all: all[0], lambda a, b, c=0: a]
)
def test_functions_that_can_are_taken(function: Any) -> None:
    pycoll.register_op("right", function)
