"""allreduce and reducescatter: in place or not, blocking or not, of one tensor or of several.

``name`` is the key of an operation: ranks may call in any order, and calls of the same name form
one operation. Calls without a name are matched by their order. Tensors of a name must have the same
shape and dtype on all ranks, and the other arguments must be equal too. Otherwise all ranks raise
HorovodInternalError, which says what differs. A name that is still under way raises ValueError. So
does a tensor for an operation in place of which several elements share memory.

``op`` is Average (the default), Sum, Min, Max, Product or Adasum; ``average`` is its older form.
Inputs are multiplied by ``prescale_factor`` before the reduction, and results by
``postscale_factor`` after it: integers in float64, 16-bit types in float32. ``process_set``: the
ranks that take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pycoll.torch.compression import Compression, Compressor
from pycoll.torch.horovod.handles import run, start_task
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.moving_calls import gathered
from pycoll.torch.horovod.process_sets import ProcessSet, global_process_set
from pycoll.torch.horovod.scaled_ops import (
    Adasum,
    Average,
    ReduceOp,
    Sum,
    check_op,
    choose_op,
    scale_tensor,
)
from pycoll.torch.horovod.tasks import AllReduce, ReduceScatter, Reduction, reduction_of
from pycoll.torch.memory.places import check_places

Tensors = Sequence[torch.Tensor]


class How(NamedTuple):
    """The arguments of a reduction except its tensors."""

    reduction: Reduction
    process_set: ProcessSet

    def backward(self, given: torch.Tensor) -> torch.Tensor:
        """Scale a gradient of a reducescatter's result for its inputs."""
        reduction = self.reduction
        size = self.process_set.size() if reduction.op == Sum else 1
        assert size is not None
        return scale_tensor(given, size * reduction.prescale * reduction.postscale)


#: Reductions by earlier arguments, without Adasum, whose validity depends on the ranks. A training
#: step looks this up for each of its tensors.
_known: dict[tuple[Any, ...], Reduction] = {}
_KNOWN_MAX = 256


def _how(
    op: Any, average: Any, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction that the arguments describe; ValueError where they are invalid."""
    try:
        known = _known.get((op, average, prescale, postscale))
    except TypeError:  # op or average is not hashable, so it is invalid: ``choose_op`` raises
        known = None
    if known is not None:
        return known
    reduction = reduction_of(choose_op(op, average), float(prescale), float(postscale))
    if reduction.op is Adasum:
        if process_set.process_set_id != 0:
            raise ValueError(f"op is Adasum and process_set is {process_set}: it needs all ranks")
        size = process_set.size() or 1
        if size & (size - 1):
            raise ValueError(f"op is Adasum, which needs a power of two of ranks; there are {size}")
    elif len(_known) < _KNOWN_MAX:
        _known[op, average, prescale, postscale] = reduction
    return reduction


def _checked_tensors(tensors: Any) -> list[torch.Tensor]:
    found = list(tensors)
    wrong = [one for one in found if not isinstance(one, torch.Tensor)]
    if wrong or not found:
        raise ValueError(f"tensors is {tensors!r}: expected at least one tensor, and tensors only")
    sparse = [one for one in found if one.layout is not torch.strided]
    if sparse:
        raise ValueError(
            f"a tensor has layout {sparse[0].layout}: use sparse_allreduce_async, or to_dense()"
        )
    return found


def _checked_tensor(tensor: Any) -> list[torch.Tensor]:
    """``_checked_tensors`` of one tensor."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
        return [tensor]
    return _checked_tensors([tensor])


def _new_like(tensors: Tensors) -> list[torch.Tensor]:
    return [one.new_empty(one.shape) for one in tensors]


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class _AllReduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the gradients; alike for the average."""

    @staticmethod
    def forward(ctx: Any, how: How, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.name = how, name
        task = AllReduce(tensors, _new_like(tensors), how.reduction)
        return tuple(run(task, name, how.process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *_AllReduce.apply(ctx.how, _backward_name(ctx.name), *grads))


class _ReduceScatter(torch.autograd.Function):
    """The gradient is gathered from the rows of all ranks; for Sum it is multiplied by size."""

    @staticmethod
    def forward(ctx: Any, how: How, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.name = how, name
        task = ReduceScatter(tensors, how.reduction)
        return tuple(run(task, name, how.process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        wanted = [ctx.how.backward(one) for one in grads]
        return (None, None, *gathered(wanted, _backward_name(ctx.name), ctx.how.process_set))


def allreduce_async(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce`` without compression and return a handle.

    Arguments: those of ``allreduce`` except ``compression``. Do not change ``tensor`` until the
    handle is synchronized.

    Result: a handle for ``synchronize``, which returns the new tensor. No gradients flow through
    it.

    Errors: ValueError at once, as of ``allreduce``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``allreduce``, while the program goes on.

    >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
    >>> hvd.synchronize(handle)
    tensor([1., 1.])
    """
    tensors = _checked_tensor(tensor)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    task = AllReduce(tensors, _new_like(tensors), how)
    return start_task(task, name, process_set, _only)


def allreduce_async_(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``allreduce_`` and return a handle.

    Arguments: those of ``allreduce_``. Do not use ``tensor`` until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns ``tensor`` itself.

    Errors: ValueError at once, as of ``allreduce_``; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``allreduce_``, while the program goes on.

    >>> gradient = torch.ones(2)
    >>> hvd.synchronize(hvd.allreduce_async_(gradient, postscale_factor=0.5)) is gradient
    True
    >>> gradient
    tensor([0.5000, 0.5000])
    """
    tensors = _checked_tensor(tensor)
    check_places("tensor", tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return start_task(AllReduce(tensors, tensors, how), name, process_set, _only)


def allreduce(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensors of all ranks, element by element.

    Arguments:
        ``tensor``: a dense tensor of equal shape and dtype on all ranks, in host memory or on a
            CUDA device.
        ``average``: the older form of ``op``: True for Average, False for Sum.
        ``name``: the key of the operation, equal on all ranks. Without a name, calls are matched
            by their order.
        ``compression``: a compressor of ``Compression`` for the transfer.
        ``op``: Average (the default), Sum, Min, Max, Product or Adasum.
        ``prescale_factor``, ``postscale_factor``: factors for the inputs before the reduction and
            for the result after it.
        ``process_set``: the ranks that take part.

    Result: a new tensor of the shape and dtype of ``tensor``. Gradients flow through it.

    Errors: ValueError for a sparse tensor, an unknown op, both ``op`` and ``average``, and a name
    that is under way. ValueError for Adasum on a process set, or on a number of ranks that is not
    a power of two. HorovodInternalError where the ranks disagree or a rank is lost.

    Cost: one all-reduce. Operations that are ready together are fused into one, up to
    HOROVOD_FUSION_THRESHOLD bytes.

    >>> hvd.allreduce(torch.tensor([1.0, 2.0]), name="loss")  # the average over all ranks
    tensor([1., 2.])
    """
    (tensor,) = _checked_tensor(tensor)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    small, note = compression.compress(tensor)
    return compression.decompress(_AllReduce.apply(How(how, process_set), name, small)[0], note)


def allreduce_(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduce the tensors of all ranks in place, without compression.

    Arguments: those of ``allreduce`` except ``compression``; ``tensor`` receives the result.

    Result: ``tensor`` itself. No gradients flow through it.

    Errors: those of ``allreduce``; ValueError also where several elements of ``tensor`` share
    memory.

    Cost: that of ``allreduce``, without memory for a result.

    >>> gradient = torch.ones(2)
    >>> hvd.allreduce_(gradient, op=hvd.Sum) is gradient
    True
    """
    tensors = _checked_tensor(tensor)
    check_places("tensor", tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    run(AllReduce(tensors, tensors, how), name, process_set)
    return tensor


def grouped_allreduce_async(
    tensors: Tensors,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce`` without compression and return one handle.

    Arguments: those of ``grouped_allreduce`` except ``compression``. Do not change ``tensors``
    until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns a list of new tensors. No gradients flow
    through them.

    Errors: ValueError at once, as of ``grouped_allreduce``; ``synchronize`` raises
    HorovodInternalError.

    Cost: that of ``grouped_allreduce``, while the program goes on.

    >>> handle = hvd.grouped_allreduce_async([torch.ones(1), torch.zeros(2)])
    >>> hvd.synchronize(handle)
    [tensor([1.]), tensor([0., 0.])]
    """
    found = _checked_tensors(tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return start_task(AllReduce(found, _new_like(found), how), name, process_set, list)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start ``grouped_allreduce_`` and return one handle.

    Arguments: those of ``grouped_allreduce_``. Do not use ``tensors`` until the handle is
    synchronized.

    Result: a handle for ``synchronize``, which returns a list of ``tensors``.

    Errors: ValueError at once, as of ``grouped_allreduce_``; ``synchronize`` raises
    HorovodInternalError.

    Cost: that of ``grouped_allreduce_``, while the program goes on.

    >>> gradients = [torch.ones(1), torch.zeros(2)]
    >>> hvd.synchronize(hvd.grouped_allreduce_async_(gradients))
    [tensor([1.]), tensor([0., 0.])]
    """
    found = _checked_tensors(tensors)
    check_places("tensors", found)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return start_task(AllReduce(found, found, how), name, process_set, list)


def grouped_allreduce(
    tensors: Tensors,
    average: Any = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors of all ranks as one operation: all of them run, or none.

    Arguments: ``tensors``, at least one; they may differ in shape and dtype. The others are those
    of ``allreduce``.

    Result: a list of new tensors, in the order of ``tensors``. Gradients flow through them.

    Errors: those of ``allreduce``; ValueError also for no tensors.

    Cost: one all-reduce for each dtype.

    >>> hvd.grouped_allreduce([torch.ones(1), torch.zeros(2)], name="gradients")
    [tensor([1.]), tensor([0., 0.])]
    """
    found = _checked_tensors(tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(one) for one in found]
    reduced = _AllReduce.apply(How(how, process_set), name, *(small for small, _ in pairs))
    return [
        compression.decompress(one, note) for one, (_, note) in zip(reduced, pairs, strict=True)
    ]


def grouped_allreduce_(
    tensors: Tensors,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Reduce several tensors of all ranks in place, as one operation.

    Arguments: those of ``grouped_allreduce`` except ``compression``; ``tensors`` receive the
    results.

    Result: a list of ``tensors``. No gradients flow through them.

    Errors: those of ``grouped_allreduce``; ValueError also where several elements of the tensors
    share memory.

    Cost: that of ``grouped_allreduce``, without memory for results.

    >>> gradients = [torch.ones(1), torch.zeros(2)]
    >>> hvd.grouped_allreduce_(gradients)[0] is gradients[0]
    True
    """
    found = _checked_tensors(tensors)
    check_places("tensors", found)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    run(AllReduce(found, found, how), name, process_set)
    return found


def _check_scatter(tensors: Any, op: Any) -> tuple[list[torch.Tensor], ReduceOp]:
    found = _checked_tensors(tensors)
    if any(one.dim() == 0 for one in found):
        raise ValueError("reducescatter of a scalar: there are no rows to give to the ranks")
    reduction = check_op(op)
    if reduction == Adasum:
        raise HorovodInternalError(
            "op is Adasum, which reducescatter does not support: use allreduce"
        )
    return found, reduction


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``reducescatter`` without compression and return a handle.

    Arguments: those of ``reducescatter`` except ``compression``. Do not change ``tensor`` until the
    handle is synchronized.

    Result: a handle for ``synchronize``, which returns this rank's rows. No gradients flow through
    them.

    Errors: ValueError and HorovodInternalError at once, as of ``reducescatter``; ``synchronize``
    raises HorovodInternalError.

    Cost: that of ``reducescatter``, while the program goes on.

    >>> handle = hvd.reducescatter_async(torch.ones(2, 2))
    >>> hvd.synchronize(handle).shape  # on one rank all rows
    torch.Size([2, 2])
    """
    tensors, reduction = _check_scatter([tensor], op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    task = ReduceScatter(tensors, how)
    return start_task(task, name, process_set, _only)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce the tensors of all ranks and return this rank's share of the rows.

    Arguments: those of ``allreduce`` except ``average``; ``tensor`` has at least one axis, and
    ``op`` is any but Adasum.

    Result: a new tensor with this rank's rows of the reduced tensor. Where the number of rows is
    not a multiple of the number of ranks, low ranks get one row more. Gradients flow through it.

    Errors: ValueError for a scalar, HorovodInternalError for Adasum; otherwise those of
    ``allreduce``.

    Cost: one reduce-scatter.

    >>> hvd.reducescatter(torch.ones(2, 2), op=hvd.Sum).shape  # on one rank all rows
    torch.Size([2, 2])
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor
    )[0]


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start ``grouped_reducescatter`` without compression and return one handle.

    Arguments: those of ``grouped_reducescatter`` except ``compression``. Do not change ``tensors``
    until the handle is synchronized.

    Result: a handle for ``synchronize``, which returns a list of this rank's rows of each tensor.
    No gradients flow through them.

    Errors: those of ``grouped_reducescatter`` at once; ``synchronize`` raises HorovodInternalError.

    Cost: that of ``grouped_reducescatter``, while the program goes on.

    >>> handle = hvd.grouped_reducescatter_async([torch.ones(1), torch.zeros(2)])
    >>> hvd.synchronize(handle)
    [tensor([1.]), tensor([0., 0.])]
    """
    found, reduction = _check_scatter(tensors, op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    task = ReduceScatter(found, how)
    return start_task(task, name, process_set, list)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce several tensors as one operation, and return this rank's rows of each.

    Arguments: ``tensors``, at least one, each with at least one axis. The others are those of
    ``reducescatter``.

    Result: a list of new tensors, in the order of ``tensors``. Gradients flow through them.

    Errors: those of ``reducescatter``; ValueError also for no tensors.

    Cost: one reduce-scatter for each tensor.

    >>> hvd.grouped_reducescatter([torch.ones(1), torch.zeros(2)])
    [tensor([1.]), tensor([0., 0.])]
    """
    found, reduction = _check_scatter(tensors, op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(one) for one in found]
    reduced = _ReduceScatter.apply(How(how, process_set), name, *(small for small, _ in pairs))
    return [
        compression.decompress(one, note) for one, (_, note) in zip(reduced, pairs, strict=True)
    ]


def _only(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]
