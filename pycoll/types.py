"""Element types and reductions, with the numbers that plans and engines know them by.

Mirrors csrc/base/types.h; a test compares both. Collectives are in ``pycoll.collective``.
"""

from __future__ import annotations

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
        """As users write it: "float32"."""
        return self.name.lower()


class ReduceOp(IntEnum):
    """Reductions. USER stands for one that was registered by name."""

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
        """As users write it: "sum"."""
        return self.name.lower()


#: Bytes of one element, by DType.
ITEM_BYTES = (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 8, 16, 1, 1)

INTEGERS = frozenset(range(DType.INT8, DType.UINT64 + 1))
COMPLEX = frozenset({DType.COMPLEX64, DType.COMPLEX128})
#: Types whose sums and products are rounded, so that their bits depend on the order of folding.
ROUNDED = frozenset(DType) - INTEGERS - {DType.BOOL}

BITWISE = frozenset({ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR})
LOGICAL = frozenset({ReduceOp.LAND, ReduceOp.LOR, ReduceOp.LXOR})
#: Of pairs: a value, and where it is.
LOCATION = frozenset({ReduceOp.MAXLOC, ReduceOp.MINLOC})

#: Builtin reductions by the word that users write.
OPS = {op.word: op for op in ReduceOp if op is not ReduceOp.USER}

_EXTENSIONS = {
    DType.BFLOAT16: "bfloat16",
    DType.FLOAT8_E4M3: "float8_e4m3fn",
    DType.FLOAT8_E5M2: "float8_e5m2",
}


def is_defined(dtype: int, op: int) -> bool:
    """Whether the reduction means something for the type; the engines use the same rule."""
    if op in BITWISE:
        return dtype in INTEGERS or dtype == DType.BOOL
    if op in LOCATION:
        return dtype not in COMPLEX and dtype != DType.BOOL
    return not (op in (ReduceOp.MIN, ReduceOp.MAX) and dtype in COMPLEX)


class WireForm(NamedTuple):
    """What travels for an array's elements: so many of the array are so many of ``dtype``."""

    dtype: DType
    array_items: int = 1
    wire_items: int = 1

    def nbytes(self, dtype: int, nbytes: int) -> int:
        """Bytes on the way for ``nbytes`` of the array's."""
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
#: More ranks than this have no averages: the sum of so many 16-bit values fits into 32 bits.
MEAN_RANKS_MAX = 1 << 16


def wire_form(dtype: int, op: int) -> WireForm | None:
    """How elements travel (csrc/kernels/wire.h); None: as they are."""
    if op == ReduceOp.AVG:
        return _MEANS.get(DType(dtype))
    if op in LOGICAL:
        return _TRUTH
    return _PAIRS if op in LOCATION else None


@lru_cache(maxsize=len(DType))
def numpy_dtype(dtype: int) -> np.dtype[Any]:
    """NumPy's type; InvalidArgumentError where it needs ml_dtypes and that is not installed."""
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


#: One, the highest and the lowest value of the types that NumPy alone does not have; float8_e4m3
#: has no infinities, so there it is its largest number, 448.
_EXTENSION_BITS = {
    DType.BFLOAT16: (b"\x80\x3f", b"\x80\x7f", b"\x80\xff"),
    DType.FLOAT8_E4M3: (b"\x38", b"\x7e", b"\xfe"),
    DType.FLOAT8_E5M2: (b"\x3c", b"\x7c", b"\xfc"),
}


#: Reductions that zero does not change.
_ZERO = {
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.BOR,
    ReduceOp.BXOR,
    ReduceOp.LOR,
    ReduceOp.LXOR,
}


def identity_bytes(dtype: int, op: int) -> bytes:
    """The element that changes nothing under ``op``, as it lies in memory."""
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
