"""Whether a tensor has a place of its own for each element, as whatever is written to must have."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch


def check_places(what: str, tensors: Sequence[torch.Tensor]) -> None:
    """ValueError that names the argument ``what`` for a tensor of which elements share memory.

    Such are those of ``expand()``: a result that is put there element by element is none.
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
    """Whether elements of such a tensor have places of their own; steps ask for the same ones."""
    axes = sorted(one for one in zip(strides, shape, strict=True) if one[1] > 1)
    reach = 0
    for stride, size in axes:
        if stride <= reach:
            # Longer strides may still step into gaps that shorter ones leave.
            return stride > 0 and _are_apart_by_count(axes)
        reach += stride * (size - 1)
    return True


def _are_apart_by_count(axes: list[tuple[int, int]]) -> bool:
    """Exactly, from every element's place; only windows that slide over memory come here."""
    places = np.zeros(1, np.int64)
    for stride, size in axes:
        places = np.add.outer(places, stride * np.arange(size)).ravel()
    return len(np.unique(places)) == len(places)
