"""Arrays in host memory: NumPy arrays, Python's numbers, and objects with the buffer protocol."""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType, numpy_dtype

Shape = tuple[int, ...]


class Framework(Protocol):
    """One kind of array: how pycoll reads it, writes it, and makes results of its type.

    A framework whose arrays record how they were computed also has ``refuse_history(x, name)``.
    """

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements of ``x``, packed into C order on the host.

        InvalidArgumentError names the argument.
        """

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Return the memory of ``out``, in its own order.

        Raise InvalidArgumentError where no program can write to such an object.
        """

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return an object with new, writable, contiguous memory for a result."""

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of an object from ``empty``."""

    def finish(self, like: Any, memory: Any) -> Any:
        """Return a filled object from ``empty`` as the caller's type."""


class NumPyArrays:
    """NumPy arrays, and the base of the kinds that pycoll reads as NumPy arrays."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements in C order."""
        view = _core.view(x, name)
        return view if view.contiguous else _core.packed(view)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Return the memory of ``out``, in its own order."""
        return _core.view(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return new memory for a result."""
        return np.empty(shape, numpy_dtype(dtype))

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of an object from ``empty``."""
        return _core.view(memory, "the result")

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as the caller's type."""
        return memory


class MaskedArrays(NumPyArrays):
    """Masked arrays, which pycoll refuses: it would lose the mask and reduce masked elements."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Raise InvalidArgumentError."""
        raise InvalidArgumentError(
            f"{name} is a masked array, whose mask pycoll cannot move: pass {name}.filled(value)"
        )

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Raise InvalidArgumentError."""
        return self.view(out, name)


class NumPyScalars(NumPyArrays):
    """NumPy scalars, such as numpy.float32(3)."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements in C order."""
        return _core.view(np.asarray(x), name)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Raise InvalidArgumentError: a scalar is immutable."""
        raise InvalidArgumentError(f"{name} is a scalar, which is immutable: pass an array")

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as the caller's type."""
        return memory[()] if memory.ndim == 0 else memory


class PythonNumbers(NumPyScalars):
    """Python's numbers."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements in C order."""
        try:
            return _core.view(np.array(x, numpy_dtype(self.dtype)), name)
        except OverflowError:
            raise InvalidArgumentError(
                f"{name} is {x}, but Python integers travel as int64: from -2**63 to 2**63-1"
            ) from None

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as the caller's type."""
        return memory.tolist()


class BytesObjects(NumPyArrays):
    """Immutable bytes; only an input."""

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as the caller's type."""
        return memory.tobytes()


class ByteArrays(NumPyArrays):
    """bytearray objects."""

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return new memory for a result."""
        if dtype != DType.UINT8 or len(shape) != 1:
            return super().empty(like, shape, dtype)
        return bytearray(shape[0])


class MemoryViews(NumPyArrays):
    """memoryview objects."""

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as the caller's type."""
        return memoryview(memory)


class PythonArrays(NumPyArrays):
    """Arrays of the standard library's array.array: one axis, C's number types."""

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return new memory for a result."""
        target = numpy_dtype(dtype)
        codes = (like.typecode, *"bhiqBHIQfd")
        code = next((one for one in codes if np.dtype(one) == target), None)
        if code is None or len(shape) != 1:
            return super().empty(like, shape, dtype)
        return sys.modules["array"].array(code, bytes(shape[0] * target.itemsize))


#: The framework of results where no argument determines another one.
NUMPY: Framework = NumPyArrays()
