"""Learns a sparse linear model as Hogwild does: workers change one shared array without locks.

A sample has few of many features, and a step touches their weights only. So workers seldom change
the same weight at once, and none of them waits. The array is a table with a row for each feature:
workers pull the rows of a batch, step by themselves, and push the changes, which servers add. A
second table counts the changes: each is applied once, in whatever order they come.

    pycoll run -n 3 --servers 1 examples/servers_hogwild.py

Source: Niu et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent"
(2011).
"""

from __future__ import annotations

import numpy as np

import pycoll
import pycoll.ps

FEATURES, ACTIVE = 2000, 10
BATCH, STEPS, RATE = 32, 400, 0.5


def samples(draw: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids of the features that each sample has, and its label: the sign of a hidden sum."""
    hidden = np.random.default_rng(0).standard_normal(FEATURES)
    ids = draw.integers(0, FEATURES, (count, ACTIVE))
    return ids, np.where(hidden[ids].sum(1) > 0, 1.0, -1.0)


def main() -> None:
    comm = pycoll.init()
    draw = np.random.default_rng([1, comm.rank])
    with pycoll.ps.connect(consistency="asp") as store:
        weights = store.table("weights", rows=FEATURES, dim=1, dtype="float64")
        counts = store.table("changes", rows=FEATURES, dim=1, dtype="int64")
        for _ in range(STEPS):
            ids, labels = samples(draw, BATCH)
            flat = ids.ravel()
            margin = labels * weights.pull(flat).reshape(ids.shape).sum(1)
            change = RATE * labels / (1 + np.exp(np.clip(margin, -30, 30)))
            weights.push(flat, np.repeat(change, ACTIVE)[:, None])
            counts.push(flat, np.ones((len(flat), 1), np.int64))
        comm.barrier()
        if comm.rank == 0:
            ids, labels = samples(np.random.default_rng(2), 2000)
            found = weights.pull(ids.ravel()).reshape(ids.shape).sum(1)
            right = np.mean(np.sign(found) == labels)
            done = int(counts.pull(np.arange(FEATURES)).sum())
            made = comm.size * STEPS * BATCH * ACTIVE
            print(
                f"{comm.size} workers, {store.consistency}: {right:.1%} of the test samples are "
                f"right; {done} of {made} changes were applied"
            )
        comm.barrier()


if __name__ == "__main__":
    main()
