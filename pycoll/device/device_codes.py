"""Collectives of device arrays with a codec: codes are made, folded and decoded on the device.

An all_reduce is six launches in one stream: a kernel encodes the parts of the other ranks; an
all_to_all of bytes brings them to their owners; a kernel folds each part in full precision and in
rank order, and another one encodes the sum once; an all_gather of bytes brings the codes to all
ranks; a kernel decodes them. So the bits are those of arrays in host memory on one host.

A reduce_scatter ends with the fold. An all_gather and a broadcast encode what a rank sends, itself
included, and decode what arrives.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.device.device_copies import Copies, Copy
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType

if TYPE_CHECKING:
    from pycoll.comm.plans import PreparedCall

#: Parts of codes begin at multiples of this many bytes, so that no kernel loads them by bytes.
_ALIGNMENT = 16
_FLOAT_BYTES = 4
_NAP_S = 50e-6


class Floats(NamedTuple):
    """An array of floats on the device, in C order: its address and type."""

    address: int
    dtype: int

    def at(self, index: int) -> Floats:
        """Return the array from an element on."""
        return self._replace(address=self.address + index * ITEM_BYTES[self.dtype])


class Parts(NamedTuple):
    """Values in parts, each of which has codes of its own.

    ``lengths``: the values of each part, one after the other.
    """

    codec: _core.Codec
    lengths: tuple[int, ...]

    @property
    def stride(self) -> int:
        """The bytes from one part's codes to the next."""
        return -(-self.codec.nbytes(max(self.lengths)) // _ALIGNMENT) * _ALIGNMENT

    @property
    def nbytes(self) -> int:
        """The bytes of all codes."""
        return len(self.lengths) * self.stride

    def begin(self, part: int) -> int:
        """Return the number of values in front of a part."""
        return sum(self.lengths[:part])

    def encode(
        self, values: Floats, rests: int, codes: int, own: int, rank: int, chunk: int = 0
    ) -> list[Copy]:
        """Return the steps that encode all parts but ``own``, for ``rank``.

        ``rests``, ``codes``: addresses; 0 for no rests. ``own``: -1 for no part. ``chunk``: the
        number of part 0.
        """
        if self._is_even():
            parts = (len(self.lengths), own, chunk, rank)
            total = sum(self.lengths)
            return [("encode", self.codec, codes, self.stride, total, *values, rests, *parts)]
        made: list[Copy] = []
        for part, length in enumerate(self.lengths):
            begin = self.begin(part)
            left = rests and rests + _FLOAT_BYTES * begin
            one = (*values.at(begin), left, 1, -1, chunk + part, rank)
            if part != own:
                to = codes + part * self.stride
                made.append(("encode", self.codec, to, self.stride, length, *one))
        return made

    def decode(self, codes: int, result: Floats) -> list[Copy]:
        """Return the steps that decode all parts."""
        if self._is_even():
            parts, total = len(self.lengths), sum(self.lengths)
            return [("decode", self.codec, codes, self.stride, total, *result, parts)]
        made: list[Copy] = []
        for part, length in enumerate(self.lengths):
            to = result.at(self.begin(part))
            made.append(
                ("decode", self.codec, codes + part * self.stride, self.stride, length, *to, 1)
            )
        return made

    def correct(self, count: int, values: Floats, velocities: int, momentum: float) -> Copy:
        """Return the step that makes ``count`` velocities of a call, momentum u + x."""
        return ("correct", self.codec, 0, 0, count, *values, velocities, momentum)

    def _is_even(self) -> bool:
        return self.lengths == cut(sum(self.lengths), len(self.lengths))


def cut(count: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the parts of an array as plans cut it: longer ones first."""
    share, longer = divmod(count, parts)
    return tuple(share + (part < longer) for part in range(parts))


class Kept(Protocol):
    """The memory that a Feedback has of one array.

    ``momentum``: of momentum correction, or 0.
    """

    @property
    def momentum(self) -> float:
        """The factor of the last velocities."""

    def memory(self, move: Callable[[Any], Residual], name: str) -> Residual:
        """Return "residuals" or "velocities" on the device, where ``move`` puts them."""


class Exchange(NamedTuple):
    """A collective of bytes. ``lanes``: the most that any rank's plan has."""

    prepared: PreparedCall
    lanes: int
    counts: list[int]


class CodedCall(NamedTuple):
    """A collective with a codec, without its memory.

    ``exchanges``: the collectives of bytes, in order. ``divisor``: of the sums, or 0.
    """

    collective: Collective
    parts: Parts
    rank: int
    root: int
    divisor: int
    exchanges: list[Exchange]


class Round(NamedTuple):
    """An exchange with its memory, and the steps before and after it."""

    source: DeviceView | None
    target: DeviceView | None
    before: list[Copy]
    after: list[Copy]


class Residual:
    """The float32 that a codec left out of an array, or velocities, in memory of a device.

    ``numpy.asarray(residual)`` waits for the operations that change it, and copies it to the host.
    Replayed graphs change it, too: synchronize their stream first.

    Attributes: ``array``, the array of the caller's framework; ``shape``, ``dtype``.
    """

    def __init__(
        self, native: _core.DeviceCommunicator, where: Where, shape: tuple[int, ...]
    ) -> None:
        self.array = where.framework.empty(where.x, shape, DType.FLOAT32)
        self.shape = shape
        self.dtype = np.dtype(np.float32)
        view = where.framework.result(self.array)
        assert isinstance(view, DeviceView)  # x is on a device, so a new array like it is, too
        self.view = view
        self._native = native
        self._changed: _core.DeviceMark | None = None
        #: Whether the memory has values, or an operation that gives it some has been launched.
        self.is_filled = False

    def is_of(self, native: _core.DeviceCommunicator) -> bool:
        """Return whether this communicator's operations change it."""
        return self._native is native

    def changed(self, mark: _core.DeviceMark) -> None:
        """Note an operation that changes it."""
        self._changed = mark
        self.is_filled = True

    def fill(self, values: Any, mark: _core.DeviceMark) -> None:
        """Copy an array of the host here, after the mark; the host waits."""
        self._await(mark)
        if self.view.nbytes:
            data = np.ascontiguousarray(values, np.float32).tobytes()
            self._native.write(self.view.address, data)
        self.is_filled = True

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Return a copy in host memory."""
        if self._changed is not None:
            self._await(self._changed)
        nbytes = self.view.nbytes
        data = self._native.read(self.view.address, nbytes) if nbytes else b""
        values = np.frombuffer(bytearray(data), np.float32).reshape(self.shape)
        return values if dtype is None else values.astype(dtype)

    def _await(self, mark: _core.DeviceMark) -> None:
        try:
            while not self._native.passed(mark):
                time.sleep(_NAP_S)
        except PycollError:
            # Kernels of a communicator that has failed or is closed have ended; the memory stays.
            if self._native.failure() is None:
                raise


def residual_for(
    native: _core.DeviceCommunicator, where: Where, shape: tuple[int, ...], kept: Any, steps: Copies
) -> Residual:
    """Return the residual of an array on this device.

    ``kept``: None; an array of the host, which is copied here; or a Residual. ``steps``: gets the
    step that clears new memory. Raises InvalidArgumentError where that cannot be part of a graph.
    """
    known = kept if isinstance(kept, Residual) and kept.is_of(native) else None
    if known is not None and known.is_filled:
        return known
    if native.capture_of(where.handle()):
        raise InvalidArgumentError(
            "feedback has no residual on this device yet, and a graph would clear it in each "
            "replay: make one call with it before the capture begins"
        )
    made = known or Residual(native, where, shape)
    if kept is not None and kept is not known:
        current = int(where.framework.stream(where.x))
        made.fill(np.asarray(kept), native.mark(current))
    elif made.view.count:
        zero = bytes(_FLOAT_BYTES)
        steps.before.append(("fill", made.view.address, _FLOAT_BYTES, made.view.count, zero))
    return made


def coded_rounds(
    call: CodedCall,
    ends: tuple[Floats, Floats],
    residual: Residual | None,
    memory: Callable[[int, int], DeviceView],
) -> list[Round]:
    """Return the rounds of a call, one for each of its exchanges.

    ``ends``: values and result. ``memory`` returns new memory, for so many elements of a type.
    """
    rests = 0 if residual is None else residual.view.address
    values, result = ends
    if call.collective is Collective.ALL_GATHER:
        return [_gathered(call, values, rests, result, memory)]
    if call.collective is Collective.BROADCAST:
        return [_broadcast(call, values, rests, result, memory)]
    if call.collective is Collective.REDUCE_SCATTER:
        return [_folded(call, values, rests, result, memory)]
    parts, rank = call.parts, call.rank
    length, place = parts.lengths[rank], _FLOAT_BYTES * parts.begin(rank)
    total = Floats(memory(length, DType.FLOAT32).address, DType.FLOAT32)
    first = _folded(call, values, rests, total, memory)
    second = _gathered(call, total, rests and rests + place, result, memory)
    return [first, second]


def _folded(
    call: CodedCall,
    values: Floats,
    rests: int,
    result: Floats,
    memory: Callable[[int, int], DeviceView],
) -> Round:
    """Return the round that brings each part to its owner, which folds it to ``result``."""
    parts, rank = call.parts, call.rank
    sent, arrived = memory(parts.nbytes, DType.UINT8), memory(parts.nbytes, DType.UINT8)
    own = values.at(parts.begin(rank))
    length, rows = parts.lengths[rank], (len(parts.lengths), rank, call.divisor)
    fold = ("fold", parts.codec, arrived.address, parts.stride, length, *own, *result, *rows)
    return Round(sent, arrived, parts.encode(values, rests, sent.address, rank, rank), [fold])


def _gathered(
    call: CodedCall,
    values: Floats,
    rests: int,
    result: Floats,
    memory: Callable[[int, int], DeviceView],
) -> Round:
    """Return the round that brings the codes of each rank's part to all ranks.

    ``values``, ``rests``: of this rank's part.
    """
    parts, rank = call.parts, call.rank
    mine = Parts(parts.codec, (parts.lengths[rank],))
    sent, arrived = memory(parts.stride, DType.UINT8), memory(parts.nbytes, DType.UINT8)
    before = mine.encode(values, rests, sent.address, -1, rank, rank)
    return Round(sent, arrived, before, parts.decode(arrived.address, result))


def _broadcast(
    call: CodedCall,
    values: Floats,
    rests: int,
    result: Floats,
    memory: Callable[[int, int], DeviceView],
) -> Round:
    """Return the round that brings the codes of the root's values to all ranks."""
    parts = call.parts
    codes = memory(parts.nbytes, DType.UINT8)
    is_root = call.rank == call.root
    before = parts.encode(values, rests, codes.address, -1, call.rank) if is_root else []
    return Round(codes if is_root else None, codes, before, parts.decode(codes.address, result))
