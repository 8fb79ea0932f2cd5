"""Trains on scikit-learn's digits by two methods: one all-to-all, the other with a server.

Both methods reduce gradients while the backward pass goes on, and fold every sum in rank order. So
the loss curves are alike to the bit. A picture shows one step of each method: the backward pass,
the messages on the wire, and where the program waits for them.

    python examples/train_methods.py --plot step.png
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from train_digits import BATCH, RATE, load_digits

import pycoll
from pycoll.gradients.step_record import Step, StepKeeper
from pycoll.launch.launcher import launch
from pycoll.launch.rank_crew import LaunchOptions
from pycoll.optim import Entry, Scheduler
from pycoll.tools.overlaps import plot, seen_of

METHODS = ("MG-WFBP", "WFBP-PS")
LAYERS = (64, 256, 256, 10)
EPOCHS = 5


def make_network() -> list[np.ndarray]:
    """A matrix per layer, equal on all ranks."""
    random = np.random.default_rng(1)
    shapes = itertools.pairwise(LAYERS)
    return [(random.standard_normal(one) / one[0] ** 0.5).astype(np.float32) for one in shapes]


def backward(
    network: list[np.ndarray], scheduler: Scheduler, images: np.ndarray, labels: np.ndarray
) -> tuple[float, list[Any]]:
    """One forward and backward pass: the loss, and the memory in which gradients are reduced.

    Entry 0 of the scheduler is the last layer. Each gradient is ready as soon as it is computed.
    """
    inputs = [images]
    for matrix in network[:-1]:
        inputs.append(np.maximum(inputs[-1] @ matrix, 0))
    scores = inputs[-1] @ network[-1]
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    error = (chances - labels).astype(np.float32)
    views = scheduler.begin()
    for number, (matrix, given) in enumerate(zip(network[::-1], inputs[::-1], strict=True)):
        np.matmul(given.T, error, out=views[number])
        scheduler.ready(number)
        error = (error @ matrix.T) * (given > 0)
    return -float(np.sum(labels * np.log(chances + 1e-12))), views


def train(comm: pycoll.Communicator, method: str) -> tuple[list[float], Step]:
    """The losses of all steps, and the record of the last one."""
    images, labels = load_digits()
    network, losses, recorder = make_network(), [], StepKeeper()
    entries = [Entry(f"layer {number}", network[number].shape) for number in (2, 1, 0)]
    scheduler = Scheduler(comm, entries, policy=method, observer=recorder)
    starts = [start for _ in range(EPOCHS) for start in range(0, len(images), BATCH)]
    for start in starts:
        if len(losses) == len(starts) - 1:
            recorder.record(True)
        batch = slice(start, start + BATCH)
        mine = slice(comm.rank, None, comm.size)
        loss, views = backward(network, scheduler, images[batch][mine], labels[batch][mine])
        scheduler.wait()
        losses.append(comm.all_reduce(loss, deterministic=True) / len(images[batch]))
        for matrix, view in zip(network[::-1], views, strict=True):
            np.subtract(matrix, RATE / len(images[batch]) * view, out=matrix)
    recorder.record(False)
    assert recorder.step is not None
    return losses, recorder.step


def work(picture: Path | None) -> int:
    """One rank: trains by both methods and compares the losses; returns an exit status."""
    comm = pycoll.init()
    found = {method: train(comm, method) for method in METHODS}
    first, second = (losses for losses, _ in found.values())
    alike = first == second
    if comm.rank == 0:
        verdict = "are equal to the bit" if alike else "DIFFER"
        names = " and ".join(METHODS)
        print(f"result: the losses of {names} {verdict}, in {len(first)} steps")
        print(f"{comm.size} workers, {len(comm.servers)} server(s)")
        print("step   " + "  ".join(f"{method:>12}" for method in METHODS))
        for step in range(0, len(first), len(first) // EPOCHS):
            print(f"{step + 1:4d}   {first[step]:12.8f}  {second[step]:12.8f}")
        if picture is not None:
            steps = [seen_of(step, 0, method) for method, (_, step) in found.items()]
            plot(picture, steps)
            print(f"one step of each method: {picture}")
    pycoll.finalize()
    return 0 if alike else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="workers")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw one step of each method (.png, .pdf, .svg)")
    options = parser.parse_args()
    if "PYCOLL_RANK" in os.environ:
        return work(options.plot)
    command = (sys.executable, __file__, *sys.argv[1:])
    # The matrices are small, so BLAS threads would only compete for the cores.
    return launch(
        LaunchOptions(
            ranks=options.ranks,
            servers=options.servers,
            command=command,
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
    )


if __name__ == "__main__":
    sys.exit(main())
