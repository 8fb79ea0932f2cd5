"""The handle of an operation that may still run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeVar

from pycoll._core import Work
from pycoll.errors import InvalidArgumentError, TimeoutError
from pycoll.types import check_timeout

_T = TypeVar("_T")

__all__ = ["Work", "wait_all"]


def wait_all(works: Iterable[Work[_T]], timeout: float | None = None) -> list[_T]:
    """Wait until all Works have ended, and return their results in the same order.

    ``works``: the Works of calls with ``async_op=True``, of isend, irecv and irecv_any.
    ``timeout``: seconds for all Works together, or None for the own deadline of each operation.

    Returns a list of the results.

    Raises, after all Works have ended, the error of the first failed one in the list. Raises
    TimeoutError where ``timeout`` passes; its text counts the operations that still run. They
    continue, and the program may wait again. Raises InvalidArgumentError where an element is not a
    Work.

    Cost: none beyond the wait.

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
