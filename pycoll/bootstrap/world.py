"""The whole way into a world in one call: discover, meet, connect."""

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
from pycoll.bootstrap.discover import Placement, discover, open_exchange
from pycoll.bootstrap.exchange import Exchange, MemoryExchange, ParentExchange
from pycoll.bootstrap.identity import Identity
from pycoll.bootstrap.limits import check_alone
from pycoll.bootstrap.parts import Parent, make_part
from pycoll.config import Config
from pycoll.errors import TransportError

#: A rank that can never join tries for so long to tell the others.
_TELLING_S = 1.0


class Joined(NamedTuple):
    """A rank that is connected to all others.

    ``transports`` go into ``_core.Communicator``, the first with a link to a peer wins. ``names``
    are "host:pid" by rank, ``hosts`` the host's number by rank. ``inside`` is the medium between
    ranks of one host, ``crowding`` the ranks per core of the most crowded one, ``tuning`` what rank
    0 brought. ``identities`` is what the ranks told of themselves, ``source`` who told the rank.
    """

    rank: int
    size: int
    transports: list[Any]
    names: list[str]
    hosts: list[int]
    inside: str
    crowding: float
    tuning: str
    identities: Sequence[Identity]
    source: str

    @property
    def local_ranks(self) -> list[int]:
        """The ranks on this rank's host, in order."""
        return [r for r, host in enumerate(self.hosts) if host == self.hosts[self.rank]]


def join(
    config: Config,
    *,
    rank: int | None = None,
    size: int | None = None,
    address: str | None = None,
    secret: str | bytes | None = None,
    comm: Any = None,
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
) -> Joined:
    """Join the world that arguments, ``config`` or a launcher's variables describe.

    Returns within ``config.init_timeout_s``, counted in an elastic job from when its launcher gives
    this process a place, or raises: InvalidArgumentError, TransportError,
    TimeoutError naming the ranks that did not come, PeerLostError. Leaves nothing behind.
    """
    placement = discover(config, rank=rank, size=size, address=address, secret=secret, comm=comm)
    deadline = Deadline(config.init_timeout_s)
    _check_limits(placement, config)
    exchange = open_exchange(placement, deadline)
    connected = _connect_and_close(exchange, config, "world", deadline, factories, bring)
    return _joined(exchange, connected, placement.source)


def _check_limits(placement: Placement, config: Config) -> None:
    """Raise before anything waits. The others hear of it if somebody serves the meeting by now."""
    serves = placement.rank == 0 and placement.way in ("store", "unix") and not placement.launcher
    one_host = placement.way == "unix" or config.local_size == placement.size
    together = one_host and config.host_id is None
    try:
        check_alone(placement.rank, placement.size, config, serves, together)
    except TransportError as error:
        with contextlib.suppress(Exception):
            exchange = open_exchange(placement, Deadline(_TELLING_S))
            exchange.alarm(str(error))
            exchange.close()
        raise


def join_threads(
    size: int,
    config: Config | Sequence[Config],
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
) -> list[Joined]:
    """``size`` ranks that are threads of this process, connected by real transports.

    ``config`` is one for all, or one per rank.
    """
    configs = [config] * size if isinstance(config, Config) else list(config)
    exchanges = MemoryExchange.make(size, Deadline(configs[0].init_timeout_s))

    def one(exchange: Exchange) -> Joined:
        config = configs[exchange.rank]
        connected = _connect_and_close(exchange, config, "threads", None, factories, bring)
        return _joined(exchange, connected, "local_world")

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
    """Some ranks of a communicator form a new one; see ParentExchange.

    Every rank of the parent must take part at the same time, by ``join_group`` with its own
    group or by ``connect.sit_out``.
    """
    exchange = ParentExchange(parent_gather, members, rank)
    connected = connect(
        exchange, config, communicator_id=communicator_id, factories=factories, bring=bring
    )
    return _joined(exchange, connected, "split")


def join_part(
    parent: Parent,
    groups: Sequence[Sequence[int]],
    members: Sequence[int],
    tuning: str,
    factory: Factory | None = None,
) -> Joined | None:
    """Some ranks of a communicator form new ones, where ``can_share`` says so; see make_part.

    ``groups`` are all new ones, ``members`` this rank's, or empty. Every rank of the parent takes
    part at the same time.
    """
    make = native_factories()["shm"] if factory is None else factory
    transports = make_part(parent, members, max(map(len, groups)), make)
    if not members:
        return None
    identities = [parent.identities[member] for member in members]
    connected = describe(transports, identities, tuning)
    return Joined(members.index(parent.rank), len(members), *connected, "split")


def _connect_and_close(
    exchange: Exchange,
    config: Config,
    communicator_id: str,
    deadline: Deadline | None,
    factories: Mapping[str, Factory] | None,
    bring: Bring | None,
) -> Connected:
    try:
        connected = connect(
            exchange,
            config,
            communicator_id=communicator_id,
            deadline=deadline,
            factories=factories,
            bring=bring,
        )
    except BaseException:
        with contextlib.suppress(Exception):
            exchange.abandon()
        raise
    exchange.close()
    return connected


def _joined(exchange: Exchange, connected: Connected, source: str) -> Joined:
    return Joined(exchange.rank, exchange.size, *connected, source)


def _run_all(jobs: Sequence[Callable[[], Joined]], abandon: Callable[[], None]) -> list[Joined]:
    """All at once, each in a thread; the error of the lowest rank that failed first-hand.

    ``abandon`` ends those that wait for one whose thread cannot be had: TransportError then.
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
