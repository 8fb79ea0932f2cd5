"""Ranks that are threads with a stream each, for the tests on device arrays."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import ThreadWorld

import pycoll
from pycoll import InvalidArgumentError, PycollError
from pycoll.tools.bench.cuda import Stream, array, driver


def on_stream(
    function: Callable[[pycoll.Communicator], Any],
    stream_of: Callable[[pycoll.Communicator], Stream] = lambda _: Stream(),
) -> Callable[..., Any]:
    """The function, with a stream of its own rank as the current one."""

    def run(comm: pycoll.Communicator) -> Any:
        stream = comm.__dict__.setdefault("_test_stream", None) or stream_of(comm)
        comm.__dict__["_test_stream"] = stream
        with stream:
            return function(comm)

    return run


def ranks_of(world: ThreadWorld, function: Callable[[pycoll.Communicator], Any]) -> list[Any]:
    return world.run(on_stream(function))


def text_of(call: Callable[[], Any]) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        call()
    return str(caught.value)


def failure_of(call: Callable[[], Any], seconds: float = 10) -> PycollError:
    """What a call raises, sooner or later."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            call()
        except PycollError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing is raised")


def leave_or_lose(comm: pycoll.Communicator) -> None:
    """Rank 1 closes its communicator; all others hear of it."""
    x = array(np.ones(4))
    comm.all_reduce(x)
    if comm.rank == 1:
        comm.close()
        return
    error = failure_of(comm.all_reduce(x, async_op=True).synchronize)
    assert isinstance(error, pycoll.PeerLostError)
    assert error.rank == 1


class Gate:
    """Holds streams up until it is opened."""

    _words: ctypes.c_void_p | None = None
    _next = itertools.count()

    def __init__(self) -> None:
        if Gate._words is None:
            words = ctypes.c_void_p()
            driver().use(0)
            driver().call("cuMemHostAlloc", ctypes.byref(words), ctypes.c_size_t(4096), 3)
            ctypes.memset(words, 0, 4096)
            Gate._words = words
        self._word = (Gate._words.value or 0) + 4 * next(Gate._next)

    def hold(self, stream: Stream) -> None:
        """What comes in the stream from now on waits."""
        address = ctypes.c_uint64()
        word = ctypes.c_void_p(self._word)
        driver().use(stream.ordinal)
        driver().call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), word, 0)
        driver().call(
            "cuStreamWaitValue32_v2", ctypes.c_void_p(stream.number), address, ctypes.c_uint32(1), 0
        )

    def open(self) -> None:
        """All streams go on."""
        ctypes.c_uint32.from_address(self._word).value = 1
