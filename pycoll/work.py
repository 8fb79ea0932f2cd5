"""The handle of an operation that may still run."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from pycoll import _core
from pycoll.errors import InvalidArgumentError


def check_timeout(timeout: Any, name: str = "timeout") -> float:
    """Seconds above zero; InvalidArgumentError otherwise."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected a number of seconds")
    if math.isnan(timeout) or timeout <= 0:
        raise InvalidArgumentError(f"{name} is {timeout!r}: expected more than 0 seconds")
    return float(timeout)


class Work:
    """An operation started with ``async_op=True``, by isend or irecv, or inside a group.

    Arrays that it reads or writes must be left alone until it is done; they are kept alive. It runs
    on whether or not anyone waits. Threads: any.
    """

    __slots__ = ("_finish", "_lock", "_native", "_result")

    def __init__(self, native: _core.Work | None, finish: Callable[[], Any]) -> None:
        self._native = native
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._native is None or self._native.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Block until the operation is done, and return what the blocking call would.

        Raises what the operation raised. With ``timeout`` (seconds) raises TimeoutError if it is
        still running then; it goes on, and one may wait again. None waits for the operation's own
        deadline, the communicator's ``timeout_s``.
        """
        limit = None if timeout is None else check_timeout(timeout)
        if self._native is not None:
            self._native.wait(limit)
        with self._lock:
            if self._finish is not None:
                self._result = self._finish()
                self._finish = None
            return self._result


class GroupWork(Work):
    """A member of a group that has not ended yet; filled in when it does."""

    __slots__ = ("_error", "_filled")

    def __init__(self) -> None:
        super().__init__(None, lambda: None)
        self._filled = False
        self._error: BaseException | None = None

    def fill(self, result: Any) -> None:
        """The group ended and this came out."""
        self._result = result
        self._finish = None
        self._filled = True

    def fail(self, error: BaseException) -> None:
        """The group ended without this operation."""
        self._error = error
        self._filled = True

    def done(self) -> bool:
        """Whether the group has ended."""
        return self._filled

    def wait(self, timeout: float | None = None) -> Any:
        """The result. InvalidArgumentError before the group has ended: nothing has started yet."""
        if timeout is not None:
            check_timeout(timeout)
        if not self._filled:
            raise InvalidArgumentError(
                "wait() inside the group: its operations start when the with block ends"
            )
        if self._error is not None:
            raise self._error
        return self._result
