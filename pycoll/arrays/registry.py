"""The arrays that operations take, and the types of their results.

The table has one entry per kind of object, found by its type. This module never imports a
framework: it finds the framework of the caller's object in ``sys.modules``.

| argument | result |
|---|---|
| NumPy array (also ml_dtypes), any subclass | numpy.ndarray |
| NumPy scalar | NumPy scalar, or an array where the result has axes |
| CuPy, Numba and torch arrays on CUDA devices | the same (`device_arrays`) |
| torch tensor in host memory | torch.Tensor; a tensor that requires grad needs ``out`` |
| JAX array on CPU or CUDA (`jax_arrays`) | jax.Array; it is immutable and cannot be ``out`` |
| other object with ``__dlpack__`` | by its ``__array_namespace__().from_dlpack``, or NumPy |
| the same, on a CUDA device | by its ``__array_namespace__().empty`` (`dlpack_arrays`) |
| bytes, bytearray, memoryview, array.array | the same type; bytes count as uint8 |
| other object with the buffer protocol | numpy.ndarray |
| bool, int, float, complex | the same (int64, float64, complex128), or a list of them |

A list or tuple means several arrays: see ``all_reduce``.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.host_arrays import (
    NUMPY,
    ByteArrays,
    BytesObjects,
    Framework,
    MaskedArrays,
    MemoryViews,
    NumPyScalars,
    PythonArrays,
    PythonNumbers,
    Shape,
)
from pycoll.errors import InvalidArgumentError
from pycoll.foreign_words import about_dtype
from pycoll.types import DType, numpy_dtype


def _dlpack() -> Framework:
    from pycoll.arrays.dlpack_arrays import DLPack

    return DLPack()


def _jax() -> Framework:
    from pycoll.arrays.jax_arrays import Jax

    return Jax()


def _torch() -> Framework:
    from pycoll.arrays.torch_arrays import Torch

    return Torch()


def _cupy() -> Framework:
    from pycoll.arrays.device_arrays import CuPy

    return CuPy()


def _numba() -> Framework:
    from pycoll.arrays.device_arrays import Numba

    return Numba()


_TABLE: dict[type, Framework] = {
    np.ndarray: NUMPY,
    np.generic: NumPyScalars(),
    bool: PythonNumbers(DType.BOOL),
    int: PythonNumbers(DType.INT64),
    float: PythonNumbers(DType.FLOAT64),
    complex: PythonNumbers(DType.COMPLEX128),
    bytes: BytesObjects(),
    bytearray: ByteArrays(),
    memoryview: MemoryViews(),
}
#: Frameworks by the top-level module and the name of a class. The first object of a kind makes its
#: entry.
_FOREIGN: dict[tuple[str, str], Callable[[], Framework]] = {
    ("array", "array"): PythonArrays,
    ("numpy", "MaskedArray"): MaskedArrays,
    ("torch", "Tensor"): _torch,
    ("cupy", "ndarray"): _cupy,
    ("numba", "DeviceNDArray"): _numba,
    ("jaxlib", "ArrayImpl"): _jax,
    ("jax", "Tracer"): _jax,
}


def framework_of(x: Any, name: str = "x") -> Framework:
    """Return the entry for ``x``, or raise InvalidArgumentError if pycoll cannot move it."""
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
            from pycoll.arrays.device_arrays import CudaInterface

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
    """Return the entry for ``x`` and a view of its elements, for an operation that reads ``x``.

    Raise InvalidArgumentError where pycoll cannot read ``x``. Raise it also where the result is new
    (``out`` is None) and would lose the history by which the framework of ``x`` differentiates.
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
    """Return a view of ``out``, which must fit the result and must not overlap ``source``.

    ``in_place``: ``out`` may be exactly the memory of the source. ``own_place``: on the host, one
    of the two may be the part of the other that begins at this byte. Raise InvalidArgumentError
    otherwise.
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
    if not view.contiguous and not isinstance(view, DeviceView):  # a kernel unpacks on devices
        raise InvalidArgumentError(
            f"out of shape {shape} is not contiguous in C order: pass one that is, or omit out= "
            "and copy the result"
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


#: Bytes of a huge page of Linux.
_HUGE_PAGE = 2 << 20
#: Bytes of a cache line.
_LINE = 64
#: The most bytes that a process can map.
_MAPPED_MAX = 1 << 47


def empty(shape: int | Shape, dtype: Any = np.float32) -> np.ndarray[Any, np.dtype[Any]]:
    """Make a NumPy array in memory that ranks on this host and RDMA devices reach.

    Use it for buffers that live long. ``shape``: a whole number, or a sequence of them.
    ``dtype``: any dtype that NumPy takes, or a name of pycoll's such as "bfloat16".

    Returns an uninitialised array, aligned to cache lines. NumPy's own arrays lie in other memory,
    except with ``init(shared_arrays=True)`` or inside a ``shared_arrays()`` block.

    When a collective sends from such an array, peers and RDMA devices read it in place, in pieces
    of 4 KiB and more; the collective ends after they have read it. When a collective only receives
    into such an array, ranks on this host write to it directly. Peers need the right to open the
    descriptors of this process, as processes of one user have it. An RDMA device, used by
    ``verbs``, needs the right to lock the memory (``ulimit -l``). Without these rights, and over
    tcp, the array works as an ordinary one.

    The memory is shared with forked children: a child that writes to it changes the parent's array.
    After a failed collective, a rank that does not know of the failure may still write up to 64 KiB
    into its ``out``. The program must then continue with another array; pycoll never gives that
    memory to other arrays.

    Raises InvalidArgumentError for a wrong shape or dtype, and where the system has no memory.

    Cost: new memory, for long arrays as pages of a shared file; no other rank takes part.

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
        is_long = nbytes >= _core.UNCOPIED_BYTES_MIN
        memory = _reachable(nbytes) if is_long else aligned_memory(nbytes)
        return memory.view(target).reshape(axes)
    except (MemoryError, OSError, ValueError):
        raise InvalidArgumentError(
            f"shape is {shape!r}: the system has no memory for {nbytes} bytes"
        ) from None


@contextlib.contextmanager
def shared_arrays() -> Iterator[None]:
    """Put NumPy's new arrays of 8 KiB and more into the memory of ``empty``, inside the block.

    The block applies to the thread, or asyncio task, that enters it, with or without a world. The
    arrays stay in that memory after its end. ``init(shared_arrays=True)`` does the same for all
    threads while the world exists.

    The arrays behave as ordinary ones, with the exceptions in docs/shared-arrays.md: a fork copies
    them, raises OSError where it cannot, and loses data that a device writes to them at that time.

    Where the system does not give such memory, arrays are ordinary, and a RuntimeWarning tells the
    reason.

    Result: a context manager. Errors: none.

    Cost: the first block of a process sets up the memory; later ones are cheap.

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
    """Warn that arrays are not shared although a program asked for it.

    ``why``: the reason; an empty text gives no warning.
    """
    if why:
        import warnings

        text = f"shared_arrays: {why}; NumPy's arrays stay in ordinary memory"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _reachable(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    try:
        return np.frombuffer(_core.reachable_memory(nbytes), np.uint8)
    except MemoryError:  # the system has no memory for the shared file
        return aligned_memory(nbytes)


def aligned_memory(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return uninitialised private memory; from 2 MiB up on huge pages if the system has them."""
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
