"""Trains a small network on scikit-learn's digits as Downpour does, without any barrier.

Each worker has a replica of the parameters. It takes some steps alone, adds up their gradients,
pushes the sum, and pulls the parameters. The servers step by Adagrad when a sum arrives, whoever
sent it, and no worker waits for another one. Fewer pushes are fewer messages and older gradients.

    pycoll run -n 3 --servers 1 examples/servers_downpour.py --every 5

Source: Dean et al., "Large Scale Distributed Deep Networks" (2012).
"""

from __future__ import annotations

import argparse

import numpy as np
from sklearn.datasets import load_digits

import pycoll
import pycoll.ps

SHAPES = ((65, 32), (33, 10))
BATCH = 32
#: Of the steps that a worker takes alone, and of the servers' steps.
LOCAL_RATE, SERVER_RATE = 0.2, 0.05


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """The matrices of the network, as views of one array."""
    ends = np.cumsum([rows * columns for rows, columns in SHAPES])
    pieces = np.split(flat, ends[:-1])
    return [one.reshape(shape) for one, shape in zip(pieces, SHAPES, strict=True)]


def with_ones(x: np.ndarray) -> np.ndarray:
    """The rows with a last element 1, which a bias multiplies."""
    return np.hstack([x, np.ones((len(x), 1))])


def scores(flat: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inputs of the last layer, and its outputs."""
    first, last = layers(flat)
    hidden = with_ones(np.maximum(with_ones(x) @ first, 0))
    return hidden, hidden @ last


def gradient(flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of the mean cross entropy, in the layout of ``flat``."""
    hidden, found = scores(flat, x)
    error = np.exp(found - found.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = (error @ layers(flat)[1].T * (hidden > 0))[:, :-1]
    slopes = (with_ones(x).T @ back, hidden.T @ error)
    return np.concatenate([one.ravel() for one in slopes])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=5, help="steps of a worker between pushes")
    parser.add_argument("--pushes", type=int, default=200)
    options = parser.parse_args()
    comm = pycoll.init()
    digits = load_digits()
    x, y = digits.data / 16, digits.target
    test, mine = slice(0, 300), slice(300 + comm.rank, None, comm.size)
    draw = np.random.default_rng(comm.rank)
    count = sum(rows * columns for rows, columns in SHAPES)
    with pycoll.ps.connect(consistency="asp") as store:
        # All workers begin with the values of the first one.
        store.init("network", np.random.default_rng(7).normal(0, 0.2, count))
        store.set_optimizer(pycoll.ps.Adagrad(lr=SERVER_RATE), "network")
        replica = store.pull("network")
        for _ in range(options.pushes):
            accrued = np.zeros(count)
            for _ in range(options.every):
                batch = draw.integers(0, len(x[mine]), BATCH)
                slope = gradient(replica, x[mine][batch], y[mine][batch])
                replica -= LOCAL_RATE * slope
                accrued += slope
            store.push("network", accrued)
            store.pull("network", out=replica)
        comm.barrier()
        store.pull("network", out=replica)
        right = np.mean(scores(replica, x[test])[1].argmax(1) == y[test])
        if comm.rank == 0:
            print(
                f"{comm.size} workers, {options.every} steps between pushes: "
                f"{right:.1%} of the test set are right"
            )
        comm.barrier()


if __name__ == "__main__":
    main()
