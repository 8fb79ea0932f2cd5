"""Keeps the registered arrays of a communicator alive while peers may write to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll import _core
from pycoll.arrays.device_view import DeviceView

#: Arrays that peers may still write to, or have mapped, after their communicator has ended.
_KEPT_FOR_EVER: list[Any] = []


class DeviceRegistry:
    """The registered arrays by number; numbers are the same on all ranks. Any thread."""

    def __init__(self) -> None:
        self._native: _core.DeviceCommunicator | None = None
        #: Lapsed arrays, until no peer writes to them.
        self._lapsed: dict[int, Any] = {}
        self._closed = False

    def enter(
        self,
        native: _core.DeviceCommunicator,
        views: Sequence[DeviceView],
        exchange: Callable[[bytes], list[bytes]],
    ) -> list[tuple[int, bool]]:
        """Register arrays that peers may write to; all ranks pass the same number of arrays.

        Returns for each array its number, or -1 if it has none, and whether some peer can write to
        it. An array that is not in C order is not registered: operations work on a copy of it.
        """
        memory = [(view.address, view.nbytes if view.contiguous else 0) for view in views]
        entered = native.register(memory, exchange)
        self._native = native
        for number, _ in entered:
            self._lapsed.pop(number, None)  # no rank uses the number's last array any more
        return entered

    def lapse(self, entered: Sequence[tuple[int, Any]]) -> None:
        """End the registration of arrays, given with their numbers."""
        assert self._native is not None  # it gave the numbers
        for number, x in entered:
            self._native.lapse(number)
            self._lapsed[number] = x
        self.let_go()

    def let_go(self) -> None:
        """Release the arrays that no peer writes to any more."""
        if self._lapsed and self._native is not None:
            for number in self._native.let_go():
                self._lapsed.pop(number, None)
        if self._closed:
            _KEPT_FOR_EVER.extend(self._lapsed.values())
            self._lapsed.clear()

    def close(self) -> None:
        """End with the communicator: arrays that lapse later are kept for ever, without waiting."""
        self._closed = True
        self.let_go()
