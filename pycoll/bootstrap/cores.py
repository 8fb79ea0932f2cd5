"""The cores that ranks may run on, as they tell each other.

Launchers often bind each rank to cores of its own (Open MPI does by default), so one rank's cores
say nothing of how many there are for all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

#: More than any machine has.
_CORES_MAX = 1 << 16


def usable_cores() -> str:
    """Those of the calling thread: "0-3,8"."""
    return core_text(os.sched_getaffinity(0))


def core_text(cores: Iterable[int]) -> str:
    """As ranges, in ascending order."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] + 1 == core:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)


def core_numbers(text: str) -> set[int]:
    """What ``core_text`` was given; ValueError for other text."""
    cores: set[int] = set()
    highest = -1
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if not highest < begin <= end < _CORES_MAX:
            raise ValueError(f"cores {part}: expected ascending numbers below {_CORES_MAX}")
        cores.update(range(begin, end + 1))
        highest = end
    return cores
