"""Registered arrays: RDMA devices read them in place, or peers' devices write results to them.

A registration lasts until the program closes it.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.arrays.registry import framework_of
from pycoll.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycoll.device.device_registry import DeviceRegistry

#: The number of CUDA memory in ``__dlpack_device__``.
_DLPACK_CUDA = 2


class Registered:
    """The registration that ``Communicator.register`` returns. It keeps the arrays alive.

    ``close()``, the end of a ``with`` block, or the loss of the last reference ends it. Operations
    that still send from the arrays end normally. Arrays on devices stay alive until no peer writes
    to them any more. Any thread may close it.
    """

    def __init__(
        self,
        transport: _core.VerbsTransport | None,
        arrays: tuple[Any, ...],
        register: Callable[[list[DeviceView]], tuple[DeviceRegistry, list[tuple[int, bool]]]]
        | None = None,
    ) -> None:
        self._transport = transport
        self._kept: list[tuple[memoryview, _core.BufferView]] = []
        self._entered: list[tuple[int, Any]] = []
        self._nbytes = 0
        # Check all arrays before the first registration, so that an error leaves none registered.
        views = [
            _device_view(number, x)
            for number, x in enumerate(arrays)
            if register is not None and is_on_device(x)
        ]
        exports = [
            (_export(number, x), _core.view(x))
            for number, x in enumerate(arrays)
            if register is None or not is_on_device(x)
        ]
        for export, view in exports:
            if transport is not None and transport.keep(view):
                self._kept.append((export, view))
                self._nbytes += export.nbytes
        if views and register is not None:
            self._registry, entered = register(views)
            for one, (number, is_reached) in zip(views, entered, strict=True):
                if number >= 0:
                    self._entered.append((number, one.owner))
                self._nbytes += one.nbytes if is_reached else 0

    @property
    def nbytes(self) -> int:
        """The bytes of the registered arrays; operations copy other arrays as before.

        An array on a device counts if some peer can write to it.
        """
        return self._nbytes

    def close(self) -> None:
        """End the registration. Closing again does nothing."""
        kept, self._kept, self._nbytes = self._kept, [], 0
        for export, view in kept:
            if self._transport is not None:
                self._transport.lapse(view)
            export.release()
        entered, self._entered = self._entered, []
        if entered:
            self._registry.lapse(entered)

    def __enter__(self) -> Registered:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The attribute is missing if __init__ raised before it.
        if hasattr(self, "_kept"):
            self.close()


def is_on_device(x: Any) -> bool:
    """Return whether ``x`` is an array in the memory of a CUDA device."""
    if getattr(x, "__cuda_array_interface__", None) is not None:
        return True
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) == _DLPACK_CUDA


def _device_view(number: int, x: Any) -> DeviceView:
    name = f"arrays[{number}]"
    view: Any = framework_of(x, name).out(x, name)
    if not isinstance(view, DeviceView):
        raise InvalidArgumentError(f"{name} is a {type(x).__name__} that is on no CUDA device")
    if not view.writable:
        raise InvalidArgumentError(f"{name} is read-only: peers could not write results there")
    return view


def _export(number: int, x: Any) -> memoryview:
    """Return an export of the array. By the buffer protocol its owner must not move the memory."""
    try:
        export = memoryview(x)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"arrays[{number}] is a {type(x).__name__}: expected an object with the buffer "
            f"protocol, which keeps its memory in place, such as a NumPy array ({error})"
        ) from None
    if export.readonly:
        export.release()
        raise InvalidArgumentError(
            f"arrays[{number}] is read-only: pages that may not be written cannot stay pinned"
        )
    return export
