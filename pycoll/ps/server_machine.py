"""The server as a state machine: it takes messages and losses of connections, and emits messages.

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

#: The most messages of newer views that a server keeps until it adopts those views.
_EARLY_MAX = 1 << 16


class ServerMachine:
    """A server. ``me``: its rank; ``workers``: the ranks of the workers.

    ``make_shard`` makes the empty state of a shard by number. ``out`` collects messages as
    (peer, message), which the owner sends after each call. ``newcomers`` collects newcomers: the
    owner connects with each, and then calls ``note_connected`` or ``note_unreachable``. ``ended``
    collects (newcomer, rank) for each rank that has ended while the newcomer waits for it.
    """

    def __init__(
        self, me: int, workers: Iterable[int], view: View, make_shard: Callable[[int], Shard]
    ) -> None:
        self.me = me
        self.view = View(0, (), (), (), (), 1)
        self.out: list[tuple[int, Message]] = []
        self.replicas: dict[int, Replica] = {}
        #: The workers that have not left. When the set is empty, the owner of this object ends the
        #: server.
        self.workers = set(workers)
        self.voter = Voter(me, view)
        #: The workers that have left.
        self.gone: set[int] = set()
        self.newcomers: list[Newcomer] = []
        self.ended: list[tuple[Newcomer, int]] = []
        #: On a newcomer: its serial number, and the peers that have not connected with it yet.
        self._serial = 0
        self.expected: set[int] = set()
        #: The newcomer for which this server requests admission, until a view names it.
        self._admission: Newcomer | None = None
        #: The serial numbers of the newest known newcomer, and of the newest connected one.
        self._joins = view.joins
        self._newest_connected = 0
        #: The serial number of the newcomer in the accepted view, and the ranks whose end it knows:
        #: they ended before it came, or this server has reported their end.
        self._accepted = (0, set[int]())
        #: The newest JOINED or JOIN_FAILED, which this server repeats to each new manager.
        self._join_report: Message | None = None
        self._make_shard = make_shard
        self._early: list[tuple[int, Message]] = []
        #: The shards whose servers an accepted view changes. They ignore messages until that view
        #: holds and workers send again. So no update is applied ahead of an ignored one.
        self._frozen: frozenset[int] = frozenset()
        #: Messages of the replicas for the view manager.
        self._reports: list[Message] = []
        #: Whether this server has told the workers that it has stopped.
        self._workers_notified = False
        #: While this server may have been excluded: the servers that have not confirmed its
        #: membership yet (None in normal operation), those that have, and the messages that wait.
        self._unconfirmed: set[int] | None = None
        self._confirming: set[int] = set()
        #: The servers of its view when it began to ask, and the number of the newest question.
        self._confirm_members: tuple[int, ...] = ()
        self._confirm_number = 0
        self._paused: list[tuple[int, Message]] = []
        self._apply_decisions()

    def handle(self, source: int, message: Message) -> None:
        """Handle a message. The server ignores a message that does not fit its state."""
        kind = message.kind
        if kind is Kind.JOINED:
            self._report_join(message)
        elif kind is Kind.CONNECTED:
            self._remove_expected(source)
        elif kind is Kind.SEVERED and self._unconfirmed is not None and message.key == self.me:
            # A peer has counted this server as lost while it was stopped. It now stops for good, so
            # that the other servers go on without it.
            self._stop(f"the other servers go on without it: server {message.worker} has lost it")
        elif kind in VIEWS:
            self.voter.handle(source, message)
            self._apply_decisions()
        elif kind is Kind.BYE:
            self.lose(source)
        elif kind is Kind.CONFIRM:
            self._confirm(source, message)
        elif source in self.voter.lost or kind is Kind.HEARTBEAT:
            return
        elif kind is Kind.CONFIRMED:
            if message.seq == self._confirm_number:
                self._confirming.add(source)
                self._resume_if_confirmed()
        elif self._unconfirmed is not None:
            self._paused.append((source, message))
        elif message.view > self.view.number:
            if len(self._early) < _EARLY_MAX:
                self._early.append((source, message))
        elif message.view == self.view.number and message.shard not in self._frozen:
            replica = self.replicas.get(message.shard)
            from_worker = kind in READS or (kind in UPDATES and message.lsn == 0)
            if replica is not None and (not from_worker or source == message.worker):
                replica.handle(source, message)
                if self._reports:
                    self._report()

    def lose(self, peer: int, has_ended: bool = True) -> None:
        """Note that the connection to a worker or a server is lost.

        ``has_ended``: whether the process of a server has certainly ended.
        """
        joining = self.view.joining
        if (
            joining is not None
            and joining.rank == peer
            and joining.serial == self._newest_connected
        ):
            self.note_unreachable(joining)
        self._remove_expected(peer)
        if peer in self.workers:
            self._remove_worker(peer)
        elif peer not in self.gone:
            # The peer may be a server of a newer view that only another server knows.
            self.voter.lose(peer, has_ended)
            self._apply_decisions()
            self._resume_if_confirmed()

    def _remove_worker(self, worker: int) -> None:
        self.workers.discard(worker)
        self.gone.add(worker)
        self._note_ended_ranks()
        self._leave()

    def _leave(self) -> None:
        """Remove the workers that are gone from all shards that are not frozen."""
        if self._unconfirmed is None:
            for number, replica in self.replicas.items():
                for worker in sorted(self.gone):
                    if number not in self._frozen:
                        replica.remove_worker(worker)

    # Silence and membership

    def drop_silent(self, silent: Iterable[int]) -> None:
        """Count silent servers as lost, if the others have a quorum and all values."""
        lost = len(self.voter.lost)
        self.voter.drop_silent(silent)
        if len(self.voter.lost) > lost:
            self._apply_decisions()

    def pause(self) -> None:
        """Serve nothing until the other servers confirm the membership of this one.

        The owner calls this function ahead of all others when its process may have been stopped,
        since the others may have excluded it meanwhile.
        """
        if self.has_stopped or self.me not in self.view.servers:
            return
        if self._unconfirmed is None:
            self._confirm_members = self.view.servers
        self._confirm_number += 1
        self._unconfirmed = set(self.voter.running)
        self._confirming.clear()
        request = Message(Kind.CONFIRM, seq=self._confirm_number)
        self.out += [(one, request) for one in sorted(self._unconfirmed)]
        self._resume_if_confirmed()

    def _confirm(self, source: int, request: Message) -> None:
        """Confirm the membership of a server that may have been stopped, or report its loss."""
        if self.has_stopped:
            return
        if source in self.voter.lost:
            lost = Message(Kind.SEVERED, key=source, worker=self.me)
            self.out.append((source, lost))
        elif source in self.voter.accepted.servers:
            self.out.append((source, request._replace(kind=Kind.CONFIRMED)))

    def _stop(self, why: str) -> None:
        self.voter.stop(f"it was stopped for long, and {why}")
        self._apply_decisions()

    def _resume_if_confirmed(self) -> None:
        """Serve again once all reachable servers have confirmed this one, and they are a quorum."""
        if self._unconfirmed is None or self.has_stopped:
            return
        self._unconfirmed.intersection_update(self.voter.running)
        self._unconfirmed -= self._confirming
        if self._unconfirmed:
            return
        base = self._confirm_members
        counting = self._confirming.intersection(base)
        # Without a quorum, servers that have ended since may have excluded this one before.
        if not is_quorum({self.me, *counting}, (), base):
            self._stop(f"of servers {list(base)} only {sorted(counting)} have said they count it")
            return
        self._unconfirmed = None
        self._leave()
        waiting, self._paused = self._paused, []
        for source, message in waiting:
            self.handle(source, message)

    # Newcomers

    def request_admission(self, newcomer: Newcomer) -> None:
        """Ask the view manager to admit a process, which ``view.joining`` then names."""
        self._admission = newcomer
        self._send_to_manager(Message(Kind.ADMIT, payload=newcomer.to_bytes()))

    def cancel_admission(self) -> None:
        """Stop asking for the process of the newest ``request_admission``."""
        self._admission = None

    @property
    def is_admitting(self) -> bool:
        """Whether a process waits for its admission through this server."""
        return self._admission is not None

    def note_connected(self, newcomer: Newcomer) -> None:
        """Note that this server is connected with a newcomer."""
        rank, self._newest_connected = newcomer.rank, newcomer.serial
        self.out.append((rank, Message(Kind.CONNECTED)))
        if not newcomer.serves:
            if rank in self.workers:
                # This server has not seen the end of the worker's earlier process yet.
                self._remove_worker(rank)
            self.gone.discard(rank)
            self.workers.add(rank)
            self.out.append((rank, self._view_message()))

    def note_unreachable(self, newcomer: Newcomer) -> None:
        """Report that a newcomer is gone, or cannot be reached from this server."""
        self._report_join(Message(Kind.JOIN_FAILED, key=newcomer.serial))

    def expect(self, serial: int) -> None:
        """On newcomer ``serial``: send JOINED to the servers when all peers have connected."""
        self._serial = serial
        self.expected = {*self.voter.running, *self.workers}

    def _remove_expected(self, peer: int) -> None:
        if peer in self.expected:
            self.expected.discard(peer)
            if not self.expected:
                joined = Message(Kind.JOINED, key=self._serial)
                self.out += [(one, joined) for one in self.voter.running]

    def _note_ended_ranks(self) -> None:
        """On the manager: collect the ranks that have ended while a newcomer connects."""
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

    def _report_join(self, report: Message) -> None:
        self._join_report = report
        self._send_to_manager(report)

    def _send_to_manager(self, message: Message) -> None:
        self.voter.handle(self.me, message)
        self._apply_decisions()

    def _view_message(self) -> Message:
        return Message(Kind.VIEW, view=self.view.number, payload=self.view.to_bytes())

    def _check_newcomer(self) -> None:
        """Note the newcomer of a new view, and repeat what an earlier manager may have lost."""
        joining, admission, report = self.view.joining, self._admission, self._join_report
        if joining is not None:
            if admission is not None and admission.meeting == joining.meeting:
                self._admission = None
            if joining.serial > self._joins and joining.rank != self.me:
                self._joins = joining.serial
                self.newcomers.append(joining)
            if report is not None and report.key == joining.serial:
                self._send_to_manager(report)
        elif admission is not None:
            self.request_admission(admission)

    @property
    def has_stopped(self) -> bool:
        """Whether this server has stopped, so that it is in no view any more."""
        return self.voter.has_stopped

    def _report(self) -> None:
        reports, self._reports[:] = list(self._reports), []
        for report in reports:
            self.voter.handle(self.me, report)
        self._apply_decisions()

    def _apply_decisions(self) -> None:
        """Apply the decisions of the voter: stop, freeze shards, or adopt a newer view."""
        voter = self.voter
        self.out += voter.out
        voter.out.clear()
        if voter.has_stopped:
            if not self._workers_notified:
                self._workers_notified = True
                self.replicas = {}
                self._paused.clear()
                message = Message(Kind.UNMANAGED)
                self.out += [(worker, message) for worker in sorted(self.workers)]
            return
        view, accepted = voter.view, voter.accepted
        changed = frozenset(
            shard
            for shard, chain in enumerate(view.chains)
            if (chain, view.filling[shard]) != (accepted.chains[shard], accepted.filling[shard])
        )
        is_new = view.number > self.view.number
        self._frozen = changed if is_new else self._frozen | changed
        self._note_ended_ranks()
        if is_new:
            self._adopt(view)
            self._resume_if_confirmed()

    def _adopt(self, view: View) -> None:
        """Take this server's places in a newer view, and send the view to the workers."""
        self.view = view
        held = {}
        for number, (chain, filling) in enumerate(zip(view.chains, view.filling, strict=True)):
            if self.me in chain or self.me == filling:
                replica = self.replicas.get(number)
                if replica is None or (self.me in replica.chain and self.me not in chain):
                    # A former member may hold updates that the others lack, so it starts empty.
                    shard = self._make_shard(number)
                    replica = Replica(self.me, number, shard, self.out, self._reports)
                held[number] = replica
                replica.adopt(view.number, chain, filling)
        self.replicas = held
        if view.number > 1:
            message = self._view_message()
            self.out += [(worker, message) for worker in sorted(self.workers)]
        self._leave()
        self._check_newcomer()
        early, self._early = self._early, []
        for source, message in early:
            self.handle(source, message)

    def stats(self) -> dict[str, object]:
        """Return the figures of this server, for ``pycoll ps``."""
        shards = [self.replicas[number].stats() for number in sorted(self.replicas)]
        manager = self.voter.leader
        return {"rank": self.me, "view": self.view.number, "manager": manager, "shards": shards}
