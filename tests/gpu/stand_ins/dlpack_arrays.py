"""An array of which others know nothing but DLPack, with the notes of what it was asked for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import array


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
#: Tensors that were exported and not yet released, by address.
_exposed: dict[int, Any] = {}


@_DELETER
def _give_back(address: int) -> None:
    del _exposed[address]


def exposed() -> int:
    """How many tensors have not come back."""
    return len(_exposed)


class _Namespace:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, device: int) -> Exported:
        assert device == 0
        return Exported(np.zeros(shape, dtype))


class Exported:
    """Elements on a device behind ``skip`` others, made on the current stream."""

    def __init__(self, values: Any, skip: int = 0, refuses: bool = False) -> None:
        self.values = np.asarray(values)
        self.skip = skip
        self.refuses = refuses
        flat = np.concatenate([np.zeros(skip, self.values.dtype), self.values.ravel()])
        self.memory = array(flat)
        self.device = 0
        self.streams: list[int] = []

    def __array_namespace__(self) -> Any:
        return _Namespace

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, stream: int | None = None) -> Any:
        if self.refuses:
            raise BufferError("it is not mine to give")
        assert stream is not None
        self.streams.append(stream)
        tensor = _Tensor()
        dtype, ndim = self.values.dtype, self.values.ndim
        tensor.data = self.memory.address
        tensor.device_type, tensor.device_id = self.__dlpack_device__()
        tensor.ndim, tensor.lanes = ndim, 1
        tensor.code, tensor.bits = _CODES[dtype.kind], 8 * dtype.itemsize
        shape = (ctypes.c_int64 * max(1, ndim))(*self.values.shape)
        tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        tensor.byte_offset = self.skip * dtype.itemsize
        tensor.deleter = ctypes.cast(_give_back, ctypes.c_void_p).value
        address = ctypes.addressof(tensor)
        _exposed[address] = (tensor, shape, self.memory)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(address, b"dltensor", None)

    def get(self) -> np.ndarray[Any, Any]:
        """Copy to the host, behind all that the current stream holds."""
        stream = cuda.current()
        assert stream is not None
        return self.memory.get()[self.skip :].reshape(self.values.shape)
