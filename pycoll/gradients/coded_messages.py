"""Messages that travel as codes, and what their codecs left out of each gradient.

The residuals are one array, laid out like the gradients; a message's Feedback begins with its part
of that array as its residual. Messages are summed, and a mean is divided afterwards. So every
residual has the unit of a rank's gradient, also at the owners of parts. Adding it to a later
gradient of this rank makes up for it, and that gradient may travel by any codec.

    gradients + debts  -->  all_reduce(compress=codec, feedback)  -->  sums, / size for a mean
        ^                        |
        |  a new plan            v
        +------------------  residuals

A new communication plan gives messages other parts of the residuals. Where a message then goes
without a codec, its part is a debt: it is added to the gradients of the next step.

Gradients may be on a device, with a codec that all messages have. There each gradient of a message
has codes of its own, and residuals stay on the device from step to step (docs/gpu.md).

The last Q of PowerSGD belongs to a gradient. The messages of a new plan go on with it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import input_of
from pycoll.compress import Codec, Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.communication_plan import CODED_KIND
from pycoll.gradients.layout import Entry, Layout

Array = Any
#: The version of the form in checkpoints.
FORM = 1
_FLOAT_BYTES = 4


class Kept(NamedTuple):
    """The memory of codecs from step to step, by the number of the entry.

    ``residuals``: what this rank has left out of each gradient. ``factors``: the last Q of PowerSGD
    of each matrix, equal on all ranks. ``step``: the number of steps, from which codecs draw.
    """

    residuals: Mapping[int, Array]
    factors: Mapping[int, Array]
    step: int


class CodedMessages:
    """The codecs and residuals of one scheduler.

    ``ways``: the codecs by architecture. Not thread-safe: the scheduler calls under its lock.
    """

    def __init__(self, comm: Any, entries: Sequence[Entry], ways: Mapping[str, Codec]) -> None:
        self._comm, self._ways = comm, ways
        self._entries = entries
        self._numbers = [n for n, entry in enumerate(entries) if entry.kind == CODED_KIND]
        self._layout: Layout | None = None
        #: Whether messages are on a device.
        self.is_on_device = False
        self._residual: Array = None
        #: Values to add to the gradients of the next step, and the messages that have not yet.
        self._debt: Array = None
        self._debtors: set[int] = set()
        self._feedbacks: dict[int, Feedback] = {}
        #: The last Q of PowerSGD by entry; that of the current plan is in its Feedback.
        self._factors: dict[int, Array] = {}

    def follow(self, layout: Layout, step: int) -> None:
        """Take up a new layout. ``step``: the number of steps so far, from which codecs draw."""
        owed = self.residuals()
        self._layout, self._debt, self._feedbacks = layout, None, {}
        if not self._ways:
            return
        views = [input_of(span.whole, span.whole)[1] for span in layout.spans]
        self.is_on_device = any(isinstance(one, DeviceView) for one in views)
        self._residual = np.zeros(layout.length(CODED_KIND), np.float32)
        for place, message in enumerate(layout.comm_plan.messages):
            if message.architecture in self._ways:
                self._feedbacks[place] = feedback = Feedback()
                feedback.step = step
                for number, part in enumerate(self._parts(place)):
                    feedback.residuals.adopt(part[1], number)
                self._hand_out(place)
        self._owe(owed)

    def residuals(self) -> dict[int, Array]:
        """The values that each entry lacks on this rank, a copy: residuals and debts."""
        if self._residual is None:
            return {}
        self._collect()
        found = {}
        for number in self._numbers:
            place = self._place_of(number)
            found[number] = self._residual[place].copy()
            if self._debt is not None:
                found[number] += self._debt[place]
        return found

    def copy_kept(self, step: int) -> Kept:
        """Copies of all that a checkpoint of this rank holds after ``step`` steps."""
        residuals = self.residuals()
        factors = {number: np.array(one) for number, one in self._factors.items()}
        return Kept(residuals, factors, step)

    def load(self, kept: Kept) -> None:
        """Forget all that is kept, go on with this, and add its residuals to the next gradients."""
        if self._residual is not None:
            self._collect()
            self._residual[...] = 0
            self._debt = None
            self._owe(kept.residuals)
            self._factors = dict(kept.factors)
            for place, feedback in self._feedbacks.items():
                feedback.step = kept.step
                feedback.forget(factors=True)
                self._hand_out(place)

    def sends(self, place: int) -> bool:
        """Whether a message travels as codes; adds debts to it first."""
        self._pay(place)
        return place in self._feedbacks

    def send(self, place: int) -> Any:
        """Start a message that travels as codes, and return its Work."""
        assert self._layout is not None
        codec = self._ways[self._layout.comm_plan.messages[place].architecture]
        if not self.is_on_device:
            self._clear_padding(place)
        parts = [memory for memory, _ in self._parts(place)]
        given: Any = parts[0] if len(parts) == 1 else parts
        return self._comm.all_reduce(
            given,
            "sum",
            out=given,
            async_op=True,
            compress=codec,
            feedback=self._feedbacks[place],
        )

    def mean(self, place: int, work: Any) -> Any:
        """The Work of the mean, from that of the sum."""
        assert self._layout is not None
        whole = self._layout.spans[place].whole
        return _Mean(work, whole if self.is_on_device else np.asarray(whole), self._comm.size)

    def _collect(self) -> None:
        """Move residuals that a Feedback keeps elsewhere into the one array, and note each Q."""
        for place, feedback in self._feedbacks.items():
            for number, (_, residual) in enumerate(self._parts(place)):
                kept = feedback.residuals.memory(residual.shape, number)
                if kept is not residual:
                    residual[...] = kept
                    feedback.residuals.adopt(residual, number)
            for number, entry in enumerate(self._singles(place)):
                q = feedback.factors.get(number)
                if q is not None:
                    self._factors[entry] = q

    def _hand_out(self, place: int) -> None:
        """Give the Feedback of a message the last Q of each of its matrices."""
        for number, entry in enumerate(self._singles(place)):
            if entry in self._factors:
                self._feedbacks[place].factors[number] = self._factors[entry]

    def _parts(self, place: int) -> Iterator[tuple[Any, Array]]:
        """The arrays of a message as its codec takes them, each with its residual.

        A codec of the executor takes the memory as it is. Others take each whole gradient by its
        shape, and a message that begins or ends inside one as it is. On a device each piece of a
        gradient is an array.
        """
        layout = self._layout
        assert layout is not None
        span = layout.spans[place]
        if self.is_on_device:
            pieces = layout.comm_plan.messages[place].pieces
            for number, piece in zip(layout.members[place], pieces, strict=True):
                begin = layout.starts[number] + piece.start // _FLOAT_BYTES
                end = begin + piece.nbytes // _FLOAT_BYTES
                memory = span.whole[begin - span.begin : end - span.begin]
                yield memory, self._residual[begin:end]
            return
        numbers = self._singles(place)
        if not numbers:
            yield span.whole, self._residual[span.begin : span.begin + len(span.whole)]
        for number in numbers:
            residual = self._residual[self._place_of(number)]
            yield layout.views[number], residual.reshape(self._entries[number].shape)

    def _singles(self, place: int) -> list[int]:
        """The gradients of a message that its codec takes by their shapes, one array each."""
        layout = self._layout
        assert layout is not None
        message = layout.comm_plan.messages[place]
        if self.is_on_device or self._ways[message.architecture].native() is not None:
            return []
        members = layout.members[place]
        shapes = [self._entries[number].shape for number in members]
        pairs = zip(message.pieces, shapes, strict=True)
        if any(piece.nbytes != 4 * prod(shape) for piece, shape in pairs):
            return []
        return [number for number in members if prod(self._entries[number].shape)]

    def _place_of(self, number: int) -> slice:
        assert self._layout is not None
        start = self._layout.starts[number]
        return slice(start, start + prod(self._entries[number].shape))

    def _owe(self, residuals: Mapping[int, Array]) -> None:
        """Add values to the residuals of messages with a codec, and to the debts of others."""
        if not any(one.any() for one in residuals.values()):
            return
        assert self._layout is not None
        self._debt = np.zeros_like(self._residual)
        for number, values in residuals.items():
            self._debt[self._place_of(number)] += values.reshape(-1)
        every = {place for number in self._numbers for place in self._layout.messages_of[number]}
        for place in every & self._feedbacks.keys():
            span = self._layout.spans[place]
            part = slice(span.begin, span.begin + len(span.whole))
            self._residual[part] += self._debt[part]
            self._debt[part] = 0
        self._debtors = every - self._feedbacks.keys()
        if not self._debtors:
            self._debt = None

    def _pay(self, place: int) -> None:
        """Add the debts of a message to its gradients, once."""
        if self._debt is None or place not in self._debtors:
            return
        assert self._layout is not None
        span = self._layout.spans[place]
        memory, debt = np.asarray(span.whole), self._debt[span.begin :][: len(span.whole)]
        memory += debt
        debt[...] = 0
        self._debtors.discard(place)
        if not self._debtors:
            self._debt = None

    def _clear_padding(self, place: int) -> None:
        """Zero what lies between the gradients of a message, since codes share scales with it."""
        assert self._layout is not None
        numbers, span = self._layout.members[place], self._layout.spans[place]
        memory = np.asarray(span.whole)
        for number, after in itertools.pairwise(numbers):
            gap = slice(self._place_of(number).stop, self._place_of(after).start)
            self._residual[gap] = 0
            memory[gap.start - span.begin : gap.stop - span.begin] = 0


class _Mean:
    """The Work of a mean. Threads: any."""

    def __init__(self, work: Any, memory: Array, size: int) -> None:
        self._work, self._memory, self._size = work, memory, size
        self._lock = threading.Lock()
        self._is_divided = False

    def wait(self) -> None:
        self._work.wait()
        with self._lock:
            if not self._is_divided:
                self._is_divided = True
                self._memory /= self._size


def state_of(kept: Kept, entries: Sequence[Entry]) -> dict[str, Any]:
    """The state of a checkpoint: residuals and Q by the names of entries, and the step."""
    by_name = {
        field: {entries[n].name: one for n, one in arrays.items()}
        for field, arrays in (("residuals", kept.residuals), ("factors", kept.factors))
    }
    return {"form": FORM, "step": kept.step, **by_name}


def load_state(state: Any, entries: Sequence[Entry]) -> Kept:
    """The contents of a state that ``state_of`` made, in arrays of their own.

    A state of an earlier version has residuals only.

    Raises InvalidArgumentError for another form, and for entries that are not these.
    """
    if not isinstance(state, Mapping) or state.get("form") != FORM:
        raise InvalidArgumentError(
            f"the saved state is {type(state).__name__} without form {FORM}: expected what "
            "Scheduler.state_dict() returns"
        )
    numbers = {entry.name: number for number, entry in enumerate(entries)}
    residuals = {}
    for name, values in state["residuals"].items():
        number = numbers.get(name)
        array = np.asarray(values, np.float32).reshape(-1)
        if number is None or len(array) != prod(entries[number].shape):
            raise InvalidArgumentError(
                f"the saved state has {len(array)} values of {name!r}, and no entry is like that"
            )
        residuals[number] = array.copy()
    factors = {
        numbers[name]: np.array(values, np.float32)
        for name, values in state.get("factors", {}).items()
        if name in numbers
    }
    return Kept(residuals, factors, int(state.get("step", 0)))
