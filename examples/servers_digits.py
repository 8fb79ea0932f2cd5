"""Trains softmax regression on scikit-learn's digits with parameter servers, without any barrier.

Each worker pulls the weights, computes the gradient of a batch of its share, and pushes it. The
servers step when a gradient arrives, whoever sent it. With ``--hogwild`` workers step by
themselves, and the servers only add what they push. With ``--checkpoint DIR`` the store begins with
the checkpoint in DIR, if there is one, and leaves one there; the number of servers may be another.

    pycoll run -n 3 --servers 1 examples/servers_digits.py --consistency asp
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import pycoll
import pycoll.ps

BATCH = 32
RATE = 0.2
CONSISTENCIES = {"asp": "asp", "ssp": pycoll.ps.SSP(3), "bsp": "bsp"}


def gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    scores = x @ weights
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    shares[np.arange(len(y)), y] -= 1
    return x.T @ shares / len(y)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--consistency", choices=CONSISTENCIES, default="asp")
    parser.add_argument("--hogwild", action="store_true")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint", metavar="DIR")
    options = parser.parse_args()
    comm = pycoll.init()
    digits = load_digits()
    x = np.hstack([digits.data / 16, np.ones((len(digits.data), 1))])
    test, train = slice(0, 300), slice(300 + comm.rank, None, comm.size)
    path = options.checkpoint
    with pycoll.ps.connect(consistency=CONSISTENCIES[options.consistency]) as store:
        first = (store.restore(path, missing_ok=True) if path else None) or 0
        store.init("weights", np.zeros((x.shape[1], 10)))
        if not options.hogwild:
            store.set_optimizer(pycoll.ps.SGD(lr=RATE, momentum=0.5), "weights")
        weights = np.empty((x.shape[1], 10))
        for step in range(first, options.steps):
            draw = np.random.default_rng((comm.rank, step))
            store.pull("weights", out=weights)
            batch = draw.integers(0, len(x[train]), BATCH)
            slope = gradient(weights, x[train][batch], digits.target[train][batch])
            store.push("weights", -RATE * slope if options.hogwild else slope)
            store.clock()
        if path:
            store.checkpoint(path)
        comm.barrier()
        store.pull("weights", out=weights)
        right = np.mean((x[test] @ weights).argmax(1) == digits.target[test])
        if comm.rank == 0:
            print(
                f"{comm.size} workers, {store.consistency}: {right:.1%} of the test set are right"
            )
        comm.barrier()


if __name__ == "__main__":
    main()
