"""Trains a small network on scikit-learn's digits, data-parallel, with NumPy and pycoll.

Every rank takes its share of each batch and computes the gradient of that share. One all_reduce
adds the gradients of all ranks. The sum does not depend on the number of ranks except for rounding,
so the loss curves of 1 rank and of 4 ranks must coincide.

    python examples/train_digits.py --ranks 1 --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import pycoll
from pycoll.launch.launcher import launch
from pycoll.launch.rank_crew import LaunchOptions

HIDDEN = 64
BATCH = 256
EPOCHS = 15
RATE = 0.5
#: The largest relative difference between two loss curves that rounding explains.
ALIKE = 1e-3


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit(
            "this example needs scikit-learn, which the extra [demo] installs: "
            "pip install '.[demo]'"
        )

    digits = load()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16.0).astype(np.float32)
    labels = np.eye(10, dtype=np.float32)[digits.target[order]]
    return images, labels


def make_network() -> list[np.ndarray]:
    """Weights and biases, equal on all ranks."""
    random = np.random.default_rng(1)
    return [
        (random.standard_normal((64, HIDDEN)) / 8).astype(np.float32),
        np.zeros(HIDDEN, np.float32),
        (random.standard_normal((HIDDEN, 10)) / 8).astype(np.float32),
        np.zeros(10, np.float32),
    ]


def gradient(
    network: list[np.ndarray], images: np.ndarray, labels: np.ndarray
) -> tuple[float, list[np.ndarray]]:
    """The summed cross-entropy of the samples and its gradient."""
    w1, b1, w2, b2 = network
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    chances = np.exp(scores)
    chances /= chances.sum(axis=1, keepdims=True)
    loss = -float(np.sum(labels * np.log(chances + 1e-12)))
    error = chances - labels
    back = (error @ w2.T) * (hidden > 0)
    return loss, [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def train(report: Path) -> None:
    pycoll.init()
    comm = pycoll.world()
    images, labels = load_digits()
    network = make_network()
    # One flat buffer holds all gradients and the loss, so a step sends one message.
    message = np.zeros(sum(p.size for p in network) + 1, np.float32)
    losses: list[float] = []
    steps = 0
    communication_s = 0.0
    begin = time.perf_counter()
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, len(images), BATCH):
            batch = slice(start, start + BATCH)
            mine = slice(comm.rank, None, comm.size)
            loss, gradients = gradient(network, images[batch][mine], labels[batch][mine])
            message[0] = loss
            np.concatenate([g.ravel() for g in gradients], out=message[1:])
            before = time.perf_counter()
            comm.all_reduce(message, out=message)
            communication_s += time.perf_counter() - before
            steps += 1
            total += float(message[0])
            offset = 1
            for parameter in network:
                step = message[offset : offset + parameter.size].reshape(parameter.shape)
                np.subtract(parameter, RATE / len(images[batch]) * step, out=parameter)
                offset += parameter.size
        losses.append(total / len(images))
    if comm.rank == 0:
        seconds = time.perf_counter() - begin
        figures = {"losses": losses, "seconds": seconds, "steps": steps}
        report.write_text(json.dumps({**figures, "communication_s": communication_s}))
    pycoll.finalize()


def compare(ranks: list[int]) -> int:
    """Trains once per world size and compares the losses; returns an exit status."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in ranks:
            path = os.path.join(folder, f"{count}.json")
            command = (sys.executable, __file__, "--report", path)
            # The matrices are tiny, so BLAS threads would only compete for the cores.
            status = launch(
                LaunchOptions(ranks=count, command=command, environment={"OMP_NUM_THREADS": "1"})
            )
            if status != 0:
                return status
            results[count] = json.loads(Path(path).read_text())
    first = np.array(results[ranks[0]]["losses"])
    worst = max(
        float(np.max(np.abs(np.array(results[count]["losses"]) / first - 1))) for count in ranks
    )
    names = " and ".join(f"{count} rank{'s' * (count != 1)}" for count in ranks)
    verdict = "learn alike" if worst < ALIKE else "do NOT learn alike"
    print(f"result: {names} {verdict}: the losses differ by {worst:.1e} at most, relatively")
    print("epoch  " + "  ".join(f"loss, {count} rank(s)" for count in ranks))
    for epoch in range(0, EPOCHS, 2):
        losses = (results[count]["losses"][epoch] for count in ranks)
        print(f"{epoch + 1:5d}  " + "  ".join(f"{loss:15.7f}" for loss in losses))
    for count in ranks:
        one = results[count]
        print(
            f"{count} rank(s): {one['seconds']:.2f} s, of which communication "
            f"{one['communication_s'] * 1e3:.1f} ms in {one['steps']} all_reduces"
        )
    cores = len(os.sched_getaffinity(0))
    if max(ranks) > cores:
        print(
            f"{max(ranks)} ranks share {cores} cores, so each all_reduce waits until all of them\n"
            "have run. More ranks are faster if each has a core and more to compute than in\n"
            "this example, whose batches are very short."
        )
    return 0 if worst < ALIKE else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, action="append", help="world sizes to compare")
    parser.add_argument("--report", type=Path, help="train as one rank and write figures here")
    options = parser.parse_args()
    if options.report is not None:
        train(options.report)
        return 0
    return compare(options.ranks or [1, 4])


if __name__ == "__main__":
    sys.exit(main())
