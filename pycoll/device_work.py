"""Handles of operations on device arrays."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pycoll import _core
from pycoll.device_view import Where
from pycoll.errors import PycollError, TimeoutError
from pycoll.work import check_timeout

#: Between two looks of a thread that waits for a device.
_NAP_S = 50e-6
_NAP_MAX_S = 1e-3


class DeviceWork:
    """An operation on device arrays that runs beside its stream.

    Its arrays are kept until it has ended.
    """

    def __init__(
        self,
        native: _core.DeviceCommunicator,
        mark: _core.DeviceMark,
        where: Where,
        finish: Callable[[], Any],
    ) -> None:
        self._native = native
        self._mark = mark
        self._where = where
        self._finish = finish

    def done(self) -> bool:
        """Whether the device has run it; raises what it raised."""
        return self._native.passed(self._mark)

    def wait(self, timeout: float | None = None) -> Any:
        """Let the current stream wait for the operation, and return its result at once.

        ``timeout`` is there because other Works have it; this host waits for nothing.
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

        Raises what the operation raised; TimeoutError if it still runs after ``timeout`` seconds.
        """
        limit = None if timeout is None else time.monotonic() + check_timeout(timeout)
        nap = _NAP_S
        while not self.done():
            if limit is not None and time.monotonic() >= limit:
                raise TimeoutError("the operation is still under way after the wait's timeout")
            time.sleep(nap)
            nap = min(2 * nap, _NAP_MAX_S)
        return self._finish()


class StagedWork:
    """A message under way between the hosts; what is received comes to its array in ``wait``."""

    def __init__(
        self, work: _core.Work, finish: Callable[[], Any], translate: Callable[[str], str]
    ) -> None:
        """``finish`` gives the result; ``translate`` puts errors into the caller's words."""
        self._work = work
        self._translate = translate
        self._finish = finish
        self._is_finished = False
        self._result: Any = None

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Any:
        """Block the host until the message has come or gone; its result."""
        try:
            self._work.wait(timeout)
        except PycollError as error:
            error.args = (self._translate(str(error)), *error.args[1:])
            raise
        if not self._is_finished:
            self._result = self._finish()
            self._is_finished = True
        return self._result

    #: There is nothing else to wait for.
    synchronize = wait
