"""From an exchange to transports: every pair of ranks gets one connected, authenticated medium.

In the first round every rank sends its identity. Then the processes of each host share memory
(``local_rendezvous``). If shared memory joins all pairs, one round remains, in which every rank
sends whether it succeeded. Otherwise three rounds remain: the addresses where ranks listen, the
peers that each rank could not reach, and whether every rank is connected. A rank takes part in
every round even after it has failed, so all ranks learn of a failure and none waits for it.

In each pair that sockets join, the higher rank connects and the lower rank accepts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.identity import (
    Identity,
    choose_all,
    falls_back,
    host_numbers,
    is_plain,
    ranks_per_core,
    session_key,
    transport_inside,
)
from pycoll.bootstrap.discovery.limits import check_together, free_descriptors
from pycoll.bootstrap.discovery.roles import check_roles
from pycoll.bootstrap.recovery.post import Post
from pycoll.bootstrap.rendezvous.checked_rounds import facts_of, identities_of
from pycoll.bootstrap.rendezvous.exchange import Exchange
from pycoll.bootstrap.shared_memory import Ends, Neighbours
from pycoll.bootstrap.unreachable import unreachable
from pycoll.config import Config

if TYPE_CHECKING:
    from pycoll.bootstrap.discovery.rails import Port
    from pycoll.bootstrap.links import Links

#: ``connect`` takes at most this many rounds, ``sit_out`` exactly as many; the last carries the
#: verdict.
ROUNDS = 4
#: Connecting may use this share of the time left; the rest is for the round with the verdict.
_LINK_SHARE = 0.8


class Transport(Protocol):
    """One rank's end of one medium, made by a factory.

    The shm transport also has segment_fd(), doorbell_fd() and lifeline_fd().
    """

    def attach(self, peer: int, *args: Any) -> None:
        """Take ownership of a peer's descriptors."""


#: Makes the text that rank 0 sends to all ranks when they join (its tuning); raises PycollError.
Bring = Callable[[Config], str]
#: Makes this rank's end of one medium: (rank, size) -> transport; for verbs (rank, size, ports).
Factory = Callable[..., Any]


class Connected(NamedTuple):
    """The result of connecting one rank to all others.

    ``transports`` are in order of preference. ``names[r]`` is "host:pid" of rank r. ``hosts[r]`` is
    the number of its host, counted from 0 in order of ranks. ``inside`` is the medium between ranks
    of one host. ``oversubscription`` is the ranks per core of the host with the most ranks per
    core, at least 1. ``tuning`` is the text that rank 0 sent. ``identities`` are those of all
    ranks. ``post`` is this rank's mailbox for shrinking, which the owner closes; None in a
    communicator of one rank.
    """

    transports: list[Any]
    names: list[str]
    hosts: list[int]
    inside: str
    oversubscription: float
    tuning: str
    identities: Sequence[Identity]
    post: Post | None = None


def native_factories() -> dict[str, Factory]:
    """Return the transports of the native module, by name."""
    core = importlib.import_module("pycoll._core")
    return {"shm": core.ShmTransport, "verbs": core.VerbsTransport, "tcp": core.TcpTransport}


def connect(
    exchange: Exchange,
    config: Config,
    *,
    communicator_id: str = "world",
    deadline: Deadline | None = None,
    factories: Mapping[str, Factory] | None = None,
    bring: Bring | None = None,
    mailbox: bool = True,
) -> Connected:
    """Connect this rank to all others that ``exchange`` reaches.

    Rank 0 calls ``bring`` before the last round, when the others wait for it, so that it can time
    what the machine does: its result becomes ``tuning`` on all ranks, and its error makes all ranks
    fail. ``mailbox``: make a mailbox for shrinking. The caller closes ``exchange``.
    Afterwards no other socket listens and no thread of this function is left, also on failure.

    Raises, on all ranks, TransportError that names every pair that could not be connected and the
    reason. Raises InvalidArgumentError if the ranks' settings leave a pair without a transport, and
    every error of the exchange.
    """
    limit = deadline or Deadline(config.init_timeout_s)
    ports, without = _verbs_ports(config)
    makers = native_factories() if factories is None and exchange.size > 1 else factories or {}
    with contextlib.ExitStack() as cleanup:
        ends = _ends(exchange, config, makers)
        cleanup.callback(ends.close)
        free = free_descriptors()
        mine = Identity.mine(config, ports, without, ends.local_address_name, free)
        identities = _identities(exchange, mine)
        rounds = _Rounds(exchange, identities, config, communicator_id, makers)
        cleanup.callback(rounds.close)
        if mailbox and exchange.size > 1:
            rounds.open_post()
        outcomes = rounds.run(ends, limit.within(_LINK_SHARE * limit.remaining()), bring)
        judge(outcomes, rounds.failure)
        transports = rounds.transports
        post, rounds.post = rounds.post, None
    return describe(transports, identities, outcomes[0].get("tuning", ""))._replace(post=post)


def describe(transports: list[Any], identities: Sequence[Identity], tuning: str) -> Connected:
    """Make the ``Connected`` of ranks with these identities, which are connected already."""
    return Connected(
        transports,
        [identity.name for identity in identities],
        host_numbers(identities),
        transport_inside(identities),
        ranks_per_core(identities),
        tuning,
        identities,
    )


class _Rounds:
    """The rounds after the first. ``failure`` is the error of this rank once it has failed."""

    def __init__(
        self,
        exchange: Exchange,
        identities: Sequence[Identity],
        config: Config,
        communicator_id: str,
        makers: Mapping[str, Factory],
    ) -> None:
        self.failure: errors.PycollError | None = None
        self.transports: list[Any] = []
        self.post: Post | None = None
        self._exchange = exchange
        self._identities = identities
        self._config = config
        self._name = communicator_id
        self._key = session_key(exchange.secret, communicator_id, identities)
        self._makers = makers
        self._links: Links | None = None
        self._failed: dict[int, dict[str, Any]] = {}

    def run(self, ends: Ends, deadline: Deadline, bring: Bring | None) -> list[dict[str, Any]]:
        """Return the facts that every rank sent in the last round; rank 0 sends its tuning."""
        try:
            neighbours = self._meet(ends, deadline)
            if not (self._exchange.brief and is_plain(self._identities)):
                self._link(neighbours, deadline)
            elif neighbours.shm is not None:
                self.transports = [neighbours.shm]
            outcomes = self._gather(self._call_bring(bring))
        except errors.PycollError as error:
            # An alarm has ended the exchange for all ranks. This rank's own error says more.
            raise self.failure or error from error.__cause__
        if any("error" in outcome for outcome in outcomes):
            self.transports = []
        return outcomes

    def _call_bring(self, bring: Bring | None) -> dict[str, str]:
        if self._exchange.rank != 0 or bring is None or self.failure is not None:
            return {}
        try:
            return {"tuning": bring(self._config)}
        except errors.PycollError as error:
            self.failure = error
            return {}

    def open_post(self) -> None:
        """Make this rank's mailbox. All ranks have made theirs when one of them has joined."""
        if self.failure is None:
            try:
                self.post = Post(self._key, self._exchange.rank, self._identities)
            except OSError as error:
                self.failure = as_error(error)

    def close(self) -> None:
        """Close all listeners and end the thread; transports that were handed over stay open."""
        if self._links is not None:
            self._links.close()
        if self.post is not None:
            self.post.close()
        self.transports = []

    def _meet(self, ends: Ends, deadline: Deadline) -> Neighbours:
        exchange = self._exchange
        neighbours = Neighbours(exchange.rank, self._identities, ends, self._key, self._name)
        if self.failure is None and neighbours.failure is not None:
            self.failure = as_error(neighbours.failure)
        try:
            neighbours.meet(deadline, exchange.check)
        except (errors.PycollError, OSError) as error:
            self._alarm(error)
        return neighbours

    def _link(self, neighbours: Neighbours, deadline: Deadline) -> None:
        """Run the rounds for threads of one process and for pairs that sockets join."""
        endpoint: dict[str, Any] = {}
        try:
            if self.failure is None:
                endpoint = neighbours.endpoint() | self._listen() | self._open_network()
        except (errors.PycollError, OSError) as error:
            self.failure = as_error(error)
        endpoints = self._gather(endpoint)
        if self._exchange.rank == 0:
            _warn_of_fallbacks(self._identities, endpoints)
        if any("error" in other for other in endpoints):
            self._gather({})
            return
        if self.post is not None and any("post" in other for other in endpoints):
            offers = [other.get("post", []) for other in endpoints]
            self.post.take_addresses(self._config, offers)
        unreached: dict[int, str] = {}
        try:
            if self._links is not None:
                unreached = self._links.dial(endpoints, deadline, self._exchange.check)
        except (errors.PycollError, OSError) as error:
            self._alarm(error)
        rows = _unreached_peers(self._gather({"unreached": unreached}))
        if self.failure is None and any(rows):
            self.failure = unreachable([identity.name for identity in self._identities], rows)
        if self.failure is None:
            self._finish(neighbours, endpoints, deadline)

    def _listen(self) -> dict[str, Any]:
        rank = self._exchange.rank
        kinds = choose_all(rank, self._identities)
        kinds = {peer: kind for peer, kind in kinds.items() if kind != "shm"}
        if not kinds:
            return {}
        from pycoll.bootstrap.links import Links

        links = self._links = Links(
            rank,
            self._identities,
            kinds,
            self._config,
            key=self._key,
            communicator_id=self._name,
            factories=self._makers,
        )
        return links.listen()

    def _open_network(self) -> dict[str, Any]:
        """Open the mailbox to other machines. A range of ports is kept for the world's."""
        one_machine = len({identity.machine for identity in self._identities}) == 1
        kept = self._config.port_range is not None and self._name != "world"
        if self.post is None or one_machine or kept:
            return {}
        return {"post": self.post.open_network(self._config)}

    def _finish(
        self, neighbours: Neighbours, endpoints: Sequence[Mapping[str, Any]], deadline: Deadline
    ) -> None:
        try:
            neighbours.attach_threads(endpoints)
            if neighbours.shm is not None:
                self.transports.append(neighbours.shm)
            if self._links is not None:
                self.transports += self._links.finish(deadline, self._exchange.check)
        except (errors.PycollError, OSError) as error:
            self._alarm(error)

    def _alarm(self, error: errors.PycollError | OSError) -> None:
        """Record the error and alarm the other ranks at once: they may be waiting for this one."""
        failure = self.failure = as_error(error)
        self._exchange.alarm(_with_rank(self._exchange.rank, str(failure)))

    def _gather(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        sent = {"error": str(self.failure)} if self.failure is not None else facts
        every = facts_of(self._exchange.all_gather(json.dumps(sent).encode()))
        # A rank that has failed in one round stays failed, whatever it sends later.
        failed = {rank: one for rank, one in enumerate(every) if "error" in one}
        self._failed = {**failed, **self._failed}
        return [self._failed.get(rank, one) for rank, one in enumerate(every)]


def _identities(exchange: Exchange, mine: Identity) -> list[Identity]:
    """Run the first round. All ranks raise if versions differ, one identity is unreadable, one rank
    may open too few files, or roles do not fit. If other groups of a parent take part in the
    rounds, they raise after the last round.
    """
    blobs = exchange.all_gather(mine.to_bytes())
    try:
        identities = identities_of(blobs)
        check_together(identities)
        check_roles(identities)
        return identities
    except errors.PycollError:
        if not exchange.brief:
            sit_out(exchange.all_gather, ROUNDS - 1)
        raise


def _ends(
    exchange: Exchange,
    config: Config,
    makers: Mapping[str, Factory],
) -> Ends:
    """Make this rank's memory and local address."""
    make = makers.get("shm")
    if exchange.size == 1 or make is None or "shm" not in config.transports:
        return Ends(None)
    return Ends(lambda: make(exchange.rank, exchange.size))


def _unreached_peers(outcomes: Sequence[Mapping[str, Any]]) -> list[dict[int, str]]:
    rows = (outcome.get("unreached", {}) for outcome in outcomes)
    return [{int(peer): str(why) for peer, why in row.items()} for row in rows]


def _verbs_ports(config: Config) -> tuple[tuple[Port, ...], str]:
    """Return the RDMA ports of this rank, or the reason why it has none."""
    if "verbs" not in config.transports:
        return (), ""
    missing = str(importlib.import_module("pycoll._core").verbs_missing())
    if missing:
        return (), f"verbs: {missing}"
    from pycoll.bootstrap.discovery.verbs import choose_ports

    try:
        return choose_ports(config, config.local_rank or 0), ""
    except errors.TransportError as error:
        return (), str(error)


def _warn_of_fallbacks(
    identities: Sequence[Identity], endpoints: Sequence[Mapping[str, Any]]
) -> None:
    """Warn once for all ranks if a pair uses tcp because one end could not use verbs."""
    if any("error" in endpoint for endpoint in endpoints):
        return  # the error will be raised instead
    without = {
        rank: str(identity.without or endpoint.get("without", ""))
        for rank, (identity, endpoint) in enumerate(zip(identities, endpoints, strict=True))
    }
    lacking = [rank for rank, why in without.items() if why]
    for rank in lacking:
        mine = identities[rank]
        refused = "without" in endpoints[rank]
        if refused or any(falls_back(mine, other) for other in identities if other is not mine):
            more = f"; and {len(lacking) - 1} ranks more" if len(lacking) > 1 else ""
            warnings.warn(
                f"tcp is used instead of verbs: rank {rank} ({mine.name}): {without[rank]}{more}",
                stacklevel=5,
            )
            return


def sit_out(all_gather: Callable[[bytes], Sequence[bytes]], rounds: int = ROUNDS) -> None:
    """Take part in the rounds as a rank of the parent that joins no group."""
    for _ in range(rounds):
        all_gather(b"")


def _with_rank(rank: int, text: str) -> str:
    return text if text.startswith(f"rank {rank} ") else f"rank {rank} failed to join: {text}"


def as_error(error: errors.PycollError | OSError) -> errors.PycollError:
    """Convert an error of the system into TransportError; errors of pycoll stay as they are."""
    if isinstance(error, errors.PycollError):
        return error
    advice = " (raise the limit, ulimit -n)" if error.errno in (23, 24) else ""
    return errors.TransportError(f"{error.strerror or error}{advice}", operation="init")


def judge(outcomes: Sequence[Mapping[str, Any]], own: errors.PycollError | None) -> None:
    """Raise if any rank failed: this rank's own error, else TransportError with the others'."""
    if own is not None:
        raise own
    failed = [r for r, outcome in enumerate(outcomes) if "error" in outcome]
    if not failed:
        return
    text = "; ".join(_with_rank(r, outcomes[r]["error"]) for r in failed[:4])
    more = f"; and {len(failed) - 4} ranks more" if len(failed) > 4 else ""
    raise errors.TransportError(
        f"{text}{more}",
        rank=failed[0] if len(failed) == 1 else None,
        ranks=failed,
        operation="init",
    )
