"""Inputs whose results are exact in their type, so that a benchmark can compare bit by bit.

Element ``i`` of rank ``r`` is a small whole number that differs between neighbouring elements and
between ranks. In every order of folding, each partial result stays below the largest whole number
up to which the type represents every whole number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pycoll.types import DType, numpy_dtype

#: The largest whole number up to which every whole number is exact, for types where it is small.
_EXACT = {
    "int8": 127,
    "uint8": 255,
    "float16": 2048,
    "bfloat16": 256,
    "float8_e4m3": 16,
    "float8_e5m2": 8,
}

#: 2**64 divided by the golden ratio: the upper bits of its multiples are evenly distributed.
_ODD = 0x9E3779B97F4A7C15

Array = npt.NDArray[Any]


def array_type(dtype: str) -> np.dtype[Any]:
    """Return NumPy's type for one of pycoll's dtype words."""
    return numpy_dtype(DType[dtype.upper()])


def values(dtype: str, op: str, rank: int, size: int, start: int, count: int) -> Array:
    """Return elements ``start`` to ``start + count`` of the input of ``rank``, as int64."""
    index = np.arange(start, start + count, dtype=np.int64)
    scrambled = (2 * index + 1).astype(np.uint64) * np.uint64((2 * rank + 1) * _ODD % 2**64)
    mixed: Array = (scrambled >> np.uint64(40)).astype(np.int64)
    limit = _EXACT.get(dtype, 1 << 20)
    if dtype == "bool":
        return np.asarray(mixed % 2)
    if op == "prod":
        # One rank contributes a factor to each element and the others 1, so no order overflows.
        return np.where(index % size == rank, 1 + mixed % min(limit, 13), 1)
    if op in _LOGICAL:
        return np.asarray(mixed % 3)
    if op in ("sum", "avg"):
        return np.asarray(mixed % min(max(2, limit // size + 1), 509))
    return np.asarray(mixed % (min(limit, 126) + 1))


def contribution(dtype: str, op: str, rank: int, size: int, count: int) -> Array:
    """Return the first ``count`` elements of the input of ``rank``, in the dtype."""
    return values(dtype, op, rank, size, 0, count).astype(array_type(dtype))


_LOGICAL = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}
_FOLDS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    **_LOGICAL,
}
#: The reductions that the arithmetic ones mean for bool.
_BOOL = {"sum": "bor", "avg": "bor", "max": "bor", "prod": "band", "min": "band"}


def reduce_values(dtype: str, op: str, ranks: range, size: int, start: int, count: int) -> Array:
    """Return the reduction of elements ``start`` to ``start + count`` over ``ranks``, in the
    dtype."""
    target = array_type(dtype)
    fold = _FOLDS[_BOOL.get(op, op) if dtype == "bool" else op]
    total: Array = values(dtype, op, ranks[0], size, start, count)
    if op in _LOGICAL:
        total = total != 0
    for rank in ranks[1:]:
        total = fold(total, values(dtype, op, rank, size, start, count))
    if op != "avg" or dtype == "bool":
        return total.astype(target)
    if target.kind in "iu":
        return np.asarray(total // size).astype(target)
    # The division is rounded in float32 or float64, and the result once more in a narrower type.
    wide = np.float64 if dtype in ("float64", "complex128") else np.float32
    return np.asarray(total.astype(wide) / wide(size)).astype(target)
