"""The expected result of each collective, in NumPy; and inputs whose results are exact.

Inputs differ per element and rank as far as the type can tell. The type holds every partial result
of every order of folding exactly, so results are compared bit by bit.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from pycoll.arrays.rows import shares
from pycoll.types import DType, is_defined, numpy_dtype

Array = npt.NDArray[Any]

DTYPES = [dtype.word for dtype in DType]
OPS = ["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor", "lxor"]
LOGICAL = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}

#: The largest whole number up to which every whole number is exact, and the largest sum of
#: exponents of two that products may reach.
_WHOLE = {"float16": 2048, "bfloat16": 256, "float8_e4m3": 16, "float8_e5m2": 8}
_EXPONENT = {"float8_e4m3": 5, "float8_e5m2": 12}
#: Of averages: largest whole number, and the powers of two that it is multiplied by, from the
#: smallest subnormal to the largest number of the type.
_MEANS = {
    "float16": (2047, -24, 5),
    "bfloat16": (255, -133, 120),
    "float8_e4m3": (14, -9, 5),
    "float8_e5m2": (7, -16, 13),
}


def np_dtype(word: str) -> np.dtype[Any]:
    return numpy_dtype(DType[word.upper()])


def ops_for(dtype: str) -> list[str]:
    from pycoll.types import OPS as CODES

    return [op for op in OPS if is_defined(DType[dtype.upper()], CODES[op])]


def inputs(dtype: str, op: str, size: int, count: int, seed: int) -> Array:
    """One row per rank."""
    rng = np.random.default_rng([seed, size, count])
    target = np_dtype(dtype)
    shape = (size, count)
    if op in LOGICAL:
        return np.where(rng.integers(0, 3, shape) == 0, 0, rng.integers(1, 9, shape)).astype(target)
    if op == "avg" and dtype in _MEANS:
        whole, low, high = _MEANS[dtype]
        powers = np.exp2(rng.integers(low, high + 1, count).astype(np.float64))
        return (rng.integers(-whole, whole + 1, shape) * powers).astype(target)
    if target.kind in "iu":
        bits = rng.integers(0, 256, (size, count * target.itemsize), np.uint8)
        return np.ascontiguousarray(bits).view(target)
    if target.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if target.kind == "c":
        if op == "prod":
            return np.array([1, -1, 1j, -1j], target)[rng.integers(0, 4, shape)]
        parts = [_budgeted(rng, shape, 1 << 20, True) for _ in range(2)]
        return (parts[0] + 1j * parts[1]).astype(target)
    if op == "prod":
        exponents = _budgeted(rng, shape, _EXPONENT.get(dtype, 14), True)
        signs = rng.choice([-1.0, 1.0], shape)
        return (signs * np.exp2(exponents)).astype(target)
    limit = _WHOLE.get(dtype, 1 << 22)
    if op in ("min", "max"):
        return rng.integers(-limit, limit + 1, shape).astype(np.float64).astype(target)
    return _budgeted(rng, shape, limit, True).astype(np.float64).astype(target)


def _budgeted(rng: Any, shape: tuple[int, int], limit: int, signed: bool) -> Array:
    """Whole numbers whose absolute values add up to ``limit`` at most in each column.

    In integers throughout: floats would round the largest limits up, and overflow in the cast.
    """
    size, count = shape
    left = np.full(count, limit, np.uint64)
    rows = np.zeros(shape, np.int64 if signed else np.uint64)
    for rank in rng.permutation(size):
        most = np.maximum(left // np.uint64((size + 1) // 2), np.minimum(left, np.uint64(1)))
        take = rng.integers(0, most, dtype=np.uint64, endpoint=True)
        left -= take
        rows[rank] = take.astype(rows.dtype) * (rng.choice([-1, 1], count) if signed else 1)
    return rows


_FOLDS: dict[str, Any] = {
    "sum": np.add,
    "avg": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BOOL = {"sum": "bor", "avg": "bor", "max": "bor", "prod": "band", "min": "band"}


def fold(rows: Array, op: str) -> Array:
    """The combination of the rows, in their type."""
    target = rows.dtype
    if op in LOGICAL:
        return _left(LOGICAL[op], rows != 0).astype(target)
    if target.kind == "b":
        op = _BOOL.get(op, op)
    if (op == "avg" and target.kind not in "fc") or (op == "avg" and target.itemsize < 4):
        return _mean(rows)
    narrow = target.itemsize < 4 and target.kind not in "iub"
    wide = rows.astype(np.float64) if narrow else rows
    total = _left(_FOLDS[op], wide)
    if op == "avg":
        size = len(rows)
        if target.kind == "c":
            part = np.float32 if target.itemsize == 8 else np.float64
            real, imag = total.real / part(size), total.imag / part(size)
            return (real + 1j * imag).astype(target)
        return (total / target.type(size)).astype(target)
    return total.astype(target)


def _left(step: Any, rows: Array) -> Array:
    total = rows[0].copy()
    for row in rows[1:]:
        total = step(total, row)
    return total


def _mean(rows: Array) -> Array:
    """Integers: the exact mean, towards zero as C divides. Small floats: the sum of all values
    times 2^-k, divided once in float32 and rounded to the type; inputs() keep such sums exact."""
    size, target = len(rows), rows.dtype
    if target.kind in "iu":
        totals = rows.astype(object).sum(axis=0)
        means = [abs(n) // size * (1 if n > 0 else -1) for n in totals.flat]
        return np.array(means, target).reshape(totals.shape)
    factor = 2.0 ** -(size - 1).bit_length()
    total = (rows.astype(np.float64) * factor).sum(axis=0).astype(np.float32)
    return (total / np.float32(size * factor)).astype(target)


def identity(dtype: str, op: str) -> Any:
    """What exscan gives to rank 0."""
    target = np_dtype(dtype)
    if op in ("sum", "bor", "bxor", "lor", "lxor"):
        return target.type(0)
    if op in ("prod", "land"):
        return target.type(1)
    if op == "band":
        return ~target.type(0)
    highest = op == "min"
    if target.kind == "b":
        return np.bool_(highest)
    if target.kind in "iu":
        return target.type(np.iinfo(target).max if highest else np.iinfo(target).min)
    limits = ml_dtypes.finfo(target)
    if dtype == "float8_e4m3":
        return limits.max if highest else limits.min
    return target.type(np.inf if highest else -np.inf)


def pairs(dtype: str, size: int, count: int, seed: int) -> Array:
    """Of every rank ``count`` pairs of a value, few of which differ, and a place."""
    rng = np.random.default_rng([seed, size, count])
    values = rng.integers(0, 4, (size, count))
    return np.stack([values, rng.integers(0, 100, (size, count))], -1).astype(np_dtype(dtype))


def located(rows: Array, op: str) -> Array:
    """The best pair of each column: by value, and of equal ones by the lowest place."""
    sign = -1 if op == "maxloc" else 1
    columns = rows.astype(np.float64).tolist()
    best = [min(column, key=lambda p: (sign * p[0], p[1])) for column in zip(*columns, strict=True)]
    return np.array(best).astype(rows.dtype)


def bounds(rows: int, size: int) -> list[int]:
    """Where the rows of each rank begin, and the end."""
    return [0, *(int(end) for end in np.cumsum(shares(rows, size)))]


def same_bits(found: Any, expected: Any) -> bool:
    """Equal type, shape and bytes; for complex products zeros of both signs are equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    if found.dtype.kind == "c":
        return bool(np.array_equal(found, expected))
    return found.tobytes() == expected.tobytes()
