"""Feedback: the memory of what codecs left out, which later calls send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycoll.compress.codec import Array
from pycoll.errors import InvalidArgumentError
from pycoll.types import real, whole

#: The version of the form in checkpoints.
FORM = 1
_FIELDS = ("residuals", "velocities", "factors")


class Serving:
    """A call that a Feedback serves, until its Work has been waited for.

    ``failure``: says why the communicator has failed, or None.
    """

    def __init__(self, failure: Callable[[], Any]) -> None:
        self._failure: Callable[[], Any] | None = failure

    def is_under_way(self) -> bool:
        """Return whether the Work is still to be waited for: not once the communicator failed."""
        failure = self._failure  # another thread may wait for the Work meanwhile
        return failure is not None and failure() is None

    def until(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish``, which ``wait()`` of the Work calls, with the end of this call."""

        def ended(*received: Any) -> Any:
            self._failure = None
            return finish(*received)

        return ended


class Feedback:
    """Keep what a codec leaves out of an array, and add it to the array of the next call.

    One Feedback serves the calls with one array, or one list of arrays, in turn. The sent values
    plus the residual are the array plus the last residual, bit for bit; ``Sign`` and stochastic
    rounding round the residual.

    Arguments:
        ``momentum``: of momentum correction, from 0 to below 1: each rank sums up velocities
            u = momentum u + x, and sends these, so the optimizer behind it has no momentum.
        ``masking``: whether the velocity of an entry that was sent becomes 0. Dense codecs send
            every entry and ignore it.
        ``warmup``: the calls over which the density of TopK and RandomK falls to its value: call t
            of w has the density d ** ((t + 1) / (w + 1)).

    Attributes: ``step``, the number of calls so far.

    Errors: InvalidArgumentError for other arguments, and from a call with arrays of other shapes or
    types than those of the calls before: then use ``reset()``, or another Feedback. A call is also
    refused until the Work of the last one has been waited for.

    Cost: memory for one copy of the arrays, one more with momentum, and one more with codecs that
    send places or matrices.

    Source: Seide et al. 2014 for residuals; Lin et al., "Deep gradient compression", 2018 (arXiv
    1712.01887) for momentum correction, masking and warm-up.

    >>> feedback = pycoll.compress.Feedback()
    >>> codec = pycoll.compress.TopK(0.5)
    >>> comm.all_reduce(np.float32([1, 2]), compress=codec, feedback=feedback)  # on 2 ranks
    array([0., 4.], dtype=float32)
    >>> feedback.residual
    array([1., 0.], dtype=float32)
    """

    def __init__(self, *, momentum: float = 0.0, masking: bool = True, warmup: int = 0) -> None:
        expected = "a number from 0 to below 1"
        self._momentum = real("momentum", momentum, expected)
        if not 0 <= self._momentum < 1:
            raise InvalidArgumentError(f"momentum is {momentum!r}: expected {expected}")
        if not isinstance(masking, bool):
            raise InvalidArgumentError(f"masking is {masking!r}: expected a bool")
        self._masking = masking
        self._warmup = whole("warmup", warmup, 0)
        self.reset()

    def reset(self) -> None:
        """Forget everything, for example because the model has changed; ``step`` becomes 0."""
        self.step = 0
        self._serving: Serving | None = None
        #: By the number of the array in the call.
        self._residuals: dict[int, Array] = {}
        self._velocities: dict[int, Array] = {}
        #: The velocities of the call that runs.
        self._next: dict[int, Array] = {}
        #: Memory for the residuals of the next call.
        self._spares: dict[int, Array] = {}
        #: The last Q of PowerSGD.
        self._factors: dict[int, Array] = {}
        #: The values of an array that this rank encodes, where all memories above are 0 outside of
        #: them: those of earlier calls, and those of the call that runs.
        self._pieces: dict[int, slice] = {}
        self._next_pieces: dict[int, slice] = {}

    @property
    def residual(self) -> Any:
        """The array of values that were held back, not a copy; None before the first call.

        A list of arrays after calls with a list of several. The next call reuses the memory. For
        arrays on devices it is a ``pycoll.device.device_codes.Residual``, which stays there:
        ``numpy.asarray`` copies it to the host.
        """
        found = [self._residuals[number] for number in sorted(self._residuals)]
        return None if not found else found[0] if len(found) == 1 else found

    def norm(self) -> float:
        """Return the Euclidean norm of all residuals."""
        squares = [
            float(np.square(np.asarray(one), dtype=np.float64).sum())
            for one in self._residuals.values()
        ]
        return float(np.sqrt(sum(squares)))

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of numbers and copies of arrays, for a checkpoint of this rank."""
        own = {"form": FORM, "step": self.step}
        return own | {
            name: {number: np.array(one) for number, one in getattr(self, f"_{name}").items()}
            for name in _FIELDS
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state_dict``; it copies the arrays.

        Errors: InvalidArgumentError for another form.
        """
        if not isinstance(state, Mapping) or state.get("form") != FORM:
            raise InvalidArgumentError(
                f"the saved state is {type(state).__name__} without form {FORM}: expected what "
                "Feedback.state_dict() returns"
            )
        for name in _FIELDS:
            saved = {int(number): np.array(one) for number, one in state[name].items()}
            setattr(self, f"_{name}", saved)
        self._pieces, self._next_pieces = {}, {}
        self.step = int(state["step"])

    # For the collectives

    @property
    def momentum(self) -> float:
        """The factor of momentum correction; 0 means that ``corrected`` returns its argument."""
        return self._momentum

    def corrected(self, x: Array, number: int = 0) -> Array:
        """Return the array to send in place of ``x``: the velocity, if there is momentum.

        ``x``: a NumPy array. ``number``: its place in the call's list. ``ended()`` makes the
        velocity that of the next call, so a call that fails changes nothing.
        """
        if not self._momentum:
            return x
        whole_array = slice(0, x.size)
        return self.corrected_piece(x, x.shape, number, whole_array).reshape(x.shape)

    def corrected_piece(self, x: Array, shape: tuple[int, ...], number: int, piece: slice) -> Array:
        """Correct a piece of an array of this ``shape`` as ``corrected`` does; return one axis."""
        before = self._array_of(self._velocities, shape, x.dtype, number)
        self._next[number] = velocity = np.zeros(shape, x.dtype)
        own = velocity.reshape(-1)[piece]
        np.multiply(before.reshape(-1)[piece], x.dtype.type(self._momentum), out=own)
        np.add(own, x.reshape(-1), out=own)
        return own

    def memory(self, shape: tuple[int, ...], number: int = 0, dtype: Any = np.float32) -> Array:
        """Return the residual of an array, zeros at first, for the collective to change.

        Raises InvalidArgumentError where calls before had another shape or dtype.
        """
        self._forget_piece(number)
        return self._array_of(self._residuals, shape, np.dtype(dtype), number)

    def on_device(
        self, shape: tuple[int, ...], number: int, move: Callable[[Any], Any], name: str
    ) -> Any:
        """Keep the memory ``name`` of an array where ``move(memory)`` puts it, and return that.

        ``name``: "residuals" or "velocities", of float32. ``move`` gets None before the first call.
        Raises InvalidArgumentError as ``memory`` does.
        """
        kept = self._residuals if name == "residuals" else self._velocities
        found = kept.get(number)
        if found is not None:
            self._check(found, shape, np.dtype(np.float32))
        self._forget_piece(number)
        kept[number] = moved = move(found)
        return moved

    def forget(self, *, residuals: bool = False, factors: bool = False) -> None:
        """Forget residuals, or the last Q of PowerSGD, and go on counting the calls."""
        if residuals:
            self._residuals, self._spares, self._pieces = {}, {}, {}
        if factors:
            self._factors = {}

    def check_free(self) -> None:
        """Begin a call: raise InvalidArgumentError while a Work is still to be waited for.

        This Feedback forgets what a failed call has noted in it.
        """
        if self._serving is not None and self._serving.is_under_way():
            raise InvalidArgumentError(
                f"feedback serves a call with async_op whose Work has not been waited for (call "
                f"{self.step}): wait for that Work first, or pass another Feedback"
            )
        self._serving = None
        for number in self._next_pieces:
            # A call that failed has written to a piece of it.
            self._spares.pop(number, None)
        self._next, self._next_pieces = {}, {}

    def serve(
        self,
        failure: Callable[[], Any],
        finish: Callable[..., Any],
        start: Callable[[Callable[..., Any]], Any],
    ) -> Any:
        """Return the Work of ``start(finish)``, and serve no other call until it is waited for.

        ``failure``: says why the communicator has failed, or None; then this Feedback is free.
        """
        serving = Serving(failure)
        work = start(serving.until(finish))
        self._serving = serving
        return work

    def pair(
        self, shape: tuple[int, ...], number: int, dtype: Any, piece: slice
    ) -> tuple[Array, Array]:
        """Return the residual of a piece of an array, and memory for the next one.

        One axis each. ``replace`` makes the second one the residual, and nothing else changes: a
        call that fails does not.
        """
        kept = self._array_of(self._residuals, shape, np.dtype(dtype), number)
        found = self._spares.get(number)
        if found is None or found.shape != kept.shape or found.dtype != kept.dtype:
            found = self._spares[number] = np.zeros(kept.shape, kept.dtype)
        if (piece.start, piece.stop) == (0, kept.size):
            self._forget_piece(number)
        return kept.reshape(-1)[piece], found.reshape(-1)[piece]

    def strays(self, shape: tuple[int, ...], number: int, dtype: Any, piece: slice) -> Array | None:
        """Return what calls before have left outside of the piece that this rank encodes now.

        One axis, zeros in the piece; None where nothing is left. The caller sends it another way,
        and ``ended()`` forgets it. Raises InvalidArgumentError as ``memory`` does.
        """
        kept = self._array_of(self._residuals, shape, np.dtype(dtype), number)
        before = self._pieces.get(number, slice(0, kept.size))
        self._next_pieces[number] = piece
        if piece.start <= before.start and before.stop <= piece.stop:
            return None
        found = kept.reshape(-1).copy()
        if self._momentum:
            velocity = self._array_of(self._velocities, shape, np.dtype(dtype), number)
            found += velocity.reshape(-1) * found.dtype.type(self._momentum)
        found[piece] = 0
        return found

    def replace(self, number: int = 0) -> None:
        """Make the ``spare`` of an array its residual, and the residual its spare."""
        kept = self._residuals[number]
        self._residuals[number], self._spares[number] = self._spares[number], kept

    def adopt(self, residual: Array, number: int = 0) -> None:
        """Keep the residual of an array in this memory, with the values it has.

        A call may later keep it elsewhere: ``memory`` returns where it is.
        """
        self._residuals[number] = residual
        # It may be the memory for the next one.
        self._spares.pop(number, None)
        self._forget_piece(number)

    def ended(self) -> None:
        """Count a call that has sent its data."""
        self._velocities.update(self._next)
        for number, piece in self._next_pieces.items():
            if self._pieces.get(number) != piece:
                for kept in (self._residuals, self._spares, self._velocities):
                    if number in kept:
                        kept[number].reshape(-1)[: piece.start] = 0
                        kept[number].reshape(-1)[piece.stop :] = 0
            self._pieces[number] = piece
        self._next, self._next_pieces = {}, {}
        self.step += 1

    def mask(self, places: Array, number: int = 0) -> None:
        """Note, before ``ended()``, that entries are sent: masking sets their velocities to 0."""
        if self._masking and number in self._next:
            self._next[number].reshape(-1)[places] = 0

    @property
    def masking(self) -> bool:
        """Whether velocities of entries that codecs send places of become 0."""
        return self._masking

    @property
    def is_warming(self) -> bool:
        """Whether the next call belongs to the warm-up."""
        return self.step < self._warmup

    @property
    def warms(self) -> bool:
        """Whether there is a warm-up."""
        return self._warmup > 0

    def density(self, last: float) -> float:
        """Return the density of the next call, where the one behind the warm-up is ``last``."""
        if not self.is_warming:
            return last
        return float(last ** ((self.step + 1) / (self._warmup + 1)))

    def factor(self, number: int = 0) -> Array | None:
        """Return the last Q of an array."""
        return self._factors.get(number)

    def keep_factor(self, q: Array, number: int = 0) -> None:
        """Keep the Q of an array for the next call."""
        self._factors[number] = q

    def _forget_piece(self, number: int) -> None:
        """Note that all of an array's memory may hold values, and that this rank encodes all."""
        self._pieces.pop(number, None)
        self._next_pieces.pop(number, None)

    @staticmethod
    def _array_of(
        kept: dict[int, Array], shape: tuple[int, ...], dtype: np.dtype[Any], number: int
    ) -> Array:
        found = kept.get(number)
        if found is None:
            found = kept[number] = np.zeros(shape, dtype)
        Feedback._check(found, shape, dtype)
        if not isinstance(found, np.ndarray):  # on a device until now
            found = kept[number] = np.array(found)
        return found

    @staticmethod
    def _check(found: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if found.shape != tuple(shape) or found.dtype != dtype:
            raise InvalidArgumentError(
                f"x has shape {tuple(shape)} and dtype {dtype}, but feedback holds a residual of "
                f"shape {found.shape} and dtype {found.dtype}: call feedback.reset(), or pass the "
                "Feedback of this array"
            )
