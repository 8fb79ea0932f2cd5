"""Memory that ranks on this host share, under tensors that torch has made.

What lies in a rank's own memory is copied into slots and out of them on its way; what lies where
others reach it is not. torch lets nobody replace its allocator for host memory from Python, but it
swaps the memory of two storages: all tensors that have the one, views as well, go on with the
other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pycoll import _core

#: Storages that are known, and may be gone, before the first look for those.
_FORGETTING_FROM = 64


def shared_tensor(count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Uninitialised, along one axis; None where there is no such memory, or it would not pay.

    A forked child has a copy of it, as of ordinary memory.
    """
    nbytes = count * dtype.itemsize
    if nbytes < _core.SHARED_BYTES_MIN or not _is_quick():
        return None
    try:
        memory = _core.reachable_memory(nbytes, copied_by_forks=True)
    except MemoryError:
        return None
    return torch.frombuffer(memory, dtype=dtype)


@functools.cache
def _is_quick() -> bool:
    return _core.reachable_memory_is_quick()


class SharedStorages:
    """Gives shared memory to tensors that are all-reduced in place again and again.

    A storage moves when it comes for the second time, so that what serves once is not copied. Its
    contents stay, its address does not: who keeps that for himself goes on with the old memory,
    which is free. NumPy's arrays do, and are heeded. Forks turn shared memory into ordinary one; it
    comes back at the next time.

    Any thread, but one at a time for each storage. No operation is under way on a tensor that
    comes: this one is the next.
    """

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._forgetting_at = _FORGETTING_FROM

    def settle_gradient(self, tensor: torch.Tensor) -> None:
        """Within a backward pass: the buckets of DistributedDataParallel, of which torch knows.

        Another framework's view, made through DLPack between the first two steps, is not heeded.
        """
        if tensor.nbytes >= _core.SHARED_BYTES_MIN and torch._C._current_graph_task_id() != -1:
            self._settle(tensor, lambda storage: True)

    def settle_own(self, tensor: torch.Tensor) -> None:
        """Anywhere: whoever has the tensor is to be the only one who knows its memory, so that
        neither another tensor nor a capsule of DLPack's does."""
        if tensor.nbytes > _core.FUSED_BYTES_MAX:  # others travel together, by way of slots
            self._settle(tensor, lambda storage: _is_alone(tensor, storage))

    def _settle(
        self, tensor: torch.Tensor, may_move: Callable[[torch.UntypedStorage], bool]
    ) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.nbytes
        # What a fork has made ordinary comes back.
        if _core.is_reachable(*place) or _core.bring_back(*place):
            return
        if not (_is_movable(tensor, storage) and may_move(storage)):
            return
        known = self._known.get(storage._cdata)
        if known is None or known.expired():
            self._remember(storage)
        else:
            _move(storage)

    def _remember(self, storage: torch.UntypedStorage) -> None:
        if len(self._known) >= self._forgetting_at:
            kept = {key: one for key, one in list(self._known.items()) if not one.expired()}
            self._known = kept
            self._forgetting_at = max(_FORGETTING_FROM, 2 * len(kept))
        self._known[storage._cdata] = StorageWeakRef(storage)


def _is_movable(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the tensor is all of it, and torch alone knows where it lies, as far as it tells."""
    return (
        tensor.device.type == "cpu"
        and storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and not tensor.is_pinned()
        and hasattr(storage, "_swap_data_ptr_")
    )


def _is_alone(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether nobody but Python has the tensor, and nobody but the tensor the storage."""
    try:
        users = int(torch._C._storage_Use_Count(storage._cdata))
        return int(tensor._use_count()) == 1 and users == 2  # the other one is `storage`
    except AttributeError:  # another torch, which counts elsewhere
        return False


def _move(storage: torch.UntypedStorage) -> None:
    shared = shared_tensor(storage.nbytes(), torch.uint8)
    if shared is None:
        return
    memory = shared.untyped_storage()
    memory.copy_(storage)
    storage._swap_data_ptr_(memory)
