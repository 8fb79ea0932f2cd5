"""A pool of buffers for long payloads. A buffer returns to the pool when no array views it."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

#: Shorter payloads are left to the allocator, which keeps their pages.
_LONG_BYTES = 64 << 10


class BufferPool:
    """A pool of byte arrays. Threads: any.

    The pool exists because the kernel clears the pages of new memory, which costs more than a copy
    of it. ``kept_bytes``: the most unused bytes that the pool keeps of each size.
    """

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        #: By size, a power of two, the unused blocks.
        self._free: dict[int, list[Any]] = {}
        #: By id of a block in use, the weak reference whose callback releases the block.
        self._in_use: dict[int, weakref.ref[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Return an array of so many bytes, with undefined elements.

        The block returns to the pool when this array and all views of it are gone.
        """
        if nbytes < _LONG_BYTES:
            return np.empty(nbytes, np.uint8)
        size = 1 << (nbytes - 1).bit_length()
        try:
            block = self._free.setdefault(size, []).pop()
        except IndexError:
            block = np.empty(size, np.uint8).data
        # Views of this array have it as their base, so they keep it alive.
        view = np.frombuffer(block[:nbytes], np.uint8)
        self._in_use[id(block)] = weakref.ref(view, lambda _: self._release(block))
        return view

    def _release(self, block: memoryview) -> None:
        self._in_use.pop(id(block), None)
        free = self._free[block.nbytes]
        if (len(free) + 1) * block.nbytes <= self._kept_bytes:
            free.append(block)
