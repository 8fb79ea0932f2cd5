"""A minimal framework of device arrays over libcuda.so.1 alone, for benchmarks and tests.

Its arrays export ``__cuda_array_interface__``. Its allocator works like those of CuPy and torch:
freed memory belongs to the stream on which it was made, and the next array of that stream uses it
at once. So a test can detect an operation that runs on another stream and still uses memory whose
array has been freed.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt


class DriverError(RuntimeError):
    """A failed call of the driver."""


class Driver:
    """libcuda.so.1. Every call raises DriverError with the driver's name of the error."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises DriverError with the driver's name of the error."""
        error = getattr(self.library, name)(*arguments)
        if error:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(error, ctypes.byref(text))
            raise DriverError(f"{name}: {error} {(text.value or b'?').decode()}")

    def use(self, ordinal: int) -> None:
        """Make the device's primary context current on this thread."""
        if ordinal not in self.contexts:
            context = ctypes.c_void_p()
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self.contexts[ordinal] = context
        self.call("cuCtxSetCurrent", self.contexts[ordinal])

    def count(self) -> int:
        """Return the number of devices that this process sees."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value


_driver: Driver | None = None
_local = threading.local()
_lock = threading.Lock()
#: Addresses of free memory by device, stream and bytes. The lock guards it.
_free: dict[tuple[int, int, int], list[int]] = defaultdict(list)
#: Memory of collected arrays that is not in `_free` yet. The garbage collector may run __del__ at
#: any time, also while the lock is held, so __del__ takes no lock.
_collected: deque[tuple[tuple[int, int, int], int]] = deque()
#: Arrays of up to this many bytes are parts of slabs of `_SLAB` bytes. An allocation may wait for
#: running kernels, and these may wait for ranks that have not called yet.
_SMALL = 1 << 20
_SLAB = 1 << 25
#: By device: the next free address, and the end.
_slabs: dict[int, tuple[int, int]] = {}


def driver() -> Driver:
    """Return the driver, which is opened once. Raises OSError if there is none."""
    with _lock:
        return _open_driver()


def _open_driver() -> Driver:
    """Requires: the lock is held, or some driver() has returned."""
    global _driver  # noqa: PLW0603 : one library per process
    if _driver is None:
        _driver = Driver()
    return _driver


class Stream:
    """A stream. As a context manager it makes itself the current stream of this thread."""

    def __init__(self, ordinal: int = 0) -> None:
        handle = ctypes.c_void_p()
        driver().use(ordinal)
        driver().call("cuStreamCreate", ctypes.byref(handle), 1)
        self.ordinal = ordinal
        self.number = int(handle.value or 0)
        self._before: Stream | None = None

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.number

    def __enter__(self) -> Stream:
        driver().use(self.ordinal)
        self._before = current()
        _local.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _local.stream = self._before

    def synchronize(self) -> None:
        """Block the host until all work of the stream has run."""
        driver().use(self.ordinal)
        driver().call("cuStreamSynchronize", ctypes.c_void_p(self.number))

    @contextmanager
    def capture(self, mode: int = 1) -> Iterator[Graph]:
        """Capture the work that is enqueued within the context into the graph that it yields."""
        graph = Graph(self)
        driver().call("cuStreamBeginCapture_v2", ctypes.c_void_p(self.number), mode)
        made = ctypes.c_void_p()
        try:
            yield graph
        finally:
            error = driver().library.cuStreamEndCapture(
                ctypes.c_void_p(self.number), ctypes.byref(made)
            )
        if error:
            raise DriverError(f"cuStreamEndCapture: {error}")
        # While another thread captures in global mode, this call is allowed in relaxed mode only.
        relaxed = ctypes.c_int(2)
        driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
        flags = ctypes.c_ulonglong(0)
        driver().call("cuGraphInstantiateWithFlags", ctypes.byref(graph.made), made, flags)
        driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))


class Graph:
    """A captured stream, which can be launched any number of times."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.made = ctypes.c_void_p()

    def launch(self) -> None:
        """Enqueue the graph on its stream."""
        driver().use(self.stream.ordinal)
        driver().call("cuGraphLaunch", self.made, ctypes.c_void_p(self.stream.number))


def current() -> Stream | None:
    """Return the current stream of this thread, or None."""
    return getattr(_local, "stream", None)


class Clock:
    """Measures the time between two places of a stream, by events of the device."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        driver().use(stream.ordinal)
        for event in self._events:
            driver().call("cuEventCreate", ctypes.byref(event), 0)

    def start(self) -> None:
        """Mark the first place."""
        self._record(0)

    def stop(self) -> float:
        """Mark the second place, wait until the device has reached it, and return the seconds since
        the first place."""
        self._record(1)
        driver().call("cuEventSynchronize", self._events[1])
        milliseconds = ctypes.c_float()
        driver().call("cuEventElapsedTime", ctypes.byref(milliseconds), *self._events)
        return milliseconds.value * 1e-3

    def _record(self, which: int) -> None:
        driver().use(self._stream.ordinal)
        driver().call("cuEventRecord", self._events[which], ctypes.c_void_p(self._stream.number))

    def __del__(self) -> None:
        for event in self._events:
            driver().library.cuEventDestroy_v2(event)


def _allocate(ordinal: int, nbytes: int) -> int:
    address = ctypes.c_uint64()
    _open_driver().use(ordinal)
    _open_driver().call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    return address.value


class _Namespace:
    @staticmethod
    def empty(shape: tuple[int, ...], dtype: Any, device: int) -> Array:
        return Array(shape, dtype, device)


class Array:
    """Elements on a device, in C order, made on the current stream."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, ordinal: int | None = None) -> None:
        stream = current()
        assert stream is not None, "no stream is current"
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.device = stream.ordinal if ordinal is None else ordinal
        self.stream = stream
        self.nbytes = math.prod(shape) * self.dtype.itemsize
        self._key = (self.device, stream.number, self.nbytes)
        self.address = 0
        with _lock:
            while _collected:
                key, address = _collected.popleft()
                _free[key].append(address)
            found = _free[self._key].pop() if _free[self._key] else 0
        self.address = found or self._allocate()

    def _allocate(self) -> int:
        if not self.nbytes:
            return 0
        if self.nbytes > _SMALL:
            return _allocate(self.device, self.nbytes)
        with _lock:
            first, end = _slabs.get(self.device, (0, 0))
            if end - first < self.nbytes:
                first = _allocate(self.device, _SLAB)
                end = first + _SLAB
            _slabs[self.device] = first + -(-self.nbytes // 512) * 512, end
        return first

    def __del__(self) -> None:
        if self.address:
            _collected.append((self._key, self.address))

    def free(self) -> None:
        """Return the memory to the driver."""
        driver().use(self.device)
        driver().call("cuMemFree_v2", ctypes.c_uint64(self.address))
        self._key = (-1, 0, 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = current() or self.stream
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "stream": stream.number,
        }

    def __array_namespace__(self) -> Any:
        return _Namespace

    def put(self, values: Any) -> Array:
        """Copy ``values`` from the host, on the current stream. Returns the array itself."""
        data = np.ascontiguousarray(values, self.dtype)
        assert data.shape == self.shape
        stream = current() or self.stream
        driver().use(self.device)
        if self.nbytes:
            driver().call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(self.address),
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_size_t(self.nbytes),
                ctypes.c_void_p(stream.number),
            )
        return self

    def get(self) -> npt.NDArray[Any]:
        """Copy to the host, after all work of the current stream."""
        data = np.empty(self.shape, self.dtype)
        stream = current() or self.stream
        # A copy to pageable memory waits inside the driver and may block other threads there. If
        # this stream's kernels wait for launches of those threads, that would be a deadlock.
        stream.synchronize()
        if self.nbytes:
            driver().call(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(data.ctypes.data),
                ctypes.c_uint64(self.address),
                ctypes.c_size_t(self.nbytes),
                ctypes.c_void_p(stream.number),
            )
        stream.synchronize()
        return data


def copy(source: Array, target: Array) -> None:
    """Copy on the device, on the current stream."""
    stream = current() or target.stream
    driver().use(target.device)
    driver().call(
        "cuMemcpyDtoDAsync_v2",
        ctypes.c_uint64(target.address),
        ctypes.c_uint64(source.address),
        ctypes.c_size_t(target.nbytes),
        ctypes.c_void_p(stream.number),
    )


def copy_bandwidth(nbytes: int = 1 << 28, times: int = 10) -> float:
    """Return bytes per second of copies on the current stream's device, counted read and
    written."""
    stream = current()
    assert stream is not None, "no stream is current"
    source, target = Array((nbytes,), np.uint8), Array((nbytes,), np.uint8)
    clock = Clock(stream)
    copy(source, target)
    clock.start()
    for _ in range(times):
        copy(source, target)
    return 2 * nbytes * times / clock.stop()


def link_bandwidth(peer: int, nbytes: int = 1 << 28, times: int = 10) -> float:
    """Return bytes per second of the driver's copies from the current stream's device to device
    ``peer``."""
    stream = current()
    assert stream is not None, "no stream is current"
    source, target = Array((nbytes,), np.uint8), Array((nbytes,), np.uint8, peer)
    driver().use(stream.ordinal)
    # Without peer access the driver copies through the host. A refusal is ignored, since no faster
    # path exists then.
    driver().library.cuCtxEnablePeerAccess(driver().contexts[peer], 0)
    words = (
        ctypes.c_uint64(target.address),
        ctypes.c_uint64(source.address),
        ctypes.c_size_t(nbytes),
        ctypes.c_void_p(stream.number),
    )
    clock = Clock(stream)
    driver().call("cuMemcpyDtoDAsync_v2", *words)
    clock.start()
    for _ in range(times):
        driver().call("cuMemcpyDtoDAsync_v2", *words)
    return nbytes * times / clock.stop()


def array(values: Any) -> Array:
    """Make an array of the values on the current stream's device."""
    data = np.asarray(values)
    return Array(data.shape, data.dtype).put(data)
