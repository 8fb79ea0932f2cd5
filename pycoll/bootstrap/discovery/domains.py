"""The domains of a host in which a rank's cores lie: the last-level cache and the memory domain.

Cores that share a last-level cache exchange lines faster than others, and so do cores and memory of
one NUMA node. A rank that may run on cores of several domains belongs to none of them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from pycoll.bootstrap.discovery.host import names_in, read_file
from pycoll.cores import core_numbers, core_text

SYSTEM = "/sys/devices/system"


class Domains(NamedTuple):
    """The cores that share the last-level cache, and those of the memory domain, as text.

    A text is empty if the system does not say, or if the rank's cores lie in several domains.
    """

    cache: str = ""
    memory: str = ""

    def __str__(self) -> str:
        parts = [f"cache of cores {self.cache}"] if self.cache else []
        parts += [f"memory of cores {self.memory}"] if self.memory else []
        return ", ".join(parts) or "unknown: the cores lie in several domains, or none is reported"


@functools.lru_cache(maxsize=64)
def find_domains(text: str, system: str = SYSTEM) -> Domains:
    """Return the domains that contain all cores of ``text`` (``cores.core_text``).

    Cost: about ten small files of sysfs are read, once for each text. A file that is missing or
    malformed counts as no domain.
    """
    cores = core_numbers(text)
    core = min(cores)
    return Domains(
        _containing(cores, _last_cache(f"{system}/cpu/cpu{core}/cache")),
        _containing(cores, _memory(core, f"{system}/node")),
    )


def _containing(cores: set[int], found: set[int]) -> str:
    return core_text(found) if cores <= found else ""


def _last_cache(folder: str) -> set[int]:
    """The cores of the cache with the highest level; a cache of instructions does not count."""
    highest, found = 0, ""
    for path in _folders(folder, "index"):
        level = read_file(f"{path}/level")
        if not level.isdecimal() or read_file(f"{path}/type") == "Instruction":
            continue
        if int(level) > highest:
            highest, found = int(level), f"{path}/shared_cpu_list"
    return _numbers(found)


def _memory(core: int, folder: str) -> set[int]:
    for path in _folders(folder, "node"):
        cores = _numbers(f"{path}/cpulist")
        if core in cores:
            return cores
    return set()


def _folders(folder: str, word: str) -> Iterator[str]:
    """The paths of ``folder``/``word``N in order of their numbers."""
    names = names_in(folder)
    ends = (name.removeprefix(word) for name in names if name.startswith(word))
    for number in sorted(int(end) for end in ends if end.isdecimal()):
        yield f"{folder}/{word}{number}"


def _numbers(path: str) -> set[int]:
    try:
        return core_numbers(read_file(path))
    except ValueError:
        return set()
