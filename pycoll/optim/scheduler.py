"""The scheduler: takes gradients as the backward pass gives them, and sends the agenda's messages.

The first steps run by a plain agenda and are timed. Then all ranks agree on the times, the longest
of each counting, lay the gradients out in the order of their arrival, and make the agenda that is
kept. From there on a step exchanges nothing but gradients.

A message goes when all of it is there and all messages in front of it have gone, so the order is
the same on all ranks whatever the order of arrival; a rank on which gradients come otherwise waits
longer, no more. What goes is handed to the communicator's progress thread. Sums are folded in rank
order, so their bits depend neither on the policy nor on the size of messages.

Here is the seam for a native queue: ``_advance`` decides, from counters and the agenda alone.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pycoll.errors import InvalidArgumentError, MismatchError
from pycoll.ops import find_reduction
from pycoll.optim.agenda import Agenda, Rate, Rates
from pycoll.optim.bucket import zeros
from pycoll.optim.choose import Decision, decide
from pycoll.optim.layout import ITEM_BYTES_OF, Allocate, Entry, Layout
from pycoll.optim.measure import measure
from pycoll.optim.policies import AUTO, Policy, policy_of
from pycoll.optim.record import Observer, StepLog
from pycoll.types import DType

#: Steps that are timed, the first of which does not count, since much happens there for once.
TIMED_STEPS = 3
_FREE = Rates(Rate(0.0, 0.0), Rate(0.0, 0.0), Rate(0.0, 0.0))
#: Policies whose messages do not depend on what a message costs.
_BLIND = ("bsp", "wfbp", "fixed", "dear")


class Scheduler:
    """Reduces the same gradients step after step, in messages made by a policy.

        views = scheduler.begin()
        views[n][...] = gradient        # for each, in any order,
        scheduler.ready(n)              # from any thread
        scheduler.wait()                # now views hold the ranks' sums

    ``comm``: a communicator that nobody else uses meanwhile. ``entries``: names, shapes and types
    of the gradients, alike on all ranks, about in the order of the backward pass. ``policy``: a
    name or a Policy. ``op``: as of all_reduce. ``overlaps``: whether the next forward pass will
    wait for gradients one by one, by ``wait(number)``; then auto also weighs policies that make use
    of it. ``deterministic``: as of all_reduce; without it, policies differ in rounding.
    ``allocate``: for arrays of another framework than NumPy. ``clock``: in seconds. ``observer``:
    is told of each step that has ended.

    Collective: the constructor, and ``begin`` of one early step. Raises InvalidArgumentError for
    entries without or with equal names, unknown types, policies and ops, and MismatchError where
    ranks differ in any of these; otherwise what ``comm`` raises.
    """

    def __init__(
        self,
        comm: Any,
        entries: Sequence[Entry],
        *,
        policy: str | Policy = "auto",
        op: str = "sum",
        overlaps: bool = False,
        deterministic: bool | None = True,
        allocate: Allocate = zeros,
        clock: Callable[[], float] = time.perf_counter,
        observer: Observer | None = None,
    ) -> None:
        self.policy = policy_of(policy)
        self._comm, self._entries, self._op = comm, [Entry(*one) for one in entries], op
        self._overlaps, self._allocate, self._clock = overlaps, allocate, clock
        self._strict = deterministic
        self._observer, self._steps = observer, 0
        self._log: StepLog | None = None
        self._lock = threading.Lock()
        _check_entries(self._entries, op)
        need_alike(
            comm, "the gradients", [[*self._entries], str(self.policy), op, overlaps, deterministic]
        )
        self._timed: list[list[float]] = []
        self._sending_s = self._await_s = 0.0
        self._settled = False
        self.rates = _FREE
        self._open = self._flushed = False
        self._follow(range(len(self._entries)), self._first())

    @property
    def timed_step(self) -> int | None:
        """Which step this is, from 0, of those in which auto wants to know what it takes to wait
        for single gradients (``note_awaiting``); None otherwise."""
        wants = self._overlaps and self.policy.name == AUTO and not self._settled
        return len(self._timed) if wants else None

    @property
    def waits_singly(self) -> bool:
        """Whether the next forward pass should wait for gradients one by one; alike on all ranks.

        False where ``overlaps`` and auto found that it takes longer than it hides.
        """
        return self._singly

    def note_awaiting(self, seconds: float) -> None:
        """What it takes to wait for one gradient by itself: see ``Rates.await_s``."""
        self._await_s = seconds

    @property
    def agenda(self) -> Agenda:
        """The messages of a step, as they are now."""
        return self._layout.agenda

    def begin(self) -> list[Any]:
        """A step begins: every entry's memory, by number, with what it held before.

        Gradients that lived in earlier memory keep it; ask again in each step. InvalidArgumentError
        if the step before was not waited for.
        """
        if self._open:
            raise InvalidArgumentError("begin() within a step: wait() ends it")
        if not self._settled and len(self._timed) == TIMED_STEPS:
            self._settle()
        layout = self._layout
        self._missing = [len(members) for members in layout.members]
        self._arrived = [False] * len(self._entries)
        self._works: list[Any] = [None] * len(layout.spans)
        self._next = 0
        self._flushed = False
        self._open = True
        self._times = [0.0] * len(self._entries)
        self._sending_s = 0.0
        self._log = None
        if self._observer is not None and self._observer.is_recording:
            self._log = StepLog(self._steps, self.agenda.policy)
        self._steps += 1
        self._start_s = self._clock()
        return layout.views

    def ready(self, number: int) -> None:
        """The values of entry ``number`` are in its memory, which is not to be touched until wait.

        InvalidArgumentError outside of a step, for an unknown number, and for the second time.
        """
        with self._lock:
            if not self._open:
                raise InvalidArgumentError(
                    f"ready({number}) outside of a step: begin() comes first"
                )
            if not 0 <= number < len(self._entries):
                raise InvalidArgumentError(
                    f"number is {number}: expected 0 to {len(self._entries) - 1}"
                )
            if self._arrived[number]:
                name = self._entries[number].name
                raise InvalidArgumentError(f"{name!r} was ready twice in one step")
            self._arrive(number)
            self._advance()

    def flush(self) -> None:
        """The backward pass is over: what has not come is taken as zeros, and everything starts.

        Another rank may have used what this one has no gradient for. Does nothing if done already.
        """
        with self._lock:
            if self._flushed or not self._open:
                return
            if self._log is not None:
                self._log.flushed()
            for number, arrived in enumerate(self._arrived):
                if not arrived:
                    self._layout.views[number][...] = 0
                    self._arrive(number)
            self._advance()
            for place in self.agenda.gathers or ():
                self._gather(place)
            self._flushed = True

    def wait(self, number: int | None = None) -> None:
        """Return when one entry, or everything, is reduced; all ends the step. Flushes before.

        Raises what the communicator raises.
        """
        self.flush()
        if not self._open:
            return
        places = self._layout.messages_of[number] if number is not None else range(len(self._works))
        for place in places:
            if self._log is None:
                self._works[place].wait()
            else:
                self._log.waited(self._works[place].wait)
        if number is None:
            self._open = False
            if self._log is not None and self._observer is not None:
                self._observer.scheduled(self._log.step())
                self._log = None
            if not self._settled:
                self._timed.append(self._times)

    def explain(self) -> str:
        """What is sent, and why it is cut like that, in a few lines."""
        return self._why

    def _arrive(self, number: int) -> None:
        self._arrived[number] = True
        if self._log is not None:
            self._log.ready(self._entries[number].name)
        if not self._settled:
            # As if no message had been sent before; what that takes is in the rates.
            self._times[number] = self._clock() - self._start_s - self._sending_s
        for place in self._layout.messages_of[number]:
            self._missing[place] -= 1

    def _advance(self) -> None:
        """Send what is whole, up to the first message that is not."""
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            if self._settled:
                self._send(self._next)
            else:
                begin_s = self._clock()
                self._send(self._next)
                self._sending_s += self._clock() - begin_s
            self._next += 1

    def _send(self, place: int) -> None:
        span, begin_s = self._layout.spans[place], time.perf_counter()
        if self.agenda.gathers is None:
            self._works[place] = self._comm.all_reduce(
                span.whole, self._op, out=span.whole, async_op=True, deterministic=self._strict
            )
        else:
            self._works[place] = self._comm.reduce_scatter(
                span.whole, self._op, out=span.mine, async_op=True, deterministic=self._strict
            )
        what = "all_reduce" if self.agenda.gathers is None else "reduce_scatter"
        self._note(place, what, begin_s)

    def _gather(self, place: int) -> None:
        # The communicator runs operations in order, so the share is there by then. Its work is
        # waited for all the same: if it failed, that is the error to tell.
        span, first, begin_s = self._layout.spans[place], self._works[place], time.perf_counter()
        second = self._comm.all_gather(
            span.mine, lengths=span.lengths, out=span.whole, async_op=True
        )
        self._works[place] = second
        self._note(place, "all_gather", begin_s)
        self._works[place] = _Both(first, second)

    def _note(self, place: int, what: str, begin_s: float) -> None:
        """Somebody records the step."""
        if self._log is not None:
            names = [self._entries[number].name for number in self._layout.members[place]]
            nbytes = self.agenda.messages[place].nbytes
            self._log.sent(place, what, names, nbytes, begin_s, self._works[place])

    def _follow(self, order: Sequence[int], decision: Decision) -> None:
        self._why, self._singly = decision.why, decision.singly
        comm = self._comm
        self._layout = Layout(
            self._entries, order, decision.agenda, comm.rank, comm.size, self._allocate
        )

    def _first(self) -> Decision:
        """Until times are known."""
        blind = self.policy.name in _BLIND
        policy = self.policy if blind else Policy("fixed", bucket_bytes=self.policy.bucket_bytes)
        decision = decide(policy, [entry.planned(0.0) for entry in self._entries], _FREE)
        later = f"{self.policy}, after {TIMED_STEPS} steps that are timed; until then"
        return decision if blind else decision._replace(why=f"{later} {decision.why}")

    def _settle(self) -> None:
        """Agree on the times and make the agenda that is kept."""
        mine = [statistics.median(times) for times in zip(*self._timed[1:], strict=True)]
        agreed = self._comm.all_reduce(np.array([*mine, self._await_s], np.float64), "max")
        *ready_s, await_s = (float(one) for one in agreed)
        order = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], number))
        gradients = [self._entries[number].planned(ready_s[number]) for number in order]
        if self.policy.name not in _BLIND:
            self.rates = measure(self._comm, self._strict)._replace(await_s=await_s)
        forward_s = _forward_s([one.ready_s for one in gradients]) if self._overlaps else None
        decision = decide(self.policy, gradients, self.rates, forward_s)
        need_alike(self._comm, "the agenda", [order, decision.agenda])
        self._follow(order, decision)
        self._settled, self._timed = True, []


class _Both:
    """Two halves of a reduction."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


def _forward_s(ready_s: Sequence[float]) -> list[float]:
    """Times of the layers in the forward pass: commonly half of those in the backward pass."""
    before = [0.0, *ready_s]
    return [(now - last) / 2 for now, last in zip(ready_s, before, strict=False)]


def _check_entries(entries: Sequence[Entry], op: str) -> None:
    counts = Counter(entry.name for entry in entries)
    twice = sorted(str(name) for name, count in counts.items() if count > 1)
    if twice:
        raise InvalidArgumentError(f"entries have names twice: {', '.join(twice)}")
    for number, entry in enumerate(entries):
        if not isinstance(entry.name, str) or not entry.name:
            raise InvalidArgumentError(f"entry {number} has the name {entry.name!r}: expected text")
        if entry.kind not in ITEM_BYTES_OF:
            words = ", ".join(ITEM_BYTES_OF)
            raise InvalidArgumentError(f"{entry.name!r} has type {entry.kind!r}; there are {words}")
        if any(not isinstance(axis, int) or axis < 0 for axis in entry.shape):
            raise InvalidArgumentError(f"{entry.name!r} has shape {entry.shape}: expected counts")
    for kind in {entry.kind for entry in entries}:
        find_reduction(op, DType[kind.upper()], "all_reduce")


def need_alike(comm: Any, what: str, facts: Any) -> None:
    """MismatchError, which says what differs first, unless all ranks came with the same facts."""
    text = json.dumps(facts)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    every = comm.all_gather(digest[None], lengths=[1] * comm.size)
    if all(bytes(one) == bytes(every[0]) for one in every):
        return
    texts = comm.all_gather(np.frombuffer(text.encode(), np.uint8))
    lengths = comm.all_gather(np.array([len(text.encode())], np.int64))
    told, at = [], 0
    for length in lengths:
        told.append(json.loads(bytes(texts[at : at + int(length)])))
        at += int(length)
    rank = next(r for r, one in enumerate(told) if one != told[0])
    raise MismatchError(f"{what} of ranks 0 and {rank} differ: {_difference(told[0], told[rank])}")


def _difference(one: Any, other: Any) -> str:
    """Where two structures of JSON first differ."""
    while isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        found = next(((a, b) for a, b in pairs if a != b), None)
        if found is None:
            longer = one if len(one) > len(other) else other
            more = longer[min(len(one), len(other)) :]
            return f"{len(one)} and {len(other)}, the first without a match being {more[0]}"
        if isinstance(found[0], list) and isinstance(found[0][0], str):
            return f"{found[0]} and {found[1]}"
        one, other = found
    return f"{one!r} and {other!r}"
