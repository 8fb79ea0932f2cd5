"""JAX arrays, on CPU and on CUDA devices: their entry of the table in `registry`.

JAX arrays are immutable, so results are always new. JAX shows no current stream to other libraries,
but each device has a stream for external events. Operations run there, or in ``stream=``:

| step | order of streams |
|---|---|
| x and the memory for the result are ready | ``__dlpack__(stream=)`` of JAX: the stream waits |
| the result is ready | ``from_dlpack``: JAX waits for the work in that stream at that time |
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, stand_in
from pycoll.errors import InvalidArgumentError
from pycoll.types import numpy_dtype

Shape = tuple[int, ...]


class Jax:
    """JAX arrays of one device."""

    #: JAX waits only for its own stream, also where an operation ran in another ``stream=``, and
    #: JAX's allocator knows neither stream.
    hands_on = True

    def view(self, x: Any, name: str) -> _core.BufferView:
        """Return the elements; on the host in C order."""
        if "Tracer" in type(x).__name__ or not hasattr(x, "devices"):
            raise InvalidArgumentError(
                f"{name} is a traced JAX value: inside jit, grad and vmap call all_reduce, "
                "all_gather, reduce_scatter and broadcast of pycoll.jax; call others outside"
            )
        if not _is_on_cpu(x):
            return stand_in(_device_view(x, name, False))
        try:
            memory = np.asarray(x)
        except (TypeError, RuntimeError) as error:
            raise InvalidArgumentError(f"{name} cannot be read: {error}") from None
        view = _core.view(memory, name)
        return view if view.contiguous else _core.packed(view)

    def out(self, out: Any, name: str) -> _core.BufferView:
        """Raise InvalidArgumentError: JAX arrays are immutable."""
        raise InvalidArgumentError(
            f"{name} is a JAX array, which is immutable: omit {name}, the result is a new array"
        )

    def empty(self, like: Any, shape: Shape, dtype: int) -> Any:
        """Return new memory on the device of ``like``. Only pycoll has it, so it may be written.

        Raises InvalidArgumentError for a type that this process's JAX would narrow.
        """
        wanted = numpy_dtype(dtype)
        if wanted.itemsize >= 8:
            kept = sys.modules["jax"].dtypes.canonicalize_dtype(wanted)
            if kept != wanted:
                raise InvalidArgumentError(
                    f"the result is {wanted}, and this JAX would make it {kept}: set "
                    "jax_enable_x64, or pass an array of NumPy"
                )
        if _is_on_cpu(like):
            return np.empty(shape, wanted)
        namespace = like.__array_namespace__()
        (device,) = like.devices()
        return namespace.empty(shape, dtype=wanted, device=device)

    def result(self, memory: Any) -> _core.BufferView:
        """Return the memory of an array from ``empty``."""
        if isinstance(memory, np.ndarray):
            return _core.view(memory, "the result")
        return stand_in(_device_view(memory, "the result", True))

    def finish(self, like: Any, memory: Any) -> Any:
        """Return the result as a JAX array; on a device in the same memory, in stream order."""
        if not isinstance(memory, np.ndarray):
            return like.__array_namespace__().from_dlpack(memory)
        # Only JAX uses the memory from here on, so JAX may keep it or copy it.
        same = memory.shape == like.shape
        where = like.sharding if same else min(like.devices(), key=lambda device: device.id)
        return sys.modules["jax"].device_put(memory, where)

    def stream(self, x: Any) -> int:
        """Return JAX's stream for external events. Raise InvalidArgumentError on the host."""
        if _is_on_cpu(x):
            raise InvalidArgumentError(
                "x is in host memory, but the other ranks' arrays or out are on a device: pass all "
                "arrays in host memory, or all on devices"
            )
        (device,) = x.devices()
        return int(device.get_stream_for_external_ready_events())


def _is_on_cpu(x: Any) -> bool:
    return {device.platform for device in x.devices()} == {"cpu"}


def _device_view(x: Any, name: str, writable: bool) -> DeviceView:
    devices = x.devices()
    platforms = sorted({device.platform for device in devices})
    if platforms not in (["gpu"], ["cuda"]):
        raise InvalidArgumentError(
            f"{name} is a JAX array on {', '.join(platforms)}; pycoll takes those on CPU and CUDA "
            f"devices: pass jax.device_get({name})"
        )
    if len(devices) != 1:
        raise InvalidArgumentError(
            f"{name} is a JAX array spread over {len(devices)} devices, but a rank has one: pass "
            f"{name}.addressable_data(0), or jax.device_get({name})"
        )
    # With stream=None JAX exports without waiting.
    address, shape, strides, dtype, _, owner, ordinal = _core.device_tensor(
        _capsule_of(x, name, None), name
    )
    order = functools.partial(_order, x, name)
    return DeviceView(
        name,
        address,
        shape,
        strides,
        dtype,
        writable=writable,
        owner=(x, owner),
        ordinal=ordinal,
        order=order,
    )


def _order(x: Any, name: str, stream: int) -> None:
    # The protocol has no stream 0. The exported tensor is released at once.
    _core.device_tensor(_capsule_of(x, name, stream or 1), name)


def _capsule_of(x: Any, name: str, stream: int | None) -> Any:
    try:
        return x.__dlpack__(stream=stream)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgumentError(
            f"{name} is a JAX array that cannot be exported through DLPack: {error}"
        ) from None
