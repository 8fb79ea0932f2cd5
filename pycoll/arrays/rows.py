"""Rows: splitting and joining arrays along their first axis, and comparing shapes of ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.errors import InvalidArgumentError, MismatchError
from pycoll.types import DType

Shape = tuple[int, ...]

#: Trailing dimensions that a signature holds in full; a checksum covers all of them.
_SHOWN = 6
#: Numbers in a signature: dtype, number of axes, rows, a checksum of the trailing dimensions, and
#: the first of these dimensions.
SIGNATURE_LENGTH = 4 + _SHOWN
#: Numbers in a header: dtype, number of axes, all dimensions. NumPy has at most 64 axes.
HEADER_LENGTH = 2 + 64
#: A flag in the dtype number of a header: rows follow. Native code leaves such headers to Python.
_SPLITS = 1 << 32


def shares(rows: int, size: int) -> list[int]:
    """Return the rows of each rank. They differ by at most one; the lowest ranks get more."""
    base, extra = divmod(rows, size)
    return [base + (rank < extra) for rank in range(size)]


def need_axis(shape: Shape, operation: str) -> None:
    """Raise InvalidArgumentError for a 0-d array, which has no rows to split."""
    if not shape:
        raise InvalidArgumentError(
            f"x has no axis (shape ()), but {operation} cuts x along its first axis"
        )


def with_rows(shape: Shape, rows: int) -> Shape:
    """Return the shape with the same trailing dimensions and another number of rows."""
    return (rows, *shape[1:])


def signature(dtype: int, shape: Shape) -> list[int]:
    """Return the numbers by which ranks compare arrays before they join them."""
    trailing = shape[1:]
    shown = [*trailing[:_SHOWN], *[-1] * (_SHOWN - len(trailing))]
    rows = shape[0] if shape else 1
    return [dtype, len(shape), rows, zlib.crc32(repr(trailing).encode()), *shown]


def agreed_rows(signatures: Sequence[Sequence[int]], operation: str) -> list[int]:
    """Return the rows of each rank.

    Raise MismatchError, which names the ranks whose dtype or trailing dimensions differ from those
    of most ranks.
    """
    keys = [(s[0], s[1], s[3]) for s in signatures]
    if len(set(keys)) > 1:
        usual = max(keys, key=keys.count)
        odd = [rank for rank, key in enumerate(keys) if key != usual]
        first, other = odd[0], keys.index(usual)
        named = f"rank {first}" if len(odd) == 1 else "ranks " + ", ".join(map(str, odd))
        raise MismatchError(
            f"{operation}: {named} passed {_describe(signatures[first])}, rank {other} "
            f"{_describe(signatures[other])}; dtype and all dimensions but the first must agree",
            rank=first,
            ranks=odd,
            operation=operation,
        )
    return [s[2] for s in signatures]


def _describe(one: Sequence[int]) -> str:
    dtype, axes, rows = one[:3]
    if axes == 0:
        shape = "()"
    else:
        trailing = [str(n) for n in one[4 : 4 + min(axes - 1, _SHOWN)]]
        more = ["..."] if axes - 1 > _SHOWN else []
        shape = "(" + ", ".join([str(rows), *trailing, *more]) + ("," if axes == 1 else "") + ")"
    return f"{DType(dtype).word} of shape {shape}"


def header(dtype: int, shape: Shape, splits: bool = False) -> list[int]:
    """Return dtype and shape as a fixed number of integers, for ranks that know neither.

    ``splits``: whether a broadcast of the rows of each rank follows.
    """
    first = dtype | _SPLITS if splits else dtype
    return [first, len(shape), *shape, *[0] * (HEADER_LENGTH - 2 - len(shape))]


def has_splits(numbers: Any) -> bool:
    """Return whether a broadcast of the rows of each rank follows this header."""
    return numbers[0] > 0 and bool(numbers[0] & _SPLITS)


def read_header(numbers: Sequence[int]) -> tuple[int, Shape]:
    """Return the dtype and the shape of a header."""
    return int(numbers[0]) & ~_SPLITS, tuple(int(n) for n in numbers[2 : 2 + int(numbers[1])])


def check_rows(values: Any, name: str, size: int) -> list[int]:
    """Return ``values`` as one number of rows per rank, or raise InvalidArgumentError."""
    if isinstance(values, str | bytes) or not isinstance(values, Sequence | np.ndarray):
        raise InvalidArgumentError(f"{name} is {values!r}: expected {size} whole numbers")
    numbers = list(values)
    if len(numbers) != size:
        raise InvalidArgumentError(
            f"{name} has {len(numbers)} entries: expected one for each of the {size} ranks"
        )
    for rank, number in enumerate(numbers):
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 0:
            raise InvalidArgumentError(
                f"{name}[{rank}] is {number!r}: expected a whole number of at least 0"
            )
    return [int(number) for number in numbers]


def check_splits(
    splits: Any, rows: int, size: int, name: str = "splits", array: str = "x"
) -> list[int]:
    """Return ``splits`` as one number of rows per rank, whose sum is the ``rows`` of an array.

    Raise InvalidArgumentError, which names the arguments ``name`` and ``array``, for anything else.
    """
    checked = check_rows(splits, name, size)
    if sum(checked) != rows:
        add = "add" if name == "splits" else "adds"
        raise InvalidArgumentError(
            f"{name} {add} up to {sum(checked)}, but {array} has {rows} rows"
        )
    return checked


def split_rows(splits: Any, rows: int, size: int) -> list[int]:
    """Return the rows of each rank: ``splits`` after a check, or equal shares for None."""
    return shares(rows, size) if splits is None else check_splits(splits, rows, size)


def elements(rows: Sequence[int], shape: Shape) -> list[int]:
    """Return the number of elements in each count of rows, for these trailing dimensions."""
    each = math.prod(shape[1:])
    return [count * each for count in rows]
