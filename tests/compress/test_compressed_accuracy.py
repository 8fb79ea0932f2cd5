"""Training on scikit-learn's digits: codecs and DiLoCo stay within the bounds of accuracy.

A perceptron of two layers learns from batches of two ranks. Five seeds advance together. A
difference is that of the same seed, averaged over the seeds, in percentage points of test images
that are right.
``bench/accuracy.py`` asserts the same bounds for longer runs of four processes, and for characters.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.compress import Block, Codec, Feedback, Sign, TopK
from pycoll.optim import LocalUpdates

Array = Any
SEEDS, STEPS, BATCH, TEST_IMAGES = 5, 200, 32, 597
RATE = np.float32(0.5)
#: The inner steps of DiLoCo's rounds.
EVERY = 20
WIDTHS = (64, 64, 10)
#: Percentage points that a method loses at most against float32.
BOUNDS = {"int8": 0.5, "int4": 1.0, "sign": 1.0, "top-k 1 %": 1.0, "DiLoCo": 1.0}
#: Percentage points that top-k without feedback loses at least against top-k with it.
SHOWN = 3.0


class Method(NamedTuple):
    """Averages of gradients by a codec or without one, or local updates."""

    codec: Codec | None = None
    keeps: bool = True
    local: LocalUpdates | None = None


METHODS = {
    "float32": Method(),
    "int8": Method(Block("int8")),
    "int4": Method(Block("int4")),
    "sign": Method(Sign()),
    "top-k 1 %": Method(TopK(0.01)),
    "top-k 1 %, no feedback": Method(TopK(0.01), keeps=False),
    "DiLoCo": Method(
        local=LocalUpdates(EVERY, outer={"lr": 0.7, "momentum": 0.6, "nesterov": True})
    ),
}


@functools.cache
def images() -> tuple[Array, Array]:
    """The digits, and a row of ten shares for each, of which one is 1."""
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="no scikit-learn: pip install -r tests/requirements.txt"
    )
    x, y = datasets.load_digits(return_X_y=True)
    return np.asarray(x / 16, np.float32), np.eye(10, dtype=np.float32)[y]


def layers(flat: Array) -> list[Array]:
    """The weights and biases of each seed, which lie one after the other in its row, as views."""
    inputs, hidden, outputs = WIDTHS
    shapes = [(inputs, hidden), (1, hidden), (hidden, outputs), (1, outputs)]
    ends = np.cumsum([0, *(rows * columns for rows, columns in shapes)])
    return [
        flat[:, begin:end].reshape(len(flat), *shape)
        for begin, end, shape in zip(ends[:-1], ends[1:], shapes, strict=True)
    ]


def initial() -> Array:
    """Parameters of a perceptron, a row for each seed; equal on all ranks."""
    inputs, hidden, outputs = WIDTHS
    flat = np.zeros((SEEDS, (inputs + 1) * hidden + (hidden + 1) * outputs), np.float32)
    first, _, second, _ = layers(flat)
    for seed in range(SEEDS):
        draw = np.random.default_rng(seed)
        for weights in (first[seed], second[seed]):
            weights[...] = draw.uniform(-1, 1, weights.shape) / np.sqrt(len(weights))
    return flat


def gradients(flat: Array, x: Array, wanted: Array) -> Array:
    """The gradient of the mean cross-entropy of each seed's batch."""
    first, bias, second, shift = layers(flat)
    hidden = np.maximum(x @ first + bias, 0)
    scores = hidden @ second + shift
    powers = np.exp(scores - scores.max(axis=2, keepdims=True))
    error = (powers / powers.sum(axis=2, keepdims=True) - wanted) / np.float32(BATCH)
    behind = error @ second.swapaxes(1, 2) * (hidden > 0)
    parts = [
        x.swapaxes(1, 2) @ behind,
        behind.sum(axis=1),
        hidden.swapaxes(1, 2) @ error,
        error.sum(axis=1),
    ]
    return np.concatenate([part.reshape(len(flat), -1) for part in parts], axis=1)


def accuracies(flat: Array, x: Array, wanted: Array) -> list[float]:
    """The share of predictions that are right for each seed, in percent."""
    first, bias, second, shift = layers(flat)
    scores = np.maximum(x @ first + bias, 0) @ second + shift
    right = scores.argmax(axis=2) == wanted.argmax(axis=2)
    return [float(100 * one) for one in right.mean(axis=1)]


def trained(comm: pycoll.Communicator, method: Method, steps: int) -> tuple[list[float], bytes]:
    """The accuracy in percent for each seed, and the parameters in the end."""
    x, wanted = images()
    orders = [np.random.default_rng(seed).permutation(len(x)) for seed in range(SEEDS)]
    test = np.stack([order[:TEST_IMAGES] for order in orders])
    mine = [order[TEST_IMAGES:][comm.rank :: comm.size] for order in orders]
    draws = [np.random.default_rng([seed, comm.rank]) for seed in range(SEEDS)]
    flat, state = initial(), None
    feedbacks = [Feedback() if method.keeps and method.codec else None for _ in range(SEEDS)]
    if method.local is not None:
        flat, state = method.local.begin(flat, comm)

    def averaged(rows: Array) -> Array:
        words: dict[str, Any] = {"compress": method.codec}
        if method.codec is None:
            return comm.all_reduce(rows, "avg")
        if isinstance(method.codec, TopK):
            # Top-k chooses from each array of a list alone.
            return np.stack(comm.all_reduce(list(rows), "avg", feedback=feedbacks[0], **words))
        pairs = zip(rows, feedbacks, strict=True)
        return np.stack([comm.all_reduce(row, "avg", feedback=one, **words) for row, one in pairs])

    for _ in range(steps):
        batch = np.stack([d.choice(one, BATCH) for d, one in zip(draws, mine, strict=True)])
        step = gradients(flat, x[batch], wanted[batch])
        if state is None:
            step = averaged(step)
        flat = flat - RATE * step
        if method.local is not None and state is not None:
            flat, state = method.local.advance(flat, state)
    assert feedbacks[0] is None or feedbacks[0].norm() > 0
    return accuracies(flat, x[test], wanted[test]), flat.tobytes()


def trained_alike(method: Method, steps: int) -> tuple[list[float], bytes]:
    """What ``trained`` returns on all ranks."""
    first, second = world_in_threads(2).run(lambda comm: trained(comm, method, steps))
    assert first == second, "all ranks have the same parameters"
    return first


def test_codecs_and_diloco_keep_their_bounds_on_digits() -> None:
    found = {name: trained_alike(method, STEPS)[0] for name, method in METHODS.items()}

    def lead(name: str, other: str) -> float:
        return float(np.mean(np.subtract(found[name], found[other])))

    print({name: round(lead(name, "float32"), 2) for name in found})
    assert np.mean(found["float32"]) > 94, found
    for name, bound in BOUNDS.items():
        assert lead(name, "float32") >= -bound, (name, found)
    without = "top-k 1 %, no feedback"
    assert lead(without, "top-k 1 %") <= -SHOWN, ("the test shows nothing", found)
    assert lead(without, "float32") <= -SHOWN, ("the test shows nothing", found)


def test_equal_seeds_train_the_same_parameters() -> None:
    for name, method in METHODS.items():
        once, again = (trained_alike(method, EVERY) for _ in range(2))
        assert once == again, name
