"""What pycoll sees of JAX on a CUDA device, without JAX: arrays that are made on a stream which
nobody else knows, and a stream for events from outside, which that one waits for.

The names are JAX's, by which pycoll knows its arrays. As there, ``from_dlpack`` asks for an export
that is ready on the stream for events, and takes the elements for ready when that stream is there.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from dlpack_arrays import Exported

from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream

#: For events from outside, by the stream of the rank's computations.
_externals: dict[int, Stream] = {}


def _external() -> Stream:
    """Of this thread, which is a rank."""
    number = _computing().number
    if number not in _externals:
        _externals[number] = Stream()
    return _externals[number]


class Event:
    """What a stream holds now."""

    def __init__(self, stream: int) -> None:
        self.handle = ctypes.c_void_p()
        cuda.driver().call("cuEventCreate", ctypes.byref(self.handle), 2)
        cuda.driver().call("cuEventRecord", self.handle, ctypes.c_void_p(stream))

    def hold(self, stream: int) -> None:
        """Let the stream wait for it."""
        cuda.driver().call("cuStreamWaitEvent", ctypes.c_void_p(stream), self.handle, 0)


def _computing() -> Stream:
    stream = cuda.current()
    assert stream is not None
    return stream


class Device(NamedTuple):
    """Some attributes of jax.Device."""

    id: int = 0
    platform: str = "gpu"

    def get_stream_for_external_ready_events(self) -> int:
        return _external().number


class _Namespace:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, device: Device) -> ArrayImpl:
        assert device == Device()
        return ArrayImpl(np.zeros(shape, dtype))

    @staticmethod
    def from_dlpack(other: ArrayImpl) -> ArrayImpl:
        external = _external().number
        other.__dlpack__(stream=external)
        return ArrayImpl(other.exported, ready=Event(external))


class ArrayImpl:
    """An array on a device; only who uses it waits until it is there."""

    def __init__(
        self, values: Any, devices: tuple[Device, ...] = (Device(),), ready: Event | None = None
    ) -> None:
        self.exported = values if isinstance(values, Exported) else Exported(values)
        self.placed = set(devices)
        self.ready = Event(_computing().number) if ready is None else ready

    def devices(self) -> set[Device]:
        return self.placed

    @property
    def shape(self) -> tuple[int, ...]:
        return self.exported.values.shape

    def __array_namespace__(self) -> Any:
        return _Namespace

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        """Without a stream it waits for nothing; -1 would be a handle to JAX, and a bad one."""
        assert stream != -1
        if stream is not None:
            self.ready.hold(stream)
        return self.exported.__dlpack__(stream=stream or 0)

    def get(self) -> np.ndarray[Any, Any]:
        self.ready.hold(_computing().number)
        return self.exported.get()


ArrayImpl.__module__ = "jaxlib.stand_in"


def install() -> None:
    """Be the module jax of this process: one that has x64, so no type is narrowed."""
    jax = ModuleType("jax")
    jax.dtypes = SimpleNamespace(canonicalize_dtype=np.dtype)  # type: ignore[attr-defined]
    sys.modules["jax"] = jax
