"""Dask: each worker of a client becomes a rank.

from pycoll.integrations import dask

def train(step_size):
    comm = pycoll.world()
    ...

losses = dask.run(Client("scheduler:8786"), train, 0.1)

The ranks meet over metadata of Dask's scheduler, so no address is needed.
"""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import pycoll
from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError
from pycoll.integrations.dask_store import DaskStore
from pycoll.integrations.store_meeting import Gather, join_limit_s, meet

#: Seconds between two looks at the tasks, and at the workers.
_POLL_S, _LOOK_S = 0.02, 1.0
#: Seconds that the other ranks have to report the failure of a rank themselves.
_GRACE_S = 10.0


def run(
    client: Any,
    function: Callable[..., Any],
    *args: Any,
    workers: Sequence[str] | None = None,
    **words: Any,
) -> list[Any]:
    """Call ``function(*args)`` on every worker of a Dask client, each a rank of one world.

    ``function``: what a rank runs, with the arguments ``args``. ``client``: a
    ``distributed.Client``. ``workers``: addresses of workers, in the order of ranks; None means all
    workers, by host. Each worker runs one rank, so a worker needs a process of its own and a free
    thread. ``words``: arguments of ``pycoll.init`` other than rank, size, address, comm and
    all_gather.

    Returns the results in rank order.

    Raises InvalidArgumentError if there are no workers or unknown ones, and PeerLostError if a
    worker leaves. Raises TimeoutError, which names the ranks whose workers did not begin in time.
    Raises the exception of a rank: that of the program where the others only report its loss.

    Cost: a Dask task on each worker, 2 to 4 rounds over the scheduler's metadata, and the
    connections of the ranks.

    >>> client = distributed.Client(n_workers=2, threads_per_worker=2)
    >>> adapter.run(client, lambda: pycoll.rank())
    [0, 1]
    >>> client.shutdown()
    """
    join_limit_s(words)
    chosen = _choose_workers(client, workers)
    # A Nanny's restart or a worker that leaves must not bring a rank to another worker.
    pinned = {"pure": False, "allow_other_workers": False, "retries": 0}
    name = f"run-{secrets.token_hex(8)}"
    futures = [
        client.submit(
            _rank,
            *(name, rank, len(chosen), words, function, args),
            workers=[worker],
            **pinned,
        )
        for rank, worker in enumerate(chosen)
    ]
    try:
        _watch(client, futures, chosen)
        return [future.result() for future in futures]
    finally:
        client.cancel([future for future in futures if future.status == "pending"])
        DaskStore(client, name).clear()


def _watch(client: Any, futures: Sequence[Any], workers: Sequence[str]) -> None:
    """Wait until all tasks have ended; raise once one has failed or its worker has left. A task
    whose worker has left stays pending for ever."""
    look, until = time.monotonic() + _LOOK_S, float("inf")
    while pending := [rank for rank, one in enumerate(futures) if one.status == "pending"]:
        failed = any(one.status not in ("pending", "finished") for one in futures)
        now = time.monotonic()
        until = min(until, now + _GRACE_S) if failed else until
        if now > until:
            break
        if now > look:
            look = now + _LOOK_S
            known = client.scheduler_info(n_workers=-1)["workers"]
            gone = [rank for rank in pending if workers[rank] not in known]
            if gone and not failed:
                raise PeerLostError(
                    f"the worker of rank {gone[0]}, {workers[gone[0]]}, has left the cluster",
                    rank=gone[0],
                    ranks=gone,
                )
            if gone == pending:
                break
        time.sleep(_POLL_S)
    raised = [future.exception() for future in futures if future.status == "error"]
    for error in [one for one in raised if not isinstance(one, PycollError)] or raised:
        raise error


def _choose_workers(client: Any, workers: Sequence[str] | None) -> list[str]:
    known = list(client.scheduler_info(n_workers=-1)["workers"])
    if workers is None:
        chosen = sorted(known, key=lambda worker: (urlsplit(worker).hostname or "", worker))
    else:
        chosen = list(workers)
    if not chosen:
        raise InvalidArgumentError(
            "the client has no workers: start some, or call client.wait_for_workers(n) first"
        )
    unknown = [worker for worker in chosen if worker not in known]
    if unknown:
        raise InvalidArgumentError(
            f"workers has {unknown[0]!r}, which is no worker of this client: it has "
            + ", ".join(known)
        )
    if len(set(chosen)) < len(chosen):
        raise InvalidArgumentError("workers names one worker twice: a worker is one rank")
    inside = [worker for worker in chosen if worker.startswith("inproc:")]
    if inside:
        raise InvalidArgumentError(
            f"the worker {inside[0]} is a thread of this process, and ranks are processes: start "
            "the workers as processes (LocalCluster(processes=True))"
        )
    return chosen


def _rank(
    name: str,
    rank: int,
    size: int,
    words: dict[str, Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    """Run one rank in a task of its worker."""
    client = importlib.import_module("distributed").get_client()

    def make(all_gather: Gather) -> pycoll.Communicator:
        return pycoll.init(rank=rank, size=size, all_gather=all_gather, **words)

    try:
        meet(DaskStore(client, name), rank, size, join_limit_s(words), make)
        return function(*args)
    finally:
        pycoll.finalize()
