"""Heartbeats: how long peers have been silent, and whether this process was stopped meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


def _now() -> float:
    # This clock also runs while the host is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Heartbeats:
    """Measures the silence of peers. ``limit_s``: the seconds of silence that count as a loss.

    The time during which this process was stopped counts for no peer. ``now``: a clock in seconds.
    Threads: the owner holds a lock.
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = _now) -> None:
        self._limit_s = limit_s
        self._now = now
        #: The times of the newest calls of ``was_stopped`` and ``measure``.
        self._checked = self._measured = now()
        self._silent: dict[int, float] = {}

    def record(self, peer: int) -> None:
        """Note that a peer has sent a message."""
        self._silent[peer] = 0.0

    def was_stopped(self) -> bool:
        """Return whether a quarter of the limit has passed since the last call.

        If not, the silence of this process towards its peers was at most three eighths of the
        limit, so none has counted it as lost. The owner calls this method often, and ahead of each
        output that an excluded process must not give.
        """
        last, self._checked = self._checked, self._now()
        if self._checked - last <= self._limit_s / 4:
            return False
        self._measured = self._checked
        return True

    def is_due(self) -> bool:
        """Return whether an eighth of the limit has passed since the last call of ``measure``."""
        return self._checked - self._measured >= self._limit_s / 8

    def measure(self, peers: Iterable[int]) -> dict[int, float]:
        """Add the time since the last call; return by peer the seconds of its silence.

        One call adds at most a quarter of the limit, since the rest is a stop of this process.
        """
        passed, self._measured = self._checked - self._measured, self._checked
        passed = min(passed, self._limit_s / 4)
        self._silent = {one: self._silent.get(one, 0.0) + passed for one in peers}
        return self._silent
