"""Arrays of every framework: how their memory is read, and how results become the caller's type.

One row per kind of object, in a table that is looked up by type; frameworks are never imported
here, only found where the caller's object comes from them.

| argument | result |
|---|---|
| NumPy array (also ml_dtypes), any subclass | numpy.ndarray |
| NumPy scalar | NumPy scalar, or an array where the result has axes |
| CuPy, Numba and torch arrays on CUDA devices | the same (``pycoll.device_arrays``) |
| torch tensor in host memory | torch.Tensor; one that requires grad only with ``out`` |
| JAX array on CPU or CUDA (``pycoll.jax_arrays``) | jax.Array; never an ``out``, being immutable |
| other object with ``__dlpack__`` | by its ``__array_namespace__().from_dlpack``, or NumPy |
| the same, on a CUDA device | by its ``__array_namespace__().empty`` (``pycoll.dlpack_arrays``) |
| bytes, bytearray, memoryview, array.array | the same type; bytes count as uint8 |
| other object with the buffer protocol | numpy.ndarray |
| bool, int, float, complex | the same (int64, float64, complex128), or a list of them |

A list or tuple is many arrays, not one: see ``all_reduce``.
"""

from __future__ import annotations

import contextlib
import math
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from pycoll import _core
from pycoll.device_view import DeviceView
from pycoll.errors import InvalidArgumentError
from pycoll.foreign_words import about_dtype
from pycoll.types import DType, numpy_dtype

Shape = tuple[int, ...]


class Framework(Protocol):
    """One kind of array. ``view`` gives contiguous memory, packed if need be.

    One whose arrays know how they were computed also has ``refuse_history(x, name)``.
    """

    def view(self, x: Any, name: str) -> _core.BufferView:
        """The elements of ``x`` in C order. InvalidArgumentError names the argument."""

    def out(self, out: Any, name: str) -> _core.BufferView:
        """The memory of ``out`` as it is. InvalidArgumentError where it can never be written."""

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Something with new, writable, contiguous memory, to become a result."""

    def result(self, memory: Any) -> _core.BufferView:
        """The memory of what ``empty`` gave."""

    def finish(self, like: Any, memory: Any) -> Any:
        """What ``empty`` gave, filled by now, as the caller's type."""


class _NumPy:
    """NumPy arrays, and the base of everything that is a NumPy array in between."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        view = _core.view(x, name)
        return view if view.contiguous else _core.packed(view)

    def out(self, out: Any, name: str) -> _core.BufferView:
        return _core.view(out, name)

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        return np.empty(shape, numpy_dtype(dtype))

    def result(self, memory: Any) -> _core.BufferView:
        return _core.view(memory, "the result")

    def finish(self, like: Any, memory: Any) -> Any:
        return memory


class _MaskedNumPy(_NumPy):
    """Masks would be lost on the way, and garbage under them reduced."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        raise InvalidArgumentError(
            f"{name} is a masked array, whose mask pycoll cannot move: pass {name}.filled(value)"
        )

    def out(self, out: Any, name: str) -> _core.BufferView:
        return self.view(out, name)


class _NumPyScalar(_NumPy):
    """numpy.float32(3) and its like."""

    def view(self, x: Any, name: str) -> _core.BufferView:
        return _core.view(np.asarray(x), name)

    def out(self, out: Any, name: str) -> _core.BufferView:
        raise InvalidArgumentError(f"{name} is a scalar, which is immutable: pass an array")

    def finish(self, like: Any, memory: Any) -> Any:
        return memory[()] if memory.ndim == 0 else memory


class _Scalar(_NumPyScalar):
    """Numbers of Python."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def view(self, x: Any, name: str) -> _core.BufferView:
        try:
            return _core.view(np.array(x, numpy_dtype(self.dtype)), name)
        except OverflowError:
            raise InvalidArgumentError(
                f"{name} is {x}, but Python integers travel as int64: from -2**63 to 2**63-1"
            ) from None

    def finish(self, like: Any, memory: Any) -> Any:
        return memory.tolist()


class _Bytes(_NumPy):
    """Immutable bytes: an input only."""

    def finish(self, like: Any, memory: Any) -> Any:
        return memory.tobytes()


class _ByteArray(_NumPy):
    """Bytes that can be written."""

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        if dtype != DType.UINT8 or len(shape) != 1:
            return super().empty(like, shape, dtype)
        return bytearray(shape[0])


class _MemoryView(_NumPy):
    """A window on somebody's memory."""

    def finish(self, like: Any, memory: Any) -> Any:
        return memoryview(memory)


class _PythonArray(_NumPy):
    """The standard library's array.array: one axis, C's number types."""

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        target = numpy_dtype(dtype)
        codes = (like.typecode, *"bhiqBHIQfd")
        code = next((one for one in codes if np.dtype(one) == target), None)
        if code is None or len(shape) != 1:
            return super().empty(like, shape, dtype)
        return sys.modules["array"].array(code, bytes(shape[0] * target.itemsize))


def _dlpack() -> Framework:
    from pycoll.dlpack_arrays import DLPack

    return DLPack()


def _jax() -> Framework:
    from pycoll.jax_arrays import Jax

    return Jax()


def _torch() -> Framework:
    from pycoll.torch_arrays import Torch

    return Torch()


def _cupy() -> Framework:
    from pycoll.device_arrays import CuPy

    return CuPy()


def _numba() -> Framework:
    from pycoll.device_arrays import Numba

    return Numba()


#: For results that nobody asked to be of another kind.
NUMPY: Framework = _NumPy()

_TABLE: dict[type, Framework] = {
    np.ndarray: NUMPY,
    np.generic: _NumPyScalar(),
    bool: _Scalar(DType.BOOL),
    int: _Scalar(DType.INT64),
    float: _Scalar(DType.FLOAT64),
    complex: _Scalar(DType.COMPLEX128),
    bytes: _Bytes(),
    bytearray: _ByteArray(),
    memoryview: _MemoryView(),
}
#: By the top-level module and name of a class; made when the first object of that kind is met.
_FOREIGN: dict[tuple[str, str], Callable[[], Framework]] = {
    ("array", "array"): _PythonArray,
    ("numpy", "MaskedArray"): _MaskedNumPy,
    ("torch", "Tensor"): _torch,
    ("cupy", "ndarray"): _cupy,
    ("numba", "DeviceNDArray"): _numba,
    ("jaxlib", "ArrayImpl"): _jax,
    ("jax", "Tracer"): _jax,
}


def framework_of(x: Any, name: str = "x") -> Framework:
    """The row for ``x``. InvalidArgumentError where it is nothing that pycoll can move."""
    found = _TABLE.get(type(x))
    return found if found is not None else _learn(x, name)


def _learn(x: Any, name: str) -> Framework:
    kind = type(x)
    found: Framework | None = None
    for base in kind.__mro__:
        make = _FOREIGN.get((base.__module__.partition(".")[0], base.__name__))
        if base in _TABLE or make is not None:
            found = _TABLE[base] if base in _TABLE else make() if make is not None else None
            break
    if found is None:
        if hasattr(x, "__cuda_array_interface__"):
            from pycoll.device_arrays import CudaInterface

            found = CudaInterface()
        else:
            found = _dlpack() if hasattr(x, "__dlpack__") else NUMPY
            if found is NUMPY and hasattr(x, "to_numpy"):
                raise InvalidArgumentError(
                    f"{name} is a {kind.__module__.partition('.')[0]} {kind.__name__}, which is no "
                    f"array: pass {name}.to_numpy()"
                )
            found.view(x, name)
    _TABLE[kind] = found
    return found


def input_of(x: Any, out: Any, name: str = "x") -> tuple[Framework, _core.BufferView]:
    """The row for ``x``, and its elements: what an operation reads.

    InvalidArgumentError where ``x`` cannot be read, or where the result is new (``out`` is None)
    and would lose the history by which the framework of ``x`` differentiates.
    """
    framework = framework_of(x, name)
    refuse = getattr(framework, "refuse_history", None)
    if out is None and refuse is not None:
        refuse(x, name)
    return framework, framework.view(x, name)


def output_view(
    out: Any,
    dtype: int,
    shape: Shape,
    source: _core.BufferView | None,
    in_place: bool,
    own_place: int | None = None,
) -> _core.BufferView:
    """The memory of ``out``, which must fit the result and must not overlap ``source``.

    ``in_place``: it may be exactly the source's memory. ``own_place``: one of the two may be that
    part of the other, on the host, from so many bytes on. InvalidArgumentError tells what is wrong.
    """
    view = framework_of(out, "out").out(out, "out")
    if source is not None and view.device != source.device:
        raise InvalidArgumentError(
            f"out is on {view.device}, but x is on {source.device}: pass both on one device"
        )
    if view.dtype != dtype:
        raise InvalidArgumentError(
            f"out has dtype {DType(view.dtype).word}, but the result has {DType(dtype).word}"
        )
    if view.shape != shape:
        raise InvalidArgumentError(f"out has shape {view.shape}, but the result has {shape}")
    if not view.writable:
        raise InvalidArgumentError("out is read-only: pass an array that can be written")
    if not view.contiguous and not isinstance(view, DeviceView):  # a device unpacks by itself
        raise InvalidArgumentError(
            f"out of shape {shape} is not contiguous in C order: pass one that is, or leave out= "
            "away and copy the result"
        )
    if source is not None:
        overlap = view.overlap(source)
        if overlap != 0 and own_place is not None and _is_own(view, source, own_place):
            return view
        if overlap == 2:
            raise InvalidArgumentError(
                "out overlaps x partly: pass memory apart from x"
                + (", or x itself to work in place" if in_place else "")
            )
        if overlap == 1 and not in_place:
            raise InvalidArgumentError(
                "out is the memory of x, but this collective cannot work in place: pass memory "
                "apart from x"
            )
    return view


def _is_own(view: _core.BufferView, source: _core.BufferView, place: int) -> bool:
    if isinstance(view, DeviceView):
        return False
    return source.is_part(view, place) or view.is_part(source, place)


#: Linux maps memory in pages of this size where it can.
_HUGE_PAGE = 2 << 20
_LINE = 64
#: The most that a process can map.
_MAPPED_MAX = 1 << 47


def empty(shape: int | Shape, dtype: Any = np.float32) -> np.ndarray[Any, np.dtype[Any]]:
    """A NumPy array that ranks on this host and RDMA devices can reach, for buffers that live long.

    NumPy's own arrays do not lie there, unless ``init(shared_arrays=True)`` or a
    ``shared_arrays()`` block asks for it.

    What a collective sends from such an array, they read where it lies instead of from a copy, in
    pieces of 4 KiB and more; the collective then ends when they have. What it only receives into
    one, ranks on this host write there themselves. Ranks need the right to open this process's
    descriptors, as processes of one user have; an RDMA device, which serves ``verbs``, that to lock
    the memory (``ulimit -l``). Otherwise, and over tcp, it is an ordinary array. Uninitialised,
    aligned to cache lines. ``dtype`` is anything that NumPy takes, or a name of pycoll's
    ("bfloat16").

    The memory is shared: a forked child that writes there changes its parent's array. After a
    collective has failed, a rank that has not heard of it may still be writing up to 64 KiB into
    its ``out``: go on with another array. pycoll gives the memory to nobody else.

    >>> pycoll.empty((2, 3), "float32").shape
    (2, 3)
    """
    target = _element_type(dtype)
    try:
        axes = tuple(map(operator.index, shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        axes = (-1,)
    if min(axes, default=0) < 0:
        raise InvalidArgumentError(f"shape is {shape!r}: expected whole numbers of at least 0")
    nbytes = math.prod(axes) * target.itemsize
    try:
        if nbytes > _MAPPED_MAX:
            raise MemoryError
        memory = _reachable(nbytes) if nbytes >= _core.LENT_BYTES_MIN else aligned(nbytes)
        return memory.view(target).reshape(axes)
    except (MemoryError, OSError, ValueError):
        raise InvalidArgumentError(
            f"shape is {shape!r}: the system has no room for {nbytes} bytes"
        ) from None


@contextlib.contextmanager
def shared_arrays() -> Iterator[None]:
    """Within the block NumPy's new arrays of 8 KiB and more lie where those of ``empty`` do.

    It counts for the thread, or task of asyncio, that enters it, with or without a world; arrays
    stay where they are when it ends. ``init(shared_arrays=True)`` does the same for all threads
    while there is a world. To whoever uses them they are ordinary arrays, save for what
    docs/shared-arrays.md says: a fork copies them, raises OSError where it cannot, and loses what
    a device is just writing to them.

    Where such memory cannot be had, arrays are ordinary, and a RuntimeWarning says why. Takes some
    microseconds, and the first time some milliseconds.

    >>> with pycoll.shared_arrays():
    ...     weights = numpy.ones(1 << 20, "float32")
    >>> float(weights.sum())
    1048576.0
    """
    block = _core.SharedBlock()
    tell_of_refusal(block.refusal)
    try:
        yield
    finally:
        block.leave()


def tell_of_refusal(why: str) -> None:
    """Warn that arrays which were to be shared are not; nothing where ``why`` is empty."""
    if why:
        import warnings

        text = f"shared_arrays: {why}; NumPy's arrays stay in ordinary memory"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _reachable(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        return np.frombuffer(_core.reachable_memory(nbytes), np.uint8)
    except MemoryError:  # no room for the file that it would lie in
        return aligned(nbytes)


def aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Memory of this process alone: uninitialised, from 2 MiB up on huge pages if there are any."""
    step = _HUGE_PAGE if nbytes >= _HUGE_PAGE else _LINE
    memory = _pages(nbytes + step) if step == _HUGE_PAGE else np.empty(nbytes + step, np.uint8)
    skipped = -memory.ctypes.data % step
    return memory[skipped : skipped + nbytes]


def _element_type(dtype: Any) -> np.dtype[Any]:
    words = {one.word: one for one in DType}
    if isinstance(dtype, str) and dtype in words:
        return numpy_dtype(words[dtype])
    try:
        target: np.dtype[Any] = np.dtype(dtype)
        if target.hasobject or target.itemsize == 0:
            raise TypeError
        return target
    except TypeError:
        raise InvalidArgumentError(
            f"dtype is {dtype!r}{about_dtype(dtype)}, which is no element type; there are "
            f"{', '.join(words)}"
        ) from None


def _pages(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    import mmap

    pages = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
