"""``HOROVOD_*`` variables: the supported ones are read, and rank 0 warns of others.

Settings that must be equal on all ranks are those of rank 0. There is no warning for variables that
concern the build of Horovod, nor for those in which a launcher describes the ranks
(``pycoll.bootstrap.discovery`` reads these).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PREFIX = "HOROVOD_"


class Variables(NamedTuple):
    """The settings. ``timeline`` is a path or empty; ``VARIABLES`` describes the rest."""

    fusion_bytes: int | None = None
    cycle_s: float = 1e-3
    cache: int | None = None
    timeline: str = ""
    mark_cycles: bool = False
    no_stall_check: bool = False
    stall_s: float = 60.0
    give_up_s: float = 0.0

    @property
    def warn_after_s(self) -> float | None:
        """The seconds after which to warn that a tensor waits for other ranks; None for never."""
        return None if self.no_stall_check or self.stall_s == 0 else self.stall_s


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _figure(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


class _Variable(NamedTuple):
    field: str
    parse: Callable[[str], Any]
    expected: str
    meaning: str


_FLAG = "1 or 0"
VARIABLES: dict[str, _Variable] = {
    "HOROVOD_FUSION_THRESHOLD": _Variable(
        "fusion_bytes",
        _count,
        "bytes",
        "tensors that are ready together are reduced in groups of up to this many bytes; 0: each "
        "alone; unset: all in one group. Also the bucket_bytes of policies given by name",
    ),
    "HOROVOD_CYCLE_TIME": _Variable(
        "cycle_s",
        lambda text: _figure(text) / 1e3,
        "milliseconds",
        "the longest pause between two rounds of negotiation in milliseconds, by default 1",
    ),
    "HOROVOD_CACHE_CAPACITY": _Variable(
        "cache",
        _count,
        "a number",
        "the number of tensors whose names the negotiation replaces by numbers, by default 8192; "
        "0: none",
    ),
    "HOROVOD_TIMELINE": _Variable(
        "timeline",
        str,
        "a path",
        "init() begins a timeline: rank 0 writes to this file, rank r to one with .r before the "
        "ending; DYNAMIC leaves that to start_timeline",
    ),
    "HOROVOD_TIMELINE_MARK_CYCLES": _Variable(
        "mark_cycles",
        lambda text: bool(_count(text)),
        _FLAG,
        "1: the timeline marks the rounds of the negotiation",
    ),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": _Variable(
        "stall_s",
        _figure,
        "seconds",
        "after this many seconds a warning names a tensor that waits and the ranks that lack it, "
        "by default 60; 0: never",
    ),
    "HOROVOD_STALL_CHECK_DISABLE": _Variable(
        "no_stall_check", lambda text: bool(_count(text)), _FLAG, "1: no such warning"
    ),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _Variable(
        "give_up_s",
        _figure,
        "seconds",
        "after this many seconds an operation that waits fails, by default 1800; PYCOLL_TIMEOUT_S "
        "takes precedence",
    ),
}

#: Variables that other modules read, or whose wish is always granted; these get no warning.
PLACES = (
    *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"),
    *("GLOO_RENDEZVOUS_ADDR", "GLOO_RENDEZVOUS_PORT", "ELASTIC", "DYNAMIC_PROCESS_SETS"),
    "ELASTIC_TIMEOUT",
)
#: The beginnings of the names of variables for building Horovod.
_BUILDING = ("WITH", "BUILD_", "CUDA_HOME", "NCCL_", "GPU", "ROCM_", "MPICXX", "SKIP_")
#: Advice for variables without effect, by the beginning of their names.
ADVICE = {
    "ELASTIC": "pycoll run --min-np --max-np --host-discovery-script starts elastic jobs",
    "AUTOTUNE": 'DistributedOptimizer(policy="auto") measures and chooses',
    "HIERARCHICAL": "algorithms are chosen by cost; pycoll explain tells which",
    "TORUS": "algorithms are chosen by cost; pycoll explain tells which",
    "CONTROLLER": "there is only one controller, which needs neither MPI nor Gloo",
    "CPU_OPERATIONS": "pycoll moves the bytes itself",
    "MPI_THREADS_DISABLE": "MPI is not used",
    "GLOO_IFACE": "PYCOLL_INTERFACES names network interfaces",
    "GLOO_TIMEOUT": "PYCOLL_TIMEOUT_S and PYCOLL_INIT_TIMEOUT_S bound all waits",
    "LOG": "there is no log; errors and warnings say what happened",
    "THREAD_AFFINITY": "the progress thread runs where the system puts it",
    "DISABLE_GROUP_FUSION": "HOROVOD_FUSION_THRESHOLD bounds what is reduced together",
    "NUM_NCCL_STREAMS": "NCCL is not used",
}


def read(environ: Mapping[str, str] | None = None) -> Variables:
    """Read the settings from the environment. ValueError, naming a value that cannot be parsed."""
    source = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    for name, one in VARIABLES.items():
        text = source.get(name, "")
        if not text:
            continue
        try:
            found[one.field] = one.parse(text)
        except ValueError:
            raise ValueError(f"{name}={text!r}: expected {one.expected}") from None
    return Variables(**found)


def without_meaning(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that are set and have no effect here, each with advice."""
    source = os.environ if environ is None else environ
    found = {}
    for name in sorted(source):
        word = name.removeprefix(PREFIX)
        if name == word or name in VARIABLES or word in PLACES or word.startswith(_BUILDING):
            continue
        advice = next((text for start, text in ADVICE.items() if word.startswith(start)), "")
        found[name] = advice or "pycoll has no such setting"
    return found


_told: set[str] = set()


def tell_once() -> None:
    """Warn of each variable without effect, once per process."""
    for name, advice in without_meaning().items():
        if name not in _told:
            _told.add(name)
            warnings.warn(f"{name} has no effect: {advice}", stacklevel=3)


def timeline_path(path: str, rank: int) -> str:
    """The timeline file of a rank, where that of rank 0 is ``path``."""
    if rank == 0:
        return path
    stem, ending = os.path.splitext(path)
    return f"{stem}.{rank}{ending}"
