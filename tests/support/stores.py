"""A store on threads of this process: workers that run a function, and servers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import TIMEOUT_S, each

import pycoll
from pycoll import ps

Comm = pycoll.Communicator
Run = Callable[[ps.Store, Comm], Any]


def run_store(
    work: Run,
    workers: int = 2,
    servers: int = 2,
    hosts: list[int] | None = None,
    timeout_s: float = TIMEOUT_S,
    **terms: Any,
) -> list[Any]:
    """Run a function on each worker of a new store; return the results and errors."""
    comms = pycoll.local_world(workers + servers, hosts=hosts, timeout_s=timeout_s)
    ranks = list(range(workers, workers + servers))

    def rank(comm: Comm) -> Any:
        if comm.rank in ranks:
            return ps.serve_store(comm, ranks, **terms)
        with ps.connect(comm) as store:
            return work(store, comm)

    with ThreadPoolExecutor(len(comms)) as pool:
        outcomes = each(pool, rank, comms)
    for comm in comms:
        comm.close()
    return outcomes[:workers]
