"""Schedules: the number of inner steps between two synchronisations, as pure functions.

A round is a number of inner steps, in which each fragment of the parameters is synchronised once. A
schedule says how long the first round is, and after each round how long the next one is. All ranks
call it with equal values, so they agree without a message.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple

from pycoll.errors import InvalidArgumentError
from pycoll.types import real, whole


class Round(NamedTuple):
    """The inner steps of a round, and the state of the schedule until the next round."""

    steps: int
    memory: tuple[float, ...] = ()


class Schedule:
    """Base of the schedules; an immutable value."""

    #: Whether ``following`` needs the loss.
    needs_loss = False

    @property
    def gradient_steps(self) -> int:
        """The first steps, in which gradients are averaged instead of parameters."""
        return 0

    @property
    def shortest(self) -> int:
        """The fewest inner steps that a round may have."""
        return self.first_round().steps

    def first_round(self) -> Round:
        """The first round."""
        raise TypeError(f"{type(self).__name__} has no first_round()")

    def following(self, steps: int, loss: float, last: Round) -> Round:
        """The round after ``last``.

        ``steps``: the inner steps so far, without those that averaged gradients. ``loss``: the mean
        over ``last`` and all ranks; NaN unless ``needs_loss``.
        """
        del steps, loss
        return last

    def facts(self) -> list[Any]:
        """The values that have to be equal on all ranks, for the text of an error."""
        return [type(self).__name__, *vars(self).values()]


@dataclass(frozen=True)
class Constant(Schedule):
    """Rounds of equal length."""

    steps: int

    def first_round(self) -> Round:
        """Every round is like the first."""
        return Round(self.steps)

    def facts(self) -> list[Any]:
        """The number of steps."""
        return ["every", self.steps]


@dataclass(frozen=True)
class PostLocal(Schedule):
    """Average gradients in the first ``start`` steps, as synchronous training does; then go local.

    Parameters change fastest at the beginning, where local steps would drive ranks apart.

    Arguments: ``start``, the number of steps with averaged gradients, at least 0; ``every``, the
    number of inner steps between synchronisations afterwards, or an ``AdaComm``.

    Errors: InvalidArgumentError for other values.

    Cost: an all-reduce of the gradients in each of the first steps.

    Source: Lin, Stich, Patel and Jaggi, "Don't use large mini-batches, use local SGD", 2020
    (arXiv 1808.07217).

    >>> pycoll.optim.PostLocal(start=1000, every=8)
    PostLocal(start=1000, every=8)
    """

    start: int
    every: int | Schedule

    def __post_init__(self) -> None:
        whole("start", self.start, 0)
        if isinstance(self.every, PostLocal):
            raise InvalidArgumentError(
                f"every is {self.every}: a PostLocal takes a number of steps or an AdaComm"
            )
        schedule_of(self.every)

    @property
    def needs_loss(self) -> bool:  # type: ignore[override]  # the base has a constant
        """Whether the inner schedule needs the loss."""
        return self._inner.needs_loss

    @property
    def gradient_steps(self) -> int:
        """The number of steps with averaged gradients."""
        return self.start

    @property
    def shortest(self) -> int:
        """The shortest round of the inner schedule."""
        return self._inner.shortest

    @property
    def _inner(self) -> Schedule:
        return schedule_of(self.every)

    def first_round(self) -> Round:
        """The first round of the inner schedule."""
        return self._inner.first_round()

    def following(self, steps: int, loss: float, last: Round) -> Round:
        """The next round of the inner schedule."""
        return self._inner.following(steps, loss, last)

    def facts(self) -> list[Any]:
        """The start and the facts of the inner schedule."""
        return ["PostLocal", self.start, self._inner.facts()]


@dataclass(frozen=True)
class AdaComm(Schedule):
    """Begin with long rounds, and shorten them as the loss falls.

    A loss here is the mean over a round and all ranks. After every ``period`` inner steps the next
    rounds get ``first`` times sqrt(loss / first loss) steps, rounded up. Where that would not
    shorten the rounds, they get ``decay`` times their length.

    Arguments: ``first``, the inner steps of the first round; ``period``, the inner steps between
    two decisions, by default 10 ``first``; ``decay``, between 0 and 1; ``least``, the inner steps
    of the shortest round. Unlike the paper's, periods are counted in steps and not in seconds, so
    that a restart repeats the decisions.

    Errors: InvalidArgumentError for other values, and at the end of a round for a mean loss that is
    negative or not finite.

    Cost: an all-reduce of 8 bytes per round.

    Source: Wang and Joshi, "Adaptive communication strategies to achieve the best error-runtime
    trade-off in local-update SGD", 2019 (arXiv 1810.08313).

    >>> pycoll.optim.AdaComm(first=32)
    AdaComm(first=32, period=None, decay=0.5, least=1)
    """

    first: int = 32
    period: int | None = None
    decay: float = 0.5
    least: int = 1

    def __post_init__(self) -> None:
        whole("first", self.first, 1)
        if self.period is not None:
            whole("period", self.period, 1)
        if not 0 < real("decay", self.decay, "a number between 0 and 1") < 1:
            raise InvalidArgumentError(f"decay is {self.decay!r}: expected between 0 and 1")
        if whole("least", self.least, 1) > self.first:
            raise InvalidArgumentError(
                f"least is {self.least} and first is {self.first}: expected at most first"
            )

    @property
    def needs_loss(self) -> bool:  # type: ignore[override]  # the base has a constant
        """The length of a round depends on the loss."""
        return True

    @property
    def shortest(self) -> int:
        """``least``."""
        return self.least

    def first_round(self) -> Round:
        """A round of ``first`` steps."""
        return Round(self.first)

    def following(self, steps: int, loss: float, last: Round) -> Round:
        """The next round; its memory is the first loss and the step of the last decision."""
        if not (math.isfinite(loss) and loss >= 0):
            raise InvalidArgumentError(
                f"loss is {loss!r} on the average of all ranks: AdaComm needs finite numbers of at "
                "least 0"
            )
        if not last.memory:
            return Round(last.steps, (loss, steps))
        first_loss, decided = last.memory
        if steps - decided < (self.period or 10 * self.first):
            return last
        ratio = loss / first_loss if first_loss > 0 else 1.0
        wanted = math.ceil(math.sqrt(ratio) * self.first)
        if wanted >= last.steps:
            wanted = math.ceil(self.decay * last.steps)
        return Round(max(self.least, wanted), (first_loss, steps))


def schedule_of(every: Any) -> Schedule:
    """The schedule for the argument ``every``, a number of steps or a schedule."""
    if isinstance(every, Schedule):
        return every
    if isinstance(every, bool) or not isinstance(every, numbers.Integral) or every < 1:
        raise InvalidArgumentError(
            f"every is {every!r}: expected a number of inner steps of at least 1, or a schedule "
            "such as PostLocal(start=1000, every=8)"
        )
    return Constant(int(every))
