"""Joins a world in one call: discover the placement, open the exchange, connect all pairs."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pycoll.bootstrap.connect import (
    Bring,
    Connected,
    Factory,
    connect,
    describe,
    native_factories,
)
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.discover import Placement, discover, open_exchange
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.discovery.limits import check_alone
from pycoll.bootstrap.recovery.post import Post
from pycoll.bootstrap.rendezvous.exchange import Exchange, MemoryExchange, ParentExchange
from pycoll.bootstrap.subcommunicators import Parent, make_part
from pycoll.config import Config
from pycoll.errors import TransportError

#: A rank that can never join spends at most this long on telling the others.
_TELLING_S = 1.0


class Joined(NamedTuple):
    """A rank that is connected to all others.

    ``transports`` go into ``_core.Communicator``, which uses the first one with a link to a peer.
    ``names`` are "host:pid" by rank, ``hosts`` the number of the host by rank. ``inside`` is the
    medium between ranks of one host. ``oversubscription`` is the ranks per core of the host with
    the most ranks per core, at least 1. ``tuning`` is the text that rank 0 sent to all.
    ``identities`` are those of all ranks. ``post`` is this rank's mailbox for shrinking, which the
    owner closes; None without other ranks. ``source`` names the origin of rank and size, such as
    "pycoll run".
    """

    rank: int
    size: int
    transports: list[Any]
    names: list[str]
    hosts: list[int]
    inside: str
    oversubscription: float
    tuning: str
    identities: Sequence[Identity]
    post: Post | None
    source: str


def join(
    config: Config,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    all_gather: Any = None,
    ticket: Any = None,
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
) -> Joined:
    """Join the world that arguments, ``config`` or a launcher's variables describe.

    Returns or raises within ``config.init_timeout_s``. In an elastic job that time starts when the
    launcher gives this process a place. Raises InvalidArgumentError, TransportError, PeerLostError,
    and TimeoutError that names the ranks that did not come. No thread, listener or file of the
    joining is left afterwards.
    """
    placement = discover(
        config,
        rank=rank,
        size=size,
        address=address,
        secret=secret,
        comm=comm,
        all_gather=all_gather,
        ticket=ticket,
    )
    deadline = Deadline(config.init_timeout_s)
    _check_limits(placement, config)
    exchange = open_exchange(placement, config, deadline)
    connected = connect_and_close(exchange, config, "world", deadline, factories, bring)
    joined = _join_result(exchange, connected, placement.source)
    if placement.way == "pmix" and len(set(joined.hosts)) > 1:
        from pycoll.bootstrap.rendezvous.late_mpi import watch_late_mpi

        watch_late_mpi(joined.rank, config.init_timeout_s)
    return joined


def _check_limits(placement: Placement, config: Config) -> None:
    """Raise before this rank waits if its limit of open files is too low for joining. The other
    ranks learn of it if a store serves them already."""
    serves = placement.rank == 0 and placement.way in ("store", "unix") and not placement.launcher
    one_host = placement.way == "unix" or config.local_size == placement.size
    together = one_host and config.host_id is None
    try:
        check_alone(placement.rank, placement.size, config, serves, together)
    except TransportError as error:
        with contextlib.suppress(Exception):
            exchange = open_exchange(placement, config, Deadline(_TELLING_S))
            exchange.alarm(str(error))
            exchange.close()
        raise


def join_threads(
    size: int,
    config: Config | Sequence[Config],
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
) -> list[Joined]:
    """Join ``size`` ranks that are threads of this process, connected by real transports.

    ``config`` is one configuration for all ranks, or one per rank.
    """
    configs = [config] * size if isinstance(config, Config) else list(config)
    exchanges = MemoryExchange.make(size, Deadline(configs[0].init_timeout_s))

    def one(exchange: Exchange) -> Joined:
        config = configs[exchange.rank]
        connected = connect_and_close(exchange, config, "threads", None, factories, bring)
        return _join_result(exchange, connected, "local_world")

    jobs = [functools.partial(one, exchange) for exchange in exchanges]
    return _run_all(jobs, exchanges[0].abandon)


def join_group(
    parent_gather: Callable[[bytes], Sequence[bytes]],
    members: Sequence[int],
    rank: int,
    communicator_id: str,
    config: Config,
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
) -> Joined:
    """Make a sub-communicator of ``members``, over an exchange on the parent (ParentExchange).

    Every rank of the parent must take part at the same time: it calls ``join_group`` with its own
    group, or ``connect.sit_out``.
    """
    exchange = ParentExchange(parent_gather, members, rank)
    connected = connect(
        exchange, config, communicator_id=communicator_id, factories=factories, bring=bring
    )
    return _join_result(exchange, connected, "split")


def join_part(
    parent: Parent,
    groups: Sequence[Sequence[int]],
    members: Sequence[int],
    tuning: str,
    factory: Factory | None = None,
) -> Joined | None:
    """Make sub-communicators inside hosts, for groups that ``can_share`` accepts; see make_part.

    ``groups`` are all new groups, ``members`` is this rank's group, empty if it is in none. Every
    rank of the parent must call at the same time. Returns None for a rank without a group.
    """
    make = native_factories()["shm"] if factory is None else factory
    transports, post = make_part(parent, members, max(map(len, groups)), make)
    if not members:
        return None
    identities = [parent.identities[member] for member in members]
    connected = describe(transports, identities, tuning)._replace(post=post)
    return Joined(members.index(parent.rank), len(members), *connected, "split")


def connect_and_close(
    exchange: Exchange,
    config: Config,
    communicator_id: str,
    deadline: Deadline | None,
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
    mailbox: bool = True,
) -> Connected:
    """Connect over ``exchange`` as ``connect`` does, and close it; after a failure abandon it."""
    try:
        connected = connect(
            exchange,
            config,
            communicator_id=communicator_id,
            deadline=deadline,
            factories=factories,
            bring=bring,
            mailbox=mailbox,
        )
    except BaseException:
        with contextlib.suppress(Exception):
            exchange.abandon()
        raise
    exchange.close()
    return connected


def _join_result(exchange: Exchange, connected: Connected, source: str) -> Joined:
    return Joined(exchange.rank, exchange.size, *connected, source)


def _run_all(jobs: Sequence[Callable[[], Joined]], abandon: Callable[[], None]) -> list[Joined]:
    """Run all jobs at once, each in its own thread, and return their results.

    Raises the error of the lowest rank that failed. If the system starts too few threads,
    ``abandon`` ends the waits of the ranks that run, and the function raises TransportError.
    """
    results: list[Joined | BaseException | None] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(index,), name=f"pycoll-join-{index}", daemon=True)
        for index in range(len(jobs))
    ]
    started = 0
    try:
        for thread in threads:
            thread.start()
            started += 1
    except RuntimeError as error:
        abandon()
        raise TransportError(
            f"the system lets {started} of {len(threads)} threads start ({error}): fewer ranks, "
            "or a higher limit (ulimit -u)",
            operation="init",
        ) from None
    finally:
        for thread in threads[:started]:
            thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Joined)]
