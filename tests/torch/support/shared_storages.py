"""Where tensors lie, for checks of memory that ranks share."""

from __future__ import annotations

import torch

from pycoll import _core


def is_shared(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return _core.is_reachable(storage.data_ptr(), storage.nbytes())


def can_share(size: int) -> bool:
    """Whether this machine and this torch let storages be shared, and there is a peer to read."""
    movable = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
    return size > 1 and movable and _core.reachable_memory_is_quick()
