"""A server at work: a thread for each connection hands messages to the machine and sends answers.

The threads wait in native code, without the interpreter's lock. One lock guards the machine; it is
also held while its messages are given to the connections, so that these keep the machine's order.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from typing import Any

from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.ps.messages import Kind, Message
from pycoll.ps.server_links import Link, has_ended
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.status import CommandSocket, StatusSocket
from pycoll.ps.views import is_done, refusal_to_add, refusal_to_drain

#: Seconds after which an idle thread looks whether the server has ended.
_LOOK_S = 0.25
#: Seconds after which a wish is told again to the view manager, which may be gone.
_AGAIN_S = 0.2


class ServerThreads:
    """Runs a server. ``links``: its connections by the rank of the peer.

    ``name``: the store's, the same on all its servers. ``timeout_s``: the longest wait of a command
    of ``pycoll ps``, in seconds.
    """

    def __init__(
        self, machine: ServerMachine, links: dict[int, Link], name: str, timeout_s: float
    ) -> None:
        self._machine = machine
        self._links = links
        self._name = name
        self._timeout_s = timeout_s
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
        wishes = {"drain": Kind.DRAIN, "add": Kind.ADD}
        commands = CommandSocket(
            self._name, {word: functools.partial(self._wish, one) for word, one in wishes.items()}
        )
        try:
            with self._ended:
                while self._machine.workers and self._failure is None:
                    self._ended.wait()
                self._closed = True
        finally:
            self._closed = True
            status.close()
            commands.close()
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
                except PycollError as error:
                    # The peer is gone, or sent what no peer sends: for the store that is the same.
                    self._lose(link, has_ended(error))
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

    def _lose(self, link: Link, is_over: bool) -> None:
        with self._ended:
            self._machine.lose(link.peer, is_over)
            self._send()
            self._ended.notify_all()

    def _wish(self, kind: Kind, server: int) -> None:
        """Ask the view manager about a server, until a view says that it is done."""
        word = kind.name.lower()
        refusal_to = refusal_to_drain if kind is Kind.DRAIN else refusal_to_add
        with self._ended:
            if refusal := refusal_to(self._machine.view, server):
                raise InvalidArgumentError(refusal)
            until = time.monotonic() + self._timeout_s
            while not is_done(kind, server, self._machine.view):
                if self._closed or time.monotonic() > until:
                    raise TimeoutError(
                        f"{word} of server rank {server} has not ended within "
                        f"{self._timeout_s:g} s, or the store has ended",
                        rank=server,
                        operation="ps",
                    )
                self._machine.hear(self._machine.me, Message(kind, key=server))
                self._send()
                self._ended.wait(_AGAIN_S)

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
