"""Buckets: flat arrays that hold many arrays one after the other, so that one message sends all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from pycoll.arrays.registry import empty
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.points import GRAIN

Shape = tuple[int, ...]


def places(counts: Sequence[int], item_bytes: int) -> list[int]:
    """The start of each array, in elements, aligned to a cache line; last the total length.

    ``counts``: the number of elements of each array.
    """
    step = max(1, GRAIN // item_bytes)
    return [0, *itertools.accumulate(-(-count // step) * step for count in counts)]


def zeros(count: int, kind: str) -> Any:
    """A NumPy array of ``count`` zeros; ``kind`` names the dtype."""
    made = empty(count, kind)
    made.view("uint8")[...] = 0
    return made


class Bucket:
    """A flat array and views of it with given shapes; reducing ``flat`` reduces all ``views``.

    Arguments:
        ``shapes``: the shape of each view.
        ``dtype``: the name of the dtype of all views; ignored if ``flat`` is given.
        ``flat``: an array of one axis with at least ``length`` elements, of any framework whose
            slices share memory (NumPy, torch). By default a new NumPy array filled with zeros.

    Attributes: ``shapes``; ``flat``, the first ``length`` elements of the memory; ``views``, one
    array per shape. Each view begins at a multiple of 64 bytes from the start of ``flat``.

    Errors: InvalidArgumentError where ``flat`` is too short or has more than one axis.

    Cost: up to 63 bytes of padding per view; no copies.

    >>> bucket = pycoll.optim.Bucket([(2, 3), (4,)])
    >>> bucket.views[1].fill(2)
    >>> _ = comm.all_reduce(bucket.flat, out=bucket.flat)
    >>> bucket.views[1]
    array([2., 2., 2., 2.], dtype=float32)
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
        """The number of elements of ``flat``, padding between views included."""
        return self._places[-1]

    def neighbours(self, first: int, last: int) -> Any:
        """The slice of ``flat`` that holds the views ``first`` to ``last``, both inclusive."""
        return self.flat[self._places[first] : self._places[last] + self._count(last)]

    def _count(self, number: int) -> int:
        return math.prod(self.shapes[number])
