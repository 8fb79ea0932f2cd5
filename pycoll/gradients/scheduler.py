"""The scheduler: accepts gradients from the backward pass and sends the planned messages.

The first steps use a simple communication plan and are timed. Then all ranks agree on the times;
for each gradient the longest time counts. The ranks lay the gradients out in the order of their
arrival and make the final communication plan. From then on a step exchanges only gradients.

A message is sent when all of its gradients have arrived and all messages in front of it have been
sent. So the order of messages is the same on all ranks, whatever the order of arrival. A rank on
which gradients arrive in another order only waits longer. The progress thread of the communicator
runs the messages. Sums are folded in rank order, so their bits depend neither on the policy nor on
the size of messages.

``_advance`` decides what to send from counters and the communication plan alone; a native queue
could replace it.
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

from pycoll.errors import InvalidArgumentError, MismatchError, odd_ranks
from pycoll.gradients.buckets import zeros
from pycoll.gradients.chooser import Decision, decide
from pycoll.gradients.codec_choice import allowed_codecs, check_codecs, check_device, picks
from pycoll.gradients.coded_messages import CodedMessages, load_state, state_of
from pycoll.gradients.communication_plan import A2A, PS, CommunicationPlan, Rate, Rates, Stage
from pycoll.gradients.layout import ITEM_BYTES_OF, Allocate, Entry, Layout
from pycoll.gradients.measure import measure
from pycoll.gradients.methods import method_of
from pycoll.gradients.policies import AUTO, Policy
from pycoll.gradients.step_record import Observer, StepLog
from pycoll.ops import find_reduction
from pycoll.types import DType

#: The number of timed steps. The first does not count, since it includes one-time preparation.
TIMED_STEPS = 3
_NOTHING = Rate(0.0, 0.0)
_FREE = Rates(_NOTHING, _NOTHING, _NOTHING, push_pull=(Stage(_NOTHING),))
#: Policies whose messages do not depend on the cost of messages.
_BLIND = ("bsp", "wfbp", "fixed", "dear")


class Scheduler:
    """Reduces the same gradients in every step, in messages that a policy cuts.

    Arguments:
        ``comm``: a communicator that only this scheduler uses during a step.
        ``entries``: names, shapes and dtypes of the gradients, equal on all ranks, roughly in the
            order of the backward pass.
        ``policy``: a name of POLICIES or METHODS, "auto", or a ``Policy``.
        ``architecture``: "a2a" reduces messages by an all_reduce among the ranks. "ps" sends each
            share of a message to the server that sums it: to the servers of ``comm``, or, where it
            has none, to the rank that owns the share. "auto" takes what is faster by the model.
            None: that of the method; where ``policy`` names none, "auto" if ``comm`` has servers
            and else "a2a". It stays for the life of the scheduler.
        ``op``: a reduction of all_reduce.
        ``overlaps``: whether the next forward pass waits for gradients one by one, by
            ``wait(number)``. If so, auto also considers policies that profit from it.
        ``accelerated``: whether a device computes the passes, so that messages take no time from
            them.
        ``deterministic``: as of all_reduce. Without it, policies may differ in rounding.
        ``allocate``: allocates zeros from a number of elements and a dtype name, for arrays of a
            framework other than NumPy. The result has one axis, and its slices share its memory.
        ``clock``: returns the time in seconds.
        ``observer``: receives a ``Step`` at the end of each step while ``is_recording``; see
            ``step_record``.
        ``compress``: a codec of ``pycoll.compress``, by which all messages travel; a
            ``pycoll.compress.Auto``, with which each message travels by one of some codecs or by
            none, as the model says; "auto" for ``Auto()``; None. Gradients are float32 then, those
            of other types go without codec by ``Auto``. On a device it is one codec, which keeps
            every element. The scheduler keeps what codecs leave out of each gradient, and adds it
            to the next step. Codes are combined by the communicator's algorithm for them, whatever
            ``deterministic`` says.

    Errors: InvalidArgumentError for entries that have no name, equal names or an invalid shape, and
    for unknown dtypes, policies, architectures and ops; with ``compress`` for other values, types
    and ops, the policy dear and the architecture "ps". MismatchError where ranks differ in entries
    or in the other arguments. Other errors are those of ``comm``.

    Cost: the constructor is collective. ``begin`` of the step after the timed steps is collective
    too, and measures the communicator where the policy depends on the cost of messages. Later
    steps exchange only gradients. The memory holds each gradient once; with the policy dear also
    this rank's share of each, with ``compress`` also what each lacks.

    >>> scheduler = pycoll.optim.Scheduler(comm, [pycoll.optim.Entry("weight", (2, 3))])
    >>> views = scheduler.begin()
    >>> views[0].fill(1)  # for each gradient, in any order,
    >>> scheduler.ready(0)  # from any thread
    >>> scheduler.wait()  # now the views hold the sums over all ranks
    >>> float(views[0].sum())
    6.0
    """

    def __init__(
        self,
        comm: Any,
        entries: Sequence[Entry],
        *,
        policy: str | Policy = "auto",
        architecture: str | None = None,
        op: str = "sum",
        overlaps: bool = False,
        accelerated: bool = False,
        deterministic: bool | None = True,
        allocate: Allocate = zeros,
        clock: Callable[[], float] = time.perf_counter,
        observer: Observer | None = None,
        compress: Any = None,
    ) -> None:
        self.policy, given = method_of(policy, architecture)
        self._codecs = allowed_codecs(compress)
        by = given or (AUTO if comm.servers and not self._codecs.is_fixed else A2A)
        self._architecture = by
        # The algorithm of all_reduce by architecture; None: the communicator's choice. Without
        # servers of their own, every rank is the server of a share ("direct").
        # Fewer servers than workers share the sums best with these ("servers_mixed").
        served = ("ps",) if comm.servers else ("direct",)
        is_mixed = 0 < len(comm.servers) < comm.size
        self._push_pulls = (*served, "servers_mixed") if is_mixed else served
        self._algorithms = {A2A: None, PS: served[0]}
        self._comm, self._entries, self._op = comm, [Entry(*one) for one in entries], op
        self._overlaps, self._allocate, self._clock = overlaps, allocate, clock
        self._strict, self._accelerated = deterministic, accelerated
        self._observer, self._steps, self._ready_at = observer, 0, 0
        self._log: StepLog | None = None
        self._lock = threading.Lock()
        _check_entries(self._entries, op)
        check_codecs(compress, self.policy, by, op, self._entries)
        words = [str(self.policy), by, op, overlaps, accelerated, deterministic, str(compress)]
        need_alike(comm, "the gradients", [[*self._entries], *words])
        self._coded = CodedMessages(comm, self._entries, self._codecs.ways)
        self._timed: list[list[float]] = []
        self._sending_s = self._await_s = 0.0
        self._ready = False
        self.rates = _FREE
        if self._codecs.is_fixed:
            self.rates = _FREE._replace(coded=tuple((one, _NOTHING) for one in self._codecs.ways))
        self._open = self._flushed = False
        self._follow(range(len(self._entries)), self._first())
        if self._coded.is_on_device:
            check_device(compress)

    @property
    def architecture(self) -> str:
        """The architecture; to set it raises InvalidArgumentError, since it is fixed."""
        return self._architecture

    @architecture.setter
    def architecture(self, given: Any) -> None:
        raise InvalidArgumentError(
            f"architecture is {self._architecture!r} for all steps of this scheduler and cannot "
            f"become {given!r}: make a new Scheduler"
        )

    @property
    def timed_step(self) -> int | None:
        """The number of this timed step, from 0, where auto needs ``note_awaiting``; else None.

        Auto needs it where the next forward pass can wait for single gradients.
        """
        wants = self._overlaps and self.policy.name == AUTO and not self._ready
        return len(self._timed) if wants else None

    @property
    def waits_singly(self) -> bool:
        """Whether the next forward pass should wait for gradients one by one; equal on all ranks.

        False where auto found that waiting one by one takes longer than the time it hides.
        """
        return self._singly

    def note_awaiting(self, seconds: float) -> None:
        """Set the seconds that waiting for one gradient alone takes: see ``Rates.await_s``."""
        self._await_s = seconds

    @property
    def is_open(self) -> bool:
        """Whether a step has begun that ``wait()`` has not ended."""
        return self._open

    @property
    def comm_plan(self) -> CommunicationPlan:
        """The communication plan of the current step."""
        return self._layout.comm_plan

    def begin(self) -> list[Any]:
        """Begin a step; return the memory of every entry, by number, with its previous contents.

        The end of the timed steps replaces the memory, so call this in each step. Earlier arrays
        stay valid, but the scheduler no longer reduces them. Raises InvalidArgumentError if
        ``wait()`` did not end the step before.
        """
        if self._open:
            raise InvalidArgumentError("begin() within a step: wait() ends it")
        if self._ready and 0 < self._codecs.every <= self._steps - self._ready_at:
            self.replan()
        if not self._ready and len(self._timed) == TIMED_STEPS:
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
            self._log = StepLog(self._steps, self.comm_plan.policy)
        self._steps += 1
        self._start_s = self._clock()
        return layout.views

    def ready(self, number: int) -> None:
        """Declare the values of entry ``number`` complete; may send messages. Any thread may call.

        The caller must not touch the memory of the entry until ``wait``. Raises
        InvalidArgumentError outside of a step, for an unknown number, and for an entry that was
        already ready in this step.
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
        """End the backward pass: count missing entries as zeros, and send all remaining messages.

        Another rank may have gradients for entries that are missing here. A second call in a step
        does nothing.
        """
        with self._lock:
            if self._flushed or not self._open:
                return
            if self._log is not None:
                self._log.note_flush()
            for number, arrived in enumerate(self._arrived):
                if not arrived:
                    self._layout.views[number][...] = 0
                    self._arrive(number)
            self._advance()
            for place in self.comm_plan.gathers or ():
                self._gather(place)
            self._flushed = True

    def wait(self, number: int | None = None) -> None:
        """Flush, then wait until entry ``number`` is reduced; without a number, all entries.

        Waiting for all entries ends the step. Raises what the communicator raises.
        """
        self.flush()
        if not self._open:
            return
        places = self._layout.messages_of[number] if number is not None else range(len(self._works))
        for place in places:
            if self._log is None:
                self._works[place].wait()
            else:
                self._log.note_wait(self._works[place].wait)
        if number is None:
            self._open = False
            if self._log is not None and self._observer is not None:
                self._observer.scheduled(self._log.step())
                self._log = None
            if not self._ready:
                self._timed.append(self._times)

    def replan(self) -> None:
        """Time the next steps, then plan anew; all ranks call it between the same steps.

        The links or the gradients may have changed. Until then messages stay as they are. The
        residuals of codecs are added to the first step with new messages. Raises
        InvalidArgumentError within a step.
        """
        if self._open:
            raise InvalidArgumentError("replan() within a step: wait() ends it")
        if self._ready:
            self._ready, self._timed = False, []

    def state_dict(self) -> dict[str, Any]:
        """Return what codecs keep from step to step, for a checkpoint of this rank.

        That is the residual of each gradient, the last Q of PowerSGD, and the step number from
        which codecs draw: a dict of numbers and copies of arrays, by the names of entries. Raises
        InvalidArgumentError within a step.
        """
        if self._open:
            raise InvalidArgumentError("state_dict() within a step: wait() ends it")
        return state_of(self._coded.copy_kept(self._steps), self._entries)

    def load_state_dict(self, state: Any) -> None:
        """Go on from a ``state_dict``: add its residuals to the gradients of the next step.

        All ranks load a state of the same step, each its own, or all ranks load none. Without
        ``compress`` it is ignored. Errors: InvalidArgumentError within a step, and for
        another form or other entries.
        """
        if self._open:
            raise InvalidArgumentError("load_state_dict() within a step: wait() ends it")
        kept = load_state(state, self._entries)
        if not self._codecs.ways:
            return
        self._coded.load(kept)
        # The steps until codecs are chosen anew stay as many as on the other ranks.
        self._ready_at += kept.step - self._steps
        self._steps = kept.step

    def explain(self) -> str:
        """Describe the messages of a step, and why the policy cuts them so, in a few lines."""
        return self._why

    def _arrive(self, number: int) -> None:
        self._arrived[number] = True
        if self._log is not None:
            self._log.ready(self._entries[number].name)
        if not self._ready:
            # Without the time spent on sending messages: the rates count that. A device computes
            # meanwhile.
            held_s = 0.0 if self._accelerated else self._sending_s
            self._times[number] = self._clock() - self._start_s - held_s
        for place in self._layout.messages_of[number]:
            self._missing[place] -= 1

    def _advance(self) -> None:
        """Send the complete messages up to the first incomplete one."""
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            if self._ready:
                self._send(self._next)
            else:
                begin_s = self._clock()
                self._send(self._next)
                self._sending_s += self._clock() - begin_s
            self._next += 1

    def _send(self, place: int) -> None:
        span, begin_s = self._layout.spans[place], time.perf_counter()
        if self._coded.sends(place):
            self._works[place] = self._coded.send(place)
        elif self.comm_plan.gathers is None:
            architecture = self.comm_plan.messages[place].architecture
            self._works[place] = self._comm.all_reduce(
                span.whole,
                self._op,
                out=span.whole,
                async_op=True,
                deterministic=self._strict,
                algorithm=self._algorithms[architecture],
            )
        else:
            self._works[place] = self._comm.reduce_scatter(
                span.whole, self._op, out=span.mine, async_op=True, deterministic=self._strict
            )
        what = "all_reduce" if self.comm_plan.gathers is None else "reduce_scatter"
        self._note(place, what, begin_s)
        if self._op == "avg" and self._coded.sends(place):
            self._works[place] = self._coded.mean(place, self._works[place])

    def _gather(self, place: int) -> None:
        # The communicator runs operations in order, so the reduced share is complete when the
        # all_gather starts. _Both still waits for the reduce_scatter first: if that failed, its
        # error is the one to raise.
        span, first, begin_s = self._layout.spans[place], self._works[place], time.perf_counter()
        second = self._comm.all_gather(
            span.mine, lengths=span.lengths, out=span.whole, async_op=True
        )
        self._works[place] = second
        self._note(place, "all_gather", begin_s)
        self._works[place] = _Both(first, second)

    def _note(self, place: int, what: str, begin_s: float) -> None:
        """Add an operation to the step record, if an observer records this step."""
        if self._log is not None:
            names = [self._entries[number].name for number in self._layout.members[place]]
            nbytes = self.comm_plan.messages[place].nbytes
            self._log.note_send(place, what, names, nbytes, begin_s, self._works[place])

    def _follow(self, order: Sequence[int], decision: Decision) -> None:
        self._why, self._singly = decision.why, decision.singly
        comm = self._comm
        self._layout = Layout(
            self._entries, order, decision.comm_plan, comm.rank, comm.size, self._allocate
        )
        self._coded.follow(self._layout, self._steps)

    @property
    def _is_blind(self) -> bool:
        """Whether the messages do not depend on the cost of messages."""
        is_given = self._architecture != AUTO and not self._codecs.is_choice
        return self.policy.name in _BLIND and is_given

    @property
    def _by(self) -> str:
        """The architecture of messages, with the codec that they all have; "auto" for a choice."""
        return next(iter(self._codecs.ways)) if self._codecs.is_fixed else self._architecture

    def _first(self) -> Decision:
        """The communication plan of the timed steps."""
        blind = self._is_blind
        policy = self.policy if blind else Policy("fixed", bucket_bytes=self.policy.bucket_bytes)
        first = self._by if blind or self._codecs.is_fixed else A2A
        entries = [entry.planned(0.0) for entry in self._entries]
        decision = decide(policy, entries, self.rates, architecture=first)
        later = f"{self.policy}, after {TIMED_STEPS} steps that are timed; until then"
        return decision if blind else decision._replace(why=f"{later} {decision.why}")

    def _settle(self) -> None:
        """Agree on the times with all ranks and make the final communication plan."""
        mine = [statistics.median(times) for times in zip(*self._timed[1:], strict=True)]
        agreed = self._comm.all_reduce(np.array([*mine, self._await_s], np.float64), "max")
        *ready_s, await_s = (float(one) for one in agreed)
        order = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], number))
        gradients = [self._entries[number].planned(ready_s[number]) for number in order]
        if not self._is_blind:
            servers = self._push_pulls if self._architecture != A2A else ()
            codecs = tuple(self._codecs.ways.items())
            measured = measure(self._comm, self._strict, servers, self._accelerated, codecs)
            self.rates = measured._replace(await_s=await_s)
            self._algorithms[PS] = measured.push_pull_by or self._algorithms[PS]
        forward_s = _forward_s([one.ready_s for one in gradients]) if self._overlaps else None
        decision = decide(self.policy, gradients, self.rates, forward_s, self._by)
        need_alike(self._comm, "the communication plans", [order, decision.comm_plan])
        if self._codecs.is_choice:
            names = [self._entries[number].name for number in order]
            why = "\n".join(
                [decision.why, *picks(names, gradients, decision.comm_plan, self.rates)]
            )
            decision = decision._replace(why=why)
        self._follow(order, decision)
        self._ready, self._timed, self._ready_at = True, [], self._steps


class _Both:
    """The Work of a message that is reduced by a reduce_scatter and an all_gather."""

    def __init__(self, first: Any, second: Any) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()


def _forward_s(ready_s: Sequence[float]) -> list[float]:
    """Forward times of the layers, assumed to be half of their backward times."""
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
    """Raise MismatchError unless all ranks pass equal ``facts``. Collective.

    It names the ranks that differ from most others, and the first difference of the first of them.
    ``what``: a noun in plural for the error text. ``facts``: any JSON value.
    """
    text = json.dumps(facts)
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    gathered = comm.all_gather(digest[None], lengths=[1] * comm.size)
    usual, odd = odd_ranks({rank: bytes(one) for rank, one in enumerate(gathered)})
    if not odd:
        return
    texts = comm.all_gather(np.frombuffer(text.encode(), np.uint8))
    lengths = comm.all_gather(np.array([len(text.encode())], np.int64))
    told, at = [], 0
    for length in lengths:
        told.append(json.loads(bytes(texts[at : at + int(length)])))
        at += int(length)
    rank = odd[0]
    raise MismatchError(
        f"{what} of rank {rank} differ from those of rank {usual}: "
        f"{_difference(told[rank], told[usual])}",
        rank=rank,
        ranks=odd,
    )


def _difference(one: Any, other: Any) -> str:
    """Describe the first difference of two JSON structures."""
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
