"""A worker's connections to the servers: they carry requests, and callers wait for the answers.

Until the first asynchronous request, the waiting caller receives messages itself. From then on one
thread for each connection receives.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pycoll.errors import PycollError
from pycoll.ps.array_memory import Bytes
from pycoll.ps.client_machine import ClientMachine, Request
from pycoll.ps.membership.newcomer_links import StoreContext
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.messages import Kind, Message
from pycoll.ps.server_links import Link

#: Seconds that a caller waits at one connection before it polls the others, and that an idle thread
#: waits before it checks for the end.
_POLL_S = 0.05
_IDLE_POLL_S = 0.25
#: Seconds that a newcomer waits at one connection before it polls the next one.
_JOIN_POLL_S = 0.005


class WorkerLinks:
    """The connections, by server. Threads: any."""

    def __init__(
        self, machine: ClientMachine, links: dict[int, Link], context: StoreContext
    ) -> None:
        self.machine = machine
        #: Each change makes a new dictionary, so that readers need no lock.
        self._links = links
        self._context = context
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._receiving = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def transports(self) -> dict[int, str]:
        """The transport of each live connection."""
        return {server: link.transport for server, link in self._live_links()}

    def _live_links(self) -> list[tuple[int, Link]]:
        return [one for one in self._links.items() if one[0] not in self.machine.gone]

    def begin(
        self,
        message: Message,
        priority: int = 0,
        target: Any = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> Request:
        """Begin a request. The thread that receives the answer calls ``on_end``."""
        with self._lock:
            request = self.machine.add(message, priority, target, on_end)
            self._send()
            return request

    def begin_all(self, messages: Sequence[Message]) -> list[Request]:
        """Begin requests in one step: no request of another thread comes between them."""
        with self._lock:
            requests = [self.machine.add(message) for message in messages]
            self._send()
            return requests

    def ticket(self, address: bytes) -> str:
        """Return the ticket for the address at which a server meets newcomers."""
        return self._context.ticket(address)

    def ask_manager(self, kind: Kind, server: int) -> None:
        """Ask the view manager to DRAIN or ADD a server."""
        with self._lock:
            self.machine.ask_manager(kind, server)
            self._send()

    def _send(self) -> None:
        while self.machine.out:
            out = self.machine.out.copy()
            self.machine.out.clear()
            for server, message in out:
                try:
                    if server not in self.machine.gone:
                        self._links[server].send(message)
                except PycollError:
                    self.machine.lose(server)
        newcomers, self.machine.newcomers[:] = list(self.machine.newcomers), []
        for newcomer in newcomers:
            self._context.connect(newcomer, self._add_link)
        if self._threads:
            self._changed.notify_all()

    def _add_link(self, newcomer: Newcomer, link: Link | None) -> None:
        """Add the connection to a joining server; the thread that made it calls this method."""
        with self._lock:
            if link is None:
                self.machine.note_unreachable(newcomer)
                self._send()
                return
            if self._closed:
                link.close()
                return
            self._links = {**self._links, link.peer: link}
            self.machine.note_connected(newcomer)
            self._send()
            if self._threads:
                thread = self._thread(link.peer, link)
                self._threads.append(thread)
                thread.start()

    def wait_connected(self, deadline: float) -> bool:
        """On a newcomer: wait until all servers have connected with it.

        ``deadline``: a time of ``time.monotonic``. Returns False if it passes first.
        """
        with self._receiving:
            while self.machine.expected:
                if time.monotonic() > deadline:
                    return False
                for server, link in self._live_links():
                    self._receive(server, link, _JOIN_POLL_S)
        return True

    def _thread(self, server: int, link: Link) -> threading.Thread:
        return threading.Thread(
            target=self._run, args=(server, link), name="pycoll-store", daemon=True
        )

    def receive_in_threads(self) -> None:
        """Start the threads that receive from now on."""
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [self._thread(*one) for one in self._live_links()]
            for thread in self._threads:
                thread.start()

    def _run(self, server: int, link: Link) -> None:
        with self._receiving:
            pass  # Wait for the caller that receives messages itself.
        while not self._closed and server not in self.machine.gone:
            self._receive(server, link, _IDLE_POLL_S)

    def wait(self, requests: Sequence[Request], deadline: float) -> bool:
        """Wait until the requests have ended, or one has failed.

        ``deadline``: a time of ``time.monotonic``. Returns False if it passes first.
        """
        while not _have_ended(requests):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self._threads:
                with self._changed:
                    if not _have_ended(requests):
                        self._changed.wait(min(left, _IDLE_POLL_S))
            elif self._receiving.acquire(timeout=min(left, _POLL_S)):
                try:
                    self._receive_once(requests, min(left, _POLL_S))
                finally:
                    self._receiving.release()
        # The receiving thread holds the lock until it has called ``on_end``.
        with self._lock:
            return True

    def _receive_once(self, requests: Sequence[Request], timeout_s: float) -> None:
        """Receive from the server that should answer next; if it is silent, poll the others."""
        open_ones = [request for request in requests if not request.ended]
        if not open_ones or self._threads:
            return
        server = self.machine.answering_server(open_ones[0])
        if server is not None and self._receive(server, self._links[server], timeout_s):
            return
        for other, link in self._live_links():
            if other != server:
                self._receive(other, link, 0.0)
        if server is None:
            time.sleep(min(timeout_s, 0.002))

    def _receive(self, server: int, link: Link, timeout_s: float) -> bool:
        """Handle one message, or the loss of the connection; return False if there was neither."""
        try:
            message = link.receive(timeout_s, functools.partial(self._destination, server))
            if message is None:
                return False
            with self._lock:
                request = self.machine.find_request(message)
                is_second = request is not None and request.receiving_from not in (None, server)
                if not is_second or message.kind is Kind.HELD:
                    self.machine.handle(server, message)
                self._send()
            return True
        except PycollError:
            with self._lock:
                self.machine.lose(server)
                self.machine.resend_interrupted(server)
                self._send()
            return True

    def _destination(self, server: int, message: Message, nbytes: int) -> Bytes | None:
        """Return the caller's memory for an answer, or None.

        After a change of the view two servers may answer one request at once. The first answer that
        begins to arrive gets this memory, and ``_receive`` drops the other one.
        """
        with self._lock:
            request = self.machine.find_request(message)
            if request is None or message.kind is not Kind.VALUE:
                return None
            target: Bytes | None = request.target
            if target is None or target.nbytes != nbytes:
                return None
            if request.receiving_from not in (None, server):
                return None
            request.receiving_from = server
            return target

    def close(self) -> None:
        """Send BYE to the servers, and close the connections."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for server, _ in self._live_links():
                self.machine.out.append((server, Message(Kind.BYE)))
            self._send()
        for thread in self._threads:
            thread.join()
        for link in self._links.values():
            link.close()


def _have_ended(requests: Sequence[Request]) -> bool:
    over = True
    for request in requests:
        if request.failure:
            return True
        over = over and request.answer is not None
    return over
