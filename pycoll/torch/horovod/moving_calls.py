"""allgather, broadcast, alltoall, join and barrier: operations that do not combine values.

Names, errors and ``process_set`` are as in reducing_calls.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pycoll.arrays.rows import check_splits
from pycoll.errors import InvalidArgumentError
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.controller import JOIN
from pycoll.torch.horovod.handles import run, start_task
from pycoll.torch.horovod.process_sets import (
    ProcessSet,
    controller_of,
    global_process_set,
)
from pycoll.torch.horovod.scaled_ops import Average
from pycoll.torch.horovod.tasks import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Task,
    reduction_of,
)
from pycoll.torch.memory.places import check_places

Tensors = Sequence[torch.Tensor]


def _average(grads: Tensors, name: str | None, process_set: ProcessSet) -> list[torch.Tensor]:
    """Average gradients over the ranks, as Horovod does for results that every rank has."""
    outputs = [one.new_empty(one.shape) for one in grads]
    found: list[torch.Tensor] = run(
        AllReduce(grads, outputs, reduction_of(Average)), _backward_name(name), process_set
    )
    return found


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class _AllGather(torch.autograd.Function):
    """The gradient of a rank's input is its rows of the averaged gradients of all ranks."""

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
        averaged = _average(grads, ctx.name, ctx.process_set)
        own = [
            one.narrow(0, start, length).reshape(shape)
            for one, (start, length), shape in zip(averaged, ctx.parts, ctx.shapes, strict=True)
        ]
        return (None, None, *own)


class _Broadcast(torch.autograd.Function):
    """The gradient is the averaged gradient of all ranks on the root, and zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root, ctx.name, ctx.process_set = root, name, process_set
        output = tensor.new_empty(tensor.shape)
        return run(_broadcast_task(tensor, output, root, process_set), name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (averaged,) = _average(grads, ctx.name, ctx.process_set)
        if horovod_world.rank() != ctx.root:
            averaged.zero_()
        return averaged, None, None, None


class _AllToAll(torch.autograd.Function):
    """The gradients of received rows return to the ranks that sent the rows."""

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
    """``grouped_allgather`` of arguments that are checked already."""
    return list(_AllGather.apply(name, process_set, *tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``allgather`` and return a handle.

    Arguments: those of ``allgather``. Do not change ``tensor`` until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns the rows of all ranks. No gradients flow
    through them.

    Errors: ValueError at once, as of ``allgather``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``allgather``, while the program goes on.

    >>> hvd.synchronize(hvd.allgather_async(torch.ones(2)))
    tensor([1., 1.])
    """
    return start_task(AllGather([tensor]), name, process_set, lambda result: result[0][0])


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Join the tensors of all ranks along the first dimension.

    Arguments: ``tensor``, in host memory or on a CUDA device; ranks may differ in its first
    dimension only. ``name``: the key of the operation, equal on all ranks; without a name, calls
    are matched by their order. ``process_set``: the ranks that take part.

    Result: a new tensor with the rows of all ranks in rank order. Gradients flow through it.

    Errors: HorovodInternalError where the ranks disagree or a rank is lost, ValueError for a name
    that is under way.

    Cost: one exchange of lengths and one all-gather.

    >>> hvd.allgather(torch.full((hvd.rank() + 1, 2), 1.0))
    tensor([[1., 1.]])
    """
    return gathered([tensor], name, process_set)[0]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start ``grouped_allgather`` and return one handle.

    Arguments: those of ``grouped_allgather``. Do not change ``tensors`` until the handle is
    synchronized.

    Result: a handle for ``synchronize``, which returns a list of the rows of all ranks. No
    gradients flow through them.

    Errors: ValueError at once, as of ``allgather``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``grouped_allgather``, while the program goes on.

    >>> hvd.synchronize(hvd.grouped_allgather_async([torch.ones(1), torch.zeros(2)]))
    [tensor([1.]), tensor([0., 0.])]
    """
    return start_task(AllGather(list(tensors)), name, process_set, lambda result: list(result[0]))


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Join several tensors of all ranks as one operation, each along its first dimension.

    Arguments: ``tensors``, at least one; the others are those of ``allgather``.

    Result: a list of new tensors, in the order of ``tensors``. Gradients flow through them.

    Errors: those of ``allgather``.

    Cost: one exchange of lengths, and one all-gather for each tensor.

    >>> hvd.grouped_allgather([torch.ones(1), torch.zeros(2)])
    [tensor([1.]), tensor([0., 0.])]
    """
    return gathered(list(tensors), name, process_set)


def _broadcast_task(
    tensor: torch.Tensor, output: torch.Tensor, root: int, process_set: ProcessSet
) -> Broadcast:
    return Broadcast(tensor, output, place_of(root, process_set), root)


def place_of(root: int, process_set: ProcessSet) -> int:
    """The position of the root in the process set. ValueError if it is not in the set."""
    ranks = controller_of(process_set).ranks
    if root not in ranks:
        raise ValueError(f"root_rank is {root}: expected one of {ranks}")
    return ranks.index(root)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast`` and return a handle.

    Arguments: those of ``broadcast``. Do not change ``tensor`` until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns a new tensor. No gradients flow through it.

    Errors: ValueError at once, as of ``broadcast``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``broadcast``, while the program goes on.

    >>> hvd.synchronize(hvd.broadcast_async(torch.ones(2), root_rank=0))
    tensor([1., 1.])
    """
    output = tensor.new_empty(tensor.shape)
    return start_task(
        _broadcast_task(tensor, output, root_rank, process_set), name, process_set, _as_it_is
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``broadcast_`` and return a handle.

    Arguments: those of ``broadcast_``. Do not use ``tensor`` until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns ``tensor`` itself.

    Errors: ValueError at once, as of ``broadcast_``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``broadcast_``, while the program goes on.

    >>> weights = torch.ones(2)
    >>> hvd.synchronize(hvd.broadcast_async_(weights, root_rank=0)) is weights
    True
    """
    check_places("tensor", [tensor])
    return start_task(
        _broadcast_task(tensor, tensor, root_rank, process_set), name, process_set, _as_it_is
    )


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the tensor of the root to all ranks.

    Arguments: ``tensor``, of equal shape and dtype on all ranks, in host memory or on a CUDA
    device. ``root_rank``: a rank of the whole world, also for a process set. ``name``: the key of
    the operation, equal on all ranks; without a name, calls are matched by their order.
    ``process_set``: the ranks that take part.

    Result: a new tensor with the values of the root. Gradients flow through it.

    Errors: ValueError for a root that is not in the process set and for a name that is under way.
    HorovodInternalError where the ranks disagree or a rank is lost.

    Cost: one broadcast.

    >>> hvd.broadcast(torch.ones(2), root_rank=0)
    tensor([1., 1.])
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Copy the tensor of the root to the tensors of all ranks, in place.

    Arguments: those of ``broadcast``; ``tensor`` receives the values of the root.

    Result: ``tensor`` itself. No gradients flow through it.

    Errors: those of ``broadcast``; ValueError also where several elements of ``tensor`` share
    memory.

    Cost: that of ``broadcast``, without memory for a result.

    >>> weights = torch.ones(2)
    >>> hvd.broadcast_(weights, root_rank=0) is weights
    True
    """
    check_places("tensor", [tensor])
    run(_broadcast_task(tensor, tensor, root_rank, process_set), name, process_set)
    return tensor


def _checked_splits(tensor: torch.Tensor, splits: Any, process_set: ProcessSet) -> list[int]:
    size = len(controller_of(process_set).ranks)
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
    if given.is_meta:
        raise ValueError("splits is on meta, where there are no numbers: make it on the host")
    try:
        return check_splits(given.tolist(), rows, size, array="tensor")
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from None


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``alltoall`` and return a handle.

    Arguments: those of ``alltoall``. Do not change ``tensor`` until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns a pair of the received rows and an int32
    tensor of the number of rows from each rank. No gradients flow through the rows.

    Errors: ValueError at once, as of ``alltoall``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``alltoall``, while the program goes on.

    >>> hvd.synchronize(hvd.alltoall_async(torch.ones(2)))
    (tensor([1., 1.]), tensor([2], dtype=torch.int32))
    """
    task = AllToAll(tensor, _checked_splits(tensor, splits, process_set))
    return start_task(task, name, process_set, _as_it_is)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows to every rank and receive rows from every rank.

    Arguments: ``tensor``, with at least one axis, in host memory or on a CUDA device. ``splits``: a
    sequence or tensor of one integer per rank; rank r gets the next ``splits[r]`` rows. Without
    splits every rank gets equally many rows. ``name``: the key of the operation, equal on all
    ranks; without a name, calls are matched by their order. ``process_set``: the ranks that take
    part.

    Result: the received rows in rank order; with splits, a pair of these and an int32 tensor of
    the number of rows from each rank. Gradients flow through the rows.

    Errors: ValueError for a scalar and for splits that do not fit the tensor or the ranks, and for
    a name that is under way. HorovodInternalError where the ranks disagree or a rank is lost.

    Cost: two all-to-alls, the first of which sends the splits.

    >>> hvd.alltoall(torch.ones(2), splits=[2])
    (tensor([1., 1.]), tensor([2], dtype=torch.int32))
    """
    numbers = _checked_splits(tensor, splits, process_set)
    output, received = _AllToAll.apply(tensor, numbers, name, process_set)
    return output if splits is None else (output, received)


def join(device: int = -1) -> int:
    """Wait until all ranks have called join.

    Meanwhile this rank contributes zeros to the allreduces by Sum or Average of the other ranks.
    Other operations of theirs fail with HorovodInternalError.

    Arguments: ``device`` is ignored; programs for Horovod pass it.

    Result: the rank that called last.

    Errors: ValueError where a DistributedOptimizer has a policy, since its steps need all ranks.

    Cost: one message to the controller, and the operations that other ranks run meanwhile.

    >>> hvd.join()  # the only rank calls last
    0
    """
    if controller_of(global_process_set).has_adopted:
        raise ValueError(
            "hvd.join() with a DistributedOptimizer that has a policy: its steps need all ranks; "
            "leave the policy out, or make equally many steps on all ranks"
        )
    task = Task("{}")
    task.kind, task.warns = JOIN, False
    found: int = run(task, None, global_process_set)
    return found


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank of a process set has called barrier.

    Arguments: ``process_set``, the ranks that take part; None for all ranks.

    Errors: ValueError on a rank outside of the set; HorovodInternalError where a rank is lost.

    Cost: one round of the negotiation.

    >>> hvd.barrier()
    """
    run(Barrier(), None, process_set or global_process_set)


def _as_it_is(result: Any) -> Any:
    return result
