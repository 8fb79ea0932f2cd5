"""Arrays of unknown frameworks that export their memory through DLPack.

One class may have arrays on the host and on CUDA devices, so this module asks each object for its
device.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_arrays import LEGACY_STREAM, CudaInterface
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.host_arrays import NUMPY, Framework, Shape
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType, numpy_dtype

#: DLPack's stream number that makes the exporter wait for nothing.
_NO_ORDER = -1
#: DLPack's numbers for memory of CUDA devices: device memory and managed memory.
_CUDA_TYPES = (2, 13)


class DLPack:
    """Objects with ``__dlpack__``. Their array namespace, if they have one, makes the results."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements; on the host in C order."""
        return _row_of(x).view(x, name)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Return the memory of ``out``, in its own order."""
        return _row_of(out).out(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new array on the device of ``like``, or in host memory."""
        return _row_of(like).empty(like, shape, dtype)

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of an array from ``empty``."""
        return _row_of(memory).out(memory, "the result")

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the array from ``empty`` as the caller's type, or as a NumPy array."""
        if not isinstance(memory, np.ndarray):
            return memory
        namespace = getattr(like, "__array_namespace__", None)
        try:
            return memory if namespace is None else namespace().from_dlpack(memory)
        except (BufferError, TypeError, ValueError):
            return memory  # a type that NumPy cannot export: bfloat16 and the 8-bit floats

    def stream(self, x: Any) -> int:
        """Return the default stream: DLPack has no current one. Raise for arrays on the host."""
        if _is_on_cuda(x):
            return LEGACY_STREAM
        raise InvalidArgumentError(
            "x is in host memory, but the other ranks' arrays or out are on a device: pass all "
            "arrays in host memory, or all on devices"
        )


class _OnDevice(CudaInterface):
    """Arrays on a CUDA device that export their memory only through DLPack.

    The first export asks for the memory without any order of streams. When the operation knows its
    stream, a second export makes that stream wait for the exporter's.
    """

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new array on the device of ``like``."""
        make = getattr(like, "__array_namespace__", None)
        if make is None:
            return super().empty(like, shape, dtype)  # raises the error
        namespace = make()
        named = getattr(namespace, DType(dtype).word, None)
        words = {"device": like.device} if hasattr(like, "device") else {}
        return namespace.empty(shape, dtype=numpy_dtype(dtype) if named is None else named, **words)

    def stream(self, x: Any) -> int:
        """Return the default stream: DLPack has no current one."""
        return LEGACY_STREAM

    def _look(self, x: Any, name: str) -> DeviceView:
        capsule = _capsule_of(x, name, _NO_ORDER)
        address, shape, strides, dtype, writable, owner, ordinal = _core.device_tensor(
            capsule, name
        )
        order = functools.partial(_order_by_dlpack, x, name)
        return DeviceView(
            name,
            address,
            shape,
            strides,
            dtype,
            writable=writable,
            owner=(x, owner),
            ordinal=ordinal,
            order=order,
        )


def _is_on_cuda(x: Any) -> bool:
    """Return whether an object with ``__dlpack__`` is on a CUDA device."""
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in _CUDA_TYPES


def _capsule_of(x: Any, name: str, stream: int) -> Any:
    try:
        try:
            return x.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # an exporter of version 0 does not have max_version
            return x.__dlpack__(stream=stream)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} cannot be exported through DLPack: {error}") from None


def _order_by_dlpack(x: Any, name: str, stream: int) -> None:
    # The protocol has no stream 0. The exported tensor is released at once.
    _core.device_tensor(_capsule_of(x, name, stream or LEGACY_STREAM), name)


_DEVICE = _OnDevice()


def _row_of(x: Any) -> Framework:
    return NUMPY if isinstance(x, np.ndarray) or not _is_on_cuda(x) else _DEVICE
