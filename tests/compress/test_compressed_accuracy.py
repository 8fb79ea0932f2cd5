"""Training on scikit-learn's digits: with feedback codecs learn; top-k without it learns less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.compress import Block, Feedback, TopK

STEPS, RATE = 60, 0.5
Array = Any


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def accuracy(comm: pycoll.Communicator, codec: Any, keeps: bool) -> float:
    """Logistic regression by averaged gradients; the share of test digits that are right."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x = np.asarray(x / 16, np.float32)
    order = np.random.default_rng(0).permutation(len(x))
    mine, test = order[:1400][comm.rank :: comm.size], order[1400:]
    wanted = np.eye(10, dtype=np.float32)[y]
    weights = np.zeros((64, 10), np.float32)
    feedback = Feedback() if keeps else None
    for _ in range(STEPS):
        error = softmax(x[mine] @ weights) - wanted[mine]
        gradient = x[mine].T @ error / np.float32(len(mine))
        weights -= RATE * comm.all_reduce(gradient, "avg", compress=codec, feedback=feedback)
    return float((np.argmax(x[test] @ weights, axis=1) == y[test]).mean())


def test_digits_are_learnt_with_feedback() -> None:
    def run(comm: pycoll.Communicator) -> dict[str, float]:
        cases = {
            "plain": (None, False),
            "int8": (Block("int8"), True),
            "int4": (Block("int4"), True),
            "top": (TopK(0.02), True),
            "top without": (TopK(0.02), False),
        }
        return {name: accuracy(comm, *case) for name, case in cases.items()}

    found = world_in_threads(2).run(run)
    assert found[0] == found[1]
    first = found[0]
    assert first["plain"] > 0.85, first
    assert first["int8"] >= first["plain"] - 0.005, first
    assert first["int4"] >= first["plain"] - 0.01, first
    assert first["top"] >= first["plain"] - 0.05, first
    assert first["top without"] < first["top"], first
