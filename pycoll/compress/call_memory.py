"""The part of a Feedback that one call uses, and the places of the call's arrays on one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pycoll.compress.codec import Array
from pycoll.compress.feedback import Feedback


class CallLayout:
    """The arrays of a call, end to end on one axis, and the part of it that this rank encodes.

    Attributes: ``shapes`` of the arrays; ``ends``, 0 and the end of each; ``shard``, the values
    that this rank encodes, all of them at first.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], counts: Sequence[int]) -> None:
        self.shapes = shapes
        self.ends: list[int] = np.cumsum([0, *counts]).tolist()
        self.shard = slice(0, self.ends[-1])

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each array and its place among the values of all arrays."""
        for number in range(len(self.shapes)):
            yield number, slice(self.ends[number], self.ends[number + 1])

    def pieces(self) -> Iterator[tuple[int, slice]]:
        """Yield the number of each array and the place of the values that this rank encodes."""
        for number in range(len(self.shapes)):
            yield number, self.piece(number)

    def piece(self, number: int) -> slice:
        """Return the place of the values of an array that this rank encodes."""
        return within(slice(self.ends[number], self.ends[number + 1]), self.shard)


class CallMemory:
    """The memory of one call's arrays in a Feedback; without one, no method does anything.

    ``kind``: the type in which values are computed.
    """

    def __init__(
        self, feedback: Feedback | None, layout: CallLayout, kind: np.dtype[np.floating]
    ) -> None:
        self._feedback, self._layout, self._kind = feedback, layout, kind

    def strays(self, shard: slice) -> Array | None:
        """Return the residuals outside of ``shard``, from calls in which this rank encoded other
        values; zeros inside. None where feedback has none there.

        Raises InvalidArgumentError where calls before had another shape or type.
        """
        if self._feedback is None:
            return None
        layout, residuals = self._layout, self._feedback.residuals
        found: Array = None
        for number, place in layout.parts():
            piece = shift(within(place, shard), -place.start)
            one = residuals.strays(layout.shapes[number], number, self._kind, piece)
            if one is not None:
                found = np.zeros(layout.ends[-1], self._kind) if found is None else found
                found[place] = one
        return found

    def correct(self, own: Callable[[int], Array]) -> None:
        """Replace values by velocities, where feedback has momentum.

        ``own``: returns the values of an array that this rank encodes.
        """
        if self._feedback is None or not self._feedback.momentum:
            return
        layout, velocities = self._layout, self._feedback.velocities
        for number, piece in layout.pieces():
            place = shift(piece, -layout.ends[number])
            values = own(number)
            values[...] = velocities.correct(values, layout.shapes[number], number, place)

    def pairs(self, number: int) -> tuple[Array, Array] | tuple[None, None]:
        """Return the residual of what this rank encodes of an array, and memory for the next one.

        A single axis each; a pair of None without feedback. Raises InvalidArgumentError where calls
        before had another shape or type.
        """
        if self._feedback is None:
            return None, None
        layout = self._layout
        place = shift(layout.piece(number), -layout.ends[number])
        return self._feedback.residuals.pair(layout.shapes[number], number, self._kind, place)

    def residuals(self) -> Array | None:
        """Return a copy of the residuals of what this rank encodes; None without feedback.

        Raises as ``pairs`` does.
        """
        rests: list[Array] = [self.pairs(number)[0] for number, _ in self._layout.pieces()]
        return None if self._feedback is None else np.concatenate(rests)

    def keep(self, residuals: Array | None) -> None:
        """Keep these residuals instead, and count the call."""
        if residuals is None:
            return
        for number, piece in self._layout.pieces():
            memory: Array = self.pairs(number)[1]
            memory[:] = residuals[shift(piece, -self._layout.shard.start)]
        self.replace()

    def replace(self) -> None:
        """Keep the second arrays of ``pairs`` as the residuals, and count the call."""
        if self._feedback is None:
            return
        for number in range(len(self._layout.shapes)):
            self._feedback.residuals.replace(number)
        self._feedback.ended()

    def mask(self, places: Array) -> None:
        """Clear the velocities of the values at these places, which ascend."""
        if self._feedback is None:
            return
        cuts = np.searchsorted(places, self._layout.ends)
        for number, place in self._layout.parts():
            mine = places[cuts[number] : cuts[number + 1]]
            self._feedback.velocities.mask(mine - mine.dtype.type(place.start), number)


def shift(place: slice, by: int) -> slice:
    """Return the place moved by ``by`` elements, as among values that begin elsewhere."""
    return slice(place.start + by, place.stop + by)


def within(place: slice, shard: slice) -> slice:
    """Return the part of ``place`` that lies in ``shard``."""
    begin = min(max(place.start, shard.start), place.stop)
    return slice(begin, max(begin, min(place.stop, shard.stop)))
