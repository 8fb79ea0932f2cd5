"""Memory of long payloads that is used again, once no array shows it any more."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Shorter payloads are left to the allocator, which keeps their pages.
_LONG_BYTES = 64 << 10


class BufferPool:
    """Gives out arrays of bytes. Threads: any.

    The system clears the pages of a new long array one after another, which takes longer than a
    copy of so many bytes. ``kept_bytes``: how many bytes of each size wait for their next use.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        #: By size, a power of two, the blocks that are free.
        self._free: dict[int, list[Any]] = {}
        #: By the number of a block that was given out: what tells its end.
        self._in_use: dict[int, weakref.ref[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Return an array of so many bytes, with any elements.

        Its memory is used again when this array and all views of it are gone.
        """
        if nbytes < _LONG_BYTES:
            return np.empty(nbytes, np.uint8)
        size = 1 << (nbytes - 1).bit_length()
        try:
            block = self._free.setdefault(size, []).pop()
        except IndexError:
            block = np.empty(size, np.uint8).data
        # The base of a view is the array that this function returns, since its own base is none.
        view = np.frombuffer(block[:nbytes], np.uint8)
        self._in_use[id(block)] = weakref.ref(view, lambda _: self._release(block))
        return view

    def _release(self, block: memoryview) -> None:
        self._in_use.pop(id(block), None)
        free = self._free[block.nbytes]
        if (len(free) + 1) * block.nbytes <= self._kept_bytes:
            free.append(block)
