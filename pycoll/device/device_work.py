"""Handles of operations on device arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from pycoll import _core
from pycoll.arrays.device_view import Where
from pycoll.errors import TimeoutError
from pycoll.types import check_timeout

#: Time between two polls of a thread that waits for a device.
_NAP_S = 50e-6
_NAP_MAX_S = 1e-3


class Marked(Protocol):
    """An object that answers for the progress of operations, by their marks."""

    def passed(self, mark: Any) -> bool:
        """Return whether the operation has run; raise its failure."""

    def join(self, mark: Any, stream: int) -> None:
        """Let the stream wait for the operation."""


class DeviceWork:
    """An operation on device arrays that does not run on the caller's stream.

    pycoll keeps its arrays alive until it has ended.
    """

    def __init__(
        self,
        native: Marked,
        mark: _core.DeviceMark | _core.StagedMessage,
        where: Where,
        finish: Callable[[], Any],
    ) -> None:
        self._native = native
        self._mark = mark
        self._where = where
        self._finish = finish

    def done(self) -> bool:
        """Return whether the device has run the operation; raise its failure."""
        return self._native.passed(self._mark)

    def wait(self, timeout: float | None = None) -> Any:
        """Let the current stream wait for the operation, and return its result at once.

        ``timeout``, in seconds, is checked and has no effect: other Works have it, but the host
        does not wait here. Raises the failure of the operation if it is known.
        """
        if timeout is not None:
            check_timeout(timeout)
        self._native.join(self._mark, self._where.handle())
        hands_on = self._where.hands_on()
        if hands_on is not None:
            self._native.join(self._mark, hands_on)
        return self._finish()

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the device has run the operation, and return its result.

        Raises the failure of the operation, or TimeoutError if it still runs after ``timeout``
        seconds.
        """
        limit = None if timeout is None else time.monotonic() + check_timeout(timeout)
        nap = _NAP_S
        while not self.done():
            if limit is not None and time.monotonic() >= limit:
                raise TimeoutError("the operation is still under way after the wait's timeout")
            time.sleep(nap)
            nap = min(2 * nap, _NAP_MAX_S)
        return self._finish()
