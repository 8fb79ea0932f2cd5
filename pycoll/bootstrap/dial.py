"""Reaching a peer: which of its addresses to try in which order, and trying them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.handshake import STRANGER_S, HandshakeError
from pycoll.bootstrap.network import Interface

#: An address that has not answered for so long gets company from the next one.
_STAGGER_S = 0.25
_PAUSE_S = 0.05


class Candidate(NamedTuple):
    """Where a rank listens: one address, the network it is in, the port."""

    address: str
    network: str
    port: int

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self[0]}:{self.port}"


class UnreachableError(Exception):
    """No way leads there; the text lists what was tried, each with its reason."""


def order_candidates(
    mine: Sequence[Interface], theirs: Sequence[Candidate], same_machine: bool
) -> list[Candidate]:
    """The useful ones of a peer's addresses, most promising first.

    On one machine loopback comes first. Between machines loopback is meaningless, and so is an
    address that both ends have (a container bridge); those in a network of ours come first.
    """
    loopback = [c for c in theirs if ipaddress.ip_address(c.address).is_loopback]
    others = [c for c in theirs if c not in loopback]
    if same_machine:
        return loopback + others
    own = {interface.address for interface in mine}
    networks = {interface.network for interface in mine}
    reachable = [c for c in others if c.address not in own]
    return sorted(reachable, key=lambda c: c.network not in networks)


def dial(
    candidates: Sequence[Candidate],
    talk: Callable[[socket.socket, Deadline], None],
    deadline: Deadline,
) -> tuple[socket.socket, Candidate]:
    """The first connection on which ``talk`` (the handshake) succeeds, and where it leads.

    Connects are started one after the other, a quarter second apart, without giving up the
    earlier ones, so that a dead network costs little. Raises UnreachableError.
    """
    reasons: dict[Candidate, str] = {}
    while True:
        found, worth_retrying = _try_all(candidates, talk, deadline, reasons)
        if found is not None:
            return found
        if not worth_retrying or deadline.passed():
            tried = ", ".join(f"{c} ({reasons.get(c, 'no answer')})" for c in candidates)
            raise UnreachableError(f"tried {tried}")
        time.sleep(min(_PAUSE_S, deadline.remaining()))


def _try_all(
    candidates: Sequence[Candidate],
    talk: Callable[[socket.socket, Deadline], None],
    deadline: Deadline,
    reasons: dict[Candidate, str],
) -> tuple[tuple[socket.socket, Candidate] | None, bool]:
    waiting = list(candidates)
    connecting: dict[int, tuple[socket.socket, Candidate]] = {}
    worth_retrying = False
    try:
        while (waiting or connecting) and not deadline.passed():
            if waiting:
                candidate = waiting.pop(0)
                sock = _start(candidate, reasons)
                if sock is not None:
                    connecting[sock.fileno()] = (sock, candidate)
            for fd in _settled(connecting, _STAGGER_S if waiting else deadline.remaining()):
                sock, candidate = connecting.pop(fd)
                failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failure:
                    reasons[candidate] = os.strerror(failure)
                    worth_retrying |= failure not in (errno.ECONNREFUSED, errno.EHOSTUNREACH)
                    sock.close()
                    continue
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    talk(sock, deadline.within(STRANGER_S))
                except (OSError, EOFError) as error:
                    # Hung up or silent: perhaps drowned by strangers, so ask again.
                    reasons[candidate] = str(error) or type(error).__name__
                    worth_retrying = True
                    sock.close()
                except HandshakeError as error:
                    reasons[candidate] = str(error)
                    sock.close()
                else:
                    return (sock, candidate), False
    finally:
        for sock, _ in connecting.values():
            sock.close()
    return None, worth_retrying


def _start(candidate: Candidate, reasons: dict[Candidate, str]) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in candidate.address else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        reasons[candidate] = error.strerror or str(error)
        return None
    sock.setblocking(False)
    failure = sock.connect_ex((candidate.address, candidate.port))
    if failure not in (0, errno.EINPROGRESS):
        reasons[candidate] = os.strerror(failure)
        sock.close()
        return None
    return sock


def _settled(connecting: dict[int, Any], timeout_s: float) -> list[int]:
    if not connecting:
        return []
    poller = select.poll()
    for fd in connecting:
        poller.register(fd, select.POLLOUT)
    return [fd for fd, _ in poller.poll(max(1, int(timeout_s * 1e3)))]


def dial_unix(
    name: str, talk: Callable[[socket.socket, Deadline], None], deadline: Deadline
) -> socket.socket:
    """The same for an abstract unix socket. Raises UnreachableError."""
    reason = "no answer"
    while not deadline.passed():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            try:
                sock.settimeout(max(deadline.remaining(), 0.001))
                sock.connect(name)
                talk(sock, deadline.within(STRANGER_S))
            except ConnectionRefusedError as error:
                raise UnreachableError(f"its unix socket: {error.strerror}") from None
            except HandshakeError as error:
                raise UnreachableError(f"its unix socket: {error}") from None
            except (OSError, EOFError) as error:
                # A full backlog, or drowned by strangers: ask again.
                reason = str(error) or type(error).__name__
            else:
                undo.pop_all()
                return sock
        time.sleep(min(_PAUSE_S, deadline.remaining()))
    raise UnreachableError(f"its unix socket: {reason}")
