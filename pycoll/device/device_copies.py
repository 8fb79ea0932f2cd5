"""Copies for device arrays that are not in C order, or whose elements have a wire form.

A kernel packs such an array before the operation and unpacks it after the operation, in the
operation's own stream. csrc/kernels/wire.h defines the wire forms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError
from pycoll.ops import Reduction
from pycoll.types import ITEM_BYTES, LOCATION, ReduceOp, WireForm, wire_form

#: Arguments of the copy kernel: its kind, packed memory, bytes of an element, and the kind's own;
#: or those of a step of a codec (bindings/device/device.h).
Copy = tuple[Any, ...]

#: The reduction that combines elements in their wire form.
_STEPS = {
    ReduceOp.AVG: ReduceOp.SUM,
    ReduceOp.LAND: ReduceOp.BAND,
    ReduceOp.LOR: ReduceOp.BOR,
    ReduceOp.LXOR: ReduceOp.BXOR,
}


class Conversion(NamedTuple):
    """The wire form of elements of ``dtype`` for ``op`` among ``ranks`` ranks."""

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
        """A number that differs between operations of the same wire form."""
        return (self.dtype << 8 | self.op) << 40


def conversion(dtype: int, reduction: Reduction | None, ranks: int) -> Conversion | None:
    """Return the wire form, or None if there is none; InvalidArgumentError for pairs."""
    if reduction is None or (ranks == 1 and reduction.code is ReduceOp.AVG):
        return None
    if reduction.code in LOCATION:
        raise InvalidArgumentError(
            f"op {reduction.name!r} is for arrays in host memory: copy the pairs there"
        )
    form = wire_form(dtype, reduction.code)
    return None if form is None else Conversion(form, dtype, reduction.code, ranks)


class Copies:
    """The copies of one operation; ``memory`` holds their arrays until they have run."""

    def __init__(self, wire: Conversion | None = None) -> None:
        self.wire = wire
        self.before: list[Copy] = []
        self.after: list[Copy] = []
        self.memory: list[Any] = []

    def source(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """Return memory that holds the elements in C order or wire form when the operation runs."""
        if view is not None and self.wire is not None and view.count:
            made = self._wire_memory(view, where, self.wire)
            self.before.append(_conversion("enter", view, made, self.wire))
            return made
        if view is None or view.contiguous or not view.count:
            return view
        packed = self._like(view, where)
        self.before.append(_strided_copy("pack", view, packed))
        return packed

    def target(self, view: DeviceView | None, where: Where) -> DeviceView | None:
        """Return memory in C order or wire form that is copied to the view after the operation."""
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
            self.after.append(_conversion("leave", view, made, self.wire))
            return made
        packed = self._like(view, where)
        # Elements that this rank does not write keep their values.
        self.before.append(_strided_copy("pack", view, packed))
        self.after.append(_strided_copy("unpack", view, packed))
        return packed

    def fill(self, view: DeviceView | None, value: bytes) -> None:
        """Store the value in all elements after the operation. ``view`` comes from ``target``."""
        if view is not None and view.count:
            if self.wire is not None:  # a truth value
                value = bytes([any(value)])
            item = ITEM_BYTES[view.dtype]
            self.after.insert(0, ("fill", view.address, item, view.count, value))

    def _wire_memory(self, view: DeviceView, where: Where, wire: Conversion) -> DeviceView:
        return self.memory_for((view.count * wire.form.wire_items,), wire.form.dtype, where)

    def _like(self, view: DeviceView, where: Where) -> DeviceView:
        return self.memory_for(view.shape, view.dtype, where)

    def memory_for(self, shape: tuple[int, ...], dtype: int, where: Where) -> DeviceView:
        """Return new memory, which is kept until the operation has run."""
        memory = where.framework.empty(where.x, shape, dtype)
        self.memory.append(memory)
        made = where.framework.result(memory)
        assert isinstance(made, DeviceView)  # x is on a device, so a new array like it is, too
        return made


def order_memory(native: _core.DeviceCommunicator, where: Where, stream: int) -> None:
    """Let the stream of the operation wait for earlier uses of newly allocated memory.

    Allocators give memory for use on their current stream, which may differ from ``stream``.
    """
    current = int(where.framework.stream(where.x))
    if where.stream is not None and current != stream:
        native.join(native.mark(current), stream)


def _conversion(kind: str, view: DeviceView, made: DeviceView, wire: Conversion) -> Copy:
    item = ITEM_BYTES[view.dtype]
    shape, strides = view.shape, view.strides
    if strides is None:
        shape, strides = (view.count,), (item,)
    where = (view.address, shape, strides)
    return (kind, made.address, item, *where, wire.dtype, wire.op, wire.ranks)


def _strided_copy(kind: str, view: DeviceView, packed: DeviceView) -> Copy:
    strides = view.strides
    return (kind, packed.address, ITEM_BYTES[view.dtype], view.address, view.shape, strides)
