"""A shard on one server: its place in the chain, its log, and the requests that wait for answers.

The protocol is chain replication. The first server of a chain numbers the updates of workers, and
each server applies them in that order and forwards them. The last server acknowledges updates and
answers reads. So each value that a worker sees is on all servers of the chain.

A server keeps an update in its log until the last server has applied it. After a change of the
chain it sends its new successor the updates that this one lacks. Workers resend unacknowledged
updates. The shard recognizes applied ones by their numbers, and acknowledges them again.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from pycoll.ps.messages import (
    CREATES,
    DROPPED,
    NO_WAIT,
    PULLS,
    READS,
    REPEATED,
    UPDATES,
    Kind,
    Message,
)
from pycoll.ps.shard import Effect, Part, Shard
from pycoll.ps.snapshot import KEPT, SnapshotReader, pieces_of

#: The most parts that ``stats`` names.
_BUSY_MAX = 16
#: Flag of a FAILED: the worker ``key`` is gone, and the store does not go on without it.
WORKER_LOST = 1
#: Requests whose answers wait for rounds of one part; a push only with the flag PULLS.
_OF_PARTS = frozenset((Kind.PULL, Kind.PUSH))


class Replica:
    """A shard on server ``me``. ``out`` collects messages as (peer, message).

    ``reports`` collects messages for the view manager.
    """

    def __init__(
        self,
        me: int,
        number: int,
        shard: Shard,
        out: list[tuple[int, Message]],
        reports: list[Message],
    ) -> None:
        self.me = me
        self.number = number
        self.shard = shard
        self.view = 0
        self.chain: tuple[int, ...] = ()
        #: The number of the newest update that was applied here.
        self.lsn = 0
        self._out = out
        self._reports = reports
        self._log: deque[Message] = deque()
        #: The requests whose answers wait. Each with the slowest worker that its HELD named.
        self._held: list[tuple[Message, tuple[int, int]]] = []
        self._predecessor: int | None = None
        self._successor: int | None = None
        #: Whether the successor has sent its SYNC in this view.
        self._successor_synced = False
        #: Whether this server has all updates that an earlier view has acknowledged.
        self._is_current = True
        self._snapshot: SnapshotReader | None = None
        #: Updates behind the CUT of their worker. The first server numbers them after the last CUT.
        self._deferred: list[Message] = []
        #: The shard at the newest cut, as PIECEs, until a RELEASE.
        self._cut_pieces: tuple[Message, ...] = ()
        self.held_most = 0

    @property
    def is_last(self) -> bool:
        """Whether this server acknowledges updates and answers reads."""
        return bool(self.chain) and self.chain[-1] == self.me

    @property
    def is_first(self) -> bool:
        """Whether this server numbers the updates."""
        return bool(self.chain) and self.chain[0] == self.me

    @property
    def held(self) -> int:
        """The number of requests that wait for their answers."""
        return len(self._held)

    def adopt(self, view: int, chain: tuple[int, ...], filling: int) -> None:
        """Take this server's place in a new view: a member of the chain, or the filled server."""
        was_member = self.me in self.chain
        order = chain if filling < 0 else (*chain, filling)
        place = order.index(self.me)
        is_new_store = self.view == 0 and view == 1
        self._is_current = self.me in chain and (is_new_store or (was_member and self._is_current))
        self.view, self.chain = view, chain
        self._predecessor = order[place - 1] if place > 0 else None
        self._successor = order[place + 1] if place + 1 < len(order) else None
        self._successor_synced = False
        # Workers resend unanswered requests in the new view.
        self._held.clear()
        self._deferred.clear()
        self._snapshot = None
        if self._predecessor is not None:
            self._send(self._predecessor, Message(Kind.SYNC, lsn=self.lsn))
        if self.is_last:
            self._commit()

    def remove_worker(self, worker: int) -> None:
        """On the first server: number a LEAVE for a worker that is gone."""
        if self.is_first and worker in self.shard.live:
            self._apply(Message(Kind.LEAVE, worker=worker, lsn=self.lsn + 1))
            self._number_deferred()

    def handle(self, source: int, message: Message) -> None:
        """Handle a message of this view from a worker or a neighbour."""
        kind = message.kind
        if not self._is_current and self.is_first:
            # This server lacks updates, and all servers that have them are gone: the shard is lost.
            if kind in READS or (kind in UPDATES and message.lsn == 0):
                self._refuse(message, f"shard {self.number} is lost: all its servers are gone")
        elif kind in UPDATES:
            if message.lsn == 0 and self.is_first and kind is not Kind.LEAVE:
                self._number(message)
            elif message.lsn == self.lsn + 1 and source == self._predecessor:
                self._apply(message)
        elif kind in READS:
            if self.is_last and not self._answer(message):
                self._hold(message)
        elif kind is Kind.SYNC and source == self._successor:
            self._sync_successor(message.lsn)
        elif kind is Kind.PIECE and source == self._predecessor:
            self._take_piece(message)
        elif kind is Kind.SYNCED and source == self._predecessor:
            was_current, self._is_current = self._is_current, True
            if self._successor is not None and self._successor_synced and not was_current:
                # The successor was synced before this server was, so it needs a new SYNCED.
                self._send(self._successor, Message(Kind.SYNCED, lsn=self.lsn))
            if self._successor is None:
                self._reports.append(Message(Kind.FILLED, self.number, self.view))
            self._answer_held()
        elif kind is Kind.COMMIT and source == self._successor:
            while self._log and self._log[0].lsn <= message.lsn:
                self._log.popleft()
            if not self.is_last and self._predecessor is not None:
                self._send(self._predecessor, Message(Kind.COMMIT, lsn=message.lsn))

    def _number(self, update: Message) -> None:
        """On the first server: number and apply an update, or defer it behind an open cut."""
        worker = update.worker
        shard = self.shard
        waits = shard.is_cutting if update.kind is Kind.JOIN else shard.is_ahead(worker)
        if waits and update.seq > shard.applied.get(worker, 0):
            self._deferred.append(update)
            return
        cut = self.shard.cut
        self._apply(update._replace(lsn=self.lsn + 1))
        if self.shard.cut > cut:
            self._number_deferred()

    def _number_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        for update in deferred:
            self._number(update)

    def _apply(self, update: Message) -> None:
        """Apply an update, forward it, and acknowledge it if this server is the last one."""
        cut = self.shard.cut
        effect = self.shard.apply(update)
        self.lsn = update.lsn
        if self.shard.cut > cut:
            # Each server of the chain keeps the same values, so each can answer a FETCH.
            is_used = self.shard.refused_cut[0] < self.shard.cut
            self._cut_pieces = tuple(pieces_of(self.shard, self.lsn)) if is_used else ()
        elif update.kind is Kind.RELEASE:
            self._cut_pieces = ()
        self._log.append(update)
        if self._successor is not None and self._successor_synced:
            self._send(self._successor, update)
        if self.is_last:
            self._acknowledge(update, effect)
            self._commit()
            self._answer_held()
        elif self.me not in self.chain and self._predecessor is not None:
            self._send(self._predecessor, Message(Kind.COMMIT, lsn=self.lsn))
            self._log.clear()

    def _commit(self) -> None:
        if self._predecessor is not None:
            self._send(self._predecessor, Message(Kind.COMMIT, lsn=self.lsn))
        if self._successor is None:
            self._log.clear()

    def _sync_successor(self, lsn: int) -> None:
        """Send the successor the updates after ``lsn``, or the shard if the log lacks some."""
        assert self._successor is not None
        first = self._log[0].lsn if self._log else self.lsn + 1
        if lsn + 1 < first:
            for piece in self._cut_pieces:
                self._send(self._successor, piece._replace(flags=piece.flags | KEPT))
            for piece in pieces_of(self.shard, self.lsn):
                self._send(self._successor, piece)
        else:
            for update in self._log:
                if update.lsn > lsn:
                    self._send(self._successor, update)
        self._successor_synced = True
        if self._is_current or self._predecessor is None:
            self._send(self._successor, Message(Kind.SYNCED, lsn=self.lsn))

    def _take_piece(self, piece: Message) -> None:
        if self._snapshot is None:
            self._snapshot = SnapshotReader(self.shard)
        if self._snapshot.take(piece):
            self.lsn = piece.lsn
            self._cut_pieces = tuple(self._snapshot.cut_pieces)
            self._log.clear()
            self._snapshot = None
            if self._predecessor is not None:
                self._send(self._predecessor, Message(Kind.COMMIT, lsn=self.lsn))

    # Answers

    def _acknowledge(self, update: Message, effect: Effect) -> None:
        if update.kind in (Kind.LEAVE, Kind.JOIN) and not effect.flags & REPEATED:
            # The requests of the worker's earlier process need no answer. A repeated JOIN removes
            # none: it may come after requests of the process that joined.
            self._held = [one for one in self._held if one[0].worker != update.worker]
        if update.kind is Kind.LEAVE:
            return
        if effect.refusal:
            self._refuse(update, effect.refusal)
        elif update.kind is Kind.PUSH and update.flags & PULLS:
            push = update._replace(flags=update.flags | effect.flags) if effect.flags else update
            if not self._answer(push):
                self._hold(push)
        elif update.kind is Kind.CLOCK and not self.shard.may_proceed(update.worker, None):
            self._hold(update)
        elif update.kind is Kind.CUT:
            if not self._answer(update):
                self._hold(update)
        elif update.kind is Kind.JOIN:
            cut = self.shard.cuts[update.worker]
            self._reply(update, Kind.DONE, key=cut, round=effect.version, flags=effect.flags)
        else:
            # The version for a CLOCK may have grown since the update was applied.
            version = self.shard.version if update.kind is Kind.CLOCK else effect.version
            self._reply(update, Kind.DONE, round=version, flags=effect.flags)

    def _answer(self, request: Message) -> bool:
        """Answer a read or an applied update; return False if it has to wait."""
        shard = self.shard
        if not self._is_current or shard.applied.get(request.worker, 0) < request.after:
            return False
        if request.kind is Kind.STATS:
            self._reply(request, Kind.TEXT, payload=json.dumps(self.stats()).encode())
            return True
        if request.kind is Kind.CUT:
            return self._answer_cut(request)
        if request.kind is Kind.FETCH:
            self._reply_kept(request)
            return True
        if request.kind is Kind.LOOKUP:
            return self._answer_lookup(request)
        part: Part | None = None
        if request.kind in _OF_PARTS:
            part = shard.parts.get((request.key, request.part))
            if part is None:
                self._refuse(request, f"part {request.part} of key {request.key} is not known here")
                return True
        if not shard.may_proceed(request.worker, part):
            if shard.lost is None:
                return False
            self._reply(request, Kind.FAILED, key=shard.lost, flags=WORKER_LOST)
        elif part is None:
            self._reply(request, Kind.DONE, round=shard.version)
        else:
            part.uses += 1
            shard.counts.pulls += 1
            self._reply_value(request, part)
        return True

    def _answer_lookup(self, request: Message) -> bool:
        shard = self.shard
        text = shard.texts.get(bytes(request.payload).decode("utf-8", "replace"))
        if text is not None:
            self._reply(request, Kind.TEXT, payload=text.encode())
        elif request.flags & CREATES and shard.is_first(request.worker):
            self._reply(request, Kind.DONE, round=shard.epoch)
        elif request.flags & NO_WAIT:
            self._reply(request, Kind.TEXT, payload=b"")
        else:
            return False
        return True

    def _answer_cut(self, request: Message) -> bool:
        shard = self.shard
        if shard.cut >= request.round:
            number, why = shard.refused_cut
            if number == request.round:
                self._refuse(request, why)
            else:
                self._reply(request, Kind.DONE, key=shard.writer, round=shard.newest_version)
        elif shard.lost is not None:
            self._reply(request, Kind.FAILED, key=shard.lost, flags=WORKER_LOST)
        else:
            return False
        return True

    def _reply_kept(self, request: Message) -> None:
        if request.round != self.shard.cut or request.key >= len(self._cut_pieces):
            self._refuse(request, f"the values of cut {request.round} are not kept any more")
        else:
            piece = self._cut_pieces[request.key]
            self._reply(request, Kind.VALUE, flags=piece.flags, payload=piece.payload)

    def _reply_value(self, request: Message, part: Part) -> None:
        # A push is answered with the whole array. A pull of a table carries ids of rows.
        is_push = request.kind is Kind.PUSH
        flags = request.flags & (DROPPED | REPEATED) if is_push else 0
        query = None if is_push else request.payload
        try:
            value = self.shard.arithmetic.read(part.rule, part.value, query)
        except ValueError as error:
            self._refuse(request, str(error))
        else:
            self._reply(request, Kind.VALUE, round=part.version, flags=flags, payload=value)

    def _hold(self, request: Message) -> None:
        slowest = self._slowest_for(request)
        self._held.append((request, slowest))
        self.held_most = max(self.held_most, len(self._held))
        self._tell_slowest(request, slowest)
        if self.shard.lost is not None:
            self._answer_held()

    def _answer_held(self) -> None:
        """Answer the held requests that need not wait any more."""
        waiting, self._held = self._held, []
        for request, notified in waiting:
            if not self._answer(request):
                slowest = self._slowest_for(request)
                if slowest != notified:
                    self._tell_slowest(request, slowest)
                self._held.append((request, slowest))

    def _slowest_for(self, request: Message) -> tuple[int, int]:
        if request.kind is Kind.CUT:
            return self.shard.last_to_cut()
        return self.shard.slowest(self._part_of(request))

    def _part_of(self, request: Message) -> Part | None:
        """Return the part whose rounds a request waits for; None for the rounds of the shard."""
        is_of_part = request.kind in _OF_PARTS
        return self.shard.parts.get((request.key, request.part)) if is_of_part else None

    def _count_waiting(self) -> dict[str, int]:
        """Return the number of held requests by the clocks that each lacks; 0 for other waits."""
        counts: dict[int, int] = {}
        for request, _ in self._held:
            awaits_clocks = request.kind in _OF_PARTS or request.kind is Kind.CLOCK
            part = self._part_of(request)
            lacks = self.shard.lacks(request.worker, part) if awaits_clocks else 0
            counts[lacks] = counts.get(lacks, 0) + 1
        return {str(lacks): counts[lacks] for lacks in sorted(counts)}

    def _tell_slowest(self, request: Message, slowest: tuple[int, int]) -> None:
        if request.kind in _OF_PARTS or request.kind in (Kind.CLOCK, Kind.CUT):
            self._reply(request, Kind.HELD, key=slowest[0], round=slowest[1])

    def stats(self) -> dict[str, object]:
        """Return the figures of this shard on this server, for ``Store.stats``."""
        shard = self.shard
        busy = sorted(shard.parts, key=lambda name: -shard.parts[name].uses)[:_BUSY_MAX]
        return {
            "shard": self.number,
            "chain": list(self.chain),
            "parts": len(shard.parts),
            "bytes": sum(shard.arithmetic.nbytes(part.value) for part in shard.parts.values()),
            "busy": [
                {"name": shard.names.get(key, ""), "key": key, "part": part, "uses": used.uses}
                for key, part in busy
                for used in (shard.parts[key, part],)
            ],
            "version": shard.version,
            "clocks": {str(worker): shard.clocks[worker] for worker in shard.live},
            "gone": [worker for worker in sorted(shard.clocks) if worker not in shard.live],
            "pushes": shard.counts.pushes,
            "pulls": shard.counts.pulls,
            "dropped": shard.counts.dropped,
            "repeated": shard.counts.repeated,
            "rounds": shard.counts.rounds,
            "waiting": self._count_waiting(),
        }

    def _refuse(self, request: Message, why: str) -> None:
        self._reply(request, Kind.FAILED, payload=why.encode())

    def _reply(
        self,
        request: Message,
        kind: Kind,
        *,
        key: int | None = None,
        round: int = 0,
        flags: int = 0,
        payload: Any = None,
    ) -> None:
        made = Message(
            kind,
            self.number,
            self.view,
            request.key if key is None else key,
            request.part,
            request.worker,
            request.seq,
            int(request.kind in READS),
            round,
            0,
            flags,
            0,
            payload,
        )
        self._out.append((request.worker, made))

    def _send(self, peer: int, message: Message) -> None:
        self._out.append((peer, message._replace(shard=self.number, view=self.view)))
