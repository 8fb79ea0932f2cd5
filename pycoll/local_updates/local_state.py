"""The state of a rank between synchronisations: an immutable value, and its form in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pycoll.compress import Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.local_updates.array_values import copy_of
from pycoll.local_updates.schedules import Round

#: The version of the form in checkpoints.
FORM = 1


class Pending(NamedTuple):
    """A fragment whose average is under way while inner steps go on.

    ``due``: the inner step behind which it is applied. ``sent``: this rank's share, one array per
    parameter and None outside the fragment, kept so that a restart can send it again. ``work``
    gives the averages; None where the share has not been sent. ``feedback``: what the codec leaves
    out of the share and of earlier ones; None unless the codec needs it.
    """

    fragment: int
    due: int
    sent: tuple[Any, ...]
    work: Any = None
    feedback: Feedback | None = None


@dataclass(frozen=True)
class LocalState:
    """The state of one rank; a value that ``LocalUpdates`` makes and never changes.

    Arguments, which are its attributes:
        ``step``: the inner steps so far.
        ``progress``: the synchronisations that this rank has completed, 1 after the first meeting.
        ``begun``: the step at which the current round began; ``round``: its length.
        ``ended``: the step after which a round was complete last.
        ``fragment``: the next fragment of the round to send; ``last_sent``: for each fragment the
            step at which it was sent last.
        ``anchors``: the parameters that all ranks have in common, or None where they average.
        ``velocities``: the velocity of the outer step for each parameter; None is zero.
        ``pending``: the fragment that is under way.
        ``losses``: sum and number of the losses in this round.
        ``rates``: the last inner learning rate of each parameter that was not 0; empty if unused.
        ``residuals``: for each parameter what a codec has left out of this rank's shares so far, a
            NumPy array or None; empty before the first synchronisation and where none is kept.
        ``factors``: for each parameter the last Q of PowerSGD, a NumPy array or None; the same on
            all ranks.
        ``comm``: the communicator on which this rank has met the others.

    Errors: none. Cost: the arrays that it refers to.

    >>> weights, state = pycoll.optim.LocalUpdates(every=2).begin(np.zeros(2), comm)
    >>> state.step, state.progress
    (0, 1)
    """

    step: int = 0
    progress: int = 0
    begun: int = 0
    ended: int = 0
    round: Round = Round(1)  # noqa: RUF009  # a tuple cannot change
    fragment: int = 0
    last_sent: tuple[int, ...] = (0,)
    anchors: tuple[Any, ...] | None = None
    velocities: tuple[Any, ...] = ()
    pending: Pending | None = None
    losses: tuple[float, int] = (0.0, 0)
    rates: tuple[float, ...] = ()
    residuals: tuple[Any, ...] = ()
    factors: tuple[Any, ...] = ()
    comm: Any = None

    @property
    def synchronized(self) -> bool:
        """Whether the last fragment of a round has been applied after the last inner step.

        True before the first step, and in steps with averaged gradients. All ranks see the same
        value after the same step.
        """
        return self.step == self.ended

    def numbers(self) -> dict[str, Any]:
        """Everything but arrays and the communicator."""
        pending = self.pending
        return {
            "form": FORM,
            "step": self.step,
            "progress": self.progress,
            "begun": self.begun,
            "ended": self.ended,
            "round": [self.round.steps, list(self.round.memory)],
            "fragment": self.fragment,
            "last_sent": list(self.last_sent),
            "losses": list(self.losses),
            "rates": list(self.rates),
            "pending": None if pending is None else [pending.fragment, pending.due],
        }

    def arrays(self) -> dict[str, Any]:
        """The arrays: anchors, velocities, and the share of the fragment that is under way.

        Residuals are those of this rank alone, and factors have other shapes, so they are not
        among them.
        """
        return {
            "anchors": None if self.anchors is None else list(self.anchors),
            "velocities": list(self.velocities),
            "sent": None if self.pending is None else list(self.pending.sent),
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as a dict of numbers, lists and arrays, for a checkpoint of this rank.

        Result: a dict that shares the arrays of the state. ``LocalState.load`` reads it. A fragment
        that is under way is in it as this rank's share, which the restart sends again.

        Cost: no copy and no message.
        """
        kept = {"residuals": list(self.residuals), "factors": list(self.factors)}
        return {**self.numbers(), **self.arrays(), **kept}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> LocalState:
        """Make a state from a ``state_dict``; pass it to ``LocalUpdates.resume``.

        Errors: InvalidArgumentError for another form.

        Cost: a copy of each array.
        """
        if saved.get("form") != FORM:
            raise InvalidArgumentError(
                f"the saved state has form {saved.get('form')!r}: expected {FORM}, as state_dict() "
                "of local updates gives"
            )
        arrays = {
            name: None if saved[name] is None else [_copy(one) for one in saved[name]]
            for name in ("anchors", "velocities", "sent")
        }
        residuals, factors = (
            tuple(_copy(one) for one in saved.get(name, ())) for name in ("residuals", "factors")
        )
        return replace(cls.of(saved, arrays), residuals=residuals, factors=factors)

    @classmethod
    def of(cls, numbers: Mapping[str, Any], arrays: Mapping[str, Any]) -> LocalState:
        """The state with these ``numbers()`` and ``arrays()``."""
        pending = None
        if numbers["pending"] is not None:
            fragment, due = numbers["pending"]
            pending = Pending(fragment, due, tuple(arrays["sent"]))
        steps, memory = numbers["round"]
        plain = {
            name: int(numbers[name]) for name in ("step", "progress", "begun", "ended", "fragment")
        }
        return cls(
            **plain,
            round=Round(steps, tuple(memory)),
            last_sent=tuple(numbers["last_sent"]),
            anchors=None if arrays["anchors"] is None else tuple(arrays["anchors"]),
            velocities=tuple(arrays["velocities"]),
            pending=pending,
            losses=(numbers["losses"][0], numbers["losses"][1]),
            rates=tuple(numbers["rates"]),
            residuals=(),
            factors=(),
        )

    def map_arrays(self, function: Callable[[int, Any], Any]) -> LocalState:
        """The state with ``function(number, array)`` in place of the arrays of each parameter.

        Residuals stay as they are, in host memory.
        """

        def all_of(arrays: Sequence[Any]) -> list[Any]:
            return [None if one is None else function(n, one) for n, one in enumerate(arrays)]

        arrays = {
            name: None if values is None else all_of(values)
            for name, values in self.arrays().items()
        }
        mapped = self.of(self.numbers(), arrays)
        return replace(mapped, residuals=self.residuals, factors=self.factors)

    def without_work(self) -> LocalState:
        """The state with the pending fragment not sent, and no communicator."""
        pending = self.pending
        return replace(
            self,
            comm=None,
            pending=None if pending is None else pending._replace(work=None, feedback=None),
        )

    def levelled_with(self, taken: LocalState) -> LocalState:
        """The state of this rank when it takes that of another rank.

        It is this rank's own where both ranks are equally far. Otherwise it is ``taken``, with this
        rank's residuals where both have completed equally many synchronisations. A rank that has
        completed fewer forgets its residuals: what it sent in the last one is unknown.
        """
        if self.progress != taken.progress:
            return taken
        if self.step == taken.step:
            return self.without_work()
        return replace(taken, residuals=self.residuals)


def _copy(array: Any) -> Any:
    return None if array is None else copy_of(array)
