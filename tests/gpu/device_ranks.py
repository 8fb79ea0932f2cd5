"""Ranks that are threads with a stream each, for the tests on device arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from harness import ThreadWorld

import pycoll
from pycoll import InvalidArgumentError
from pycoll.bench.cuda import Stream


def on_stream(function: Callable[[pycoll.Communicator], Any]) -> Callable[..., Any]:
    """The function, with a stream of its own rank as the current one."""

    def run(comm: pycoll.Communicator) -> Any:
        stream = comm.__dict__.setdefault("_test_stream", None) or Stream()
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
