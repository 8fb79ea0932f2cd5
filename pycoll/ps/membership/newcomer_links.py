"""The side of a store's processes when another one joins: they connect in the background."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.errors import PycollError
from pycoll.ps.membership.newcomers import Newcomer, make_ticket
from pycoll.ps.server_links import Connector, Link

#: Takes a connection to a newcomer, or None if it cannot be reached. A background thread calls it.
OnConnected = Callable[[Newcomer, "Link | None"], None]
#: Seconds of one attempt to report an end to a newcomer, and between two attempts.
_ATTEMPT_S, _RETRY_S = 2.0, 0.05


class StoreContext(NamedTuple):
    """An open store, as each of its processes knows it, and connections to its newcomers.

    ``name``: the same on all processes. ``terms``: in the form of a list. ``connector``: connects
    this process; its key is that of tickets, which authenticates newcomers.
    """

    name: str
    terms: list[Any]
    connector: Connector

    @property
    def timeout_s(self) -> float:
        """The longest wait of a call, in seconds."""
        return self.connector.config.timeout_s

    def ticket(self, address: bytes) -> str:
        """Return the ticket for a ``JoinListener`` at this address. The ticket is secret."""
        meeting = Meeting.from_bytes(address)._replace(secret=self.connector.key)
        return make_ticket(self.name, meeting.to_bytes().decode())

    def connect(self, newcomer: Newcomer, on_connected: OnConnected) -> None:
        """Connect with a newcomer in a thread of its own, which ends within ``init_timeout_s``."""
        args = (newcomer, on_connected)
        threading.Thread(target=self._connect, args=args, name="pycoll-new", daemon=True).start()

    def report_end(self, newcomer: Newcomer, ended: int, has_finished: Callable[[], bool]) -> None:
        """End a newcomer's wait for rank ``ended``, whose process is gone, in a thread of its own.

        ``has_finished``: returns whether the newcomer has ended all its connecting.
        """
        args = (newcomer, ended, has_finished)
        threading.Thread(
            target=self._abort_rendezvous, args=args, name="pycoll-new", daemon=True
        ).start()

    def _abort_rendezvous(
        self, newcomer: Newcomer, ended: int, has_finished: Callable[[], bool]
    ) -> None:
        """Enter the rendezvous in place of the ended process, and abort it."""
        job, key = self.connector.rendezvous_of(newcomer.rank, ended, purpose_of(newcomer))
        limit = Deadline(self.connector.config.init_timeout_s)
        while not has_finished() and not limit.passed():
            try:
                meeting = Meeting.from_bytes(newcomer.meeting.encode())
                address = address_of(meeting, self.connector.config)
                StoreExchange(address, key, job, 1, 2, limit.within(_ATTEMPT_S)).abandon()
                return
            except (PycollError, OSError, ValueError):
                # The newcomer connects with another process now, or is gone.
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
            # The newcomer has the same error, and the manager does not admit it.
            link = None
        on_connected(newcomer, link)


def purpose_of(newcomer: Newcomer) -> str:
    """Return the purpose of a newcomer's links, which differs from those of earlier processes."""
    return f"newcomer {newcomer.serial}"


def newcomer_key(key: bytes, name: str) -> bytes:
    """Return the key of a store's tickets. ``key``: the key of the communicator of the store."""
    return hmac.digest(key, f"newcomers of {name}".encode(), "sha256")
