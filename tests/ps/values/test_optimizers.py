"""Optimizers on servers: the bits of plain NumPy, and torch's steps within rounding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import pycoll
from pycoll.ps.shard_arrays import ADD, MEAN, ArrayValue, ArrayValues
from pycoll.ps.values.server_optimizers import SGD, Adagrad, Adam, Optimizer
from pycoll.types import DType, numpy_dtype

CASES = [
    SGD(0.1),
    SGD(0.1, momentum=0.9),
    SGD(0.05, momentum=0.8, weight_decay=0.01, nesterov=True),
    SGD(0.05, weight_decay=0.1),
    Adagrad(0.1),
    Adagrad(0.2, eps=1e-6, weight_decay=0.01, initial=0.1),
    Adam(0.01),
    Adam(0.1, betas=(0.8, 0.95), eps=1e-6),
]
STEPS = 12


def plain(optimizer: Optimizer, weights: Any, gradients: list[Any]) -> Any:
    """The textbook's steps, with a scalar of the weights' type for each number."""
    kind = weights.dtype.type
    weights = weights.copy()
    one, two = np.zeros_like(weights), np.zeros_like(weights)
    lr = kind(optimizer.numbers[0])
    if optimizer.name == "adagrad":
        one += kind(optimizer.numbers[3])
    for turn, given in enumerate(gradients, 1):
        if optimizer.name == "adam":
            _, beta1, beta2, eps = optimizer.numbers
            one = one * kind(beta1) + given * kind(1 - beta1)
            two = two * kind(beta2) + given * given * kind(1 - beta2)
            rate = kind(optimizer.numbers[0] / (1 - power(beta1, turn)))
            scale = 1 / math.sqrt(1 - power(beta2, turn))
            weights = weights - one / (np.sqrt(two) * kind(scale) + kind(eps)) * rate
            continue
        g = given + weights * kind(optimizer.numbers[2])
        if optimizer.name == "adagrad":
            one = one + g * g
            weights = weights - g / (np.sqrt(one) + kind(optimizer.numbers[1])) * lr
        else:
            momentum = kind(optimizer.numbers[1])
            one = one * momentum + g
            weights = weights - (g + one * momentum if optimizer.numbers[3] else one) * lr
    return weights


def power(base: float, count: int) -> float:
    """The product of the squares that the binary digits of the count name."""
    result = 1.0
    for digit in reversed(f"{count:b}"):
        result = result * base if digit == "1" else result
        base = base * base
    return result


def torch_steps(optimizer: Optimizer, weights: Any, gradients: list[Any]) -> Any:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    parameter = torch.nn.Parameter(torch.tensor(weights))
    lr, second, third, last = optimizer.numbers
    if optimizer.name == "sgd":
        made = torch.optim.SGD([parameter], lr, second, 0, third, nesterov=bool(last))
    elif optimizer.name == "adagrad":
        made = torch.optim.Adagrad([parameter], lr, 0, third, last, eps=second)
    else:
        made = torch.optim.Adam([parameter], lr, (second, third), last)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        made.step()
    return parameter.detach().numpy()


def stepped(optimizer: Optimizer, weights: Any, gradients: list[Any], dtype: DType) -> ArrayValue:
    values, rule = ArrayValues(), ADD | dtype << 8
    value = values.load(rule, weights.view(np.uint8))
    value = values.set_optimizer(rule, value, optimizer)
    for gradient in gradients:
        value = values.apply(rule, value, [gradient.view(np.uint8)], 1)
    return value


def draws(kind: Any, count: int = 300) -> tuple[Any, list[Any]]:
    draw = np.random.default_rng(3)
    made = draw.standard_normal((STEPS + 1, count)).astype(kind)
    return made[0], list(made[1:])


@pytest.mark.parametrize("optimizer", CASES, ids=str)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_bits_are_those_of_plain_numpy_and_near_torch(optimizer: Optimizer, dtype: DType) -> None:
    weights, gradients = draws(numpy_dtype(dtype))
    found = stepped(optimizer, weights, gradients, dtype).array
    assert found.tobytes() == plain(optimizer, weights, gradients).tobytes()
    tight = 1e-5 if dtype == DType.FLOAT32 else 1e-12
    np.testing.assert_allclose(found, torch_steps(optimizer, weights, gradients), tight, tight)


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam(0.01)], ids=str)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_narrow_types_are_stepped_as_float32(optimizer: Optimizer, dtype: DType) -> None:
    weights, gradients = draws(np.float32)
    kind = numpy_dtype(dtype)
    weights, gradients = weights.astype(kind), [one.astype(kind) for one in gradients]
    value = stepped(optimizer, weights, gradients, dtype)
    assert value.array.dtype == kind and value.states[0].array.dtype == np.float32
    states = [np.zeros(300, np.float32) for _ in range(optimizer.states)]
    for turn, gradient in enumerate(gradients, 1):
        wide = weights.astype(np.float32)
        optimizer.step(wide, states, gradient.astype(np.float32), turn)
        weights = wide.astype(kind)
    assert value.array.tobytes() == weights.tobytes()


def test_a_round_of_several_workers_is_one_step_by_their_mean() -> None:
    weights, gradients = draws(np.float32)
    values, rule = ArrayValues(), ADD | DType.FLOAT32 << 8
    value = values.set_optimizer(rule, values.load(rule, weights.view(np.uint8)), SGD(0.5))
    value = values.apply(rule, value, [one.view(np.uint8) for one in gradients[:4]], 4)
    first, second, third, last = gradients[:4]
    expected = weights - (first + second + third + last) / np.float32(4) * np.float32(0.5)
    assert value.array.tobytes() == expected.tobytes()
    assert value.steps == 1


def test_pieces_hold_the_state_and_a_new_rate_keeps_it() -> None:
    weights, gradients = draws(np.float32)
    values, rule = ArrayValues(), ADD | DType.FLOAT32 << 8
    for optimizer in CASES:
        value = stepped(optimizer, weights, gradients[:5], DType.FLOAT32)
        pieces = [bytes(one) for one in values.pieces(value)]
        other = values.join(rule, pieces)
        for one in (value, other):
            lr, *rest = optimizer.numbers
            values.set_optimizer(rule, one, optimizer._replace(numbers=(lr / 2, *rest)))
            values.apply(rule, one, [gradients[6].view(np.uint8)], 1)
        assert other.array.tobytes() == value.array.tobytes() and other.steps == value.steps == 6
        assert [one.array.tobytes() for one in other.states] == [
            one.array.tobytes() for one in value.states
        ]
        values.set_optimizer(rule, value, SGD(1.0))
        assert value.states == [] or value.optimizer == optimizer
        with pytest.raises(ValueError, match="pieces"):
            values.join(rule, [*pieces, b"more"])


def test_values_that_no_optimizer_can_step_stay_added() -> None:
    values = ArrayValues()
    for rule, kind in ((ADD | DType.INT64 << 8, np.int64), (MEAN | DType.FLOAT32 << 8, np.float32)):
        value = values.load(rule, np.ones(3, kind).view(np.uint8))
        values.set_optimizer(rule, value, SGD(0.1))
        assert value.optimizer is None


def test_forms_are_read_back_and_other_bytes_refused() -> None:
    for optimizer in CASES:
        assert Optimizer.from_bytes(optimizer.to_bytes()) == optimizer
    good = SGD(0.1).to_bytes()
    for wrong in (b"", good[:-1], b"\x09" + good[1:], SGD(0.1)._replace(numbers=(-1.0, 0, 0, 0))):
        form = wrong if isinstance(wrong, bytes) else wrong.to_bytes()
        with pytest.raises(ValueError, match="expected"):
            Optimizer.from_bytes(form)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SGD(-0.1), r"lr is -0.1: expected a finite number of at least 0"),
        (lambda: SGD(True), "lr is True"),
        (lambda: SGD(math.nan), "lr is nan"),
        (lambda: SGD(math.inf), "lr is inf"),
        (lambda: SGD(0.1, momentum=1.5), "momentum is 1.5: expected a finite number from 0 to 1"),
        (lambda: SGD(0.1, nesterov=True), "nesterov is True without momentum"),
        (lambda: Adagrad(0.1, eps="x"), "eps is 'x'"),  # type: ignore[arg-type]
        (lambda: Adam(betas=(0.9, 1.0)), r"betas\[1\] is 1.0: expected .* from 0 to 1"),
        (lambda: Adam(betas=0.9), "betas is 0.9: expected two"),  # type: ignore[arg-type]
    ],
)
def test_wrong_numbers_are_named(make: Any, text: str) -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match=text):
        make()
