"""Views: which servers hold each shard, in order; and the machines that decide about them.

The servers decide by themselves. The first server of a view that runs is the manager: it proposes
the next view to all servers that run, and the view holds once all of them have accepted it. Servers
and workers stamp messages with the view that they know, and a server answers in its own view only.
When the manager is gone, the next server of the view manages. A server whose connection breaks
counts as gone and is never taken back.
"""

from __future__ import annotations

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
}
#: Orders of the manager. A server takes them of the first server that it has not lost, and of no
#: other one.
_ORDERS = frozenset((Kind.RECALL, Kind.PROPOSE, Kind.VIEW))
#: Words of a server about newcomers.
_OF_NEWCOMERS = frozenset((Kind.ADMIT, Kind.JOINED, Kind.LEFT))
#: Wishes of any peer for the manager. Another server passes them on; one that is about to manage
#: ignores them, so callers repeat them.
_WISHES = frozenset((Kind.DRAIN, Kind.ADD, *_OF_NEWCOMERS))


class View(NamedTuple):
    """A view, with all that a manager needs to go on from it.

    ``chains``: by shard the servers that hold it; the first one takes updates, the last one
    answers. ``filling``: by shard the server that is being filled and follows the last one, or -1.
    ``servers``: those that run, in the order in which they manage. ``leaving``: those of them that
    shall hold no shard. ``length``: the servers that each chain wants. ``ranks``: how many ranks
    were given. ``joins``: how many newcomers there were. ``joining``: the one with which all
    connect.
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
        )

    def holds(self, server: int) -> bool:
        """Return whether the server is in a chain."""
        return any(server in chain for chain in self.chains)


def _are_whole(values: list[object]) -> bool:
    return all(type(one) is int and -1 <= one < 1 << 31 for one in values)


def first_view(servers: Iterable[int], replicas: int, size: int = 0) -> View:
    """Return the view of a new store: as many shards as servers, each with ``replicas`` more.

    ``size``: the number of ranks, workers included; 0 where servers are the last ones.
    """
    ranks = tuple(servers)
    length = replicas + 1
    chains = tuple(
        tuple(ranks[(first + further) % len(ranks)] for further in range(length))
        for first in range(len(ranks))
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
        #: By shard the member that shall give its place to another server.
        self._moving: dict[int, int] = {}
        #: The meeting of the newest newcomer, for which a server may ask twice.
        self._met = ""

    def take_over(self) -> None:
        """Decide on the first view of this manager, without the servers that are gone."""
        view, alive = self.view, self.alive
        self._fresh = {shard: one for shard, one in self._fresh.items() if one in alive}
        for shard, other in enumerate(view.filling):
            if other >= 0 and other not in alive:
                self._moving.pop(shard, None)
        self._decide(
            [tuple(one for one in chain if one in alive) for chain in view.chains],
            [one if one in alive else -1 for one in view.filling],
        )

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
        elif message.kind is Kind.FILLED and shard < len(view.chains):
            if view.filling[shard] == server:
                chains, filling = list(view.chains), list(view.filling)
                chains[shard] = (*chains[shard], server)
                filling[shard] = -1
                self._fresh[shard] = server
                self._decide(chains, filling)
            elif self._fresh.get(shard) == server:
                del self._fresh[shard]
                chain = view.chains[shard]
                if len(chain) > view.length or any(self._leaves(shard, one) for one in chain):
                    self._decide(list(view.chains), list(view.filling))

    def add(self, server: int) -> None:
        """Take a new server in, or one that was drained. It is filled where a chain is too short,
        and takes places of servers that have at least two more of them."""
        if server not in self.alive or server in self.leaving:
            if server not in self.alive:
                self.alive.append(server)
            self.leaving.discard(server)
            self._balance(server)
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

    def _leaves(self, shard: int, server: int) -> bool:
        return server in self.leaving or self._moving.get(shard) == server

    def _staying(self) -> set[int]:
        return set(self.alive) - self.leaving

    def _balance(self, server: int) -> None:
        shares = self._shares(self._staying(), self.view.chains, self.view.filling)
        for shard, chain in enumerate(self.view.chains):
            is_quiet = self.view.filling[shard] < 0 and shard not in {*self._fresh, *self._moving}
            if not is_quiet or server in chain or len(chain) != self.view.length:
                continue
            giving = max(
                (one for one in chain if one in shares), key=shares.__getitem__, default=-1
            )
            if giving >= 0 and shares[giving] >= shares[server] + 2:
                self._moving[shard] = giving
                shares[giving] -= 1
                shares[server] += 1

    def _decide(self, chains: list[tuple[int, ...]], filling: list[int]) -> None:
        view, length = self.view, self.view.length
        # The first server of a chain has all that it has acknowledged.
        self._fresh = {one: who for one, who in self._fresh.items() if chains[one][1:]}
        for shard, chain in enumerate(chains):
            if filling[shard] in self.leaving:
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
        servers = tuple(self.alive)
        leaving = tuple(one for one in servers if one in self.leaving)
        self.view = view._replace(
            number=view.number + 1,
            chains=tuple(chains),
            filling=tuple(filling),
            servers=servers,
            leaving=leaving,
        )
        self._asked = set(servers)
        self._tell(Kind.PROPOSE)

    def _tell(self, kind: Kind) -> None:
        told = Message(kind, view=self.view.number, payload=self.view.to_bytes())
        self.out += [(server, told) for server in self.alive]

    def _spare(
        self, chains: list[tuple[int, ...]], filling: list[int], chain: tuple[int, ...]
    ) -> int:
        """Return the server outside the chain that holds the fewest shards, or -1."""
        shares = self._shares(self._staying() - set(chain), chains, filling)
        return min(shares, key=lambda one: shares[one], default=-1)

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
        self.has_stopped = False
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
            self._follow()
        elif kind is Kind.RECALLED:
            if self._recalled is not None and self.manager is None:
                self._recalled[source] = View.from_bytes(bytes(message.payload))
                self._succeed()
        elif kind is Kind.UNMANAGED:
            if message.flags & OUT:
                self._stop()
            else:
                self.lose(source, True)
        elif self.manager is not None:
            self._manage(self.manager, source, message)
        elif self.leader != self.me and (kind in _WISHES or source == self.me):
            self.out.append((self.leader, message))
        self._carry_out()

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
            self._stop()
        elif self.manager is not None:
            self.manager.lose(server)
        elif self.leader == self.me:
            self._succeed()
        else:
            self._follow()
        self._carry_out()

    def _running(self, servers: Iterable[int]) -> list[int]:
        return [one for one in servers if one not in self.lost]

    def _may_decide(self) -> bool:
        return all(
            is_quorum(self._running(base), self._ended, base)
            for base in (self.view.servers, self.accepted.servers)
        )

    def _stop(self) -> None:
        self.has_stopped = True
        self.manager = None
        told = Message(Kind.UNMANAGED)
        self.out += [(one, told) for one in self._running(self.view.servers) if one != self.me]

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
                self._stop()
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
        if order.kind is Kind.RECALL:
            text = self.accepted.to_bytes()
            answer = Message(Kind.RECALLED, view=self.accepted.number, payload=text)
            self.out.append((source, answer))
            return
        view = View.from_bytes(bytes(order.payload))
        if order.kind is Kind.PROPOSE and view.number > self.accepted.number:
            self.accepted = view
            self.out.append((source, Message(Kind.ACCEPTED, view=view.number)))
        elif order.kind is Kind.VIEW and view.number > self.view.number:
            # The manager may not reach a server that this one reaches.
            left_out = {*self.view.servers} - {*view.servers, *self.lost}
            self.out += [(one, Message(Kind.UNMANAGED, flags=OUT)) for one in sorted(left_out)]
            self.view = view
            self.accepted = max(self.accepted, view, key=lambda one: one.number)

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
