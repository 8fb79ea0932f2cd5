"""Calls that move whole Python objects."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_processes, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, MismatchError
from pycoll.comm.pickled import BUFFER_BYTES_MIN, dump, lengths_of, load

Comm = pycoll.Communicator


def thing(rank: int, length: int) -> Any:
    """An object with long and short buffers, in both orders, and plain values."""
    return {
        "rank": rank,
        "long": np.arange(length * (rank + 1), dtype=np.float64) + rank,
        "columns": np.asfortranarray(np.arange(length).reshape(1, -1).repeat(3, 0) * rank),
        "short": np.full(3, rank, np.int16),
        "odd": np.full(8 * length + 1, rank, np.uint8),
        "none": np.zeros((0, 4)),
    }


def assert_alike(found: Any, wanted: Any) -> None:
    assert found.keys() == wanted.keys()
    assert found["rank"] == wanted["rank"]
    for key in ("long", "columns", "short", "odd", "none"):
        assert found[key].dtype == wanted[key].dtype
        assert found[key].flags.f_contiguous == wanted[key].flags.f_contiguous
        assert found[key].flags.writeable and found[key].flags.aligned
        assert np.array_equal(found[key], wanted[key])


@given(
    st.sampled_from(["shm", "tcp"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([0, 5, 9000]),
)
def test_objects_travel_whole(transports: str, size: int, root: int, length: int) -> None:
    root %= size

    def rank(comm: Comm) -> None:
        mine = thing(comm.rank, length)
        every = [thing(one, length) for one in range(size)]
        found = comm.broadcast_object(mine if comm.rank == root else None, root)
        assert_alike(found, every[root])
        for one, wanted in zip(comm.all_gather_object(mine), every, strict=True):
            assert_alike(one, wanted)
        gathered = comm.gather_object(mine, root)
        assert (gathered is None) == (comm.rank != root)
        for one, wanted in zip(gathered or every, every, strict=True):
            assert_alike(one, wanted)
        assert_alike(comm.scatter_object(every if comm.rank == root else None, root), mine)
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        if size > 1 and comm.rank % 2:
            assert_alike(comm.recv_object(left, 3), every[left])
        comm.send_object(mine, right, 3)
        if size == 1 or comm.rank % 2 == 0:
            assert_alike(comm.recv_object(left, 3), every[left])

    world_in_threads(size, transports).run(rank)


def test_long_buffers_are_no_part_of_the_pickle_and_not_copied() -> None:
    x = np.zeros(BUFFER_BYTES_MIN, np.uint8)
    head, buffer = dump([x, x, "text"])
    assert len(head) < 300
    x[5] = 7
    assert memoryview(buffer)[5] == 7
    assert lengths_of(memoryview(head), 0) == [x.nbytes]
    found = load([head, bytearray(buffer)])
    assert found[0] is found[1] and found[0][5] == 7


def test_what_others_pass_does_not_matter_and_ones_own_is_itself() -> None:
    def rank(comm: Comm) -> None:
        mine = [comm.rank]
        assert (comm.broadcast_object(mine, 1) is mine) == (comm.rank == 1)
        assert comm.all_gather_object(mine)[comm.rank] is mine
        assert (comm.gather_object(mine) or [mine])[0] is not None
        unpicklable: Any = lambda: None  # noqa: E731
        assert comm.broadcast_object("x" if comm.rank == 0 else unpicklable) == "x"
        assert comm.scatter_object("no" if comm.rank else [1, 2, 3]) == [1, 2, 3][comm.rank]

    world_in_threads(3).run(rank)


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("name", ["all_gather_object", "gather_object", "broadcast_object"])
def test_all_ranks_hear_of_an_object_that_cannot_be_pickled(guilty: int, name: str) -> None:
    def rank(comm: Comm) -> str:
        obj = threading.Lock() if comm.rank == guilty else "fine"
        words = {} if name == "all_gather_object" else {"root": guilty}
        with pytest.raises(InvalidArgumentError, match="lock that cannot be pickled") as caught:
            getattr(comm, name)(obj, **words)
        assert caught.value.operation == name
        assert comm.all_gather_object(comm.rank) == [0, 1, 2]
        return str(caught.value)

    told = world_in_threads(3).run(rank)
    for one, text in enumerate(told):
        assert text.startswith("obj is a" if one == guilty else f"rank {guilty} has refused its ")


@pytest.mark.parametrize("objs", [None, "ab", [1], [1, threading.Lock()]])
def test_all_ranks_hear_of_objects_that_cannot_be_scattered(objs: Any) -> None:
    def rank(comm: Comm) -> None:
        with pytest.raises(InvalidArgumentError, match=r"^(rank 0 has refused.*)?objs"):
            comm.scatter_object(objs if comm.rank == 0 else None)
        assert comm.scatter_object([3, 4]) == 3 + comm.rank

    world_in_threads(2).run(rank)


def test_a_receiver_hears_of_an_object_that_cannot_be_pickled() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            with pytest.raises(InvalidArgumentError, match=r"^obj is a lock"):
                comm.send_object(threading.Lock(), 1)
            comm.send(np.arange(4), 1)
            comm.send_object("fine", 1)
            return
        with pytest.raises(InvalidArgumentError, match=r"^rank 0 has refused its arguments: obj"):
            comm.recv_object(0)
        with pytest.raises(MismatchError, match=r"32 bytes that are not an object.*with recv"):
            comm.recv_object(0)
        assert comm.recv_object(0) == "fine"

    world_in_threads(2).run(rank)


@given(st.binary(max_size=64), st.integers(0, 2**64 - 1))
def test_heads_from_a_broken_peer_are_refused(rest: bytes, count: int) -> None:
    for head in (rest, b"pycoll.1" + count.to_bytes(8, "little") + rest, b"pycoll.0" + rest):
        try:
            found = lengths_of(memoryview(head), 3)
        except (MismatchError, InvalidArgumentError) as error:
            assert "rank 3" in str(error)
        else:
            assert len(found) <= len(head) // 8 - 2


def test_a_length_without_memory_is_named() -> None:
    def rank(comm: Comm) -> None:
        if comm.rank == 0:
            head = b"pycoll.1" + (1).to_bytes(8, "little") + (2**62).to_bytes(8, "little")
            comm.send(head, 1)
            return
        with pytest.raises(InvalidArgumentError, match=f"rank 0 sends {2**62} bytes of an object"):
            comm.recv_object(0)

    world_in_threads(2).run(rank)


def test_ranks_that_call_different_things_hear_of_it() -> None:
    world = fresh_world(2)
    try:
        errors = world.outcomes(
            lambda comm: comm.all_gather_object(1) if comm.rank else comm.broadcast_object(1)
        )
        assert all(isinstance(one, MismatchError) for one in errors), errors
    finally:
        world.close()


def test_objects_inside_a_group_are_refused() -> None:
    comm = world_in_threads(1).communicators[0]
    for name, args in {"broadcast_object": (1,), "send_object": (1, 0), "probe": ()}.items():
        with comm.group(), pytest.raises(InvalidArgumentError, match=f"{name} inside a group"):
            getattr(comm, name)(*args)


def in_processes(comm: Comm) -> Any:
    mine = thing(comm.rank, 1 << 18)
    found = comm.all_gather_object(mine)
    for rank, one in enumerate(found):
        assert_alike(one, thing(rank, 1 << 18))
    return pycoll.broadcast_object({"from": comm.rank}, 1)


def test_objects_between_processes() -> None:
    assert world_in_processes(2, in_processes) == [{"from": 1}] * 2
