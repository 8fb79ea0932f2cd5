"""Objects of which pycoll knows nothing but that they export themselves by DLPack.

One class may have arrays on the host and on CUDA devices, so each object is asked where it is.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays import NUMPY, Framework, Shape
from pycoll.device_arrays import LEGACY_STREAM, CudaInterface
from pycoll.device_view import DeviceView
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType, numpy_dtype

#: DLPack's word for an exporter that is to wait for nothing.
_NO_ORDER = -1
#: DLPack's numbers for memory of CUDA devices: their own, and what CUDA moves to and fro.
_CUDA_TYPES = (2, 13)


class DLPack:
    """Results come back through the object's own array namespace, where it has one."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        """The elements; those on the host in C order."""
        return _row_of(x).view(x, name)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """The memory as it is."""
        return _row_of(out).out(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """New memory where ``like`` is."""
        return _row_of(like).empty(like, shape, dtype)

    def result(self, memory: Any) -> _core.BufferView:
        """The memory of what ``empty`` gave."""
        return _row_of(memory).out(memory, "the result")

    def finish(self, like: Any, memory: Any) -> Any:
        """The result as the caller's type."""
        if not isinstance(memory, np.ndarray):
            return memory
        namespace = getattr(like, "__array_namespace__", None)
        try:
            return memory if namespace is None else namespace().from_dlpack(memory)
        except (BufferError, TypeError, ValueError):
            return memory  # a type that NumPy cannot export: bfloat16 and the 8-bit floats

    def stream(self, x: Any) -> int:
        """The stream that work on ``x`` is ordered on: DLPack knows no current one."""
        if _is_on_cuda(x):
            return LEGACY_STREAM
        raise InvalidArgumentError(
            "x is in host memory, but the other ranks' arrays or out are on a device: pass arrays "
            "alike"
        )


class _OnDevice(CudaInterface):
    """Whatever exports itself by DLPack alone, from a CUDA device.

    The exporter is first asked for its memory, and to wait for nothing; when an operation knows its
    stream, for that stream, which it then makes wait for its own.
    """

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """New memory on the device of ``like``."""
        make = getattr(like, "__array_namespace__", None)
        if make is None:
            return super().empty(like, shape, dtype)  # which says so
        namespace = make()
        named = getattr(namespace, DType(dtype).word, None)
        words = {"device": like.device} if hasattr(like, "device") else {}
        return namespace.empty(shape, dtype=numpy_dtype(dtype) if named is None else named, **words)

    def stream(self, x: Any) -> int:
        """DLPack knows no current stream."""
        return LEGACY_STREAM

    def _look(self, x: Any, name: str) -> DeviceView:
        capsule = _capsule_of(x, name, _NO_ORDER)
        address, shape, strides, dtype, writable, owner, ordinal = _core.device_tensor(
            capsule, name
        )
        order = functools.partial(_order_by_dlpack, x, name)
        return DeviceView(
            name, address, shape, strides, dtype, writable, (x, owner), ordinal, order
        )


def _is_on_cuda(x: Any) -> bool:
    """Whether an object that has ``__dlpack__`` says that it is on a CUDA device."""
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in _CUDA_TYPES


def _capsule_of(x: Any, name: str, stream: int) -> Any:
    try:
        try:
            return x.__dlpack__(stream=stream, max_version=(1, 0))
        except TypeError:  # an exporter of version 0 does not know the word
            return x.__dlpack__(stream=stream)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(f"{name} cannot be exported through DLPack: {error}") from None


def _order_by_dlpack(x: Any, name: str, stream: int) -> None:
    # The protocol has no stream 0. What is given is given back at once.
    _core.device_tensor(_capsule_of(x, name, stream or LEGACY_STREAM), name)


_DEVICE = _OnDevice()


def _row_of(x: Any) -> Framework:
    return NUMPY if isinstance(x, np.ndarray) or not _is_on_cuda(x) else _DEVICE
