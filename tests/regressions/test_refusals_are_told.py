"""A rank whose arguments were refused raised alone, and the others waited out their deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUT_S, ThreadWorld, fresh_world, world_in_processes, world_in_threads

import pycoll

#: No refusal may wait for a deadline; a loaded machine may be slow.
PROMPTLY_S = TIMEOUT_S / 2

Call = Callable[[pycoll.Communicator, bool], Any]


def matrix(comm: pycoll.Communicator) -> Any:
    return np.full((2 * comm.size, 3), comm.rank, np.int64)


def listed(comm: pycoll.Communicator, bad: bool) -> Any:
    """Each array is a message of its own."""
    arrays = [np.ones(40_000), np.ones(50_000), None if bad else np.ones(60_000)]
    return comm.all_reduce(arrays)


def grouped(comm: pycoll.Communicator, bad: bool) -> Any:
    with comm.group():
        comm.all_reduce(np.ones(40_000))
        comm.all_reduce(None if bad else np.ones(50_000), "max")
        comm.broadcast(np.ones(3))


def bound(comm: pycoll.Communicator, bad: bool) -> Any:
    return comm.all_reduce.bind(None if bad else np.ones(3))()


def late(name: str, *args: Any) -> Call:
    """An ``out`` of another shape: found behind what ranks tell each other first."""

    def call(comm: pycoll.Communicator, bad: bool) -> Any:
        out = np.empty((1, 1), np.int64) if bad else None
        return getattr(comm, name)(matrix(comm), *args, out=out)

    return call


def first(name: str, *args: Any) -> Call:
    def call(comm: pycoll.Communicator, bad: bool) -> Any:
        return getattr(comm, name)(None if bad else matrix(comm), *args)

    return call


def later(name: str) -> Call:
    def call(comm: pycoll.Communicator, bad: bool) -> Any:
        return getattr(comm, name)(None if bad else matrix(comm), async_op=True).wait()

    return call


#: What a rank that is ``bad`` refuses, and no other.
CALLS: dict[str, Call] = {
    **{
        name: first(name)
        for name in (
            "all_reduce",
            "reduce",
            "reduce_scatter",
            "scan",
            "exscan",
            "broadcast",
            "all_gather",
            "gather",
            "all_to_all",
        )
    },
    **{f"{name} late": late(name) for name in ("all_gather", "all_reduce", "scan")},
    **{f"{name} later": later(name) for name in ("all_reduce", "broadcast", "all_gather")},
    "a word": lambda comm, bad: comm.all_reduce(matrix(comm), op="smu" if bad else "sum"),
    "a name": lambda comm, bad: comm.barrier(**({"algoritm": "x"} if bad else {})),  # type: ignore
    "splits": lambda comm, bad: comm.all_to_all(matrix(comm), splits=[2] * (comm.size - bad)),
    "root": lambda comm, bad: comm.broadcast(matrix(comm), root=comm.size if bad else 0),
    "split": lambda comm, bad: comm.split("red" if bad else 0),  # type: ignore[arg-type]
    "list": listed,
    "group": grouped,
    "bound": bound,
}


def outcome(comm: pycoll.Communicator, call: Call, bad: bool) -> str:
    began = time.monotonic()
    try:
        call(comm, bad)
    except (pycoll.InvalidArgumentError, TypeError) as error:
        assert time.monotonic() - began < PROMPTLY_S
        return str(error)
    return ""


def works(comm: pycoll.Communicator) -> None:
    """Ranks are in step, and no channel holds what belongs to nobody."""
    size, rank = comm.size, comm.rank
    assert comm.all_reduce(rank) == size * (size - 1) // 2
    assert np.array_equal(comm.all_gather(np.full(2, rank)), np.repeat(np.arange(size), 2))
    for root in range(size):
        assert comm.broadcast(np.full(5, rank), root).tolist() == [root] * 5
        assert (comm.reduce(1, root) == size) == (rank == root)
    assert comm.scan(1) == rank + 1
    assert comm.all_to_all(np.arange(size) + 10 * rank).tolist() == [
        10 * other + rank for other in range(size)
    ]


def one_refuses(comm: pycoll.Communicator, names: list[str]) -> list[list[str]]:
    texts = []
    for name in names:
        texts.append([outcome(comm, CALLS[name], comm.rank == bad) for bad in range(comm.size)])
        works(comm)
    return texts


def check(told: list[list[list[str]]], names: list[str]) -> None:
    size = len(told)
    for number, name in enumerate(names):
        for bad in range(size):
            own = told[bad][number][bad]
            assert own, (name, bad)
            for rank in range(size):
                text = told[rank][number][bad]
                if rank != bad:
                    assert text.startswith(f"rank {bad} ("), (name, bad, rank, text)
                    assert "has refused its arguments of operation" in text, text
                    assert own[:40] in text, (name, own, text)


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_all_ranks_hear_of_it_and_go_on(transports: str) -> None:
    """Every collective, each rank in turn."""
    names = list(CALLS)
    told = world_in_processes(
        3, one_refuses, names, transports=transports, PYCOLL_SHARED_ARRAYS="0"
    )
    check(told, names)


def test_threads_of_one_process_hear_of_it() -> None:
    """Two ranks, where one waits for the other only."""
    names = [name for name in CALLS if name != "split"]
    check(world_in_threads(2).run(lambda comm: one_refuses(comm, names)), names)


@pytest.mark.parametrize("name", list(CALLS))
def test_nobody_is_disturbed_where_all_refuse(name: str) -> None:
    """The same error on all ranks, several times."""
    world = world_in_threads(3)

    def call(comm: pycoll.Communicator) -> list[str]:
        texts = [outcome(comm, CALLS[name], True) for _ in range(5)]
        works(comm)
        return texts

    for texts in world.run(call):
        assert all("refused" not in text and text for text in texts), texts


def test_refusals_of_a_rank_that_is_far_ahead() -> None:
    """A rank refuses many calls before the others make the first of them, and retries the last."""
    world = world_in_threads(3)
    count = 200

    def call(comm: pycoll.Communicator) -> Any:
        if comm.rank == 1:
            for _ in range(count):
                with pytest.raises(pycoll.InvalidArgumentError, match="x is"):
                    comm.all_reduce(None)
        else:
            time.sleep(0.2)
            for _ in range(count):
                with pytest.raises(pycoll.InvalidArgumentError, match="rank 1"):
                    comm.all_reduce(np.ones(1000))
        total = comm.all_reduce(np.ones(3)).tolist()
        works(comm)
        return total

    assert world.run(call) == [[3.0, 3.0, 3.0]] * 3


def test_calls_that_overlap_keep_their_partners() -> None:
    """Of several that are under way, only what was refused fails."""
    world = world_in_threads(3)

    def call(comm: pycoll.Communicator) -> list[Any]:
        found: list[Any] = []
        for turn in range(30):
            pending: list[Any] = []
            for number in range(6):
                bad = comm.rank == turn % 3 and number == turn % 5
                try:
                    x = None if bad else np.full(8, number + turn)
                    pending.append(comm.all_reduce(x, async_op=True))
                except pycoll.InvalidArgumentError:
                    pending.append(None)
            for number, work in enumerate(pending):
                try:
                    result = None if work is None else work.wait().tolist()
                except pycoll.InvalidArgumentError as error:
                    assert error.rank == turn % 3
                    result = None
                expected = None if number == turn % 5 else [3 * (number + turn)] * 8
                assert result == expected, (turn, number)
        works(comm)
        return found

    world.run(call)


def test_long_operations_end_in_the_middle() -> None:
    """Those that have begun have sent as much as channels hold."""
    world = world_in_threads(3)
    count = 1 << 20

    def call(comm: pycoll.Communicator) -> None:
        for turn in range(6):
            x = None if comm.rank == turn % 3 else np.full(count, turn)
            with pytest.raises(pycoll.InvalidArgumentError):
                comm.all_reduce(x)
            total = comm.all_reduce(np.arange(count) + comm.rank)
            assert np.array_equal(total, 3 * np.arange(count) + 3)
        works(comm)

    world.run(call)


def places(world: ThreadWorld) -> list[Any]:
    def call(comm: pycoll.Communicator) -> Any:
        x = pycoll.empty(1 << 20, np.float32)
        x[:] = comm.rank
        try:
            if comm.rank == 1:
                time.sleep(0.2)
            comm.all_reduce(None if comm.rank == 1 else x, out=x)
        except pycoll.InvalidArgumentError as error:
            texts = [str(error)]
        try:
            return [*texts, comm.all_reduce(np.ones(3)).tolist()]
        except pycoll.InvalidArgumentError as error:
            return [*texts, str(error)]

    return world.outcomes(call)


def test_memory_that_peers_read_ends_everything_with_that_error() -> None:
    """Where peers may still read or write an array where it lies, no rank goes on."""
    world = fresh_world(3)
    try:
        found = places(world)
    finally:
        world.close()
    for rank, (text, next_text) in enumerate(found):
        assert ("has refused its arguments" in text) == (rank != 1), text
        # Where the ranks cannot map each other's memory, all is as in ordinary memory.
        if not isinstance(next_text, list):
            assert "rank 1" in next_text, next_text
            assert "has refused its arguments" in next_text, next_text


def test_a_refused_message_of_a_group_is_told_to_its_collectives() -> None:
    """The messages of a group are looked at when it ends, before its collectives."""
    world = world_in_threads(2)

    def call(comm: pycoll.Communicator) -> str:
        with pytest.raises(pycoll.InvalidArgumentError) as caught, comm.group():
            comm.all_reduce(np.ones(3))
            if comm.rank == 1:
                comm.send(np.ones(3), 7)
            comm.broadcast(np.ones(3))
        works(comm)
        return str(caught.value)

    texts = world.run(call)
    assert "dest is 7" in texts[1]
    assert "rank 1" in texts[0], texts
    assert "dest is 7" in texts[0], texts


def test_messages_are_told_to_nobody() -> None:
    """No other rank waits for them in a collective."""
    world = world_in_threads(2)

    def call(comm: pycoll.Communicator) -> None:
        if comm.rank == 1:
            with pytest.raises(pycoll.InvalidArgumentError):
                comm.send(np.ones(3), 7)
        works(comm)

    world.run(call)
