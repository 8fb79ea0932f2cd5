"""Opening a store: workers and servers compare their terms, and each pair connects."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.rendezvous.meeting import Meeting
from pycoll.comm.communicator import Communicator
from pycoll.comm.operations import internals_of
from pycoll.config import Config
from pycoll.errors import InvalidArgumentError, MismatchError, PycollError, odd_ranks
from pycoll.ps.client_machine import ClientMachine
from pycoll.ps.consistency import Consistency, consistency_from, consistency_of
from pycoll.ps.invariants.store_checks import CheckedClient, CheckedShard
from pycoll.ps.membership.newcomer_links import StoreContext, newcomer_key
from pycoll.ps.server_links import Connector, Link, meeting_text, pairs_of
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.server_threads import ServerThreads
from pycoll.ps.shard import Shard
from pycoll.ps.values.store_values import StoreValues
from pycoll.ps.views import View, first_view
from pycoll.ps.worker_links import WorkerLinks
from pycoll.untrusted import json_object, read_json

#: The most replicas of a shard, in addition to its first server.
REPLICAS_MAX = 2
#: The most shards of a store.
SHARDS_MAX = 1024
_FACTS = {"serves": bool, "terms": list, "meeting": str, "refused": str, "silence_s": int}


class Terms(NamedTuple):
    """The terms of a store. ``servers``: the ranks that serve it at first."""

    servers: tuple[int, ...]
    replicas: int
    consistency: Consistency
    shards: int

    def to_list(self) -> list[Any]:
        """Return the form that ``from_list`` reads."""
        return [list(self.servers), self.replicas, str(self.consistency), self.shards]

    @classmethod
    def from_list(cls, facts: list[Any]) -> Terms:
        """Read terms. Raises ValueError for other lists."""
        servers, replicas, text, shards = facts
        if not isinstance(servers, list) or not all(type(one) is int for one in servers):
            raise ValueError("servers that are no ranks")
        if type(replicas) is not int or not isinstance(text, str) or type(shards) is not int:
            raise ValueError("replicas, a consistency or shards of another type")
        return cls(tuple(servers), replicas, consistency_from(text), shards)

    def __str__(self) -> str:
        return (
            f"servers={list(self.servers)}, replicas={self.replicas}, {self.consistency}, "
            f"shards={self.shards}"
        )

    def first_view(self, size: int) -> View:
        """Return the view of a new store. ``size``: the number of all ranks."""
        return first_view(self.servers, self.replicas, size, self.shards)


def check_terms(servers: Any, replicas: Any, consistency: Any, shards: Any, size: int) -> Terms:
    """Return the terms of arguments. Raises InvalidArgumentError that names the wrong one."""
    rule = consistency_of(consistency)
    try:
        ranks = sorted({int(one) for one in servers if not isinstance(one, bool)})
    except (TypeError, ValueError):
        ranks = []
    if not ranks or len(ranks) != len(servers) or not 0 <= ranks[0] <= ranks[-1] < size:
        raise InvalidArgumentError(
            f"servers is {servers!r}: expected different ranks from 0 to {size - 1}"
        )
    if len(ranks) == size:
        raise InvalidArgumentError(f"servers is {servers!r}: all {size} ranks; leave a worker")
    most = min(REPLICAS_MAX, len(ranks) - 1)
    why = f", since there are {len(ranks)} servers and at most {REPLICAS_MAX} replicas"
    copies = check_replicas(replicas, most, why)
    return Terms(tuple(ranks), copies, rule, _check_shards(shards, len(ranks)))


def _check_shards(shards: Any, servers: int) -> int:
    """Check the number of shards: a multiple of the servers, so that each holds as many rows."""
    count = servers if shards is None else shards
    if isinstance(count, bool) or not isinstance(count, int) or not servers <= count <= SHARDS_MAX:
        raise InvalidArgumentError(
            f"shards is {shards!r}: expected {servers} to {SHARDS_MAX}, since there are {servers} "
            "servers, or None for one shard by server"
        )
    if count % servers:
        more = count // servers * servers
        good = [one for one in (more, more + servers) if one <= SHARDS_MAX]
        raise InvalidArgumentError(
            f"shards is {shards!r}: expected a multiple of the {servers} servers, up to "
            f"{SHARDS_MAX}, since each server holds as many rows as others only then; pass "
            f"{' or '.join(map(str, good))}"
        )
    return count


def check_replicas(replicas: Any, most: int, why: str = "") -> int:
    """Return the number of replicas. Raises InvalidArgumentError unless it is 0 to ``most``."""
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 0 <= replicas <= most:
        raise InvalidArgumentError(f"replicas is {replicas!r}: expected 0 to {most}{why}")
    return replicas


class StoreOpener:
    """Opens a store on communicator ``base``. All its ranks do so at the same time.

    ``serves``: whether this rank serves. ``terms``: returns the terms, or None if only other ranks
    know them. If it raises InvalidArgumentError on one rank, all ranks raise that.
    """

    def __init__(self, base: Communicator, serves: bool, terms: Callable[[], Terms | None]) -> None:
        self._base = base
        self._internals = internals_of(base)
        self._number = 0  # of the store among the splits of the base
        self._serves = serves
        self._given: Terms | None = None
        self._refusal = ""
        try:
            self._given = terms()
        except InvalidArgumentError as error:
            self._refusal = str(error)

    @contextlib.contextmanager
    def _connect(self) -> Iterator[tuple[Terms, dict[int, Link], StoreContext]]:
        """Agree on the terms and connect this rank; yield the terms, the links by peer, the store.

        An error inside the block closes the links.
        """
        base, internals = self._base, self._internals
        config, joined = internals.config, internals.joined
        number = self._number = internals.lifecycle.number_split()
        with self._listen() as (listener, meeting):
            mine = {
                "serves": self._serves,
                "terms": [] if self._given is None else self._given.to_list(),
                "meeting": meeting.decode(),
                "refused": self._refusal,
                "silence_s": config.server_silence_s,
            }
            blobs = internals.exchanges.gather_blobs(json.dumps(mine).encode())
            terms, meetings, silence_s = agree_on_terms(blobs)
            key = internals.lifecycle.subcommunicator_key()
            connector = Connector(
                base.rank,
                config._replace(timeout_s=base.timeout_s, server_silence_s=silence_s),
                key,
                joined.tuning,
                joined.oversubscription,
                meetings,
            )
            with contextlib.ExitStack() as undo:
                made = {}
                limit = Deadline(config.init_timeout_s)
                for host, guest, purpose in pairs_of(self._workers(terms), terms.servers):
                    if base.rank in (host, guest):
                        name = f"store {number} {purpose}"
                        comm = connector.link(host, guest, name, listener, limit)
                        peer = guest if base.rank == host else host
                        made[peer] = Link(comm, peer)
                        undo.callback(made[peer].close)
                yield terms, made, self._make_context(terms, connector)
                undo.pop_all()

    def _make_context(self, terms: Terms, connector: Connector) -> StoreContext:
        name = self._store_name()
        key = newcomer_key(connector.key, name)
        return StoreContext(name, terms.to_list(), connector._replace(key=key, meetings={}))

    def _workers(self, terms: Terms) -> list[int]:
        return [rank for rank in range(self._base.size) if rank not in terms.servers]

    @contextlib.contextmanager
    def _listen(self) -> Iterator[tuple[socket.socket | None, bytes]]:
        """Yield a listener for guests of other machines and its address; None on one machine."""
        machines = {identity.machine for identity in self._internals.joined.identities}
        if not self._serves or len(machines) == 1:
            yield None, b""
            return
        config = self._internals.config
        with listen_in_range(None, config.port_range) as listener:
            yield listener, meeting_text(config, listener)

    def open_worker(self) -> tuple[Terms, WorkerLinks]:
        """Open the store as a worker."""
        with self._connect() as (terms, links, context):
            view = terms.first_view(self._base.size)
            machine = make_client(self._internals.config, self._base.rank, view, terms)
            return terms, WorkerLinks(machine, links, context)

    def open_server(self) -> ServerThreads:
        """Open the store as a server."""
        with self._connect() as (terms, links, context):
            view = terms.first_view(self._base.size)
            config, workers = self._internals.config, self._workers(terms)
            machine = make_server(config, self._base.rank, view, workers, terms)
            return ServerThreads(machine, links, context)

    def _store_name(self) -> str:
        """Return the name of the store, the same on all ranks."""
        # The key is secret, and a digest of it names the store.
        key = self._internals.lifecycle.subcommunicator_key()
        name = hmac.digest(key, b"store", "sha256").hex()[:8]
        return f"{name}-{self._number}"


def make_client(
    config: Config, rank: int, view: View, terms: Terms, first: int = 0
) -> ClientMachine:
    """Return the machine of a worker. ``first``: the number below its first request."""
    if config.store_checks:
        return CheckedClient(rank, view, terms.consistency, first)
    return ClientMachine(rank, view, first)


def make_server(
    config: Config, rank: int, view: View, workers: Sequence[int], terms: Terms
) -> ServerMachine:
    """Return the machine of a server."""
    shard = CheckedShard if config.store_checks else Shard

    def make(_: int) -> Shard:
        return shard(terms.consistency, workers, StoreValues())

    return ServerMachine(rank, workers, view, make)


def agree_on_terms(blobs: Sequence[bytes]) -> tuple[Terms, dict[int, Meeting], int]:
    """Return the terms on which all ranks agree, the addresses of servers, and the silence limit.

    ``blobs``: by rank its terms and facts. The silence limit is the seconds after which a silent
    server counts as lost. Raises, on all ranks alike, InvalidArgumentError and MismatchError that
    name the odd rank: the first one whose terms are not the most frequent ones.
    """
    terms_by_rank: dict[int, Terms] = {}
    serving, silences, meetings = [], [], {}
    for rank, blob in enumerate(blobs):
        try:
            facts = json_object(read_json(blob), _FACTS)
            if facts["refused"]:
                raise InvalidArgumentError(f"rank {rank}: {facts['refused']}", rank=rank)
            if facts["terms"]:
                terms_by_rank[rank] = Terms.from_list(facts["terms"])
            if facts["meeting"]:
                meetings[rank] = Meeting.from_bytes(facts["meeting"].encode())
        except ValueError as error:
            if isinstance(error, PycollError):
                raise
            raise MismatchError(f"rank {rank} opened no store here: {error}", rank=rank) from None
        if facts["serves"]:
            serving.append(rank)
            silences.append(facts["silence_s"])
    if not terms_by_rank:
        raise InvalidArgumentError(
            "no rank serves this store: call pycoll.ps.serve_store(comm, servers=...) on the ranks "
            "that serve, while the others call pycoll.ps.connect(comm)"
        )
    first, odd = odd_ranks(terms_by_rank)
    terms = terms_by_rank[first]
    if odd:
        agreeing = sum(one == terms for one in terms_by_rank.values())
        others = f"{agreeing} ranks, among them rank {first}," if agreeing > 1 else f"rank {first}"
        raise MismatchError(
            f"rank {odd[0]} opens a store with {terms_by_rank[odd[0]]}, {others} with {terms}",
            rank=odd[0],
        )
    for rank in range(len(blobs)):
        if (rank in serving) != (rank in terms.servers):
            did = "serves" if rank in serving else "works"
            raise MismatchError(
                f"rank {rank} {did}, but servers are {list(terms.servers)}", rank=rank
            )
    return terms, meetings, min(silences)
