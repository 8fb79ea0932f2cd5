"""Connections to newcomers, which the other processes of a store make in the background."""

from __future__ import annotations

import hmac
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.meeting import Meeting
from pycoll.errors import PycollError
from pycoll.ps.membership.newcomers import Newcomer, make_ticket
from pycoll.ps.server_links import Circle, Link

#: Takes a connection to a newcomer, or None where it cannot be reached. Another thread calls it.
Then = Callable[[Newcomer, "Link | None"], None]


class Home(NamedTuple):
    """A store as its processes know it. ``name``: the same on all of them; ``terms``: as a list.

    ``circle``: this process, with the key by which newcomers prove that they have a ticket.
    """

    name: str
    terms: list[Any]
    circle: Circle

    @property
    def timeout_s(self) -> float:
        """The longest wait of a call, in seconds."""
        return self.circle.config.timeout_s

    def ticket(self, place: bytes) -> str:
        """Return the ticket to an ``Entrance`` at this place. It is secret."""
        meeting = Meeting.from_bytes(place)._replace(secret=self.circle.key)
        return make_ticket(self.name, meeting.to_bytes().decode())

    def connect(self, newcomer: Newcomer, then: Then) -> None:
        """Connect with a newcomer in a thread of its own, which ends in bounded time."""
        args = (newcomer, then)
        threading.Thread(target=self._run, args=args, name="pycoll-new", daemon=True).start()

    def _run(self, newcomer: Newcomer, then: Then) -> None:
        link: Link | None = None
        try:
            meeting = Meeting.from_bytes(newcomer.meeting.encode())
            circle = self.circle._replace(meetings={newcomer.rank: meeting})
            limit = Deadline(circle.config.init_timeout_s)
            purpose = purpose_of(newcomer)
            comm = circle.link(newcomer.rank, circle.rank, purpose, None, limit)
            link = Link(comm, newcomer.rank)
        except (PycollError, OSError, ValueError):
            # The newcomer has the error, too, and is not let in.
            link = None
        then(newcomer, link)


def purpose_of(newcomer: Newcomer) -> str:
    """Return the word that tells the links of a newcomer from those of earlier processes."""
    return f"newcomer {newcomer.serial}"


def key_of_newcomers(key: bytes, name: str) -> bytes:
    """Return the key of a store's newcomers. ``key``: that of the communicator of the store."""
    return hmac.digest(key, f"newcomers of {name}".encode(), "sha256")
