"""The side of a process that joins a running store: admission by a server, and connections."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from pycoll import __version__
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of, offer
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.config import Config
from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError, TimeoutError
from pycoll.ps.membership.join_listener import rendezvous_name
from pycoll.ps.membership.newcomer_links import StoreContext, purpose_of
from pycoll.ps.membership.newcomers import VERSION, Newcomer, read_ticket
from pycoll.ps.server_links import Connector, Link
from pycoll.ps.views import View
from pycoll.untrusted import json_object, read_json

#: The members of a server's answer to a newcomer. ``servers`` and ``workers``: the running ones;
#: ``gone``: the workers that have left.
_ADMISSION = {
    "refused": str,
    "newcomer": str,
    "view": str,
    "servers": list,
    "workers": list,
    "gone": list,
    "terms": list,
    "tuning": str,
    "oversubscription": float,
    "silence_s": int,
}
#: The longest pause, in seconds, before a process retries while another newcomer meets the server.
_RETRY_MAX_S = 0.2


class JoinRequest(NamedTuple):
    """The request of a process: to serve, or to work as ``rank``, -1 for a new worker.

    ``replicas`` and ``consistency``: the terms that it expects; -1 and empty for any.
    """

    serves: bool
    rank: int = -1
    replicas: int = -1
    consistency: str = ""


class JoinedStore(NamedTuple):
    """The store that this process has joined. ``links``: connections by the rank of the peer."""

    newcomer: Newcomer
    view: View
    servers: list[int]
    workers: list[int]
    gone: list[int]
    context: StoreContext
    links: dict[int, Link]


@contextlib.contextmanager
def join_store(ticket: Any, request: JoinRequest, config: Config) -> Iterator[JoinedStore]:
    """Join the store of a ticket, and yield it. An error inside the block closes the connections.

    Raises InvalidArgumentError for a wrong ticket and where the store refuses this process. Raises
    TimeoutError where the store has ended, or one of its processes has not connected in time.
    """
    name, text = read_ticket(ticket)
    try:
        meeting = Meeting.from_bytes(text.encode())
    except ValueError as error:
        raise InvalidArgumentError(f"the ticket of store {name} names no place: {error}") from None
    limit = Deadline(config.init_timeout_s)
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(listen_in_range(None, config.port_range))
        own = offer(config, listener, b"")
        admission = _request_admission(name, meeting, _encode_request(request, own), config, limit)
        newcomer = Newcomer.from_bytes(admission["newcomer"].encode())
        connector = Connector(
            newcomer.rank,
            config._replace(server_silence_s=admission["silence_s"]),
            meeting.secret,
            admission["tuning"],
            admission["oversubscription"],
            {newcomer.rank: own},
        )
        workers = admission["workers"] if newcomer.serves else []
        links: dict[int, Link] = {}
        for peer in [*admission["servers"], *workers]:
            links[peer] = _connect(connector, newcomer, peer, listener, limit)
            undo.callback(links[peer].close)
        view = View.from_bytes(admission["view"].encode())
        context = StoreContext(name, admission["terms"], connector._replace(meetings={}))
        members = admission["servers"], admission["workers"], admission["gone"]
        yield JoinedStore(newcomer, view, *members, context, links)
        undo.pop_all()
        listener.close()


def _encode_request(request: JoinRequest, own: Meeting) -> bytes:
    newcomer = Newcomer(0, request.rank, request.serves, own.to_bytes().decode())
    facts = {
        "version": VERSION,
        "package": __version__,
        "newcomer": newcomer.to_bytes().decode(),
        "replicas": request.replicas,
        "consistency": request.consistency,
    }
    return json.dumps(facts).encode()


def _request_admission(
    name: str, meeting: Meeting, request: bytes, config: Config, limit: Deadline
) -> dict[str, Any]:
    """Send the request to a server, and return its answer."""
    job = rendezvous_name(name)
    while True:
        address = address_of(meeting, config)
        try:
            exchange = StoreExchange(address, meeting.secret, job, 1, 2, limit)
        except TimeoutError as error:
            raise TimeoutError(
                f"no server of store {name} answers within {limit.seconds:g} s: the store has "
                f"ended, or the server that gave the ticket; take a new ticket ({error})",
                operation="ps",
            ) from None
        try:
            exchange.all_gather(request)
            answer = read_json(exchange.all_gather(b"{}")[0])
            exchange.close()
        except PycollError:
            # The server serves another newcomer now.
            exchange.abandon()
            if limit.passed():
                raise
            time.sleep(min(random.random() * _RETRY_MAX_S, limit.remaining()))
            continue
        if isinstance(answer, dict) and set(answer) == {"refused"}:
            raise InvalidArgumentError(
                f"store {name} does not let this process in: {answer['refused']}", operation="ps"
            )
        return json_object(answer, _ADMISSION)


def _connect(
    connector: Connector, newcomer: Newcomer, peer: int, listener: socket.socket, limit: Deadline
) -> Link:
    try:
        comm = connector.link(connector.rank, peer, purpose_of(newcomer), listener, limit)
    except PycollError as error:
        text = f"with this process, which joins as rank {connector.rank}: {error}"
        if isinstance(error, PeerLostError):
            error.args = (
                f"rank {peer} of the store has ended before it connected {text}; start it again",
            )
        else:
            error.args = (
                f"rank {peer} of the store has not connected {text}; a worker connects in its next "
                "call",
            )
        raise
    return Link(comm, peer)
