"""The status of running servers, for ``pycoll ps``: each one tells it at a unix socket.

The socket has an abstract name with the process's id, so it needs no file and ends with the
process. Only processes of the same user get an answer. A server sends one text to each
connection and closes it; it reads nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from pycoll.bootstrap.discovery.network import abstract_name, listen_unix, peer_of
from pycoll.untrusted import json_object, read_json

#: The longest status, in bytes.
_STATUS_BYTES_MAX = 1 << 20
#: Seconds that one end of the socket waits for the other.
_PATIENCE_S = 2.0
_NAME = re.compile(r"@pycoll-ps-(\d+)-\d+$")
_FACTS = {"store": str, "rank": int, "pid": int, "view": int, "shards": list}
_numbers = itertools.count()


class StatusSocket:
    """Tells the status of a server. ``tell``: returns its JSON object; any thread may call it."""

    def __init__(self, tell: Callable[[], dict[str, Any]]) -> None:
        self._tell = tell
        name = abstract_name(f"ps-{os.getpid()}-{next(_numbers)}")
        self._listener = listen_unix(name)
        self._thread = threading.Thread(target=self._run, name="pycoll-ps-status", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            # A reader that is gone, or too slow, gets no status.
            with sock, contextlib.suppress(OSError):
                if peer_of(sock)[1] == os.geteuid():
                    sock.settimeout(_PATIENCE_S)
                    sock.sendall(json.dumps(self._tell()).encode())

    def close(self) -> None:
        """End the thread and free the name."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def running_servers() -> list[dict[str, Any]]:
    """Return the status of each server of this user on this host, by store and rank.

    Servers that end meanwhile, or do not answer within 2 seconds, are left out.
    """
    found = []
    for name in _names():
        # Bytes that no server sends are no server's.
        with contextlib.suppress(OSError, ValueError):
            found.append(_ask(name))
    return sorted(found, key=lambda one: (one["store"], one["rank"]))


def _names() -> Iterator[str]:
    with open("/proc/net/unix") as table:
        names = {line.rstrip().rpartition(" ")[2] for line in table if _NAME.search(line.rstrip())}
    for name in sorted(names):
        yield "\0" + name[1:]


def _ask(name: str) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PATIENCE_S)
        sock.connect(name)
        if peer_of(sock)[1] != os.geteuid():
            raise ValueError("another user's socket")
        data = bytearray()
        while len(data) <= _STATUS_BYTES_MAX:
            piece = sock.recv(1 << 16)
            if not piece:
                return json_object(read_json(data), _FACTS)
            data += piece
    raise ValueError("a status that is too long")
