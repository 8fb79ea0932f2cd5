"""The status of servers, and commands to them, for ``pycoll ps``. Each server has two unix sockets.

The sockets have abstract names with the id of the process, so they need no files and end with the
process. Only processes of the same user get an answer. At the first socket a server sends its
status to each connection. At the second one it reads a command, and answers when it is done.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pycoll.bootstrap.discovery.network import abstract_name, listen_unix, peer_of
from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.untrusted import json_object, read_json

#: The longest status, in bytes.
_STATUS_BYTES_MAX = 1 << 20
#: Seconds that one end of a socket waits for the other.
_TIMEOUT_S = 2.0
_SERVERS = re.compile(r"@pycoll-ps-(\d+)-\d+$")
_STORES = re.compile(r"@pycoll-store-(\d+)-\d+$")
#: The longest command and answer, in bytes.
_COMMAND_BYTES_MAX = 1 << 12
_COMMAND = {"store": str, "command": str, "server": int}
_ANSWER = {"is_here": bool, "error": str, "text": str}
_FACTS = {
    **{"store": str, "rank": int, "pid": int, "consistency": str, "view": int, "manager": int},
    **{"shards": list, "left_out": str},
}
_numbers = itertools.count()


class _Socket:
    """A listening socket, and a thread that passes connections of this user to ``_serve``."""

    def __init__(self, word: str) -> None:
        name = abstract_name(f"{word}-{os.getpid()}-{next(_numbers)}")
        self._listener = listen_unix(name)
        self._thread = threading.Thread(target=self._run, name=f"pycoll-{word}", daemon=True)
        self._thread.start()

    def _serve(self, sock: socket.socket) -> None:
        raise AssertionError("a socket of a kind")

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            # A peer that is gone or too slow gets no answer.
            with sock, contextlib.suppress(OSError):
                if peer_of(sock)[1] == os.geteuid():
                    sock.settimeout(_TIMEOUT_S)
                    self._serve(sock)

    def close(self) -> None:
        """End the thread and free the name."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class StatusSocket(_Socket):
    """Sends the status of a server. ``read_status`` returns the JSON object, on any thread."""

    def __init__(self, read_status: Callable[[], dict[str, Any]]) -> None:
        self._read_status = read_status
        super().__init__("ps")

    def _serve(self, sock: socket.socket) -> None:
        status = {**self._read_status(), "left_out": ""}
        text = json.dumps(status).encode()
        if len(text) > _STATUS_BYTES_MAX:
            why = f"its status has {len(text)} bytes, more than {_STATUS_BYTES_MAX}"
            text = json.dumps({**status, "shards": [], "left_out": why}).encode()
        sock.sendall(text)


class CommandSocket(_Socket):
    """Takes commands for the servers of a store, one at a time.

    ``store``: its name. ``commands``: by word the function of a server's rank, which returns the
    text of the answer; any thread may call them.
    """

    def __init__(self, store: str, commands: Mapping[str, Callable[[int], str]]) -> None:
        self._store = store
        self._commands = commands
        super().__init__("store")

    def _serve(self, sock: socket.socket) -> None:
        answer: dict[str, Any] = {"is_here": False, "error": "", "text": ""}
        try:
            request = json_object(read_json(_read(sock, _COMMAND_BYTES_MAX)), _COMMAND)
            if request["store"] == self._store and request["command"] in self._commands:
                answer["is_here"] = True
                answer["text"] = self._commands[request["command"]](request["server"])
        except (PycollError, ValueError, OSError) as error:
            answer["error"] = str(error)[: _COMMAND_BYTES_MAX // 8]
        sock.sendall(json.dumps(answer).encode())


def command(store: str, word: str, server: int, timeout_s: float) -> str:
    """Have a server of a store, a process on this host, run a command about a server.

    ``timeout_s``: the longest wait for its end, in seconds. Returns the text of the answer.

    Raises InvalidArgumentError where no process on this host serves a store of that name;
    PycollError with the reason where the command fails, and TimeoutError.
    """
    text = json.dumps({"store": store, "command": word, "server": server}).encode()
    for name in _names(_STORES):
        try:
            answer = json_object(read_json(_query(name, text, timeout_s)), _ANSWER)
        except builtins.TimeoutError:
            raise TimeoutError(f"{word} has not ended within {timeout_s:g} s") from None
        except (OSError, ValueError):
            continue
        if answer["error"]:
            raise PycollError(answer["error"])
        if answer["is_here"]:
            return str(answer["text"])
    raise InvalidArgumentError(
        f"store is {store!r}: no process of yours on this host serves it; run the command on the "
        "host of one of its servers (pycoll ps shows names)"
    )


def running_servers() -> list[dict[str, Any]]:
    """Return the status of each server of this user on this host, by store and rank.

    Servers that end meanwhile, or do not answer within 2 seconds, are left out. A server whose
    status is longer than 1 MiB has no "shards"; its "left_out" is the reason, which is else empty.
    """
    servers = []
    for name in _names(_SERVERS):
        # Skip sockets of other programs, and servers that end meanwhile.
        with contextlib.suppress(OSError, ValueError):
            servers.append(json_object(read_json(_query(name, b"", _TIMEOUT_S)), _FACTS))
    return sorted(servers, key=lambda one: (one["store"], one["rank"]))


def _names(pattern: re.Pattern[str]) -> Iterator[str]:
    with open("/proc/net/unix") as table:
        lines = [line.rstrip() for line in table]
    names = {line.rpartition(" ")[2] for line in lines if pattern.search(line)}
    for name in sorted(names):
        yield "\0" + name[1:]


def _query(name: str, text: bytes, timeout_s: float) -> bytearray:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        sock.connect(name)
        if peer_of(sock)[1] != os.geteuid():
            raise ValueError("another user's socket")
        if text:
            sock.sendall(text)
            sock.shutdown(socket.SHUT_WR)
        return _read(sock, _STATUS_BYTES_MAX)


def _read(sock: socket.socket, bytes_max: int) -> bytearray:
    data = bytearray()
    while len(data) <= bytes_max:
        piece = sock.recv(1 << 16)
        if not piece:
            return data
        data += piece
    raise ValueError(f"more than {bytes_max} bytes")
