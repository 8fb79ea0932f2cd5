"""The server as a machine: it takes messages and losses, and gives messages.

It has no sockets, threads or clocks. ``server_threads.py`` runs it on real connections, and
the tests run it on a simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pycoll.ps.messages import READS, UPDATES, VIEWS, Kind, Message
from pycoll.ps.replica import Replica
from pycoll.ps.shard import Shard
from pycoll.ps.views import View, Voter

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
        self.view = View(0, (), (), (), (), 1)
        self.out: list[tuple[int, Message]] = []
        self.replicas: dict[int, Replica] = {}
        #: The workers that have not left; the server has ended when none is left.
        self.workers = set(workers)
        self.voter = Voter(me, view)
        self._gone: set[int] = set()
        self._make_shard = make_shard
        self._early: list[tuple[int, Message]] = []
        #: The shards whose servers the accepted view changes; until it holds, they rest.
        self._resting: frozenset[int] = frozenset()
        #: Messages of the replicas for the view manager.
        self._reports: list[Message] = []
        self._look()

    def hear(self, source: int, message: Message) -> None:
        """Take a message. A message that makes no sense is ignored, as a lost one is."""
        kind = message.kind
        if kind in VIEWS:
            self.voter.hear(source, message)
            self._look()
        elif kind is Kind.BYE:
            self.lose(source)
        elif source in self.voter.lost:
            return
        elif message.view > self.view.number:
            if len(self._early) < _EARLY_MAX:
                self._early.append((source, message))
        elif message.view == self.view.number and message.shard not in self._resting:
            replica = self.replicas.get(message.shard)
            from_worker = kind in READS or (kind in UPDATES and message.lsn == 0)
            if replica is not None and (not from_worker or source == message.worker):
                replica.hear(source, message)
                if self._reports:
                    self._report()

    def lose(self, peer: int, has_ended: bool = True) -> None:
        """Note that a worker or a server is gone.

        ``has_ended``: whether a server certainly takes part in nothing any more.
        """
        if peer in self.workers:
            self.workers.discard(peer)
            self._gone.add(peer)
            for number, replica in self.replicas.items():
                if number not in self._resting:
                    replica.leave_of(peer)
        elif peer in self.voter.view.servers or peer in self.voter.accepted.servers:
            self.voter.lose(peer, has_ended)
            self._look()

    @property
    def has_stopped(self) -> bool:
        """Whether the server takes part in no view any more."""
        return self.voter.has_stopped

    def _report(self) -> None:
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            self.voter.hear(self.me, report)
        self._look()

    def _look(self) -> None:
        """Do what the decisions about views ask of this server."""
        voter = self.voter
        self.out += voter.out
        voter.out.clear()
        if voter.has_stopped:
            if self.replicas:
                self.replicas = {}
                told = Message(Kind.UNMANAGED)
                self.out += [(worker, told) for worker in sorted(self.workers)]
            return
        view, accepted = voter.view, voter.accepted
        self._resting = frozenset(
            shard
            for shard, chain in enumerate(view.chains)
            if (chain, view.filling[shard]) != (accepted.chains[shard], accepted.filling[shard])
        )
        if view.number > self.view.number:
            self._adopt(view)

    def _adopt(self, view: View) -> None:
        """Take the places of a newer view, and tell it to the workers."""
        self.view = view
        held = {}
        for number, (chain, filling) in enumerate(zip(view.chains, view.filling, strict=True)):
            if self.me in chain or self.me == filling:
                replica = self.replicas.get(number)
                if replica is None or (self.me in replica.chain and self.me not in chain):
                    # A member that is filled again may have updates that the others lack.
                    shard = self._make_shard(number)
                    replica = Replica(self.me, number, shard, self.out, self._reports)
                held[number] = replica
                replica.adopt(view.number, chain, filling)
        self.replicas = held
        if view.number > 1:
            told = Message(Kind.VIEW, view=view.number, payload=view.to_bytes())
            self.out += [(worker, told) for worker in sorted(self.workers)]
        for number, replica in held.items():
            for worker in sorted(self._gone):
                if number not in self._resting:
                    replica.leave_of(worker)
        early, self._early = self._early, []
        for source, message in early:
            self.hear(source, message)

    def stats(self) -> dict[str, object]:
        """Return the figures of this server, for ``pycoll ps``."""
        shards = [self.replicas[number].stats() for number in sorted(self.replicas)]
        manager = self.voter.leader
        return {"rank": self.me, "view": self.view.number, "manager": manager, "shards": shards}
