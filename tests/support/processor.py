"""How much processor time something takes, on machines whose cores are shared with strangers."""

from __future__ import annotations

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
