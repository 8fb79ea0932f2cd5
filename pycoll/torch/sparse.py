"""Reduction of sparse tensors: everybody's indices and values are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycoll.torch.handles import synchronize
from pycoll.torch.moving import grouped_allgather_async
from pycoll.torch.ops import Average, Sum, checked
from pycoll.torch.process_sets import ProcessSet, global_process_set


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: Any,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start reducing a sparse COO tensor; the function that is returned gives the result.

    ``op`` is Sum or Average. The result is not coalesced: an index may occur once per rank.
    Raises ValueError for a dense tensor and another op.
    """
    reduction = checked(op)
    if reduction not in (Sum, Average):
        raise ValueError(f"op is {reduction.name}: sparse tensors know Sum and Average")
    if tensor.layout is not torch.sparse_coo:
        raise ValueError(f"tensor has layout {tensor.layout}: expected torch.sparse_coo")
    shape = tensor.shape
    given = tensor.detach()
    handle = grouped_allgather_async(
        [given._indices().t().contiguous(), given._values()],
        None if name is None else f"{name}.sparse",
        process_set,
    )

    def result() -> torch.Tensor:
        indices, values = synchronize(handle)
        if reduction == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(
            indices.t(), values, shape, device=values.device, check_invariants=False
        )

    return result
