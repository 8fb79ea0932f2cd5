"""The cores that ranks may run on, as they tell each other, and how much of them they may use.

Launchers often bind each rank to cores of its own (Open MPI does by default), so one rank's cores
say nothing of how many there are for all. A container may see all cores of its machine and still
have processor time for a few of them only: its quota counts wherever cores are counted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

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


class CpuQuota(NamedTuple):
    """``cores``: seconds of processor time per second that the processes of ``group`` may use,
    all together. ``group`` is equal for processes of one control group, and no other's."""

    group: str
    cores: float


def cpu_quota(proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> CpuQuota | None:
    """The tightest quota of this process's control groups, cgroup v2 (``cpu.max``) or v1
    (``cpu.cfs_quota_us``); None where none is set. What cannot be read counts as no quota."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    found: CpuQuota | None = None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for folder in _folders_of(controllers, path, mounts):
            cores = _quota_of(folder)
            if cores is not None and (found is None or cores < found.cores):
                status = folder.stat()
                found = CpuQuota(f"{status.st_dev}:{status.st_ino}", cores)
    return found


def _folders_of(controllers: str, path: str, mounts: Path) -> Iterator[Path]:
    """The control group and all that it is in, where the processor's controller is mounted. Inside
    a container the outer part of ``path`` may be missing: then the mount is the container's own."""
    if not controllers:
        tops = [mounts, mounts / "unified"]
    elif "cpu" in controllers.split(","):
        tops = [mounts / controllers, mounts / "cpu"]
    else:
        return
    for top in tops:
        if not top.is_dir():
            continue
        inner = Path(path.lstrip("/"))
        if ".." not in inner.parts:
            for one in (inner, *inner.parents):
                if (top / one).is_dir():
                    yield top / one
        else:
            yield top


def _quota_of(folder: Path) -> float | None:
    """Cores' worth of time in this control group alone; None without a limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        return None


def core_count() -> int:
    """How many ranks can run here at once without waiting for each other: the calling thread's
    cores, or what the quota leaves of them. At least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota.cores)))
