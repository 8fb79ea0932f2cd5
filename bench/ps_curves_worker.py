"""A worker of bench/ps_curves.py: softmax regression on digits, by each consistency in turn.

    ps_curves_worker.py SCENE SECONDS DIGITS

The file DIGITS holds the arrays ``data`` and ``target``, as numpy.savez writes them.

It runs under ``pycoll run`` with servers. Rank 0 prints a line of JSON for each consistency: the
steps of all workers, the pushes that were dropped, and the loss at the times of its own pulls.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import numpy.typing as npt

import pycoll
from pycoll import ps

Array = npt.NDArray[np.float64]

BATCH = 32
#: By which "bsp" steps; a push of "asp" and SSP steps by as much divided by the workers.
RATE = 0.5
#: Seconds of a step, and how much longer a slow one takes.
STEP_S, SLOW = 0.01, 3
#: The share of the steps that are slow where each worker has some.
SLOW_SHARE = 0.1
#: The most points of a curve.
POINTS_MAX = 240
#: Seconds by which workers may begin at different times.
SKEW_S = 0.5
CONSISTENCIES = ("bsp", ps.SSP(3), "asp", ps.Backup(0.75))


def errors(weights: Array, x: Array, y: Any) -> tuple[Array, float]:
    """The shares of the classes minus the label's 1, and the mean cross entropy."""
    found = x @ weights
    shares = np.exp(found - found.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    places = np.arange(len(y)), y
    loss = -float(np.mean(np.log(shares[places] + 1e-300)))
    shares[places] -= 1
    return shares, loss


class Trainer:
    """A worker and its data. ``scene``: "tenth" or "one", see bench/ps_curves.py."""

    def __init__(self, scene: str, seconds: float, path: str) -> None:
        self.comm = pycoll.init()
        self.scene, self.seconds = scene, seconds
        with np.load(path) as digits:
            data, self.y = digits["data"], digits["target"]
        self.x = np.hstack([data / 16, np.ones((len(data), 1))])
        self.mine = np.arange(self.comm.rank, len(self.x), self.comm.size)

    def slowness(self, draw: np.random.Generator) -> float:
        """How many times longer the next step takes."""
        if self.scene == "one":
            return SLOW if self.comm.rank == self.comm.size - 1 else 1
        return SLOW if draw.random() < SLOW_SHARE else 1

    def train(self, consistency: Any) -> None:
        """Train for some seconds; rank 0 prints what came of it."""
        draw = np.random.default_rng(self.comm.rank)
        weights = np.zeros((self.x.shape[1], 10))
        trace: list[tuple[float, Array]] = []
        steps = 0
        with ps.connect(consistency=consistency) as store:
            rate = RATE if store.consistency.folds else RATE / self.comm.size
            store.init("weights", weights)
            store.set_optimizer(ps.SGD(rate), "weights")
            self.comm.barrier()
            begun = time.monotonic()
            try:
                while time.monotonic() - begun < self.seconds:
                    store.pull("weights", out=weights)
                    if self.comm.rank == 0:
                        trace.append((time.monotonic() - begun, weights.copy()))
                    batch = draw.choice(self.mine, BATCH)
                    x = self.x[batch]
                    slope = x.T @ errors(weights, x, self.y[batch])[0] / BATCH
                    time.sleep(STEP_S * self.slowness(draw))
                    store.push("weights", slope)
                    store.clock()
                    steps += 1
            except pycoll.PeerLostError:
                # With "bsp" no round ends after a worker has left.
                if time.monotonic() - begun < self.seconds - SKEW_S:
                    raise
            dropped = store.dropped
        every = self.comm.all_gather_object((steps, dropped))
        if self.comm.rank == 0:
            stride = -(-len(trace) // POINTS_MAX)
            kept = [*trace[::stride], trace[-1]]
            facts = {
                "consistency": str(store.consistency),
                "steps": sum(one for one, _ in every),
                "dropped": sum(one for _, one in every),
                "curve": [(when, errors(one, self.x, self.y)[1]) for when, one in kept],
            }
            print(json.dumps(facts), flush=True)


def main() -> None:
    trainer = Trainer(sys.argv[1], float(sys.argv[2]), sys.argv[3])
    for consistency in CONSISTENCIES:
        trainer.train(consistency)


if __name__ == "__main__":
    main()
