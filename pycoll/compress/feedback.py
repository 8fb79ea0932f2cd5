"""Feedback: keeps the residuals of codecs, which later calls send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pycoll.compress.codec import Array
from pycoll.compress.kept_arrays import Residuals, Velocities
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
        """Return whether the program must still wait for the Work; False after a failure."""
        failure = self._failure  # another thread may wait for the Work meanwhile
        return failure is not None and failure() is None

    def until(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``finish``, which ``wait()`` of the Work calls, with the end of this call."""

        def ended(*received: Any) -> Any:
            self._failure = None
            return finish(*received)

        return ended


class Feedback:
    """Keep the residual that a codec leaves of an array, and add it to the array of the next call.

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
        # The collectives use these. Keys are the numbers of arrays in the call.
        self.velocities = Velocities(self._momentum, self._masking)
        self.residuals = Residuals(self.velocities)
        #: The last Q of PowerSGD.
        self.factors: dict[int, Array] = {}

    @property
    def residual(self) -> Any:
        """The array of values that were held back, not a copy; None before the first call.

        A list of arrays after calls with a list of several. The next call reuses the memory. For
        arrays on devices it is a ``pycoll.device.device_codes.Residual``, which stays there:
        ``numpy.asarray`` copies it to the host.
        """
        arrays = self.residuals.arrays
        found = [arrays[number] for number in sorted(arrays)]
        return None if not found else found[0] if len(found) == 1 else found

    def norm(self) -> float:
        """Return the Euclidean norm of all residuals."""
        squares = [
            float(np.square(np.asarray(one), dtype=np.float64).sum())
            for one in self.residuals.arrays.values()
        ]
        return float(np.sqrt(sum(squares)))

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of numbers and copies of arrays, for a checkpoint of this rank."""
        own = {"form": FORM, "step": self.step}
        kept = (self.residuals.arrays, self.velocities.arrays, self.factors)
        return own | {
            name: {number: np.array(one) for number, one in arrays.items()}
            for name, arrays in zip(_FIELDS, kept, strict=True)
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
        residuals, self.velocities.arrays, self.factors = (
            {int(number): np.array(one) for number, one in state[name].items()} for name in _FIELDS
        )
        self.residuals.load(residuals)
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
        return self.velocities.correct(x, x.shape, number, whole_array).reshape(x.shape)

    def forget(self, *, residuals: bool = False, factors: bool = False) -> None:
        """Forget residuals, or the last Q of PowerSGD, and go on counting the calls."""
        if residuals:
            self.residuals = Residuals(self.velocities)
        if factors:
            self.factors = {}

    def check_free(self) -> None:
        """Begin a call: raise InvalidArgumentError while a Work is still to be waited for.

        Drops the records of a call that failed.
        """
        if self._serving is not None and self._serving.is_under_way():
            raise InvalidArgumentError(
                f"feedback serves a call with async_op whose Work has not been waited for (call "
                f"{self.step}): wait for that Work first, or pass another Feedback"
            )
        self._serving = None
        self.residuals.drop_call()
        self.velocities.drop_call()

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

    def ended(self) -> None:
        """Count a call that has sent its data."""
        self.velocities.end_call()
        self.residuals.end_call()
        self.step += 1

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
