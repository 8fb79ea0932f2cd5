"""The server as a machine: it takes messages and losses, and gives messages.

It has no sockets, threads or clocks. ``server_threads.py`` runs it on real connections, and
the tests run it on a simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pycoll.ps.messages import MANAGER, READS, UPDATES, Kind, Message
from pycoll.ps.replica import Replica
from pycoll.ps.shard import Shard
from pycoll.ps.views import View

#: Messages of views that this server does not know yet; a peer cannot be so far ahead.
_EARLY_MAX = 1 << 16


class ServerMachine:
    """A server. ``me``: its rank; ``workers``: the ranks of the workers.

    ``make_shard`` makes the empty state of a shard by number. ``out`` collects messages as
    (peer, message); the owner takes them off after each call.
    """

    def __init__(
        self, me: int, workers: Iterable[int], view: View, make_shard: Callable[[int], Shard]
    ) -> None:
        self.me = me
        self.view = View(0, (), ())
        self.out: list[tuple[int, Message]] = []
        self.replicas: dict[int, Replica] = {}
        #: The workers that have not left; the server has ended when none is left.
        self.workers = set(workers)
        self._gone: set[int] = set()
        self._make_shard = make_shard
        self._early: list[tuple[int, Message]] = []
        self.adopt(view)

    def hear(self, source: int, message: Message) -> None:
        """Take a message. A message that makes no sense is ignored, as a lost one is."""
        kind = message.kind
        if kind is Kind.VIEW:
            if source == MANAGER:
                self.adopt(View.from_bytes(bytes(message.payload)))
        elif kind is Kind.BYE:
            self.lose(source)
        elif message.view > self.view.number:
            if len(self._early) < _EARLY_MAX:
                self._early.append((source, message))
        elif message.view == self.view.number:
            replica = self.replicas.get(message.shard)
            from_worker = kind in READS or (kind in UPDATES and message.lsn == 0)
            if replica is not None and (not from_worker or source == message.worker):
                replica.hear(source, message)

    def lose(self, peer: int) -> None:
        """Note that a worker is gone. The view manager decides about servers."""
        if peer in self.workers:
            self.workers.discard(peer)
            self._gone.add(peer)
            for replica in self.replicas.values():
                replica.leave_of(peer)

    def adopt(self, view: View) -> None:
        """Take the places of a newer view, and tell it to the workers."""
        if view.number <= self.view.number:
            return
        self.view = view
        held = {}
        for number, (chain, filling) in enumerate(zip(view.chains, view.filling, strict=True)):
            if self.me in chain or self.me == filling:
                replica = self.replicas.get(number)
                if replica is None:
                    shard = self._make_shard(number)
                    replica = Replica(self.me, number, shard, self.out)
                held[number] = replica
                replica.adopt(view.number, chain, filling)
        self.replicas = held
        text = view.to_bytes()
        told = Message(Kind.VIEW, view=view.number, payload=text)
        if view.number > 1:
            self.out += [(worker, told) for worker in sorted(self.workers)]
            self.out.append((MANAGER, Message(Kind.ADOPTED, view=view.number)))
        for replica in held.values():
            for worker in sorted(self._gone):
                replica.leave_of(worker)
        early, self._early = self._early, []
        for source, message in early:
            self.hear(source, message)

    def stats(self) -> dict[str, object]:
        """Return the figures of this server, for ``pycoll ps``."""
        shards = [self.replicas[number].stats() for number in sorted(self.replicas)]
        return {"rank": self.me, "view": self.view.number, "shards": shards}
