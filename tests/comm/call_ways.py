"""The two ways of a call, native and by its definition in Python, and how they are compared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import pycoll
from pycoll import PycollError

Comm = pycoll.Communicator


def frames_of(call: Callable[[], Any]) -> list[str]:
    """The Python functions that run inside ``call`` on this thread."""
    seen: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is not getattr(call, "__code__", None):
            seen.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else "frame")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def defined(comm: Comm, name: str) -> Callable[..., Any]:
    """The operation without the native way."""
    method = getattr(Comm, name)
    return lambda *args, **words: method.definition(comm, *args, **words)


def outcome(call: Callable[[], Any]) -> tuple[Any, ...]:
    """A result or an error as something that can be compared."""
    # Imported late: ranks that are processes import this file without calling the function.
    import torch

    try:
        found = call()
    except (PycollError, TypeError) as error:
        return (type(error), str(error), getattr(error, "operation", None))
    if isinstance(found, torch.Tensor):
        return (torch.Tensor, found.dtype, tuple(found.shape), found.requires_grad, found.tolist())
    if isinstance(found, np.ndarray):
        return (np.ndarray, found.dtype, found.shape, found.flags.owndata, found.tobytes())
    return (type(found), found)
