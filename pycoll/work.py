"""The handle of an operation that may still run."""

from __future__ import annotations

import math
import numbers
import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

from pycoll._core import Work
from pycoll.errors import InvalidArgumentError, TimeoutError

_T = TypeVar("_T")

__all__ = ["Work", "check_timeout", "wait_all"]


def wait_all(works: Iterable[Work[_T]], timeout: float | None = None) -> list[_T]:
    """Wait until all Works have ended, and return their results in the same order.

    ``works``: what calls with ``async_op=True``, isend and irecv gave. Where some fail, the error
    of the first in the list is raised once all have ended. With ``timeout`` (seconds for all
    together) raises TimeoutError that counts those that still run; they go on, and one may wait
    again. None waits for each operation's own deadline.

    >>> works = [comm.all_reduce(one, async_op=True) for one in (1, 2.5)]  # on 2 ranks
    >>> comm.wait_all(works)
    [2, 5.0]
    """
    given = list(works)
    for number, work in enumerate(given):
        if not callable(getattr(work, "wait", None)):
            raise InvalidArgumentError(
                f"works[{number}] is a {type(work).__name__}: expected a Work, as calls with "
                "async_op=True give"
            )
    ends = None if timeout is None else time.monotonic() + check_timeout(timeout)
    results: list[_T] = []
    first: BaseException | None = None
    for work in given:
        try:
            if ends is None:
                results.append(work.wait())
            else:
                results.append(work.wait(max(ends - time.monotonic(), 1e-9)))
        except Exception as error:
            if not work.done():
                running = sum(not one.done() for one in given)
                raise TimeoutError(
                    f"{running} of {len(given)} operations are still under way after {timeout:g} s",
                    operation="wait_all",
                ) from error
            first = first or error
    if first is not None:
        raise first
    return results


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
