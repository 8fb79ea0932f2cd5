"""Codecs that keep a few bits of every value; csrc/kernels/codecs.h defines their bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.compress.codec import (
    Array,
    Codec,
    Modelled,
    Native,
    as_bytes,
    as_float32,
    wrong_length,
)
from pycoll.errors import InvalidArgumentError
from pycoll.types import whole

#: In the order of CodecKind.
_BF16, _INT8, _INT4, _FP8, _SIGN = range(5)
_KINDS = {"int8": _INT8, "int4": _INT4}
_ROUNDINGS = ("nearest", "stochastic")
_SEED_MAX = 2**64 - 1


def check_block(block: Any) -> int:
    """Return the values of a block. Raise InvalidArgumentError unless kernels take it."""
    size = whole("block", block, 1)
    if not 32 <= size <= 4096 or size & (size - 1):
        raise InvalidArgumentError(f"block is {size}: expected a power of two from 32 to 4096")
    return size


def check_seed(seed: Any) -> int:
    """Return a seed. Raise InvalidArgumentError unless 64 bits hold it."""
    value = whole("seed", seed, 0)
    if value > _SEED_MAX:
        raise InvalidArgumentError(f"seed is {value}: expected a whole number below 2**64")
    return value


@lru_cache(maxsize=64)
def kernels(native: Native) -> _core.Codec:
    """Return the kernels of a codec, of the best instruction set here."""
    return _core.Codec(*native, _core.isas()[-1])


class DenseCodec(Codec):
    """A codec of which the executor has kernels; ``native()`` describes it."""

    def native(self) -> Native:
        """Return the codec as the executor knows it."""
        raise InvalidArgumentError(f"{type(self).__name__} has no kernels")

    def modelled(self, count: int) -> Modelled | None:
        """Return the facts of the codec for the cost model, for arrays of ``count`` values."""
        values = max(count, 1)
        return Modelled(self.label, self.encoded_bytes(values) / (4 * values), "dense")

    def encode(self, x: Any) -> Array:
        """Return the codes of an array of float16, bfloat16 or float32, as one axis of uint8."""
        values = as_float32(x)
        codes = np.empty(self.encoded_bytes(len(values)), np.uint8)
        kernels(self.native()).encode(_core.view(codes), _core.view(values), None)
        return codes

    def decode(self, codes: Any, count: int) -> Array:
        """Return the ``count`` float32 values of some codes, on one axis."""
        given = as_bytes(codes)
        values = np.empty(whole("count", count, 0), np.float32)
        expected = self.encoded_bytes(len(values))
        if len(given) != expected:
            raise wrong_length(self, len(given), count, str(expected))
        kernels(self.native()).decode(_core.view(values), _core.view(given))
        return values

    def encoded_bytes(self, count: int) -> int:
        """Return the bytes that ``count`` values take."""
        return kernels(self.native()).nbytes(count)


@dataclass(frozen=True)
class BF16(DenseCodec):
    """Round float32 to bfloat16, ties to even: half the bytes, about 3 decimal digits.

    Infinities and NaN stay.

    Errors: none.

    Cost: 2 bytes for each value.

    >>> pycoll.compress.BF16().encode(np.ones(4, np.float32)).nbytes
    8
    """

    def native(self) -> Native:
        """Return the codec as the executor knows it."""
        return Native(_BF16, 256, False, 0)


@dataclass(frozen=True)
class FP8(DenseCodec):
    """Hold each value in 8 bits of floating point (e4m3), times a scale per block.

    Arguments: ``block``, the values that share a scale, a power of two from 32 to 4096.

    A block with an infinity or a NaN decodes to NaN.

    Errors: InvalidArgumentError for another block.

    Cost: 1 byte for each value and 4 for each block.

    >>> pycoll.compress.FP8(block=128).encode(np.ones(256, np.float32)).nbytes
    264
    """

    block: int = 128

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", check_block(self.block))

    def native(self) -> Native:
        """Return the codec as the executor knows it."""
        return Native(_FP8, self.block, False, 0)


@dataclass(frozen=True)
class Block(DenseCodec):
    """Hold each value as a small whole number, times a scale per block.

    Arguments:
        ``codes``: "int8", from -127 to 127, or "int4", from -7 to 7.
        ``block``: the values that share a scale, a power of two from 32 to 4096.
        ``rounding``: "nearest", or "stochastic": up or down by chance. The mean over all seeds is
            the value, in steps of 2**-16 of a code.
        ``seed``: of stochastic rounding, from 0 to 2**64 - 1. The draw is a function of seed, rank
            and place of the value, and not of the call: with one seed, equal arrays give equal
            bits in all calls. ``dataclasses.replace(codec, seed=step)`` draws anew.

    With rounding to nearest, a value minus the value of its code is exact in float32. A block with
    an infinity or a NaN decodes to NaN.

    Errors: InvalidArgumentError for other arguments.

    Cost: 1 or 1/2 byte for each value and 4 for each block.

    >>> codec = pycoll.compress.Block("int8", block=32)
    >>> codec.decode(codec.encode(np.float32([127, 2.4, -3])), 3)
    array([127.,   2.,  -3.], dtype=float32)
    """

    codes: str = "int8"
    block: int = 256
    rounding: str = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.codes not in _KINDS:
            raise InvalidArgumentError(f"codes is {self.codes!r}: expected 'int8' or 'int4'")
        if self.rounding not in _ROUNDINGS:
            raise InvalidArgumentError(
                f"rounding is {self.rounding!r}: expected 'nearest' or 'stochastic'"
            )
        object.__setattr__(self, "block", check_block(self.block))
        object.__setattr__(self, "seed", check_seed(self.seed))

    @property
    def label(self) -> str:
        """A short word for tables: "int8" or "int4"."""
        return self.codes

    def native(self) -> Native:
        """Return the codec as the executor knows it."""
        stochastic = self.rounding == "stochastic"
        return Native(_KINDS[self.codes], self.block, stochastic, self.seed if stochastic else 0)


@dataclass(frozen=True)
class Sign(DenseCodec):
    """Hold the sign of each value, and the mean magnitude of each block.

    It needs feedback: without one, sums of signs lose the sizes of the values.

    Arguments: ``block``, the values that share a magnitude, a power of two from 32 to 4096.

    A block with an infinity or a NaN decodes to NaN.

    Errors: InvalidArgumentError for another block.

    Cost: 1 bit for each value and 4 bytes for each block.

    >>> codec = pycoll.compress.Sign()
    >>> codec.decode(codec.encode(np.float32([1, -3])), 2)
    array([ 2., -2.], dtype=float32)
    """

    block: int = 256

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", check_block(self.block))

    def native(self) -> Native:
        """Return the codec as the executor knows it."""
        return Native(_SIGN, self.block, False, 0)
