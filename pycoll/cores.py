"""The cores that a rank may run on, as exchanged between ranks, and its quota of processor time.

Launchers often bind each rank to its own cores; Open MPI does by default. So the cores of one rank
do not tell how many cores all ranks have together. A container may see all cores of its machine and
still have processor time for a few of them only. So every count of cores also applies the quota.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

#: An upper bound of core numbers, above those of any machine.
_CORES_MAX = 1 << 16


def usable_cores() -> str:
    """Return the cores of the calling thread as text: "0-3,8"."""
    return core_text(os.sched_getaffinity(0))


def core_text(cores: Iterable[int]) -> str:
    """Format core numbers as ranges in ascending order."""
    ranges: list[list[int]] = []
    for core in sorted(cores):
        if ranges and ranges[-1][1] + 1 == core:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in ranges)


def core_numbers(text: str) -> set[int]:
    """Parse the text of ``core_text``. Raises ValueError for other text."""
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
    """A limit of processor time. The processes of ``group`` may together use ``cores`` seconds of
    processor time per second. ``group`` identifies one control group."""

    group: str
    cores: float


def cpu_quota(proc: Path = Path("/proc"), mounts: Path = Path("/sys/fs/cgroup")) -> CpuQuota | None:
    """Return the tightest quota of this process's control groups, or None if none is set.

    Reads cgroup v2 (``cpu.max``) and v1 (``cpu.cfs_quota_us``). A file that cannot be read counts
    as no quota.
    """
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
    """Return the folders of the control group and of its parents below the mounts of the cpu
    controller. Inside a container the outer part of ``path`` may not exist; the mount then is the
    container's own group."""
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
    """Return this control group's own quota in cores; None without a limit."""
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
    """Return how many ranks can run here at once: the number of the calling thread's cores, or the
    quota rounded down if that is less. At least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota.cores)))
