"""The arrays of a compressed call: read into one axis of floats, and written back at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import framework_of, input_of, output_view
from pycoll.compress.call_memory import CallLayout, CallMemory, shift
from pycoll.compress.codec import Array
from pycoll.compress.feedback import Feedback
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType, ReduceOp, numpy_dtype, wrong_op, wrong_type

#: Types that codecs take. Those of 16 bits are widened to float32, which holds them exactly.
_FLOATS = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


class Operands:
    """The arrays of one call, end to end on one axis of float32 or float64, which they own.

    ``x``: an array, or a list of arrays of one type. ``out``: as in ``all_reduce``. ``wide``:
    whether the codec takes float64. Raises InvalidArgumentError for arrays and reductions that
    codecs do not take.

    Attributes: ``layout``, the places of the arrays; ``memory``, their residuals and velocities in
    ``feedback``; ``mean``, whether the result is divided; ``kind``, the type in which values are
    computed; ``is_native``, whether that is float32, which kernels take.
    """

    def __init__(self, x: Any, out: Any, op: Any, feedback: Feedback | None, wide: bool) -> None:
        self.mean = is_mean(op)
        self._is_list = isinstance(x, list | tuple)
        arrays = list(x) if self._is_list else [x]
        outs = [None] * len(arrays) if out is None else list(out) if self._is_list else [out]
        if len(outs) != len(arrays):
            raise InvalidArgumentError(f"out has {len(outs)} arrays for {len(arrays)} in x")
        check_feedback_type(feedback)
        names = [f"x[{n}]" if self._is_list else "x" for n in range(len(arrays))]
        views = [input_of(*one)[1] for one in zip(arrays, outs, names, strict=True)]
        self._dtype = _type_of(views, names, wide)
        self._targets = [_target(*one) for one in zip(arrays, outs, views, strict=True)]
        self._out = out
        self.feedback = feedback
        shapes = [tuple(view.shape) for view in views]
        self.layout = CallLayout(shapes, [view.count for view in views])
        self.kind = np.dtype(np.float64 if self._dtype == DType.FLOAT64 else np.float32)
        self.is_native = self.kind == np.float32
        self._views = views
        self._values: Array = None
        self.memory = CallMemory(feedback, self.layout, self.kind)

    @property
    def values(self) -> Array:
        """The values that this rank encodes on one axis, which the call may change."""
        if self._values is None:
            self._values = _values(self._views, self._dtype)
        return self._values

    def take_shard(self, shard: slice, values: Array) -> None:
        """Replace the values of all arrays by those that this rank encodes, of some places."""
        self.layout.shard, self._values = shard, values

    def own(self, number: int) -> Array:
        """Return the values of an array that this rank encodes."""
        return self.values[shift(self.layout.piece(number), -self.layout.shard.start)]

    def source(self, number: int) -> _core.BufferView:
        """Return the values for kernels: the caller's memory where it serves, else ``own``."""
        view = self._views[number]
        if self._values is None and view.contiguous and view.dtype == DType.FLOAT32:
            return view
        return _core.view(self.own(number))

    def facts(self) -> list[Any]:
        """Return what all ranks have in common."""
        op = "avg" if self.mean else "sum"
        shapes = [list(shape) for shape in self.layout.shapes]
        return [DType(self._dtype).word, shapes if self._is_list else shapes[0], op]

    def target(self, number: int) -> _core.BufferView | None:
        """Return the memory of an array's result, where kernels can write to it; else None."""
        view = self._targets[number][0]
        return view if view.contiguous and view.dtype == DType.FLOAT32 else None

    def results(self, values: Array | None) -> Any:
        """Return the result of the call: arrays of the caller's types.

        ``values``: of all arrays; None: all ``target`` have them.
        """
        made = []
        for (view, finish), (_, place) in zip(self._targets, self.layout.parts(), strict=True):
            if values is not None:
                part = np.asarray(values[place], numpy_dtype(self._dtype))
                _core.unpack(_core.view(part), [view])
            made.append(finish())
        if self._out is not None:
            return self._out
        return made if self._is_list else made[0]


def check_feedback_type(feedback: Any) -> None:
    """Raise InvalidArgumentError unless it is a Feedback, or None."""
    if feedback is not None and not isinstance(feedback, Feedback):
        raise InvalidArgumentError(
            f"feedback is {feedback!r}: expected a pycoll.compress.Feedback, or None"
        )


def are_on_devices(x: Any) -> bool:
    """Return whether an array, or one of a list, is on a device."""
    is_list = isinstance(x, list | tuple)
    named = [(f"x[{n}]", one) for n, one in enumerate(x)] if is_list else [("x", x)]
    views = [framework_of(one, name).view(one, name) for name, one in named]
    return any(isinstance(view, DeviceView) for view in views)


def is_mean(op: Any) -> bool:
    """Return whether op is "avg". Raise InvalidArgumentError unless it is that or "sum"."""
    word = ReduceOp(op).word if isinstance(op, ReduceOp) else op
    if word not in ("sum", "avg"):
        raise wrong_op(repr(word))
    return bool(word == "avg")


def _type_of(views: list[Any], names: list[str], wide: bool) -> int:
    """Return the type of all arrays."""
    if not views:
        raise InvalidArgumentError("x is an empty list: expected at least one array")
    taken = _FLOATS if wide else _FLOATS[:3]
    for name, view in zip(names, views, strict=True):
        if isinstance(view, DeviceView):
            raise InvalidArgumentError(
                f"{name} is on {view.device}: this codec takes arrays in host memory. Take BF16, "
                "FP8, Block, Sign or TopK, copy the array to the host, or leave compress out"
            )
        if view.dtype not in taken:
            raise wrong_type(name, view.dtype, taken)
        if view.dtype != views[0].dtype:
            raise InvalidArgumentError(
                f"{name} is {DType(view.dtype).word} and x[0] {DType(views[0].dtype).word}: "
                "compress takes lists of one type"
            )
    return int(views[0].dtype)


def _values(views: list[Any], dtype: int) -> Array:
    values = np.empty(sum(view.count for view in views), numpy_dtype(dtype))
    _core.pack(views, _core.view(values))
    return values if values.dtype.itemsize > 2 else values.astype(np.float32)


def _target(x: Any, out: Any, view: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the memory of an array's result, and a function that returns the result."""
    framework = framework_of(x)
    if out is not None:
        return output_view(out, view.dtype, view.shape, view, True), lambda: out
    memory = framework.empty(x, view.shape, view.dtype)
    return framework.result(memory), lambda: framework.finish(x, memory)
