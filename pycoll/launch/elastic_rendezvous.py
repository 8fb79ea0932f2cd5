"""The launcher's end of the elastic rendezvous: the connections to the ranks of its host.

Ranks ask here for a place in the next world (bootstrap/rendezvous/elastic_worker.py). The launcher
passes the questions on to node 0, which decides (elastic_jobs.py), and its orders back to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll.bootstrap.discovery.network import abstract_name, listen_unix, peer_of
from pycoll.bootstrap.discovery.torch_variables import Meeting
from pycoll.bootstrap.rendezvous.elastic_worker import LINE_BYTES_MAX
from pycoll.untrusted import json_object, read_json


class ElasticRendezvous:
    """Knows which ranks of this host ask for a place.

    Its callbacks run in the owner's selector and thread. ``tell`` gets the questions, as messages
    for node 0 (elastic_meeting.py). The number of a rank is that of elastic_jobs.py.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        name: str,
        tell: Callable[[dict[str, Any]], object],
    ) -> None:
        self.name = name
        self._selector, self._tell_job = selector, tell
        self._asking: set[int] = set()
        self._placed: set[int] = set()
        self._lines: dict[int, socket.socket] = {}
        self._refusal = ""
        #: The port where torch's ranks of the next world may meet, if rank 0 is here, and that of
        #: the last world.
        self._next: Meeting | None = None
        self._last: Meeting | None = None
        self._listener = listen_unix(abstract_name(name))
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def forget(self, number: int) -> None:
        """Forget a rank that has ended; its number may be used again for another process."""
        self._asking.discard(number)
        self._placed.discard(number)
        self._close_line(number)

    def form(
        self,
        world: Mapping[str, Any],
        places: Sequence[Sequence[int]],
        node: int,
        reach: Callable[[str], str],
    ) -> None:
        """Answer the ranks of this host that are in a new world. ``places`` are pairs of a rank's
        number and its rank in the world. ``reach`` returns the address of a host as seen from this
        one."""
        if self._last is not None:
            self._last.close()
        self._last, self._next = self._next, None
        self._placed = {number for number, _ in places}
        host, port = world["torch"]
        server = reach("")
        address = f"[{server}]" if ":" in server else server
        common = {
            "size": world["size"],
            "job_id": world["job_id"],
            "address": f"{address}:{world['port']}" if world["port"] else "",
            "processes": world["processes"],
            "torch": [reach(host), port],
        }
        for local_rank, (number, rank) in enumerate(places):
            self._asking.discard(number)
            own = {"rank": rank, "local": [local_rank, len(places), node]}
            self._tell(number, json.dumps({**common, **own}))

    def ask_anew(self) -> None:
        """Tell the ranks of the world to ask again when their program can."""
        for number in self._placed - self._asking:
            self._tell(number, "changed")

    def refuse(self, reason: str) -> None:
        """Answer every rank that asks, now or later, with ``reason``."""
        self._refusal = reason
        for number in list(self._asking):
            self._answer_refusal(number)

    def close(self) -> None:
        """Close all connections and the reserved ports."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for number in list(self._lines):
            self._close_line(number)
        for meeting in (self._next, self._last):
            if meeting is not None:
                meeting.close()

    def _answer_refusal(self, number: int) -> None:
        self._asking.discard(number)
        self._tell(number, json.dumps({"refused": self._refusal}))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if peer_of(sock)[1] != os.getuid():
            sock.close()
            return
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, self._reader(sock))

    def _reader(self, sock: socket.socket) -> Callable[[], None]:
        data = bytearray()

        def read() -> None:
            try:
                piece = sock.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                piece = b""
            data.extend(piece)
            if not piece or len(data) > LINE_BYTES_MAX:
                self._lose(sock)
            elif data.endswith(b"\n"):
                self._take_question(sock, bytes(data))
                data.clear()

        return read

    def _take_question(self, sock: socket.socket, question: bytes) -> None:
        try:
            words = json_object(read_json(question), {"worker": int, "pid": int})
        except ValueError:
            self._lose(sock)
            return
        number = words["worker"]
        if self._lines.get(number) is not sock:
            self._close_line(number)
        self._lines[number] = sock
        self._asking.add(number)
        if self._refusal:
            self._answer_refusal(number)
            return
        self._next = self._next or Meeting()
        self._tell_job({"rank": number, "asks": words["pid"], "torch_port": self._next.port})

    def _lose(self, sock: socket.socket) -> None:
        for number, line in list(self._lines.items()):
            if line is sock:
                if number in self._asking:
                    self._asking.discard(number)
                    self._tell_job({"rank": number, "silent": True})
                self._close_line(number)
                return
        self._selector.unregister(sock)
        sock.close()

    def _close_line(self, number: int) -> None:
        line = self._lines.pop(number, None)
        if line is not None:
            self._selector.unregister(line)
            line.close()

    def _tell(self, number: int, text: str) -> None:
        line = self._lines.get(number)
        if line is not None:
            # If the send fails, the rank has ended, which the reader or the launcher notices.
            with contextlib.suppress(OSError):
                line.sendall(text.encode() + b"\n")
