"""What asynchronous operations keep alive, and for how long; reductions that misbehave."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
from harness import HANG_S, fresh_world, world_in_threads

import pycoll
from pycoll import ReductionError

Comm = pycoll.Communicator


def await_true(condition: Any, what: str) -> None:
    end = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < end, f"it never came to pass that {what}"
        time.sleep(0.001)


def test_arrays_are_let_go_when_their_work_was_waited_for() -> None:
    def rank(comm: Comm) -> None:
        x, out = np.arange(1000.0) + comm.rank, np.zeros(1000)
        refs = [weakref.ref(x), weakref.ref(out)]
        work = comm.all_reduce(x, out=out, async_op=True)
        work.wait()
        del x, out, work
        gc.collect()
        assert [ref() for ref in refs] == [None, None]

    world_in_threads(2).run(rank)


def test_arrays_of_dropped_works_live_until_the_operation_ended_and_no_longer() -> None:
    first, second = world_in_threads(2).communicators
    x = np.ones(1000)
    ref = weakref.ref(x)
    first.all_reduce(x, out=x, async_op=True)
    del x
    gc.collect()
    x = ref()
    assert x is not None, "the engine still needs it"
    assert second.all_reduce(np.full(1000, 2.0)).tolist() == [3.0] * 1000
    await_true(lambda: bool(np.all(ref() == 3)), "the operation ended")
    del x
    works = [comm.barrier(async_op=True) for comm in (first, second)]
    for work in works:
        work.wait()
    gc.collect()
    assert ref() is None


def test_reductions_of_dropped_works_live_until_the_operation_ended() -> None:
    class Sum:
        def __call__(self, a: Any, b: Any) -> Any:
            return a + b

    function = Sum()
    ref = weakref.ref(function)
    pycoll.register_op("short-lived", function)
    world = fresh_world(2)
    try:
        first, second = world.communicators
        out = [np.zeros(50), np.zeros(50)]
        first.all_reduce(np.ones(50), "short-lived", out=out[0], async_op=True)
        second.all_reduce(np.ones(50), "short-lived", out=out[1], async_op=True)
        pycoll.register_op("short-lived", lambda a, b: a)
        del function
        await_true(lambda: all((one == 2).all() for one in out), "both ended")
    finally:
        world.close()
    del first, second, world
    gc.collect()
    assert ref() is None


def test_a_reduction_may_not_call_a_communicator() -> None:
    world = fresh_world(2)
    pycoll.register_op("nosy", lambda a, b: world.communicators[0].barrier())
    try:
        errors = world.outcomes(lambda comm: comm.all_reduce(np.ones(3), "nosy"))
        assert all(isinstance(error, ReductionError) for error in errors), errors
        assert "InvalidArgumentError: " in str(errors[0])
        assert "a reduction may only combine its two arrays" in str(errors[0])
    finally:
        world.close()


def test_a_communicator_whose_last_reference_goes_inside_a_reduction() -> None:
    """The progress thread lets go of the very communicator that it works for."""
    holder = pycoll.local_world(2)
    refs = [weakref.ref(comm) for comm in holder]
    entered = threading.Event()

    def forget(a: Any, b: Any) -> Any:
        holder.clear()
        gc.collect()
        entered.set()
        return a + b

    pycoll.register_op("forget", forget)
    for comm in holder:
        comm.all_reduce(np.ones(3), "forget", async_op=True)
    del comm
    assert entered.wait(HANG_S)
    await_true(lambda: gc.collect() >= 0 and all(ref() is None for ref in refs), "both are gone")
