"""The handle of an operation that may still run."""

from __future__ import annotations

import math
from typing import Any

from pycoll._core import Work
from pycoll.errors import InvalidArgumentError

__all__ = ["Work", "check_timeout"]


def check_timeout(timeout: Any, name: str = "timeout") -> float:
    """Seconds above zero; InvalidArgumentError otherwise."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected a number of seconds")
    if math.isnan(timeout) or timeout <= 0:
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected more than 0 seconds")
    return float(timeout)
