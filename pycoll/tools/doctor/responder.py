"""The server of a doctor: other doctors connect to it, ask for its clock and send it bytes.

A connection begins with the token of this doctor, which the doctors exchange where they meet. The
server proves that it knows the token too, so an address that belongs to another host is found out.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import threading
import time

from pycoll.bootstrap.discovery.network import listen_in_range

TOKEN_BYTES = 16
PROOF_BYTES = 16
#: Requests: the clock; bytes, whose number follows in 4 bytes.
CLOCK, BYTES = b"c", b"b"
CLOCK_REPLY = struct.Struct("<d")
LENGTH = struct.Struct("<I")
#: The reply after the last byte.
RECEIVED = b"."
#: Seconds that a connection may be silent.
SILENT_S = 10.0
#: Most connections at a time; further ones are closed.
_CONNECTIONS_MAX = 256
_PIECE_BYTES = 1 << 18


def proof_of(token: bytes) -> bytes:
    """Return the answer to a token."""
    return hmac.digest(token, b"pycoll doctor", "sha256")[:PROOF_BYTES]


def receive(sock: socket.socket, length: int) -> bytes:
    """Return ``length`` bytes. Raises OSError, or EOFError at the end of the stream."""
    data = bytearray()
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            raise EOFError("the connection was closed")
        data += piece
    return bytes(data)


class Responder:
    """Serves within its context: a thread accepts, and each connection has one of its own.

    Raises TransportError if no port of ``ports`` is free.
    """

    def __init__(self, ports: tuple[int, int] | None = None) -> None:
        self.token = os.urandom(TOKEN_BYTES)
        self._listener = listen_in_range(None, ports)
        self.port = int(self._listener.getsockname()[1])
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._over = threading.Event()

    def __enter__(self) -> Responder:
        self._listener.settimeout(0.2)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        self._listener.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                # Closed, or out of descriptors for a moment.
                self._over.wait(0.05)
                continue
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with sock, contextlib.suppress(OSError, EOFError):
                sock.settimeout(SILENT_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not hmac.compare_digest(receive(sock, TOKEN_BYTES), self.token):
                    return
                sock.sendall(proof_of(self.token))
                while self._answer(sock, receive(sock, 1)):
                    pass
        finally:
            self._free.release()

    def _answer(self, sock: socket.socket, request: bytes) -> bool:
        if request == CLOCK:
            sock.sendall(CLOCK_REPLY.pack(time.time()))
            return True
        if request != BYTES:
            return False
        (left,) = LENGTH.unpack(receive(sock, LENGTH.size))
        buffer = bytearray(_PIECE_BYTES)
        while left:
            count = sock.recv_into(buffer, min(left, len(buffer)))
            if not count:
                return False
            left -= count
        sock.sendall(RECEIVED)
        return True
