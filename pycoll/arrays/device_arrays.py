"""Arrays on CUDA devices: entries of the table in `registry`, and the streams of each framework.

| argument | result | stream without ``stream=`` |
|---|---|---|
| CuPy array | cupy.ndarray | CuPy's current one of the array's device |
| torch tensor on cuda (``torch_arrays``) | torch.Tensor | torch's current one of that device |
| Numba device array | Numba device array | the array's, else Numba's default one |
| other ``__cuda_array_interface__`` | by its ``__array_namespace__``, or only ``out`` | its own |
| ``__dlpack__`` alone (``dlpack_arrays``) | the same | the default stream |

This module finds a framework in ``sys.modules`` and never imports it.
"""

from __future__ import annotations

import sys
from typing import Any

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, stand_in, view_of_interface
from pycoll.errors import InvalidArgumentError
from pycoll.types import numpy_dtype

Shape = tuple[int, ...]

#: The CUDA handle of the legacy default stream, valid in every context.
LEGACY_STREAM = 1


class CudaInterface:
    """Objects that export ``__cuda_array_interface__``."""

    def ordinal(self, x: Any) -> int | None:
        """Return the device of ``x``, which may have no elements; None where it is unknown."""
        return None

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements in their own order; the operation packs them into C order."""
        return stand_in(self._look(x, name))

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Return the memory of ``out``, in its own order."""
        return stand_in(self._look(out, name))

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new array on the device of ``like``."""
        make = getattr(like, "__array_namespace__", None)
        if make is None:
            raise InvalidArgumentError(
                f"x is a {type(like).__name__}, of which pycoll cannot make a new one: pass out=, "
                "and arrays that are contiguous in C order"
            )
        words = {"device": like.device} if hasattr(like, "device") else {}
        return make().empty(shape, dtype=numpy_dtype(dtype), **words)

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of an array from ``empty``."""
        return self.out(memory, "the result")

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the array from ``empty``; it has the caller's type already."""
        return memory

    def stream(self, x: Any) -> int:
        """Return the stream on which work on ``x`` is ordered."""
        return int(x.__cuda_array_interface__.get("stream") or LEGACY_STREAM)

    def _look(self, x: Any, name: str) -> DeviceView:
        return view_of_interface(x, name, self.ordinal(x))


class CuPy(CudaInterface):
    """CuPy arrays."""

    def __init__(self) -> None:
        self.cupy = sys.modules["cupy"]

    def ordinal(self, x: Any) -> int | None:
        """Return the device of ``x``."""
        return int(x.device.id)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new array on the device of ``like``."""
        with like.device:
            return self.cupy.empty(shape, numpy_dtype(dtype))

    def stream(self, x: Any) -> int:
        """Return CuPy's current stream of the device of ``x``."""
        return int(self.cupy.cuda.get_current_stream(x.device.id).ptr) or LEGACY_STREAM


class Numba(CudaInterface):
    """Numba's device arrays."""

    def __init__(self) -> None:
        self.cuda = sys.modules["numba"].cuda

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return a new array on the device of ``like``."""
        return self.cuda.device_array(shape, numpy_dtype(dtype), stream=like.stream)
