"""Element types and reductions, with their numbers in plans and engines.

Mirrors csrc/base/types.h; a test compares both. Collectives are in ``pycoll.schedule.collectives``.
"""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import InvalidArgumentError


class DType(IntEnum):
    """Element types. FLOAT8_E4M3 is the "fn" variant, without infinities."""

    BOOL = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    UINT8 = 5
    UINT16 = 6
    UINT32 = 7
    UINT64 = 8
    FLOAT16 = 9
    BFLOAT16 = 10
    FLOAT32 = 11
    FLOAT64 = 12
    COMPLEX64 = 13
    COMPLEX128 = 14
    FLOAT8_E4M3 = 15
    FLOAT8_E5M2 = 16

    @property
    def word(self) -> str:
        """The name that users write, such as "float32"."""
        return self.name.lower()


class ReduceOp(IntEnum):
    """Reductions. USER stands for a reduction from ``register_op``."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3
    AVG = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    USER = 8
    LAND = 9
    LOR = 10
    LXOR = 11
    MAXLOC = 12
    MINLOC = 13

    @property
    def word(self) -> str:
        """The name that users write, such as "sum"."""
        return self.name.lower()


#: Bytes of one element, indexed by DType.
ITEM_BYTES = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1, 1)

INTEGERS = frozenset(range(DType.INT8, DType.UINT64 + 1))
COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
#: Types whose sums and products are rounded, so that their bits depend on the order of folding.
ROUNDED = frozenset(DType) - INTEGERS - {DType.BOOL}

BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
LOGICAL = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
#: Reductions of pairs of a value and its place.
LOCATION = frozenset({ReduceOp.MAXLOC, ReduceOp.MINLOC})

#: Builtin reductions by the name that users write.
OPS = {op.word: op for op in ReduceOp if op is not ReduceOp.USER}

_EXTENSIONS = {
    DType.BFLOAT16: "bfloat16",
    DType.FLOAT8_E4M3: "float8_e4m3fn",
    DType.FLOAT8_E5M2: "float8_e5m2",
}


def is_defined(dtype: int, op: int) -> bool:
    """Return whether the reduction is defined for the type; the engines use the same rule."""
    if op in BITWISE:
        return dtype in INTEGERS or dtype == DType.BOOL
    if op in LOCATION:
        return dtype not in COMPLEX and dtype != DType.BOOL
    return not (op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in COMPLEX)


class WireForm(NamedTuple):
    """The elements that travel in place of an array's elements.

    ``array_items`` elements of the array travel as ``wire_items`` elements of ``dtype``.
    """

    dtype: DType
    array_items: int = 1
    wire_items: int = 1

    def nbytes(self, dtype: int, nbytes: int) -> int:
        """Return the bytes that travel for ``nbytes`` bytes of an array of type ``dtype``."""
        groups = nbytes // (ITEM_BYTES[dtype] * self.array_items)
        return groups * ITEM_BYTES[self.dtype] * self.wire_items


_FLOAT_MEAN, _LONG_MEAN = WireForm(DType.FLOAT32), WireForm(DType.INT64, 1, 2)
_SHORT_MEAN, _MEAN = WireForm(DType.INT32), WireForm(DType.INT64)
_MEANS = {
    **dict.fromkeys((DType.INT8, DType.INT16, DType.UINT8, DType.UINT16), _SHORT_MEAN),
    **dict.fromkeys((DType.INT32, DType.UINT32), _MEAN),
    **dict.fromkeys((DType.INT64, DType.UINT64), _LONG_MEAN),
    **dict.fromkeys((DType.FLOAT16, DType.BFLOAT16), _FLOAT_MEAN),
    **dict.fromkeys((DType.FLOAT8_E4M3, DType.FLOAT8_E5M2), _FLOAT_MEAN),
}
_TRUTH, _PAIRS = WireForm(DType.BOOL), WireForm(DType.COMPLEX128, 2, 1)
#: The most ranks for an average: the sum of this many 16-bit values fits into 32 bits.
MEAN_RANKS_MAX = 1 << 16


def wire_form(dtype: int, op: int) -> WireForm | None:
    """Return the wire form of elements (csrc/kernels/wire.h); None means that they travel as is."""
    if op == ReduceOp.AVG:
        return _MEANS.get(DType(dtype))
    if op in LOGICAL:
        return _TRUTH
    return _PAIRS if op in LOCATION else None


@lru_cache(maxsize=len(DType))
def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """Return NumPy's type. Raise InvalidArgumentError if it needs ml_dtypes, which is missing."""
    extension = _EXTENSIONS.get(DType(dtype))
    if extension is None:
        return np.dtype(DType(dtype).word)
    try:
        import ml_dtypes
    except ImportError:
        raise InvalidArgumentError(
            f"NumPy arrays of {DType(dtype).word} need the package ml_dtypes; install it"
        ) from None
    target: np.dtype[Any] = np.dtype(getattr(ml_dtypes, extension))
    return target


#: The bytes of 1, of the highest and of the lowest value, for the types that NumPy itself lacks.
#: float8_e4m3 has no infinities; its extreme values are 448 and -448.
_EXTENSION_BITS = {
    DType.BFLOAT16: (b"\x80\x3f", b"\x80\x7f", b"\x80\xff"),
    DType.FLOAT8_E4M3: (b"\x38", b"\x7e", b"\xfe"),
    DType.FLOAT8_E5M2: (b"\x3c", b"\x7c", b"\xfc"),
}


#: Reductions whose neutral element is zero.
_ZERO = {
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.LOR,
    ReduceOp.LXOR,
}


def identity_bytes(dtype: int, op: int) -> bytes:
    """Return the bytes of the neutral element of ``op``."""
    if op in _ZERO:
        return bytes(ITEM_BYTES[dtype])
    if dtype in _EXTENSION_BITS:
        one, highest, lowest = _EXTENSION_BITS[DType(dtype)]
        values = {ReduceOp.PROD: one, ReduceOp.LAND: one}
        return {**values, ReduceOp.MIN: highest, ReduceOp.MAX: lowest}[ReduceOp(op)]
    scalar = numpy_dtype(dtype).type
    if op in (ReduceOp.PROD, ReduceOp.LAND):
        return bytes(scalar(1).tobytes())
    if op == ReduceOp.BAND:
        return bytes((~scalar(0)).tobytes())
    return bytes(scalar(_extreme(dtype, highest=op == ReduceOp.MIN)).tobytes())


def _extreme(dtype: int, highest: bool) -> Any:
    if dtype == DType.BOOL:
        return highest
    if dtype in INTEGERS:
        limits = np.iinfo(numpy_dtype(dtype))
        return limits.max if highest else limits.min
    return np.inf if highest else -np.inf


def check_timeout(timeout: Any, name: str = "timeout") -> float:
    """Return ``timeout`` as seconds. Raise InvalidArgumentError unless it is a number above 0."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected a number of seconds")
    try:
        seconds = float(timeout)
    except OverflowError:
        raise InvalidArgumentError(
            f"{name} is a number beyond all floats: expected at most {sys.float_info.max:.3g} "
            "seconds, or math.inf for no limit"
        ) from None
    if math.isnan(seconds) or seconds <= 0:
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected more than 0 seconds")
    return seconds


def check_rank(value: Any, name: str, size: int) -> int:
    """Return ``value`` as a rank. Raise InvalidArgumentError unless it is from 0 to size - 1."""
    try:
        rank = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}: expected a rank") from None
    if not 0 <= rank < size:
        raise InvalidArgumentError(f"{name} is {rank}: expected a rank from 0 to {size - 1}")
    return rank


def check_int64(value: Any, name: str) -> int:
    """Return ``value`` as an int. Raise InvalidArgumentError unless it fits 64 bits."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name} is {value!r}: expected a whole number") from None
    if not -(2**63) <= number < 2**63:
        raise InvalidArgumentError(f"{name} is {number}: expected -2**63 to 2**63-1")
    return number


def whole(name: str, value: Any, least: int) -> int:
    """Return ``value`` as an int. Raise InvalidArgumentError unless it is that."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InvalidArgumentError(
            f"{name} is {value!r}: expected a whole number of at least {least}"
        )
    return int(value)


def real(name: str, value: Any, expected: str) -> float:
    """Return ``value`` as a finite float. The error says what is ``expected``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise InvalidArgumentError(f"{name} is {value!r}: expected {expected}")
    return float(value)


def wrong_op(shown: str) -> InvalidArgumentError:
    """Return the error of a reduction that does not suit codecs."""
    return InvalidArgumentError(
        f"op is {shown}: compress needs 'sum' or 'avg'; take one of these, or leave compress out"
    )


def wrong_type(name: str, dtype: int, taken: Sequence[DType]) -> InvalidArgumentError:
    """Return the error of an array ``name`` whose type is none of those that are ``taken``."""
    words = [one.word for one in taken]
    listed = " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    return InvalidArgumentError(
        f"{name} is {DType(dtype).word}: compress needs {listed}; convert the array, or leave "
        "compress out"
    )
