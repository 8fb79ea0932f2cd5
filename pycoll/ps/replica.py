"""A shard on one server: its place in the chain, its log, and the requests that it holds back.

The first server of a chain numbers the updates of workers, and each server applies them in that
order and passes them on. The last one acknowledges updates and answers reads, so a worker never
sees what some server of the chain has not. A server keeps an update in its log until the last one
has applied it. After a change of the chain it sends its new neighbour what that one lacks. Workers
send again what is not acknowledged; the shard knows by the numbers of their updates what it has
applied, and the last server acknowledges those too.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from pycoll.ps.messages import (
    DROPPED,
    MAKES,
    NOW,
    PULLS,
    READS,
    REPEATED,
    UPDATES,
    Kind,
    Message,
)
from pycoll.ps.shard import Effect, Part, Shard
from pycoll.ps.snapshot import KEPT, Filling, pieces_of

#: The most parts that figures name.
_BUSY_MAX = 16
#: Flag of a FAILED: the worker ``key`` is gone, and the store does not go on without it.
WORKER_LOST = 1
#: Requests of one part, whose answers await its rounds; a push only with the flag PULLS.
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
        #: The reads, CLOCKs and pushes whose answers wait. Each with the slowest worker that was
        #: told.
        self._held: list[tuple[Message, tuple[int, int]]] = []
        self._before: int | None = None
        self._next: int | None = None
        #: Whether the next server has said what it has, in this view.
        self._next_knows = False
        #: Whether this server has all that the last server of an earlier view answered.
        self._current = True
        self._filling: Filling | None = None
        #: Updates of workers that have begun a cut and wait for the others to begin it.
        self._later: list[Message] = []
        #: The shard as it was at the newest cut, until nobody needs it.
        self._kept: tuple[Message, ...] = ()
        self.held_most = 0

    @property
    def is_last(self) -> bool:
        """Whether this server acknowledges and answers."""
        return bool(self.chain) and self.chain[-1] == self.me

    @property
    def is_first(self) -> bool:
        """Whether this server numbers the updates."""
        return bool(self.chain) and self.chain[0] == self.me

    @property
    def held(self) -> int:
        """The number of requests that wait."""
        return len(self._held)

    def adopt(self, view: int, chain: tuple[int, ...], filling: int) -> None:
        """Take the place that a new view gives to this server, a member or the filled one."""
        was_member = self.me in self.chain
        order = chain if filling < 0 else (*chain, filling)
        place = order.index(self.me)
        is_new_store = self.view == 0 and view == 1
        self._current = self.me in chain and (is_new_store or (was_member and self._current))
        self.view, self.chain = view, chain
        self._before = order[place - 1] if place > 0 else None
        self._next = order[place + 1] if place + 1 < len(order) else None
        self._next_knows = False
        # Workers send again in the new view what is not answered.
        self._held.clear()
        self._later.clear()
        self._filling = None
        if self._before is not None:
            self._send(self._before, Message(Kind.SYNC, lsn=self.lsn))
        if self.is_last:
            self._commit()

    def leave_of(self, worker: int) -> None:
        """On the first server: take a worker out that is gone."""
        if self.is_first and worker in self.shard.live:
            self._take(Message(Kind.LEAVE, worker=worker, lsn=self.lsn + 1))
            self._number_later()

    def hear(self, source: int, message: Message) -> None:
        """Take a message of this view from a worker or a neighbour."""
        kind = message.kind
        if not self._current and self.is_first:
            # The servers that had acknowledged updates which this one lacks are all gone.
            if kind in READS or (kind in UPDATES and message.lsn == 0):
                self._refuse(message, f"shard {self.number} is lost: all its servers are gone")
        elif kind in UPDATES:
            if message.lsn == 0 and self.is_first and kind is not Kind.LEAVE:
                self._number(message)
            elif message.lsn == self.lsn + 1 and source == self._before:
                self._take(message)
        elif kind in READS:
            if self.is_last and not self._answer(message):
                self._hold(message)
        elif kind is Kind.SYNC and source == self._next:
            self._bring_up(message.lsn)
        elif kind is Kind.PIECE and source == self._before:
            self._fill(message)
        elif kind is Kind.SYNCED and source == self._before:
            was_current, self._current = self._current, True
            if self._next is not None and self._next_knows and not was_current:
                # It has been brought up with less, and must not count as filled before this one.
                self._send(self._next, Message(Kind.SYNCED, lsn=self.lsn))
            if self._next is None:
                self._reports.append(Message(Kind.FILLED, self.number, self.view))
            self._look_again()
        elif kind is Kind.COMMIT and source == self._next:
            while self._log and self._log[0].lsn <= message.lsn:
                self._log.popleft()
            if not self.is_last and self._before is not None:
                self._send(self._before, Message(Kind.COMMIT, lsn=message.lsn))

    def _number(self, update: Message) -> None:
        """On the first server: take a worker's update, unless it comes after an open cut."""
        worker = update.worker
        shard = self.shard
        waits = shard.is_cutting if update.kind is Kind.JOIN else shard.is_ahead(worker)
        if waits and update.seq > shard.applied.get(worker, 0):
            self._later.append(update)
            return
        cut = self.shard.cut
        self._take(update._replace(lsn=self.lsn + 1))
        if self.shard.cut > cut:
            self._number_later()

    def _number_later(self) -> None:
        later, self._later = self._later, []
        for update in later:
            self._number(update)

    def _take(self, update: Message) -> None:
        """Apply an update, pass it on, and acknowledge it if this server is the last one."""
        cut = self.shard.cut
        effect = self.shard.apply(update)
        self.lsn = update.lsn
        if self.shard.cut > cut:
            # All servers of the chain keep the same values, so that each of them can answer.
            is_used = self.shard.refused[0] < self.shard.cut
            self._kept = tuple(pieces_of(self.shard, self.lsn)) if is_used else ()
        elif update.kind is Kind.RELEASE:
            self._kept = ()
        self._log.append(update)
        if self._next is not None and self._next_knows:
            self._send(self._next, update)
        if self.is_last:
            self._acknowledge(update, effect)
            self._commit()
            self._look_again()
        elif self.me not in self.chain and self._before is not None:
            self._send(self._before, Message(Kind.COMMIT, lsn=self.lsn))
            self._log.clear()

    def _commit(self) -> None:
        if self._before is not None:
            self._send(self._before, Message(Kind.COMMIT, lsn=self.lsn))
        if self._next is None:
            self._log.clear()

    def _bring_up(self, lsn: int) -> None:
        """Send the next server the updates that it lacks, or all of the shard."""
        assert self._next is not None
        first = self._log[0].lsn if self._log else self.lsn + 1
        if lsn + 1 < first:
            for piece in self._kept:
                self._send(self._next, piece._replace(flags=piece.flags | KEPT))
            for piece in pieces_of(self.shard, self.lsn):
                self._send(self._next, piece)
        else:
            for update in self._log:
                if update.lsn > lsn:
                    self._send(self._next, update)
        self._next_knows = True
        if self._current or self._before is None:
            self._send(self._next, Message(Kind.SYNCED, lsn=self.lsn))

    def _fill(self, piece: Message) -> None:
        if self._filling is None:
            self._filling = Filling(self.shard)
        if self._filling.take(piece):
            self.lsn = piece.lsn
            self._kept = tuple(self._filling.kept)
            self._log.clear()
            self._filling = None
            if self._before is not None:
                self._send(self._before, Message(Kind.COMMIT, lsn=self.lsn))

    # Answers

    def _acknowledge(self, update: Message, effect: Effect) -> None:
        if update.kind in (Kind.LEAVE, Kind.JOIN) and not effect.flags & REPEATED:
            # Requests of a process that is gone. A JOIN that was sent again may come after later
            # requests of the process that joined.
            self._held = [one for one in self._held if one[0].worker != update.worker]
        if update.kind is Kind.LEAVE:
            return
        if effect.refusal:
            self._refuse(update, effect.refusal)
        elif update.kind is Kind.PUSH and update.flags & PULLS:
            push = update._replace(flags=update.flags | effect.flags) if effect.flags else update
            if not self._answer(push):
                self._hold(push)
        elif update.kind is Kind.CLOCK and not self.shard.is_open(update.worker, None):
            self._hold(update)
        elif update.kind is Kind.CUT:
            if not self._answer(update):
                self._hold(update)
        elif update.kind is Kind.JOIN:
            cut = self.shard.cuts[update.worker]
            self._reply(update, Kind.DONE, key=cut, round=effect.version, flags=effect.flags)
        else:
            # The version for a CLOCK may have grown since.
            version = self.shard.version if update.kind is Kind.CLOCK else effect.version
            self._reply(update, Kind.DONE, round=version, flags=effect.flags)

    def _answer(self, request: Message) -> bool:
        """Answer a read, or an applied update, unless it has to wait; return whether it is
        answered."""
        shard = self.shard
        if not self._current or shard.applied.get(request.worker, 0) < request.after:
            return False
        if request.kind is Kind.ASK:
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
        if not shard.is_open(request.worker, part):
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
        elif request.flags & MAKES and shard.is_first(request.worker):
            self._reply(request, Kind.DONE, round=shard.epoch)
        elif request.flags & NOW:
            self._reply(request, Kind.TEXT, payload=b"")
        else:
            return False
        return True

    def _answer_cut(self, request: Message) -> bool:
        shard = self.shard
        if shard.cut >= request.round:
            number, why = shard.refused
            if number == request.round:
                self._refuse(request, why)
            else:
                self._reply(request, Kind.DONE, key=shard.writer, round=shard.newest)
        elif shard.lost is not None:
            self._reply(request, Kind.FAILED, key=shard.lost, flags=WORKER_LOST)
        else:
            return False
        return True

    def _reply_kept(self, request: Message) -> None:
        if request.round != self.shard.cut or request.key >= len(self._kept):
            self._refuse(request, f"the values of cut {request.round} are not kept any more")
        else:
            piece = self._kept[request.key]
            self._reply(request, Kind.VALUE, flags=piece.flags, payload=piece.payload)

    def _reply_value(self, request: Message, part: Part) -> None:
        # A push asks for all of an array; a pull may ask for rows of a table.
        is_push = request.kind is Kind.PUSH
        flags = request.flags & (DROPPED | REPEATED) if is_push else 0
        asked = None if is_push else request.payload
        try:
            value = self.shard.arithmetic.read(part.rule, part.value, asked)
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
            self._look_again()

    def _look_again(self) -> None:
        """Answer the requests that need not wait any more."""
        waiting, self._held = self._held, []
        for request, told in waiting:
            if not self._answer(request):
                slowest = self._slowest_for(request)
                if slowest != told:
                    self._tell_slowest(request, slowest)
                self._held.append((request, slowest))

    def _slowest_for(self, request: Message) -> tuple[int, int]:
        if request.kind is Kind.CUT:
            return self.shard.last_to_cut()
        return self.shard.slowest(self._part_of(request))

    def _part_of(self, request: Message) -> Part | None:
        """Return the part whose rounds a request awaits; None for the rounds of the shard."""
        is_of_part = request.kind in _OF_PARTS
        return self.shard.parts.get((request.key, request.part)) if is_of_part else None

    def _waiting(self) -> dict[str, int]:
        """Return how many requests wait, by how many clocks each lacks. Requests that wait for
        something else lack none."""
        found: dict[int, int] = {}
        for request, _ in self._held:
            awaits_clocks = request.kind in _OF_PARTS or request.kind is Kind.CLOCK
            part = self._part_of(request)
            lacks = self.shard.lacks(request.worker, part) if awaits_clocks else 0
            found[lacks] = found.get(lacks, 0) + 1
        return {str(lacks): found[lacks] for lacks in sorted(found)}

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
            "waiting": self._waiting(),
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
