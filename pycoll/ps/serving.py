"""The public functions ``serve``, ``serve_store`` and ``connect``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.bootstrap import join
from pycoll.bootstrap.discovery.roles import count_servers
from pycoll.comm import world
from pycoll.comm.communicator import Communicator
from pycoll.comm.served import ServerLoop, part_workers, serve_stores
from pycoll.config import RANKS_MAX, SERVER, Config
from pycoll.errors import InvalidArgumentError, TimeoutError
from pycoll.ps.consistency import consistency_of
from pycoll.ps.keyed_store import Store
from pycoll.ps.membership.join_store import JoinRequest, join_store
from pycoll.ps.opening import (
    REPLICAS_MAX,
    StoreOpener,
    Terms,
    check_replicas,
    check_terms,
    make_client,
    make_server,
)
from pycoll.ps.server_threads import ServerThreads
from pycoll.ps.worker_links import WorkerLinks


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
    ticket: str | None = None,
) -> int:
    """Join the job as a server, and serve the workers until they end.

    The server combines the values of their collectives with ``algorithm="ps"``, and holds its share
    of each store that they open by ``connect``.

    The arguments are those of ``pycoll.init``. ``rank`` and ``size`` count all ranks, servers
    included; servers are the last ranks. The workers call ``pycoll.init`` at the same time. This
    process must not have called it.

    ``ticket``: a text that ``Store.ticket`` of a running store returned, or ``PYCOLL_TICKET``. This
    process then joins that store alone, as one more server with a new rank. It replaces servers
    that are gone, and takes shards of servers that hold at least two more than it; the others
    serve meanwhile.

    Returns the number of operations that it served, when worker 0 has left its world and the
    duplicates of that; 0 with a ticket, when the workers have left the store.

    Raises the errors of ``pycoll.init``; InvalidArgumentError that names two ranks whose roles do
    not fit, and for a wrong ticket or a store that refuses this process. Raises PeerLostError where
    a worker is gone without an end, and MismatchError where workers disagree. With a ticket, raises
    TimeoutError where the store has ended, or where a process of it has not connected within
    ``init_timeout_s``; a worker connects in its next call.

    Cost: the server waits for a short message of worker 0 ahead of each operation, and sleeps while
    none comes.

    >>> def work_or_serve():
    ...     import os, pycoll.ps
    ...
    ...     if os.environ["PYCOLL_RANK"] == "2":
    ...         return pycoll.ps.serve()
    ...     with pycoll.init() as comm:
    ...         return comm.all_reduce(2.5, algorithm="ps")
    >>> pycoll.run(work_or_serve, np=3)
    [5.0, 5.0, 1]
    """
    if world.is_initialized():
        raise InvalidArgumentError(
            "pycoll.ps.serve() was called after pycoll.init(): a rank works or serves; call it in "
            "a process of its own"
        )
    config = world._settings(
        transports=transports, timeout_s=timeout_s, init_timeout_s=init_timeout_s
    )._replace(role=SERVER)
    used = config.ticket if ticket is None else ticket
    if used is not None:
        given = {"rank": rank, "size": size, "address": address, "secret": secret, "comm": comm}
        _refuse_other_arguments("serve", given | {"all_gather": all_gather})
        return _serve_with_ticket(used, config)
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


def serve_store(
    comm: Communicator,
    servers: Sequence[int],
    *,
    replicas: int = 0,
    consistency: Any = "bsp",
    shards: int | None = None,
) -> None:
    """Serve a store on this rank of a communicator, until all its workers have left.

    Each rank of ``servers`` calls this function with the same arguments, while all other ranks of
    ``comm`` call ``connect(comm)``. ``replicas``: how many servers hold each part in addition to
    the first one, 0 to 2. ``consistency``: "bsp", ``BSP(elastic=True)``, "asp", ``SSP(staleness)``
    or ``Backup(share)``. ``shards``: into how many shards the store is cut, a multiple of the
    number of servers up to 1024; None for one by server. Shards move whole, and their number stays
    the same. So servers that join find shards to take if there are several by server; ``clock``
    sends a message to each shard. Until shards move, each server holds as many of them as any
    other.

    In a job with servers of their own (``pycoll run --servers``), this function is not needed: its
    servers run ``serve()``, and the workers name the terms in ``connect``.

    Raises InvalidArgumentError and MismatchError, as all ranks do, for terms that do not fit; the
    errors of ``init``. A server whose neighbours die goes on.

    Cost: a connection to each worker and each server; a thread for each of them.

    >>> worker, server = pycoll.local_world(2)
    >>> serving = threading.Thread(target=pycoll.ps.serve_store, args=(server, [1]))
    >>> serving.start()
    >>> pycoll.ps.connect(worker).close()  # the only worker leaves
    >>> serving.join()
    """

    def terms() -> Terms:
        checked = check_terms(servers, replicas, consistency, shards, comm.size)
        if comm.rank not in checked.servers:
            raise InvalidArgumentError(
                f"servers is {list(checked.servers)} without rank {comm.rank}, which called "
                "serve_store(): call connect(comm) on the workers"
            )
        return checked

    StoreOpener(comm, True, terms).open_server().run()


def connect(
    comm: Communicator | None = None,
    *,
    replicas: int | None = None,
    consistency: Any = None,
    shards: int | None = None,
    ticket: str | None = None,
    worker: int | None = None,
) -> Store:
    """Open a store as a worker, and return it. All workers call this function.

    ``comm``: a communicator on whose other ranks ``serve_store(comm, ...)`` runs, or the world of a
    job with servers; None is the world. ``replicas``, ``consistency`` and ``shards``: as in
    ``serve_store``, which names them in the first case. In a job with servers the workers name them
    here, all the same; without them a store has no replicas, is "bsp", and has a shard by server.

    ``ticket``: a text that ``Store.ticket`` of a running store returned. This process then joins
    that store alone, and need not have called ``pycoll.init``. ``worker``: the rank of a worker
    whose process has ended and which this process replaces; None for a new worker with a new rank.
    ``replicas`` and ``consistency`` are those of the store, and may be left out. The worker begins
    at the clock ``stats()["clock"]``: the servers count it in all rounds from there on. A store
    with "bsp" takes new workers while its rounds end by ``clock()`` for all keys, and cannot
    replace a worker. One with ``BSP(elastic=True)`` also takes workers back while they do.

    Returns a ``Store``. Its ``close()`` leaves it.

    Raises InvalidArgumentError for wrong terms and where no rank serves, MismatchError where ranks
    pass different ones, and the errors of ``init``. With a ticket, raises InvalidArgumentError
    where the store refuses this process: other terms, another version, a worker that takes part
    already, "bsp" or ``BSP(elastic=True)`` without the rounds above. Raises TimeoutError where the
    store has ended.

    Cost: a connection to each server.

    >>> worker, server = pycoll.local_world(2)
    >>> serving = threading.Thread(target=pycoll.ps.serve_store, args=(server, [1]))
    >>> serving.start()
    >>> with pycoll.ps.connect(worker) as store:
    ...     store.init("w", np.zeros(2))
    ...     store.push_pull("w", np.ones(2))
    array([1., 1.])
    >>> serving.join()
    """
    if ticket is not None:
        _refuse_other_arguments("connect", {"comm": comm, "shards": shards})
        return _join_with_ticket(ticket, _join_request(worker, replicas, consistency))
    if worker is not None:
        raise InvalidArgumentError(
            f"worker is {worker!r} without a ticket: only a process that joins a running store by "
            "ticket= names the worker in whose place it comes"
        )
    used = world.world() if comm is None else comm
    served = used._served
    if served is None:
        if replicas is not None or consistency is not None or shards is not None:
            raise InvalidArgumentError(
                "connect() was given replicas, consistency or shards on a communicator without "
                "servers of its own: pass them to serve_store(comm, ...) on the ranks that serve"
            )
        return _open_store(used, lambda: None)

    def terms() -> Terms:
        words = "bsp" if consistency is None else consistency
        count = 0 if replicas is None else replicas
        return check_terms(served.ranks, count, words, shards, served.base.size)

    return served.open_store(lambda base: _open_store(base, terms))


def _open_store(base: Communicator, terms: Callable[[], Terms | None]) -> Store:
    opener = StoreOpener(base, False, terms)
    agreed, links = opener.open_worker()
    workers = tuple(rank for rank in range(base.size) if rank not in agreed.servers)
    return Store(links, (base.rank, workers), agreed.consistency, base.timeout_s)


def _refuse_other_arguments(what: str, given: dict[str, Any]) -> None:
    """Raise InvalidArgumentError for arguments that have no meaning with a ticket."""
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise InvalidArgumentError(
            f"{what}() was given {names[0]} and a ticket (ticket= or PYCOLL_TICKET): the ticket "
            "names the store; leave the other one out"
        )


def _join_request(worker: Any, replicas: Any, consistency: Any) -> JoinRequest:
    is_rank = isinstance(worker, int) and not isinstance(worker, bool) and 0 <= worker < RANKS_MAX
    if worker is not None and not is_rank:
        raise InvalidArgumentError(
            f"worker is {worker!r}: expected None, or the rank of a worker whose process has ended"
        )
    word = "" if consistency is None else str(consistency_of(consistency))
    return JoinRequest(
        False,
        -1 if worker is None else worker,
        -1 if replicas is None else check_replicas(replicas, REPLICAS_MAX),
        word,
    )


def _serve_with_ticket(ticket: str, config: Config) -> int:
    """Join a running store as a server, and serve it until its workers have left."""
    with join_store(ticket, JoinRequest(True), config) as joined:
        terms = Terms.from_list(joined.context.terms)
        rank, workers = joined.newcomer.rank, joined.workers
        machine = make_server(config, rank, joined.view, workers, terms)
        machine.gone.update(joined.gone)
        machine.expect(joined.newcomer.serial)
        server = ServerThreads(machine, joined.links, joined.context, is_new=True)
    server.run()
    return 0


def _join_with_ticket(ticket: str, request: JoinRequest) -> Store:
    """Join a running store as a worker, and return it."""
    config = world._settings()
    deadline = time.monotonic() + config.init_timeout_s
    with join_store(ticket, request, config) as joined:
        terms = Terms.from_list(joined.context.terms)
        newcomer = joined.newcomer
        machine = make_client(config, newcomer.rank, joined.view, terms, newcomer.first)
        machine.expect(newcomer, joined.servers)
        links = WorkerLinks(machine, joined.links, joined.context)
        if not links.wait_connected(deadline):
            raise TimeoutError(
                f"servers {sorted(machine.expected)} have not connected with this worker within "
                f"{config.init_timeout_s:g} s",
                ranks=sorted(machine.expected),
                operation="ps",
            )
        workers = tuple(sorted({newcomer.rank, *joined.workers, *joined.gone}))
        store = Store(links, (newcomer.rank, workers), terms.consistency, config.timeout_s)
        store._join()
    return store


def _serve_store_of_job(base: Communicator) -> Callable[[], None]:
    """Open a store as a server of a job; return the function that serves it."""
    return StoreOpener(base, True, lambda: None).open_server().run


serve_stores.append(_serve_store_of_job)
