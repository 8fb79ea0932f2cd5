"""Lets new ranks into a communicator: rank 0 opens a place where the old and the new ones meet."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Generator

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.joining import Joined, connect_and_close
from pycoll.bootstrap.rendezvous.exchange import Exchange
from pycoll.bootstrap.rendezvous.meeting import Meeting, offer
from pycoll.bootstrap.rendezvous.store import serve_store
from pycoll.bootstrap.rendezvous.tickets import JOB, make_ticket, meet_at
from pycoll.config import Config


class Opened:
    """The place at which rank 0 receives the new ranks, until it has served a store there."""

    def __init__(self, listener: socket.socket, meeting: Meeting) -> None:
        self.listener = listener
        self.meeting = meeting

    def tickets(self, size: int, count: int) -> list[str]:
        """Return the tickets of ``count`` ranks that follow ``size`` ranks. Each one is secret."""
        return [make_ticket(size + one, size + count, self.meeting) for one in range(count)]


@contextlib.contextmanager
def open_place(config: Config) -> Generator[Opened]:
    """Open a place for new ranks, and close it at the end.

    Raises TransportError if this rank can listen nowhere.
    """
    with listen_in_range(None, config.port_range) as listener:
        yield Opened(listener, offer(config, listener))


def join_grown(
    place: Opened | None,
    told: bytes,
    rank: int,
    size: int,
    config: Config,
    tuning: str,
    deadline: Deadline,
) -> Joined:
    """Connect rank ``rank`` of the old communicator to the ``size`` ranks of the new one.

    ``place``: rank 0's; None on the other ranks, which have its meeting as ``told``. Raises the
    errors of joining; a TimeoutError names the new ranks that did not come.
    """
    exchange: Exchange
    if place is not None:
        # The store owns its listener, and the caller closes the other one.
        secret = place.meeting.secret
        exchange = serve_store(place.listener.dup(), "grow", secret, JOB, size, deadline)
    else:
        exchange = meet_at(Meeting.from_bytes(told), rank, size, config, deadline)
    connected = connect_and_close(exchange, config, "world", deadline, bring=lambda _: tuning)
    return Joined(rank, size, *connected, "grow")
