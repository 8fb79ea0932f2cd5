"""Views: which servers hold each shard, in order; and the state machines that decide about them.

The servers decide about views themselves. The first running server of a view is its manager. It
proposes the next view to all running servers, and the view holds once all of them have accepted it.
Servers and workers stamp messages with the number of their view, and a server answers messages of
its own view only.

When the manager is gone, the next server of the view becomes the manager. The manager removes a
server that it does not reach, and never takes it back. If two other servers do not reach each
other, the manager excludes one of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.bootstrap.recovery.council import is_quorum
from pycoll.ps.membership.newcomers import NEWCOMERS_MAX, Newcomer
from pycoll.ps.messages import EXCLUDED, TEXT_BYTES_MAX, Kind, Message
from pycoll.untrusted import json_object, read_json

_FACTS = {
    "number": int,
    "chains": list,
    "filling": list,
    "servers": list,
    "leaving": list,
    "length": int,
    "ranks": int,
    "joins": int,
    "joining": str,
    "severed": list,
}
#: Orders of the manager. A server obeys the first server that it has not lost, and no other one.
_ORDERS = frozenset((Kind.VIEW_QUERY, Kind.PROPOSE, Kind.VIEW))
#: Messages of servers to the manager about newcomers.
_JOIN_REPORTS = frozenset((Kind.ADMIT, Kind.JOINED, Kind.JOIN_FAILED))
#: Requests of any peer to the manager. Other servers forward them. A server that becomes the
#: manager meanwhile ignores them, so callers repeat them.
_MANAGER_REQUESTS = frozenset((Kind.DRAIN, Kind.ADD, *_JOIN_REPORTS))


#: The reason for which a server stops when a view excludes it.
_EXCLUDED_REASON = (
    "the other servers go on without it, since it was silent for too long, or its connection with "
    "one of them is broken"
)


class View(NamedTuple):
    """A view, with the whole state that the next manager needs.

    ``chains``: by shard the servers that hold it; the first one takes updates, the last one
    answers. ``filling``: by shard the server that is being filled and follows the last one, or -1.
    ``servers``: those that run, in their order of succession. ``leaving``: the drained ones among
    them, which shall hold no shard. ``length``: the target number of servers in each chain.
    ``ranks``: the number of ranks assigned so far. ``joins``: the number of newcomers so far.
    ``joining``: the newcomer with which all processes connect now. ``severed``: pairs of servers
    that do not reach each other, and of which the manager can exclude neither.
    """

    number: int
    chains: tuple[tuple[int, ...], ...]
    filling: tuple[int, ...]
    servers: tuple[int, ...]
    leaving: tuple[int, ...]
    length: int
    ranks: int = 0
    joins: int = 0
    joining: Newcomer | None = None
    severed: tuple[tuple[int, int], ...] = ()

    def to_bytes(self) -> bytes:
        """Return the view in the form that ``from_bytes`` reads."""
        joining = "" if self.joining is None else self.joining.to_bytes().decode()
        return json.dumps({**self._asdict(), "joining": joining}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> View:
        """Read a view. Raises ValueError for what ``to_bytes`` did not make."""
        if len(text) > TEXT_BYTES_MAX:
            raise ValueError(f"a view of {len(text)} bytes: expected at most {TEXT_BYTES_MAX}")
        facts = json_object(read_json(text), _FACTS)
        chains = facts["chains"]
        if not all(isinstance(one, list) and _are_whole(one) for one in chains):
            raise ValueError("chains that are no lists of ranks")
        if len(facts["filling"]) != len(chains) or not _are_whole(facts["filling"]):
            raise ValueError("filling is no rank for each chain")
        if not _are_whole(facts["servers"]) or not _are_whole(facts["leaving"]):
            raise ValueError("servers that are no ranks")
        severed = facts["severed"]
        if not all(isinstance(one, list) and len(one) == 2 and _are_whole(one) for one in severed):
            raise ValueError("severed servers that are no pairs of ranks")
        joining = facts["joining"].encode()
        return cls(
            facts["number"],
            tuple(map(tuple, chains)),
            tuple(facts["filling"]),
            tuple(facts["servers"]),
            tuple(facts["leaving"]),
            facts["length"],
            facts["ranks"],
            facts["joins"],
            Newcomer.from_bytes(joining) if joining else None,
            tuple((one, other) for one, other in severed),
        )

    def gap_of(self, shard: int) -> str:
        """Return the text about a broken connection in a shard's chain; empty if there is none."""
        chain = self.chains[shard]
        for one, other in itertools.pairwise(chain):
            if (min(one, other), max(one, other)) in self.severed:
                return f"; the connection between servers {one} and {other} is broken"
        return ""

    def holds(self, server: int) -> bool:
        """Return whether the server is in a chain."""
        return any(server in chain for chain in self.chains)


def _are_whole(values: list[object]) -> bool:
    return all(type(one) is int and -1 <= one < 1 << 31 for one in values)


def first_view(servers: Iterable[int], replicas: int, size: int = 0, shards: int = 0) -> View:
    """Return the view of a new store. Shards are assigned to servers round-robin, and the next
    ``replicas`` servers hold each shard too.

    ``size``: the number of ranks, workers included; 0 where servers are the last ones. ``shards``:
    their number; 0 for as many as servers.
    """
    ranks = tuple(servers)
    length = replicas + 1
    chains = tuple(
        tuple(ranks[(first + further) % len(ranks)] for further in range(length))
        for first in range(shards or len(ranks))
    )
    return View(1, chains, (-1,) * len(chains), ranks, (), length, max(size, max(ranks) + 1))


def refusal_to_drain(view: View, server: int) -> str:
    """Return why a server of this view cannot be drained, or an empty text."""
    holding = sorted({one for chain in view.chains for one in chain})
    if server in holding and len(holding) > 1:
        return ""
    return f"server is {server!r}: expected one of several servers that hold shards, here {holding}"


def refusal_to_add(view: View, server: int) -> str:
    """Return why a server of this view cannot be added, or an empty text."""
    if server in view.leaving:
        return ""
    return f"server is {server!r}: expected a server that was drained, and still runs"


def is_done(request: Kind, server: int, view: View) -> bool:
    """Return whether a view contains the result of the request to DRAIN or ADD a server."""
    if request is Kind.DRAIN:
        return server in view.leaving and not view.holds(server)
    return server not in view.leaving


class ViewManager:
    """Decides about views. ``view``: the newest one that is accepted or proposed.

    ``running``: its running servers, in order of succession. ``out`` collects messages as (server,
    message), which the owner sends.
    """

    def __init__(self, view: View, running: Iterable[int]) -> None:
        self.view = view
        self.running = list(running)
        self.out: list[tuple[int, Message]] = []
        #: Servers that shall hold no shard any more.
        self.leaving = set(view.leaving)
        #: The servers that have not accepted the view yet. The view holds when the set is empty, so
        #: no server answers in it while another one answers in an older view.
        self._unaccepted: set[int] = set()
        #: By shard its last server, if it may lack updates that its predecessor acknowledged. That
        #: server reports FILLED in each view once it has all.
        self._unsynced = {
            shard: chain[-1] for shard, chain in enumerate(view.chains) if len(chain) > 1
        }
        #: Added servers, which may take shards from servers with more shards.
        self._added: set[int] = set()
        #: By shard the server that gives its place to an added server.
        self._moving: dict[int, int] = {}
        #: The meeting of the newest newcomer. A second ADMIT for it has no effect.
        self._newest_meeting = ""
        #: Excluded servers that still have to accept the view without them.
        self._excluded: set[int] = set()
        #: Pairs of servers of which the first one has lost the second one.
        self._severed: set[tuple[int, int]] = set()

    def take_over(self) -> None:
        """Propose the first view of this manager, without the servers that are gone."""
        view, members = self.view, self._members()
        self._unsynced = {shard: one for shard, one in self._unsynced.items() if one in members}
        for shard, other in enumerate(view.filling):
            if other >= 0 and other not in members:
                self._moving.pop(shard, None)
        self._propose(
            [tuple(one for one in chain if one in members) for chain in view.chains],
            [one if one in members else -1 for one in view.filling],
        )

    def _members(self) -> list[int]:
        return [one for one in self.running if one not in self._excluded]

    def lose(self, server: int) -> None:
        """Remove a server that is gone from all chains."""
        if server in self.running:
            self.running.remove(server)
            self.take_over()

    def handle(self, server: int, message: Message) -> None:
        """Handle a FILLED or ACCEPTED of a server."""
        view, shard = self.view, message.shard
        if message.view != view.number:
            return
        if message.kind is Kind.ACCEPTED and server in self._unaccepted:
            self._unaccepted.discard(server)
            if not self._unaccepted:
                self._broadcast(Kind.VIEW)
                self.running = self._members()
                self._excluded.clear()
        elif message.kind is Kind.FILLED and shard < len(view.chains):
            if view.filling[shard] == server:
                chains, filling = list(view.chains), list(view.filling)
                chains[shard] = (*chains[shard], server)
                filling[shard] = -1
                self._unsynced[shard] = server
                self._propose(chains, filling)
            elif self._unsynced.get(shard) == server:
                del self._unsynced[shard]
                chain, moving = view.chains[shard], len(self._moving)
                self._balance()
                is_leaving = any(self._is_leaving(shard, one) for one in chain)
                if len(chain) > view.length or is_leaving or len(self._moving) > moving:
                    self._propose(list(view.chains), list(view.filling))

    def propose_above(self, number: int) -> None:
        """Propose the view again, with a number above one that a server has accepted."""
        if number >= self.view.number:
            self.view = self.view._replace(number=number)
            self._propose(list(self.view.chains), list(self.view.filling))

    def add(self, server: int) -> None:
        """Let a new or drained server hold shards.

        It is filled where a chain is too short, and takes shards from servers that have at least
        two more.
        """
        if server not in self.running or server in self.leaving:
            if server not in self.running:
                self.running.append(server)
            self.leaving.discard(server)
            self._added.add(server)
            self._balance()
            self._propose(list(self.view.chains), list(self.view.filling))

    def handle_join(self, message: Message) -> None:
        """Handle an ADMIT, JOINED or JOIN_FAILED.

        One process joins at a time. A server repeats its ADMIT after the other one has joined.
        """
        view = self.view
        if message.kind is Kind.ADMIT:
            newcomer = Newcomer.from_bytes(bytes(message.payload))
            is_free = view.joining is None and view.joins < NEWCOMERS_MAX
            if not is_free or newcomer.meeting == self._newest_meeting:
                return
            self._newest_meeting = newcomer.meeting
            rank = view.ranks if newcomer.rank < 0 else newcomer.rank
            admitted = newcomer._replace(serial=view.joins + 1, rank=rank)
            ranks = max(view.ranks, rank + 1)
            self.view = view._replace(ranks=ranks, joins=admitted.serial, joining=admitted)
        elif view.joining is not None and view.joining.serial == message.key:
            self.view = view._replace(joining=None)
            if message.kind is Kind.JOINED and view.joining.serves:
                self.add(view.joining.rank)
                return
        else:
            return
        self._propose(list(view.chains), list(view.filling))

    def drain(self, server: int) -> None:
        """Move the shards of a server to others. It keeps those that no other server can take."""
        if server in self.running and server not in self.leaving:
            self.leaving.add(server)
            self._propose(list(self.view.chains), list(self.view.filling))

    def sever(self, server: int, other: int) -> None:
        """Note that ``server`` has lost ``other``, and tell ``other`` to drop the connection too.

        If ``other`` reports SEVERED in its turn, both run. If its process has ended, the manager
        soon finds its own connection to it broken.
        """
        members = self._members()
        if server in members and other in members and server != other:
            self._severed.add((server, other))
            if (other, server) not in self._severed:
                message = Message(Kind.SEVERED, key=other, worker=server)
                self.out.append((other, message))

    def _broken_pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of running servers that do not reach each other."""
        members = self._members()
        return sorted(
            (one, other)
            for one, other in self._severed
            if one < other and (other, one) in self._severed and {one, other} <= {*members}
        )

    def removable_servers(self) -> list[int]:
        """Return the servers with broken connections that no shard needs for its values.

        The first one has the most broken connections; among equals, the latest in succession.
        """
        ends = [one for pair in self._broken_pairs() for one in pair]
        order = self.running.index
        found = sorted({*ends}, key=lambda one: (-ends.count(one), -order(one)))
        return [one for one in found if self.keeps_all_without(one)]

    def keeps_all_without(self, *servers: int) -> bool:
        """Return whether each shard is on another server that has all its acknowledged updates."""
        return all(
            any(one not in servers and self._unsynced.get(shard) != one for one in chain)
            for shard, chain in enumerate(self.view.chains)
            if chain
        )

    def exclude(self, server: int) -> None:
        """Remove a running server from all chains.

        It has to accept the view like the others, so it does not answer any more when the view
        holds.
        """
        self._excluded.add(server)
        self.take_over()

    def announce_broken(self) -> None:
        """Propose a view that names the broken pairs, so that no server fills over one."""
        if tuple(self._broken_pairs()) != self.view.severed:
            self._propose(list(self.view.chains), list(self.view.filling))

    def _is_leaving(self, shard: int, server: int) -> bool:
        return server in self.leaving or self._moving.get(shard) == server

    def _eligible(self) -> set[int]:
        return set(self._members()) - self.leaving

    def _balance(self) -> None:
        """Choose the shards that added servers take from servers with at least two more.

        A shard moves only while its chain is complete and in sync; other shards move later.
        """
        view = self.view
        shares = self._shares(self._eligible(), view.chains, view.filling)
        for giving in self._moving.values():
            if giving in shares:
                shares[giving] -= 1
        for shard, chain in enumerate(view.chains):
            is_quiet = view.filling[shard] < 0 and shard not in {*self._unsynced, *self._moving}
            takers = [one for one in shares if one in self._added and one not in chain]
            givers = [one for one in chain if one in shares]
            if not is_quiet or len(chain) != view.length or not takers or not givers:
                continue
            taking = min(takers, key=shares.__getitem__)
            giving = max(givers, key=shares.__getitem__)
            if shares[giving] >= shares[taking] + 2:
                self._moving[shard] = giving
                shares[giving] -= 1
                shares[taking] += 1

    def _propose(self, chains: list[tuple[int, ...]], filling: list[int]) -> None:
        view, length = self.view, self.view.length
        # The only server of a chain has all updates that it has acknowledged.
        self._unsynced = {
            shard: last for shard, last in self._unsynced.items() if chains[shard][1:]
        }
        for shard, chain in enumerate(chains):
            if filling[shard] in self.leaving or self._is_cut_off(chain, filling[shard]):
                filling[shard] = -1
            staying = tuple(one for one in chain if not self._is_leaving(shard, one))
            if chain and filling[shard] < 0 and len(staying) < length:
                filling[shard] = self._spare_server(chains, filling, chain)
                if filling[shard] < 0 and self._moving.pop(shard, None) is not None:
                    # No server can take the place, so this one keeps it.
                    staying = tuple(one for one in chain if not self._is_leaving(shard, one))
            if staying and filling[shard] < 0 and shard not in self._unsynced:
                # A chain is too long if its drained server was added again meanwhile.
                chains[shard] = staying[-length:]
                self._moving.pop(shard, None)
        servers = tuple(self._members())
        leaving = tuple(one for one in servers if one in self.leaving)
        self.view = view._replace(
            number=view.number + 1,
            chains=tuple(chains),
            filling=tuple(filling),
            servers=servers,
            leaving=leaving,
            severed=tuple(self._broken_pairs()),
        )
        self._unaccepted = set(self.running)
        self._broadcast(Kind.PROPOSE)

    def _broadcast(self, kind: Kind) -> None:
        message = Message(kind, view=self.view.number, payload=self.view.to_bytes())
        self.out += [(server, message) for server in self.running]

    def _spare_server(
        self, chains: list[tuple[int, ...]], filling: list[int], chain: tuple[int, ...]
    ) -> int:
        """Return the server outside the chain that holds the fewest shards, or -1."""
        shares = self._shares(self._eligible() - set(chain), chains, filling)
        reached = [one for one in shares if not self._is_cut_off(chain, one)]
        return min(reached, key=lambda one: shares[one], default=-1)

    def _is_cut_off(self, chain: tuple[int, ...], server: int) -> bool:
        """Return whether a server does not reach the last server of a chain."""
        return bool(chain) and tuple(sorted((chain[-1], server))) in self._broken_pairs()

    @staticmethod
    def _shares(
        servers: Iterable[int], chains: Sequence[tuple[int, ...]], filling: Sequence[int]
    ) -> dict[int, int]:
        """Return by server, in rank order, how many shards it holds or is filled with."""
        shares = dict.fromkeys(sorted(servers), 0)
        for one in [*(one for chain in chains for one in chain), *filling]:
            if one in shares:
                shares[one] += 1
        return shares


class Voter:
    """A server's part in decisions about views. ``me``: its rank.

    ``view``: the one that holds; the owner reads it after each call. ``accepted``: the newest one
    that this server has accepted. While it is newer than ``view``, the owner freezes the shards
    whose servers it changes. ``out`` collects messages as (server, message).

    A server that loses its quorum stops, unless the lost servers have certainly ended: they may run
    on and decide. So at most one partition of a store goes on.
    """

    def __init__(self, me: int, view: View) -> None:
        self.me = me
        self.view = view
        self.accepted = view
        self.out: list[tuple[int, Message]] = []
        #: The reason why this server has stopped, or an empty text.
        self.stop_reason = ""
        #: The state of the manager, if this server is the manager.
        self.manager: ViewManager | None = None
        #: Servers whose connections are lost, and those of them whose processes have ended.
        self.lost: set[int] = set()
        self._ended: set[int] = set()
        #: On a successor: the accepted views that others have reported, and the queried servers.
        self._view_replies: dict[int, View] | None = None
        self._queried: set[int] = set()
        #: By server its newest order. It waits here until that server is the leader.
        self._orders: dict[int, Message] = {}
        if view.number == 1 and self.leader == me:
            self.manager = ViewManager(view, view.servers)

    @property
    def has_stopped(self) -> bool:
        """Whether this server has stopped, so that it is in no view any more."""
        return self.stop_reason != ""

    @property
    def leader(self) -> int:
        """The first server of the view that this one has not lost: the manager or its successor."""
        return next((one for one in self.view.servers if one not in self.lost), self.me)

    @property
    def running(self) -> list[int]:
        """The other servers of the view that this one has not lost."""
        return [one for one in self._running(self.view.servers) if one != self.me]

    def handle(self, source: int, message: Message) -> None:
        """Handle a message about views. DRAIN and ADD may come from any process."""
        kind = message.kind
        if self.has_stopped or source in self.lost:
            return
        if kind in _ORDERS:
            self._orders[source] = message
            self._report_rivals()
            self._process_orders()
        elif kind is Kind.SEVERED:
            self._handle_severed(message)
        elif kind is Kind.VIEW_REPLY:
            if self.manager is not None:
                self.manager.propose_above(message.view)
            elif self._view_replies is not None:
                self._view_replies[source] = View.from_bytes(bytes(message.payload))
                self._become_manager()
        elif kind is Kind.UNMANAGED:
            if message.flags & EXCLUDED:
                self.stop(_EXCLUDED_REASON)
            else:
                self.lose(source, True)
        elif self.manager is not None:
            self._manage(self.manager, source, message)
        elif self.leader != self.me and (kind in _MANAGER_REQUESTS or source == self.me):
            self.out.append((self.leader, message))
        self._resolve_broken()
        self._deliver_own()

    def _handle_severed(self, message: Message) -> None:
        """Handle the report that server ``worker`` has lost server ``key``."""
        if message.key != self.me:
            if self.manager is not None:
                self.manager.sever(message.worker, message.key)
            elif self.leader != self.me:
                # The sender has lost the manager, and takes this server for it. Forward the report.
                self.out.append((self.leader, message))
        elif message.worker in self.lost:
            self._report_losses()
        else:
            self.lose(message.worker, False)

    def _report_losses(self) -> None:
        """Report the servers of the view that this one has lost to the manager.

        A lost server ahead of that manager may run, and be the manager of others. This server tells
        those others, which report it to that server. Otherwise it would wait for an answer from
        here.
        """
        leader = self.leader
        if leader == self.me:
            return
        for one in sorted(self.lost.intersection(self.view.servers)):
            message = Message(Kind.SEVERED, key=one, worker=self.me)
            self.out.append((leader, message))
            servers = self.view.servers
            if one not in self._ended and servers.index(one) < servers.index(leader):
                self.out += [(other, message) for other in self.running if other != leader]

    def _report_rivals(self) -> None:
        """Report each sender of a VIEW_QUERY to the manager, which may not know that it lost it."""
        leader = self.leader
        for rival, order in self._orders.items():
            is_rival = order.kind is Kind.VIEW_QUERY and rival in self.view.servers
            if is_rival and leader not in (self.me, rival):
                self.out.append((leader, Message(Kind.SEVERED, key=leader, worker=rival)))

    def _resolve_broken(self) -> None:
        """On the manager: exclude a server of a broken connection, or announce the broken pair."""
        manager = self.manager
        if manager is None:
            return
        others = (one for one in manager.removable_servers() if one != self.me)
        chosen = next((one for one in others if self._has_quorum(one)), None)
        if chosen is not None:
            manager.exclude(chosen)
        else:
            manager.announce_broken()

    def drop_silent(self, silent: Iterable[int]) -> None:
        """Count silent servers as lost, if the others have a quorum and all acknowledged values.

        Otherwise the others wait for them, and calls that need them end by their time limits.
        """
        found = [one for one in silent if one in self.running]
        keeps = all(set(chain) - set(found) for chain in self.view.chains if chain)
        if self.manager is not None:
            keeps = keeps and self.manager.keeps_all_without(*found)
        if found and keeps and self._has_quorum(*found):
            for one in found:
                self.lose(one, False)

    def _manage(self, manager: ViewManager, source: int, message: Message) -> None:
        if message.kind in _JOIN_REPORTS:
            manager.handle_join(message)
        elif message.kind is Kind.DRAIN:
            manager.drain(message.key)
        elif message.kind is not Kind.ADD:
            manager.handle(source, message)
        elif message.key in manager.leaving or source == message.key:
            # A new server sends its ADD itself, so its connection to the manager works.
            manager.add(message.key)

    def lose(self, server: int, has_ended: bool) -> None:
        """Note that the connection to a server is lost.

        ``has_ended``: whether its process has certainly ended.
        """
        if server in self.lost or self.has_stopped:
            return
        self.lost.add(server)
        if has_ended:
            self._ended.add(server)
        self._orders.pop(server, None)
        if not self._has_quorum():
            self.stop(self._no_quorum_text())
        elif self.manager is not None:
            self.manager.lose(server)
            self._resolve_broken()
        elif self.leader == self.me:
            self._become_manager()
        else:
            self._process_orders()
        if not self.has_stopped:
            self._report_rivals()
            self._report_losses()
        self._deliver_own()

    def _running(self, servers: Iterable[int]) -> list[int]:
        return [one for one in servers if one not in self.lost]

    def _has_quorum(self, *without: int) -> bool:
        """Return whether the reachable servers, without some, are a quorum of the view."""
        return all(
            is_quorum([one for one in self._running(base) if one not in without], self._ended, base)
            for base in (self.view.servers, self.accepted.servers)
        )

    def _no_quorum_text(self) -> str:
        return (
            f"it reaches servers {self._running(self.view.servers)} of {list(self.view.servers)}, "
            "and these may not decide for all"
        )

    def stop(self, reason: str) -> None:
        """Stop this server for good. ``reason``: the text for the error of its process."""
        if self.has_stopped:
            return
        self.stop_reason = reason
        self.manager = None
        message = Message(Kind.UNMANAGED)
        # A lost server may still receive messages from this one.
        self.out += [(one, message) for one in self.view.servers if one != self.me]

    def _become_manager(self) -> None:
        """Query the accepted views of the others; become the manager once all have answered."""
        if self._view_replies is None:
            self._view_replies = {}
        known = [self.accepted, *self._view_replies.values()]
        self.accepted = max(known, key=lambda one: one.number)
        # A server that has just joined may be the only one that knows the newest proposal.
        named = dict.fromkeys([*self.accepted.servers, *self.view.servers])
        others = [one for one in self._running(named) if one != self.me]
        self.out += [(one, Message(Kind.VIEW_QUERY)) for one in others if one not in self._queried]
        self._queried.update(others)
        if all(one in self._view_replies for one in others):
            if not self._has_quorum():
                self.stop(self._no_quorum_text())
                return
            # Servers obey the first server of their view, even if the accepted view excludes it.
            own = [self.me] if self.me in named else []
            self.manager = ViewManager(self.accepted, [*own, *others])
            self.manager.take_over()

    def _process_orders(self) -> None:
        """Execute the leader's order, and tell servers outside the view that they are excluded."""
        order = self._orders.pop(self.leader, None)
        if order is not None:
            self._execute_order(self.leader, order)
        for source in [one for one in self._orders if one not in self.view.servers]:
            del self._orders[source]
            self.out.append((source, Message(Kind.UNMANAGED, flags=EXCLUDED)))

    def _execute_order(self, source: int, order: Message) -> None:
        number, text = self.accepted.number, self.accepted.to_bytes()
        reply = Message(Kind.VIEW_REPLY, view=number, payload=text)
        if order.kind is Kind.VIEW_QUERY:
            self.out.append((source, reply))
            return
        view = View.from_bytes(bytes(order.payload))
        if order.kind is Kind.PROPOSE and view.number > number:
            self.accepted = view
            self.out.append((source, Message(Kind.ACCEPTED, view=view.number)))
        elif order.kind is Kind.PROPOSE and view != self.accepted:
            # An earlier manager proposed another view with this number, and its successor does not
            # know that. The reply makes it choose a higher number.
            self.out.append((source, reply))
        elif order.kind is Kind.VIEW and view.number > self.view.number:
            excluded = {*self.view.servers} - {*view.servers}
            if self.me in excluded:
                self.stop(_EXCLUDED_REASON)
                return
            # The manager may not reach a server that this one reaches. A lost server may only be
            # stopped, and learns of its exclusion later.
            self.out += [(one, Message(Kind.UNMANAGED, flags=EXCLUDED)) for one in sorted(excluded)]
            self.view = view
            self.accepted = max(self.accepted, view, key=lambda one: one.number)
            self._report_losses()

    def _deliver_own(self) -> None:
        """Collect the manager's messages, and deliver those to this server at once."""
        while True:
            if self.manager is not None:
                self.out += self.manager.out
                self.manager.out.clear()
            own = [message for to, message in self.out if to == self.me]
            if not own:
                return
            self.out = [one for one in self.out if one[0] != self.me]
            for message in own:
                self._handle_own(message)

    def _handle_own(self, message: Message) -> None:
        if message.kind in _ORDERS:
            self._execute_order(self.me, message)
        elif self.manager is not None:
            self.manager.handle(self.me, message)
            self._resolve_broken()
