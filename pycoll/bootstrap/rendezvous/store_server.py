"""The store: gathers one blob per rank and round, and sends all blobs to every rank.

The server runs as a thread of the launcher, or of rank 0 while rank 0 joins. If ranks disagree
about the size, claim the same number, end or never come, the server names them to all ranks that
did come.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pycoll.bootstrap.admission import Admission, Loop, Trust
from pycoll.bootstrap.discovery.network import watch_host
from pycoll.bootstrap.handshake import Claim, Purpose, Verdict, scope_of
from pycoll.bootstrap.rendezvous.frames import (
    BLOBS_BYTES_MAX,
    GATHER_HEAD,
    PAYLOAD_BYTES_MAX,
    RANKS,
    SHARE_HEAD,
    SILENCE_S,
    Kind,
    Party,
    cut_frame,
    fail_frame,
    frame,
    list_ranks,
    pack_blobs,
    read_hello,
)

#: Seconds that ``close`` waits at most until the last answers are sent.
_FLUSH_S = 5.0
#: Seconds that a failed meeting stays open, so that ranks that come late get the reason.
_TELL_S = 1.0
#: Seconds between two checks of the deadlines. A check at every event would be quadratic in size.
_CHECK_S = 0.1


@dataclass(eq=False)
class _Member:
    sock: socket.socket
    rank: int
    name: str = ""
    meeting: _Meeting | None = None
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: deque[memoryview] = field(default_factory=deque)
    rounds: int = 0  # number of rounds for which it has sent its blob
    waiting: bool = False  # it waits for the result of the last of these rounds
    heard: float = 0.0  # when its last pulse came; 0 before the first one
    ranks: int = 0  # the ranks for which it stands and that are not lost
    proxy: bytes | None = None  # its blob of later rounds if it is lost; None: its loss is fatal
    done: bool = False  # the server expects nothing more from it and sends nothing more to it


@dataclass(eq=False)
class _Round:
    until: float
    limit_s: float
    total: int = 0  # bytes in all blobs
    blobs: dict[int, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class _Meeting:
    """The ranks that join together. A launcher's store may have several meetings in a row."""

    members: dict[int, _Member] = field(default_factory=dict)
    rounds: dict[int, _Round] = field(default_factory=dict)
    failure: bytes | None = None
    lost: int = 0  # ranks of all members that are lost
    tolerated: int = 0  # how many of them may be
    absent: dict[int, bytes] = field(default_factory=dict)  # the blobs of lost members
    informed: set[int] = field(default_factory=set)  # ranks that know the failure or caused it


class StoreServer:
    """Serves ``size`` ranks on ``listener``, which it owns; error texts call it ``host``.

    ``once``: serve one meeting only. ``party``: the words for its members. The server has one
    thread, from ``start`` to ``close``.
    """

    def __init__(
        self,
        listener: socket.socket,
        size: int,
        key: bytes,
        job_id: str,
        host: str,
        *,
        once: bool = False,
        trust: Trust = lambda sock: True,
        party: Party = RANKS,
    ) -> None:
        self._size = size
        self._party = party
        self._host = host
        self._once = once
        self._meeting = _Meeting()
        self._members: set[_Member] = set()
        self._close_by: float | None = None
        self._tell_by = 0.0
        self._next_check = 0.0
        #: What ``lose`` has been told and the thread has not taken yet.
        self._told: deque[bytes] = deque()
        #: The failure of every meeting since ranks are lost.
        self._lost: bytes | None = None
        self._loop = Loop("pycoll-store")
        self._admission = Admission(
            self._loop.selector,
            key,
            scope_of(job_id, "store"),
            self._decide,
            self._admit,
            trust,
        )
        self._admission.listen(listener, Purpose.STORE)
        self._loop.every += [
            self._admission.expire,
            self._take_losses,
            self._check_deadlines,
            self._check_close,
        ]

    def start(self) -> None:
        """Start to serve. The owner calls it once."""
        self._loop.start()

    def lose(self, ranks: Sequence[int], text: str) -> None:
        """Note that these ranks will never come. The others, which join now or later, raise
        PeerLostError with ``text``. Any thread may call it, also after ``close``."""
        self._told.append(fail_frame("lost", text, list(ranks)))
        self._loop.wake()

    def close(self) -> None:
        """Send the queued frames, for ``_FLUSH_S`` at most, then end the thread and all
        connections."""
        now = time.monotonic()
        self._tell_by = now + _TELL_S
        self._close_by = now + _FLUSH_S
        self._loop.wake()
        self._loop.join()
        self._admission.close()
        for member in self._members:
            member.sock.close()
        self._members.clear()
        self._loop.close()

    def _take_losses(self) -> None:
        while self._told:
            failure = self._told.popleft()
            self._lost = self._lost or failure
            members = self._meeting.members
            have_joined = len(members) == self._size and all(one.done for one in members.values())
            if members and not have_joined:
                self._fail(self._meeting, failure)

    def _check_close(self) -> None:
        if self._close_by is None:
            return
        now = time.monotonic()
        flushed = not any(member.outgoing for member in self._members)
        informed = self._meeting.failure is None or len(self._meeting.informed) >= self._size
        if (flushed and (informed or now > self._tell_by)) or now > self._close_by:
            self._loop.end()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_S
        for member in list(self._members):
            if member.heard and not member.done and now - member.heard > SILENCE_S:
                self._lose(member, self._party.stopped)
        for meeting in {m.meeting for m in self._members if m.meeting is not None}:
            if meeting.failure is not None:
                continue
            for round_ in meeting.rounds.values():
                if round_.until <= now:
                    self._time_out(meeting, round_)
                    break

    def _time_out(self, meeting: _Meeting, round_: _Round) -> None:
        present = round_.blobs.keys() | meeting.absent.keys()
        missing = [rank for rank in range(self._size) if rank not in present]
        came = [rank for rank in missing if rank in meeting.members]
        noun = self._party.member
        text = (
            f"{self._party.waiter} waited {round_.limit_s:.3g} s for {list_ranks(missing, noun)} "
            f"of {self._size}"
        )
        absent = [rank for rank in missing if rank not in came]
        if absent:
            text += f": {list_ranks(absent, noun)} never arrived at {self._host}"
        if came:
            names = ", ".join(f"{rank} ({meeting.members[rank].name})" for rank in came[:8])
            text += f"{'; ' if absent else ': '}arrived but did not finish: {names}"
        if self._admission.refusals:
            text += "; turned away: " + "; ".join(self._admission.refusals)
        text += f" ({self._party.limit} sets the limit)"
        # A missing rank that comes later starts a new meeting; it does not fail with this one.
        meeting.informed.update(missing)
        self._fail(meeting, fail_frame("timeout", text, missing))

    def _decide(self, claim: Claim) -> Verdict | None:
        """Admit every rank with a number. A server for one meeting closes the connection of a rank
        that comes back after the meeting failed: it retries until the next attempt's server."""
        if claim.rank < 0:
            return Verdict.UNWANTED
        return None if self._once and claim.rank in self._meeting.informed else Verdict.ADMITTED

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        if self._party.watched:
            watch_host(sock)
        member = _Member(sock, claim.rank)
        self._members.add(member)
        self._loop.selector.register(
            sock, selectors.EVENT_READ, lambda mask: self._ready(member, mask)
        )

    def _ready(self, member: _Member, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(member)
        if not mask & selectors.EVENT_READ or member not in self._members:
            return
        try:
            data = member.sock.recv(256 * 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(member)
        elif not member.done:
            member.incoming += data
            self._take_frames(member)

    def _take_frames(self, member: _Member) -> None:
        """Handle every complete frame that has arrived.

        No bytes end the store's thread. If a frame breaks the protocol, or handling it raises, the
        meeting fails and the error names the sender.
        """
        try:
            while not member.done and self._next_frame(member):
                pass
        except Exception as error:
            self._reject(member, str(error) or type(error).__name__)

    def _next_frame(self, member: _Member) -> bool:
        found = cut_frame(member.incoming, lambda kind: PAYLOAD_BYTES_MAX.get(kind, 0))
        if found is not None:
            self._handle(member, *found)
        return found is not None

    def _handle(self, member: _Member, kind: int, payload: bytes) -> None:
        if kind == Kind.HELLO and member.meeting is None:
            self._greet(member, *read_hello(payload))
        elif kind == Kind.GATHER and member.meeting is not None:
            if len(payload) < GATHER_HEAD.size:
                raise ValueError("a gather frame without its head")
            number, left_ms, all_ms = GATHER_HEAD.unpack_from(payload)
            round_ = _Round(time.monotonic() + left_ms / 1e3, all_ms / 1e3)
            self._gather(member, number, round_, payload[GATHER_HEAD.size :])
        elif kind == Kind.ALARM and member.meeting is not None:
            failure = fail_frame("transport", payload.decode(), [member.rank])
            self._fail(member.meeting, failure)
        elif kind == Kind.SHARE and member.meeting is not None and self._party.tolerance:
            if len(payload) < SHARE_HEAD.size:
                raise ValueError("a share without its head")
            member.ranks, member.meeting.tolerated = SHARE_HEAD.unpack_from(payload)
            member.proxy = payload[SHARE_HEAD.size :]
        elif kind == Kind.LOST and member.meeting is not None and member.ranks > 0:
            member.ranks -= 1
            # The reason follows on a line of its own, since the text may be JSON.
            text = payload.decode()
            if self._count(member.meeting, 1):
                self._tell_loss(member, text, gone=False)
            else:
                text += f"\n{self._excess(member.meeting)}"
                self._fail(member.meeting, fail_frame("transport", text, [member.rank]))
        elif kind == Kind.LEAVE and not member.waiting:
            member.done = True
        elif kind == Kind.PULSE and member.meeting is not None:
            member.heard = time.monotonic()
            self._send(member, frame(Kind.PULSE))
        elif kind == Kind.ORDER:
            raise ValueError("it is elastic (--min-np, --max-np), and this job is not")
        else:
            raise ValueError(f"a frame of kind {kind} out of place")

    def _reject(self, member: _Member, what: str) -> None:
        """Fail the meeting because ``member`` sent invalid frames, and ignore it from now on."""
        if member.meeting is None:
            member.meeting = self._meeting_for(member.rank)
        name = f"{self._party.member} {member.rank}"
        name += f" ({member.name})" if member.name else ""
        text = f"{name} sent unreadable data to the store of {self._host}: {what}"
        self._fail(member.meeting, fail_frame("transport", text, [member.rank]))
        self._tell_end(member, member.meeting.failure or b"")
        member.incoming.clear()

    def _greet(self, member: _Member, size: int, name: str) -> None:
        member.name = name
        noun = self._party.member
        meeting = self._meeting_for(member.rank)
        member.meeting = meeting
        if self._lost is not None:
            self._fail(meeting, self._lost)
        if meeting.failure is not None:
            self._tell_end(member, meeting.failure)
            return
        other = meeting.members.setdefault(member.rank, member)
        if other is not member:
            text = (
                f"two processes claim {self._party.member} {member.rank}: {other.name} and {name}; "
                f"give each process its own {self._party.number}"
            )
            self._fail(meeting, fail_frame("argument", text, [member.rank]))
            self._tell_end(member, meeting.failure or b"")
        elif size != self._size:
            text = (
                f"the {noun}s disagree about the size: {noun} {member.rank} ({name}) says {size}, "
                f"{self._host} expects {self._size}; give all processes the same "
                f"{self._party.size}"
            )
            self._fail(meeting, fail_frame("argument", text, [member.rank]))
        elif member.rank >= self._size:
            raise ValueError(f"a claim to be {noun} {member.rank} of {self._size}")
        elif self._once and len(meeting.members) == self._size:
            self._admission.stop_listening()

    def _meeting_for(self, rank: int) -> _Meeting:
        """Return the meeting that ``rank`` joins: the current one, or a new one if the rank has
        left the current one, was told that it failed, or made it fail by not coming."""
        current = self._meeting
        before = current.members.get(rank)
        if rank in current.informed or (before is not None and before.done):
            self._meeting = _Meeting()
        return self._meeting

    def _gather(self, member: _Member, number: int, sent: _Round, blob: bytes) -> None:
        meeting = member.meeting
        if meeting is None or meeting.failure is not None:
            return
        # A member may have one blob pending, which bounds the memory that it can make the store
        # use.
        if number != member.rounds or member.waiting:
            raise ValueError(f"a blob of round {number} before the result of the one before")
        member.rounds, member.waiting = number + 1, True
        round_ = meeting.rounds.setdefault(number, sent)
        round_.until = min(round_.until, sent.until)
        round_.blobs[member.rank] = blob
        round_.total += len(blob)
        if round_.total > BLOBS_BYTES_MAX:
            longest = max(round_.blobs, key=lambda rank: len(round_.blobs[rank]))
            text = (
                f"the ranks sent more than {BLOBS_BYTES_MAX} bytes while joining, of which "
                f"{len(round_.blobs[longest])} are of rank {longest} "
                f"({meeting.members[longest].name})"
            )
            self._fail(meeting, fail_frame("transport", text, [longest]))
        else:
            self._finish(meeting, number)

    def _finish(self, meeting: _Meeting, number: int) -> None:
        """Send the result of a round if no blob is missing."""
        blobs = meeting.absent | meeting.rounds[number].blobs
        if len(blobs) < self._size:
            return
        result = frame(Kind.RESULT, pack_blobs([blobs[rank] for rank in range(self._size)]))
        del meeting.rounds[number]
        for other in meeting.members.values():
            other.waiting = False
            self._send(other, result)

    def _fail(self, meeting: _Meeting, failure: bytes) -> None:
        # Only the first failure is reported: later ones follow from it.
        if meeting.failure is not None:
            return
        meeting.failure = failure
        for member in meeting.members.values():
            self._tell_end(member, failure)

    def _tell_end(self, member: _Member, failure: bytes) -> None:
        if not member.done:
            self._send(member, failure)
            member.done = True
            if member.meeting is not None:
                member.meeting.informed.add(member.rank)

    def _lose(self, member: _Member, how: str = "") -> None:
        self._loop.selector.unregister(member.sock)
        member.sock.close()
        self._members.discard(member)
        meeting = member.meeting
        expected = not member.done
        member.done = True
        member.outgoing.clear()
        if meeting is not None:
            # A process that replaces it starts a new meeting; it does not fail with this one.
            meeting.informed.add(member.rank)
        if expected and meeting is not None:
            party = self._party
            text = f"{party.member} {member.rank} ({member.name}) {how or party.lost}"
            if meeting.failure is None and member.proxy is not None:
                self._do_without(meeting, member, text)
            else:
                self._fail(meeting, fail_frame("lost", text, [member.rank]))

    def _do_without(self, meeting: _Meeting, member: _Member, text: str) -> None:
        """Go on without a member if so many ranks may be lost."""
        if member.waiting:
            # Its blob of the last round is here: its ranks have ended before it was lost.
            return
        if not self._count(meeting, member.ranks):
            text += self._excess(meeting)
            self._fail(meeting, fail_frame("lost", text, [member.rank]))
            return
        meeting.absent[member.rank] = member.proxy or b""
        self._tell_loss(member, text, gone=True)
        for number in list(meeting.rounds):
            self._finish(meeting, number)

    def _count(self, meeting: _Meeting, ranks: int) -> bool:
        """Count lost ranks; returns whether the meeting goes on."""
        meeting.lost += ranks
        return meeting.lost <= meeting.tolerated

    def _excess(self, meeting: _Meeting) -> str:
        return (
            f"; {meeting.lost} ranks are lost by now, and {self._party.tolerance} "
            f"{meeting.tolerated} counts those of all {self._party.member}s"
        )

    def _tell_loss(self, lost: _Member, text: str, gone: bool) -> None:
        news = json.dumps({"member": lost.rank, "text": text, "gone": gone}).encode()
        for member in lost.meeting.members.values() if lost.meeting is not None else ():
            if not member.done:
                self._send(member, frame(Kind.NEWS, news))

    def _send(self, member: _Member, data: bytes) -> None:
        if member not in self._members:
            return
        member.outgoing.append(memoryview(data))
        self._flush(member)

    def _flush(self, member: _Member) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while member.outgoing:
                    sent = member.sock.send(member.outgoing[0])
                    member.outgoing[0] = member.outgoing[0][sent:]
                    if not member.outgoing[0]:
                        member.outgoing.popleft()
            except BlockingIOError:
                raise
            except OSError:
                # The read that follows detects and reports the loss.
                member.outgoing.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if member.outgoing else 0)
        self._loop.selector.modify(member.sock, events, lambda mask: self._ready(member, mask))
