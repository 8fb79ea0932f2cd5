"""The base of all codecs, and the arrays that they take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from pycoll.errors import InvalidArgumentError

#: A NumPy array.
Array = Any


class Native(NamedTuple):
    """A codec that the executor runs: the arguments of ``_core.Codec`` but the last."""

    kind: int
    block: int
    stochastic: bool
    seed: int


class Modelled(NamedTuple):
    """The facts of a codec for the cost model: the arguments of ``cost.codec_costs.Coded``."""

    name: str
    ratio: float
    way: str


class Codec(ABC):
    """A way to hold an array of floats in fewer bytes. Codecs are immutable and hashable.

    ``compress=codec`` of a collective takes one. All ranks pass equal codecs. This is the base
    class; programs with functions of their own use ``Custom``.

    Errors: InvalidArgumentError from ``encode`` for an array that is not of floats, and from
    ``decode`` for codes of another number of values.

    Cost: that of the codec; a collective encodes and decodes each part once on each rank.

    >>> codec = pycoll.compress.Block("int8")
    >>> isinstance(codec, pycoll.compress.Codec), codec.label
    (True, 'int8')
    """

    def native(self) -> Native | None:
        """Return the codec as the executor knows it.

        None means that the executor has no kernels for it; the codec then runs its collectives.
        """
        return None

    @property
    def label(self) -> str:
        """A short word for tables: "int8", "topk(0.01)"."""
        return type(self).__name__.lower()

    def modelled(self, count: int) -> Modelled | None:
        """Return the facts of the codec for the cost model, for arrays of ``count`` values.

        None means that it cannot predict the codec, whose bytes follow from values or shapes.
        """
        return None

    @abstractmethod
    def encode(self, x: Any) -> Array:
        """Return the codes of an array of float16, bfloat16 or float32, as one axis of uint8."""

    @abstractmethod
    def decode(self, codes: Any, count: int) -> Array:
        """Return the ``count`` float32 values of some codes, on one axis.

        Raises InvalidArgumentError where the codes do not hold this many values.
        """


def as_float32(x: Any, name: str = "x") -> Array:
    """Return an array of floats as one axis of float32; values of other types raise."""
    array = np.asarray(x)
    word = array.dtype.name
    if word not in ("float16", "bfloat16", "float32"):
        hint = f": pass {name}.astype(numpy.float32)" if word == "float64" else ""
        raise InvalidArgumentError(
            f"{name} has dtype {word}, but codes hold float16, bfloat16 and float32{hint}"
        )
    return np.ascontiguousarray(array, np.float32).reshape(-1)


def as_bytes(codes: Any) -> Array:
    """Return an object with bytes as one axis of uint8."""
    return np.frombuffer(codes, np.uint8)


def remainder(wanted: Array, sent: Array) -> Array:
    """Return the next residual: an array minus the values that its codes decode to.

    ``wanted``: the array; ``sent``: the decoded values, of the same shape and type.

    An infinity or a NaN that is sent leaves nothing. A NaN that is sent stands for all values of
    the array that are not finite, so none of them stays in a residual.
    """
    is_sent = (sent == wanted) | np.isnan(sent)
    if np.isnan(sent).any():
        is_sent |= ~np.isfinite(wanted)
    with np.errstate(invalid="ignore"):
        return np.where(is_sent, wanted.dtype.type(0), wanted - sent)


def wrong_length(codec: Codec, found: int, count: int, expected: str) -> InvalidArgumentError:
    """Return the error about codes that do not hold ``count`` values."""
    return InvalidArgumentError(
        f"codes of {codec!r} have {found} bytes for {count} values: expected {expected}"
    )
