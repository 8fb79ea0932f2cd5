"""Optimizers that step on servers: a closed set, sent to them as numbers.

Each step is made of additions, multiplications, divisions and square roots of single elements, so
all replicas compute the same bits, whatever their processors are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll.errors import InvalidArgumentError

Array = npt.NDArray[Any]

_FORM = struct.Struct("<B4d")
_NAMES = ("sgd", "adagrad", "adam")
_FIELDS = (
    ("lr", "momentum", "weight_decay", "nesterov"),
    ("lr", "eps", "weight_decay", "initial"),
    ("lr", "beta1", "beta2", "eps"),
)


class Optimizer(NamedTuple):
    """An optimizer and its numbers; ``SGD``, ``Adagrad`` and ``Adam`` make it.

    Weights w change in place; g is the gradient, and all numbers are those of ``torch.optim``.

    Arguments: ``name``, "sgd", "adagrad" or "adam"; ``numbers``, four of them, in the order of the
    arguments of that function.

    Errors: none here; the functions check the numbers. Cost: none.

    >>> pycoll.ps.SGD(0.1) == pycoll.ps.SGD(lr=0.1)
    True
    """

    name: str
    numbers: tuple[float, float, float, float]

    def __str__(self) -> str:
        shown = zip(_FIELDS[_NAMES.index(self.name)], self.numbers, strict=True)
        return f"{self.name}({', '.join(f'{field}={number:g}' for field, number in shown)})"

    def to_bytes(self) -> bytes:
        """Return the form that ``from_bytes`` reads."""
        return _FORM.pack(_NAMES.index(self.name), *self.numbers)

    @classmethod
    def from_bytes(cls, form: Any) -> Optimizer:
        """Read an optimizer. Raises ValueError for what ``to_bytes`` did not make."""
        data = bytes(form)
        if len(data) != _FORM.size:
            raise ValueError(f"an optimizer of {len(data)} bytes: expected {_FORM.size}")
        number, *numbers = _FORM.unpack(data)
        if number >= len(_NAMES):
            raise ValueError(f"optimizer {number}: expected 0 to {len(_NAMES) - 1}")
        first, second, third, last = numbers
        if _NAMES[number] == "sgd":
            return SGD(first, second, third, bool(last))
        if _NAMES[number] == "adagrad":
            return Adagrad(first, second, third, last)
        return Adam(first, (second, third), last)

    @property
    def states(self) -> int:
        """The number of arrays, each as large as the weights, that it keeps."""
        return int(self.numbers[1] != 0) if self.name == "sgd" else 1 + (self.name == "adam")

    @property
    def fresh(self) -> float:
        """The first element of each state."""
        return self.numbers[3] if self.name == "adagrad" else 0.0

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on the number of steps before it."""
        return self.name == "adam"

    def step(self, weights: Array, states: Sequence[Array], gradient: Array, count: Any) -> None:
        """Change weights and states, float32 or float64 arrays of the gradient's shape and dtype.

        ``count``: the number of this step, from 1; for rows an array with that of each row.
        """
        if self.name == "sgd":
            self._sgd(weights, states, gradient)
        elif self.name == "adagrad":
            self._adagrad(weights, states, gradient)
        else:
            self._adam(weights, states, gradient, count)

    def _sgd(self, weights: Array, states: Sequence[Array], gradient: Array) -> None:
        lr, momentum, decay, nesterov = self.numbers
        if decay:
            gradient = gradient + weights * decay
        if momentum:
            velocity = states[0]
            velocity *= momentum
            velocity += gradient
            gradient = gradient + velocity * momentum if nesterov else velocity
        weights -= gradient * lr

    def _adagrad(self, weights: Array, states: Sequence[Array], gradient: Array) -> None:
        lr, eps, decay, _ = self.numbers
        if decay:
            gradient = gradient + weights * decay
        squares = states[0]
        squares += gradient * gradient
        root = np.sqrt(squares)
        root += eps
        weights -= gradient / root * lr

    def _adam(self, weights: Array, states: Sequence[Array], gradient: Array, count: Any) -> None:
        _, beta1, beta2, eps = self.numbers
        first, second = states
        first *= beta1
        first += gradient * (1 - beta1)
        second *= beta2
        second += gradient * gradient * (1 - beta2)
        rate, scale = _adam_scales(count, self.numbers, weights.dtype)
        root = np.sqrt(second)
        root *= scale
        root += eps
        weights -= first / root * rate


def _adam_scales(count: Any, numbers: Sequence[float], dtype: Any) -> tuple[Any, Any]:
    """Return lr / (1 - beta1**t) and 1 / sqrt(1 - beta2**t); for rows, columns of them."""
    lr, beta1, beta2, _ = numbers
    known, inverse = np.unique(np.asarray(count), return_inverse=True)
    turns = [int(one) for one in known]
    rates = np.array([lr / (1 - _power(beta1, turn)) for turn in turns], dtype)
    scales = np.array([1 / math.sqrt(1 - _power(beta2, turn)) for turn in turns], dtype)
    if np.ndim(count) == 0:
        return rates[0], scales[0]
    return rates[inverse][:, None], scales[inverse][:, None]


def _power(base: float, count: int) -> float:
    """Return base**count by multiplications alone; ``pow`` differs between C libraries."""
    result = 1.0
    while count:
        if count & 1:
            result *= base
        base *= base
        count >>= 1
    return result


def _number(name: str, given: Any, low: float, high: float = math.inf) -> float:
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not low <= given <= high or math.isinf(given):
        bound = f"from {low:g} to {high:g}" if high < math.inf else f"of at least {low:g}"
        raise InvalidArgumentError(f"{name} is {given!r}: expected a finite number {bound}")
    return float(given)


def SGD(  # noqa: N802
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> Optimizer:
    """Return stochastic gradient descent, for ``Store.set_optimizer``.

    Arguments: ``lr``, ``momentum``, ``weight_decay`` and ``nesterov`` are those of
    ``torch.optim.SGD``; numbers are at least 0, and momentum at most 1. ``nesterov`` needs
    momentum.

    Result: an ``Optimizer``.

    Errors: InvalidArgumentError for other numbers.

    Cost: with momentum the servers keep one array of the size of the weights.

    >>> str(pycoll.ps.SGD(0.1, momentum=0.9))
    'sgd(lr=0.1, momentum=0.9, weight_decay=0, nesterov=0)'
    """
    if nesterov and not momentum:
        raise InvalidArgumentError("nesterov is True without momentum: expected momentum above 0")
    inertia = _number("momentum", momentum, 0, 1)
    decay = _number("weight_decay", weight_decay, 0)
    return Optimizer("sgd", (_number("lr", lr, 0), inertia, decay, float(bool(nesterov))))


def Adagrad(  # noqa: N802
    lr: float, eps: float = 1e-10, weight_decay: float = 0.0, initial: float = 0.0
) -> Optimizer:
    """Return Adagrad, for ``Store.set_optimizer``.

    Arguments: ``lr``, ``eps`` and ``weight_decay`` are those of ``torch.optim.Adagrad``, without
    decay of the rate; ``initial`` is its ``initial_accumulator_value``. All are at least 0.

    Result: an ``Optimizer``.

    Errors: InvalidArgumentError for other numbers.

    Cost: the servers keep one array of the size of the weights.

    Source: Duchi, Hazan and Singer, "Adaptive subgradient methods", JMLR 2011.

    >>> pycoll.ps.Adagrad(0.1).states
    1
    """
    numbers = (
        _number("lr", lr, 0),
        _number("eps", eps, 0),
        _number("weight_decay", weight_decay, 0),
        _number("initial", initial, 0),
    )
    return Optimizer("adagrad", numbers)


def Adam(  # noqa: N802
    lr: float = 0.001, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
) -> Optimizer:
    """Return Adam, for ``Store.set_optimizer``.

    Arguments: ``lr``, ``betas`` and ``eps`` are those of ``torch.optim.Adam``; the betas are from 0
    to below 1. A row of a table counts the steps that it took itself.

    Result: an ``Optimizer``.

    Errors: InvalidArgumentError for other numbers.

    Cost: the servers keep two arrays of the size of the weights.

    Source: Kingma and Ba, "Adam", 2015 (arXiv 1412.6980).

    >>> pycoll.ps.Adam(0.01).states
    2
    """
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas is {betas!r}: expected two numbers")
    below = math.nextafter(1, 0)
    beta1, beta2 = (_number(f"betas[{n}]", one, 0, below) for n, one in enumerate(betas))
    return Optimizer("adam", (_number("lr", lr, 0), beta1, beta2, _number("eps", eps, 0)))
