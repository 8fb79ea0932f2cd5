"""From an exchange to transports: every pair of ranks gets one medium, connected and proven.

Four rounds: who we are; where we listen; who could reach whom; whether all is connected. Every rank
takes part in every round whatever happened to it before, so a failure is told to all and nobody is
left waiting.

In each pair the higher rank connects and the lower one accepts.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.exchange import Exchange
from pycoll.bootstrap.identity import (
    Identity,
    choose_all,
    falls_back,
    host_numbers,
    ranks_per_core,
    session_key,
    transport_inside,
)
from pycoll.bootstrap.links import Links
from pycoll.bootstrap.reach import unreachable
from pycoll.bootstrap.verbs import Port, choose_port
from pycoll.config import Config

#: How many rounds ``connect`` and ``sit_out`` take; one is for the verdict.
ROUNDS = 4
#: Of the time that is left, linking may use this much; the rest is for telling how it went.
_LINK_SHARE = 0.8


class Transport(Protocol):
    """What a factory makes: an end of one medium. shm also has segment_fd() and doorbell_fd()."""

    def attach(self, peer: int, *args: Any) -> None:
        """Take over a peer's descriptors."""


#: Makes the text that rank 0 tells all others when they join; raises PycollError.
Bring = Callable[[Config], str]
#: Makes this rank's end of one medium: (rank, size) -> transport; for verbs also device, port, GID.
Factory = Callable[..., Any]


class Connected(NamedTuple):
    """``transports`` in order of preference; ``names[r]`` is "host:pid" of rank r; ``hosts[r]`` its
    host's number, counted from 0 in order of ranks; ``inside`` the medium of one host's ranks;
    ``crowding`` the ranks per core of the most crowded host; ``tuning`` what rank 0 brought for
    all."""

    transports: list[Any]
    names: list[str]
    hosts: list[int]
    inside: str
    crowding: float
    tuning: str


def native_factories() -> dict[str, Factory]:
    """The transports of the native module."""
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
) -> Connected:
    """Connect this rank to all others that ``exchange`` reaches.

    ``bring`` is called on rank 0; what it gives, all ranks get, and what it raises stops them all.

    Does not close ``exchange``. Afterwards nothing listens any more and no thread is left, also on
    failure. Raises TransportError naming every pair that could not be connected and why (on all
    ranks), InvalidArgumentError where the ranks' settings leave no transport, and what the exchange
    raises.
    """
    limit = deadline or Deadline(config.init_timeout_s)
    brought, failure = _brought(exchange.rank, config, bring)
    port, without = _verbs_port(config)
    mine = Identity.mine(config, brought, "" if port is None else port.network, without)
    identities = [Identity.from_bytes(data) for data in exchange.all_gather(mine.to_bytes())]
    key = session_key(exchange.secret, communicator_id, identities)
    with contextlib.ExitStack() as cleanup:
        links: Links | None = None
        try:
            if failure is not None:
                raise failure
            kinds = choose_all(exchange.rank, identities)
            makers = native_factories() if factories is None and kinds else factories or {}
            links = Links(
                exchange.rank, identities, kinds, config, key, communicator_id, makers, port
            )
            cleanup.callback(links.close)
            endpoint = links.listen()
        except (errors.PycollError, OSError) as error:
            failure = _as_error(error)
            endpoint = {}
        endpoints = _gather(exchange, endpoint, failure)
        names = [identity.name for identity in identities]
        if exchange.rank == 0:
            _tell_of_fallbacks(identities, endpoints)
        share = limit.within(_LINK_SHARE * limit.remaining())
        transports, outcomes, failure = _link(exchange, links, names, endpoints, share, failure)
    _judge(outcomes, failure)
    return Connected(
        transports,
        names,
        host_numbers(identities),
        transport_inside(identities),
        ranks_per_core(identities),
        identities[0].tuning,
    )


def _link(
    exchange: Exchange,
    links: Links | None,
    names: Sequence[str],
    endpoints: Sequence[Mapping[str, Any]],
    deadline: Deadline,
    failure: errors.PycollError | None,
) -> tuple[list[Any], list[dict[str, Any]], errors.PycollError | None]:
    """The last two rounds: transports, what every rank told in the end, why this one failed."""
    transports: list[Any] = []
    unreached: dict[int, str] = {}
    if any("error" in other for other in endpoints):
        links = None
    if links is not None:
        try:
            unreached = links.dial(endpoints, deadline, exchange.check)
        except (errors.PycollError, OSError) as error:
            failure = _alarmed(exchange, error)
    try:
        rows = _unreached(_gather(exchange, {"unreached": unreached}, failure))
        if any(rows):
            failure = failure or unreachable(names, rows)
        if links is not None and failure is None:
            try:
                transports = links.finish(endpoints, deadline, exchange.check)
            except (errors.PycollError, OSError) as error:
                failure = _alarmed(exchange, error)
        outcomes = _gather(exchange, {}, failure)
    except errors.PycollError as error:
        # An alarm has ended the meeting for all; our own reason says more.
        raise failure or error from None
    if failure is not None or any("error" in outcome for outcome in outcomes):
        transports = []
    return transports, outcomes, failure


def _unreached(told: Sequence[Mapping[str, Any]]) -> list[dict[int, str]]:
    rows = (outcome.get("unreached", {}) for outcome in told)
    return [{int(peer): str(why) for peer, why in row.items()} for row in rows]


def _brought(
    rank: int, config: Config, bring: Bring | None
) -> tuple[str, errors.PycollError | None]:
    """What this rank has to tell, and why it must not join, if so."""
    if rank != 0 or bring is None:
        return "", None
    try:
        return bring(config), None
    except errors.PycollError as error:
        return "", error


def _verbs_port(config: Config) -> tuple[Port | None, str]:
    """The RDMA port of this rank, or why it has none."""
    if "verbs" not in config.transports:
        return None, ""
    missing = str(importlib.import_module("pycoll._core").verbs_missing())
    if missing:
        return None, f"verbs: {missing}"
    try:
        return choose_port(config, config.local_rank or 0), ""
    except errors.TransportError as error:
        return None, str(error)


def _tell_of_fallbacks(
    identities: Sequence[Identity], endpoints: Sequence[Mapping[str, Any]]
) -> None:
    """Warn, in one line for all ranks, where pairs use tcp because one end could not use verbs."""
    if any("error" in endpoint for endpoint in endpoints):
        return  # that is what will be told
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
                stacklevel=3,
            )
            return


def sit_out(all_gather: Callable[[bytes], Sequence[bytes]]) -> None:
    """For a parent's rank that joins no group while others split: its share of the rounds."""
    for _ in range(ROUNDS):
        all_gather(b"")


def _gather(
    exchange: Exchange, facts: dict[str, Any], failure: errors.PycollError | None
) -> list[dict[str, Any]]:
    told = {"error": str(failure)} if failure is not None else facts
    return [json.loads(data) for data in exchange.all_gather(json.dumps(told).encode())]


def _alarmed(exchange: Exchange, error: errors.PycollError | OSError) -> errors.PycollError:
    """Tell the others at once, who may be waiting for this rank."""
    failure = _as_error(error)
    exchange.alarm(_with_rank(exchange.rank, str(failure)))
    return failure


def _with_rank(rank: int, text: str) -> str:
    return text if text.startswith(f"rank {rank} ") else f"rank {rank} failed to join: {text}"


def _as_error(error: errors.PycollError | OSError) -> errors.PycollError:
    if isinstance(error, errors.PycollError):
        return error
    advice = " (raise the limit, ulimit -n)" if error.errno in (23, 24) else ""
    return errors.TransportError(f"{error.strerror or error}{advice}", operation="init")


def _judge(outcomes: Sequence[Mapping[str, Any]], own: errors.PycollError | None) -> None:
    """Raise if any rank failed: the rank's own error, or one that tells of the others'."""
    if own is not None:
        raise own
    failed = [r for r, outcome in enumerate(outcomes) if "error" in outcome]
    if not failed:
        return
    told = "; ".join(_with_rank(r, outcomes[r]["error"]) for r in failed[:4])
    more = f"; and {len(failed) - 4} ranks more" if len(failed) > 4 else ""
    raise errors.TransportError(
        f"{told}{more}",
        rank=failed[0] if len(failed) == 1 else None,
        ranks=failed,
        operation="init",
    )
