"""Probes from this host to the doctors of others, over every pair of addresses, with plain sockets.

All connects run at the same time and share the limit ``CONNECT_S``, so addresses without an answer
cost no more than that. After three seconds the kernel itself gives up an address that no machine of
its network has, and says "No route to host". A firewall that drops packets leaves silence.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.dial import Candidate, Route, begin_connect, order_candidates, routes_to
from pycoll.tools.doctor.host_facts import HostFacts
from pycoll.tools.doctor.responder import (
    BYTES,
    CLOCK,
    CLOCK_REPLY,
    LENGTH,
    PROOF_BYTES,
    RECEIVED,
    proof_of,
    receive,
)
from pycoll.untrusted import json_object

#: Seconds for all connects, for a connect that looks for another open port, and for an answer.
CONNECT_S, ELSEWHERE_S, ANSWER_S = 4.0, 1.0, 2.0
#: Seconds for all connections of a host together, to find latencies and clocks.
TALKS_S = 20.0
#: A machine that is up answers or refuses at one of these ports, unless a firewall drops all.
_OTHER_PORTS = (22, 1)
_ROUND_TRIPS = 20
#: The rate is measured with as many bytes as the link carries in this time, at most _RATE_BYTES.
_RATE_S, _RATE_FIRST_BYTES, _RATE_BYTES = 0.2, 1 << 20, 1 << 28
#: Routes between two hosts whose rate is measured.
_RATES_MAX = 4
SILENT = "no answer"
NO_ROUTE, NO_NETWORK, REFUSED = map(
    os.strerror, (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED)
)
STRANGER = "another host answers"
STUCK = "it connects, but data does not arrive"
UNTRIED = f"not tried, since others took {TALKS_S:g} s"

#: Uses the connection of the route with a number. Raises OSError or EOFError.
Talk = Callable[[int, socket.socket], None]


@dataclass(frozen=True)
class Link:
    """One way from ``source`` to ``target``, which are numbers of hosts.

    ``address`` and ``device`` are those of the target, ``via`` is the interface or the address at
    the source. ``failure`` is empty if the target's doctor answered there; then ``round_trip_s`` is
    the shortest one, ``clock_s`` how far the target's clock is ahead, and ``rate`` the bytes per
    second, 0 if not measured. ``elsewhere``: the address has an answer at another port.
    """

    source: int
    target: int
    address: str
    device: str
    via: str
    failure: str = ""
    elsewhere: bool = False
    round_trip_s: float = 0.0
    clock_s: float = 0.0
    rate: float = 0.0


_KINDS: dict[str, type] = {
    **dict.fromkeys((one.name for one in fields(Link)), float),
    **dict.fromkeys(("address", "device", "via", "failure"), str),
    **{"source": int, "target": int, "elsewhere": bool},
}


def decode_link(value: Any) -> Link:
    """Return a link that another host has sent. Raises ValueError for other values."""
    return Link(**json_object(value, _KINDS))


class Prober:
    """Probes the hosts ``hosts`` from the one with number ``own``."""

    def __init__(self, own: int, hosts: Sequence[HostFacts]) -> None:
        self._own, self._hosts = own, hosts
        self.links: list[Link] = []
        self._routes: list[Route] = []

    def connect(self) -> None:
        """Try every way to every other host, and find latency and clock of those that are open."""
        for target, host in enumerate(self._hosts):
            if target != self._own and host.port:
                self._add_routes(target, host)
        failures = _connects(self._routes, CONNECT_S, self._talk)
        for at, reason in failures.items():
            self.links[at] = replace(self.links[at], failure=reason)
        silent = [at for at, reason in failures.items() if reason in (SILENT, NO_ROUTE)]
        # Failed tries get port 0; a refusal counts as an answer and keeps its port.
        tries = [(at, port) for at in silent for port in _OTHER_PORTS]
        routes = [_with_port(self._routes[at], port) for at, port in tries]
        for number, reason in _connects(routes, ELSEWHERE_S).items():
            tries[number] = (tries[number][0], 0 if reason != REFUSED else tries[number][1])
        for at, port in tries:
            if port:
                self.links[at] = replace(self.links[at], elsewhere=True)

    def measure(self, target: int) -> None:
        """Measure the rate of the open ways to a host."""
        done = 0
        for at, link in enumerate(self.links):
            if link.target == target and not link.failure and done < _RATES_MAX:
                done += 1
                self.links[at] = self._with_rate(link, self._routes[at])

    def _add_routes(self, target: int, host: HostFacts) -> None:
        mine = self._hosts[self._own].networks
        theirs = [
            Candidate(o.address, o.network, host.port, o.name, o.speed) for o in host.networks
        ]
        for route in routes_to(order_candidates(mine, theirs, False), mine):
            via = "" if route.source is None else route.source.name
            to = route.target
            self.links.append(Link(self._own, target, to.address, to.device, via))
            self._routes.append(route)

    def _talk(self, at: int, sock: socket.socket) -> None:
        """Prove the target and find its latency and clock."""
        link = self.links[at]
        self._greet(link, sock)
        best, ahead = float("inf"), 0.0
        for _ in range(_ROUND_TRIPS):
            begin, wall = time.perf_counter(), time.time()
            sock.sendall(CLOCK)
            (theirs,) = CLOCK_REPLY.unpack(receive(sock, CLOCK_REPLY.size))
            took = time.perf_counter() - begin
            if took < best:
                best, ahead = took, theirs - (wall + took / 2)
        via = link.via or str(sock.getsockname()[0]).removeprefix("::ffff:")
        self.links[at] = replace(link, via=via, round_trip_s=best, clock_s=ahead)

    def _greet(self, link: Link, sock: socket.socket) -> None:
        """Send the target's token and check its proof. Raises OSError for another answer."""
        token = bytes.fromhex(self._hosts[link.target].token)
        sock.sendall(token)
        try:
            proof = receive(sock, PROOF_BYTES)
        except EOFError:
            raise OSError(0, STRANGER) from None
        if proof != proof_of(token):
            raise OSError(0, STRANGER)

    def _with_rate(self, link: Link, route: Route) -> Link:
        """Return the link with its measured rate, or with the failure of the measurement."""
        try:
            sock = begin_connect(route, {})
            if sock is None:
                return link
            with sock:
                sock.settimeout(ANSWER_S)
                if not select.select([], [sock], [], ANSWER_S)[1]:
                    return replace(link, failure=SILENT)
                self._greet(link, sock)
                first = _send(sock, _RATE_FIRST_BYTES)
                rate = _RATE_FIRST_BYTES / first
                count = int(min(max(rate * _RATE_S, _RATE_FIRST_BYTES / 4), _RATE_BYTES))
                return replace(link, rate=max(rate, count / _send(sock, count)))
        except (OSError, EOFError):
            return replace(link, failure=STUCK)


def _send(sock: socket.socket, count: int) -> float:
    """Send ``count`` bytes; returns the seconds until the target has them all."""
    data = memoryview(bytes(min(count, 1 << 20)))
    begin = time.perf_counter()
    sock.sendall(BYTES + LENGTH.pack(count))
    left = count
    while left:
        left -= sock.send(data[: min(left, len(data))])
    if receive(sock, len(RECEIVED)) != RECEIVED:
        raise OSError(0, STRANGER)
    return time.perf_counter() - begin


def _with_port(route: Route, port: int) -> Route:
    return route._replace(target=route.target._replace(port=port))


def _connects(routes: Sequence[Route], limit_s: float, talk: Talk | None = None) -> dict[int, str]:
    """Connect over all routes at the same time, and then let ``talk(number, socket)`` use each
    connection in turn; returns the reasons of those that failed."""
    failures = dict.fromkeys(range(len(routes)), SILENT)
    pending: dict[int, tuple[int, socket.socket]] = {}
    connected: list[tuple[int, socket.socket]] = []
    deadline = Deadline(limit_s)
    with contextlib.ExitStack() as undo:
        for number, route in enumerate(routes):
            reasons: dict[Route, str] = {}
            sock = begin_connect(route, reasons)
            if sock is None:
                failures[number] = reasons.get(route, SILENT)
            else:
                pending[undo.enter_context(sock).fileno()] = (number, sock)
        while pending and not deadline.passed():
            for file in _writable(pending, deadline.remaining()):
                number, sock = pending.pop(file)
                error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    failures[number] = SILENT if error == errno.ETIMEDOUT else os.strerror(error)
                else:
                    connected.append((number, sock))
        deadline = Deadline(TALKS_S)
        for number, sock in connected:
            failures[number] = "" if talk is None else _use(number, sock, talk, deadline)
    return {number: reason for number, reason in failures.items() if reason}


def _use(number: int, sock: socket.socket, talk: Talk, deadline: Deadline) -> str:
    """Use a connection; returns why that failed, or an empty text."""
    if deadline.passed():
        return UNTRIED
    try:
        sock.settimeout(deadline.within(ANSWER_S).remaining() + 0.1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talk(number, sock)
    except TimeoutError:
        return STUCK
    except (OSError, EOFError) as error:
        return str(getattr(error, "strerror", "") or error)
    return ""


def _writable(pending: Iterable[int], limit_s: float) -> list[int]:
    poller = select.poll()
    for file in pending:
        poller.register(file, select.POLLOUT)
    with contextlib.suppress(InterruptedError):
        return [file for file, _ in poller.poll(max(1, int(limit_s * 1e3)))]
    return []
