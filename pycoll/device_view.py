"""Memory and streams of devices, as the host knows them: only named here, to kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.types import ITEM_BYTES, DType

Shape = tuple[int, ...]

#: By the name of NumPy's type; CuPy's and Numba's are NumPy's. What ml_dtypes calls float8_e4m3 is
#: another one.
_BY_NAME = {{"float8_e4m3": "float8_e4m3fn"}.get(one.word, one.word): one for one in DType}


class DeviceView:
    """What ``_core.BufferView`` is for the host, with the same attributes but for access.

    It stands where a BufferView does (see ``stand_in``); what would read memory on the host takes
    only BufferViews, and refuses it. ``owner`` is kept alive with it.
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
        writable: bool,
        owner: Any,
        ordinal: int | None = None,
        order: Callable[[int], None] | None = None,
    ) -> None:
        """``strides`` in bytes. InvalidArgumentError, about the argument ``name``, for bad memory.

        ``order``, if given, makes a stream wait for whatever made or reads the elements; the
        operation calls it with its own.

        ``ordinal`` is the device, if the caller knows; it is asked of the driver anyway, which
        knows what was freed. An array without elements may be nowhere.
        """
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.writable = writable
        self.owner = owner
        self.count = math.prod(shape)
        self.nbytes = self.count * ITEM_BYTES[dtype]
        self.contiguous = strides is None or _in_c_order(shape, strides, ITEM_BYTES[dtype])
        #: Bytes; None in C order.
        self.strides = None if self.contiguous else strides
        self.order = order
        self.ordinal = ordinal
        if self.count:
            self.ordinal = _core.device_of(address, name)

    @property
    def device(self) -> str:
        """ "cuda:0"."""
        return f"cuda:{0 if self.ordinal is None else self.ordinal}"

    def overlap(self, other: Any) -> int:
        """0: no byte in common; 1: exactly the same memory; 2: partly the same.

        0 too where one is not contiguous: then the operation works on a copy of it.
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
    """The view, for the type checker: the common path of collectives needs no more of it."""
    return cast("_core.BufferView", view)


def dtype_of(name: str, dtype: Any) -> DType:
    """The type that NumPy calls so. InvalidArgumentError about the argument ``name``."""
    found = _BY_NAME.get(str(dtype))
    if found is None:
        raise InvalidArgumentError(
            f"{name} has dtype {dtype}, which pycoll cannot move; it moves {', '.join(_BY_NAME)}"
        )
    return found


def view_of_interface(x: Any, name: str, ordinal: int | None = None) -> DeviceView:
    """By ``__cuda_array_interface__``, version 3; what it lacks of version 3 is as in version 2."""
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
        not is_read_only,
        x,
        ordinal,
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
    """The stream of a call: the caller's, or what the framework of ``x`` calls its current one."""

    framework: Any
    x: Any
    stream: Any

    def handle(self) -> int:
        """As the driver knows it."""
        if self.stream is not None:
            return stream_handle(self.stream)
        current = getattr(self.framework, "stream", None)
        if current is None:
            raise InvalidArgumentError(
                "x is in host memory, but the other ranks' arrays or out are on a device: pass "
                "arrays alike"
            )
        return int(current(self.x))

    @property
    def is_foreign(self) -> bool:
        """Whether the framework's allocator knows of no stream that operations run in."""
        return bool(getattr(self.framework, "hands_on", False))

    def hands_on(self) -> int | None:
        """The stream that has to wait for ``stream=`` before the framework sees results; or None.

        Of most frameworks the caller sees to that.
        """
        if self.stream is None or not self.is_foreign:
            return None
        current = int(self.framework.stream(self.x))
        return None if current == self.handle() else current

    def need_none(self, name: str = "x") -> None:
        """For arrays in host memory."""
        if self.stream is not None:
            raise InvalidArgumentError(
                f"stream is for device arrays, but {name} is in host memory: leave it away"
            )


def stream_handle(stream: Any) -> int:
    """A stream of any framework as a number. InvalidArgumentError for anything else."""
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
