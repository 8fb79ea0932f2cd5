"""A rank of bench/replay.py: it replays training steps, and all but the computing is the product.

    python replay_worker.py ORDERS.json

The stand-in of an accelerator lets time pass by a timer and takes no core: gradients appear when
the orders say, and a layer of the next forward pass begins when the layer before it has ended and
its gradient is reduced. Messages, negotiation and the communication plan are those of
``pycoll.optim.Scheduler``.

Rank 0 prints a line of JSON for each order.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pycoll
from pycoll.gradients import scheduler as scheduling
from pycoll.gradients.communication_plan import Gradient, Rates
from pycoll.gradients.measure import measure
from pycoll.gradients.simulate import simulate
from pycoll.gradients.step_record import StepKeeper
from pycoll.optim import Entry, Policy, Scheduler

#: Steps in front of those that count: the timed ones of a Scheduler, and two by the final plan.
WARM_UP = scheduling.TIMED_STEPS + 2


def sleep_until(at_s: float) -> None:
    """Sleep until a time of ``time.perf_counter``."""
    left_s = at_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)


class Accelerator:
    """The stand-in: passes of given lengths, gradients at given times."""

    def __init__(self, ready_s: Sequence[float], overlaps: bool) -> None:
        self.ready_s = ready_s
        before = [0.0, *ready_s]
        #: The forward time of the layer of each gradient, half of its backward time.
        self.forward_s = [(b - a) / 2 for a, b in itertools.pairwise(before)]
        self.overlaps = overlaps

    def step(self, scheduler: Scheduler) -> float:
        """Run one step; returns its seconds."""
        scheduler.begin()
        begin_s = time.perf_counter()
        for number, at_s in enumerate(self.ready_s):
            sleep_until(begin_s + at_s)
            scheduler.ready(number)
        scheduler.flush()
        now_s = begin_s + self.ready_s[-1]
        if self.overlaps:
            # The host runs ahead of the accelerator, which works on one layer after the other.
            for number in reversed(range(len(self.ready_s))):
                scheduler.wait(number)
                now_s = max(now_s, time.perf_counter()) + self.forward_s[number]
            scheduler.wait()
        else:
            scheduler.wait()
            now_s = max(now_s, time.perf_counter()) + sum(self.forward_s)
        sleep_until(now_s)
        return time.perf_counter() - begin_s


def checked(comm: Any, scheduler: Scheduler, accelerator: Accelerator) -> bool:
    """Run a step with whole numbers; returns whether all sums are exact."""
    views = scheduler.begin()
    for number, view in enumerate(views):
        view[...] = number % 7 + comm.rank
        scheduler.ready(number)
    scheduler.wait()
    ranks = sum(range(comm.size))
    return all(
        bool((view == comm.size * (number % 7) + ranks).all()) for number, view in enumerate(views)
    )


class Rank:
    """This rank, and the rates of its world, which it measures once for all orders of a scene."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._scene = ""
        self._rates: dict[Any, Rates] = {}
        scheduling.measure = self.measured

    def measured(self, comm: Any, *terms: Any) -> Rates:
        """The rates of the world, measured by the first call in a scene."""
        if terms not in self._rates:
            self._rates[terms] = measure(comm, *terms)
        return self._rates[terms]

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        """Run one order and return what rank 0 prints."""
        self.comm.barrier()
        return self.link(order) if "algorithm" in order else self.train(order)

    def link(self, order: dict[str, Any]) -> dict[str, Any]:
        """Time one long all_reduce."""
        x = np.zeros(order["nbytes"] // 4, np.float32)
        x[::4096] = self.comm.rank
        took = []
        for _ in range(order["steps"] + 1):
            self.comm.barrier()
            begin_s = time.perf_counter()
            self.comm.all_reduce(x, "avg", out=x, algorithm=order["algorithm"])
            took.append(time.perf_counter() - begin_s)
        right = bool((x[::4096] == (self.comm.size - 1) / 2).all())
        return {"step_s": self._median(took[1:]), "right": right}

    def train(self, order: dict[str, Any]) -> dict[str, Any]:
        """Replay the steps of one method."""
        if order["scene"] != self._scene:
            self._scene, self._rates = order["scene"], {}
        gradients = [Gradient(*one) for one in order["gradients"]]
        accelerator = Accelerator([one.ready_s for one in gradients], order["overlaps"])
        recorder = StepKeeper()
        scheduler = Scheduler(
            self.comm,
            [Entry(str(n), (one.nbytes // 4,)) for n, one in enumerate(gradients)],
            policy=Policy(order["policy"], **order["parameters"]),
            architecture=order["architecture"],
            overlaps=order["overlaps"],
            accelerated=True,
            observer=recorder,
        )
        for _ in range(WARM_UP):
            accelerator.step(scheduler)
        took = [accelerator.step(scheduler) for _ in range(order["steps"])]
        recorder.record(True)
        accelerator.step(scheduler)
        recorder.record(False)
        step_s, right = self._median(took), checked(self.comm, scheduler, accelerator)
        rates = self.measured(self.comm, True, scheduler._push_pulls, True)
        forward_s = accelerator.forward_s if order["overlaps"] else None
        plan = scheduler.comm_plan
        outcome = simulate(plan, gradients, rates, forward_s)
        halves = rates.reduce_scatter, rates.all_gather
        communication_s = sum(
            rates.busy(one.architecture).seconds(one.nbytes)
            if plan.gathers is None
            else sum(half.seconds(one.nbytes) for half in halves)
            for one in plan.messages
        )
        computing_s = accelerator.ready_s[-1] + sum(accelerator.forward_s)
        return {
            "step_s": step_s,
            "computing_s": computing_s,
            "predicted_s": computing_s + outcome.exposed_s,
            "communication_s": communication_s,
            "messages": len(plan.messages),
            "served": sum(one.architecture == "ps" for one in plan.messages),
            "right": right,
            "why": scheduler.explain(),
            "rates": rates,
            "record": recorder.step,
        }

    def _median(self, took: list[float]) -> float:
        """The median of these times, each on the rank where it is longest."""
        slowest = self.comm.all_reduce(np.array(took), "max")
        return float(statistics.median(slowest.tolist()))


def main() -> None:
    """Run all orders of a file."""
    orders = json.loads(Path(sys.argv[1]).read_text())
    comm = pycoll.init()
    rank = Rank(comm)
    for order in orders:
        found = rank.run(order)
        if comm.rank == 0:
            print(json.dumps(found), flush=True)
    pycoll.finalize()


if __name__ == "__main__":
    main()
