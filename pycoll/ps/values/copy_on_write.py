"""Arrays that are copied before a write if a view of them is in use."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class CopyOnWriteArray:
    """An array whose views never change. Threads: one at a time.

    ``view`` returns a view. ``writable`` returns the array for writing, which it first replaces by
    a copy if a view of it still exists.
    """

    __slots__ = ("_views", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self._views: list[weakref.ref[Array]] = []

    def view(self, begin: int = 0, end: int | None = None) -> Array:
        """Return the bytes of elements ``begin`` to ``end`` of the first axis, in C order.

        They do not change while the returned array exists. Arrays derived from it protect nothing.
        """
        shown: Array = self.array[begin:end].reshape(-1).view(np.uint8)
        if len(self._views) >= 64:
            self._views = [one for one in self._views if one() is not None]
        self._views.append(weakref.ref(shown))
        return shown

    def writable(self) -> Array:
        """Return the array for writing, replaced by a copy if a view still exists."""
        if self._views:
            if any(one() is not None for one in self._views):
                self.array = self.array.copy()
            self._views.clear()
        return self.array
