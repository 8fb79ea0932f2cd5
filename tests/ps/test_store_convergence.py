"""Training on a store comes to the same accuracy whether or not its workers wait for each other."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUT_S, succeeded
from stores import Comm, run_store

from pycoll import ps

datasets = pytest.importorskip(
    "sklearn.datasets", reason="no scikit-learn: pip install -r tests/requirements.txt"
)

SEEDS = 5
WORKERS = 3
STEPS = 150
BATCH = 32
#: The rate of a step by the mean of the workers' gradients.
RATE = 0.3
#: Rows that no worker trains on.
TEST = 500


def gradient(weights: Any, x: Any, y: Any) -> Any:
    """Return the gradient of the mean cross entropy of softmax regression."""
    scores = x @ weights
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return x.T @ shares / len(y)


def accuracy(consistency: Any, seed: int, x: Any, y: Any) -> float:
    """Train from zeros by batches of this seed, and return the share of right answers."""
    done = threading.Barrier(WORKERS, timeout=TIMEOUT_S)
    # "asp" and SSP step by each gradient alone.
    rate = RATE if consistency == "bsp" else RATE / WORKERS
    order = np.random.default_rng(seed).permutation(len(x))

    def work(store: ps.Store, comm: Comm) -> float:
        draw = np.random.default_rng([seed, comm.rank])
        mine = order[TEST + comm.rank :: WORKERS]
        weights = np.zeros((x.shape[1], 10))
        store.init("weights", weights)
        store.set_optimizer(ps.SGD(lr=rate, momentum=0.5), "weights")
        for _ in range(STEPS):
            store.pull("weights", out=weights)
            batch = draw.choice(mine, BATCH)
            store.push("weights", gradient(weights, x[batch], y[batch]))
            store.clock()
        done.wait()
        found = (x[order[:TEST]] @ store.pull("weights")).argmax(1)
        done.wait()
        return float(np.mean(found == y[order[:TEST]]))

    first: float
    first, *others = succeeded(run_store(work, WORKERS, 1, consistency=consistency))
    assert others == [first] * (WORKERS - 1), "all workers read the same weights"
    return first


def test_asp_and_ssp_reach_the_accuracy_of_bsp() -> None:
    """Within one point, in the mean of the seeds."""
    digits = datasets.load_digits()
    x = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))])
    means = {
        str(one): np.mean([accuracy(one, seed, x, digits.target) for seed in range(SEEDS)])
        for one in ("bsp", "asp", ps.SSP(3))
    }
    assert means["bsp"] > 0.9, means
    assert all(one >= means["bsp"] - 0.01 for one in means.values()), means
