"""Logical and location reductions as a user of NumPy calls them."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from harness import world_in_threads

from pycoll import InvalidArgumentError


def test_where_the_greatest_value_is() -> None:
    """As numpy.argmax over the ranks: the place is what each rank says."""

    def rank(comm: Any) -> None:
        values = np.array([[3.0, 5, 5], [7, 5, 1], [7, 2, 9]])
        x = np.stack([values[comm.rank], np.full(3, comm.rank)], axis=-1)
        found = comm.all_reduce(x, "maxloc")
        assert found[:, 0].tolist() == values.max(0).tolist()
        assert found[:, 1].tolist() == values.argmax(0).tolist()
        found = comm.all_reduce(x, "minloc")
        assert found[:, 0].tolist() == values.min(0).tolist()
        assert found[:, 1].tolist() == values.argmin(0).tolist()

    world_in_threads(3).run(rank)


@pytest.mark.parametrize("dtype", ["int8", "uint64", "float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("op", ["maxloc", "minloc"])
def test_every_collective_of_pairs(dtype: str, op: str) -> None:
    size, count = 3, 20_000
    rows = oracle.pairs(dtype, size, count, 4)
    whole = oracle.located(rows, op)
    cuts = oracle.bounds(count, size)

    def rank(comm: Any) -> None:
        x = rows[comm.rank]
        assert oracle.same_bits(comm.all_reduce(x, op), whole)
        assert oracle.same_bits(comm.all_reduce([x[:5], x[5:]], op)[1], whole[5:])
        with comm.group():
            works = [comm.all_reduce(x[:9].copy(), op), comm.all_reduce(x[9:20].copy(), op)]
        assert oracle.same_bits(works[1].wait(), whole[9:20])
        found = comm.reduce(x, 2, op)
        assert found is None or oracle.same_bits(found, whole)
        part = whole[cuts[comm.rank] : cuts[comm.rank + 1]]
        assert oracle.same_bits(comm.reduce_scatter(x, op), part)
        assert oracle.same_bits(comm.scan(x, op), oracle.located(rows[: comm.rank + 1], op))

    world_in_threads(size).run(rank)


def test_pairs_that_are_none_are_refused_before_and_behind_good_ones() -> None:
    def rank(comm: Any) -> None:
        good = np.ones((3, 2))
        comm.all_reduce(good, "maxloc")
        for x in (np.ones(6), np.ones((2, 3)), np.ones(()), np.ones((6, 1))):
            with pytest.raises(InvalidArgumentError, match="takes pairs of a value and its place"):
                comm.all_reduce(x, "maxloc")
            with pytest.raises(InvalidArgumentError, match="takes pairs"):
                comm.all_reduce([good, x], "maxloc")
        with pytest.raises(InvalidArgumentError, match="must have two axes"):
            comm.reduce_scatter(np.ones(2), "minloc")
        with pytest.raises(InvalidArgumentError, match="not defined for exscan"):
            comm.exscan(good, "minloc")
        with pytest.raises(InvalidArgumentError, match="not defined for complex64"):
            comm.all_reduce(np.ones((3, 2), np.complex64), "maxloc")
        comm.all_reduce(good, "maxloc")

    world_in_threads(2).run(rank)


def test_logical_reductions() -> None:
    def rank(comm: Any) -> None:
        x = np.array([0, comm.rank, 4, 0 if comm.rank else 9])
        assert comm.all_reduce(x, "land").tolist() == [0, 0, 1, 0]
        assert comm.all_reduce(x, "lor").tolist() == [0, 1, 1, 1]
        assert comm.all_reduce(x, "lxor").tolist() == [0, 0, 1, 1]
        assert comm.all_reduce(x.astype(bool), "land").dtype == bool
        assert comm.scan(x, "lor").tolist()[1] == (comm.rank > 0)
        assert comm.exscan(x, "land").tolist() == [[1] * 4, [0, 0, 1, 1], [0, 0, 1, 0]][comm.rank]
        assert comm.all_reduce(float("nan"), "land") == 1.0

    world_in_threads(3).run(rank)


def test_one_rank_alone_is_normalized_too() -> None:
    def rank(comm: Any) -> None:
        assert comm.all_reduce(np.array([5, 0, -1]), "lor").tolist() == [1, 0, 1]
        assert comm.all_reduce(np.array([[5, 3]]), "maxloc").tolist() == [[5, 3]]
        assert comm.all_reduce(np.array([5.5], np.float16), "avg").tolist() == [5.5]
        x = np.empty(3, int)
        bound = comm.all_reduce.bind(x, "lxor", out=x)
        for call in (bound, lambda: comm.all_reduce(x, "lxor", out=x)):
            for _ in range(3):  # native calls know the array from the second one on
                x[:] = 5, 0, -1
                call()
                assert x.tolist() == [1, 0, 1]

    world_in_threads(1).run(rank)
