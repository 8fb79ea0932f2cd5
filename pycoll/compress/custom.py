"""Custom: a codec of two functions of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pycoll.compress.call_memory import shift
from pycoll.compress.codec import Array, as_bytes, as_float32, remainder
from pycoll.compress.coded_exchange import NO_CODES, Encoded, codes_of, from_owners, to_owners
from pycoll.compress.composed import ComposedCodec, Started
from pycoll.compress.host_sums import add_up_in_hosts
from pycoll.compress.operands import Operands
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
    ``encoder`` returns something else. ReductionError on all ranks names the rank whose codes have
    another number of values. An exception of a function reaches the caller; the other ranks raise
    ReductionError or InvalidArgumentError that names the rank.

    Cost: what the functions take, on the thread of the caller; arrays are copied.

    >>> halves = pycoll.compress.Custom(
    ...     lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, np.float16)
    ... )
    >>> halves.decode(halves.encode(np.float32([1, 2.5])), 2)
    array([1. , 2.5], dtype=float32)
    """

    wide: ClassVar[bool] = False

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

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run all exchanges but the last, which it starts.

        Each rank encodes the parts of the other owners. An owner folds decoded values and its own
        in full precision, in the order of the ranks that encode, and encodes the result once. So
        the residual of its own part is the error of this second encoding.
        """
        facts = [self, *given.facts()]
        encoders = add_up_in_hosts(comm, given, name, facts)
        given.memory.correct(given.own)
        residuals = given.memory.residuals()
        values, start, own = given.values, given.layout.shard.start, encoders.own(comm)

        def encode() -> list[Array]:
            codes = [NO_CODES] * comm.size
            for owner in encoders.column:
                if owner != comm.rank:
                    part = shift(encoders.parts[owner], -start)
                    codes[owner] = self._encode_part(values[part], residuals, part)
            return codes

        arrived = to_owners(comm, name, facts, encoders.encode(encode))

        def make() -> tuple[Array, int]:
            if not encoders.column:
                return NO_CODES, 0
            part = shift(own, -start)
            folded = self._fold(arrived, encoders.column, comm.rank, values[part])
            if given.mean:
                folded = folded / np.float32(comm.size)
            return self._encode_part(folded, residuals, part), 0

        replies = from_owners(comm, Encoded(make), name)
        given.memory.keep(residuals)

        def values_of(received: Array) -> Array:
            values = np.empty(given.layout.ends[-1], given.kind)
            found = replies.codes(received)
            for owner in encoders.owners:
                part = encoders.parts[owner]
                with codes_of(owner):
                    values[part] = self.decode(found[owner], part.stop - part.start)
            return values

        return replies.work, values_of

    def _encode_part(self, values: Array, residuals: Array | None, part: slice) -> Array:
        """Encode values and the residuals of their part, which become what is left out."""
        if residuals is None:
            return self.encode(values)
        wanted = values + residuals[part]
        codes = self.encode(wanted)
        residuals[part] = remainder(wanted, self.decode(codes, len(wanted)))
        return codes

    def _fold(self, arrived: list[Array], column: Sequence[int], rank: int, own: Array) -> Array:
        """Return the sum of an owner's part, in the order of the ranks that encode it."""
        total: Array = None
        for sender in column:
            with codes_of(sender):
                one = own if sender == rank else self.decode(arrived[sender], len(own))
            total = one.copy() if total is None else total + one
        return total
