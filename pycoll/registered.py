"""Arrays that RDMA devices may read where they lie, for as long as their owner says so."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pycoll import _core
from pycoll.errors import InvalidArgumentError


class Registered:
    """What ``Communicator.register`` gives. Keeps the arrays alive and exported.

    Ends with ``close()``, at the end of a with block, or when nobody has it any more; operations
    that still send from the arrays end first for themselves. Any thread may close it.
    """

    def __init__(self, transport: _core.VerbsTransport | None, arrays: tuple[Any, ...]) -> None:
        self._transport = transport
        self._kept: list[tuple[memoryview, _core.BufferView]] = []
        self._nbytes = 0
        # First all that may be refused: who gets an error has registered nothing.
        exports = [(_exported(number, x), _core.view(x)) for number, x in enumerate(arrays)]
        for export, view in exports:
            if transport is not None and transport.keep(view):
                self._kept.append((export, view))
                self._nbytes += export.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that are registered; the others are copied as ever."""
        return self._nbytes

    def close(self) -> None:
        """Register no more. Closing again does nothing."""
        kept, self._kept, self._nbytes = self._kept, [], 0
        for export, view in kept:
            if self._transport is not None:
                self._transport.lapse(view)
            export.release()

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
