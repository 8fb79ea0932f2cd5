"""Arrays of libraries that pycoll does not know, in host memory: they export DLPack alone."""

from __future__ import annotations

from typing import Any

import numpy as np


class Namespace:
    """A minimal array-API library."""

    @staticmethod
    def from_dlpack(memory: Any) -> Foreign:
        return Foreign(np.from_dlpack(memory))


class Foreign:
    """An array of that library: nothing but DLPack."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self, **words: Any) -> Any:
        return self.memory.__dlpack__(**words)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __array_namespace__(self) -> type[Namespace]:
        return Namespace


class Bare:
    """DLPack without a namespace."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory

    def __dlpack__(self) -> Any:
        return self.memory.__dlpack__()
