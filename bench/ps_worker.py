"""A rank of bench/ps.py: it serves a store, or takes times of its calls; rank 0 prints JSON lines.

    ps_worker.py TASK WORKERS ROUNDS NBYTES

The world comes from the environment. The ranks from WORKERS on serve.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import pycoll
from pycoll import ps

#: Seconds of a step of ``steps``, and how much longer a slow one takes.
_STEP_S, _SLOW = 0.02, 3
#: Elements of a row, rows of the table for each id of a call, and calls of which a mean is taken.
ROW_DIM, ROWS_PER_ID, ROW_TURNS = 64, 100, 5


def timed(call: Callable[[], Any], times: int) -> float:
    """The seconds of one call, the mean of so many."""
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def processor_s(pid: int) -> float:
    """The seconds that all threads of a process on this machine have run."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


class Rank:
    """A rank, and what it was told."""

    def __init__(self) -> None:
        self.comm = pycoll.init()
        self.task = sys.argv[1]
        self.workers, self.rounds, self.nbytes = map(int, sys.argv[2:5])
        self.servers = list(range(self.workers, self.comm.size))

    def store(self, work: Callable[[ps.Store], Any], **terms: Any) -> Any:
        """Serve a store, or run ``work`` on it."""
        if self.comm.rank >= self.workers:
            ps.serve_store(self.comm, self.servers, **terms)
            return None
        with ps.connect(self.comm) as store:
            return work(store)

    def tell(self, **facts: Any) -> None:
        """Print the facts of all ranks, on rank 0."""
        every = self.comm.all_gather_object(facts)
        if self.comm.rank == 0:
            print(json.dumps(every), flush=True)

    def latency(self) -> None:
        """push_pull of a short array, next to all_reduce of it, in turns."""
        x = np.ones(self.nbytes // 4, np.float32)
        for _ in range(self.rounds):
            self.comm.barrier()
            timed(lambda: self.comm.all_reduce(x), 200)
            plain = timed(lambda: self.comm.all_reduce(x), 1000)

            def work(store: ps.Store) -> float:
                store.init("x", x, update="mean")
                timed(lambda: store.push_pull("x", x, out=x), 1000)
                return timed(lambda: store.push_pull("x", x, out=x), 2000)

            self.tell(all_reduce_s=plain, store=self.store(work))

    def throughput(self) -> None:
        """push_pull of a long array by all workers, and the servers' share of a core meanwhile."""
        pids = self.comm.all_gather_object(os.getpid())
        x = np.ones(self.nbytes // 4, np.float32)

        def used() -> list[float]:
            # Hosts share one machine, so this rank sees the processes of the others.
            return [processor_s(pids[one]) for one in self.servers] if self.comm.rank == 0 else []

        def work(store: ps.Store) -> dict[str, Any]:
            store.init("x", x, update="mean")
            timed(lambda: store.push_pull("x", x, out=x), 2)
            begun, before = time.perf_counter(), used()
            seconds = [timed(lambda: store.push_pull("x", x, out=x), 1) for _ in range(self.rounds)]
            spent = time.perf_counter() - begun
            cores = [(one - other) / spent for one, other in zip(used(), before, strict=True)]
            assert (x == 1).all(), "a mean is wrong"
            return {"seconds": seconds, "cores": cores}

        self.tell(store=self.store(work))

    def rows(self) -> None:
        """Pull and push of a hundredth of the rows of a table, all of which the server holds."""
        count = self.nbytes // (ROW_DIM * 4)
        ids = np.random.default_rng(1).permutation(count)[: count // ROWS_PER_ID]
        gradients = np.ones((len(ids), ROW_DIM), np.float32)

        def work(store: ps.Store) -> dict[str, float]:
            table = store.table("rows", rows=count, dim=ROW_DIM)
            for begin in range(0, count, len(ids)):
                some = np.arange(begin, min(begin + len(ids), count))
                table.push(some, gradients[: len(some)])
            found = np.empty_like(gradients)
            calls = {
                "pull": lambda: table.pull(ids, out=found),
                "push": lambda: table.push(ids, gradients),
            }
            seconds = {}
            for name, call in calls.items():
                call()
                seconds[name] = timed(call, ROW_TURNS)
            table.pull(ids, out=found)
            assert (found == 2 + ROW_TURNS).all(), "a row is wrong"
            return seconds

        self.tell(store=self.store(work, consistency="asp"))

    def steps(self) -> None:
        """Steps of workers of which each is slow in a random tenth of its steps."""
        for _ in range(self.rounds):
            for consistency in ("bsp", ps.SSP(3)):
                draw = random.Random(self.comm.rank)

                def work(store: ps.Store, draw: random.Random = draw) -> float:
                    x = np.zeros(self.nbytes // 4, np.float32)
                    store.init("x", x)
                    store.clock()

                    def step() -> None:
                        store.pull("x", out=x)
                        time.sleep(_STEP_S * (_SLOW if draw.random() < 0.1 else 1))
                        store.push("x", x)
                        store.clock()

                    return timed(step, 100)

                self.tell(name=str(consistency), store=self.store(work, consistency=consistency))

    def replicas(self) -> None:
        """A push to chains of one, two and three servers."""
        for _ in range(self.rounds):
            for count in range(min(3, len(self.servers))):

                def work(store: ps.Store) -> float:
                    x = np.ones(self.nbytes // 4, np.float32)
                    store.init("x", x)
                    timed(lambda: store.push("x", x), 5)
                    return timed(lambda: store.push("x", x), 50)

                found = self.store(work, replicas=count, consistency="asp")
                self.tell(replicas=count, store=found)

    def failover(self) -> None:
        """The longest wait of a push while the first server of its chain is killed."""
        pids = self.comm.all_gather_object(os.getpid())

        def work(store: ps.Store) -> float:
            x = np.ones(self.nbytes // 4, np.float32)
            store.init("x", x)
            store.push("x", x)
            os.kill(pids[self.servers[0]], signal.SIGKILL)
            return max(timed(lambda: store.push("x", x), 1) for _ in range(50))

        found = self.store(work, replicas=1, consistency="asp")
        if self.comm.rank == 0:
            print(json.dumps([{"store": found}]), flush=True)


def main() -> None:
    rank = Rank()
    getattr(rank, rank.task)()


if __name__ == "__main__":
    main()
