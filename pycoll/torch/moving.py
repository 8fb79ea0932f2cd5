"""allgather, broadcast, alltoall, join and barrier: tensors that move as they are, or none.

Names, errors and ``process_set`` are as in reducing.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycoll.torch import world
from pycoll.torch.coordinator import JOIN
from pycoll.torch.handles import run, started
from pycoll.torch.ops import Average
from pycoll.torch.places import check_places
from pycoll.torch.process_sets import ProcessSet, coordinator_of, global_process_set
from pycoll.torch.tasks import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Task,
    reduction_of,
)

Tensors = Sequence[torch.Tensor]


def _averaged(grads: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """Gradients of something that every rank has, which Horovod averages."""
    outputs = [one.new_empty(one.shape) for one in grads]
    found: list[torch.Tensor] = run(
        AllReduce(grads, outputs, reduction_of(Average)), _backward_name(name), process_set
    )
    return found


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class _AllGather(torch.autograd.Function):
    """Each rank gets back its rows of the ranks' averaged gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        joined, rows = run(AllGather(tensors), name, process_set)
        place = process_set.rank()
        ctx.name, ctx.process_set = name, process_set
        ctx.parts = [(sum(one[:place]), one[place]) for one in rows]
        ctx.shapes = [one.shape for one in tensors]
        return tuple(joined)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        averaged = _averaged(grads, ctx.name, ctx.process_set)
        own = [
            one.narrow(0, start, length).reshape(shape)
            for one, (start, length), shape in zip(averaged, ctx.parts, ctx.shapes, strict=True)
        ]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """The root gets back the ranks' averaged gradient, the others zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root, ctx.name, ctx.process_set = root, name, process_set
        output = tensor.new_empty(tensor.shape)
        return run(_broadcast_task(tensor, output, root, process_set), name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (averaged,) = _averaged(grads, ctx.name, ctx.process_set)
        if world.rank() != ctx.root:
            averaged.zero_()
        return averaged, None, None, None


class _AllToAll(torch.autograd.Function):
    """Gradients go back where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: list[int],
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        output, received = run(AllToAll(tensor, splits), name, process_set)
        ctx.received, ctx.name, ctx.process_set = received, name, process_set
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        task = AllToAll(grads[0], ctx.received.tolist())
        found, _ = run(task, _backward_name(ctx.name), ctx.process_set)
        return found, None, None, None


def gathered(tensors: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """``grouped_allgather`` without arguments to check."""
    return list(_AllGather.apply(name, process_set, *tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start joining; returns a handle. See ``allgather``."""
    return started(AllGather([tensor]), name, process_set, lambda result: result[0][0])


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The ranks' tensors joined along the first dimension, which may differ between ranks.

    Gradients flow through it.
    """
    return gathered([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``allgather`` of several tensors, all or none; returns one handle."""
    return started(AllGather(list(tensors)), name, process_set, lambda result: list(result[0]))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """``allgather`` of several tensors together; gradients flow through them."""
    return gathered(list(tensors), name, process_set)


def _broadcast_task(
    tensor: torch.Tensor, output: torch.Tensor, root: int, process_set: ProcessSet
) -> Broadcast:
    return Broadcast(tensor, output, place_of(root, process_set), root)


def place_of(root: int, process_set: ProcessSet) -> int:
    """The root's rank in the process set. ValueError if it is not there."""
    ranks = coordinator_of(process_set).ranks
    if root not in ranks:
        raise ValueError(f"root_rank is {root}: expected one of {ranks}")
    return ranks.index(root)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start giving the root's tensor to all, as a new one; returns a handle."""
    output = tensor.new_empty(tensor.shape)
    return started(
        _broadcast_task(tensor, output, root_rank, process_set), name, process_set, _as_it_is
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start giving the root's tensor to all, in place; returns a handle."""
    check_places("tensor", [tensor])
    return started(
        _broadcast_task(tensor, tensor, root_rank, process_set), name, process_set, _as_it_is
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The root's tensor, on all ranks, as a new one; gradients flow through it.

    ``root_rank`` counts in the whole world, also for a process set. ValueError if it is not there.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Give the root's tensor to all in place, and return it."""
    check_places("tensor", [tensor])
    run(_broadcast_task(tensor, tensor, root_rank, process_set), name, process_set)
    return tensor


def _checked_splits(tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> list[int]:
    size = len(coordinator_of(process_set).ranks)
    if tensor.dim() == 0:
        raise ValueError("alltoall of a scalar: there are no rows to give to the ranks")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"tensor has {rows} rows, which {size} ranks cannot share equally: pass splits"
            )
        return [rows // size] * size
    given = splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits, device="cpu")
    if given.is_floating_point() or given.is_complex() or given.dtype is torch.bool:
        raise ValueError(f"splits has type {given.dtype}: expected whole numbers")
    if given.is_meta:
        raise ValueError("splits is on meta, where there are no numbers: make it on the host")
    if given.dim() != 1 or len(given) != size:
        raise ValueError(f"splits has shape {tuple(given.shape)}: expected {size} numbers")
    found = [int(one) for one in given.tolist()]
    if min(found) < 0:
        raise ValueError(f"splits is {found}: expected no negative numbers")
    if sum(found) != rows:
        raise ValueError(f"splits add up to {sum(found)}, but the tensor has {rows} rows")
    return found


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start exchanging rows; the handle gives the rows and the received splits."""
    task = AllToAll(tensor, _checked_splits(tensor, splits, process_set))
    return started(task, name, process_set, _as_it_is)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rows to every rank, and the rows that came from every rank, in rank order.

    The next ``splits[r]`` rows go to rank r; without splits every rank gets equally many. Returns
    the received rows, with splits also a tensor of how many came from each rank. Gradients flow
    through it. ValueError for splits that do not fit.
    """
    numbers = _checked_splits(tensor, splits, process_set)
    output, received = _AllToAll.apply(tensor, numbers, name, process_set)
    return output if splits is None else (output, received)


def join(device: int = -1) -> int:
    """Wait for all ranks to call join; returns the rank that was last.

    Meanwhile this rank gives zeros to the others' allreduce by Sum or Average; their other
    operations fail with HorovodInternalError. ``device`` is there for Horovod's programs.
    ValueError where a DistributedOptimizer has a policy.
    """
    if coordinator_of(global_process_set).has_adopted:
        raise ValueError(
            "hvd.join() beside a DistributedOptimizer with a policy, whose steps need all ranks: "
            "leave the policy out, or make equally many steps on all ranks"
        )
    task = Task("{}")
    task.kind, task.warns = JOIN, False
    found: int = run(task, None, global_process_set)
    return found


def barrier(process_set: ProcessSet | None = None) -> None:
    """Return when every rank of the set has come here."""
    run(Barrier(), None, process_set or global_process_set)


def _as_it_is(result: Any) -> Any:
    return result
