"""Arrays of one communicator that peers write results to: who keeps them alive, and how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pycoll import _core
from pycoll.device_view import DeviceView

#: Arrays that peers might still write to, or have mapped, when their communicator had ended.
_KEPT_FOR_EVER: list[Any] = []


class DeviceRegistry:
    """Arrays by the numbers that all ranks know them by. Any thread."""

    def __init__(self) -> None:
        self._native: _core.DeviceCommunicator | None = None
        #: Registered no more, until no peer writes to them.
        self._lapsed: dict[int, Any] = {}
        self._closed = False

    def enter(
        self,
        native: _core.DeviceCommunicator,
        views: Sequence[DeviceView],
        exchange: Callable[[bytes], list[bytes]],
    ) -> list[tuple[int, bool]]:
        """Let peers write to these arrays; all ranks call it, with as many.

        Of each its number, -1 if it has none, and whether some peer can. What is not in C order is
        not registered: operations work on a copy of it.
        """
        memory = [(view.address, view.nbytes if view.contiguous else 0) for view in views]
        entered = native.register(memory, exchange)
        self._native = native
        for number, _ in entered:
            self._lapsed.pop(number, None)  # no rank knows its last array any more
        return entered

    def lapse(self, entered: Sequence[tuple[int, Any]]) -> None:
        """Register no more: numbers with their arrays."""
        assert self._native is not None  # which gave the numbers
        for number, x in entered:
            self._native.lapse(number)
            self._lapsed[number] = x
        self.let_go()

    def let_go(self) -> None:
        """Give away what nobody writes to any more."""
        if self._lapsed and self._native is not None:
            for number in self._native.let_go():
                self._lapsed.pop(number, None)
        if self._closed:
            _KEPT_FOR_EVER.extend(self._lapsed.values())
            self._lapsed.clear()

    def close(self) -> None:
        """The communicator has ended; what lapses from now on waits for nothing."""
        self._closed = True
        self.let_go()
