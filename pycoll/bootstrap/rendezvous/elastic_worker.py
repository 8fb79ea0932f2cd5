"""A worker's end of the elastic rendezvous, by which the launcher forms the worlds of a job.

A worker asks for a place before it joins each world. The launcher answers when all living workers
have asked; the answer holds the worker's rank in the new world and the address of its store. The
connection stays open. The launcher sends a line on it when it wants all workers to ask again.

Both ends are processes of one user on one host, and each checks the other's user. One thread of the
worker uses this module.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NamedTuple

from pycoll.bootstrap.discovery.network import abstract_name, peer_of
from pycoll.bootstrap.discovery.torch_variables import follow
from pycoll.bootstrap.forks import end_with_process
from pycoll.errors import TransportError
from pycoll.untrusted import json_object, read_json, shown

#: Longest question or answer.
LINE_BYTES_MAX = 1 << 20
_VARIABLE = "PYCOLL_ROSTER"


class Invitation(NamedTuple):
    """A place in a world that is about to form. ``pids`` are the world's processes, by rank.
    ``torch`` is the host and port where torch's ranks of that world may meet."""

    rank: int
    size: int
    address: str
    job_id: str
    pids: tuple[int, ...]
    torch: tuple[str, int]


class _Line:
    """This process's connection, and the processes of the world of its last invitation."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.pid = 0
        self.pids: tuple[int, ...] = ()


_line = _Line()


def inside() -> bool:
    """Return whether this process is a worker of an elastic job."""
    return _VARIABLE in os.environ


def take_place(name: str, member: int) -> Invitation:
    """Ask for a place as worker ``member`` and wait for it; an earlier place is given up.

    The launcher answers within its own limit (--elastic-timeout) or ends, so this wait has no
    deadline. Raises TransportError, with the launcher's reason, if no world forms.
    """
    sock = _connect(name)
    question = {"member": member, "pid": os.getpid()}
    try:
        sock.sendall(json.dumps(question).encode() + b"\n")
        answer = _read_answer(_read_line(sock))
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportError(
            f"the launcher gave no place to member {member}: {error}", operation="init"
        ) from None
    if "refused" in answer:
        sock.close()
        raise TransportError(answer["refused"], operation="init")
    invitation = Invitation(**answer)
    follow(invitation.rank, invitation.size, *invitation.torch)
    sock.setblocking(False)
    _line.sock, _line.pid, _line.pids = sock, os.getpid(), invitation.pids
    return invitation


def _read_answer(line: bytes) -> dict[str, Any]:
    """Parse the launcher's answer. Raises ValueError if it is neither a place nor a refusal."""
    answer = read_json(line)
    if isinstance(answer, dict) and "refused" in answer:
        return json_object(answer, {"refused": str})
    texts, numbers = {"address": str, "job_id": str}, {"rank": int, "size": int}
    place = json_object(answer, {**numbers, **texts, "pids": list, "torch": list})
    if len(place["torch"]) != len(("host", "port")):
        raise ValueError(f"torch is {shown(place['torch'])}: expected host and port")
    return place | {name: tuple(place[name]) for name in ("pids", "torch")}


def changed() -> bool:
    """Return whether the launcher wants all workers to ask for places again. Never waits."""
    if _line.sock is None or _line.pid != os.getpid():
        return False
    try:
        return bool(_line.sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def pids() -> tuple[int, ...]:
    """Return the process ids of the world of the last invitation, by rank."""
    return _line.pids


def _connect(name: str) -> socket.socket:
    if _line.sock is not None:
        _line.sock.close()
        _line.sock = None
    sock = end_with_process(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.connect(abstract_name(name))
    except OSError as error:
        sock.close()
        raise TransportError(
            f"{_VARIABLE}={name}: the launcher cannot be reached ({error.strerror}); it has to run "
            "on this host, in the same network namespace",
            operation="init",
        ) from None
    uid = peer_of(sock)[1]
    if uid != os.getuid():
        sock.close()
        raise TransportError(
            f"{_VARIABLE}={name}: user {uid} listens there, expected {os.getuid()}",
            operation="init",
        )
    return sock


def _read_line(sock: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        piece: Any = sock.recv(4096)
        if not piece:
            raise OSError("it closed the connection")
        data += piece
        if len(data) > LINE_BYTES_MAX:
            raise OSError(f"its answer is longer than {LINE_BYTES_MAX} bytes")
    return bytes(data)
