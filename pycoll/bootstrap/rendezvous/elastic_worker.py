"""A worker's end of the elastic rendezvous, by which the launcher forms the worlds of a job.

A worker asks the launcher of its host for a place before it joins each world. The answer comes when
all living workers of the job have asked; it holds the worker's rank in the new world and the
address of its store. The connection stays open. The launcher sends a line on it when all workers
have to ask again.

Both ends are processes of one user on one host, and each checks the other's user. One thread of the
worker uses this module.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any, NamedTuple

from pycoll.bootstrap.discovery.network import abstract_name, peer_of
from pycoll.bootstrap.discovery.torch_variables import Share, follow
from pycoll.bootstrap.forks import end_with_process
from pycoll.config import with_new_names
from pycoll.errors import TransportError
from pycoll.untrusted import json_object, read_json, shown

#: Longest question or answer.
LINE_BYTES_MAX = 1 << 20
_VARIABLE = "PYCOLL_ELASTIC"
#: The lists of an answer with a fixed length: host and port; rank, number and node.
_LENGTHS = {"torch": 2, "local": 3}


class Invitation(NamedTuple):
    """A place in a world that is about to form. ``processes`` names the world's processes, by rank,
    "node:pid". ``torch`` is the host and port where torch's ranks of that world may meet. ``local``
    is the rank among those of its host, their number, and the number of the host."""

    rank: int
    size: int
    address: str
    job_id: str
    processes: tuple[str, ...]
    torch: tuple[str, int]
    local: tuple[int, int, int]


class _Line:
    """This process's connection, and the processes of the world of its last invitation."""

    def __init__(self) -> None:
        self.sock: socket.socket | None = None
        self.pid = 0
        self.processes: tuple[str, ...] = ()


_line = _Line()


def inside() -> bool:
    """Return whether this process is a worker of an elastic job."""
    return _VARIABLE in with_new_names(os.environ)


def take_place(name: str, worker: int) -> Invitation:
    """Ask for a place as ``worker`` of the job and wait for it; an earlier place is given up.

    The launcher answers within its own limit (--elastic-timeout) or ends, so this wait has no
    deadline. Raises TransportError, with the launcher's reason, if no world forms.
    """
    sock = _connect(name)
    question = {"worker": worker, "pid": os.getpid()}
    try:
        sock.sendall(json.dumps(question).encode() + b"\n")
        answer = _read_answer(_read_line(sock))
    except (OSError, ValueError) as error:
        sock.close()
        raise TransportError(
            f"the launcher gave no place to worker {worker}: {error}", operation="init"
        ) from None
    if "refused" in answer:
        sock.close()
        raise TransportError(answer["refused"], operation="init")
    invitation = Invitation(**answer)
    local_rank, local_size, node = invitation.local
    share = Share(invitation.rank - local_rank, local_size, invitation.size, node)
    follow(share, local_rank, *invitation.torch)
    sock.setblocking(False)
    _line.sock, _line.pid, _line.processes = sock, os.getpid(), invitation.processes
    return invitation


def _read_answer(line: bytes) -> dict[str, Any]:
    """Parse the launcher's answer. Raises ValueError if it is neither a place nor a refusal."""
    answer = read_json(line)
    if isinstance(answer, dict) and "refused" in answer:
        return json_object(answer, {"refused": str})
    texts, numbers = {"address": str, "job_id": str}, {"rank": int, "size": int}
    lists = dict.fromkeys(_LENGTHS, list)
    place = json_object(answer, {**numbers, **texts, **lists, "processes": list})
    for name, length in _LENGTHS.items():
        if len(place[name]) != length:
            raise ValueError(f"{name} is {shown(place[name])}: expected {length} values")
    return place | {name: tuple(place[name]) for name in ("processes", *_LENGTHS)}


def changed() -> bool:
    """Return whether the launcher wants all workers to ask for places again. Never waits."""
    if _line.sock is None or _line.pid != os.getpid():
        return False
    try:
        return bool(_line.sock.recv(1, socket.MSG_PEEK))
    except OSError:
        return False


def processes() -> tuple[str, ...]:
    """Return the names of the processes of the world of the last invitation, by rank."""
    return _line.processes


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
