"""Memory and streams of devices. The host only names them to kernels and never accesses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.types import ITEM_BYTES, DType

Shape = tuple[int, ...]

#: Types by NumPy's name; CuPy and Numba use the same names. The float8_e4m3 of ml_dtypes is a
#: different type, so pycoll's FLOAT8_E4M3 is "float8_e4m3fn" here.
_BY_NAME = {{"float8_e4m3": "float8_e4m3fn"}.get(one.word, one.word): one for one in DType}


class DeviceView:
    """A view of device memory, with the attributes of ``_core.BufferView`` but without access.

    It takes the place of a BufferView on the common path (see ``stand_in``). Native code that reads
    host memory takes only BufferViews, and refuses it. It keeps ``owner`` alive.
    """

    __slots__ = (
        "address",
        "contiguous",
        "count",
        "dtype",
        "nbytes",
        "order",
        "ordinal",
        "owner",
        "shape",
        "strides",
        "writable",
    )

    def __init__(
        self,
        name: str,
        address: int,
        shape: Shape,
        strides: Shape | None,
        dtype: int,
        *,
        writable: bool,
        owner: Any,
        ordinal: int | None = None,
        order: Callable[[int], None] | None = None,
    ) -> None:
        """Make a view. Raise InvalidArgumentError, which names ``name``, for bad memory.

        ``strides``: in bytes. ``order``: a function that makes a stream wait for the work that
        writes or reads the elements; the operation calls it with its stream.

        ``ordinal``: the device, or None. The constructor asks the driver for the device anyway,
        since only the driver knows which memory was freed. An array without elements may have no
        device.
        """
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.writable = writable
        self.owner = owner
        self.count = math.prod(shape)
        self.nbytes = self.count * ITEM_BYTES[dtype]
        self.contiguous = strides is None or _in_c_order(shape, strides, ITEM_BYTES[dtype])
        #: In bytes; None in C order.
        self.strides = None if self.contiguous else strides
        self.order = order
        self.ordinal = ordinal
        if self.count:
            self.ordinal = _core.device_of(address, name)

    @property
    def device(self) -> str:
        """The device as a text, such as "cuda:0"."""
        return f"cuda:{0 if self.ordinal is None else self.ordinal}"

    def overlap(self, other: Any) -> int:
        """Return 0 if no byte is common, 1 for exactly the same memory, 2 for a partial overlap.

        The result is also 0 where one view is not contiguous; the operation then works on a copy.
        """
        if not isinstance(other, DeviceView) or not self.nbytes or not other.nbytes:
            return 0
        if not (self.contiguous and other.contiguous):
            return 0
        if self.address == other.address and self.nbytes == other.nbytes:
            return 1
        apart = (
            self.address + self.nbytes <= other.address
            or other.address + other.nbytes <= self.address
        )
        return 0 if apart else 2


def stand_in(view: DeviceView) -> _core.BufferView:
    """Return the view, typed as a BufferView: the common path uses only their shared attributes."""
    return cast("_core.BufferView", view)


def dtype_of(name: str, dtype: Any) -> DType:
    """Return the type that NumPy calls ``dtype``. InvalidArgumentError names the argument."""
    found = _BY_NAME.get(str(dtype))
    if found is None:
        raise InvalidArgumentError(
            f"{name} has dtype {dtype}, which pycoll cannot move; it moves {', '.join(_BY_NAME)}"
        )
    return found


def view_of_interface(x: Any, name: str, ordinal: int | None = None) -> DeviceView:
    """Return a view of ``__cuda_array_interface__``, version 3 or 2."""
    facts = x.__cuda_array_interface__
    if facts.get("mask") is not None:
        raise InvalidArgumentError(f"{name} is a masked array, whose mask pycoll cannot move")
    address, is_read_only = facts["data"]
    typestr = facts["typestr"]
    if typestr[0] == ">":
        raise InvalidArgumentError(f"{name} has dtype {typestr} in foreign byte order")
    dtype = getattr(x, "dtype", None)
    return DeviceView(
        name,
        int(address or 0),
        tuple(int(n) for n in facts["shape"]),
        facts.get("strides"),
        dtype_of(name, np.dtype(typestr) if dtype is None else dtype),
        writable=not is_read_only,
        owner=x,
        ordinal=ordinal,
    )


def _in_c_order(shape: Shape, strides: Shape, item: int) -> bool:
    expected = item
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length == 0:
            return True
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


class Where(NamedTuple):
    """The stream of a call: the caller's ``stream``, or the current one of the framework of x."""

    framework: Any
    x: Any
    stream: Any

    def handle(self) -> int:
        """Return the driver's handle. Raise InvalidArgumentError if x is in host memory."""
        if self.stream is not None:
            return stream_handle(self.stream)
        current = getattr(self.framework, "stream", None)
        if current is None:
            raise InvalidArgumentError(
                "x is in host memory, but the other ranks' arrays or out are on a device: pass all "
                "arrays in host memory, or all on devices"
            )
        return int(current(self.x))

    @property
    def is_foreign(self) -> bool:
        """Whether the framework's allocator does not know the streams of operations."""
        return bool(getattr(self.framework, "hands_on", False))

    def hands_on(self) -> int | None:
        """Return the stream that must wait for ``stream=`` before the framework sees results.

        None where no wait is needed. With most frameworks the caller orders the streams itself.
        """
        if self.stream is None or not self.is_foreign:
            return None
        current = int(self.framework.stream(self.x))
        return None if current == self.handle() else current

    def need_none(self, name: str = "x") -> None:
        """Raise InvalidArgumentError if the caller passed a stream with an array in host memory."""
        if self.stream is not None:
            raise InvalidArgumentError(
                f"stream is for device arrays, but {name} is in host memory: omit it"
            )


def stream_handle(stream: Any) -> int:
    """Return the handle of a stream of any framework, or raise InvalidArgumentError."""
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    for attribute in ("cuda_stream", "ptr", "handle"):
        value = getattr(stream, attribute, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    raise InvalidArgumentError(
        f"stream is {stream!r}: expected a stream of torch, CuPy or Numba, an object with "
        "__cuda_stream__, or a handle as a number"
    )
