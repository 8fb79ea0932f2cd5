"""Averages summed in the array's own type, so that sums of 16-bit floats became infinite, and sums
of integers wrapped, where the mean itself was a number of the type."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest
from harness import world_in_threads

import pycoll

BFLOAT16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2

#: What each of two ranks has, and the mean.
PAIRS: list[tuple[Any, Any, Any, Any]] = [
    (np.float16, 40_000, 40_000, 40_000),
    (np.float16, 65_504, 65_504, 65_504),
    (np.float16, 2.0**-24, 2.0**-24, 2.0**-24),
    (np.float16, 2.0**-24, 3 * 2.0**-24, 2.0**-23),
    (BFLOAT16, 3.0e38, 3.0e38, 3.0e38),
    (BFLOAT16, 2.0**-133, 2.0**-133, 2.0**-133),
    (E4M3, 448, 448, 448),
    (E4M3, 2.0**-9, 2.0**-9, 2.0**-9),
    (E5M2, 57_344, 57_344, 57_344),
    (np.uint8, 200, 200, 200),
    (np.uint8, 255, 254, 254),
    (np.int8, -128, -128, -128),
    (np.int8, 100, 100, 100),
    (np.int8, -3, -4, -3),
    (np.int16, -32_768, -32_767, -32_767),
    (np.uint16, 65_535, 65_535, 65_535),
    (np.int32, 2**31 - 1, 2**31 - 1, 2**31 - 1),
    (np.int32, -(2**31), -(2**31), -(2**31)),
    (np.int64, 2**63 - 1, 2**63 - 1, 2**63 - 1),
    (np.int64, -(2**63), -(2**63), -(2**63)),
    (np.int64, -(2**63), 2**63 - 1, 0),
    (np.uint64, 2**64 - 1, 2**64 - 2, 2**64 - 2),
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_mean_of_two_is_right(deterministic: bool) -> None:
    def rank(comm: Any) -> None:
        for dtype, first, second, mean in PAIRS:
            # Small floats know no whole numbers beyond 2**53 by name: their values come as float.
            x = np.full(5, second if comm.rank else first).astype(dtype)
            expected = np.full(5, mean).astype(dtype)
            for found in (
                comm.all_reduce(x, "avg", deterministic=deterministic),
                comm.reduce(x, 1, "avg", deterministic=deterministic),
                comm.all_reduce([x, x], "avg", deterministic=deterministic)[1],
                comm.all_reduce(x.copy(), "avg", async_op=True).wait(),
            ):
                if found is not None:
                    assert oracle.same_bits(found, expected), (dtype, first, second, found)
            one = comm.reduce_scatter(x[:4], "avg", deterministic=deterministic)
            assert oracle.same_bits(one, expected[:2]), (dtype, first, second, one)
            with comm.group():
                together = comm.all_reduce(x, "avg", out=x)
            assert oracle.same_bits(together.wait(), expected), (dtype, first, second)

    world_in_threads(2).run(rank)


def test_ones_of_many_ranks_average_to_one() -> None:
    """In bfloat16 257 is no number, so that a sum of ones in the type stays at 256."""

    def rank(comm: Any) -> None:
        x = np.full(3, 33.0).astype(BFLOAT16)
        assert oracle.same_bits(comm.all_reduce(x, "avg"), x)

    world_in_threads(9).run(rank)


def test_long_arrays_and_calls_that_repeat() -> None:
    """More than a step of the conversion, and the same call with other arrays."""

    def rank(comm: Any) -> None:
        for count in (3, 3, 3, 40_000, 1_500_001):
            x = np.full(count, 60_000).astype(np.float16)
            x[::2] = comm.rank * 2.0**-24
            expected = x.copy()
            expected[::2] = 2.0**-24
            found = comm.all_reduce(x, "avg", out=x)
            assert found is x
            assert oracle.same_bits(x, expected), count

    world_in_threads(3).run(rank)


def test_averages_and_sums_are_not_taken_for_each_other() -> None:
    from harness import fresh_world

    world = fresh_world(2)
    try:
        errors = world.outcomes(
            lambda comm: comm.all_reduce(np.ones(3, np.float16), "sum" if comm.rank else "avg")
        )
        assert all(isinstance(one, pycoll.MismatchError) for one in errors), errors
    finally:
        world.close()
