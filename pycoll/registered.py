"""Arrays that RDMA devices may read where they lie, or devices of peers write results to.

Both for as long as their owner says so.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from pycoll import _core
from pycoll.arrays import framework_of
from pycoll.device_view import DeviceView
from pycoll.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pycoll.device_registry import DeviceRegistry

#: Of ``__dlpack_device__``.
_DLPACK_CUDA = 2


class Registered:
    """What ``Communicator.register`` gives. Keeps the arrays alive and exported.

    Ends with ``close()``, at the end of a with block, or when nobody has it any more; operations
    that still send from the arrays end first for themselves, and arrays of devices stay alive until
    no peer writes to them any more. Any thread may close it.
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
        # First all that may be refused: who gets an error has registered nothing.
        views = [
            _device_view(number, x)
            for number, x in enumerate(arrays)
            if register is not None and is_on_device(x)
        ]
        exports = [
            (_exported(number, x), _core.view(x))
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
        """Bytes of the arrays that are registered; the others are copied as ever.

        Of a device's array: that some peer can write there.
        """
        return self._nbytes

    def close(self) -> None:
        """Register no more. Closing again does nothing."""
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
        # Not there if __init__ raised.
        if hasattr(self, "_kept"):
            self.close()


def is_on_device(x: Any) -> bool:
    """Whether it is an array in memory of a CUDA device."""
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


def _exported(number: int, x: Any) -> memoryview:
    """Holding it, the owner must leave the memory where it is: so the buffer protocol has it."""
    try:
        export = memoryview(x)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"arrays[{number}] is a {type(x).__name__}: expected memory whose owner promises by "
            f"the buffer protocol to leave it where it is, such as a NumPy array ({error})"
        ) from None
    if export.readonly:
        export.release()
        raise InvalidArgumentError(
            f"arrays[{number}] is read-only: pages that may not be written cannot stay pinned"
        )
    return export
