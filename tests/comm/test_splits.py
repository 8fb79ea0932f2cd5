"""split: who is in which part, that parts stand by themselves, and what becomes of failures."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ProcessWorld, fresh_world, world_in_processes, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import ClosedError, InvalidArgumentError, PeerLostError, TransportError
from pycoll.bootstrap import subcommunicators

Comm = pycoll.Communicator


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.tuples(st.sampled_from([None, 0, 1, 7]), st.integers(-3, 3)), min_size=n, max_size=n
        )
    )
)
def test_split(places: list[tuple[int | None, int]]) -> None:
    size = len(places)

    def rank(comm: Comm) -> Any:
        color, key = places[comm.rank]
        part = comm.split(color, key)
        if part is None:
            return None
        with part:
            order = part.all_gather(comm.rank)
            return part.rank, part.size, order, part.all_reduce(comm.rank)

    for parent_rank, found in enumerate(world_in_threads(size).run(rank)):
        color = places[parent_rank][0]
        if color is None:
            assert found is None
            continue
        same = [r for r in range(size) if places[r][0] == color]
        order = sorted(same, key=lambda r: (places[r][1], r))
        assert found == (order.index(parent_rank), len(order), order, sum(order))


def test_a_part_is_independent_of_its_parent() -> None:
    def rank(comm: Comm) -> None:
        part = comm.split(comm.rank % 2)
        assert part is not None and part.name.startswith(comm.name)
        if comm.rank % 2:
            assert part.all_reduce(1) == 2
        works = [comm.all_reduce(1, async_op=True), part.all_reduce(1, async_op=True)]
        assert [work.wait() for work in works] == [4, 2]
        part.close()
        with pytest.raises(ClosedError):
            part.barrier()
        assert comm.all_reduce(1) == 4

    world_in_threads(4).run(rank)


def test_split_inside_a_group_is_refused() -> None:
    comm = world_in_threads(1).communicators[0]
    with comm.group(), pytest.raises(InvalidArgumentError, match="split inside a group"):
        comm.split(0)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def parts_of_parts(comm: Comm, steps: int) -> dict[str, Any]:
    """In a process: sub-communicators at both depths, used together, and what they leave behind."""
    subcommunicators._UNDER_WAY_MAX = 3 * comm.size * steps  # so many peers at a time
    half = comm.split(comm.rank % 2, -comm.rank)
    assert half is not None
    sums, left = [], []
    for _ in range(3):
        left.append(descriptors())
        with half:
            pair = half.split(half.rank // 2)
            assert pair is not None
            mine = np.full(100_000, comm.rank, np.float32)
            works = [one.all_reduce(mine, async_op=True) for one in (pair, half, comm)]
            sums.append([int(work.wait()[-1]) for work in works])
            again = half.split(None if half.rank else 5)
            assert (again is None) == bool(half.rank)
            pair.close()
        half = comm.split(comm.rank % 2, -comm.rank)
        assert half is not None
    return {
        "media": half.transport_names(),
        "order": half.all_gather(comm.rank),
        "sums": sums,
        "left": left[2] - left[1],
    }


@pytest.mark.parametrize("steps", [1, 100])
def test_parts_of_processes(steps: int) -> None:
    size = 6
    found = world_in_processes(size, parts_of_parts, steps)
    for rank, one in enumerate(found):
        order = sorted((r for r in range(size) if r % 2 == rank % 2), reverse=True)
        assert (one["media"], one["order"], one["left"]) == ("shm", order, 0)
        at = order.index(rank) // 2 * 2
        sums = [sum(order[at : at + 2]), sum(order), sum(range(size))]
        assert one["sums"] == [sums] * 3


def killed_while_splitting(comm: Comm) -> Any:
    comm.split(0)
    comm.barrier()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        comm.split(0)
    except PeerLostError as error:
        return error.rank, time.monotonic() - begin
    return None


def test_a_rank_that_dies_while_splitting_is_named() -> None:
    outcomes = ProcessWorld(3, killed_while_splitting).outcomes()
    for rank in (0, 2):
        lost, seconds = outcomes[rank]
        assert lost == 1
        assert seconds < 5


@pytest.mark.parametrize("broken", [0, 3])
def test_a_failure_is_told_to_its_part_and_leaves_the_others_alone(
    broken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subcommunicators._Part.open

    def opened(self: Any, make: Any) -> None:
        if self._parent.rank == broken and self._parent.split == 1:
            raise OSError(24, "Too many open files")
        real(self, make)

    monkeypatch.setattr(subcommunicators._Part, "open", opened)
    world = fresh_world(5)

    def rank(comm: Comm) -> Any:
        try:
            part = comm.split(comm.rank % 2 if comm.rank < 4 else None)
        except TransportError as error:
            part = str(error)
        again = comm.split(comm.rank % 2)
        assert again is not None
        return part, again.all_reduce(1)

    for one, (part, again) in enumerate(world.run(rank)):
        assert again == (2 if one % 2 else 3)
        if one == 4:
            assert part is None
        elif one % 2 == broken % 2:
            assert "Too many open files (raise the limit, ulimit -n)" in part
            assert one == broken or f"rank {broken // 2} failed to join" in part
        else:
            assert part.size == 2
    world.close()


def fails_on_the_way(comm: Comm) -> Any:
    """A rank fails behind the first step, when descriptors are in the inboxes of others."""
    subcommunicators._UNDER_WAY_MAX = 3 * comm.size
    real = subcommunicators._Part.leave

    def leave(self: Any, offsets: range) -> None:
        if self._parent.rank == 1 and offsets.start == 2 and self._parent.split == 1:
            raise OSError(24, "Too many open files")
        real(self, offsets)

    subcommunicators._Part.leave = leave  # type: ignore[method-assign]  # in this process alone
    before = descriptors()
    try:
        comm.split(0)
    except TransportError as error:
        failed = str(error)
    left = descriptors() - before
    part = comm.split(0)
    assert part is not None
    return failed, left, part.all_reduce(comm.rank)


def test_what_a_failed_split_left_in_inboxes_is_thrown_away() -> None:
    for rank, (failed, left, total) in enumerate(world_in_processes(4, fails_on_the_way)):
        assert "Too many open files (raise the limit, ulimit -n)" in failed
        assert rank == 1 or failed.startswith("rank 1 failed to join")
        assert (left, total) == (0, 6)


@pytest.mark.parametrize("colors", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, None, 0]])
def test_parts_within_and_across_hosts(colors: list[int | None]) -> None:
    hosts = (0, 0, 1, 1)

    def rank(comm: Comm) -> Any:
        part = comm.split(colors[comm.rank])
        if part is None:
            return None
        with part:
            return part.transport_names(), part.all_reduce(comm.rank), part.local_size

    world = world_in_threads(4, "shm,tcp", hosts)
    for me, found in enumerate(world.run(rank)):
        same = [r for r in range(4) if colors[r] == colors[me]]
        if colors[me] is None:
            assert found is None
            continue
        media = {"shm" if hosts[r] == hosts[me] else "tcp" for r in same if r != me}
        local = sum(hosts[r] == hosts[me] for r in same)
        assert found == ("+".join(sorted(media)), sum(same), local)
