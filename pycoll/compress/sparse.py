"""Codecs that keep some values whole: TopK, Threshold and RandomK."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycoll.arrays.hashes import STEP, hashes
from pycoll.compress.codec import Array, Modelled, as_bytes, as_float32, wrong_length
from pycoll.compress.coded_exchange import Reply, agree, codes_of, from_owners, owned, to_owners
from pycoll.compress.composed import ComposedCodec, Started
from pycoll.compress.dense import check_seed
from pycoll.compress.feedback import Feedback
from pycoll.compress.operands import Operands
from pycoll.errors import InvalidArgumentError
from pycoll.types import real, whole

#: Values in the sample from which TopK guesses the smallest value that it keeps.
_SAMPLE = 1 << 13
#: Arrays of fewer values are partitioned as a whole.
_SHORT = 1 << 15


def check_density(density: Any) -> float:
    """Return a density. Raise InvalidArgumentError unless it is above 0 and at most 1."""
    expected = "a number above 0 and at most 1"
    value = real("density", density, expected)
    if not 0 < value <= 1:
        raise InvalidArgumentError(f"density is {density!r}: expected {expected}")
    return value


def kept(density: float, count: int) -> int:
    """Return how many of ``count`` values a density keeps: rounded up, so at least one of some."""
    return min(count, math.ceil(density * count))


class SparseCodec(ComposedCodec):
    """A codec that sends some values as they are, with their places; the others decode to 0.

    Codes are the places, uint32, in ascending order, and then the values, float32.
    """

    @abstractmethod
    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return the places that are sent, ascending.

        ``x``: one axis of floats. ``step``: the number of the call, see ``Feedback.step``.
        """

    def warmed(self, feedback: Feedback) -> SparseCodec:
        """Return the codec of the next call: with another density during the warm-up."""
        return self

    def encode(self, x: Any) -> Array:
        """Return the codes of an array of float16, bfloat16 or float32, as one axis of uint8."""
        values = as_float32(x)
        return packed(self.chosen(values), values)

    def decode(self, codes: Any, count: int) -> Array:
        """Return the ``count`` float32 values of some codes, on one axis."""
        values = np.zeros(whole("count", count, 0), np.float32)
        places, sent = unpacked(self, codes, count, values.dtype)
        values[places] = sent
        return values

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run all exchanges but the last, which it starts.

        Owners fold the values that arrive in rank order, and send them on as places and values, or
        whole where these are fewer bytes. Nothing is left out on the way back.
        """
        codec, places, residuals = gathered(self, given)
        parts = owned(len(given.values), comm.size)
        cuts = np.searchsorted(places, [part.stop for part in parts[:-1]])
        pieces = np.split(places, cuts)
        codes = [
            packed(mine - part.start, given.values[part])
            for mine, part in zip(pieces, parts, strict=True)
        ]
        lengths = agree(comm, name, [codec, *given.facts()], [len(one) for one in codes])
        arrived = to_owners(comm, codes, lengths)
        part = parts[comm.rank]
        reply = Reply(lambda: folded(self, arrived, part.stop - part.start, given))
        work, replies = from_owners(comm, reply, name)
        if residuals is not None:
            given.mask(places)
            residuals[places] = 0
            given.keep(residuals)

        def values_of(received: Array) -> Array:
            values = np.zeros_like(given.values)
            for owner, ((place, is_dense), part) in enumerate(zip(replies, parts, strict=True)):
                with codes_of(owner):
                    fill(self, values[part], received[place], bool(is_dense))
            return values

        return work, values_of


def gathered(codec: SparseCodec, given: Operands) -> tuple[SparseCodec, Array, Array | None]:
    """Return the codec of this call, the places it sends, and the values of residuals to be.

    The values of ``given`` become those that the call sends from.
    """
    given.correct()
    residuals = given.residuals()
    if residuals is not None:
        given.values += residuals
        residuals = given.values
    step, feedback = 0, given.feedback
    if feedback is not None:
        step, codec = feedback.step, codec.warmed(feedback)
    found = [
        codec.chosen(given.values[place], step).astype(np.int64) + place.start
        for _, place in given.parts()
    ]
    return codec, np.concatenate(found), residuals


def folded(
    codec: SparseCodec, arrived: list[Array], count: int, given: Operands
) -> tuple[Array, int]:
    """Return the owner's reply: its bytes, and 1 if these are the values of the whole part."""
    values = np.zeros(count, given.values.dtype)
    is_sent = np.zeros(count, bool)
    for rank, codes in enumerate(arrived):
        with codes_of(rank):
            places, sent = unpacked(codec, codes, count, values.dtype)
        if rank == 0:
            values[places] = sent
        else:
            values[places] += sent
        is_sent[places] = True
    if given.mean:
        values /= len(arrived)
    places = np.flatnonzero(is_sent)
    if len(places) * (4 + values.itemsize) < values.nbytes:
        return packed(places, values), 0
    return values.view(np.uint8), 1


def fill(codec: SparseCodec, values: Array, codes: Array, is_dense: bool) -> None:
    """Write the values of an owner's reply into zeros."""
    if not is_dense:
        places, sent = unpacked(codec, codes, len(values), values.dtype)
        values[places] = sent
        return
    if len(codes) != values.nbytes:
        raise wrong_length(codec, len(codes), len(values), str(values.nbytes))
    values[:] = np.frombuffer(codes.tobytes(), values.dtype)


def packed(places: Array, values: Array) -> Array:
    """Return the codes of the values at some places."""
    sent = values[places]
    codes = np.empty(4 * len(places) + sent.nbytes, np.uint8)
    codes[: 4 * len(places)] = np.ascontiguousarray(places, np.uint32).view(np.uint8)
    codes[4 * len(places) :] = sent.view(np.uint8)
    return codes


def unpacked(
    codec: SparseCodec, codes: Any, count: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the places and the values of some codes. Raise unless places ascend below count."""
    given = as_bytes(codes)
    number, rest = divmod(len(given), 4 + dtype.itemsize)
    if rest:
        raise wrong_length(codec, len(given), count, f"a multiple of {4 + dtype.itemsize}")
    places = given[: 4 * number].view(np.uint32)
    if number and (int(places[-1]) >= count or not (places[1:] > places[:-1]).all()):
        raise InvalidArgumentError(
            f"codes of {codec!r} have places that do not ascend from 0 to {count - 1}: these bytes "
            "are not from encode"
        )
    # A copy, since the values may begin at any byte.
    return places, np.frombuffer(given[4 * number :].tobytes(), dtype)


@dataclass(frozen=True)
class DensityCodec(SparseCodec):
    """A sparse codec that sends a fixed share of the values, which a warm-up may change."""

    density: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "density", check_density(self.density))

    @property
    def label(self) -> str:
        """A short word for tables, with the density."""
        return f"{type(self).__name__.lower()}({self.density:g})"

    def check_warm_up(self) -> None:
        """Accept every warm-up."""

    def warmed(self, feedback: Feedback) -> SparseCodec:
        """Return the codec of the next call: with another density during the warm-up."""
        return replace(self, density=feedback.density(self.density))


@dataclass(frozen=True)
class TopK(DensityCodec):
    """Send the values of largest magnitude, and their places.

    It needs feedback: without one, small values are never sent.

    Arguments: ``density``, the share of the values that is sent, above 0 and at most 1. The number
    is rounded up.

    NaN counts as larger than infinity. Of equal magnitudes the first ones are sent. Errors:
    InvalidArgumentError for another density. Cost: 8 bytes for each value that is sent, and a
    search over all values in NumPy.

    >>> codec = pycoll.compress.TopK(density=0.5)
    >>> codec.decode(codec.encode(np.float32([1, -3, 0, 2])), 4)
    array([ 0., -3.,  0.,  2.], dtype=float32)
    """

    def modelled(self, count: int) -> Modelled | None:
        """Return what the cost model knows of the codec, for arrays of ``count`` values."""
        return Modelled("topk", 2 * kept(self.density, count) / max(count, 1), "places")

    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return the places of the largest magnitudes, ascending."""
        number = kept(self.density, len(x))
        if number == len(x):
            return np.arange(len(x), dtype=np.uint32)
        size = np.abs(x)
        candidates = _above(size, _guess(size, number)) if len(x) > _SHORT else None
        if candidates is None or len(candidates) < number:
            candidates = np.arange(len(x))
        keys = _keys(size[candidates])
        bound = np.partition(keys, len(keys) - number)[len(keys) - number]
        larger = keys > bound
        larger[np.flatnonzero(keys == bound)[: number - int(larger.sum())]] = True
        return candidates[larger].astype(np.uint32)


def _above(size: Array, bound: float) -> Array:
    # The comparison that is negated finds NaN as well: NaN is not below any bound.
    return np.flatnonzero(~(size < bound))


def _keys(size: Array) -> Array:
    """Return whole numbers in the order of magnitudes; all NaN have one number, the largest."""
    kind = np.dtype(f"u{size.itemsize}")
    infinity = np.array(np.inf, size.dtype).view(kind)
    return np.minimum(size.view(kind), infinity + kind.type(1))


def _guess(size: Array, number: int) -> float:
    """Return a bound that a little more than ``number`` values are likely to reach."""
    step = len(size) // _SAMPLE or 1
    sample = np.nan_to_num(size[::step], nan=np.inf)
    share = number / len(size) * len(sample)
    wanted = math.ceil(share + 4 * math.sqrt(share) + 4)
    if wanted >= len(sample):
        return 0.0
    return float(np.partition(sample, len(sample) - wanted)[len(sample) - wanted])


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Send the values of at least some magnitude, and their places. NaN is sent.

    It needs feedback: without one, smaller values are never sent.

    Arguments: ``value``, the smallest magnitude that is sent, finite and at least 0.

    Errors: InvalidArgumentError for another value. Cost: 8 bytes for each value that is sent, which
    may be all of them.

    >>> codec = pycoll.compress.Threshold(2)
    >>> codec.decode(codec.encode(np.float32([1, -3, 0, 2])), 4)
    array([ 0., -3.,  0.,  2.], dtype=float32)
    """

    value: float

    def __post_init__(self) -> None:
        expected = "a finite number of at least 0"
        value = real("value", self.value, expected)
        if value < 0:
            raise InvalidArgumentError(f"value is {self.value!r}: expected {expected}")
        object.__setattr__(self, "value", value)

    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return the places of the magnitudes from the threshold on, ascending."""
        return np.flatnonzero(~(np.abs(x) < self.value)).astype(np.uint32)


@dataclass(frozen=True)
class RandomK(DensityCodec):
    """Send values at random places, the same on all ranks, so that no place has to be sent.

    The array is cut into as many parts of nearly equal length as values are sent; one place of
    each part is drawn. A collective needs feedback: its ``step`` changes the places from call to
    call.

    Arguments: ``density``, the share of the values that is sent, above 0 and at most 1; ``seed``,
    of the draws, from 0 to 2**64 - 1.

    Errors: InvalidArgumentError for other arguments. Cost: 4 bytes for each value that is sent.

    >>> codec = pycoll.compress.RandomK(density=0.5, seed=1)
    >>> int(np.count_nonzero(codec.decode(codec.encode(np.ones(8, np.float32)), 8)))
    4
    """

    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", check_seed(self.seed))

    def modelled(self, count: int) -> Modelled | None:
        """Return what the cost model knows of the codec, for arrays of ``count`` values."""
        return Modelled("randomk", kept(self.density, count) / max(count, 1), "common")

    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return one place of each part, ascending: a function of length, seed and step."""
        count = len(x)
        number = kept(self.density, count)
        ends = np.arange(number + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(number or 1)
        lengths = np.diff(ends)
        draws = draws_from(self.seed ^ draws_from(step, 1).tolist()[0], number)
        return np.asarray(ends[:-1] + draws % np.maximum(lengths, 1), np.uint32)

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run the exchange of facts, and start an all_reduce of the values at the places."""
        feedback = given.feedback
        if feedback is None:
            raise InvalidArgumentError(
                f"feedback is None and compress is {self!r}: feedback.step changes the places from "
                "call to call; pass feedback=pycoll.compress.Feedback()"
            )
        codec, places, residuals = gathered(self, given)
        agree(comm, name, [codec, *given.facts(), f"step {feedback.step}"])
        word = "avg" if given.mean else "sum"
        work = comm.all_reduce(
            given.values[places], word, async_op=True, deterministic=deterministic
        )
        given.mask(places)
        assert residuals is not None  # there is feedback
        residuals[places] = 0
        given.keep(residuals)

        def values_of(received: Array) -> Array:
            values = np.zeros_like(given.values)
            values[places] = received
            return values

        return work, values_of


def draws_from(seed: int, count: int) -> Array:
    """Return ``count`` numbers of 64 random bits: the sequence of SplitMix64 from a seed."""
    return hashes(np.arange(count, dtype=np.uint64) * STEP + np.uint64(seed))
