"""The outer step: moves the parameters that all ranks have in common by their averaged change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.types import real

_NAMES = ("lr", "momentum", "nesterov", "in_inner_rate")


@dataclass(frozen=True)
class Outer:
    """SGD on the common parameters a, with the averaged change d = a - mean(x) as the gradient.

        v' = momentum v + d / s
        a' = a - lr s v'                    or, by Nesterov, a - lr s (d / s + momentum v')

    x are the parameters of the ranks. s is 1, or the inner learning rate (``in_inner_rate``): the
    velocity v then has the unit of gradients, and survives changes of the inner learning rate.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    in_inner_rate: bool = False

    def __post_init__(self) -> None:
        if real("outer lr", self.lr, "a finite number above 0") <= 0:
            raise InvalidArgumentError(f"outer lr is {self.lr!r}: expected a number above 0")
        if not 0 <= real("outer momentum", self.momentum, "a number from 0 to below 1") < 1:
            raise InvalidArgumentError(
                f"outer momentum is {self.momentum!r}: expected a number from 0 to below 1"
            )
        for name in ("nesterov", "in_inner_rate"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(
                    f"outer {name} is {getattr(self, name)!r}: expected a bool"
                )
        if self.nesterov and not self.momentum:
            raise InvalidArgumentError("outer nesterov is True and momentum is 0: it needs one")

    @property
    def averages(self) -> bool:
        """Whether a' is mean(x) itself. Ranks then average x, without rounding a change first."""
        return self.lr == 1 and self.momentum == 0

    def step(self, anchor: Any, change: Any, velocity: Any, rate: float) -> tuple[Any, Any]:
        """The new (anchor, velocity); a velocity of None is zero.

        ``rate``: the inner learning rate, not 0.
        """
        unit = rate if self.in_inner_rate else 1.0
        gradient = change if unit == 1 else change / unit
        if not self.momentum:
            return anchor - gradient * (self.lr * unit), None
        velocity = gradient if velocity is None else velocity * self.momentum + gradient
        ahead = gradient + velocity * self.momentum if self.nesterov else velocity
        return anchor - ahead * (self.lr * unit), velocity


def outer_of(given: Any) -> Outer:
    """The outer step for an argument ``outer``: a dict, an Outer, or None for the average."""
    if given is None:
        return Outer()
    if isinstance(given, Outer):
        return given
    if not isinstance(given, Mapping):
        raise InvalidArgumentError(
            f"outer is {given!r}: expected a dict such as "
            "{'lr': 0.7, 'momentum': 0.9, 'nesterov': True}"
        )
    unknown = [name for name in given if name not in _NAMES]
    if unknown:
        raise InvalidArgumentError(
            f"outer has {unknown[0]!r}: expected {', '.join(_NAMES)}; the outer step is SGD"
        )
    return Outer(**given)
