"""Views: which servers hold each shard, in order; and the machines that decide about them.

The servers decide by themselves. The first server of a view that runs is the manager: it proposes
the next view to all servers that run, and the view holds once all of them have accepted it. Servers
and workers stamp messages with the view that they know, and a server answers in its own view only.
When the manager is gone, the next server of the view manages. A server that the manager does not
reach counts as gone and is never taken back. Where two other servers do not reach each other, the
manager leaves one of them out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.bootstrap.recovery.council import is_quorum
from pycoll.ps.membership.newcomers import NEWCOMERS_MAX, Newcomer
from pycoll.ps.messages import OUT, TEXT_BYTES_MAX, Kind, Message
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
#: Orders of the manager. A server takes them of the first server that it has not lost, and of no
#: other one.
_ORDERS = frozenset((Kind.RECALL, Kind.PROPOSE, Kind.VIEW))
#: Words of a server about newcomers.
_OF_NEWCOMERS = frozenset((Kind.ADMIT, Kind.JOINED, Kind.LEFT))
#: Wishes of any peer for the manager. Another server passes them on; one that is about to manage
#: ignores them, so callers repeat them.
_WISHES = frozenset((Kind.DRAIN, Kind.ADD, *_OF_NEWCOMERS))


#: Why a server stops that a view leaves out.
_LEFT_OUT = (
    "the other servers go on without it, since it was silent for too long, or its connection with "
    "one of them is broken"
)


class View(NamedTuple):
    """A view, with all that a manager needs to go on from it.

    ``chains``: by shard the servers that hold it; the first one takes updates, the last one
    answers. ``filling``: by shard the server that is being filled and follows the last one, or -1.
    ``servers``: those that run, in the order in which they manage. ``leaving``: those of them that
    shall hold no shard. ``length``: the servers that each chain wants. ``ranks``: how many ranks
    were given. ``joins``: how many newcomers there were. ``joining``: the one with which all
    connect. ``severed``: pairs of servers that do not reach each other, and cannot be left out.
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
        """Return a text about a broken connection in the chain of a shard, or an empty one."""
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
    """Return the view of a new store: shards that take turns among the servers, each with
    ``replicas`` more.

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


def is_done(wish: Kind, server: int, view: View) -> bool:
    """Return whether a view fulfils the wish to DRAIN or ADD a server."""
    if wish is Kind.DRAIN:
        return server in view.leaving and not view.holds(server)
    return server not in view.leaving


class ViewManager:
    """Decides about views. ``view``: the newest one that a server has accepted.

    ``running``: its servers that run, in their order. ``out`` collects messages as (server,
    message); the owner takes them off.
    """

    def __init__(self, view: View, running: Iterable[int]) -> None:
        self.view = view
        self.alive = list(running)
        self.out: list[tuple[int, Message]] = []
        #: Servers that shall hold no shard any more.
        self.leaving = set(view.leaving)
        #: The servers that have not accepted the view yet. All of them stop to answer in older
        #: views before one answers in this one.
        self._asked: set[int] = set()
        #: By shard the last member, where it may lack what the one before it has acknowledged. It
        #: tells the manager in each view when it has all.
        self._fresh = {
            shard: chain[-1] for shard, chain in enumerate(view.chains) if len(chain) > 1
        }
        #: Servers that were added, and take shards of those that have more.
        self._added: set[int] = set()
        #: By shard the member that shall give its place to another server.
        self._moving: dict[int, int] = {}
        #: The meeting of the newest newcomer, for which a server may ask twice.
        self._met = ""
        #: Servers that are left out, and run until they have accepted that.
        self._outside: set[int] = set()
        #: Pairs of servers of which the first one has lost the second one.
        self._severed: set[tuple[int, int]] = set()

    def take_over(self) -> None:
        """Decide on the first view of this manager, without the servers that are gone."""
        view, members = self.view, self._members()
        self._fresh = {shard: one for shard, one in self._fresh.items() if one in members}
        for shard, other in enumerate(view.filling):
            if other >= 0 and other not in members:
                self._moving.pop(shard, None)
        self._decide(
            [tuple(one for one in chain if one in members) for chain in view.chains],
            [one if one in members else -1 for one in view.filling],
        )

    def _members(self) -> list[int]:
        return [one for one in self.alive if one not in self._outside]

    def lose(self, server: int) -> None:
        """Take a server that is gone out of all chains."""
        if server in self.alive:
            self.alive.remove(server)
            self.take_over()

    def hear(self, server: int, message: Message) -> None:
        """Take a message of a server: it has been filled, or has accepted the view."""
        view, shard = self.view, message.shard
        if message.view != view.number:
            return
        if message.kind is Kind.ACCEPTED and server in self._asked:
            self._asked.discard(server)
            if not self._asked:
                self._tell(Kind.VIEW)
                self.alive = self._members()
                self._outside.clear()
        elif message.kind is Kind.FILLED and shard < len(view.chains):
            if view.filling[shard] == server:
                chains, filling = list(view.chains), list(view.filling)
                chains[shard] = (*chains[shard], server)
                filling[shard] = -1
                self._fresh[shard] = server
                self._decide(chains, filling)
            elif self._fresh.get(shard) == server:
                del self._fresh[shard]
                chain, moving = view.chains[shard], len(self._moving)
                self._balance()
                is_leaving = any(self._leaves(shard, one) for one in chain)
                if len(chain) > view.length or is_leaving or len(self._moving) > moving:
                    self._decide(list(view.chains), list(view.filling))

    def outbid(self, number: int) -> None:
        """Propose the view anew with a higher number than one that a server has accepted."""
        if number >= self.view.number:
            self.view = self.view._replace(number=number)
            self._decide(list(self.view.chains), list(self.view.filling))

    def add(self, server: int) -> None:
        """Take a new server in, or one that was drained. It is filled where a chain is too short,
        and takes places of servers that have at least two more of them."""
        if server not in self.alive or server in self.leaving:
            if server not in self.alive:
                self.alive.append(server)
            self.leaving.discard(server)
            self._added.add(server)
            self._balance()
            self._decide(list(self.view.chains), list(self.view.filling))

    def hear_of_newcomer(self, message: Message) -> None:
        """Take the wish of a process to join, or the end of its joining.

        One joins at a time: a server asks again when another one has come.
        """
        view = self.view
        if message.kind is Kind.ADMIT:
            asked = Newcomer.from_bytes(bytes(message.payload))
            is_free = view.joining is None and view.joins < NEWCOMERS_MAX
            if not is_free or asked.meeting == self._met:
                return
            self._met = asked.meeting
            rank = view.ranks if asked.rank < 0 else asked.rank
            made = asked._replace(serial=view.joins + 1, rank=rank)
            ranks = max(view.ranks, rank + 1)
            self.view = view._replace(ranks=ranks, joins=made.serial, joining=made)
        elif view.joining is not None and view.joining.serial == message.key:
            self.view = view._replace(joining=None)
            if message.kind is Kind.JOINED and view.joining.serves:
                self.add(view.joining.rank)
                return
        else:
            return
        self._decide(list(view.chains), list(view.filling))

    def drain(self, server: int) -> None:
        """Give the shards of a server to others; where there is no other one, it keeps them."""
        if server in self.alive and server not in self.leaving:
            self.leaving.add(server)
            self._decide(list(self.view.chains), list(self.view.filling))

    def sever(self, server: int, other: int) -> None:
        """Note that a server has lost another one, which is then asked to give up the first one.

        An answer shows that both run. The end of a server breaks all its connections, and the
        manager finds its own one broken soon.
        """
        members = self._members()
        if server in members and other in members and server != other:
            self._severed.add((server, other))
            if (other, server) not in self._severed:
                told = Message(Kind.SEVERED, key=other, worker=server)
                self.out.append((other, told))

    def _broken(self) -> list[tuple[int, int]]:
        """The pairs of servers that do not reach each other, and both run."""
        members = self._members()
        return sorted(
            (one, other)
            for one, other in self._severed
            if one < other and (other, one) in self._severed and {one, other} <= {*members}
        )

    def superfluous(self) -> list[int]:
        """Return the servers of broken connections without which each shard keeps all its values.

        The first one breaks most connections, or manages last.
        """
        ends = [one for pair in self._broken() for one in pair]
        order = self.alive.index
        found = sorted({*ends}, key=lambda one: (-ends.count(one), -order(one)))
        return [one for one in found if self.keeps_all_without(one)]

    def keeps_all_without(self, *servers: int) -> bool:
        """Return whether each shard is on another server that has all its acknowledged updates."""
        return all(
            any(one not in servers and self._fresh.get(shard) != one for one in chain)
            for shard, chain in enumerate(self.view.chains)
            if chain
        )

    def leave_out(self, server: int) -> None:
        """Take a server that runs out of all chains. It accepts the view like the others, so it
        answers no more when the view holds."""
        self._outside.add(server)
        self.take_over()

    def go_around(self) -> None:
        """Tell the servers of broken connections that stay, and fill none over such a one."""
        if tuple(self._broken()) != self.view.severed:
            self._decide(list(self.view.chains), list(self.view.filling))

    def _leaves(self, shard: int, server: int) -> bool:
        return server in self.leaving or self._moving.get(shard) == server

    def _staying(self) -> set[int]:
        return set(self._members()) - self.leaving

    def _balance(self) -> None:
        """Choose the shards that servers which were added take from servers with at least two more,
        as far as these shards have all their servers; others follow later."""
        view = self.view
        shares = self._shares(self._staying(), view.chains, view.filling)
        for giving in self._moving.values():
            if giving in shares:
                shares[giving] -= 1
        for shard, chain in enumerate(view.chains):
            is_quiet = view.filling[shard] < 0 and shard not in {*self._fresh, *self._moving}
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

    def _decide(self, chains: list[tuple[int, ...]], filling: list[int]) -> None:
        view, length = self.view, self.view.length
        # The first server of a chain has all that it has acknowledged.
        self._fresh = {one: who for one, who in self._fresh.items() if chains[one][1:]}
        for shard, chain in enumerate(chains):
            if filling[shard] in self.leaving or self._is_cut_off(chain, filling[shard]):
                filling[shard] = -1
            staying = tuple(one for one in chain if not self._leaves(shard, one))
            if chain and filling[shard] < 0 and len(staying) < length:
                filling[shard] = self._spare(chains, filling, chain)
                if filling[shard] < 0 and self._moving.pop(shard, None) is not None:
                    # Another member is gone meanwhile, so this one keeps its place.
                    staying = tuple(one for one in chain if not self._leaves(shard, one))
            if staying and filling[shard] < 0 and shard not in self._fresh:
                # A chain is too long if its drained member was added again meanwhile.
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
            severed=tuple(self._broken()),
        )
        self._asked = set(self.alive)
        self._tell(Kind.PROPOSE)

    def _tell(self, kind: Kind) -> None:
        told = Message(kind, view=self.view.number, payload=self.view.to_bytes())
        self.out += [(server, told) for server in self.alive]

    def _spare(
        self, chains: list[tuple[int, ...]], filling: list[int], chain: tuple[int, ...]
    ) -> int:
        """Return the server outside the chain that holds the fewest shards, or -1."""
        shares = self._shares(self._staying() - set(chain), chains, filling)
        reached = [one for one in shares if not self._is_cut_off(chain, one)]
        return min(reached, key=lambda one: shares[one], default=-1)

    def _is_cut_off(self, chain: tuple[int, ...], server: int) -> bool:
        """Return whether a server cannot be filled by the last one of a chain."""
        return bool(chain) and tuple(sorted((chain[-1], server))) in self._broken()

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

    ``view``: the one that holds; the owner looks at it after each call. ``accepted``: the newest
    one that this server has accepted. While it is newer, the owner lets the shards rest whose
    servers it changes. ``out`` collects messages as (server, message).

    A server that has lost too many others without a sign of their end stops: they may run on
    together and decide. So at most one part of a divided store goes on.
    """

    def __init__(self, me: int, view: View) -> None:
        self.me = me
        self.view = view
        self.accepted = view
        self.out: list[tuple[int, Message]] = []
        #: Why this server takes part in no view any more, or an empty text.
        self.why = ""
        #: The manager, while it is this server.
        self.manager: ViewManager | None = None
        #: Servers whose connections are gone, and those of them that decide about nothing any more.
        self.lost: set[int] = set()
        self._ended: set[int] = set()
        #: A successor's collection of the views that the others have accepted, and whom it asked.
        self._recalled: dict[int, View] | None = None
        self._asked: set[int] = set()
        #: By server its newest order, until this server follows it.
        self._orders: dict[int, Message] = {}
        if view.number == 1 and self.leader == me:
            self.manager = ViewManager(view, view.servers)

    @property
    def has_stopped(self) -> bool:
        """Whether this server takes part in no view any more."""
        return self.why != ""

    @property
    def leader(self) -> int:
        """The first server of the view that this one has not lost."""
        return next((one for one in self.view.servers if one not in self.lost), self.me)

    @property
    def running(self) -> list[int]:
        """The other servers of the view that this one has not lost."""
        return [one for one in self._running(self.view.servers) if one != self.me]

    def hear(self, source: int, message: Message) -> None:
        """Take a message about views, of a server or, if it asks to drain or add, of anybody."""
        kind = message.kind
        if self.has_stopped or source in self.lost:
            return
        if kind in _ORDERS:
            self._orders[source] = message
            self._heed_rivals()
            self._follow()
        elif kind is Kind.SEVERED:
            self._hear_of_loss(message)
        elif kind is Kind.RECALLED:
            if self.manager is not None:
                self.manager.outbid(message.view)
            elif self._recalled is not None:
                self._recalled[source] = View.from_bytes(bytes(message.payload))
                self._succeed()
        elif kind is Kind.UNMANAGED:
            if message.flags & OUT:
                self.stop(_LEFT_OUT)
            else:
                self.lose(source, True)
        elif self.manager is not None:
            self._manage(self.manager, source, message)
        elif self.leader != self.me and (kind in _WISHES or source == self.me):
            self.out.append((self.leader, message))
        self._part()
        self._carry_out()

    def _hear_of_loss(self, message: Message) -> None:
        """Take the word that server ``worker`` has lost server ``key``."""
        if message.key != self.me:
            if self.manager is not None:
                self.manager.sever(message.worker, message.key)
            elif self.leader != self.me:
                # A server that has lost the manager tells the next one.
                self.out.append((self.leader, message))
        elif message.worker in self.lost:
            self._complain()
        else:
            self.lose(message.worker, False)

    def _complain(self) -> None:
        """Tell the manager which servers of the view this one has lost.

        A lost server ahead of that manager may run and still manage others. These tell it, since
        it may not know that it is lost, and would wait for an answer of this server.
        """
        leader = self.leader
        if leader == self.me:
            return
        for one in sorted(self.lost.intersection(self.view.servers)):
            told = Message(Kind.SEVERED, key=one, worker=self.me)
            self.out.append((leader, told))
            servers = self.view.servers
            if one not in self._ended and servers.index(one) < servers.index(leader):
                self.out += [(other, told) for other in self.running if other != leader]

    def _heed_rivals(self) -> None:
        """Tell the manager of servers that ask to manage: they have lost it, and it may not know
        that."""
        leader = self.leader
        for rival, order in self._orders.items():
            is_rival = order.kind is Kind.RECALL and rival in self.view.servers
            if is_rival and leader not in (self.me, rival):
                self.out.append((leader, Message(Kind.SEVERED, key=leader, worker=rival)))

    def _part(self) -> None:
        """On the manager: leave out a server of a broken connection, or go on with both."""
        manager = self.manager
        if manager is None:
            return
        others = (one for one in manager.superfluous() if one != self.me)
        chosen = next((one for one in others if self._may_decide(one)), None)
        if chosen is not None:
            manager.leave_out(chosen)
        else:
            manager.go_around()

    def give_up(self, silent: Iterable[int]) -> None:
        """Count servers as lost that have been silent for long, if the others may decide and have
        all values. Otherwise the others wait, and calls that need the servers end by their time
        limit: nothing that was acknowledged is given up."""
        found = [one for one in silent if one in self.running]
        keeps = all(set(chain) - set(found) for chain in self.view.chains if chain)
        if self.manager is not None:
            keeps = keeps and self.manager.keeps_all_without(*found)
        if found and keeps and self._may_decide(*found):
            for one in found:
                self.lose(one, False)

    def _manage(self, manager: ViewManager, source: int, message: Message) -> None:
        if message.kind in _OF_NEWCOMERS:
            manager.hear_of_newcomer(message)
        elif message.kind is Kind.DRAIN:
            manager.drain(message.key)
        elif message.kind is not Kind.ADD:
            manager.hear(source, message)
        elif message.key in manager.leaving or source == message.key:
            # A new server tells it on a connection of its own, by which the manager reaches it.
            manager.add(message.key)

    def lose(self, server: int, has_ended: bool) -> None:
        """Note that the connection to a server is gone.

        ``has_ended``: whether the server certainly takes part in nothing any more.
        """
        if server in self.lost or self.has_stopped:
            return
        self.lost.add(server)
        if has_ended:
            self._ended.add(server)
        self._orders.pop(server, None)
        if not self._may_decide():
            self.stop(self._too_few())
        elif self.manager is not None:
            self.manager.lose(server)
            self._part()
        elif self.leader == self.me:
            self._succeed()
        else:
            self._follow()
        if not self.has_stopped:
            self._heed_rivals()
            self._complain()
        self._carry_out()

    def _running(self, servers: Iterable[int]) -> list[int]:
        return [one for one in servers if one not in self.lost]

    def _may_decide(self, *without: int) -> bool:
        """Return whether the servers that this one reaches, without some, decide for all."""
        return all(
            is_quorum([one for one in self._running(base) if one not in without], self._ended, base)
            for base in (self.view.servers, self.accepted.servers)
        )

    def _too_few(self) -> str:
        return (
            f"it reaches servers {self._running(self.view.servers)} of {list(self.view.servers)}, "
            "and these may not decide for all"
        )

    def stop(self, why: str) -> None:
        """Take part in nothing any more. ``why``: the reason, for the error of the process."""
        if self.has_stopped:
            return
        self.why = why
        self.manager = None
        told = Message(Kind.UNMANAGED)
        # Also a server that this one does not hear may still hear it.
        self.out += [(one, told) for one in self.view.servers if one != self.me]

    def _succeed(self) -> None:
        """Ask the others which view they have accepted; once all have answered, manage."""
        if self._recalled is None:
            self._recalled = {}
        known = [self.accepted, *self._recalled.values()]
        self.accepted = max(known, key=lambda one: one.number)
        # A server that has joined meanwhile may know a proposal that no other one has got.
        named = dict.fromkeys([*self.accepted.servers, *self.view.servers])
        others = [one for one in self._running(named) if one != self.me]
        self.out += [(one, Message(Kind.RECALL)) for one in others if one not in self._asked]
        self._asked.update(others)
        if all(one in self._recalled for one in others):
            if not self._may_decide():
                self.stop(self._too_few())
                return
            # Servers take orders of the first one only, also where the accepted view lacks it.
            own = [self.me] if self.me in named else []
            self.manager = ViewManager(self.accepted, [*own, *others])
            self.manager.take_over()

    def _follow(self) -> None:
        """Obey the order of the first server that runs, and refuse servers that are no more in the
        view."""
        order = self._orders.pop(self.leader, None)
        if order is not None:
            self._obey(self.leader, order)
        for source in [one for one in self._orders if one not in self.view.servers]:
            del self._orders[source]
            self.out.append((source, Message(Kind.UNMANAGED, flags=OUT)))

    def _obey(self, source: int, order: Message) -> None:
        number, text = self.accepted.number, self.accepted.to_bytes()
        recalled = Message(Kind.RECALLED, view=number, payload=text)
        if order.kind is Kind.RECALL:
            self.out.append((source, recalled))
            return
        view = View.from_bytes(bytes(order.payload))
        if order.kind is Kind.PROPOSE and view.number > number:
            self.accepted = view
            self.out.append((source, Message(Kind.ACCEPTED, view=view.number)))
        elif order.kind is Kind.PROPOSE and view != self.accepted:
            # A manager that is gone has proposed another view with this number to a server that
            # its successor did not know.
            self.out.append((source, recalled))
        elif order.kind is Kind.VIEW and view.number > self.view.number:
            left_out = {*self.view.servers} - {*view.servers}
            if self.me in left_out:
                self.stop(_LEFT_OUT)
                return
            # The manager may not reach a server that this one reaches. One that is lost may be
            # stopped, and goes on later.
            self.out += [(one, Message(Kind.UNMANAGED, flags=OUT)) for one in sorted(left_out)]
            self.view = view
            self.accepted = max(self.accepted, view, key=lambda one: one.number)
            self._complain()

    def _carry_out(self) -> None:
        """Take the messages of the manager, and deliver those of this server to itself."""
        while True:
            if self.manager is not None:
                self.out += self.manager.out
                self.manager.out.clear()
            own = [message for to, message in self.out if to == self.me]
            if not own:
                return
            self.out = [one for one in self.out if one[0] != self.me]
            for message in own:
                self._hear_own(message)

    def _hear_own(self, message: Message) -> None:
        if message.kind in _ORDERS:
            self._obey(self.me, message)
        elif self.manager is not None:
            self.manager.hear(self.me, message)
            self._part()
