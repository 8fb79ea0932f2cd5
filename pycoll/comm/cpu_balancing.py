"""The door to CPU balancing: a self-test before its first use in the process.

The balancer sets the affinity mask of a waiting thread (csrc/engine/waiting/cpu_balancer.h). A
container may forbid that.
"""

from __future__ import annotations

import functools
import warnings

from pycoll import _core


@functools.cache
def can_balance() -> bool:
    """Whether this process may move its threads between cores. The first call may warn."""
    works = _core.can_move_to_core()
    if not works:
        warnings.warn(
            "CPU balancing is off, since its self-test fails: this process may not set the "
            "affinity of its threads. Only the scheduler moves the ranks that share cores",
            RuntimeWarning,
            stacklevel=6,
        )
    return works
