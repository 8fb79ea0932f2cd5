"""allreduce and reducescatter: in place or not, waiting or not, one tensor or several.

Everything here is keyed by ``name``: ranks may call in any order, and tensors of the same name
meet. Calls without a name meet in the order of the calls. Tensors of a name must have the same
shape and type on all ranks, and the other arguments must be alike; otherwise all ranks get
HorovodInternalError, which says what differs. A name that is still under way gives ValueError, and
so does a tensor to work in place on that has one place in memory for several elements.

``op`` is Average (the default), Sum, Min, Max, Product or Adasum; ``average`` is its older form.
Inputs are multiplied by ``prescale_factor`` before and results by ``postscale_factor`` after the
reduction, integers in float64 and 16-bit types in float32. ``process_set`` says which ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pycoll.torch.compression import Compression, Compressor
from pycoll.torch.errors import HorovodInternalError
from pycoll.torch.handles import run, started
from pycoll.torch.moving import gathered
from pycoll.torch.ops import Adasum, Average, ReduceOp, Sum, checked, chosen, scaled
from pycoll.torch.places import check_places
from pycoll.torch.process_sets import ProcessSet, global_process_set
from pycoll.torch.tasks import AllReduce, ReduceScatter, Reduction, reduction_of

Tensors = Sequence[torch.Tensor]


class How(NamedTuple):
    """The arguments of a reduction beside its tensors."""

    reduction: Reduction
    process_set: ProcessSet

    def backward(self, given: torch.Tensor) -> torch.Tensor:
        """A gradient of the reduction's scattered result, scaled for the inputs."""
        reduction = self.reduction
        size = self.process_set.size() if reduction.op == Sum else 1
        assert size is not None
        return scaled(given, size * reduction.prescale * reduction.postscale)


#: What arguments say that were met before, but for Adasum, where the ranks count. Steps ask this
#: for each of their hundreds of tensors.
_known: dict[tuple[Any, ...], Reduction] = {}
_KNOWN_MAX = 256


def _how(
    op: Any, average: Any, prescale: float, postscale: float, process_set: ProcessSet
) -> Reduction:
    """The reduction that the arguments say; ValueError where they say none."""
    try:
        known = _known.get((op, average, prescale, postscale))
    except TypeError:  # op or average is nothing that there could be, as below tells
        known = None
    if known is not None:
        return known
    reduction = reduction_of(chosen(op, average), float(prescale), float(postscale))
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
    """One tensor, as those of ``_checked_tensors``."""
    if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
        return [tensor]
    return _checked_tensors([tensor])


def _new_like(tensors: Tensors) -> list[torch.Tensor]:
    return [one.new_empty(one.shape) for one in tensors]


def _backward_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.backward"


class _AllReduce(torch.autograd.Function):
    """The gradient of a sum over ranks is the sum of the gradients, and so for the average."""

    @staticmethod
    def forward(ctx: Any, how: How, name: str | None, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.name = how, name
        task = AllReduce(tensors, _new_like(tensors), how.reduction)
        return tuple(run(task, name, how.process_set))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return (None, None, *_AllReduce.apply(ctx.how, _backward_name(ctx.name), *grads))


class _ReduceScatter(torch.autograd.Function):
    """Every rank's rows of the gradient are gathered; for Sum they count once per rank."""

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
    """Start reducing into a new tensor; returns its handle. See the module."""
    tensors = _checked_tensor(tensor)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    task = AllReduce(tensors, _new_like(tensors), how)
    return started(task, name, process_set, _only)


def allreduce_async_(
    tensor: torch.Tensor,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing in place; returns the handle. Leave the tensor alone until it is done."""
    tensors = _checked_tensor(tensor)
    check_places("tensor", tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return started(AllReduce(tensors, tensors, how), name, process_set, _only)


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
    """The ranks' tensors, reduced, as a new tensor; gradients flow through it. See the module."""
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
    """Reduce in place, and return the tensor."""
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
    """Start reducing several tensors, all or none, into new ones; returns one handle."""
    found = _checked_tensors(tensors)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return started(AllReduce(found, _new_like(found), how), name, process_set, list)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: Any = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors in place, all or none; returns one handle."""
    found = _checked_tensors(tensors)
    check_places("tensors", found)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    return started(AllReduce(found, found, how), name, process_set, list)


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
    """Several tensors, reduced together, as new ones; gradients flow through them."""
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
    """Reduce several tensors in place, and return them."""
    found = _checked_tensors(tensors)
    check_places("tensors", found)
    how = _how(op, average, prescale_factor, postscale_factor, process_set)
    run(AllReduce(found, found, how), name, process_set)
    return found


def _scattered(tensors: Any, op: Any) -> tuple[list[torch.Tensor], ReduceOp]:
    found = _checked_tensors(tensors)
    if any(one.dim() == 0 for one in found):
        raise ValueError("reducescatter of a scalar: there are no rows to give to the ranks")
    reduction = checked(op)
    if reduction == Adasum:
        raise HorovodInternalError("op is Adasum, which reducescatter does not know: use allreduce")
    return found, reduction


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing and sharing out the rows; returns a handle. See ``reducescatter``."""
    tensors, reduction = _scattered([tensor], op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    task = ReduceScatter(tensors, how)
    return started(task, name, process_set, _only)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's rows of the reduced tensor; low ranks get one more where it does not divide.

    Gradients flow through it. ValueError for scalars, HorovodInternalError for Adasum.
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
    """Start ``reducescatter`` of several tensors, all or none; returns one handle."""
    found, reduction = _scattered(tensors, op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    task = ReduceScatter(found, how)
    return started(task, name, process_set, list)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: Any = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """``reducescatter`` of several tensors together; gradients flow through them."""
    found, reduction = _scattered(tensors, op)
    how = _how(reduction, None, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(one) for one in found]
    reduced = _ReduceScatter.apply(How(how, process_set), name, *(small for small, _ in pairs))
    return [
        compression.decompress(one, note) for one, (_, note) in zip(reduced, pairs, strict=True)
    ]


def _only(results: list[torch.Tensor]) -> torch.Tensor:
    return results[0]
