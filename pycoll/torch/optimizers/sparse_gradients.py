"""Reduce sparse tensors by gathering the indices and values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pycoll.torch.horovod.handles import synchronize
from pycoll.torch.horovod.moving_calls import grouped_allgather_async
from pycoll.torch.horovod.process_sets import ProcessSet, global_process_set
from pycoll.torch.horovod.scaled_ops import Average, Sum, check_op


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: Any,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start the reduction of a sparse COO tensor.

    Arguments: ``tensor``, a sparse COO tensor; ``name``, equal on all ranks; ``op``, Sum or
    Average; ``process_set``, the ranks that take part.

    Result: a function without arguments that waits and returns the sparse result. The result is
    not coalesced: an index may occur once per rank.

    Errors: ValueError for a dense tensor and for any other op.

    Cost: gathers the indices and values of all ranks on every rank.

    >>> wait = hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="table", op=hvd.Sum)
    >>> wait().to_dense()
    tensor([[1., 0.],
            [0., 1.]])
    """
    reduction = check_op(op)
    if reduction not in (Sum, Average):
        raise ValueError(f"op is {reduction.name}: sparse tensors support Sum and Average")
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
