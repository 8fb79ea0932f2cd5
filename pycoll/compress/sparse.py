"""Codecs that keep some values whole: TopK, Threshold and RandomK."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.arrays.hashes import STEP, hashes
from pycoll.compress.codec import Array, Modelled, as_bytes, as_float32, wrong_length
from pycoll.compress.coded_exchange import (
    NO_CODES,
    Encoded,
    agree_first,
    codes_of,
    from_owners,
    to_owners,
)
from pycoll.compress.composed import ComposedCodec, Started, refuse_algorithm
from pycoll.compress.dense import check_seed
from pycoll.compress.feedback import Feedback
from pycoll.compress.host_sums import Encoders, add_up_in_hosts
from pycoll.compress.operands import Operands, are_on_devices, check_feedback_type, is_mean
from pycoll.errors import InvalidArgumentError
from pycoll.types import real, whole

#: The bytes in front of codes that travel, which tell the number of values.
_NUMBER = 4
#: The bytes in front of the codes of RandomK, which tell the step.
_STEP = 8
#: The bytes of places and of values that a kernel has chosen.
_Bytes = tuple[bytes, bytes]


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

    Codes are the places, uint32, in ascending order, and then the values, float32. Codes that
    travel have the gaps between places instead, about a byte each.
    """

    sends_places: ClassVar[bool] = True

    @abstractmethod
    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return the places that are sent, ascending.

        ``x``: one axis of floats. ``step``: the number of the call, see ``Feedback.step``.
        """

    def found(
        self, given: Operands, number: int, step: int, rests: Array | None, sums: Array | None
    ) -> tuple[Array, Array]:
        """Return the places and the values of an array that are sent.

        ``rests``: the residual to add to the array, or None; ``sums`` then gets the sums.
        """
        values = given.own(number)
        if rests is not None:
            values = np.add(values, rests, out=sums)
        places = self.chosen(values, step)
        return places, values[places]

    def warmed(self, feedback: Feedback) -> SparseCodec:
        """Return the codec of the next call: with another density during the warm-up."""
        return self

    def encode(self, x: Any) -> Array:
        """Return the codes of an array of float16, bfloat16 or float32, as one axis of uint8."""
        return self.encode_block(as_float32(x), 0)

    def encode_block(self, x: Any, step: int) -> Array:
        """Return the codes of a block in call number ``step`` of a Feedback."""
        values = np.ascontiguousarray(x).reshape(-1)
        places = self.chosen(values, step)
        return pack_pairs(places, values[places])

    def decode(self, codes: Any, count: int) -> Array:
        """Return the ``count`` float32 values of some codes, on one axis."""
        return self.decode_block(codes, whole("count", count, 0), np.dtype(np.float32))

    def decode_block(self, codes: Any, count: int, kind: np.dtype[Any]) -> Array:
        """Return the ``count`` values of a block of this type, on one axis."""
        values = np.zeros(count, kind)
        places, sent = self.unpacked(codes, count, kind)
        values[places] = sent
        return values

    def places_of(self, codes: Any, count: int, kind: np.dtype[Any]) -> Array:
        """Return the places of a block that codes send."""
        return self.unpacked(codes, count, kind)[0]

    def unpacked(self, codes: Any, count: int, kind: np.dtype[Any]) -> tuple[Array, Array]:
        """Return the places and the values of some codes. Raise where there are none such."""
        return unpack_pairs(self, codes, count, kind)

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run all exchanges but the last, which it starts.

        Owners fold the values that arrive, in the order of the ranks that encode. They send on
        places and values, or the whole part where that has fewer bytes. Nothing is left out on the
        way back.
        """
        feedback = given.feedback
        facts = [self if feedback is None else self.warmed(feedback), *given.facts()]
        encoders = add_up_in_hosts(comm, given, name, facts)
        made: list[Chosen] = []

        def encode() -> list[Array]:
            made.append(choose_values(self, given))
            return made[0].by_owner(encoders)

        arrived = to_owners(comm, name, facts, encoders.encode(encode))
        count = _length(encoders.own(comm))
        divisor = comm.size if given.mean else 0
        codes = [(rank, arrived[rank]) for rank in encoders.column]
        replies = from_owners(
            comm, Encoded(lambda: fold_part(self, codes, count, given, divisor)), name
        )
        made[0].keep(given)
        target = given.target(0) if given.is_native and len(given.layout.shapes) == 1 else None
        values: Array = np.empty(given.layout.ends[-1], given.kind) if target is None else None
        to = _Target(_core.view(values) if target is None else target, values, given.is_native)
        for owner in encoders.owners:
            if not replies.forms[owner]:  # while the replies travel
                to.clear(encoders.parts[owner])

        def values_of(received: Array) -> Array | None:
            found = replies.codes(received)
            for owner in encoders.owners:
                part, is_dense = encoders.parts[owner], bool(replies.forms[owner])
                with codes_of(owner):
                    sent = self._reply(found[owner], is_dense, _length(part), given.kind)
                    to.put(part, *sent)
            return values

        return replies.work, values_of

    def _reply(
        self, codes: Array, is_dense: bool, count: int, kind: np.dtype[Any]
    ) -> tuple[Array | None, Array]:
        """Return the places, or None for all of them, and the values of an owner's reply."""
        if not is_dense:
            return from_gaps(self, codes, count, kind)
        if len(codes) != count * kind.itemsize:
            raise wrong_length(self, len(codes), count, str(count * kind.itemsize))
        return None, np.frombuffer(codes.tobytes(), kind)


class _Target(NamedTuple):
    """The memory of a result on one axis; ``values`` is the same where it is an array."""

    view: _core.BufferView
    values: Array
    is_native: bool

    def clear(self, part: slice) -> None:
        """Write zeros to a part."""
        if not self.is_native:
            self.values[part] = 0
            return
        count, none = part.stop - part.start, np.empty(0, np.uint32)
        none_sent = _core.view(none.view(np.float32))
        _core.spread_codes(self.view, part.start, count, _core.view(none), none_sent)

    def put(self, part: slice, places: Array | None, sent: Array) -> None:
        """Write values at places of a part, or all of it without places."""
        if not self.is_native:
            self.values[part][slice(None) if places is None else places] = sent
            return
        count = part.stop - part.start
        told = _view(places), _core.view(sent)
        _core.spread_codes(self.view, part.start, count, *told, zeros=False)


class Chosen(NamedTuple):
    """The places and values that one call sends."""

    codec: SparseCodec
    places: Array
    values: Array
    #: The residuals of the next call, one axis each. The values that are sent are still in them.
    sums: list[Array]
    #: The places that are taken out as well, since a NaN at another place stands for their values.
    others: Array = np.empty(0, np.int64)

    def by_owner(self, encoders: Encoders) -> list[Array]:
        """Return the codes for each rank: those of the part that it owns of this rank's values."""
        codes = [NO_CODES] * len(encoders.parts)
        for owner in encoders.column:
            part = encoders.parts[owner]
            begin, end = np.searchsorted(self.places, [part.start, part.stop]).tolist()
            codes[owner] = pack_gaps(self.places[begin:end] - part.start, self.values[begin:end])
        return codes

    def keep(self, given: Operands) -> None:
        """Set the residuals and velocities of the sent values to 0, and count the call."""
        if given.feedback is None:
            return
        gone = self.places
        if len(self.others):
            gone = np.union1d(gone, self.others)
        given.memory.mask(gone)
        cuts = np.searchsorted(gone, given.layout.ends)
        for (number, place), sums in zip(given.layout.pieces(), self.sums, strict=True):
            sums[gone[cuts[number] : cuts[number + 1]] - place.start] = 0
        given.memory.replace()


def choose_values(codec: SparseCodec, given: Operands) -> Chosen:
    """Return the places and values to send next. Of ``given`` it changes the values only."""
    given.memory.correct(given.own)
    step, feedback = 0, given.feedback
    if feedback is not None:
        step, codec = feedback.step, codec.warmed(feedback)
    places, values, kept = [np.empty(0, np.int64)], [np.empty(0, given.kind)], []
    for number, place in given.layout.pieces():
        rests, sums = given.memory.pairs(number)
        found, sent = codec.found(given, number, step, rests, sums)
        places.append(found.astype(np.int64) + place.start)
        values.append(sent)
        kept.append(sums)
    return Chosen(codec, np.concatenate(places), np.concatenate(values), kept)


def fold_part(
    codec: SparseCodec,
    arrived: list[tuple[int, Array]],
    count: int,
    given: Operands,
    divisor: int,
) -> tuple[Array, int]:
    """Return the owner's reply: its bytes, and 1 if these are the values of the whole part.

    ``arrived``: the codes of each rank in the order of folding; none where this rank owns nothing.
    ``divisor``: by which sums are divided; 0 for none.
    """
    if not arrived:
        return NO_CODES, 0
    codes = []
    for rank, one in arrived:
        with codes_of(rank):
            codes.append(from_gaps(codec, one, count, given.kind))
    if given.is_native:
        views = [(_core.view(places), _core.view(values)) for places, values in codes]
        places, sums = _arrays(_core.fold_codes(views, count, divisor))
    else:
        places, sums = _fold_wide(codes, count, divisor)
    reply = pack_gaps(places, sums)
    if len(reply) < count * given.kind.itemsize:
        return reply, 0
    values = np.zeros(count, given.kind)
    values[places] = sums
    return values.view(np.uint8), 1


def _fold_wide(codes: list[tuple[Array, Array]], count: int, divisor: int) -> tuple[Array, Array]:
    """Return what ``_core.fold_codes`` does, for values that kernels do not take."""
    values = np.zeros(count, codes[0][1].dtype)
    is_sent = np.zeros(count, bool)
    for number, (places, sent) in enumerate(codes):
        if number == 0:
            values[places] = sent
        else:
            values[places] += sent
        is_sent[places] = True
    places = np.flatnonzero(is_sent)
    return places, values[places] / values.dtype.type(divisor or 1)


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _arrays(found: _Bytes) -> tuple[Array, Array]:
    """Return the places and the values that a kernel has chosen."""
    return np.frombuffer(found[0], np.uint32), np.frombuffer(found[1], np.float32)


def pack_gaps(places: Array, sent: Array) -> Array:
    """Return the codes that travel: the number of values, the values, and the gaps of places."""
    gaps = _core.pack_places(_core.view(np.ascontiguousarray(places, np.uint32)))
    number = len(places).to_bytes(_NUMBER, "little")
    return np.frombuffer(b"".join([number, sent.tobytes(), gaps]), np.uint8)


def from_gaps(
    codec: SparseCodec, codes: Any, count: int, dtype: np.dtype[Any]
) -> tuple[Array, Array]:
    """Return the places and the values of what ``pack_gaps`` made. Raise unless it could have."""
    given = as_bytes(codes).tobytes()
    number = int.from_bytes(given[:_NUMBER], "little")
    end = _NUMBER + number * dtype.itemsize
    places = None
    if len(given) >= end:
        gaps = np.frombuffer(given[end:], np.uint8)
        places = _core.unpack_places(_core.view(gaps), number, count)
    if places is None:
        raise InvalidArgumentError(
            f"codes of {codec!r} from a peer have {len(given)} bytes that are not those of "
            f"{number} of {count} values"
        )
    return np.frombuffer(places, np.uint32), np.frombuffer(given[_NUMBER:end], dtype)


def pack_pairs(places: Array, sent: Array) -> Array:
    """Return the codes of values that are sent, with their places."""
    codes = np.empty(4 * len(places) + sent.nbytes, np.uint8)
    codes[: 4 * len(places)] = np.ascontiguousarray(places, np.uint32).view(np.uint8)
    codes[4 * len(places) :] = sent.view(np.uint8)
    return codes


def unpack_pairs(
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

    def kept(self, count: int) -> int:
        """Return how many of ``count`` values are sent."""
        return kept(self.density, count)

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

    NaN counts as larger than infinity. Of equal magnitudes the first ones are sent. ``all_reduce``
    also takes arrays on devices.

    Errors: InvalidArgumentError for another density.

    Cost: 8 bytes for each value that is sent, and one pass over all values in host memory, ten on
    devices.

    >>> codec = pycoll.compress.TopK(density=0.5)
    >>> codec.decode(codec.encode(np.float32([1, -3, 0, 2])), 4)
    array([ 0., -3.,  0.,  2.], dtype=float32)
    """

    def modelled(self, count: int) -> Modelled | None:
        """Return the facts of the codec for the cost model, for arrays of ``count`` values."""
        return Modelled("topk", 2 * kept(self.density, count) / max(count, 1), "places")

    def codec_on_devices(
        self, x: Any, op: Any, algorithm: str | None, feedback: Any
    ) -> TopK | None:
        """Return the codec of a call on device arrays, whose density is that of this call."""
        if not are_on_devices(x):
            return None
        refuse_algorithm(self, algorithm)
        is_mean(op)
        check_feedback_type(feedback)
        return self if feedback is None else replace(self, density=feedback.density(self.density))

    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return the places of the largest magnitudes, ascending."""
        number = kept(self.density, len(x))
        if x.dtype == np.float32:
            return _arrays(_core.largest_values(_core.view(np.ascontiguousarray(x)), number))[0]
        keys = _keys(np.abs(x))
        bound = np.partition(keys, len(keys) - number)[len(keys) - number] if number else 0
        larger = keys > bound
        larger[np.flatnonzero(keys == bound)[: number - int(larger.sum())]] = True
        return np.flatnonzero(larger).astype(np.uint32)

    def found(
        self, given: Operands, number: int, step: int, rests: Array | None, sums: Array | None
    ) -> tuple[Array, Array]:
        """Return the places and the values of an array that are sent."""
        if not given.is_native:
            return super().found(given, number, step, rests, sums)
        source = given.source(number)
        wanted = kept(self.density, source.count)
        return _arrays(_core.largest_values(source, wanted, _view(rests), _view(sums)))


def _view(array: Array | None) -> _core.BufferView | None:
    return None if array is None else _core.view(array)


def _keys(size: Array) -> Array:
    """Return whole numbers in the order of magnitudes; all NaN have one number, the largest."""
    kind = np.dtype(f"u{size.itemsize}")
    infinity = np.array(np.inf, size.dtype).view(kind)
    return np.minimum(size.view(kind), infinity + kind.type(1))


@dataclass(frozen=True)
class Threshold(SparseCodec):
    """Send the values of at least some magnitude, and their places. NaN is sent.

    It needs feedback: without one, smaller values are never sent.

    Arguments: ``value``, the smallest magnitude that is sent, finite and at least 0.

    Errors: InvalidArgumentError for another value.

    Cost: 8 bytes for each value that is sent, which may be all of them.

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
        # The comparison that is negated finds NaN as well: NaN is not below any bound.
        return np.flatnonzero(~(np.abs(x) < self._bound(x.dtype))).astype(np.uint32)

    def _bound(self, kind: np.dtype[Any]) -> Any:
        with np.errstate(over="ignore"):  # no finite value reaches a bound that becomes infinite
            return kind.type(self.value)

    def found(
        self, given: Operands, number: int, step: int, rests: Array | None, sums: Array | None
    ) -> tuple[Array, Array]:
        """Return the places and the values of an array that are sent."""
        if not given.is_native:
            return super().found(given, number, step, rests, sums)
        bound, source = float(self._bound(given.kind)), given.source(number)
        return _arrays(_core.values_from(source, bound, _view(rests), _view(sums)))


@dataclass(frozen=True)
class RandomK(DensityCodec):
    """Send values at random places, the same on all ranks, so that no place has to be sent.

    The array is cut into as many parts of nearly equal length as values are sent; one place of
    each part is drawn. A collective needs feedback: its ``step`` changes the places from call to
    call.

    An array may have a NaN or an infinity at a place that is not drawn. Then the codec sends NaN at
    the first drawn place of the array, so that all ranks see NaN there. This NaN stands for all
    values of the array that are not finite: no residual keeps them.

    Arguments: ``density``, the share of the values that is sent, above 0 and at most 1; ``seed``,
    of the draws, from 0 to 2**64 - 1.

    Errors: InvalidArgumentError for other arguments.

    Cost: 4 bytes for each value that is sent.

    >>> codec = pycoll.compress.RandomK(density=0.5, seed=1)
    >>> int(np.count_nonzero(codec.decode(codec.encode(np.ones(8, np.float32)), 8)))
    4
    """

    seed: int

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", check_seed(self.seed))

    def modelled(self, count: int) -> Modelled | None:
        """Return the facts of the codec for the cost model, for arrays of ``count`` values."""
        return Modelled("randomk", kept(self.density, count) / max(count, 1), "common")

    def chosen(self, x: Array, step: int = 0) -> Array:
        """Return one place of each part, ascending: a function of length, seed and step."""
        return self._places(len(x), step)

    def _places(self, count: int, step: int) -> Array:
        number = kept(self.density, count)
        ends = np.arange(number + 1, dtype=np.uint64) * np.uint64(count) // np.uint64(number or 1)
        lengths = np.diff(ends)
        draws = draws_from(self.seed ^ draws_from(step, 1).tolist()[0], number)
        return np.asarray(ends[:-1] + draws % np.maximum(lengths, 1), np.uint32)

    def encode_block(self, x: Any, step: int) -> Array:
        """Return the codes of a block: the step, from which the places follow, and the values."""
        values = np.ascontiguousarray(x).reshape(-1)
        head = np.array([step], np.uint64)
        places = self.chosen(values, step)
        sent = values[places]
        if len(_unsent(values, places)):
            sent[0] = np.nan
        return np.concatenate([head.view(np.uint8), sent.view(np.uint8)])

    def unpacked(self, codes: Any, count: int, kind: np.dtype[Any]) -> tuple[Array, Array]:
        """Return the places and the values of some codes. Raise where there are none such."""
        given = as_bytes(codes).tobytes()
        wanted = _STEP + kept(self.density, count) * kind.itemsize
        if len(given) != wanted:
            raise wrong_length(self, len(given), count, str(wanted))
        step = int.from_bytes(given[:_STEP], "little")
        return self._places(count, step), np.frombuffer(given[_STEP:], kind)

    def check_feedback(self, feedback: Feedback | None) -> None:
        """Raise InvalidArgumentError without a Feedback, whose step changes the places."""
        if feedback is None:
            raise InvalidArgumentError(
                f"feedback is None and compress is {self!r}: feedback.step changes the places from "
                "call to call; pass feedback=pycoll.compress.Feedback()"
            )

    def start_all_reduce(
        self, comm: Any, given: Operands, name: str, deterministic: bool | None
    ) -> Started:
        """Run the exchange of facts, and start an all_reduce of the values at the places."""
        step = 0 if given.feedback is None else given.feedback.step
        chosen = _with_nan(choose_values(self, given), given)
        agree_first(comm, name, [chosen.codec, *given.facts(), f"step {step}"])
        word = "avg" if given.mean else "sum"
        work = comm.all_reduce(chosen.values, word, async_op=True, deterministic=deterministic)
        chosen.keep(given)

        def values_of(received: Array) -> Array:
            values = np.zeros(given.layout.ends[-1], given.kind)
            values[chosen.places] = received
            return values

        return work, values_of


def _unsent(values: Array, places: Array) -> Array:
    """Return the places of the values that are not finite, without ``places``, ascending."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.add.reduce(values)):  # one pass; with a NaN or an infinity no sum is
            return np.empty(0, np.int64)
    return np.setdiff1d(np.flatnonzero(~np.isfinite(values)), places)


def _with_nan(chosen: Chosen, given: Operands) -> Chosen:
    """Return what is sent, with NaN first in each array that has other values not finite."""
    found = [chosen.others]
    cuts = np.searchsorted(chosen.places, given.layout.ends)
    for (number, place), sums in zip(given.layout.pieces(), chosen.sums, strict=True):
        drawn = chosen.places[cuts[number] : cuts[number + 1]] - place.start
        others = _unsent(sums, drawn)
        if len(others):
            chosen.values[cuts[number]] = np.nan
            found.append(others + place.start)
    return chosen._replace(others=np.concatenate(found))


def draws_from(seed: int, count: int) -> Array:
    """Return ``count`` numbers of 64 random bits: the sequence of SplitMix64 from a seed."""
    return hashes(np.arange(count, dtype=np.uint64) * STEP + np.uint64(seed))
