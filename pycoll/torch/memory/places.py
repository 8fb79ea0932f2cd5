"""Check that no two elements of an output tensor share a memory location."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch


def check_places(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError, naming the argument ``what``, for a tensor whose elements share memory.

    Tensors of ``expand()`` are an example: writing a result there element by element loses values.
    """
    for number, one in enumerate(tensors):
        if not (one.is_contiguous() or _are_apart(one.shape, one.stride())):
            name = what if len(tensors) == 1 else f"{what}[{number}]"
            raise ValueError(
                f"{name} has shape {tuple(one.shape)} and strides {one.stride()}: several elements "
                "share one place in memory, so results cannot be put there; pass clone()"
            )


@functools.lru_cache(4096)
def _are_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether no two elements of a tensor of this layout share memory.

    Cached, since each training step asks for the same layouts.
    """
    axes = sorted(one for one in zip(strides, shape, strict=True) if one[1] > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            # Longer strides may still reach gaps that shorter strides leave.
            return stride > 0 and _are_apart_by_count(axes)
        reach += stride * (size - 1)
    return True


def _are_apart_by_count(axes: list[tuple[int, int]]) -> bool:
    """Decide exactly from the location of every element; only sliding windows need this."""
    places = np.zeros(1, np.int64)
    for stride, size in axes:
        places = np.add.outer(places, stride * np.arange(size)).ravel()
    return len(np.unique(places)) == len(places)
