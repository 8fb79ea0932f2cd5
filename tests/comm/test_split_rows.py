"""scatter, reduce_scatter and gather with splits: rows of each rank as the caller wants them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, MismatchError

Comm = pycoll.Communicator
SPLITS = st.lists(st.integers(0, 9), min_size=1, max_size=5)


@given(SPLITS, st.sampled_from([(), (3,), (2, 1, 2, 1, 2, 1, 2)]), st.integers(0, 4))
def test_rows_go_where_the_splits_say(
    splits: list[int], trailing: tuple[int, ...], root: int
) -> None:
    size, rows = len(splits), sum(splits)
    root %= size
    whole = np.arange(rows * int(np.prod(trailing, dtype=int))).reshape(rows, *trailing)
    starts = [sum(splits[:rank]) for rank in range(size)]

    def rank(comm: Comm) -> None:
        mine = whole[starts[comm.rank] : starts[comm.rank] + splits[comm.rank]]
        for _ in range(2):  # the second call finds what the first one has prepared
            is_root = comm.rank == root
            found = comm.scatter(whole if is_root else None, root, splits if is_root else None)
            assert np.array_equal(found, mine)
            out = np.zeros_like(mine)
            work = comm.scatter(whole if is_root else None, root, splits, out=out, async_op=True)
            assert work.wait() is out and np.array_equal(out, mine)
            found = comm.reduce_scatter(whole * (comm.rank + 1), "max", splits)
            assert np.array_equal(found, mine * size)
            gathered = comm.gather(mine, root, tuple(splits))
            assert is_root == (gathered is not None)
            assert gathered is None or np.array_equal(gathered, whole)
        # Calls without splits are others.
        assert len(comm.scatter(whole if comm.rank == root else None, root)) <= -(-rows // size)
        assert len(comm.reduce_scatter(whole)) <= -(-rows // size)

    world_in_threads(size).run(rank)


def test_wrong_splits_are_named() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones((4, 2))
        for name in ("scatter", "reduce_scatter"):
            refused = "" if comm.rank == 0 or name != "scatter" else "rank 0 .* has refused"
            for splits, told in (([1, 2], "add up to 3, but x has 4"), ([4], "has 1 entries")):
                with pytest.raises(InvalidArgumentError, match=f"{refused}.*splits {told}"):
                    getattr(comm, name)(x, splits=splits)
                comm.barrier()  # of several refusals that nobody heard, only the last is told
        with pytest.raises(InvalidArgumentError, match="splits and lengths mean the same"):
            comm.gather(x, splits=[4, 4], lengths=[4, 4])
        with pytest.raises(InvalidArgumentError, match=rf"splits\[{comm.rank}\] is 3, but x"):
            comm.gather(x, splits=[3, 3])
        assert comm.all_reduce(1) == 2

    world_in_threads(2).run(rank)


def test_ranks_with_other_splits_hear_of_it() -> None:
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> Any:
            return comm.reduce_scatter(np.ones(4), "sum", [1, 3] if comm.rank else [3, 1])

        assert all(isinstance(one, MismatchError) for one in world.outcomes(rank))
    finally:
        world.close()


def test_splits_and_dimensions_do_not_look_alike() -> None:
    """One rank splits rows [1, 0], another has them as trailing dimensions of as many elements."""
    world = fresh_world(2)
    try:

        def rank(comm: Comm) -> Any:
            if comm.rank:
                return comm.reduce_scatter(np.ones((1, 3)), "sum", [1, 0])
            return comm.reduce_scatter(np.ones((3, 1, 1)))

        assert all(isinstance(one, MismatchError) for one in world.outcomes(rank))
    finally:
        world.close()


TABLES = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=n, max_size=n)
)


@given(TABLES)
def test_ranks_that_know_all_rows_exchange_none(table: list[list[int]]) -> None:
    size = len(table)
    xs = [np.arange(2 * sum(line)).reshape(-1, 2) + 1000 * rank for rank, line in enumerate(table)]

    def rank(comm: Comm) -> None:
        mine = xs[comm.rank]
        wanted = comm.all_to_all(mine, table[comm.rank])
        out = np.zeros_like(wanted)
        for _ in range(2):  # the second call finds what the first one has prepared
            assert np.array_equal(comm.all_to_all(mine, lengths=table), wanted)
            work = comm.all_to_all(mine, lengths=np.array(table), out=out, async_op=True)
            assert work.wait() is out and np.array_equal(out, wanted)
        turned = [line[::-1] for line in table[::-1]]
        given = xs[size - 1 - comm.rank]
        other = comm.all_to_all(given, lengths=turned)
        assert len(other) == sum(line[comm.rank] for line in turned)

    world_in_threads(size).run(rank)


def test_wrong_tables_of_rows_are_named() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones((4, 2))
        for lengths, told in (
            ([[2, 2]], r"lengths is \[\[2, 2\]\]: expected 2 sequences"),
            (3, "lengths is 3: expected 2 sequences"),
            ([[4], [4]], r"lengths\[0\] has 1 entries"),
            ([[2, 2], [5, -1]], r"lengths\[1\]\[1\] is -1"),
            ([[2, 1], [2, 1]], rf"lengths\[{comm.rank}\] adds up to 3, but x has 4 rows"),
        ):
            with pytest.raises(InvalidArgumentError, match=told):
                comm.all_to_all(x, lengths=lengths)
            comm.barrier()  # of several refusals that nobody heard, only the last is told
        with pytest.raises(InvalidArgumentError, match="splits and lengths mean the same"):
            comm.all_to_all(x, [2, 2], lengths=[[2, 2], [2, 2]])

    world_in_threads(2).run(rank)
