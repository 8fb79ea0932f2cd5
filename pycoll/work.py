"""The handle of an operation that may still run."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

from pycoll._core import Work
from pycoll.errors import InvalidArgumentError

__all__ = ["Work", "check_timeout"]


def check_timeout(timeout: Any, name: str = "timeout") -> float:
    """Seconds above zero; InvalidArgumentError otherwise."""
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected a number of seconds")
    try:
        seconds = float(timeout)
    except OverflowError:
        raise InvalidArgumentError(
            f"{name} is a number beyond all floats: expected at most {sys.float_info.max:.3g} "
            "seconds, or math.inf for no limit"
        ) from None
    if math.isnan(seconds) or seconds <= 0:
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected more than 0 seconds")
    return seconds
