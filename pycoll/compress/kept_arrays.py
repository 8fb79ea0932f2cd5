"""The arrays that a Feedback keeps from call to call: residuals and velocities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycoll.compress.codec import Array
from pycoll.errors import InvalidArgumentError


class KeptArrays:
    """Arrays by their numbers in the call, zeros at first.

    Attributes: ``arrays``, by number.
    """

    def __init__(self) -> None:
        self.arrays: dict[int, Array] = {}

    def memory(self, shape: tuple[int, ...], number: int = 0, dtype: Any = np.float32) -> Array:
        """Return the array of that number in host memory, for the collective to change.

        Raises InvalidArgumentError where calls before had another shape or dtype.
        """
        found = self.arrays.get(number)
        if found is None:
            found = self.arrays[number] = np.zeros(shape, dtype)
        _check(found, shape, np.dtype(dtype))
        if not isinstance(found, np.ndarray):  # on a device until now
            found = self.arrays[number] = np.array(found)
        return found

    def on_device(self, shape: tuple[int, ...], number: int, move: Callable[[Any], Any]) -> Any:
        """Keep an array of float32 where ``move(array)`` puts it, and return that.

        ``move`` gets None before the first call. Raises InvalidArgumentError as ``memory`` does.
        """
        found = self.arrays.get(number)
        if found is not None:
            _check(found, shape, np.dtype(np.float32))
        self.arrays[number] = moved = move(found)
        return moved


class Velocities(KeptArrays):
    """The sums of momentum correction; see ``Feedback`` for ``momentum`` and ``masking``."""

    def __init__(self, momentum: float, masking: bool) -> None:
        super().__init__()
        self.momentum, self.masking = momentum, masking
        #: The velocities of the call that runs.
        self._next: dict[int, Array] = {}

    def correct(self, x: Array, shape: tuple[int, ...], number: int, piece: slice) -> Array:
        """Return the velocities to send in place of ``x``, on one axis.

        ``x``: the values of a piece of the array of this ``shape``. ``end_call`` makes them the
        velocities of the next call.
        """
        before = self.memory(shape, number, x.dtype)
        self._next[number] = velocity = np.zeros(shape, x.dtype)
        own = velocity.reshape(-1)[piece]
        np.multiply(before.reshape(-1)[piece], x.dtype.type(self.momentum), out=own)
        np.add(own, x.reshape(-1), out=own)
        return own

    def mask(self, places: Array, number: int = 0) -> None:
        """Note that entries are sent: masking sets their velocities of this call to 0."""
        if self.masking and number in self._next:
            self._next[number].reshape(-1)[places] = 0

    def end_call(self) -> None:
        """Keep the velocities of the call, which has sent its data."""
        self.arrays.update(self._next)
        self._next = {}

    def drop_call(self) -> None:
        """Forget the velocities of a call that failed."""
        self._next = {}


class Residuals(KeptArrays):
    """The values that codecs left out.

    A rank may encode a piece of an array only. Residuals and velocities are 0 outside of the piece
    then. ``velocities``: those of the same Feedback.
    """

    def __init__(self, velocities: Velocities) -> None:
        super().__init__()
        self._velocities = velocities
        #: Memory for the residuals of the next call.
        self._spares: dict[int, Array] = {}
        #: The pieces of earlier calls, and those of the call that runs.
        self._pieces: dict[int, slice] = {}
        self._next_pieces: dict[int, slice] = {}

    def memory(self, shape: tuple[int, ...], number: int = 0, dtype: Any = np.float32) -> Array:
        """Return the residual of an array, which this rank encodes whole; see ``KeptArrays``."""
        self._forget_piece(number)
        return super().memory(shape, number, dtype)

    def on_device(self, shape: tuple[int, ...], number: int, move: Callable[[Any], Any]) -> Any:
        """Keep the residual of an array, which this rank encodes whole; see ``KeptArrays``."""

        def move_whole(found: Any) -> Any:
            self._forget_piece(number)
            return move(found)

        return super().on_device(shape, number, move_whole)

    def pair(
        self, shape: tuple[int, ...], number: int, dtype: Any, piece: slice
    ) -> tuple[Array, Array]:
        """Return the residual of a piece of an array, and memory for the next one.

        One axis each. Only ``replace`` makes the second one the residual. So a call that fails
        changes no residual.
        """
        kept = super().memory(shape, number, dtype)
        found = self._spares.get(number)
        if found is None or found.shape != kept.shape or found.dtype != kept.dtype:
            found = self._spares[number] = np.zeros(kept.shape, kept.dtype)
        if (piece.start, piece.stop) == (0, kept.size):
            self._forget_piece(number)
        return kept.reshape(-1)[piece], found.reshape(-1)[piece]

    def strays(self, shape: tuple[int, ...], number: int, dtype: Any, piece: slice) -> Array | None:
        """Return the residuals of earlier calls outside of the piece that this rank encodes now.

        One axis, zeros in the piece; None where there are none. The caller sends them by another
        message, and ``end_call`` drops them. Raises InvalidArgumentError as ``memory`` does.
        """
        kept = super().memory(shape, number, dtype)
        before = self._pieces.get(number, slice(0, kept.size))
        self._next_pieces[number] = piece
        if piece.start <= before.start and before.stop <= piece.stop:
            return None
        found = kept.reshape(-1).copy()
        if momentum := self._velocities.momentum:
            velocity = self._velocities.memory(shape, number, dtype)
            found += velocity.reshape(-1) * found.dtype.type(momentum)
        found[piece] = 0
        return found

    def replace(self, number: int = 0) -> None:
        """Make the second array of ``pair`` the residual, and the residual that memory."""
        kept = self.arrays[number]
        self.arrays[number], self._spares[number] = self._spares[number], kept

    def adopt(self, residual: Array, number: int = 0) -> None:
        """Keep the residual of an array in this memory, with the values it has.

        A call may later keep it elsewhere: ``memory`` returns where it is.
        """
        self.arrays[number] = residual
        # It may be the memory for the next one.
        self._spares.pop(number, None)
        self._forget_piece(number)

    def load(self, arrays: Mapping[int, Array]) -> None:
        """Keep these arrays, of which this rank encodes all."""
        self.arrays = dict(arrays)
        self._pieces, self._next_pieces = {}, {}

    def end_call(self) -> None:
        """Drop the residuals of earlier calls outside of the pieces of this call.

        Requires: the velocities are those of this call.
        """
        for number, piece in self._next_pieces.items():
            if self._pieces.get(number) != piece:
                for kept in (self.arrays, self._spares, self._velocities.arrays):
                    if number in kept:
                        kept[number].reshape(-1)[: piece.start] = 0
                        kept[number].reshape(-1)[piece.stop :] = 0
            self._pieces[number] = piece
        self._next_pieces = {}

    def drop_call(self) -> None:
        """Drop the records of a call that failed."""
        for number in self._next_pieces:
            # The call has written to a piece of it.
            self._spares.pop(number, None)
        self._next_pieces = {}

    def _forget_piece(self, number: int) -> None:
        """Note that all of an array's memory may hold values, and that this rank encodes all."""
        self._pieces.pop(number, None)
        self._next_pieces.pop(number, None)


def _check(found: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if found.shape != tuple(shape) or found.dtype != dtype:
        raise InvalidArgumentError(
            f"x has shape {tuple(shape)} and dtype {dtype}, but feedback holds a residual of "
            f"shape {found.shape} and dtype {found.dtype}: call feedback.reset(), or pass the "
            "Feedback of this array"
        )
