"""Broadcast parameters and optimizer states of one rank, so that all ranks begin alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from pycoll.local_updates.torch_optimizer import LocallyUpdated
from pycoll.torch.horovod import horovod_world
from pycoll.torch.horovod.handles import synchronize
from pycoll.torch.horovod.moving_calls import broadcast_async_
from pycoll.torch.horovod.object_calls import broadcast_object
from pycoll.torch.optimizers.wrapped_optimizers import Wrapped


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcast tensors from rank ``root_rank`` to all ranks, in place.

    Arguments: ``params`` is a dict of tensors (``model.state_dict()``), or an iterable of tensors
    or of (name, tensor) pairs (``model.named_parameters()``). Entries of a dict that are None are
    skipped. ``root_rank`` is the rank whose values all ranks get.

    Errors: ValueError for any other ``params``; otherwise those of ``broadcast_``.

    Cost: one broadcast per tensor, all under way together.

    >>> model = torch.nn.Linear(2, 1)
    >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    handles = [broadcast_async_(one, root_rank, name) for name, one in _named_tensors(params)]
    for handle in handles:
        synchronize(handle)


def _named_tensors(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        # State dicts may have entries that are None; these have no values to broadcast.
        pairs = [(name, one) for name, one in sorted(params.items()) if one is not None]
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"params is a {type(params).__name__}: expected a dict or a list")
    for name, one in pairs:
        if not isinstance(one, torch.Tensor):
            raise ValueError(f"params has {name!r}: {one!r}, which is no tensor")
    return pairs


class _Slot(NamedTuple):
    """A placeholder for tensor ``number`` in a pickled optimizer state."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Broadcast optimizer state and options (learning rates and so on) of the root to all ranks.

    A rank whose optimizer has not stepped yet also gets the state. As with Horovod, parameters of
    an optimizer without state get gradients of zeros where they have none. For parameters of sparse
    embeddings of ``model``, and for SparseAdam, these zeros are sparse. Unlike Horovod's, the
    function does not step the optimizer by these gradients.

    Where the optimizer has local updates (``pycoll.optim.DiLoCo``), a rank may have completed as
    many synchronisations as the root. It then keeps what its codec has left out, and the share that
    it has under way. With a DistributedOptimizer and a codec, a rank keeps what the codec has left
    out. The number of the step, from which codecs draw, and Q of PowerSGD are those of the root.

    Arguments: ``optimizer``; ``root_rank``, the rank whose state all ranks get; ``model``, a module
    that may have sparse embeddings.

    Errors: ValueError for L-BFGS, whose state is not per parameter, and for an optimizer whose
    parameter groups differ from those of the root.

    Cost: one object broadcast and one broadcast per tensor. Options are pickled: unpickling runs
    code that the root chooses (see SECURITY.md).

    >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer is an LBFGS, whose state cannot be broadcast")
    if not optimizer.state:
        _fill_gradients(optimizer, model)
    is_root = horovod_world.rank() == root_rank
    tensors: list[torch.Tensor] = []
    keeps = optimizer if isinstance(optimizer, LocallyUpdated | Wrapped) else None
    saved = optimizer.state_dict if keeps is None else keeps.state_for_others
    skeleton = _without_tensors(saved(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank)
    if not is_root:
        slots: list[_Slot] = []
        _each_slot(skeleton, slots)
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) for slot in slots]
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        load = optimizer.load_state_dict if keeps is None else keeps.take_state_of
        load(_with_tensors(skeleton, tensors))
    if keeps is not None:
        # The ranks that have loaded a state meet at the next step, which is collective.
        keeps.meet_again()


def _fill_gradients(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Set zero gradients for parameters that need a gradient and have none."""
    sparse = {
        parameter
        for module in (() if model is None else model.modules())
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
        for parameter in module.parameters()
    }
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter.grad is not None:
                continue
            zeros = torch.zeros_like(parameter, requires_grad=False)
            by_rows = isinstance(optimizer, torch.optim.SparseAdam) or parameter in sparse
            parameter.grad = zeros.to_sparse() if by_rows else zeros


def _without_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """``value`` with a ``_Slot`` in place of every tensor; appends the tensors to ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Slot(len(tensors) - 1, tuple(value.shape), value.dtype, value.device.type)
    if isinstance(value, dict):
        return {key: _without_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(one, tensors) for one in value)
    return value


def _with_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _with_tensors(one, tensors) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(one, tensors) for one in value)
    return value


def _each_slot(value: Any, slots: list[_Slot]) -> None:
    if isinstance(value, _Slot):
        slots.append(value)
    elif isinstance(value, dict):
        for one in value.values():
            _each_slot(one, slots)
    elif type(value) in (list, tuple):
        for one in value:
            _each_slot(one, slots)
