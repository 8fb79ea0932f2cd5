"""The memory of messages that carry many arrays."""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import numpy as np

from pycoll.arrays.registry import aligned_memory

Memory: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class FusedMemory:
    """Memory of messages that have ended, kept for the next ones of a communicator.

    The pages of new memory cost as much as the copies into it. The memory of a message that fails
    is not kept. Threads: any.
    """

    _KEPT_MAX = 2

    def __init__(self) -> None:
        self._kept: list[Memory] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Memory:
        """Return memory of ``nbytes`` bytes or more, up to twice as much."""
        with self._lock:
            for place, memory in enumerate(self._kept):
                if nbytes <= memory.nbytes <= 2 * nbytes:
                    return self._kept.pop(place)
        return aligned_memory(nbytes)

    def give(self, memory: Memory) -> None:
        """Keep memory that nothing reads or writes any more, in place of the oldest."""
        with self._lock:
            self._kept = [*self._kept, memory][-self._KEPT_MAX :]
