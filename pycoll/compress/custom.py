"""Custom: a codec of two functions of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pycoll.compress.codec import Array, ComposedCodec, as_bytes, as_float32
from pycoll.errors import InvalidArgumentError
from pycoll.types import whole


@dataclass(frozen=True)
class Custom(ComposedCodec):
    """A codec of two functions, for experiments.

    Arguments:
        ``encoder``: takes a NumPy array of float32 with one axis; returns an object with bytes.
        ``decoder``: takes bytes and the number of values; returns so many values, as anything that
            NumPy turns into an array.
        ``name``: names the codec in errors and when ranks compare their codecs; by default the
            qualified name of ``encoder``.

    The functions are the same on all ranks. ``decoder`` gives equal bits for equal bytes, so that
    all ranks get the same result. A collective cuts an array into one part per rank and encodes
    each part by itself.

    Errors: InvalidArgumentError for arguments that are not functions, and from a call whose
    functions return something else. An exception of a function reaches the caller; the other ranks
    raise RankFailedError that names the rank.

    >>> halves = pycoll.compress.Custom(
    ...     lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, np.float16)
    ... )
    >>> halves.decode(halves.encode(np.float32([1, 2.5])), 2)
    array([1. , 2.5], dtype=float32)
    """

    encoder: Callable[[Any], Any]
    decoder: Callable[[bytes, int], Any]
    name: str = ""

    def __post_init__(self) -> None:
        for word in ("encoder", "decoder"):
            if not callable(getattr(self, word)):
                raise InvalidArgumentError(
                    f"{word} is {getattr(self, word)!r}: expected a function"
                )
        if not isinstance(self.name, str):
            raise InvalidArgumentError(f"name is {self.name!r}: expected a text")
        if not self.name:
            found = getattr(self.encoder, "__qualname__", type(self.encoder).__name__)
            object.__setattr__(self, "name", found)

    def __repr__(self) -> str:
        return f"Custom({self.name!r})"

    def encode(self, x: Any) -> Array:
        """Return the bytes of ``encoder``, as one axis of uint8."""
        told = self.encoder(as_float32(x))
        try:
            return as_bytes(memoryview(told).cast("B"))
        except (TypeError, ValueError):
            raise InvalidArgumentError(
                f"the encoder of {self!r} returned a {type(told).__name__}: expected bytes, or a "
                "contiguous array"
            ) from None

    def decode(self, codes: Any, count: int) -> Array:
        """Return the values of ``decoder``, float32 on one axis."""
        given = as_bytes(codes).tobytes()
        found = np.asarray(self.decoder(given, whole("count", count, 0)), np.float32)
        if found.size != count:
            raise InvalidArgumentError(
                f"the decoder of {self!r} returned {found.size} values: expected {count}"
            )
        return found.reshape(-1)
