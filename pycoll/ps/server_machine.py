"""The server as a machine: it takes messages and losses, and gives messages.

It has no sockets, threads or clocks. ``server_threads.py`` runs it on real connections, and
the tests run it on a simulated network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pycoll.bootstrap.recovery.council import is_quorum
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.messages import READS, UPDATES, VIEWS, Kind, Message
from pycoll.ps.replica import Replica
from pycoll.ps.shard import Shard
from pycoll.ps.views import View, Voter

#: Messages of views that this server does not know yet; a peer cannot be so far ahead.
_EARLY_MAX = 1 << 16


class ServerMachine:
    """A server. ``me``: its rank; ``workers``: the ranks of the workers.

    ``make_shard`` makes the empty state of a shard by number. ``out`` collects messages as
    (peer, message); the owner takes them off after each call. ``newcomers`` collects those with
    which the owner shall connect, and call ``arrive`` or ``miss``. ``ended`` collects newcomers
    with ranks that have ended meanwhile, so the newcomer shall not wait for them.
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
        #: The workers that have left.
        self.gone: set[int] = set()
        self.newcomers: list[Newcomer] = []
        self.ended: list[tuple[Newcomer, int]] = []
        #: Where this server is a newcomer: its number, and the peers that have not connected yet.
        self._serial = 0
        self.expected: set[int] = set()
        #: The wish to join of a newcomer that has met this server, until a view tells of it.
        self._wish: Newcomer | None = None
        #: The newest newcomer that this server knows, and the newest one with a connection here.
        self._joins = view.joins
        self._arrived = 0
        #: Of the newest newcomer that this server has accepted: its number, and the ranks that had
        #: ended before, or of whose end the newcomer has been told.
        self._accepted = (0, set[int]())
        #: The word that a newcomer has joined or left, until a view follows from it.
        self._word: Message | None = None
        self._make_shard = make_shard
        self._early: list[tuple[int, Message]] = []
        #: The shards whose servers an accepted view changes. They rest until a view holds, in which
        #: workers send again: a later update must not be applied without one that was ignored.
        self._resting: frozenset[int] = frozenset()
        #: Messages of the replicas for the view manager.
        self._reports: list[Message] = []
        #: Whether the workers have been told that this server has stopped.
        self._has_told = False
        #: While this server may have been left out: the servers that have not told yet whether they
        #: count it, those that do, and the messages that wait.
        self._unsure: set[int] | None = None
        self._counting: set[int] = set()
        #: Its view when it began to doubt, and how often it has begun.
        self._doubted: tuple[int, ...] = ()
        self._doubts = 0
        self._waiting: list[tuple[int, Message]] = []
        self._look()

    def hear(self, source: int, message: Message) -> None:
        """Take a message. A message that makes no sense is ignored, as a lost one is."""
        kind = message.kind
        if kind is Kind.JOINED:
            self._tell_manager(message)
        elif kind is Kind.ARRIVED:
            self._count_off(source)
        elif kind is Kind.SEVERED and self._unsure is not None and message.key == self.me:
            # The others may have to decide without this server, which must not stand in their way.
            self._stop(f"the other servers go on without it: server {message.worker} has lost it")
        elif kind in VIEWS:
            self.voter.hear(source, message)
            self._look()
        elif kind is Kind.BYE:
            self.lose(source)
        elif kind is Kind.AWAKE:
            self._answer(source, message)
        elif source in self.voter.lost or kind is Kind.ALIVE:
            return
        elif kind is Kind.COUNTED:
            if message.seq == self._doubts:
                self._counting.add(source)
                self._look_for_doubt()
        elif self._unsure is not None:
            self._waiting.append((source, message))
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
        joining = self.view.joining
        if joining is not None and joining.rank == peer and joining.serial == self._arrived:
            self.miss(joining)
        self._count_off(peer)
        if peer in self.workers:
            self._part_with(peer)
        elif peer not in self.gone:
            # Also a server that no view known here counts yet: another server may know one.
            self.voter.lose(peer, has_ended)
            self._look()
            self._look_for_doubt()

    def _part_with(self, worker: int) -> None:
        self.workers.discard(worker)
        self.gone.add(worker)
        self._look_for_ends()
        self._leave()

    def _leave(self) -> None:
        """Take the workers that are gone out of the shards, as far as these may change."""
        if self._unsure is None:
            for number, replica in self.replicas.items():
                for worker in sorted(self.gone):
                    if number not in self._resting:
                        replica.leave_of(worker)

    # Silence

    def give_up(self, silent: Iterable[int]) -> None:
        """Go on without servers that have been silent for long, if the others may decide."""
        lost = len(self.voter.lost)
        self.voter.give_up(silent)
        if len(self.voter.lost) > lost:
            self._look()

    def pause(self) -> None:
        """Serve nothing until the others tell that they count this server.

        The owner calls this function ahead of all others when its process may have been stopped:
        the others may have gone on without it.
        """
        if self.has_stopped or self.me not in self.view.servers:
            return
        if self._unsure is None:
            self._doubted = self.view.servers
        self._doubts += 1
        self._unsure = set(self.voter.running)
        self._counting.clear()
        asked = Message(Kind.AWAKE, seq=self._doubts)
        self.out += [(one, asked) for one in sorted(self._unsure)]
        self._look_for_doubt()

    def _answer(self, source: int, asked: Message) -> None:
        """Tell a server that may have been stopped whether this one counts it."""
        if self.has_stopped:
            return
        if source in self.voter.lost:
            lost = Message(Kind.SEVERED, key=source, worker=self.me)
            self.out.append((source, lost))
        elif source in self.voter.accepted.servers:
            self.out.append((source, asked._replace(kind=Kind.COUNTED)))

    def _stop(self, why: str) -> None:
        self.voter.stop(f"it was stopped for long, and {why}")
        self._look()

    def _look_for_doubt(self) -> None:
        """Serve again once all servers that this one reaches have told that they count it."""
        if self._unsure is None or self.has_stopped:
            return
        self._unsure.intersection_update(self.voter.running)
        self._unsure -= self._counting
        if self._unsure:
            return
        base = self._doubted
        counting = self._counting.intersection(base)
        # Servers that have ended meanwhile may have gone on without this one.
        if not is_quorum({self.me, *counting}, (), base):
            self._stop(f"of servers {list(base)} only {sorted(counting)} have said they count it")
            return
        self._unsure = None
        self._leave()
        waiting, self._waiting = self._waiting, []
        for source, message in waiting:
            self.hear(source, message)

    # Newcomers

    def wish(self, newcomer: Newcomer) -> None:
        """Ask the view manager to let a process join; ``view.joining`` tells that it does."""
        self._wish = newcomer
        self._ask_manager(Message(Kind.ADMIT, payload=newcomer.to_bytes()))

    def withdraw(self) -> None:
        """Ask no more for the process of the last wish."""
        self._wish = None

    @property
    def is_asking(self) -> bool:
        """Whether the view manager has not answered a wish yet."""
        return self._wish is not None

    def arrive(self, newcomer: Newcomer) -> None:
        """Note that this server is connected with a newcomer."""
        rank, self._arrived = newcomer.rank, newcomer.serial
        self.out.append((rank, Message(Kind.ARRIVED)))
        if not newcomer.serves:
            if rank in self.workers:
                # The end of the worker's earlier process has not been seen yet.
                self._part_with(rank)
            self.gone.discard(rank)
            self.workers.add(rank)
            self.out.append((rank, self._told()))

    def miss(self, newcomer: Newcomer) -> None:
        """Note that a newcomer is gone, or cannot be reached from here."""
        self._tell_manager(Message(Kind.LEFT, key=newcomer.serial))

    def expect(self, serial: int) -> None:
        """On newcomer ``serial``: tell the servers when all peers have connected with it."""
        self._serial = serial
        self.expected = {*self.voter.running, *self.workers}

    def _count_off(self, peer: int) -> None:
        if peer in self.expected:
            self.expected.discard(peer)
            if not self.expected:
                joined = Message(Kind.JOINED, key=self._serial)
                self.out += [(one, joined) for one in self.voter.running]

    def _look_for_ends(self) -> None:
        """On the manager: note which ranks have ended while a newcomer connects."""
        joining = self.voter.accepted.joining
        if joining is None:
            return
        # A new worker connects with servers only.
        ended = self.gone | self.voter.lost if joining.serves else set(self.voter.lost)
        if joining.serial > self._accepted[0]:
            self._accepted = joining.serial, ended
        if self.voter.manager is not None:
            known = self._accepted[1]
            self.ended += [(joining, one) for one in sorted(ended - known - {joining.rank})]
            self._accepted = joining.serial, ended

    def _tell_manager(self, word: Message) -> None:
        self._word = word
        self._ask_manager(word)

    def _ask_manager(self, message: Message) -> None:
        self.voter.hear(self.me, message)
        self._look()

    def _told(self) -> Message:
        return Message(Kind.VIEW, view=self.view.number, payload=self.view.to_bytes())

    def _look_for_newcomer(self) -> None:
        """Look at the newcomer of a view; ask again what an earlier manager may not have heard."""
        joining, wish, word = self.view.joining, self._wish, self._word
        if joining is not None:
            if wish is not None and wish.meeting == joining.meeting:
                self._wish = None
            if joining.serial > self._joins and joining.rank != self.me:
                self._joins = joining.serial
                self.newcomers.append(joining)
            if word is not None and word.key == joining.serial:
                self._ask_manager(word)
        elif wish is not None:
            self.wish(wish)

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
            if not self._has_told:
                self._has_told = True
                self.replicas = {}
                self._waiting.clear()
                told = Message(Kind.UNMANAGED)
                self.out += [(worker, told) for worker in sorted(self.workers)]
            return
        view, accepted = voter.view, voter.accepted
        changed = frozenset(
            shard
            for shard, chain in enumerate(view.chains)
            if (chain, view.filling[shard]) != (accepted.chains[shard], accepted.filling[shard])
        )
        is_new = view.number > self.view.number
        self._resting = changed if is_new else self._resting | changed
        self._look_for_ends()
        if is_new:
            self._adopt(view)
            self._look_for_doubt()

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
            told = self._told()
            self.out += [(worker, told) for worker in sorted(self.workers)]
        self._leave()
        self._look_for_newcomer()
        early, self._early = self._early, []
        for source, message in early:
            self.hear(source, message)

    def stats(self) -> dict[str, object]:
        """Return the figures of this server, for ``pycoll ps``."""
        shards = [self.replicas[number].stats() for number in sorted(self.replicas)]
        manager = self.voter.leader
        return {"rank": self.me, "view": self.view.number, "manager": manager, "shards": shards}
