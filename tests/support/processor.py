"""How much work something is: calls of functions, or processor time next to other programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

#: The most calls of the work. They must outlast the time for which another program slows a core
#: down.
ATTEMPTS = 30


def quickest_s(work: Callable[[], object], enough_s: float) -> float:
    """The least time of ``work`` in several calls, in seconds of this thread's processor time.

    Stops at a call that takes less than ``enough_s``: other load only adds time.
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

    A count bounds how the work grows with its input. ``bench/`` measures the time of calls.
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
