"""Compares synchronous training with local updates on scikit-learn's digits.

    pycoll run -n 2 examples/local_updates.py

Every rank has its own share of the images. The table shows how often parameters or gradients are
averaged, and how many of the unseen digits are right afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import pycoll
from pycoll.optim import DiLoCo, LocalSGD, PostLocal, SlowMo

BATCH = 32

METHODS: dict[str, Callable[[Any], Any]] = {
    "synchronous": lambda optimizer: LocalSGD(optimizer, PostLocal(1 << 30, 1)),
    "LocalSGD": lambda optimizer: LocalSGD(optimizer, every=8),
    "SlowMo": lambda optimizer: SlowMo(optimizer, every=8, momentum=0.3),
    "DiLoCo": lambda optimizer: DiLoCo(
        optimizer, every=20, outer={"lr": 0.7, "momentum": 0.6, "nesterov": True}
    ),
    "streaming DiLoCo": lambda optimizer: DiLoCo(
        optimizer,
        every=20,
        outer={"lr": 0.7, "momentum": 0.6, "nesterov": True},
        fragments=2,
        delay=2,
        mix=0.5,
    ),
}


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train with, and those of the test."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[:1440], order[1440:]
    return images[train], labels[train], images[test], labels[test]


def accuracy(comm: Any, wrap: Callable[[Any], Any], steps: int, seed: int) -> float:
    """Train on all ranks and return the share of the test images that are right."""
    images, labels, unseen, answers = data(seed)
    images, labels = images[comm.rank :: comm.size], labels[comm.rank :: comm.size]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))
    chosen = torch.Generator().manual_seed(1000 * seed + comm.rank)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=chosen)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    optimizer.finish()
    with torch.no_grad():
        return float((model(unseen).argmax(1) == answers).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    comm = pycoll.init()
    for name, wrap in METHODS.items():
        found = [accuracy(comm, wrap, options.steps, seed) for seed in range(options.seeds)]
        if comm.rank == 0:
            print(f"{name:17} {sum(found) / len(found):.2%} of the unseen digits are right")


if __name__ == "__main__":
    main()
