"""The methods of a process group other than collectives: names, subgroups, other backends."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pycoll.comm.communicator import Communicator
from pycoll.torch.c10d.group_work import translate_error
from pycoll.torch.c10d.other_backends import NAME, Origin, group_of, named_backends
from pycoll.torch.c10d.watcher import Watcher
from pycoll.torch.memory.storages import SharedStorages, shared_tensor

_open: weakref.WeakSet[Membership] = weakref.WeakSet()


class Membership(dist.ProcessGroup):
    """One rank's side of a group; it owns the communicator. torch defines the method names.

    ``origin``: None for a group that torch has not made. The backend string of the group may name
    another backend for a type of device, such as "cpu:pycoll,cuda:nccl". This class makes that
    backend for the first tensor on such a device: torch makes no further backends for a group
    written in Python.
    """

    def __init__(self, comm: Communicator, origin: Origin | None = None) -> None:
        self._begin(comm.rank, comm.size, origin)
        self._take(comm)

    def _begin(self, rank: int, size: int, origin: Origin | None) -> None:
        super().__init__(rank, size)
        self._origin = origin
        self._watcher = Watcher()
        self._storages: SharedStorages | None = None
        self._name = ""
        self._desc = ""
        #: The backends by type of device; None means this group itself.
        self._other_backends: dict[str, Any] = {"cpu": None}
        _open.add(self)

    def _take(self, comm: Communicator) -> None:
        self.communicator = comm
        self._storages = SharedStorages() if comm.shares_arrays else None

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name, which is equal on all members; torch calls this once."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name that setGroupName set."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the description; torch calls this once."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description that setGroupDesc set."""
        return self._desc

    def shutdown(self) -> None:
        """Close the communicator; operations under way fail."""
        self.communicator.close()
        self._watcher.close()
        for other in self._other_backends.values():
            if other is not None:
                other.shutdown()

    def abort(self) -> None:
        """Do the same as shutdown()."""
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations."""
        self.communicator.timeout_s = timeout.total_seconds()

    # New members. torch 2.14 asks; ``reconfiguration`` has the groups that can.

    supports_reconfigure = False

    def get_reconfigure_handle(self) -> str:
        """Raise DistBackendError: the group was made without enable_reconfigure."""
        raise dist.DistBackendError(
            "pycoll: this process group keeps its members: one made by "
            "init_process_group(enable_reconfigure=True), from torch 2.14 on, can change them"
        )

    def reconfigure(self, opts: Any) -> Any:
        """Raise DistBackendError, as get_reconfigure_handle does."""
        self.get_reconfigure_handle()

    # Subgroups. torch asks the backend of the group whether it can split; that is the group itself.

    supports_splitting = True
    #: The options of the backend, which has none.
    options = None

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of the group's backend string, the preferred one first."""
        named = named_backends(self)
        return [torch.device(kind) for kind in named] if named else [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: operations count themselves."""

    def _get_sequence_number_for_group(self) -> int:
        """Return 0, as gloo does, so that a comparison of ranks finds equal numbers."""
        return 0

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether allocate_tensor gives better memory for collectives on ``device`` than torch."""
        return device.type == "cpu" and self._storages is not None

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate ``size`` uninitialised elements, where possible in memory that peers read."""
        shared = shared_tensor(size, dtype) if self.supports_tensor_alloc(device) else None
        return torch.empty(size, dtype=dtype, device=device) if shared is None else shared

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Store the ``device_id`` of init_process_group; it needs no connection."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: new_group() makes groups from the store, without ranks outside the group."""

    def get_group_store(self) -> Any:
        """The store at which the members met."""
        return None if self._origin is None else self._origin.store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> Any:
        """Make a subgroup of ``ranks``, in that order; None on a rank outside of all subgroups.

        All ranks call it, each with the ranks of its own subgroup. A rank outside of all subgroups
        passes the ranks of any subgroup. The communicator is split, so the store is not used again.
        """
        is_inside = self.rank() in ranks
        place = list(ranks).index(self.rank()) if is_inside else 0
        try:
            comm = self.communicator.split(min(ranks) if is_inside else None, place)
        except Exception as error:
            raise translate_error(error) from error
        if comm is None:
            return None
        origin = self._origin_of_part(list(ranks), group_name or "part", timeout)
        made = self._make_part(comm, origin)
        if timeout is not None:
            made.set_timeout(timeout)
        made.setGroupName(group_name or "")
        made.setGroupDesc(group_desc or "")
        return made

    def _make_part(self, comm: Communicator, origin: Origin | None) -> Membership:
        return type(self)(comm, origin)

    def _origin_of_part(
        self, ranks: list[int], name: str, timeout: timedelta | None
    ) -> Origin | None:
        if self._origin is None:
            return None
        store, before, _, every = self._origin
        every = every or list(range(self.size()))
        store = dist.PrefixStore(f"{name}/", store)
        return Origin(store, timeout or before, name, [every[rank] for rank in ranks])

    # Other backends of the group

    def backend_for(self, kind: str) -> Any:
        """The backend for tensors on a type of device; None for this group itself.

        Raises ValueError if the backend string of the group has none for it.
        """
        if kind not in self._other_backends:
            self._other_backends[kind] = self._made_for(kind)
        return self._other_backends[kind]

    def _made_for(self, kind: str) -> Any:
        names = named_backends(self)
        if not names or self._origin is None:
            return None
        if kind not in names:
            made_for = ",".join(":".join(pair) for pair in names.items())
            raise ValueError(
                f"a tensor is on {kind}, and the process group was made for {made_for}: pass a "
                f"backend for {kind}, too, as in backend={NAME!r} for cpu and cuda"
            )
        if names[kind] == NAME:
            return None
        return group_of(names[kind], kind, self._origin, self.rank(), self.size())


def by_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective so that tensors on other devices go to their backend of the group."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Membership, *args: Any, **words: Any) -> Any:
        kind = _kind_of(args)
        if kind != "cpu":
            other = self.backend_for(kind)
            if other is not None:
                return getattr(other, name)(*args, **words)
        return method(self, *args, **words)

    return call


def _kind_of(args: Sequence[Any]) -> str:
    """The type of device of the first tensor; "cpu" where there is no tensor."""
    for one in args:
        found = one
        while isinstance(found, list | tuple) and found:
            found = found[0]
        if isinstance(found, torch.Tensor):
            return str(found.device.type)
    return "cpu"


def close_all() -> None:
    """Shut down the remaining groups at exit, so that peers do not see a lost rank."""
    for group in list(_open):
        group.shutdown()
