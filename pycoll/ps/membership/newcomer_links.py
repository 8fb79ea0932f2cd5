"""Connections to newcomers, which the other processes of a store make in the background."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.meeting import Meeting, place_of
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.errors import PycollError
from pycoll.ps.membership.newcomers import Newcomer, make_ticket
from pycoll.ps.server_links import Connector, Link

#: Takes a connection to a newcomer, or None where it cannot be reached. Another thread calls it.
OnConnected = Callable[[Newcomer, "Link | None"], None]
#: Seconds of one attempt to tell a newcomer that a process has ended, and between two of them.
_ATTEMPT_S, _RETRY_S = 2.0, 0.05


class StoreContext(NamedTuple):
    """A store as its processes know it. ``name``: the same on all of them; ``terms``: as a list.

    ``connector``: this process, with the key by which newcomers prove that they have a ticket.
    """

    name: str
    terms: list[Any]
    connector: Connector

    @property
    def timeout_s(self) -> float:
        """The longest wait of a call, in seconds."""
        return self.connector.config.timeout_s

    def ticket(self, address: bytes) -> str:
        """Return the ticket to an ``JoinListener`` at this place. It is secret."""
        meeting = Meeting.from_bytes(address)._replace(secret=self.connector.key)
        return make_ticket(self.name, meeting.to_bytes().decode())

    def connect(self, newcomer: Newcomer, on_connected: OnConnected) -> None:
        """Connect with a newcomer in a thread of its own, which ends in bounded time."""
        args = (newcomer, on_connected)
        threading.Thread(target=self._connect, args=args, name="pycoll-new", daemon=True).start()

    def report_end(self, newcomer: Newcomer, ended: int, has_finished: Callable[[], bool]) -> None:
        """Let a newcomer wait no more for a process that has ended, in a thread of its own.

        ``has_finished``: whether the newcomer connects with nobody any more.
        """
        args = (newcomer, ended, has_finished)
        threading.Thread(
            target=self._abort_rendezvous, args=args, name="pycoll-new", daemon=True
        ).start()

    def _abort_rendezvous(
        self, newcomer: Newcomer, ended: int, has_finished: Callable[[], bool]
    ) -> None:
        """Come to the newcomer in place of the process that has ended, and go away at once."""
        job, key = self.connector.rendezvous_of(newcomer.rank, ended, purpose_of(newcomer))
        limit = Deadline(self.connector.config.init_timeout_s)
        while not has_finished() and not limit.passed():
            try:
                meeting = Meeting.from_bytes(newcomer.meeting.encode())
                where = place_of(meeting, self.connector.config)
                StoreExchange(where, key, job, 1, 2, limit.within(_ATTEMPT_S)).abandon()
                return
            except (PycollError, OSError, ValueError):
                # The newcomer connects with another process now, or has gone.
                time.sleep(_RETRY_S)

    def _connect(self, newcomer: Newcomer, on_connected: OnConnected) -> None:
        link: Link | None = None
        try:
            meeting = Meeting.from_bytes(newcomer.meeting.encode())
            connector = self.connector._replace(meetings={newcomer.rank: meeting})
            limit = Deadline(connector.config.init_timeout_s)
            purpose = purpose_of(newcomer)
            comm = connector.link(newcomer.rank, connector.rank, purpose, None, limit)
            link = Link(comm, newcomer.rank)
        except (PycollError, OSError, ValueError):
            # The newcomer has the error, too, and is not let in.
            link = None
        on_connected(newcomer, link)


def purpose_of(newcomer: Newcomer) -> str:
    """Return the word that tells the links of a newcomer from those of earlier processes."""
    return f"newcomer {newcomer.serial}"


def newcomer_key(key: bytes, name: str) -> bytes:
    """Return the key of a store's newcomers. ``key``: that of the communicator of the store."""
    return hmac.digest(key, f"newcomers of {name}".encode(), "sha256")
