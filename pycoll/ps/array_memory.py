"""The memory of arrays of any framework as NumPy bytes, without a copy if possible."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.host_arrays import Framework
from pycoll.arrays.registry import framework_of, output_view
from pycoll.errors import InvalidArgumentError

Bytes = npt.NDArray[np.uint8]


class Terms(NamedTuple):
    """The dtype and shape of an array."""

    dtype: int
    shape: tuple[int, ...]


def read_array(x: Any, name: str = "x") -> tuple[Framework, Terms, Bytes]:
    """Return the framework, the terms and the bytes of an array, in C order.

    Raises InvalidArgumentError for what pycoll cannot read, and for arrays on devices.
    """
    framework = framework_of(x, name)
    view = framework.view(x, name)
    if isinstance(view, DeviceView):
        raise InvalidArgumentError(
            f"{name} is on {view.device}: servers hold arrays in host memory; pass a copy there"
        )
    terms = Terms(int(view.dtype), tuple(view.shape))
    own = _bytes_of(x)
    if own is None:
        own = np.empty(view.nbytes, np.uint8)
        if view.nbytes:
            _core.pack([view], _core.view(own))
    return framework, terms, own


def _bytes_of(x: Any) -> Bytes | None:
    """Return the memory of an array that is contiguous in C order, or None."""
    if isinstance(x, np.ndarray):
        return x.reshape(-1).view(np.uint8) if x.flags.c_contiguous else None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        plain = x.detach()
        if plain.is_contiguous() and not plain.is_conj() and not plain.is_neg():
            flat: Bytes = plain.reshape(-1).view(torch.uint8).numpy()
            return flat
    return None


class Target(NamedTuple):
    """Memory for a result. ``finish``: returns the caller's object once the memory is filled."""

    memory: Bytes
    finish: Callable[[], Any]


def target_in(out: Any, terms: Terms) -> Target:
    """Return the target of a result in ``out``.

    Raises InvalidArgumentError if ``out`` has another dtype or shape, or is on a device.
    """
    view = output_view(out, terms.dtype, terms.shape, None, True)
    if isinstance(view, DeviceView):
        raise InvalidArgumentError(
            f"out is on {view.device}: servers hold arrays in host memory; pass an array there"
        )
    return _target(out, view, lambda: out)


def new_target(framework: Framework, like: Any, terms: Terms) -> Target:
    """Return the target of a new result of the kind of ``like``."""
    memory = framework.empty(like, terms.shape, terms.dtype)
    return _target(memory, framework.result(memory), lambda: framework.finish(like, memory))


def _target(owner: Any, view: _core.BufferView, result: Callable[[], Any]) -> Target:
    own = _bytes_of(owner)
    if own is not None:
        return Target(own, result)
    memory = np.empty(view.nbytes, np.uint8)

    def finish() -> Any:
        if view.nbytes:
            _core.unpack(_core.view(memory), [view])
        return result()

    return Target(memory, finish)
