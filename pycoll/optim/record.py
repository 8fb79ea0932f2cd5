"""What happened in one step of a Scheduler, for whoever records it. Seconds are perf_counter's.

begin           flushed              end
|--backward pass|                    |
    ready  sent starts     ends
    |......|....|==on wire==|
                    |waits..|           what was not hidden
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol


class Travel(NamedTuple):
    """One operation of a message: ``what`` is all_reduce, reduce_scatter or all_gather.

    ``starts_s``: when it had been handed over and those in front of it had ended.
    """

    message: int
    what: str
    names: tuple[str, ...]
    nbytes: int
    sent_s: float
    starts_s: float
    ends_s: float


class Step(NamedTuple):
    """``ready``: every entry's name, and when its values came. ``waits``: when the caller stood
    still for results, from and to, in order."""

    number: int
    policy: str
    begin_s: float
    flushed_s: float
    end_s: float
    ready: tuple[tuple[str, float], ...]
    travels: tuple[Travel, ...]
    waits: tuple[tuple[float, float], ...]


class Observer(Protocol):
    """Somebody who records steps. Works note their ends meanwhile (``_core.record_ends``)."""

    @property
    def is_recording(self) -> bool:
        """Asked when a step begins."""

    def scheduled(self, step: Step) -> None:
        """A step has ended."""


class StepLog:
    """Notes of a step under way. One thread at a time."""

    def __init__(self, number: int, policy: str) -> None:
        self._number, self._policy = number, policy
        self._begin_s = self._flushed_s = time.perf_counter()
        self._ready: list[tuple[str, float]] = []
        self._sent: list[tuple[int, str, tuple[str, ...], int, float, Any]] = []
        self._waits: list[tuple[float, float]] = []

    def ready(self, name: str) -> None:
        """Values have come."""
        self._ready.append((name, time.perf_counter()))

    def flushed(self) -> None:
        """The backward pass is over."""
        self._flushed_s = time.perf_counter()

    def sent(
        self,
        message: int,
        what: str,
        names: Sequence[str],
        nbytes: int,
        begin_s: float,
        work: Any,
    ) -> None:
        """An operation was handed over, from ``begin_s`` on."""
        self._sent.append((message, what, tuple(names), nbytes, begin_s, work))

    def waited(self, wait: Callable[[], Any]) -> None:
        """Wait, and note how long."""
        begin_s = time.perf_counter()
        wait()
        self._waits.append((begin_s, time.perf_counter()))

    def step(self) -> Step:
        """All of it; every operation has ended."""
        travels = []
        free_s = self._begin_s
        for message, what, names, nbytes, sent_s, work in self._sent:
            starts_s = max(sent_s, free_s)
            # Nothing travels in a world of one rank, and nothing is noted.
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
