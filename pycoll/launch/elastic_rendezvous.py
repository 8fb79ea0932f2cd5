"""The launcher's end of the elastic rendezvous: it forms the worlds of an elastic job."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
from collections.abc import Callable, Sequence

from pycoll.bootstrap.discovery.network import (
    abstract_name,
    listen_tcp,
    listen_unix,
    peer_of,
)
from pycoll.bootstrap.discovery.torch_variables import Meeting
from pycoll.bootstrap.rendezvous.elastic_worker import LINE_BYTES_MAX
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.untrusted import json_object, read_json


class ElasticRendezvous:
    """Knows which members ask for a place and which members have one.

    Its callbacks run in the owner's selector and thread; the store of each world has its own
    thread. ``asking`` are the members that wait for an answer. ``ranks`` maps the members of the
    last world to their ranks; some of them may have left since.
    """

    def __init__(self, selector: selectors.BaseSelector, secret: str, job_id: str) -> None:
        self.name = f"{job_id}-elastic"
        self.asking: set[int] = set()
        self.ranks: dict[int, int] = {}
        self._selector, self._secret, self._job_id = selector, secret, job_id
        self._pids: dict[int, int] = {}
        self._lines: dict[int, socket.socket] = {}
        self._worlds = 0
        self._told = False
        self._refusal = ""
        self._store: StoreServer | None = None
        self._meeting: Meeting | None = None
        self._listener = listen_unix(abstract_name(self.name))
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def in_order(self, members: Sequence[int]) -> list[int]:
        """Sort members: first those of the last world by their ranks there, since its rank 0 has a
        state, then the others by number."""
        last = len(self.ranks)
        return sorted(members, key=lambda one: (self.ranks.get(one, last), one))

    def forget(self, member: int) -> None:
        """Forget a member that has ended; its number may be used again for another process."""
        self.asking.discard(member)
        self.ranks.pop(member, None)
        self._close_line(member)

    def form(self, members: Sequence[int]) -> None:
        """Form a world of ``members``, which all ask, and answer them. Other members that ask keep
        waiting."""
        self._worlds += 1
        job_id = f"{self._job_id}-{self._worlds}"
        address = self._serve(len(members), job_id)
        torch = self._meet()
        pids = [self._pids[member] for member in members]
        self.ranks = {member: rank for rank, member in enumerate(members)}
        self._told = False
        for member, rank in self.ranks.items():
            self.asking.discard(member)
            place = {"rank": rank, "size": len(members), "address": address, "job_id": job_id}
            self._tell(member, json.dumps({**place, "pids": pids, "torch": torch}))

    def ask_anew(self) -> None:
        """Tell the members of the world to ask again when their program can. Done once per
        world."""
        if not self._told:
            self._told = True
            for member in self.ranks:
                if member not in self.asking:
                    self._tell(member, "changed")

    def refuse(self, reason: str) -> None:
        """Form no further world: every member that asks, now or later, gets ``reason``."""
        self._refusal = reason
        for member in list(self.asking):
            self._answer_refusal(member)

    def _answer_refusal(self, member: int) -> None:
        self.asking.discard(member)
        self._tell(member, json.dumps({"refused": self._refusal}))

    def close(self) -> None:
        """Close all connections, the store and the reserved port."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for member in list(self._lines):
            self._close_line(member)
        if self._store is not None:
            self._store.close()
        if self._meeting is not None:
            self._meeting.close()

    def _serve(self, size: int, job_id: str) -> str:
        """Start the store of a new world and return its address, empty for a world of one. The
        store of the previous world is closed."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if size == 1:
            return ""
        try:
            listener = listen_tcp("127.0.0.1")
        except OSError:
            listener = listen_tcp("::1")
        host, port = listener.getsockname()[:2]
        key = self._secret.encode()
        self._store = StoreServer(listener, size, key, job_id, "pycoll run")
        self._store.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _meet(self) -> tuple[str, int]:
        """Reserve the host and port where torch's ranks of the world meet."""
        if self._meeting is not None:
            self._meeting.close()
        self._meeting = Meeting()
        return self._meeting.host, self._meeting.port

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
                self._asked(sock, bytes(data))
                data.clear()

        return read

    def _asked(self, sock: socket.socket, question: bytes) -> None:
        try:
            words = json_object(read_json(question), {"member": int, "pid": int})
        except ValueError:
            self._lose(sock)
            return
        member, pid = words["member"], words["pid"]
        if self._lines.get(member) is not sock:
            self._close_line(member)
        self._lines[member], self._pids[member] = sock, pid
        self.asking.add(member)
        if self._refusal:
            self._answer_refusal(member)

    def _lose(self, sock: socket.socket) -> None:
        for member, line in list(self._lines.items()):
            if line is sock:
                self.asking.discard(member)
                self._close_line(member)
                return
        self._selector.unregister(sock)
        sock.close()

    def _close_line(self, member: int) -> None:
        line = self._lines.pop(member, None)
        if line is not None:
            self._selector.unregister(line)
            line.close()

    def _tell(self, member: int, text: str) -> None:
        line = self._lines.get(member)
        if line is not None:
            # If the send fails, the member has ended, and the reader or the launcher notices it.
            with contextlib.suppress(OSError):
                line.sendall(text.encode() + b"\n")
