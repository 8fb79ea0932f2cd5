"""Arrays whose views are given out, and keep their elements while they exist."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class CopyOnWriteArray:
    """An array that is written rarely while a view of it is on its way to a reader.

    ``view`` gives views out. ``writable`` returns memory that no living view shows.
    """

    __slots__ = ("_views", "array")

    def __init__(self, array: Array) -> None:
        self.array = array
        self._views: list[weakref.ref[Array]] = []

    def view(self, begin: int = 0, end: int | None = None) -> Array:
        """Return the bytes of elements ``begin`` to ``end`` of the first axis, which is in C order.

        They stay as they are while this object exists; another view of them protects nothing.
        """
        shown: Array = self.array[begin:end].reshape(-1).view(np.uint8)
        if len(self._views) >= 64:
            self._views = [one for one in self._views if one() is not None]
        self._views.append(weakref.ref(shown))
        return shown

    def writable(self) -> Array:
        """Return the array for writing: a copy takes its place where a view still exists."""
        if self._views:
            if any(one() is not None for one in self._views):
                self.array = self.array.copy()
            self._views.clear()
        return self.array
