"""One point in time by which something must have happened."""

from __future__ import annotations

import time


class Deadline:
    """A point on the monotonic clock, ``seconds`` after it was made."""

    __slots__ = ("at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at - time.monotonic())

    def passed(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self.at

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now."""
        return Deadline(min(seconds, self.remaining()))
