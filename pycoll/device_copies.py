"""Device arrays that are not in C order: packed by a kernel in front of an operation, and unpacked
behind it, in the operation's own stream.
"""

from __future__ import annotations

from typing import Any

from pycoll import _core
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError
from pycoll.types import ITEM_BYTES

#: For the kernel: what, packed memory, bytes of an element, and what that needs.
Copy = tuple[Any, ...]


class Copies:
    """The copies of one operation. ``memory`` is what they need; it is held until they have run."""

    def __init__(self) -> None:
        self.before: list[Copy] = []
        self.after: list[Copy] = []
        self.memory: list[Any] = []

    def source(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """The same elements in C order, as of the operation's beginning."""
        if view is None or view.contiguous or not view.count:
            return view
        packed = self._like(view, where)
        self.before.append(_between("pack", view, packed))
        return packed

    def target(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """Memory in C order, which comes to the view behind the operation."""
        if view is None or view.contiguous or not view.count:
            return view
        for length, stride in zip(view.shape, view.strides or (), strict=True):
            if stride == 0 and length > 1:
                raise InvalidArgumentError(
                    f"out of shape {view.shape} has elements that share memory: pass one that has "
                    "its own for each"
                )
        packed = self._like(view, where)
        # What is not written by this rank stays as it is.
        self.before.append(_between("pack", view, packed))
        self.after.append(_between("unpack", view, packed))
        return packed

    def fill(self, view: DeviceView | None, value: bytes) -> None:
        """Give all elements the value, behind the operation. ``view`` is what ``target`` gave."""
        if view is not None and view.count:
            item = ITEM_BYTES[view.dtype]
            self.after.insert(0, ("fill", view.address, item, view.count, value))

    def _like(self, view: DeviceView, where: Where) -> DeviceView:
        memory = where.framework.empty(where.x, view.shape, view.dtype)
        self.memory.append(memory)
        made = where.framework.result(memory)
        assert isinstance(made, DeviceView)  # x is on a device, so what is like it is, too
        return made


def order_memory(native: _core.DeviceCommunicator, where: Where, stream: int) -> None:
    """Let the stream of the operation wait for what last used memory that was made just now.

    Allocators give memory to be used on their current stream, which need not be the caller's.
    """
    current = int(where.framework.stream(where.x))
    if where.stream is not None and current != stream:
        native.join(native.mark(current), stream)


def _between(kind: str, view: DeviceView, packed: DeviceView) -> Copy:
    strides = view.strides
    return (kind, packed.address, ITEM_BYTES[view.dtype], view.address, view.shape, strides)
