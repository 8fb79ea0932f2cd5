"""Beginning alike: parameters and optimizer states of one rank for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from pycoll.torch import world
from pycoll.torch.handles import synchronize
from pycoll.torch.moving import broadcast_async_
from pycoll.torch.objects import broadcast_object


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give the root's values to all ranks, in place.

    ``params``: a dict of tensors (``model.state_dict()``), or an iterable of tensors or of (name,
    tensor) pairs (``model.named_parameters()``). ValueError for anything else.
    """
    handles = [broadcast_async_(one, root_rank, name) for name, one in _named(params)]
    for handle in handles:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        # A broadcast without values has nothing to do, but dicts of states have such entries.
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
    """Where a tensor belongs in an optimizer's state."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give the root's optimizer state and options (learning rates and so on) to all ranks.

    Ranks whose optimizer has not run yet get the state all the same. As after Horovod's, parameters
    of an optimizer without state then have zeros as gradients where they had none; those of
    ``model``'s sparse embeddings, and of SparseAdam, sparse ones. It is not stepped by these, as
    Horovod's is. Options travel pickled: unpickling runs code that the root chooses (see
    SECURITY.md). ValueError for L-BFGS, whose state is not per parameter, and for optimizers whose
    parameter groups differ from the root's.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("optimizer is an LBFGS, whose state cannot be broadcast")
    if not optimizer.state:
        _fill_gradients(optimizer, model)
    is_root = world.rank() == root_rank
    tensors: list[torch.Tensor] = []
    skeleton = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank)
    if not is_root:
        slots: list[_Slot] = []
        _each_slot(skeleton, slots)
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=slot.device) for slot in slots]
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(_with_tensors(skeleton, tensors))


def _fill_gradients(optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Zeros for parameters that need gradients and have none."""
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
    """``value`` with a slot for every tensor, which goes to the end of ``tensors``."""
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
