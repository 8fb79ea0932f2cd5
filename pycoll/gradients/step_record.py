"""The record of one step of a Scheduler. Times are seconds of ``time.perf_counter``.

begin           flushed              end
|--backward pass|                    |
    ready  sent starts     ends
    |......|....|==on wire==|
                    |waits..|           communication that is not hidden
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from pycoll import _core

#: The name of the timeline event that describes the clock of a rank.
CLOCK = "pycoll_clock"

#: The category of timeline events that belong to a step with a policy.
STEP = "pycoll_step"


class Travel(NamedTuple):
    """One operation of a message: ``what`` is all_reduce, reduce_scatter or all_gather.

    ``message``: the number of the message. ``names``: its entries. ``sent_s``: when the scheduler
    began to start the operation. ``starts_s``: when it had been started and all operations in front
    of it had ended. ``ends_s``: when it ended.
    """

    message: int
    what: str
    names: tuple[str, ...]
    nbytes: int
    sent_s: float
    starts_s: float
    ends_s: float


class Step(NamedTuple):
    """One step.

    ``ready``: the name of each entry, and when its values were ready. ``waits``: the (begin, end)
    intervals in which the caller waited for results, in order.
    """

    number: int
    policy: str
    begin_s: float
    flushed_s: float
    end_s: float
    ready: tuple[tuple[str, float], ...]
    travels: tuple[Travel, ...]
    waits: tuple[tuple[float, float], ...]


class Observer(Protocol):
    """Records steps. While it records, each Work stores its end time (``_core.record_ends``)."""

    @property
    def is_recording(self) -> bool:
        """Whether to record a step; the scheduler asks when the step begins."""

    def scheduled(self, step: Step) -> None:
        """Receive the record of a step that has ended."""


class StepKeeper:
    """An observer that keeps the record of the newest step in ``step``.

    One object of a process records at a time: all share the switch of ``_core.record_ends``.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.step: Step | None = None

    def record(self, wanted: bool) -> None:
        """Record the steps that begin from now on, or none."""
        self.is_recording = wanted
        _core.record_ends(wanted)

    def scheduled(self, step: Step) -> None:
        """Keep the record."""
        self.step = step


class StepLog:
    """Collects the record of a step under way. Not thread-safe: one thread at a time."""

    def __init__(self, number: int, policy: str) -> None:
        self._number, self._policy = number, policy
        self._begin_s = self._flushed_s = time.perf_counter()
        self._ready: list[tuple[str, float]] = []
        self._sent: list[tuple[int, str, tuple[str, ...], int, float, Any]] = []
        self._waits: list[tuple[float, float]] = []

    def ready(self, name: str) -> None:
        """Note that the values of an entry are ready."""
        self._ready.append((name, time.perf_counter()))

    def note_flush(self) -> None:
        """Note the end of the backward pass."""
        self._flushed_s = time.perf_counter()

    def note_send(
        self,
        message: int,
        what: str,
        names: Sequence[str],
        nbytes: int,
        begin_s: float,
        work: Any,
    ) -> None:
        """Note an operation that the scheduler began to start at ``begin_s``."""
        self._sent.append((message, what, tuple(names), nbytes, begin_s, work))

    def note_wait(self, wait: Callable[[], Any]) -> None:
        """Call ``wait`` and note its interval."""
        begin_s = time.perf_counter()
        wait()
        self._waits.append((begin_s, time.perf_counter()))

    def step(self) -> Step:
        """The complete record. Every operation must have ended."""
        travels = []
        free_s = self._begin_s
        for message, what, names, nbytes, sent_s, work in self._sent:
            starts_s = max(sent_s, free_s)
            # A world of one rank sends nothing, so its Works have no end time.
            free_s = max(starts_s, work.ended_s() or starts_s)
            travels.append(Travel(message, what, names, nbytes, sent_s, starts_s, free_s))
        return Step(
            self._number,
            self._policy,
            self._begin_s,
            self._flushed_s,
            time.perf_counter(),
            tuple(self._ready),
            tuple(travels),
            tuple(self._waits),
        )
