"""Buckets: one array in which many lie, one behind the other, so that they travel as one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pycoll.arrays import empty
from pycoll.errors import InvalidArgumentError
from pycoll.optim.policies import GRAIN

Shape = tuple[int, ...]


def places(counts: Sequence[int], item_bytes: int) -> list[int]:
    """Where arrays of so many elements begin, each on a cache line, and the length of them all."""
    step = max(1, GRAIN // item_bytes)
    return [0, *itertools.accumulate(-(-count // step) * step for count in counts)]


def zeros(count: int, kind: str) -> Any:
    """New memory for ``count`` elements of a type by its name, as a NumPy array."""
    made = empty(count, kind)
    made.view("uint8")[...] = 0
    return made


class Bucket:
    """Arrays that live in one: what is written to ``views`` is reduced by reducing ``flat``.

    >>> bucket = pycoll.optim.Bucket([(2, 3), (4,)])
    >>> bucket.views[0][...] = weights; bucket.views[1][...] = bias
    >>> comm.all_reduce(bucket.flat, out=bucket.flat)

    ``shapes``: of the arrays. ``dtype``: of all of them, by name. ``flat``: an array of one axis
    that you bring, of any framework whose slices share memory (NumPy, torch), long enough; else
    there will be one of NumPy's, filled with zeros. Arrays begin on cache lines of it.

    Raises InvalidArgumentError where flat is too short or has more axes.
    """

    def __init__(
        self, shapes: Sequence[Shape], dtype: str = "float32", *, flat: Any = None
    ) -> None:
        item_bytes = int(empty(0, dtype).itemsize) if flat is None else int(flat.itemsize)
        self.shapes = [tuple(shape) for shape in shapes]
        self._places = places([math.prod(shape) for shape in self.shapes], item_bytes)
        if flat is None:
            flat = zeros(self.length, dtype)
        if len(flat.shape) != 1 or flat.shape[0] < self.length:
            raise InvalidArgumentError(
                f"flat has shape {tuple(flat.shape)}: expected one axis of at least {self.length}"
            )
        self.flat = flat[: self.length]
        self.views = [
            flat[start : start + math.prod(shape)].reshape(shape)
            for start, shape in zip(self._places, self.shapes, strict=False)
        ]

    @property
    def length(self) -> int:
        """Elements that the arrays take, with the gaps between them."""
        return self._places[-1]

    def neighbours(self, first: int, last: int) -> Any:
        """The part of ``flat`` with the arrays ``first`` to ``last``, both inclusive."""
        return self.flat[self._places[first] : self._places[last] + self._count(last)]

    def _count(self, number: int) -> int:
        return math.prod(self.shapes[number])
