"""The tuning that rank 0 brings into a communicator: a file, or a short measurement."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from pycoll import _core
from pycoll.cores import core_count
from pycoll.cost import tuning_file
from pycoll.cost.slot_stores import GAIN, STRING

if TYPE_CHECKING:
    from pycoll.config import Config

#: The most seconds of the measurement when a program starts.
MEASURING_S = 4e-3


def start_tuning(config: Config) -> tuning_file.Tuning:
    """Return the values of the tuning file, else the built-in ones.

    If no file states the values that depend on the processor, each process measures them once, in
    less than 5 ms. Raises InvalidArgumentError if PYCOLL_TUNING names a file that cannot be used;
    PYCOLL_TUNING=off measures nothing.
    """
    found = tuning_file.find(config)
    if found.slot_stores is None and config.tuning != tuning_file.OFF:
        return found._replace(slot_stores=measured_stores())
    return found


def tuning_text(config: Config) -> str:
    """Return the text that rank 0 sends when it joins; raises as ``start_tuning`` does."""
    return start_tuning(config).to_text()


@functools.cache
def measured_stores() -> str | None:
    """Return the best stores for slots; None if this process cannot measure them.

    A process with less than two cores, by its affinity or by a quota, measures nothing: a quota
    would stop one of the two threads while the other one is timed.
    """
    if core_count() < 2:
        return None
    times = _core.time_stores(MEASURING_S)
    if times is None:
        return None
    best = min(times, key=times.__getitem__)
    return best if times[best] < GAIN * times[STRING] else STRING
