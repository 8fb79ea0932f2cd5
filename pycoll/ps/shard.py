"""The state of a shard, and the updates that change it; the same updates make the same state.

A shard holds parts of arrays, texts by name, the clocks of the workers, and the number of each
worker's newest update. It is a deterministic state machine: all servers of a chain that apply the
same updates in the same order hold the same state, bit for bit.

The clock of a worker for a part counts the rounds that it has ended there: by a CLOCK, which ends a
round for all parts, or by a push with the flag LAST, which ends it for one. The version of a part
is the number of rounds that enough workers have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from pycoll.ps.consistency import Consistency
from pycoll.ps.membership.newcomers import has_only_joined
from pycoll.ps.messages import ALL, DROPPED, ENDS_ROUND, NAMES, REPEATED, STEPPED, Kind, Message
from pycoll.untrusted import json_object, read_json

#: The most names of a shard's texts.
TEXTS_MAX = 1 << 16
#: The most late pushes that a shard remembers of each worker. It exceeds the window of a worker, so
#: a repeated push that was late is among them.
LATE_MAX = 256
#: The members of the text of a RESTORE with the flag ALL.
_RESTORED = {"clocks": dict, "version": int, "optimizer": str}
_OPEN_ROUND = (
    "a worker has pushed values of a round that has not ended: all workers call clock() ahead of "
    "checkpoint()"
)


class Arithmetic(Protocol):
    """Operations on the values of a shard: arrays on servers, whole numbers in simulations."""

    def load(self, rule: int, payload: Any) -> Any:
        """Return the value of a new part. Raises ValueError for malformed bytes."""

    def refusal(self, rule: int, value: Any, payload: Any) -> str:
        """Return the reason for which the payload does not fit this part; empty if it fits."""

    def apply(self, rule: int, value: Any, pushes: Sequence[Any], workers: int) -> Any:
        """Return the value after pushes of so many workers, which are in rank order.

        The caller does not use the passed value again. Earlier results of ``read`` do not change.
        """

    def steps(self, value: Any) -> bool:
        """Return whether pushes step the value by an optimizer."""

    def set_optimizer(self, rule: int, value: Any, form: Any) -> Any:
        """Return the value with the optimizer that these bytes describe.

        Raises ValueError for a wrong form.
        """

    def read(self, rule: int, value: Any, query: Any) -> Any:
        """Return the value as a payload, or the part of it that ``query`` names.

        Raises ValueError for a malformed query.
        """

    def nbytes(self, value: Any) -> int:
        """Return the bytes that a value takes."""

    def pieces(self, value: Any) -> Sequence[Any]:
        """Return payloads that hold the whole value, for a snapshot."""

    def join(self, rule: int, pieces: Sequence[Any]) -> Any:
        """Return the value from the payloads that ``pieces`` made.

        Raises ValueError for other payloads.
        """

    def restore(self, rule: int, value: Any, place: int, payload: Any) -> Any:
        """Return the value with one piece of a saved value. ``place``: the number of the piece.

        Raises ValueError for other payloads.
        """


class Part:
    """A part of an array. ``clocks``: by worker the rounds that it ended for this part alone.

    ``pending``: by round and worker the pushes of rounds that have not ended. ``uses``: the number
    of pushes and pulls on this server.
    """

    __slots__ = ("clocks", "pending", "rule", "uses", "value", "version")

    def __init__(self, rule: int, value: Any, version: int) -> None:
        self.rule = rule
        self.value = value
        self.version = version
        self.clocks: dict[int, int] = {}
        self.pending: dict[int, dict[int, list[Any]]] = {}
        self.uses = 0


class Effect(NamedTuple):
    """The result of an update. ``flags``: of the DONE. ``version``: of the part, or of the shard.

    ``refusal``: why the shard refused the update, for the worker's error; empty if it did not.
    """

    flags: int = 0
    version: int = 0
    refusal: str = ""


class Counts:
    """Counters of a shard since its server began. They are not part of the replicated state."""

    def __init__(self) -> None:
        self.pushes = 0
        self.pulls = 0
        self.dropped = 0
        self.repeated = 0
        self.rounds = 0


class Shard:
    """The state of a shard. ``live``: the workers that count in rounds, in rank order."""

    def __init__(
        self, consistency: Consistency, workers: Iterable[int], arithmetic: Arithmetic
    ) -> None:
        self.consistency = consistency
        self.live = sorted(workers)
        self.clocks = dict.fromkeys(self.live, 0)
        self.applied = dict.fromkeys(self.live, 0)
        #: By worker the numbers of its newest late pushes: those that came after their round.
        self.late: dict[int, list[int]] = {}
        self.parts: dict[tuple[int, int], Part] = {}
        self.texts: dict[str, str] = {}
        #: By number the names of keys and tables with parts in this shard, for figures.
        self.names: dict[int, str] = {}
        #: The optimizer of all keys in its serialized form; empty for none.
        self.optimizer = b""
        #: The number of rounds that enough workers have ended by their clocks.
        self.version = 0
        #: The first worker that is gone from a store that needs all workers, or None.
        self.lost: int | None = None
        #: By worker the number of its newest cut, from 1.
        self.cuts = dict.fromkeys(self.live, 0)
        #: The newest cut that all live workers have begun.
        self.cut = 0
        #: The worker that writes the values of the newest cut.
        self.writer = 0
        #: How often a worker has left. No two first workers have the same epoch.
        self.epoch = 0
        #: The newest cut that the shard refuses, and the reason.
        self.refused_cut = (0, "")
        self.counts = Counts()
        self.arithmetic = arithmetic

    def apply(self, update: Message) -> Effect:
        """Apply an update, unless it has been applied before."""
        worker = update.worker
        if update.kind is Kind.LEAVE:
            self._leave(worker)
            return Effect(0, self.version)
        if update.kind is Kind.JOIN and update.seq > self.applied.get(worker, 0):
            return self._join(update)
        if worker not in self.applied or worker not in self.live:
            return Effect(refusal=f"rank {worker} is no worker of this store, or was found gone")
        if update.seq <= self.applied[worker]:
            self.counts.repeated += 1
            flags = DROPPED if update.seq in self.late.get(worker, ()) else 0
            return Effect(REPEATED | flags, self._version_for(update))
        self.applied[worker] = update.seq
        if update.kind is Kind.PUSH:
            return self._push(update)
        if update.kind is Kind.CLOCK:
            self.clocks[worker] = max(self.clocks[worker], update.round)
            self._advance_all()
        elif update.kind is Kind.LOAD:
            return self._load(update)
        elif update.kind is Kind.WRITE:
            return self._write(update)
        elif update.kind is Kind.OPTIMIZE:
            return self._optimize(update)
        elif update.kind is Kind.CUT:
            self._cut(update)
        elif update.kind is Kind.RESTORE:
            return self._restore(update)
        return Effect(0, self._version_for(update))

    def _optimize(self, update: Message) -> Effect:
        form = b"" if update.payload is None else bytes(update.payload)
        try:
            for (key, _), part in self.parts.items():
                if update.flags & ALL or key == update.key:
                    part.value = self.arithmetic.set_optimizer(part.rule, part.value, form)
        except ValueError as error:
            return Effect(refusal=str(error))
        if update.flags & ALL:
            self.optimizer = form
        return Effect(0, self.version)

    def _version_for(self, update: Message) -> int:
        if update.kind is Kind.JOIN:
            return self.clocks[update.worker]
        part = self.parts.get((update.key, update.part))
        return part.version if update.kind is Kind.PUSH and part is not None else self.version

    def _load(self, update: Message) -> Effect:
        name = (update.key, update.part)
        if name not in self.parts:
            try:
                value = self.arithmetic.load(update.rule, update.payload)
                if self.optimizer:
                    value = self.arithmetic.set_optimizer(update.rule, value, self.optimizer)
            except ValueError as error:
                return Effect(refusal=str(error))
            self.parts[name] = Part(update.rule, value, self.version)
        return Effect(0, self.version)

    def _write(self, update: Message) -> Effect:
        name, _, text = bytes(update.payload).decode("utf-8", "replace").partition("\0")
        if update.flags & NAMES:
            if len(self.names) < TEXTS_MAX:
                self.names[update.key] = name
            return Effect(0, self.version)
        if len(self.texts) >= TEXTS_MAX and name not in self.texts:
            return Effect(refusal=f"the store has {TEXTS_MAX} names already")
        self.texts.setdefault(name, text)
        return Effect(0, self.version)

    def _push(self, push: Message) -> Effect:
        part = self.parts.get((push.key, push.part))
        if part is None:
            return Effect(refusal=f"part {push.part} of key {push.key} is not known here")
        if refusal := self.arithmetic.refusal(part.rule, part.value, push.payload):
            return Effect(refusal=refusal)
        self.counts.pushes += 1
        part.uses += 1
        flags = 0
        if not self.consistency.folds:
            pushes = [push.payload]
            part.value = self.arithmetic.apply(part.rule, part.value, pushes, 1)
            flags = STEPPED if self.arithmetic.steps(part.value) else 0
        elif push.round < max(part.version, self.clock_of(push.worker, part)):
            # The round has ended, or the worker's earlier process has pushed in it.
            self.counts.dropped += 1
            self.late[push.worker] = [*self.late.get(push.worker, ()), push.seq][-LATE_MAX:]
            flags = DROPPED
        else:
            by_worker = part.pending.setdefault(push.round, {})
            by_worker.setdefault(push.worker, []).append(push.payload)
        if push.flags & ENDS_ROUND:
            part.clocks[push.worker] = max(part.clocks.get(push.worker, 0), push.round + 1)
            self._advance(part)
        return Effect(flags, part.version)

    def _leave(self, worker: int) -> None:
        if worker not in self.live:
            return
        if not self.consistency.survives_workers and not has_only_joined(self.applied[worker]):
            # The open rounds of this shard can no longer end. The values of ended rounds stay
            # readable.
            self.lost = worker if self.lost is None else self.lost
            return
        self.live.remove(worker)
        self.late.pop(worker, None)
        self.epoch += 1
        if self.consistency.elastic:
            self._discard(worker)
        self._advance_all()
        self._end_cut()

    def _discard(self, worker: int) -> None:
        """Drop the pushes of a gone worker in rounds that have not ended."""
        for part in self.parts.values():
            for round_number, by in list(part.pending.items()):
                self.counts.dropped += len(by.pop(worker, ()))
                if not by:
                    del part.pending[round_number]

    def _join(self, update: Message) -> Effect:
        """Count a new worker, or a new process of a worker that is gone.

        It begins at the version of the shard and of each part, and after all rounds in which its
        earlier process has pushed.
        """
        worker = update.worker
        # A lost server may not have numbered the LEAVE of the worker's earlier process.
        self._leave(worker)
        if refusal := self._refusal_of_join():
            return Effect(refusal=refusal)
        self.applied[worker] = update.seq
        self.live = sorted([*self.live, worker])
        self.clocks[worker] = self.version
        self.cuts[worker] = self.cut
        for part in self.parts.values():
            part.clocks.pop(worker, None)
            if self.consistency.folds:
                pushed = (
                    round_number + 1 for round_number, by in part.pending.items() if worker in by
                )
                part.clocks[worker] = max(part.version, *pushed, 0)
        return Effect(0, self.version)

    def _refusal_of_join(self) -> str:
        if self.lost is not None:
            return (
                f"rank {self.lost} is gone, and {self.consistency} needs all: open a new store, "
                "and restore() a checkpoint there"
            )
        is_ahead = any(part.version > self.version for part in self.parts.values())
        if is_ahead and self.consistency.name == "bsp":
            return (
                f"the store is {self.consistency}, and push_pull() ended rounds of some keys alone:"
                " a new worker needs rounds that clock() ends for all keys"
            )
        return ""

    # Cuts and restored states

    def _cut(self, update: Message) -> None:
        self.cuts[update.worker] = max(self.cuts[update.worker], update.round)
        if update.payload is not None and update.round > self.refused_cut[0]:
            self.refused_cut = (update.round, bytes(update.payload).decode("utf-8", "replace"))
        # With Backup, a cut can lower the number of workers that end a round.
        self._advance_all()
        self._end_cut()

    def _end_cut(self) -> None:
        reached = min((self.cuts[worker] for worker in self.live), default=0)
        if self.lost is None and reached > self.cut:
            self.cut = reached
            self.writer = self._first_worker()
            if reached > self.refused_cut[0] and self._has_open_round():
                self.refused_cut = (reached, _OPEN_ROUND)

    def _has_open_round(self) -> bool:
        """Return whether a live worker has pushed in a round that has not ended."""
        live = set(self.live)
        rounds = (by for part in self.parts.values() for by in part.pending.values())
        return any(live & by.keys() for by in rounds)

    def is_first(self, worker: int) -> bool:
        """Return whether the worker is the first live one."""
        return worker == self._first_worker()

    def _first_worker(self) -> int:
        """Return the first live worker, ordered by time of joining and then by rank.

        So a worker that joins never replaces a live first worker.
        """
        return min(self.live, key=lambda one: (self.applied[one] >> 32, one), default=-1)

    @property
    def is_cutting(self) -> bool:
        """Whether some workers have begun a cut that others have not begun yet."""
        return any(self.is_ahead(worker) for worker in self.live)

    def is_ahead(self, worker: int) -> bool:
        """Return whether the worker has begun a cut that others have not begun yet."""
        return self.lost is None and self.cuts.get(worker, 0) > self.cut

    def last_to_cut(self) -> tuple[int, int]:
        """Return the live worker that has begun the fewest cuts, and their number."""
        begun = ((worker, self.cuts[worker]) for worker in self.live)
        return min(begun, key=lambda one: one[1], default=(0, 0))

    def _restore(self, update: Message) -> Effect:
        payload = b"" if update.payload is None else update.payload
        try:
            if update.flags & ALL:
                facts = json_object(read_json(bytes(payload)), _RESTORED)
                clocks = {int(one): int(clock) for one, clock in facts["clocks"].items()}
                self.clocks.update((one, clocks[one]) for one in self.live if one in clocks)
                self.version = facts["version"]
                self.optimizer = bytes.fromhex(facts["optimizer"])
            else:
                part = self.parts[update.key, update.part]
                rule, place = part.rule, update.round
                part.value = self.arithmetic.restore(rule, part.value, place, payload)
        except (KeyError, TypeError, ValueError) as error:
            return Effect(refusal=f"a state that does not fit its part: {error}")
        return Effect(0, self.version)

    # Clocks and versions

    def clock_of(self, worker: int, part: Part | None) -> int:
        """Return the number of rounds that the worker has ended, of this part or of the shard."""
        clock = self.clocks.get(worker, 0)
        return clock if part is None else max(clock, part.clocks.get(worker, 0))

    def _ended_rounds(self, part: Part | None) -> int:
        """Return the number of rounds that enough workers have ended."""
        if not self.live or self.lost is not None:
            return 0
        clocks = sorted(self.clock_of(worker, part) for worker in self.live)
        return clocks[len(clocks) - self._workers_needed()]

    def _workers_needed(self) -> int:
        """Return how many workers end a round.

        Workers that have begun a cut wait for the others. With Backup, the others may be fewer than
        end a round. Then a round ends when all of them have ended it.
        """
        needed = self.consistency.needed(len(self.live))
        if self.consistency.share == 1:
            return needed
        late = sum(not self.is_ahead(worker) for worker in self.live)
        return min(needed, max(1, late))

    @property
    def newest_version(self) -> int:
        """The highest version of the shard and of its parts."""
        return max([self.version, *(part.version for part in self.parts.values())])

    def _advance_all(self) -> None:
        self.version = max(self.version, self._ended_rounds(None))
        for part in self.parts.values():
            self._advance(part)

    def _advance(self, part: Part) -> None:
        """End the rounds that enough workers have ended, and apply their pushes in rank order."""
        reached = self._ended_rounds(part)
        while part.version < reached:
            pushes = part.pending.pop(part.version, None)
            if pushes:
                ordered = [one for worker in sorted(pushes) for one in pushes[worker]]
                part.value = self.arithmetic.apply(part.rule, part.value, ordered, len(pushes))
                self.counts.rounds += 1
            part.version += 1

    def may_proceed(self, worker: int, part: Part | None) -> bool:
        """Return whether the worker is at most ``staleness`` clocks ahead, so that it may go on."""
        return self.lacks(worker, part) == 0

    def lacks(self, worker: int, part: Part | None) -> int:
        """Return how many clocks the version lacks before the worker may go on; 0 if it may."""
        staleness = self.consistency.staleness
        if staleness is None:
            return 0
        version = self.version if part is None else part.version
        return max(0, self.clock_of(worker, part) - staleness - version)

    def slowest(self, part: Part | None) -> tuple[int, int]:
        """Return the live worker with the smallest clock, and that clock."""
        return min(
            ((worker, self.clock_of(worker, part)) for worker in self.live),
            key=lambda one: one[1],
            default=(0, 0),
        )
