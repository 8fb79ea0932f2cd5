"""A Work that was dropped while its operation failed told nobody: neither a warning nor the next
call said that the array of a recv, for instance, was never filled."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import fresh_world

import pycoll

Comm = pycoll.Communicator


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Error and object of each call of the hook."""
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda one: told.append((repr(one.exc_value), str(one.object)))
    )
    yield told


def mismatched(comm: Comm, count: int = 1) -> list[pycoll.Work]:
    """Receives on rank 0 that fail by themselves: the communicator stays usable."""
    works = [comm.irecv(np.zeros(2), 1) for _ in range(count)] if comm.rank == 0 else []
    comm.barrier()
    if comm.rank:
        for _ in range(count):
            comm.send(np.zeros(3), 0)
    return works


CALLS: dict[str, Any] = {
    "all_reduce": lambda comm, x: comm.all_reduce([x, x]),
    "native": lambda comm, x: comm.all_reduce(x, out=x),
    "isend": lambda comm, x: comm.isend(x, 0),
    "probe": lambda comm, x: comm.iprobe(),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_next_call_raises(call: str, unraisable: list[tuple[str, str]]) -> None:
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            x = np.ones(4)
            for _ in range(3):
                comm.all_reduce(x, out=x)
            for work in mismatched(comm):
                while not work.done():
                    comm.iprobe(tag=9)
            if comm.rank == 0:
                del work
                with pytest.raises(pycoll.MismatchError, match="24 bytes, the array has 16") as one:
                    CALLS[call](comm, x)
                assert one.value.ranks == (1,)
            comm.all_reduce(x, out=x)  # once

        world.run(rank)
        assert len(unraisable) == 1, unraisable
        assert "MismatchError" in unraisable[0][0]
        assert unraisable[0][1] == "a Work of recv that was dropped before wait()"
    finally:
        world.close()


def test_a_work_that_was_dropped_before_its_end_tells_as_well(
    unraisable: list[tuple[str, str]],
) -> None:
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            mismatched(comm)
            if comm.rank == 0:
                with pytest.raises(pycoll.MismatchError, match="24 bytes, the array has 16"):
                    while True:
                        comm.iprobe(tag=9)
            comm.barrier()

        world.run(rank)
        assert len(unraisable) == 1 and "MismatchError" in unraisable[0][0]
    finally:
        world.close()


def test_what_a_wait_has_told_is_no_news(unraisable: list[tuple[str, str]]) -> None:
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            for work in mismatched(comm, 2):
                with pytest.raises(pycoll.MismatchError):
                    work.wait()
            gc.collect()
            assert comm.all_reduce(1) == 2

        world.run(rank)
        assert unraisable == []
    finally:
        world.close()


def test_many_works_of_one_failure_are_one_warning(unraisable: list[tuple[str, str]]) -> None:
    world = fresh_world(2)
    first, second = world.communicators
    works = [first.all_reduce(np.ones(3), async_op=True) for _ in range(20)]
    first.timeout_s = 0.2
    works.append(first.all_reduce(np.ones(3), async_op=True))
    second.close()
    while not works[-1].done():
        threading.Event().wait(0.01)
    works.clear()
    assert len(unraisable) == 1 and "PeerLostError" in unraisable[0][0], unraisable
    for _ in range(2):
        with pytest.raises(pycoll.PeerLostError):
            first.all_reduce(np.ones(3))
    world.close()
    assert len(unraisable) == 1


def test_a_failure_that_a_call_has_told_and_closing_are_no_news(
    unraisable: list[tuple[str, str]],
) -> None:
    world = fresh_world(2)
    first, second = world.communicators
    work = first.all_reduce(np.ones(3), async_op=True)
    second.close()
    with pytest.raises(pycoll.PeerLostError):
        first.barrier()
    del work
    world.close()
    world = fresh_world(2)
    works = [world.communicators[0].irecv(np.zeros(2), 1)]
    del works
    world.close()
    gc.collect()
    assert unraisable == []


def test_reused_works_tell_of_their_own_operations(unraisable: list[tuple[str, str]]) -> None:
    """A Work's memory is used again: what the last one told must not silence the next."""
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            for work in mismatched(comm):
                with pytest.raises(pycoll.MismatchError):
                    work.wait()
            comm.barrier()
            works = [comm.irecv(np.zeros(5), 1, 7)] if comm.rank == 0 else []
            comm.barrier()
            if comm.rank:
                comm.send(np.zeros(6), 0, 7)
            while not all(work.done() for work in works):
                comm.iprobe(tag=9)
            works.clear()
            if comm.rank == 0:
                with pytest.raises(pycoll.MismatchError, match="48 bytes, the array has 40"):
                    comm.barrier()
            comm.barrier()

        world.run(rank)
        assert len(unraisable) == 1
    finally:
        world.close()
