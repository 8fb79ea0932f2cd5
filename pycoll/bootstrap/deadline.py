"""A point in time at which a wait ends."""

from __future__ import annotations

import time


class Deadline:
    """A point on the monotonic clock, ``seconds`` after the deadline was made."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Return the seconds left, never a negative number."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() >= self.at

    def within(self, seconds: float) -> Deadline:
        """Return the earlier of this deadline and ``seconds`` from now."""
        return Deadline(min(seconds, self.remaining()))
