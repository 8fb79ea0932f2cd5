"""Copies and conversions of arrays of any framework that has the operators + - * /."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from pycoll.arrays.registry import input_of
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType

_HALVES = ("float16", "bfloat16")
_TYPES = (*_HALVES, "float32", "float64", "complex64", "complex128")


def check(arrays: Sequence[tuple[str, Any]]) -> list[list[Any]]:
    """The (name, shape, dtype) of each array; InvalidArgumentError for unfit ones."""
    if not arrays:
        raise InvalidArgumentError("params has no array: expected at least one")
    facts = []
    for name, array in arrays:
        view = input_of(array, None, name)[1]
        word = DType(view.dtype).word
        if word not in _TYPES:
            raise InvalidArgumentError(
                f"{name} has dtype {word}: local updates average {', '.join(_TYPES)}"
            )
        if not hasattr(type(array), "__sub__"):
            raise InvalidArgumentError(
                f"{name} is a {type(array).__name__}: expected an array with the operators + - * /"
            )
        facts.append([name, list(view.shape), word])
    return facts


def copy_of(array: Any) -> Any:
    """A copy; the array itself where it has no method for that, as a number of Python."""
    copy = getattr(array, "clone", None) or getattr(array, "copy", None)
    return array if copy is None else copy()


def widen(array: Any) -> Any:
    """A float32 copy of an array of float16 or bfloat16; other arrays themselves."""
    if str(getattr(array, "dtype", "")).removeprefix("torch.") not in _HALVES:
        return array
    if hasattr(array, "astype"):
        return array.astype("float32")
    return array.to(sys.modules["torch"].float32)


def convert_like(array: Any, like: Any) -> Any:
    """``array`` in the dtype and, for NumPy, the class of ``like``."""
    dtype = getattr(like, "dtype", None)
    if isinstance(like, np.ndarray):
        # Operators turn arrays without axes into scalars.
        return np.asarray(array, dtype)
    if dtype is None or array.dtype == dtype:
        return array
    return array.astype(dtype) if hasattr(array, "astype") else array.to(dtype)


def mix_values(local: Any, common: Any, mix: float) -> Any:
    """``mix`` parts of the local values and 1 - mix of the common ones, in the local dtype.

    With 0 the result is a copy of the common values; with 1 it is the local array itself.
    """
    if mix == 1:
        return local
    if mix == 0:
        result = convert_like(common, local)
        return copy_of(common) if result is common else result
    return convert_like(widen(local) * mix + common * (1 - mix), local)


def ranges(counts: Sequence[int], fragments: int) -> list[range]:
    """Cut neighbouring arrays into fragments of about equally many elements, none empty."""
    ends, total, sent = [0], sum(counts), 0
    for number, count in enumerate(counts):
        sent += count
        left = fragments - len(ends)  # fragments that still begin after this one
        must = len(counts) - number - 1 == left
        if left and (must or sent * fragments >= total * len(ends)):
            ends.append(number + 1)
    ends.append(len(counts))
    return [range(a, b) for a, b in itertools.pairwise(ends)]
