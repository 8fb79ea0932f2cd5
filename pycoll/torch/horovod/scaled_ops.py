"""Reductions under the names of Horovod, and the scaling of tensors before and after them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch


class ReduceOp(IntEnum):
    """The reductions of Horovod. Also available as hvd.Average, hvd.Sum and so on."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5

    #: Each task looks up its reduction in a dict; the hash of Enum is slow, as it is Python code.
    __hash__ = int.__hash__


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Adasum = ReduceOp.Adasum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

#: pycoll's names of the reductions that are a single collective.
WORDS = {Average: "avg", Sum: "sum", Min: "min", Max: "max", Product: "prod"}


def choose_op(op: Any, average: Any) -> ReduceOp:
    """The reduction given by ``op`` or by the older argument ``average``; by default Average.

    Raises ValueError if both are given, and for a value that is not a reduction.
    """
    if op is not None and average is not None:
        raise ValueError(f"op is {op!r} and average is {average!r}: give only op")
    if average is not None:
        return Average if average else Sum
    return Average if op is None else check_op(op)


def check_op(op: Any) -> ReduceOp:
    """``op`` as a ReduceOp. ValueError if it is not a reduction."""
    if isinstance(op, ReduceOp):
        return op
    try:
        return ReduceOp(op)
    except ValueError:
        known = ", ".join(one.name for one in ReduceOp)
        raise ValueError(f"op is {op!r}: expected one of {known}") from None


def scale_tensor(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """``tensor`` times ``factor`` in its own dtype; the tensor itself if the factor is 1.

    The product is computed in float64 for integers, and in float32 for floats of fewer bits.
    """
    if factor == 1.0:
        return tensor
    if tensor.is_complex() or tensor.dtype in (torch.float32, torch.float64):
        return tensor * factor
    wide = torch.float32 if tensor.is_floating_point() else torch.float64
    return (tensor.to(wide) * factor).to(tensor.dtype)
