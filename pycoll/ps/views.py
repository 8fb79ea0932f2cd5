"""Views: which servers hold each shard, in order; and the machine that decides about them.

One rank runs the ``ViewManager``. It is told of servers that are gone and of servers that have been
filled, and numbers the views from 1. Servers and workers stamp messages with the view that they
know, and a server answers in its own view only.

A server whose connection breaks counts as dead. The manager never takes a server back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.ps.messages import TEXT_BYTES_MAX, Kind, Message
from pycoll.untrusted import json_object, read_json

_FACTS = {"number": int, "chains": list, "filling": list}


class View(NamedTuple):
    """A view. ``chains``: by shard the servers that hold it; the first one takes updates, the last
    one answers. ``filling``: by shard the server that is being filled and follows the last one, or
    -1."""

    number: int
    chains: tuple[tuple[int, ...], ...]
    filling: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """Return the view in the form that ``from_bytes`` reads."""
        return json.dumps(self._asdict()).encode()

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
        return cls(facts["number"], tuple(map(tuple, chains)), tuple(facts["filling"]))


def _are_whole(values: list[object]) -> bool:
    return all(type(one) is int and -1 <= one < 1 << 31 for one in values)


def first_view(servers: Iterable[int], replicas: int) -> View:
    """Return the view of a new store: as many shards as servers, each with ``replicas`` more."""
    ranks = list(servers)
    chains = tuple(
        tuple(ranks[(first + further) % len(ranks)] for further in range(replicas + 1))
        for first in range(len(ranks))
    )
    return View(1, chains, (-1,) * len(chains))


class ViewManager:
    """Decides about views. ``servers``: all of them; ``length``: the members that a chain wants.

    ``out`` collects messages as (server, message); the owner takes them off.
    """

    def __init__(self, view: View, servers: Iterable[int], length: int) -> None:
        self.view = view
        self.alive = set(servers)
        self.length = length
        self.out: list[tuple[int, Message]] = []
        #: Servers that shall hold no shard any more.
        self.leaving: set[int] = set()
        #: Servers that run on and lose a shard. They must have stopped to answer, in the newest
        #: view, before another server answers in it.
        self._first: set[int] = set()
        #: By shard the new member that may lack what the one before it has acknowledged.
        self._fresh: dict[int, int] = {}
        #: By shard the member that shall give its place to another server.
        self._moving: dict[int, int] = {}

    def lose(self, server: int) -> None:
        """Take a server that is gone out of all chains."""
        if server in self.alive:
            self.alive.discard(server)
            self._first.discard(server)
            self._fresh = {one: who for one, who in self._fresh.items() if who != server}
            for shard, other in enumerate(self.view.filling):
                if other == server:
                    self._moving.pop(shard, None)
            chains = [tuple(one for one in chain if one != server) for chain in self.view.chains]
            filling = [-1 if one == server else one for one in self.view.filling]
            self._decide(chains, filling)

    def hear(self, server: int, message: Message) -> None:
        """Take a message of a server: it has been filled, or knows a view."""
        view, shard = self.view, message.shard
        if message.view != view.number:
            return
        if message.kind is Kind.FILLED and shard < len(view.chains):
            if view.filling[shard] == server:
                chains, filling = list(view.chains), list(view.filling)
                chains[shard] = (*chains[shard], server)
                filling[shard] = -1
                self._fresh[shard] = server
                self._decide(chains, filling)
            elif self._fresh.get(shard) == server:
                del self._fresh[shard]
                chain = view.chains[shard]
                if len(chain) > self.length or any(self._leaves(shard, one) for one in chain):
                    self._decide(list(view.chains), list(view.filling))
        elif message.kind is Kind.ADOPTED and server in self._first:
            self._first.discard(server)
            if not self._first:
                self._tell(self.alive)

    def add(self, server: int) -> None:
        """Take a new server in, or one that was drained. It is filled where a chain is too short,
        and takes places of servers that have at least two more of them."""
        if server not in self.alive or server in self.leaving:
            self.alive.add(server)
            self.leaving.discard(server)
            self._balance(server)
            self._decide(list(self.view.chains), list(self.view.filling))

    def drain(self, server: int) -> None:
        """Give the shards of a server to others; where there is no other one, it keeps them."""
        if server in self.alive and server not in self.leaving:
            self.leaving.add(server)
            self._decide(list(self.view.chains), list(self.view.filling))

    def _leaves(self, shard: int, server: int) -> bool:
        return server in self.leaving or self._moving.get(shard) == server

    def _balance(self, server: int) -> None:
        shares = self._shares(self.alive - self.leaving, self.view.chains, self.view.filling)
        for shard, chain in enumerate(self.view.chains):
            is_quiet = self.view.filling[shard] < 0 and shard not in {*self._fresh, *self._moving}
            if not is_quiet or server in chain or len(chain) != self.length:
                continue
            giving = max(
                (one for one in chain if one in shares), key=shares.__getitem__, default=-1
            )
            if giving >= 0 and shares[giving] >= shares[server] + 2:
                self._moving[shard] = giving
                shares[giving] -= 1
                shares[server] += 1

    def _decide(self, chains: list[tuple[int, ...]], filling: list[int]) -> None:
        for shard, chain in enumerate(chains):
            if filling[shard] in self.leaving:
                filling[shard] = -1
            staying = tuple(one for one in chain if not self._leaves(shard, one))
            if chain and filling[shard] < 0 and len(staying) < self.length:
                filling[shard] = self._spare(chains, filling, chain)
            if staying and filling[shard] < 0 and shard not in self._fresh:
                # A chain is too long if its drained member was added again meanwhile.
                chains[shard] = staying[-self.length :]
                self._moving.pop(shard, None)
        old, number = self.view, self.view.number + 1
        self.view = View(number, tuple(chains), tuple(filling))
        for shard, chain in enumerate(chains):
            before = {*old.chains[shard], old.filling[shard]}
            self._first |= (before - {*chain, filling[shard]}) & self.alive
        self._tell(self._first or self.alive)

    def _tell(self, servers: Iterable[int]) -> None:
        told = Message(Kind.VIEW, view=self.view.number, payload=self.view.to_bytes())
        self.out += [(server, told) for server in sorted(servers)]

    def _spare(
        self, chains: list[tuple[int, ...]], filling: list[int], chain: tuple[int, ...]
    ) -> int:
        """Return the server outside the chain that holds the fewest shards, or -1."""
        shares = self._shares(self.alive - self.leaving - set(chain), chains, filling)
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
