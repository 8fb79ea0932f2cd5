"""The names of ``horovod.torch.functions``: state and objects from one rank to all."""

from __future__ import annotations

from pycoll.torch.objects import allgather_object, broadcast_object
from pycoll.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
