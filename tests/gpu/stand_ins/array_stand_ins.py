"""What pycoll sees of CuPy and of Numba, without them: their names, and each one's own streams.

CuPy has a current stream of its own, which the arrays' interface does not tell here, so that
whoever asks that gets the default stream. Numba's arrays have a stream each, and tell it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream

_local = threading.local()


class _OnDevice:
    """Elements in memory that was made on a stream."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> None:
        with stream:
            self._memory = cuda.Array(shape, dtype)
        self.shape, self.dtype = shape, np.dtype(dtype)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self._memory.__cuda_array_interface__, "stream": None}

    def put_in(self, stream: Stream, values: Any) -> None:
        with stream:
            self._memory.put(values)

    def get_in(self, stream: Stream) -> np.ndarray[Any, Any]:
        with stream:
            return self._memory.get()


class _CuPyDevice:
    id = 0

    def __enter__(self) -> None:
        _local.devices = getattr(_local, "devices", 0) + 1

    def __exit__(self, *_: object) -> None:
        _local.devices -= 1


class _CuPyStream:
    def __init__(self, stream: Stream) -> None:
        self.ptr = stream.number


class CuPyArray(_OnDevice):
    """cupy.ndarray"""

    device = _CuPyDevice()


class NumbaArray(_OnDevice):
    """numba.cuda.cudadrv.devicearray.DeviceNDArray"""

    def __init__(self, shape: tuple[int, ...], dtype: Any, stream: Stream) -> None:
        super().__init__(shape, dtype, stream)
        self.stream = stream

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "stream": self.stream.number}


CuPyArray.__module__, CuPyArray.__name__ = "cupy", "ndarray"
NumbaArray.__module__, NumbaArray.__name__ = "numba.cuda.cudadrv.devicearray", "DeviceNDArray"


def cupy_empty(shape: tuple[int, ...], dtype: Any) -> CuPyArray:
    """On the device that is current."""
    assert _local.devices > 0
    return CuPyArray(shape, dtype, _local.stream)


@contextmanager
def cupy_on(stream: Stream) -> Iterator[None]:
    """Make the stream CuPy's current one of this thread."""
    _local.stream = stream
    yield
    del _local.stream


def _get_current_stream(device: int) -> _CuPyStream:
    assert device == 0
    return _CuPyStream(_local.stream)


@contextmanager
def installed() -> Iterator[None]:
    """Both are modules that somebody has imported."""
    cupy, numba = ModuleType("cupy"), ModuleType("numba")
    cupy.__dict__.update(empty=cupy_empty, cuda=ModuleType("cupy.cuda"))
    cupy.cuda.__dict__["get_current_stream"] = _get_current_stream
    numba.__dict__["cuda"] = ModuleType("numba.cuda")
    numba.cuda.__dict__["device_array"] = NumbaArray
    before = {name: sys.modules.get(name) for name in ("cupy", "numba")}
    sys.modules.update(cupy=cupy, numba=numba)
    yield
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
