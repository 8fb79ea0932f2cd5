"""How long peers have been silent, and whether this process was stopped meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable


def _now() -> float:
    # It also runs while the host is suspended.
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Heartbeats:
    """Counts the silence of peers. ``limit_s``: the silence in seconds that counts as an end.

    The time during which this process was stopped counts for nobody. ``now``: a clock in seconds.
    """

    def __init__(self, limit_s: float, now: Callable[[], float] = _now) -> None:
        self._limit_s = limit_s
        self._now = now
        #: When this object was asked, and when it counted.
        self._checked = self._measured = now()
        self._silent: dict[int, float] = {}

    def record(self, peer: int) -> None:
        """Note that a peer has sent something."""
        self._silent[peer] = 0.0

    def was_stopped(self) -> bool:
        """Return whether a quarter of the limit has passed since the last call.

        Peers have then heard nothing of this process for as long, and up to an eighth of the limit
        longer, so none of them has counted it out while it does not know. The owner calls this
        often, and ahead of whatever other processes shall not learn from one that was left out.
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
        """Count the time since the last call, and return by peer how long it has been silent.

        Of one call at most a quarter of the limit counts: the rest is a stop of this process.
        """
        passed, self._measured = self._checked - self._measured, self._checked
        passed = min(passed, self._limit_s / 4)
        self._silent = {one: self._silent.get(one, 0.0) + passed for one in peers}
        return self._silent
