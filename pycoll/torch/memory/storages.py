"""Move torch tensors to memory that the ranks of a host share.

Messages from private memory are copied into slot buffers and out of them. Messages from shared
memory are not: peers read it in place. Python code cannot replace the allocator of torch for host
memory, but it can swap the memory of two storages. All tensors of the one storage, views included,
then use the memory of the other. This module holds all names of torch's internals that this needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from pycoll import _core
from pycoll.doors import TORCH_TESTED, Door, expect

#: The number of remembered storages at which SharedStorages first drops expired ones.
_FORGETTING_FROM = 64


def shared_tensor(count: int, dtype: torch.dtype) -> torch.Tensor | None:
    """An uninitialised tensor of one axis in shared memory.

    None where there is no shared memory, where the tensor is too small to profit, or where shared
    memory is slow. A forked child has a copy of it, as of ordinary memory.
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
    """Moves tensors that are repeatedly all-reduced in place to shared memory.

    A storage moves at its second reduction, so that a storage that is reduced once is not copied.
    Its contents stay and its address changes. Code that keeps the old address would use freed
    memory. NumPy arrays keep it, so a storage that NumPy shares does not move. A fork turns shared
    memory into ordinary memory; the next reduction makes it shared again.

    Any thread may call, one at a time for each storage. No operation may be under way on the tensor
    that is passed. Where ``STORAGES`` is closed, nothing moves.
    """

    def __init__(self) -> None:
        self._on = STORAGES.is_open()
        self._known: dict[int, StorageWeakRef] = {}
        self._forgetting_at = _FORGETTING_FROM

    def move_gradient(self, tensor: torch.Tensor) -> None:
        """Move a bucket of DistributedDataParallel, inside a backward pass only.

        torch knows all views of these buckets. The check cannot see a view that another framework
        made through DLPack between the first two steps.
        """
        if self._on and tensor.nbytes >= _core.SHARED_BYTES_MIN and _is_in_backward():
            self._move_at_second(tensor, lambda storage: True)

    def move_own(self, tensor: torch.Tensor) -> None:
        """Move a tensor if it is the only user of its memory: no other tensor, no DLPack capsule.

        Unlike ``move_gradient``, this works outside of backward passes.
        """
        # Smaller tensors are fused with others and copied through slot buffers.
        if self._on and tensor.nbytes > _core.FUSED_BYTES_MAX:
            self._move_at_second(tensor, lambda storage: _is_alone(tensor, storage))

    def _move_at_second(
        self, tensor: torch.Tensor, may_move: Callable[[torch.UntypedStorage], bool]
    ) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), tensor.nbytes
        # Memory that a fork has made ordinary becomes shared again.
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
    """Whether the tensor covers its storage, and torch reports no other user of the address."""
    return (
        tensor.device.type == "cpu"
        and storage.nbytes() == tensor.nbytes
        and storage.resizable()
        and not tensor.is_pinned()
    )


def _is_in_backward() -> bool:
    return int(torch._C._current_graph_task_id()) != -1


def _is_alone(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether Python holds the only reference to the tensor, and the tensor to its storage."""
    users = int(torch._C._storage_Use_Count(storage._cdata))
    return int(tensor._use_count()) == 1 and users == 2  # the second user is `storage`


def _move(storage: torch.UntypedStorage) -> None:
    shared = shared_tensor(storage.nbytes(), torch.uint8)
    if shared is None:
        return
    _swap(storage, shared.untyped_storage())


def _swap(storage: torch.UntypedStorage, memory: torch.UntypedStorage) -> None:
    memory.copy_(storage)
    storage._swap_data_ptr_(memory)


def _test() -> None:
    """Raise unless torch swaps memory, counts users and reports backward passes as needed."""
    with torch.inference_mode(False), torch.enable_grad():
        _test_swap()
        _test_backward()


def _test_swap() -> None:
    tensor = torch.arange(8, dtype=torch.float32, device="cpu")
    storage = tensor.untyped_storage()
    expect(_is_alone(tensor, storage), "a storage has more users than there are")
    other = torch.empty(0, dtype=torch.float32, device="cpu").set_(storage)
    expect(not _is_alone(tensor, storage), "a tensor of a storage does not count as its user")
    del other
    expect(_is_alone(tensor, storage), "a tensor that is gone counts as a user of its storage")
    view = tensor[2:]
    expect(not _is_alone(tensor, storage), "a view does not count as a user of its storage")
    expect(_is_movable(tensor, storage), "a new storage cannot be resized")
    memory = torch.zeros(8, dtype=torch.float32, device="cpu")
    address = memory.data_ptr()
    _swap(storage, memory.untyped_storage())
    del memory
    addresses = tensor.data_ptr(), view.data_ptr() - 2 * tensor.itemsize
    expect(addresses == (address, address), "tensors do not use the memory of their storage")
    expect(tensor.tolist() == [*range(8)], "a swapped storage lost its contents")
    known = StorageWeakRef(storage)
    expect(not known.expired(), "a reference to a storage expires before it")
    expect(tensor.numpy()[7] == 7, "NumPy reads other memory than torch")
    expect(not _is_movable(tensor, storage), "a storage that NumPy shares can be resized")
    del tensor, view, storage
    expect(known.expired(), "a reference to a storage does not expire with it")


def _test_backward() -> None:
    expect(not _is_in_backward(), "torch reports a backward pass that does not run")
    inside: list[bool] = []
    leaf = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
    leaf.register_hook(lambda _: inside.append(_is_in_backward()))
    (2 * leaf).backward()
    expect(inside == [True], "torch does not report a backward pass")


#: The door (docs/process-wide.md) to swapped storages. ``shared_arrays`` switches it.
STORAGES = Door(
    "swapped torch storages",
    _test,
    "Tensors stay in ordinary memory and are copied.",
    "torch",
    TORCH_TESTED,
)
