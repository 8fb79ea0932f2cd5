"""Device arrays that are not in C order, or whose elements travel in a wire form
(csrc/kernels/wire.h): packed by a kernel in front of an operation, and unpacked behind it, in the
operation's own stream.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll import _core
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError
from pycoll.ops import Reduction
from pycoll.types import ITEM_BYTES, LOCATION, ReduceOp, WireForm, wire_form

#: For the kernel: what, packed memory, bytes of an element, and what that needs.
Copy = tuple[Any, ...]


#: What combines elements in their wire form.
_STEPS = {
    ReduceOp.AVG: ReduceOp.SUM,
    ReduceOp.LAND: ReduceOp.BAND,
    ReduceOp.LOR: ReduceOp.BOR,
    ReduceOp.LXOR: ReduceOp.BXOR,
}


class Conversion(NamedTuple):
    """How elements of ``dtype`` travel for ``op`` among so many ranks."""

    form: WireForm
    dtype: int
    op: int
    ranks: int

    @property
    def step(self) -> int:
        """The reduction of the wire form."""
        return _STEPS[ReduceOp(self.op)]

    @property
    def key(self) -> int:
        """What tells operations of the same wire form apart."""
        return (self.dtype << 8 | self.op) << 40


def conversion(dtype: int, reduction: Reduction | None, ranks: int) -> Conversion | None:
    """None where elements travel as they are. InvalidArgumentError for pairs."""
    if reduction is None or (ranks == 1 and reduction.code is ReduceOp.AVG):
        return None
    if reduction.code in LOCATION:
        raise InvalidArgumentError(
            f"op {reduction.name!r} is for arrays in host memory: copy the pairs there"
        )
    form = wire_form(dtype, reduction.code)
    return None if form is None else Conversion(form, dtype, reduction.code, ranks)


class Copies:
    """The copies of one operation. ``memory`` is what they need; it is held until they have run."""

    def __init__(self, wire: Conversion | None = None) -> None:
        self.wire = wire
        self.before: list[Copy] = []
        self.after: list[Copy] = []
        self.memory: list[Any] = []

    def source(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """The same elements in C order or wire form, as of the operation's beginning."""
        if view is not None and self.wire is not None and view.count:
            made = self._wire_memory(view, where, self.wire)
            self.before.append(_converted("enter", view, made, self.wire))
            return made
        if view is None or view.contiguous or not view.count:
            return view
        packed = self._like(view, where)
        self.before.append(_between("pack", view, packed))
        return packed

    def target(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """Memory in C order or wire form, which comes to the view behind the operation."""
        if view is None or not view.count or (view.contiguous and self.wire is None):
            return view
        # In C order no two elements share memory.
        for length, stride in zip(view.shape, view.strides or view.shape, strict=True):
            if stride == 0 and length > 1:
                raise InvalidArgumentError(
                    f"out of shape {view.shape} has elements that share memory: pass one that has "
                    "its own for each"
                )
        if self.wire is not None:
            made = self._wire_memory(view, where, self.wire)
            self.after.append(_converted("leave", view, made, self.wire))
            return made
        packed = self._like(view, where)
        # What is not written by this rank stays as it is.
        self.before.append(_between("pack", view, packed))
        self.after.append(_between("unpack", view, packed))
        return packed

    def fill(self, view: DeviceView | None, value: bytes) -> None:
        """Give all elements the value, behind the operation. ``view`` is what ``target`` gave."""
        if view is not None and view.count:
            if self.wire is not None:  # a truth value
                value = bytes([any(value)])
            item = ITEM_BYTES[view.dtype]
            self.after.insert(0, ("fill", view.address, item, view.count, value))

    def _wire_memory(self, view: DeviceView, where: Where, wire: Conversion) -> DeviceView:
        return self._made((view.count * wire.form.wire_items,), wire.form.dtype, where)

    def _like(self, view: DeviceView, where: Where) -> DeviceView:
        return self._made(view.shape, view.dtype, where)

    def _made(self, shape: tuple[int, ...], dtype: int, where: Where) -> DeviceView:
        memory = where.framework.empty(where.x, shape, dtype)
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


def _converted(kind: str, view: DeviceView, made: DeviceView, wire: Conversion) -> Copy:
    item = ITEM_BYTES[view.dtype]
    shape, strides = view.shape, view.strides
    if strides is None:
        shape, strides = (view.count,), (item,)
    where = (view.address, shape, strides)
    return (kind, made.address, item, *where, wire.dtype, wire.op, wire.ranks)


def _between(kind: str, view: DeviceView, packed: DeviceView) -> Copy:
    strides = view.strides
    return (kind, packed.address, ITEM_BYTES[view.dtype], view.address, view.shape, strides)
