"""The invariants of a store, checked while it runs, if PYCOLL_STORE_CHECKS=1 is set.

A checked shard and a checked worker record clocks and numbers from the messages a second time. They
compare this record with the state of the plain classes. A violation has one of these names:

    staleness   a pull sees every round that the consistency promises
    clocks      the clocks of workers, and the versions of parts, never fall
    sequence    each update of a worker is applied once, in its order, and none is left out
    divisor     a round ends with enough workers, and its mean counts those whose pushes are in it

The call whose request shows the violation raises a PycollError with that name. From then on the
shard refuses all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pycoll.errors import PycollError
from pycoll.ps.client_machine import ClientMachine, Request
from pycoll.ps.consistency import Consistency
from pycoll.ps.messages import ENDS_ROUND, PULLS, REPEATED, UPDATES, Kind, Message
from pycoll.ps.shard import Effect, Part, Shard
from pycoll.ps.views import View

PartName = tuple[int, int]


def _violated(name: str, how: str) -> str:
    return f"invariant {name!r} of the store is violated: {how}"


class _ViolationError(Exception):
    """An invariant does not hold; the text says which one, and why."""

    def __init__(self, name: str, how: str) -> None:
        super().__init__(_violated(name, how))


class _WatchedValues:
    """The arithmetic of a shard. ``folds``: the pushes and workers of each fold, or None.

    ``violation``: the first violation, after which reads fail; empty if there is none.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.folds: list[tuple[int, int]] | None = None
        self.violation = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, rule: int, value: Any, pushes: Sequence[Any], workers: int) -> Any:
        """Return the value after the pushes, and note the fold if ``folds`` is a list."""
        if self.folds is not None:
            self.folds.append((len(pushes), workers))
        return self._inner.apply(rule, value, pushes, workers)

    def read(self, rule: int, value: Any, query: Any) -> Any:
        """Return the payload of a value. ValueError after a violation."""
        if self.violation:
            raise ValueError(self.violation)
        return self._inner.read(rule, value, query)


class CheckedShard(Shard):
    """A shard that checks its invariants."""

    def __init__(self, consistency: Consistency, workers: Iterable[int], arithmetic: Any) -> None:
        self._values: Any = _WatchedValues(arithmetic)
        super().__init__(consistency, workers, self._values)
        self._begin_record()

    def _begin_record(self) -> None:
        """Start the record from the state of the shard."""
        #: The table whose replacement shows that the shard was filled from another server.
        self._filled = self.applied
        self._newest = dict(self.applied)
        self._ended = dict(self.clocks)
        self._begun = dict(self.cuts)
        self._ended_parts = {name: dict(one.clocks) for name, one in self.parts.items()}
        self._versions = {name: one.version for name, one in self.parts.items()}
        self._version = self.version

    def apply(self, update: Message) -> Effect:
        """Apply an update; refuse it where an invariant does not hold."""
        if self.applied is not self._filled:
            self._begin_record()
        if self._values.violation:
            # Count the refused update, so that later reads do not wait for it.
            newest = self.applied.get(update.worker, update.seq)
            self.applied[update.worker] = max(newest, update.seq)
            return Effect(refusal=self._values.violation)
        is_member = update.worker in self.live and update.worker in self._newest
        counts = is_member and update.kind not in (Kind.LEAVE, Kind.JOIN)
        try:
            if counts:
                self._note(update)
            effect = super().apply(update)
            if counts:
                self._check_once(update, effect)
            self._check_versions()
            if update.kind in (Kind.RESTORE, Kind.JOIN):
                # These updates set clocks, instead of advancing them.
                self._begin_record()
        except _ViolationError as error:
            self._values.violation = str(error)
            return Effect(refusal=str(error))
        return effect

    def _note(self, update: Message) -> None:
        """Enter the clocks of a new update into the record."""
        worker = update.worker
        if update.seq > self._newest[worker] + 1:
            raise _ViolationError(
                "sequence",
                f"update {update.seq} of rank {worker} came after update "
                f"{self._newest[worker]}, and those between are missing",
            )
        if update.seq <= self._newest[worker]:
            return
        if update.kind is Kind.CLOCK:
            self._grow(self._ended, worker, update.round)
        elif update.kind is Kind.CUT:
            self._begun[worker] = max(self._begun.get(worker, 0), update.round)
        elif update.kind is Kind.PUSH and update.flags & ENDS_ROUND:
            ended = self._ended_parts.setdefault((update.key, update.part), {})
            self._grow(ended, worker, update.round + 1)

    @staticmethod
    def _grow(ended: dict[int, int], worker: int, clock: int) -> None:
        before = ended.get(worker, 0)
        if clock <= before:
            raise _ViolationError(
                "clocks", f"the clock of rank {worker} went from {before} to {clock}"
            )
        ended[worker] = clock

    def _check_once(self, update: Message, effect: Effect) -> None:
        worker = update.worker
        is_new = update.seq > self._newest[worker]
        self._newest[worker] = max(self._newest[worker], update.seq)
        if effect.refusal or is_new == (not effect.flags & REPEATED):
            return
        how = "was not applied" if is_new else "was applied a second time"
        raise _ViolationError("sequence", f"update {update.seq} of rank {worker} {how}")

    def _check_versions(self) -> None:
        before, self._version = self._version, self.version
        if self.version < before:
            raise _ViolationError("clocks", f"the version went from {before} to {self.version}")
        for name, part in self.parts.items():
            before = self._versions.get(name, 0)
            self._versions[name] = part.version
            if part.version < before:
                raise _ViolationError(
                    "clocks",
                    f"the version of key {name[0]} part {name[1]} went from {before} to "
                    f"{part.version}",
                )

    def _clock_by_record(self, worker: int, name: PartName | None) -> int:
        alone = 0 if name is None else self._ended_parts.get(name, {}).get(worker, 0)
        return max(self._ended.get(worker, 0), alone)

    def _needed_by_record(self) -> int:
        needed = self.consistency.needed(len(self.live))
        late = sum(self._begun.get(worker, 0) <= self.cut for worker in self.live)
        return min(needed, max(1, late)) if self.consistency.share < 1 else needed

    def _name_of(self, part: Part | None) -> PartName | None:
        return next((name for name, one in self.parts.items() if one is part), None)

    def _advance(self, part: Part) -> None:
        first = part.version
        waiting = {turn: [len(one) for one in by.values()] for turn, by in part.pending.items()}
        folds: list[tuple[int, int]] = []
        self._values.folds = folds
        super()._advance(part)
        self._values.folds = None
        if part.version == first or not self.consistency.folds:
            return
        ended = [turn for turn in sorted(waiting) if first <= turn < part.version]
        expected = [(sum(waiting[turn]), len(waiting[turn])) for turn in ended]
        where = f"of rounds {first} to {part.version - 1}"
        if folds != expected:
            raise _ViolationError(
                "divisor",
                f"pushes and divisors {where} are {expected}, and {folds} were folded",
            )
        name = self._name_of(part)
        done = sum(self._clock_by_record(one, name) >= part.version for one in self.live)
        needed = self._needed_by_record()
        if done < needed:
            raise _ViolationError(
                "divisor",
                f"{done} of {len(self.live)} workers had come to the end {where}, and "
                f"{self.consistency} needs {needed}",
            )

    def may_proceed(self, worker: int, part: Part | None) -> bool:
        """Return whether the worker may go on; note a violation where it is too far ahead.

        After a violation no request waits, so that all workers receive the error.
        """
        if self._values.violation:
            return True
        may_proceed = super().may_proceed(worker, part)
        staleness = self.consistency.staleness
        # With Backup, an ended round stays ended when its workers leave.
        if may_proceed and staleness is not None and self.consistency.share == 1:
            name = self._name_of(part)
            clocks = {one: self._clock_by_record(one, name) for one in self.live}
            last = min(clocks, key=clocks.__getitem__, default=worker)
            if worker in clocks and clocks[last] < clocks[worker] - staleness:
                self._values.violation = _violated(
                    "staleness",
                    f"rank {worker} reads at clock {clocks[worker]} while rank {last} is at clock "
                    f"{clocks[last]}, with {self.consistency}",
                )
        return may_proceed


class CheckedClient(ClientMachine):
    """A worker that checks its own clocks, and what servers answer."""

    def __init__(self, me: int, view: View, consistency: Consistency, first: int = 0) -> None:
        super().__init__(me, view, first)
        self._consistency = consistency
        self._ended: dict[int, int] = {}
        self._ended_parts: dict[PartName, int] = {}
        #: By part the newest version in an answer.
        self._versions: dict[PartName, int] = {}
        #: By running read the oldest version that the consistency allows.
        self._oldest: dict[Request, int] = {}
        #: By running request how often it was sent.
        self._sent: dict[Request, int] = {}

    def add(
        self,
        message: Message,
        priority: int = 0,
        target: Any = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> Request:
        """Begin a request. PycollError for a clock that does not grow."""
        name = message.key, message.part
        if message.kind is Kind.CLOCK:
            before = self._ended.get(message.shard, 0)
            if message.round <= before:
                how = f"this worker's clock goes from {before} to {message.round}"
                raise PycollError(_violated("clocks", how), operation="ps")
            self._ended[message.shard] = message.round
        elif message.kind is Kind.PUSH and message.flags & ENDS_ROUND:
            self._ended_parts[name] = max(self._ended_parts.get(name, 0), message.round + 1)
        clock = max(self._ended.get(message.shard, 0), self._ended_parts.get(name, 0))
        request = super().add(message, priority, target, on_end)
        staleness = self._consistency.staleness
        reads = message.kind is Kind.PULL or (message.kind is Kind.PUSH and message.flags & PULLS)
        if reads and staleness is not None and not request.ended:
            self._oldest[request] = clock - staleness
        return request

    def _send(self, shard: int, request: Request) -> None:
        self._sent[request] = self._sent.get(request, 0) + 1
        super()._send(shard, request)

    def handle(self, source: int, message: Message) -> None:
        """Handle a message; its request fails if the message violates an invariant."""
        request = self.find_request(message)
        why = "" if request is None else self._violation(request, message)
        if request is not None and why:
            self._fail(request, why)
        else:
            super().handle(source, message)

    def _violation(self, request: Request, message: Message) -> str:
        sent = request.message
        is_repeated = sent.kind in UPDATES and message.flags & REPEATED
        if message.kind in (Kind.DONE, Kind.VALUE) and is_repeated and self._sent[request] == 1:
            return _violated(
                "sequence",
                f"update {message.seq} was sent once, and a server had applied it before",
            )
        if message.kind is not Kind.VALUE or sent.kind not in (Kind.PULL, Kind.PUSH):
            return ""
        name = sent.key, sent.part
        where = f"of key {sent.key} part {sent.part}"
        before = self._versions.get(name, 0)
        if message.round < before:
            return _violated("clocks", f"the version {where} went from {before} to {message.round}")
        self._versions[name] = message.round
        oldest = self._oldest.get(request, 0)
        if message.round < oldest:
            return _violated(
                "staleness",
                f"the answer has version {message.round} {where}, and {self._consistency} allows "
                f"none below {oldest} at this worker's clock",
            )
        return ""

    def _end(self, request: Request) -> None:
        self._oldest.pop(request, None)
        self._sent.pop(request, None)
        super()._end(request)
