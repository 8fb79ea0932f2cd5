"""Connects to a peer: orders its addresses, and tries them until a handshake succeeds."""

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
from pycoll.bootstrap.discovery.network import Interface, tcp_socket
from pycoll.bootstrap.handshake import STRANGER_S, HandshakeError

#: After this time without an answer from one address, the next one is tried in parallel.
_STAGGER_S = 0.25
_PAUSE_S = 0.05
_SO_BINDTODEVICE = 25
#: ``probe`` waits this long for the first answer; a route without an answer counts as closed.
_PROBE_S = 0.25
#: After the first answer, further routes have ``_GRACE_S`` plus ``_GRACE_FACTOR`` times the time
#: that the first answer took.
_GRACE_S, _GRACE_FACTOR = 0.02, 4


class Candidate(NamedTuple):
    """An address where a rank listens: the address, its network, the port; the interface's name
    (``device``) and its ``speed`` in Mbit/s, 0 if unknown."""

    address: str
    network: str
    port: int
    device: str = ""
    speed: int = 0

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self[0]}:{self.port}"


class Route(NamedTuple):
    """A pair of addresses: a peer's ``target`` and this rank's ``source`` in the same network.

    With ``source`` None the kernel chooses. ``pinned`` binds the socket to the source's interface,
    which is needed where several interfaces of this rank are in the network.
    """

    target: Candidate
    source: Interface | None = None
    pinned: bool = False

    def __str__(self) -> str:
        return str(self.target) + (
            f" from {self.source.name}" if self.pinned and self.source else ""
        )


class UnreachableError(Exception):
    """No route reaches the peer. The text lists every route that was tried, with its reason."""


def order_candidates(
    mine: Sequence[Interface], theirs: Sequence[Candidate], same_machine: bool
) -> list[Candidate]:
    """Return the usable addresses of a peer, the most promising first.

    On one machine loopback addresses come first. Between machines loopback is left out, and so is
    an address that both ends have (a container bridge). Addresses in a network of this rank come
    first.
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
    """Return every usable pair of addresses. The source is each interface of this rank that is in
    the target's network; if there is none, the kernel chooses the source."""
    routes = []
    for candidate in candidates:
        near = [i for i in mine if i.network == candidate.network and not i.loopback]
        routes += [Route(candidate, interface, len(near) > 1) for interface in near]
        if not near:
            routes.append(Route(candidate))
    return routes


def rails_of(answered: Sequence[Route]) -> list[Route]:
    """Return the routes whose bandwidths add up: each has its own interface at both ends, and all
    are as fast as the fastest route.

    The sockets of a pair carry equal shares of the bytes, so a slower one would delay the others.
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
    """Return the speed of the slower end in Mbit/s; 0 if neither is known."""
    known = [route.target.speed, 0 if route.source is None else route.source.speed]
    return min((speed for speed in known if speed), default=0)


def probe(routes: Sequence[Route]) -> list[Route]:
    """Return the routes on which a server accepts, in the same order. All are tried in parallel.

    The probe does not authenticate the server: it shows only that the route is open.
    """
    connecting: dict[int, tuple[socket.socket, Route]] = {}
    answered: list[Route] = []
    begin = time.monotonic()
    until = begin + _PROBE_S
    try:
        for route in routes:
            sock = begin_connect(route, {})
            if sock is not None:
                connecting[sock.fileno()] = (sock, route)
        while connecting and time.monotonic() < until:
            for fd in _ready(connecting, until - time.monotonic()):
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
    check: Callable[[], None] = lambda: None,
) -> tuple[socket.socket, Route]:
    """Return the first connection on which ``talk`` (the handshake) succeeds, and its route.

    ``dial`` starts the connects one after the other, a quarter second apart, and keeps the earlier
    ones pending, so a dead network costs little time. It calls ``check`` as often while it waits.
    Raises UnreachableError, and every error of ``check``.
    """
    reasons: dict[Route, str] = {}
    while True:
        found, worth_retrying = _try_all(routes, talk, deadline, check, reasons)
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
    check: Callable[[], None],
    reasons: dict[Route, str],
) -> tuple[tuple[socket.socket, Route] | None, bool]:
    waiting = list(routes)
    connecting: dict[int, tuple[socket.socket, Route]] = {}
    worth_retrying = False
    try:
        while (waiting or connecting) and not deadline.passed():
            check()
            if waiting:
                route = waiting.pop(0)
                sock = begin_connect(route, reasons)
                if sock is not None:
                    connecting[sock.fileno()] = (sock, route)
            for fd in _ready(connecting, min(_STAGGER_S, deadline.remaining())):
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
                    # The server closed the connection or is silent. It may have dropped this
                    # connection because too many strangers waited, so a retry can succeed.
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


def begin_connect(route: Route, reasons: dict[Route, str]) -> socket.socket | None:
    """Return a socket that connects over ``route`` and does not block; None, with an entry in
    ``reasons``, if the system refuses at once."""
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


def _ready(connecting: dict[int, Any], timeout_s: float) -> list[int]:
    if not connecting:
        return []
    poller = select.poll()
    for fd in connecting:
        poller.register(fd, select.POLLOUT)
    return [fd for fd, _ in poller.poll(max(1, int(timeout_s * 1e3)))]
