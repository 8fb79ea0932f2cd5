"""Reaching a peer: which of its addresses to try in which order, and trying them."""

from __future__ import annotations

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
from pycoll.bootstrap.network import Interface, tcp_socket

#: An address that has not answered for so long gets company from the next one.
_STAGGER_S = 0.25
_PAUSE_S = 0.05
_SO_BINDTODEVICE = 25
#: A way that none has answered on for so long is as good as none, as long as there is another try.
_PROBE_S = 0.25
#: After the first answer the others have this long, and so many times what the first one took.
_GRACE_S, _GRACE_FACTOR = 0.02, 4


class Candidate(NamedTuple):
    """Where a rank listens: one address, the network it is in, the port; the interface's name and
    Mbit/s (0: not known)."""

    address: str
    network: str
    port: int
    device: str = ""
    speed: int = 0

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self[0]}:{self.port}"


class Route(NamedTuple):
    """A pair of addresses: one of a peer's, and one of this rank's that is in the same network;
    None leaves the choice to the kernel. ``pinned`` to that interface where several are in it."""

    target: Candidate
    source: Interface | None = None
    pinned: bool = False

    def __str__(self) -> str:
        return str(self.target) + (
            f" from {self.source.name}" if self.pinned and self.source else ""
        )


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


def routes_to(candidates: Sequence[Candidate], mine: Sequence[Interface]) -> list[Route]:
    """Every usable pair of addresses: from each interface of ours that is in the address's network,
    or from wherever the kernel likes if none is."""
    routes = []
    for candidate in candidates:
        near = [i for i in mine if i.network == candidate.network and not i.loopback]
        routes += [Route(candidate, interface, len(near) > 1) for interface in near]
        if not near:
            routes.append(Route(candidate))
    return routes


def rails_of(answered: Sequence[Route]) -> list[Route]:
    """Those that add up: each over interfaces of its own at both ends, as fast as the fastest.

    Sockets share the bytes evenly, so a slower one would hold up the others.
    """
    rails: list[Route] = []
    fastest = max((_speed(route) for route in answered), default=0)
    for route in answered:
        if _speed(route) < fastest or route.source is None:
            continue
        ours = {rail.source.name for rail in rails if rail.source is not None}
        theirs = {rail.target.device for rail in rails}
        if route.source.name not in ours and route.target.device not in theirs:
            rails.append(route)
    return rails or list(answered[:1])


def _speed(route: Route) -> int:
    """Of the slower end; 0 if neither is known."""
    known = [route.target.speed, 0 if route.source is None else route.source.speed]
    return min((speed for speed in known if speed), default=0)


def probe(routes: Sequence[Route]) -> list[Route]:
    """Those on which somebody answers, in the same order; all are tried at once.

    Who answers is not known, so nothing follows but that the way is open.
    """
    connecting: dict[int, tuple[socket.socket, Route]] = {}
    answered: list[Route] = []
    begin = time.monotonic()
    until = begin + _PROBE_S
    try:
        for route in routes:
            sock = _start(route, {})
            if sock is not None:
                connecting[sock.fileno()] = (sock, route)
        while connecting and time.monotonic() < until:
            for fd in _settled(connecting, until - time.monotonic()):
                sock, route = connecting.pop(fd)
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    answered.append(route)
                    now = time.monotonic()
                    until = min(until, now + _GRACE_S + _GRACE_FACTOR * (now - begin))
                sock.close()
    finally:
        for sock, _ in connecting.values():
            sock.close()
    return sorted(answered, key=routes.index)


def dial(
    routes: Sequence[Route],
    talk: Callable[[socket.socket, Deadline], None],
    deadline: Deadline,
) -> tuple[socket.socket, Route]:
    """The first connection on which ``talk`` (the handshake) succeeds, and where it leads.

    Connects are started one after the other, a quarter second apart, without giving up the
    earlier ones, so that a dead network costs little. Raises UnreachableError.
    """
    reasons: dict[Route, str] = {}
    while True:
        found, worth_retrying = _try_all(routes, talk, deadline, reasons)
        if found is not None:
            return found
        if not worth_retrying or deadline.passed():
            tried = ", ".join(f"{route} ({reasons.get(route, 'no answer')})" for route in routes)
            raise UnreachableError(f"tried {tried}")
        time.sleep(min(_PAUSE_S, deadline.remaining()))


def _try_all(
    routes: Sequence[Route],
    talk: Callable[[socket.socket, Deadline], None],
    deadline: Deadline,
    reasons: dict[Route, str],
) -> tuple[tuple[socket.socket, Route] | None, bool]:
    waiting = list(routes)
    connecting: dict[int, tuple[socket.socket, Route]] = {}
    worth_retrying = False
    try:
        while (waiting or connecting) and not deadline.passed():
            if waiting:
                route = waiting.pop(0)
                sock = _start(route, reasons)
                if sock is not None:
                    connecting[sock.fileno()] = (sock, route)
            for fd in _settled(connecting, _STAGGER_S if waiting else deadline.remaining()):
                sock, route = connecting.pop(fd)
                failure = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failure:
                    reasons[route] = os.strerror(failure)
                    worth_retrying |= failure not in (errno.ECONNREFUSED, errno.EHOSTUNREACH)
                    sock.close()
                    continue
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    talk(sock, deadline.within(STRANGER_S))
                except (OSError, EOFError) as error:
                    # Hung up or silent: perhaps drowned by strangers, so ask again.
                    reasons[route] = str(error) or type(error).__name__
                    worth_retrying = True
                    sock.close()
                except HandshakeError as error:
                    reasons[route] = str(error)
                    sock.close()
                else:
                    return (sock, route), False
    finally:
        for sock, _ in connecting.values():
            sock.close()
    return None, worth_retrying


def _start(route: Route, reasons: dict[Route, str]) -> socket.socket | None:
    target, source = route.target, route.source
    try:
        sock = tcp_socket(target.address)
    except OSError as error:
        reasons[route] = error.strerror or str(error)
        return None
    sock.setblocking(False)
    try:
        if source is not None:
            if route.pinned:
                sock.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, source.name.encode())
            sock.bind((source.address, 0))
        failure = sock.connect_ex((target.address, target.port))
    except OSError as error:
        failure = error.errno or errno.EADDRNOTAVAIL
    if failure not in (0, errno.EINPROGRESS):
        reasons[route] = os.strerror(failure)
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
