"""The least that a framework of device arrays is, over libcuda.so.1 alone: for figures and tests.

Its arrays say so by ``__cuda_array_interface__``, and its allocator does what CuPy's and torch's
do: memory that is let go is used again at once, for it belongs to the stream on which it was made.
So an operation that runs beside that stream on memory that nobody holds is found out.
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
    """A call of the driver that failed."""


class Driver:
    """libcuda.so.1; every call raises DriverError with the driver's name for what failed."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self.contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. DriverError with the driver's name for what failed."""
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
        """How many devices this process sees."""
        number = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value


_driver: Driver | None = None
_local = threading.local()
_lock = threading.Lock()
#: Free memory by device, stream and bytes.
_free: dict[tuple[int, int, int], list[int]] = defaultdict(list)
#: What has become free since: arrays may be collected at any time, while the lock is held too.
_collected: deque[tuple[tuple[int, int, int], int]] = deque()
#: Arrays of up to so many bytes are parts of larger memory, made when the first of a device is: to
#: allocate may wait for kernels that run, and those for ranks that have yet to call.
_SMALL = 1 << 20
_SLAB = 1 << 25
#: By device: the next free address, and the end.
_slabs: dict[int, tuple[int, int]] = {}


def driver() -> Driver:
    """The driver, opened once. OSError where there is none."""
    with _lock:
        return _opened()


def _opened() -> Driver:
    """Requires: the lock is held, or some driver() has returned."""
    global _driver  # noqa: PLW0603 : one library per process
    if _driver is None:
        _driver = Driver()
    return _driver


class Stream:
    """A stream; as a context manager the current one of this thread."""

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
        """Block the host until all that the stream holds has run."""
        driver().use(self.ordinal)
        driver().call("cuStreamSynchronize", ctypes.c_void_p(self.number))

    @contextmanager
    def capture(self, mode: int = 1) -> Iterator[Graph]:
        """What is enqueued inside becomes the graph."""
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
        # Another thread's capture in the global mode forbids this call in all modes but the
        # relaxed one.
        relaxed = ctypes.c_int(2)
        driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))
        flags = ctypes.c_ulonglong(0)
        driver().call("cuGraphInstantiateWithFlags", ctypes.byref(graph.made), made, flags)
        driver().call("cuThreadExchangeStreamCaptureMode", ctypes.byref(relaxed))


class Graph:
    """A captured stream, to be launched any number of times."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.made = ctypes.c_void_p()

    def launch(self) -> None:
        """Put it at the end of its stream."""
        driver().use(self.stream.ordinal)
        driver().call("cuGraphLaunch", self.made, ctypes.c_void_p(self.stream.number))


def current() -> Stream | None:
    """The current stream of this thread."""
    return getattr(_local, "stream", None)


class Clock:
    """Time between two places of a stream, by the device."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        driver().use(stream.ordinal)
        for event in self._events:
            driver().call("cuEventCreate", ctypes.byref(event), 0)

    def start(self) -> None:
        """The first place is here."""
        self._record(0)

    def stop(self) -> float:
        """Seconds from the first place to here; waits until the device has come here."""
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


def _allocated(ordinal: int, nbytes: int) -> int:
    address = ctypes.c_uint64()
    _opened().use(ordinal)
    _opened().call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
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
            return _allocated(self.device, self.nbytes)
        with _lock:
            first, end = _slabs.get(self.device, (0, 0))
            if end - first < self.nbytes:
                first = _allocated(self.device, _SLAB)
                end = first + _SLAB
            _slabs[self.device] = first + -(-self.nbytes // 512) * 512, end
        return first

    def __del__(self) -> None:
        if self.address:
            _collected.append((self._key, self.address))

    def free(self) -> None:
        """Back to the driver."""
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
        """Copy from the host, in the current stream."""
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
        """Copy to the host, behind all that the current stream holds."""
        data = np.empty(self.shape, self.dtype)
        stream = current() or self.stream
        # A copy to pageable memory waits inside the driver and may hold other threads up, whose
        # launches this stream's kernels wait for.
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
    """Copy on the device, in the current stream."""
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
    """Bytes per second that the current stream's device copies, counted read and written."""
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
    """Bytes per second that the driver copies from the current stream's device to that one."""
    stream = current()
    assert stream is not None, "no stream is current"
    source, target = Array((nbytes,), np.uint8), Array((nbytes,), np.uint8, peer)
    driver().use(stream.ordinal)
    # Without it the driver goes by way of the host; where it is refused, nobody has another way.
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
    """The values on the current stream's device."""
    data = np.asarray(values)
    return Array(data.shape, data.dtype).put(data)
