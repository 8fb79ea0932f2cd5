"""Inputs for tests left the range in which their type is exact, so that sums wrapped unnoticed."""

from __future__ import annotations

import numpy as np
import oracle
import pytest

SIZES = [1, 2, 3, 4, 7, 33]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [one for one in oracle.DTYPES if "int" in one])
def test_averages_of_integers_do_not_wrap(dtype: str, size: int) -> None:
    """In Python's integers, which have no range, the oracle's result is the same."""
    rows = oracle.inputs(dtype, "avg", size, 300, seed=size)
    columns = [[int(value) for value in column] for column in rows.T]
    totals = [sum(column) for column in columns]
    exact = [total // size if total >= 0 else -(-total // size) for total in totals]
    assert oracle.fold(rows, "avg").tolist() == exact
    assert len({tuple(row) for row in rows.tolist()}) == size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [one for one in oracle.DTYPES if "float" in one])
def test_partial_results_of_floats_are_exact(dtype: str, size: int) -> None:
    """Whole numbers whose sums stay where all are exact; powers of two that stay normal."""
    rows = oracle.inputs(dtype, "sum", size, 300, seed=size).astype(np.float64)
    target = oracle.np_dtype(dtype)
    for total in (np.abs(rows).sum(0), np.abs(rows).sum(0) - 1):
        assert (total.astype(target).astype(np.float64) == total).all()
    assert (rows == np.rint(rows)).all()
    factors = np.abs(oracle.inputs(dtype, "prod", size, 300, seed=size).astype(np.float64))
    for total in (factors.prod(0), 1 / factors.prod(0)):
        assert (total.astype(target).astype(np.float64) == total).all()
