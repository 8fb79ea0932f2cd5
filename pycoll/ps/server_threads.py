"""A server at work: a thread for each connection hands messages to the machine and sends answers.

The threads wait in native code, without the interpreter's lock. One lock guards the machine; it is
also held while its messages are given to the connections, so that these keep the machine's order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from typing import Any

from pycoll.errors import PycollError
from pycoll.ps.messages import MANAGER, Kind, Message
from pycoll.ps.server_links import Link
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.status import StatusSocket
from pycoll.ps.views import ViewManager

#: Seconds after which an idle thread looks whether the server has ended.
_LOOK_S = 0.25
#: Seconds between two looks of the view manager at a connection.
_MANAGER_LOOK_S = 0.02


class ServerThreads:
    """Runs a server. ``links``: its connections by the rank of the peer, and MANAGER's.

    ``name``: the store's, the same on all its servers.
    """

    def __init__(self, machine: ServerMachine, links: dict[int, Link], name: str) -> None:
        self._machine = machine
        self._links = links
        self._name = name
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._closed = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Serve until all workers have left. Raises the error that ends the server earlier."""
        threads = [
            threading.Thread(target=self._serve, args=(link,), name="pycoll-store", daemon=True)
            for link in self._links.values()
        ]
        for thread in threads:
            thread.start()
        status = StatusSocket(self._status)
        try:
            with self._ended:
                while self._machine.workers and self._failure is None:
                    self._ended.wait()
                self._closed = True
        finally:
            self._closed = True
            status.close()
            for thread in threads:
                thread.join()
            for link in self._links.values():
                link.close()
        if self._failure is not None:
            raise self._failure

    def _status(self) -> dict[str, Any]:
        with self._lock:
            return {"store": self._name, "pid": os.getpid(), **self._machine.stats()}

    def _serve(self, link: Link) -> None:
        try:
            while not self._closed:
                try:
                    message = link.receive(_LOOK_S, _no_place)
                except PycollError:
                    # The peer is gone, or sent what no peer sends: for the store that is the same.
                    self._lose(link)
                    return
                if message is not None:
                    self._take(link, message)
        except BaseException as error:
            with self._ended:
                self._failure = error
                self._ended.notify_all()

    def _take(self, link: Link, message: Message) -> None:
        with self._ended:
            # Answers that have been sent release their bytes, so that pushes change them in place.
            with contextlib.suppress(PycollError):
                link.tidy()
            self._machine.hear(link.peer, message)
            self._send()
            if message.kind is Kind.BYE:
                self._ended.notify_all()

    def _lose(self, link: Link) -> None:
        with self._ended:
            if self._links.get(link.peer) is link:
                self._machine.lose(link.peer)
                if link.peer == MANAGER:
                    told = Message(Kind.UNMANAGED)
                    self._machine.out += [(one, told) for one in sorted(self._machine.workers)]
            self._send()
            self._ended.notify_all()

    def _send(self) -> None:
        out, self._machine.out[:] = list(self._machine.out), []
        for peer, message in out:
            link = self._links.get(peer)
            try:
                if link is not None:
                    link.send(message)
            except PycollError:
                # The thread of that connection finds the same error.
                continue


def _no_place(message: Message, nbytes: int) -> None:
    return None


class ManagerThread:
    """Runs the view manager. ``links``: a connection of its own to each server."""

    def __init__(self, manager: ViewManager, links: dict[int, Link]) -> None:
        self._manager = manager
        self._links = links
        self._closed = threading.Event()
        self._draining: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, name="pycoll-views", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        alive = dict(self._links)
        while alive and not self._closed.is_set():
            while self._draining:
                self._manager.drain(self._draining.popleft())
                self._send(alive)
            for server, link in list(alive.items()):
                try:
                    message = link.receive(_MANAGER_LOOK_S / len(alive), _no_place)
                    if message is not None:
                        self._manager.hear(server, message)
                except (PycollError, ValueError):
                    del alive[server]
                    self._manager.lose(server)
                self._send(alive)

    def _send(self, alive: dict[int, Link]) -> None:
        out, self._manager.out[:] = list(self._manager.out), []
        for server, message in out:
            try:
                if server in alive:
                    alive[server].send(message)
            except PycollError:
                # The next look at that connection finds the same error.
                continue

    def drain(self, server: int) -> None:
        """Begin to give the shards of a server to others; any thread may call this."""
        self._draining.append(server)

    def close(self) -> None:
        """End the manager; servers that die from now on are not replaced."""
        self._closed.set()
        self._thread.join()
        for link in self._links.values():
            link.close()
