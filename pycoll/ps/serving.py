"""The life of a server: it joins the job, serves, and ends with the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll.bootstrap import join
from pycoll.bootstrap.discovery.roles import count_servers
from pycoll.comm import world
from pycoll.comm.communicator import Communicator
from pycoll.comm.served import ServerLoop, part_workers
from pycoll.config import SERVER
from pycoll.errors import InvalidArgumentError


def serve(
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    all_gather: Callable[[bytes], Sequence[bytes]] | None = None,
    transports: str | list[str] | tuple[str, ...] | None = None,
    timeout_s: float | None = None,
    init_timeout_s: float | None = None,
) -> int:
    """Join the job as a server, and combine the values of the workers until they end.

    The arguments are those of ``pycoll.init``. ``rank`` and ``size`` count all ranks, servers
    included; servers are the last ranks. The workers call ``pycoll.init`` at the same time. This
    process must not have called it.

    Returns the number of operations that it served, when worker 0 has left its world and the
    duplicates of that.

    Raises the errors of ``pycoll.init``; InvalidArgumentError that names two ranks whose roles do
    not fit. Raises PeerLostError where a worker is gone without an end, and MismatchError where
    workers disagree.

    Cost: the server waits for a short message of worker 0 ahead of each operation, and sleeps while
    none comes.

    >>> pycoll.ps.serve()  # in a process of its own, on the last ranks of the job
    """
    if world.is_initialized():
        raise InvalidArgumentError(
            "pycoll.ps.serve() was called after pycoll.init(): a rank works or serves; call it in "
            "a process of its own"
        )
    config = world._settings(
        transports=transports, timeout_s=timeout_s, init_timeout_s=init_timeout_s
    )._replace(role=SERVER)
    joined = join(
        config,
        rank=rank,
        size=size,
        address=address,
        secret=secret,
        comm=comm,
        all_gather=all_gather,
        bring=world._tuning_text,
    )
    servers = count_servers(joined.identities)
    base = Communicator(joined, config, "workers and servers")
    part_workers(base, servers)
    return ServerLoop(base, base.size - servers).run()
