"""The names of ``horovod.torch.functions``: send states and objects between ranks."""

from __future__ import annotations

from pycoll.torch.horovod.object_calls import allgather_object, broadcast_object
from pycoll.torch.optimizers.initial_state import (
    broadcast_optimizer_state,
    broadcast_parameters,
)

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
