"""One rank's sockets to other hosts while the ranks connect: listening, accepted, dialled ones.

``Links.close`` closes every descriptor that no transport has taken over.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pycoll import errors
from pycoll.bootstrap.admission import Admission, Loop, describe_origin
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.dial import (
    Candidate,
    Route,
    UnreachableError,
    dial,
    order_candidates,
    probe,
    rails_of,
    routes_to,
)
from pycoll.bootstrap.discovery.identity import Identity, socket_count
from pycoll.bootstrap.discovery.network import Interface, interfaces, listen_in_range
from pycoll.bootstrap.discovery.verbs import Pairs
from pycoll.bootstrap.handshake import Claim, Purpose, Verdict, ask, scope_of
from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.config import Config

#: Seconds between two checks of a waiting rank whether another rank has failed.
_CHECK_S = 0.1
#: A network is no longer probed after this many peers that did not answer on it while they
#: answered on another network.
_SILENT_MAX = 2


class Links:
    """Owned by one call of ``connect``; ``_decide`` and ``_admit`` run on the loop's thread."""

    def __init__(
        self,
        rank: int,
        identities: Sequence[Identity],
        kinds: Mapping[int, str],
        config: Config,
        *,
        key: bytes,
        communicator_id: str,
        factories: Mapping[str, Callable[..., Any]],
    ) -> None:
        self._rank = rank
        self._identities = identities
        self._config = config
        self._key = key
        self._scope = scope_of("", communicator_id)
        self._mine = identities[rank]
        self._tcp_peers = sorted(p for p, kind in kinds.items() if kind == "tcp")
        self._verbs_peers = sorted(p for p, kind in kinds.items() if kind == "verbs")
        #: Peers to which this rank has sockets. A verbs peer has one, whose end tells that the
        #: peer's process has ended.
        self._socket_peers = sorted(self._tcp_peers + self._verbs_peers)
        size = len(identities)
        self._tcp = factories["tcp"](rank, size) if self._tcp_peers else None
        self._factories = factories
        self._pairs: Pairs | None = None
        if self._verbs_peers:
            self._pairs = Pairs(rank, identities, self._verbs_peers, factories["verbs"])
        self._arrived = threading.Condition()
        #: (peer, index) -> socket.
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        self._own_interfaces: list[Interface] = []
        #: By network: peers that did not answer there; far below zero once a peer has answered.
        self._silence: Counter[tuple[str, str]] = Counter()
        self._loop: Loop | None = None
        self._admission: Admission | None = None

    def listen(self) -> dict[str, Any]:
        """Open the listeners and queue pairs that peers need to reach this rank. Returns their
        addresses, for the exchange."""
        endpoint: dict[str, Any] = {}
        if self._pairs is not None:
            endpoint |= self._pairs.prepare()
        self._own_interfaces = interfaces(self._config.interfaces)
        if not any(peer > self._rank for peer in self._socket_peers):
            return endpoint
        self._loop = Loop(f"pycoll-accept-{self._rank}")
        self._admission = Admission(
            self._loop.selector, self._key, self._scope, self._decide, self._admit
        )
        self._loop.every.append(self._admission.expire)
        endpoint["tcp"] = self._listen_tcp(self._admission)
        self._loop.start()
        return endpoint

    def _fall_back(self, endpoints: Sequence[Mapping[str, Any]]) -> None:
        """Move the verbs peers with which this rank has no queue pair to the tcp peers."""
        if self._pairs is None:
            return
        left = self._pairs.agree(endpoints)
        self._tcp_peers = sorted(set(self._socket_peers) - set(left))
        self._verbs_peers = left
        if self._tcp_peers and self._tcp is None:
            self._tcp = self._factories["tcp"](self._rank, len(self._identities))

    def _listen_tcp(self, admission: Admission) -> list[Candidate]:
        peers = [p for p in self._socket_peers if p > self._rank]
        local = all(self._identities[p].machine == self._mine.machine for p in peers)
        loopback = [i for i in self._own_interfaces if i.loopback]
        ports = self._config.port_range
        if self._config.interfaces:
            chosen = self._own_interfaces
        elif local and loopback:
            chosen = loopback[:1]
        else:
            listener = listen_in_range(None, ports)
            admission.listen(listener, Purpose.TCP)
            port = listener.getsockname()[1]
            families = (4, 6) if listener.family == socket.AF_INET6 else (4,)
            return [
                _candidate(i, port)
                for i in self._own_interfaces
                if ipaddress.ip_address(i.address).version in families
            ]
        candidates = []
        for interface in chosen:
            listener = listen_in_range(interface.address, ports)
            admission.listen(listener, Purpose.TCP)
            port = listener.getsockname()[1]
            candidates.append(_candidate(interface, port))
        return candidates

    def dial(
        self,
        endpoints: Sequence[Mapping[str, Any]],
        deadline: Deadline,
        check: Callable[[], None],
    ) -> dict[int, str]:
        """Dial the lower peers. Returns the reason for each peer that cannot be reached.

        ``check`` raises when another rank has failed, so that dialling is pointless.
        """
        self._fall_back(endpoints)
        unreached: dict[int, str] = {}
        for peer in self._socket_peers:
            if peer > self._rank:
                break
            # Half of the time left: a peer that does not answer leaves time for the others.
            limit = deadline.within(deadline.remaining() / 2)
            try:
                self._dial_tcp(peer, endpoints[peer]["tcp"], limit, check)
            except UnreachableError as error:
                # The peer may have closed its listener because another rank failed. Then `check`
                # raises that failure, which may arrive a moment later.
                time.sleep(_CHECK_S)
                check()
                unreached[peer] = f"over tcp: {error}"
        return unreached

    def finish(self, deadline: Deadline, check: Callable[[], None]) -> list[Any]:
        """Wait for the higher peers and hand all sockets to the transports, which it returns.

        Calls ``check`` while it waits.
        """
        self._await_higher(deadline, check)
        for peer in self._tcp_peers:
            self._attach_tcp(peer)
        for peer in self._verbs_peers:
            if self._pairs is not None:
                self._pairs.attach(peer, self._sockets.pop((peer, 0)))
        verbs = None if self._pairs is None else self._pairs.transport
        made = (verbs, self._tcp)
        return [transport for transport in made if transport is not None]

    def close(self) -> None:
        """End the thread; close the listeners and every socket that no transport took over."""
        if self._loop is not None and self._admission is not None:
            self._loop.end()
            self._loop.join()
            self._admission.close()
            self._loop.close()
        for sock in self._sockets.values():
            sock.close()
        self._sockets.clear()
        # A traceback may keep this object alive, and it must not keep the transports alive.
        self._pairs = self._tcp = None

    def _count(self, peer: int) -> int:
        return socket_count(self._mine, self._identities[peer]) if peer in self._tcp_peers else 1

    def _decide(self, claim: Claim) -> Verdict:
        ours = claim.peer == self._rank and claim.purpose is Purpose.TCP
        if not ours or claim.rank <= self._rank or claim.rank not in self._socket_peers:
            return Verdict.UNWANTED
        # A peer may learn before this rank that the two fall back from verbs to tcp. So a verbs
        # peer may open as many sockets as a tcp peer.
        most = socket_count(self._mine, self._identities[claim.rank])
        return Verdict.ADMITTED if claim.number < most else Verdict.UNWANTED

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._arrived:
            # A peer that authenticates again has given up its earlier connection.
            earlier = self._sockets.pop((claim.rank, claim.number), None)
            self._sockets[claim.rank, claim.number] = sock
            self._arrived.notify_all()
        if earlier is not None:
            earlier.close()

    def _talk(self, claim: Claim) -> Callable[[socket.socket, Deadline], None]:
        return lambda sock, limit: ask(sock, self._key, self._scope, claim, limit)

    def _dial_tcp(
        self,
        peer: int,
        endpoint: Sequence[Any],
        deadline: Deadline,
        check: Callable[[], None],
    ) -> None:
        offered = [Candidate(*facts) for facts in endpoint]
        same_machine = self._identities[peer].machine == self._mine.machine
        candidates = order_candidates(self._own_interfaces, offered, same_machine)
        if same_machine:
            routes = [Route(candidate) for candidate in candidates]
        else:
            routes = routes_to(candidates, self._own_interfaces)
        if not candidates:
            named = ", ".join(str(candidate) for candidate in offered) or "nothing"
            raise UnreachableError(f"it offers {named}, which leads nowhere from another host")
        rails = [] if same_machine else rails_of(self._open(routes))
        for index in range(self._count(peer)):
            claim = Claim(Purpose.TCP, self._rank, peer, index)
            # The sockets of a pair are spread over its rails round-robin. Where another server
            # answers on a rail, the socket falls back to the other routes.
            first = rails[index % len(rails)] if rails else routes[0]
            tried = [first, *(route for route in routes if route != first)]
            sock, route = dial(tried, self._talk(claim), deadline, check)
            with self._arrived:
                self._sockets[peer, index] = sock
            if not rails:
                rails = [route]
            elif route != first and len(rails) > 1:
                rails.remove(first)

    def _open(self, routes: Sequence[Route]) -> list[Route]:
        """Return the routes on which a server accepts, or the only route that is worth trying."""
        # Waiting for a silent network once per peer would add up, so it is soon left out.
        hopeful = [route for route in routes if self._silence[_network_of(route)] < _SILENT_MAX]
        if len(hopeful) < 2:
            return hopeful
        answered = probe(hopeful)
        for route in hopeful:
            if route in answered:
                self._silence[_network_of(route)] = -len(self._identities)
            elif answered:
                self._silence[_network_of(route)] += 1
        return answered

    def _await_higher(self, deadline: Deadline, check: Callable[[], None]) -> None:
        higher = [p for p in self._socket_peers if p > self._rank]
        needed = {(p, index) for p in higher for index in range(self._count(p))}
        missing = sorted({peer for peer, _ in needed})
        while missing and not deadline.passed():
            check()
            with self._arrived:
                self._arrived.wait_for(
                    lambda: needed <= self._sockets.keys(), min(_CHECK_S, deadline.remaining())
                )
                missing = sorted({peer for peer, _ in needed - self._sockets.keys()})
        if missing:
            turned_away = self._admission.refusals if self._admission is not None else []
            also = "; turned away: " + "; ".join(turned_away) if turned_away else ""
            raise errors.TransportError(
                f"rank {self._rank} ({self._mine.name}) waited {deadline.seconds:.3g} s in vain "
                f"for connections from {list_ranks(missing)}{also}",
                ranks=missing,
                operation="init",
            )

    def _attach_tcp(self, peer: int) -> None:
        sockets = [self._sockets.pop((peer, index)) for index in range(self._count(peer))]
        address = describe_origin(sockets[0].getpeername())
        for sock in sockets:
            sock.setblocking(False)
        if self._tcp is not None:
            self._tcp.attach(peer, [sock.detach() for sock in sockets], address)


def _network_of(route: Route) -> tuple[str, str]:
    return "" if route.source is None else route.source.name, route.target.network


def _candidate(interface: Interface, port: int) -> Candidate:
    return Candidate(interface.address, interface.network, port, interface.name, interface.speed)
