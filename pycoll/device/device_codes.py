"""Codes and residuals of arrays on devices, and the steps of the kernel that makes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.device.device_copies import Copies, Copy
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.types import ITEM_BYTES, DType

#: Codes of a part begin at multiples of this many bytes, so that no kernel loads them by bytes.
_ALIGNMENT = 16
FLOAT_BYTES = 4
#: The codec of steps without codes: a warp works on one of its blocks at a time.
WHOLE_VALUES = _core.Codec(0, 256, False, 0)
_NAP_S = 50e-6


class Floats(NamedTuple):
    """An array of floats on the device, in C order: its address and type."""

    address: int
    dtype: int

    def at(self, index: int) -> Floats:
        """Return the array from an element on."""
        return self._replace(address=self.address + index * ITEM_BYTES[self.dtype])


class Codes(NamedTuple):
    """The codes of parts on the device: the address of the first, and the bytes to the next."""

    address: int
    stride: int

    def of(self, part: int) -> Codes:
        """Return the codes from a part on."""
        return self._replace(address=self.address + part * self.stride)


class Parts(NamedTuple):
    """Values in parts, each of which has codes of its own.

    ``lengths``: the values of each part, one after the other. ``of_ranks``: the part of each rank.
    """

    codec: _core.Codec
    lengths: tuple[int, ...]
    of_ranks: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The bytes that the codes of a part take."""
        return align(self.codec.nbytes(max(self.lengths)))

    def begin(self, part: int) -> int:
        """Return the number of values in front of a part."""
        return sum(self.lengths[:part])

    def encode(self, part: int, values: Floats, rests: int, codes: Codes, rank: int) -> Copy:
        """Return the step that encodes a part for ``rank``.

        ``values``: of the part. ``rests``: the address of its residual; 0 for none.
        """
        length = self.lengths[part]
        return ("encode", self.codec, *codes, length, *values, rests, 1, -1, part, rank)

    def encode_all(self, values: Floats, rests: int, codes: Codes, rank: int) -> list[Copy]:
        """Return the steps by which ``rank`` encodes the parts of all other ranks."""
        if self._is_even():
            total, parts = sum(self.lengths), len(self.lengths)
            own = (parts, rank, 0, rank)
            return [("encode", self.codec, *codes, total, *values, rests, *own)]
        made = []
        for number, part in enumerate(self.of_ranks):
            begin = self.begin(part)
            left = rests and rests + FLOAT_BYTES * begin
            if number != rank:
                made.append(self.encode(part, values.at(begin), left, codes.of(number), rank))
        return made

    def decode(self, codes: Codes, result: Floats) -> list[Copy]:
        """Return the steps that decode the parts of all ranks."""
        if self._is_even():
            parts, total = len(self.lengths), sum(self.lengths)
            return [("decode", self.codec, *codes, total, *result, parts)]
        made: list[Copy] = []
        for number, part in enumerate(self.of_ranks):
            to, length = result.at(self.begin(part)), self.lengths[part]
            made.append(("decode", self.codec, *codes.of(number), length, *to, 1))
        return made

    def fold(
        self, part: int, codes: Codes, own: Floats, result: Floats, rows: tuple[int, int, int]
    ) -> Copy:
        """Return the step that sums up a part of several ranks.

        ``own``, ``result``: of the part. ``rows``: the number of rows, the number of the row whose
        values are ``own``, and the divisor of the sums, or 0.
        """
        return ("fold", self.codec, *codes, self.lengths[part], *own, *result, *rows)

    def total(self, count: int, values: Floats, stride: int, rows: int, result: Floats) -> Copy:
        """Return the step that sums up ``rows`` rows of ``count`` values.

        ``stride``: the bytes from one row to the next.
        """
        return ("total", self.codec, 0, stride, count, *values, *result, rows)

    def _is_even(self) -> bool:
        """Whether one step can handle all parts: they are cut evenly, in the order of ranks."""
        count = len(self.lengths)
        return tuple(self.of_ranks) == tuple(range(count)) and self.lengths == cut(
            sum(self.lengths), count
        )


def velocity_step(count: int, values: Floats, velocities: int, momentum: float) -> Copy:
    """Return the step that replaces ``count`` velocities u by momentum * u + x, x of ``values``.

    ``velocities``: their address.
    """
    return ("correct", WHOLE_VALUES, 0, 0, count, *values, velocities, momentum)


def align(nbytes: int) -> int:
    """Return the bytes up to the next place where codes may begin."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def cut(count: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the parts of an array as plans cut it: longer ones first."""
    share, longer = divmod(count, parts)
    return tuple(share + (part < longer) for part in range(parts))


class Kept(Protocol):
    """The memory that a Feedback has of one array."""

    @property
    def momentum(self) -> float:
        """The factor of the last velocities; 0 without momentum correction."""

    @property
    def masking(self) -> bool:
        """Whether the velocity of a value becomes 0 when a sparse codec sends the value."""

    def memory(self, move: Callable[[Any], Residual], name: str) -> Residual:
        """Return "residuals" or "velocities" on the device, where ``move`` puts them."""


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

    def note_change(self, mark: _core.DeviceMark) -> None:
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
        zero = bytes(FLOAT_BYTES)
        steps.before.append(("fill", made.view.address, FLOAT_BYTES, made.view.count, zero))
    return made
