"""Memory that ranks on this host share, under tensors that torch has made.

What lies in a rank's own memory is copied into slots and out of them on its way; what lies where
others reach it is not. torch lets nobody replace its allocator for host memory from Python, but it
swaps the memory of two storages: all tensors that have the one, views as well, go on with the
other.
"""

from __future__ import annotations

import functools

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
    """Gives shared memory to gradients that backward passes reduce again and again.

    These are the buckets of DistributedDataParallel: whole storages, all-reduced in place within a
    backward pass, of which only tensors of torch know. A storage moves when it comes for the second
    time, so that what serves once is not copied. Its contents stay, its address does not: who
    keeps that for himself goes on with the old memory, which is free. A NumPy array does, and is
    heeded; another framework's view of a gradient, made through DLPack between the first two
    steps, is not. Forks turn shared memory into ordinary one; it comes back at the next time.

    Any thread, but one at a time for each storage.
    """

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}
        self._forgetting_at = _FORGETTING_FROM

    def settle(self, tensor: torch.Tensor) -> None:
        """What is about to be all-reduced in place: let its memory be shared if that pays."""
        if tensor.nbytes < _core.SHARED_BYTES_MIN or torch._C._current_graph_task_id() == -1:
            return
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.nbytes
        # What a fork has made ordinary comes back.
        if _core.is_reachable(*place) or _core.bring_back(*place):
            return
        if not _is_movable(tensor, storage):
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


def _move(storage: torch.UntypedStorage) -> None:
    shared = shared_tensor(storage.nbytes(), torch.uint8)
    if shared is None:
        return
    memory = shared.untyped_storage()
    memory.copy_(storage)
    storage._swap_data_ptr_(memory)
