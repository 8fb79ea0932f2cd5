"""Logistic regression with a penalty: codecs and LocalSGD come near the optimum that BFGS finds."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.compress import Block, Codec, Feedback, TopK
from pycoll.optim import LocalUpdates

Array = Any
RANKS, STEPS, PENALTY = 2, 300, 0.1
RATE = np.float32(0.5)


@functools.cache
def problem() -> tuple[Array, Array]:
    """Digits from 0 to 9 with a column of ones, and 1 for odd ones or -1; as many per rank."""
    datasets = pytest.importorskip(
        "sklearn.datasets", reason="no scikit-learn: pip install -r tests/requirements.txt"
    )
    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[:1200]
    x = np.concatenate([x[order] / 16, np.ones((len(order), 1))], axis=1) / 4
    return x, np.where(y[order] % 2, 1.0, -1.0)


def loss_and_gradient(w: Array, x: Array, y: Array) -> tuple[float, Array]:
    margins = y * (x @ w)
    loss = np.logaddexp(0, -margins).mean() + PENALTY / 2 * w @ w
    return loss, -(x.T @ (y / (1 + np.exp(margins)))) / len(x) + PENALTY * w


@functools.cache
def optimum() -> Array:
    minimize = pytest.importorskip(
        "scipy.optimize", reason="no SciPy: pip install -r tests/requirements.txt"
    ).minimize
    x, y = problem()
    found = minimize(
        loss_and_gradient, np.zeros(65), (x, y), method="BFGS", jac=True, options={"gtol": 1e-9}
    )
    assert np.abs(loss_and_gradient(found.x, x, y)[1]).max() < 1e-7
    return found.x


def distance(codec: Codec | None, keeps: bool, local: LocalUpdates | None) -> float:
    """How far from the optimum all ranks end, as a share of the norm of the optimum."""
    x, y = problem()

    def run(comm: pycoll.Communicator) -> Array:
        mine, labels = x[comm.rank :: comm.size], y[comm.rank :: comm.size]
        w, state = np.zeros(65, np.float32), None
        feedback = Feedback() if keeps and codec is not None else None
        if local is not None:
            w, state = local.begin(w, comm)
        for _ in range(STEPS):
            step = loss_and_gradient(w, mine, labels)[1].astype(np.float32)
            if local is None:
                step = comm.all_reduce(step, "avg", compress=codec, feedback=feedback)
            w = w - RATE * step
            if local is not None and state is not None:
                w, state = local.advance(w, state)
        return w

    first, second = world_in_threads(RANKS).run(run)
    assert first.tobytes() == second.tobytes()
    return float(np.linalg.norm(first - optimum()) / np.linalg.norm(optimum()))


@pytest.mark.parametrize(
    ("codec", "local", "bound"),
    [
        (None, None, 1e-5),
        (Block("int8"), None, 1e-4),
        (TopK(0.1), None, 2e-2),
        (None, LocalUpdates(4), 5e-4),
    ],
    ids=["float32", "int8", "top-k 10 %", "LocalSGD"],
)
def test_the_optimum_is_reached(
    codec: Codec | None, local: LocalUpdates | None, bound: float
) -> None:
    assert distance(codec, True, local) < bound


def test_top_k_without_feedback_stays_away() -> None:
    assert distance(TopK(0.1), False, None) > 5 * distance(TopK(0.1), True, None)
