"""How much work something is: calls of functions, or processor time next to other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

#: Together they outlast the seconds for which a neighbour makes a core three times slower.
ATTEMPTS = 30


def quickest_s(work: Callable[[], object], enough_s: float) -> float:
    """The least that ``work`` took, in seconds of this thread's processor time.

    It is called until it takes less than ``enough_s``: load makes it slower, and never faster.
    """
    least = float("inf")
    for _ in range(ATTEMPTS):
        start = time.thread_time()
        work()
        least = min(least, time.thread_time() - start)
        if least < enough_s:
            break
    return least


def calls_of(work: Callable[[], object]) -> int:
    """The calls and returns of functions that ``work`` makes, equal on every machine.

    A count bounds how the work grows. What one call costs is measured in ``bench/``.
    """
    events = 0

    def event(*_: object) -> None:
        nonlocal events
        events += 1

    before = sys.getprofile()
    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(before)
    return events
