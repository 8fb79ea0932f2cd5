"""Groups: several operations as one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from harness import fresh_world, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, MismatchError

Comm = pycoll.Communicator


@st.composite
def members(draw: Any) -> list[tuple[str, str, int, str]]:
    """Reductions of several types and lengths."""
    some = st.tuples(
        st.sampled_from(["float32", "int16", "bfloat16", "complex128", "uint8"]),
        st.sampled_from(["sum", "prod", "avg"]),
        st.sampled_from([0, 1, 7, 300, 70_000]),
        st.sampled_from(["new", "given", "same"]),
    )
    return draw(st.lists(some, min_size=1, max_size=12))


@given(members(), st.integers(1, 5), st.integers(0, 1000))
def test_groups_of_reductions(parts: list[Any], size: int, seed: int) -> None:
    inputs = [oracle.inputs(d, op, size, n, seed + i) for i, (d, op, n, _) in enumerate(parts)]

    def rank(comm: Comm) -> list[Any]:
        works, outs = [], []
        with comm.group():
            for (_, op, _, how), rows in zip(parts, inputs, strict=True):
                x = rows[comm.rank].copy()
                out = {"new": None, "given": np.zeros_like(x), "same": x}[how]
                outs.append(out)
                works.append(comm.all_reduce(x, op, out=out))
        for work, out in zip(works, outs, strict=True):
            assert work.done() and (out is None or work.wait() is out)
        return [work.wait() for work in works]

    expected = [oracle.fold(rows, op) for rows, (_, op, _, _) in zip(inputs, parts, strict=True)]
    for found in world_in_threads(size).run(rank):
        for one, other in zip(found, expected, strict=True):
            assert oracle.same_bits(one, other)


def test_a_group_of_everything() -> None:
    def rank(comm: Comm) -> None:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        inbox = np.zeros(100_000)
        with comm.group():
            # All send first: outside a group, messages as long as these would wait for each other.
            sent = comm.send(np.full(100_000, float(comm.rank)), right, tag=3)
            got = comm.recv(inbox, left, tag=3)
            total = comm.all_reduce(torch.ones(5))
            many = comm.all_reduce(np.ones(3, np.float32))
            whole = comm.all_gather(np.full(comm.rank, comm.rank))
            first = comm.broadcast(comm.rank + 5, root=2)
            done = comm.barrier()
        assert sent.wait() is None and done.wait() is None
        assert got.wait() is inbox and (inbox == left).all()
        assert isinstance(total.wait(), torch.Tensor) and total.wait().tolist() == [3.0] * 5
        assert many.wait().tolist() == [3, 3, 3] and whole.wait().tolist() == [1, 2, 2]
        assert first.wait() == 7

    world_in_threads(3).run(rank)


def test_fused_members_share_one_operation() -> None:
    """Counted by the communicator's own numbering, which errors show."""
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> None:
            with comm.group():
                for _ in range(10):
                    comm.all_reduce(np.ones(100))
            comm.all_reduce(np.ones(3 + comm.rank))

        for error in world.outcomes(rank):
            assert isinstance(error, MismatchError) and "operation 2:" in str(error)
    finally:
        world.close()


def test_a_shared_message_has_the_bits_of_one_call() -> None:
    lengths = (1, 50, 3000, 7)

    def rank(comm: Comm) -> None:
        rows = np.random.default_rng(comm.rank).standard_normal(sum(lengths)).astype(np.float32)
        parts = np.split(rows, np.cumsum(lengths)[:-1])
        for strict in (False, True):
            with comm.group():
                works = [comm.all_reduce(part, deterministic=strict) for part in parts]
            fused = [work.wait() for work in works]
            whole = comm.all_reduce(rows, deterministic=strict)
            assert np.concatenate(fused).tobytes() == whole.tobytes()
        for part, one in zip(parts, fused, strict=True):
            assert comm.all_reduce(part, deterministic=True).tobytes() == one.tobytes()

    world_in_threads(4).run(rank)


def test_results_inside_the_group_are_refused() -> None:
    def rank(comm: Comm) -> str:
        with comm.group():
            work = comm.all_reduce(np.ones(2))
            assert not work.done()
            with pytest.raises(InvalidArgumentError) as caught:
                work.wait()
        assert work.wait().tolist() == [2, 2]
        return str(caught.value)

    assert all("inside the group" in text for text in world_in_threads(2).run(rank))


def test_a_group_that_raises_runs_nothing() -> None:
    def rank(comm: Comm) -> None:
        out = np.full(2, 9.0)
        with pytest.raises(ZeroDivisionError), comm.group():
            work = comm.all_reduce(np.ones(2), out=out)
            raise ZeroDivisionError
        with pytest.raises(InvalidArgumentError, match="ended the block of the group"):
            work.wait()
        assert out.tolist() == [9, 9]
        assert comm.all_reduce(1) == 2

    world_in_threads(2).run(rank)


def test_wrong_members_are_refused_where_they_are_written() -> None:
    def rank(comm: Comm) -> None:
        with comm.group():
            with pytest.raises(InvalidArgumentError, match="op is 'nope'"):
                comm.all_reduce(np.ones(2), "nope")
            work = comm.all_reduce(np.ones(2))
        assert work.wait().tolist() == [2, 2]

    world_in_threads(2).run(rank)


def test_groups_in_groups_join_the_outer_one() -> None:
    def rank(comm: Comm) -> None:
        with comm.group():
            with comm.group():
                work = comm.all_reduce(1)
            assert not work.done()
        assert work.wait() == 2

    world_in_threads(2).run(rank)


def test_works_that_nobody_keeps_change_nothing() -> None:
    def rank(comm: Comm) -> None:
        xs = [np.full(3, number, np.float32) for number in range(2000)]
        for turn in range(3):  # of more members than the store of Works holds
            with comm.group():
                kept = [comm.all_reduce(x, out=x) for x in xs if x[0] % 3 == 0]
                for x in xs:
                    if x[0] % 3 != 0:
                        comm.all_reduce(x, out=x)
            assert all(work.wait()[0] % 3 == 0 for work in kept)
            scale = 2 ** (turn + 1)
            assert all((x == number * scale).all() for number, x in enumerate(xs))

    world_in_threads(2).run(rank)


def test_arrays_whose_works_nobody_keeps_live_until_the_end() -> None:
    def rank(comm: Comm) -> None:
        warm = np.ones(3, np.float32)
        comm.all_reduce(warm, out=warm)
        gone, sums, kept = [], [], []
        with comm.group():
            for number in range(8):
                x = np.full(3, number, np.float32)
                gone.append(weakref.ref(x))
                work = comm.all_reduce(x, out=x)
                if number % 4 == 1:
                    kept.append(work)
                sums.append(x.ctypes.data)
                del work, x
            assert all(one() is not None for one in gone)
            assert len(set(sums)) == len(sums)  # so that none lies where another one lay
        assert [work.wait().tolist() for work in kept] == [[2] * 3, [10] * 3]
        kept.clear()
        assert all(one() is None for one in gone)

    world_in_threads(2).run(rank)


def test_works_of_a_group_that_raises_hear_of_it_wherever_they_stand() -> None:
    def rank(comm: Comm) -> None:
        xs = [np.full(2, number, np.float32) for number in range(6)]
        comm.all_reduce(xs[0], out=xs[0])
        kept = []
        with pytest.raises(ZeroDivisionError), comm.group():
            for number, x in enumerate(xs):
                work = comm.all_reduce(x, out=x)
                if number % 2 == 0:
                    kept.append(work)
                del work
            raise ZeroDivisionError
        assert len({id(work) for work in kept}) == len(kept) == 3
        for work in kept:
            with pytest.raises(InvalidArgumentError, match="ended the block of the group"):
                work.wait()
        assert [x[0] for x in xs] == [0, 1, 2, 3, 4, 5]

    world_in_threads(2).run(rank)


def test_works_in_a_circle_are_collected() -> None:
    comm = world_in_threads(1).communicators[0]
    for _ in range(2):
        x = torch.ones(3)
        with comm.group():
            x.work = comm.all_reduce(x, out=x)  # type: ignore[attr-defined]
        gone = weakref.ref(x)
        del x
        gc.collect()
        assert gone() is None


def test_a_group_that_is_kept_is_in_nobodys_way() -> None:
    def rank(comm: Comm) -> None:
        ours = [np.ones(2, np.float32), np.ones(3, np.float32)]
        with comm.group() as kept:
            first = comm.all_reduce(ours[0], out=ours[0])
        assert first.wait().tolist() == [2, 2]
        comm.all_reduce(ours, out=ours)
        with comm.group():
            comm.all_reduce(ours[0], out=ours[0])
        with kept:
            comm.all_reduce(ours[0], out=ours[0])
            comm.all_reduce(ours[1], out=ours[1])
        assert [one[0] for one in ours] == [16, 4]

    world_in_threads(2).run(rank)
