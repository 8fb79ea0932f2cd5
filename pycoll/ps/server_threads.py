"""A server at work: a thread for each connection hands messages to the machine and sends answers.

The threads wait in native code, without the interpreter's lock. One lock guards the machine; it is
also held while its messages are given to the connections, so that these keep the machine's order.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

from pycoll import _core
from pycoll.errors import PycollError
from pycoll.ps.messages import MANAGER, Kind, Message
from pycoll.ps.server_links import Link
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.status import StatusSocket
from pycoll.ps.views import ViewManager

#: Seconds after which an idle thread looks whether the server has ended.
_LOOK_S = 0.25


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
        out = self._machine.out.copy()
        self._machine.out.clear()
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
    """Runs the view manager, with a thread for each server.

    ``links``: a connection of its own to each server. ``name``: the store's.
    """

    def __init__(self, manager: ViewManager, links: dict[int, Link], name: str) -> None:
        self.name = name
        self._manager = manager
        self._links = links
        self._alive = dict(links)
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=one, name="pycoll-views", daemon=True)
            for one in links.items()
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: int, link: Link) -> None:
        # A thread that looks often would take the core from the worker's own calls.
        _core.work_in_background()
        while not self._closed:
            try:
                message = link.receive(_LOOK_S, _no_place)
                if message is not None:
                    with self._lock:
                        self._manager.hear(server, message)
                        self._send()
            except (PycollError, ValueError):
                with self._lock:
                    del self._alive[server]
                    if not self._closed:
                        self._manager.lose(server)
                        self._send()
                return

    def _send(self) -> None:
        out, self._manager.out[:] = list(self._manager.out), []
        for server, message in out:
            try:
                if server in self._alive:
                    self._alive[server].send(message)
            except PycollError:
                # The thread of that connection finds the same error.
                continue

    def drain(self, server: int) -> None:
        """Begin to give the shards of a server to others; any thread may call this."""
        with self._lock:
            self._manager.drain(server)
            self._send()

    def add(self, server: int) -> bool:
        """Let a drained server hold shards again; return whether it can. Any thread may call
        this."""
        with self._lock:
            is_drained = server in self._alive and server in self._manager.leaving
            if is_drained:
                self._manager.add(server)
                self._send()
            return is_drained

    def close(self) -> None:
        """End the manager; servers that die from now on are not replaced."""
        with self._lock:
            self._closed = True
        # Threads that wait at a connection wake up when it closes.
        for link in self._links.values():
            link.close()
        for thread in self._threads:
            thread.join()
