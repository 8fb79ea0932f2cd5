"""A rank's mailbox for the agreements of its communicator: one message per connection.

Each rank listens from the moment it joins until its communicator ends. It has an abstract unix
socket for the ranks of its machine, and a TCP port for those of other machines. A rank reads its
sockets only while it shrinks, and has no thread for them. A refused connection proves that the rank
is gone: its process has ended, or it has left the communicator. The system of a rank that is
stopped, or does not shrink yet, still accepts connections.

A message is an HMAC-SHA256 by the communicator's key and a JSON object; the end of the connection
ends it. Messages may be lost, doubled or late, and the state machines expect that.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pycoll import errors
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.discovery.network import (
    abstract_name,
    interfaces,
    listen_in_range,
    listen_unix,
    tcp_socket,
)
from pycoll.bootstrap.forks import end_with_process
from pycoll.config import Config
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    # Ranks of one host use no networks, so they do not pay for this import.
    from pycoll.bootstrap.dial import Candidate

_MAC_BYTES = 32
#: Longest message. One that lists 4096 ranks has about 24 KiB.
_MESSAGE_BYTES_MAX = 256 * 1024
#: Seconds that one message may take from the connection to its end.
_MESSAGE_S = 2.0
#: Connections that are read at once; the oldest one gives way. It bounds the descriptors that
#: strangers can take.
_READ_MAX = 64
#: Connections under way to one rank, and in all; further messages are lost.
_SENT_MAX = 4
_LETTERS_MAX = 256
_FACTS = {"from": int, "to": int, "text": dict}

#: An event: a rank, and its message or None for a rank that is gone.
Event = tuple[int, "dict[str, Any] | None"]


class _Letter:
    """A connection under way. ``peer`` is -1 for one that is read; ``place`` is the index of the
    peer's address."""

    def __init__(self, sock: socket.socket, peer: int, data: bytes, place: int = 0) -> None:
        self.sock = sock
        self.peer = peer
        self.place = place
        self.data = bytearray(data)
        self.until = time.monotonic() + _MESSAGE_S


class Post:
    """The mailbox of rank ``rank`` among ``identities``. One thread at a time uses it.

    Raises OSError if the system gives no socket.
    """

    def __init__(self, key: bytes, rank: int, identities: Sequence[Identity]) -> None:
        self.key = key
        self._rank = rank
        mine = identities[rank].machine
        #: By rank: (family, address) of its mailbox; none for a rank that offers none. The address
        #: of a unix socket is None: `_name` computes it for each message, since most mailboxes
        #: never send one.
        self._targets: list[list[tuple[int, Any]]] = [
            [(int(socket.AF_UNIX), None)] if identity.machine == mine else []
            for identity in identities
        ]
        #: By rank: how many of the addresses prove that it is gone if all of these refuse: those in
        #: networks of this rank, which come first, or all if none is.
        self._proving = [len(targets) for targets in self._targets]
        #: By rank: the addresses that refused a connection, and the one to try next.
        self._refused: list[set[int]] = [set() for _ in identities]
        self._next = [0] * len(identities)
        self._listeners = [listen_unix(self._name(rank))]
        self._listeners[0].setblocking(False)
        self._letters: dict[int, _Letter] = {}
        self._events: deque[Event] = deque()
        self._selector: selectors.BaseSelector | None = None

    @property
    def is_open(self) -> bool:
        """Whether the mailbox has not been closed, by its owner or by a fork."""
        return self._listeners[0].fileno() >= 0

    def open_network(self, config: Config) -> list[Candidate]:
        """Listen for ranks on other machines. Return the addresses, for ``take_addresses``; none
        if no port is free."""
        from pycoll.bootstrap.dial import Candidate

        try:
            listener = listen_in_range(None, config.port_range)
        except errors.TransportError:
            return []
        listener.setblocking(False)
        self._listeners.append(listener)
        port = int(listener.getsockname()[1])
        return [
            Candidate(one.address, one.network, port)
            for one in interfaces(config.interfaces)
            if listener.family == socket.AF_INET6 or ":" not in one.address
        ]

    def take_addresses(self, config: Config, offers: Sequence[Sequence[Any]]) -> None:
        """Take what ``open_network`` returned on each rank, in rank order."""
        from pycoll.bootstrap.dial import Candidate, order_candidates
        from pycoll.bootstrap.rendezvous.meeting import targets_of

        mine = interfaces(config.interfaces)
        networks = {interface.network for interface in mine}
        for rank, offered in enumerate(offers):
            if not self._targets[rank]:
                candidates = [Candidate(*facts) for facts in offered]
                usable = order_candidates(mine, candidates, False)
                near = sum(one.network in networks for one in usable)
                self._targets[rank] = targets_of(usable)
                self._proving[rank] = near or len(usable)

    def begin(self) -> None:
        """Prepare to send and to read."""
        self._selector = selectors.DefaultSelector()
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)

    def end(self) -> None:
        """Stop sending and reading; the mailbox goes on to accept."""
        for letter in list(self._letters.values()):
            self._drop(letter)
        if self._selector is not None:
            self._selector.close()
            self._selector = None

    def close(self) -> None:
        """Close the mailbox: for the other ranks, this rank is gone from now on."""
        self.end()
        for listener in self._listeners:
            listener.close()

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send a message. It is lost if too many are under way, or the system gives no socket."""
        targets = self._targets[rank]
        under_way = sum(letter.peer == rank for letter in self._letters.values())
        if not targets or under_way >= _SENT_MAX or len(self._letters) >= _LETTERS_MAX:
            return
        body = json.dumps({"from": self._rank, "to": rank, "text": message}).encode()
        data = hmac.digest(self.key, body, "sha256") + body
        place = self._next[rank] % len(targets)
        family, address = targets[place]
        try:
            sock = (
                socket.socket(socket.AF_UNIX)
                if family == socket.AF_UNIX
                else tcp_socket(str(address[0]))
            )
        except OSError:
            return
        letter = _Letter(end_with_process(sock), rank, data, place)
        sock.setblocking(False)
        try:
            sock.connect(self._name(rank) if address is None else address)
            # Only a unix socket connects at once. Its peer's system takes the whole message or,
            # with a full backlog or buffer, nothing that counts.
            sock.send(data)
        except BlockingIOError:
            if family != socket.AF_UNIX and self._selector is not None:
                self._letters[sock.fileno()] = letter
                self._selector.register(sock, selectors.EVENT_WRITE)
                return
        except OSError as error:
            self._note_unreached(letter, error)
        sock.close()

    def poll(self, timeout_s: float) -> list[Event]:
        """Move what can be moved, for ``timeout_s`` at most, and return what has happened."""
        assert self._selector is not None
        wait_s = 0.0 if self._events else timeout_s
        for key, _ in self._selector.select(wait_s):
            letter = self._letters.get(key.fd)
            if letter is None:
                self._accept(next(one for one in self._listeners if one.fileno() == key.fd))
            elif letter.peer < 0:
                self._read(letter)
            else:
                self._write(letter)
        now = time.monotonic()
        for letter in [one for one in self._letters.values() if one.until <= now]:
            if letter.peer >= 0:
                self._next[letter.peer] += 1
            self._drop(letter)
        found = list(self._events)
        self._events.clear()
        return found

    def _name(self, rank: int) -> str:
        text = hmac.digest(self.key, b"pycoll post\0" + rank.to_bytes(4, "little"), "sha256")
        return abstract_name(text.hex()[:40])

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        end_with_process(sock).setblocking(False)
        reading = [letter for letter in self._letters.values() if letter.peer < 0]
        if len(reading) >= _READ_MAX:
            self._drop(reading[0])
        assert self._selector is not None
        self._letters[sock.fileno()] = _Letter(sock, -1, b"")
        self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, letter: _Letter) -> None:
        try:
            piece = letter.sock.recv(64 * 1024)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        letter.data += piece
        if piece and len(letter.data) <= _MESSAGE_BYTES_MAX:
            return
        self._drop(letter)
        if not piece:
            self._take(bytes(letter.data))

    def _take(self, data: bytes) -> None:
        """Note a message. Bytes that no rank of the communicator wrote are ignored."""
        proof, body = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if not hmac.compare_digest(proof, hmac.digest(self.key, body, "sha256")):
            return
        with contextlib.suppress(ValueError):
            facts = json_object(read_json(body), _FACTS)
            if facts["to"] == self._rank and 0 <= facts["from"] < len(self._targets):
                self._events.append((facts["from"], facts["text"]))

    def _write(self, letter: _Letter) -> None:
        failure = letter.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failure:
            self._drop(letter)
            self._note_unreached(letter, OSError(failure, ""))
            return
        self._refused[letter.peer].clear()
        try:
            del letter.data[: letter.sock.send(letter.data)]
        except BlockingIOError:
            return
        except OSError:
            letter.data.clear()
        if not letter.data:
            self._drop(letter)

    def _note_unreached(self, letter: _Letter, error: OSError) -> None:
        """Note a failed connection; see ``_proving``."""
        rank = letter.peer
        self._next[rank] = letter.place + 1
        if error.errno == errno.ECONNREFUSED:
            self._refused[rank].add(letter.place)
        if set(range(self._proving[rank])) <= self._refused[rank]:
            self._events.append((rank, None))

    def _drop(self, letter: _Letter) -> None:
        if self._selector is not None:
            self._selector.unregister(letter.sock)
        del self._letters[letter.sock.fileno()]
        letter.sock.close()
