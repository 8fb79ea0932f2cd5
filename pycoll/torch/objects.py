"""Whole objects between ranks: pickled, and sent as bytes."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from pycoll.torch import world
from pycoll.torch.handles import run
from pycoll.torch.moving import broadcast_
from pycoll.torch.process_sets import ProcessSet, global_process_set
from pycoll.torch.tasks import AllGather


def _packed(obj: Any) -> torch.Tensor:
    """The object as bytes; by cloudpickle, which knows more objects, where it is installed."""
    try:
        from cloudpickle import dumps
    except ImportError:
        dumps = pickle.dumps
    return torch.frombuffer(bytearray(dumps(obj)), dtype=torch.uint8)


def _unpacked(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object, on all ranks; what the others pass does not matter.

    ``root_rank`` counts in the whole world. Objects must be such that pickle can carry them.
    """
    is_root = world.rank() == root_rank
    data = _packed(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    length = torch.tensor([len(data)], device="cpu")
    broadcast_(length, root_rank, name and f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, name and f"{name}.bytes", process_set)
    return obj if is_root else _unpacked(data)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """All ranks' objects, in rank order, on every rank."""
    (data,), (lengths,) = run(AllGather([_packed(obj)]), name and f"{name}.bytes", process_set)
    return [_unpacked(one) for one in data.split(lengths)]
