"""What torch asks of every process group beside collectives: names, parts, and other backends."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycoll.communicator import Communicator
from pycoll.torch.distributed.watcher import Watcher
from pycoll.torch.distributed.work import translated
from pycoll.torch.storages import SharedStorages, shared_tensor

NAME = "pycoll"
_open: weakref.WeakSet[Membership] = weakref.WeakSet()


class Origin(NamedTuple):
    """What torch makes a group of; other backends of the same ranks are made of it, too."""

    store: Any
    timeout: timedelta
    group_id: str
    ranks: list[int]


class Membership(dist.ProcessGroup):
    """One rank's side of a group: it owns the communicator. The spelling of methods is torch's.

    ``origin``: None for a group that torch does not know of. Where the group's backend string names
    another backend for a type of devices, as "cpu:pycoll,cuda:nccl" does, that one is made when
    the first tensor there comes (torch itself makes nothing beside a group written in Python).
    """

    def __init__(self, comm: Communicator, origin: Origin | None = None) -> None:
        super().__init__(comm.rank, comm.size)
        self.communicator = comm
        self._origin = origin
        self._watcher = Watcher()
        self._storages = SharedStorages() if comm.shares_arrays else None
        self._name = ""
        self._desc = ""
        #: Backends by the type of device; None: this group itself.
        self._beside: dict[str, Any] = {"cpu": None}
        _open.add(self)

    def getBackendName(self) -> str:  # noqa: N802
        """The name of the backend."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called once by torch, with a name that is alike on all members."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """What setGroupName was given."""
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Called once by torch."""
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802
        """What setGroupDesc was given."""
        return self._desc

    def shutdown(self) -> None:
        """Leave; what is under way fails."""
        self.communicator.close()
        self._watcher.close()
        for other in self._beside.values():
            if other is not None:
                other.shutdown()

    def abort(self) -> None:
        """As shutdown."""
        self.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations from now on."""
        self.communicator.timeout_s = timeout.total_seconds()

    # Parts. torch asks the group's backend whether it can split; that is the group itself.

    supports_splitting = True
    #: Those of the backend, of which there are none.
    options = None

    @property
    def _device_types(self) -> list[torch.device]:
        """Where tensors may be, as the group's backend string says; the preferred one first."""
        named = self._named_backends()
        return [torch.device(kind) for kind in named] if named else [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        """Operations count themselves."""

    def _get_sequence_number_for_group(self) -> int:
        """0 as from gloo: whoever compares ranks by it finds them alike."""
        return 0

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether allocate_tensor gives better memory for collectives there than torch does."""
        return device.type == "cpu" and self._storages is not None

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """So many elements, uninitialised, where the ranks on this host reach them if they can."""
        shared = shared_tensor(size, dtype) if self.supports_tensor_alloc(device) else None
        return torch.empty(size, dtype=dtype, device=device) if shared is None else shared

    def eager_connect_single_device(self, device: torch.device) -> None:
        """init_process_group has this ``device_id``; nothing has to be connected for it."""
        self.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """new_group() makes groups from the store, so that others have no part in it."""

    def get_group_store(self) -> Any:
        """Where members meet."""
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
        """The part with ``ranks`` of this group, in that order; None where this rank is in none.

        All ranks call it, each with its own part's; whoever is in none names any part. It is a
        split of the communicator: nobody meets at the store again.
        """
        is_inside = self.rank() in ranks
        place = list(ranks).index(self.rank()) if is_inside else 0
        try:
            comm = self.communicator.split(min(ranks) if is_inside else None, place)
        except Exception as error:
            raise translated(error) from error
        if comm is None:
            return None
        made = type(self)(comm, self._origin_of_part(list(ranks), group_name or "part", timeout))
        if timeout is not None:
            made.set_timeout(timeout)
        made.setGroupName(group_name or "")
        made.setGroupDesc(group_desc or "")
        return made

    def _origin_of_part(
        self, ranks: list[int], name: str, timeout: timedelta | None
    ) -> Origin | None:
        if self._origin is None:
            return None
        store, before, _, every = self._origin
        every = every or list(range(self.size()))
        store = dist.PrefixStore(f"{name}/", store)
        return Origin(store, timeout or before, name, [every[rank] for rank in ranks])

    # Other backends beside this one

    def backend_for(self, kind: str) -> Any:
        """What runs operations on tensors of a type of devices; None for this group itself.

        ValueError if the group's backend string has none for it.
        """
        if kind not in self._beside:
            self._beside[kind] = self._made_for(kind)
        return self._beside[kind]

    def _named_backends(self) -> dict[str, str]:
        """Names of backends by type of device, as torch was told; {} for groups it has not made."""
        config = distributed_c10d._world.pg_backend_config.get(self)
        return dict(pair.split(":") for pair in config.split(",")) if config else {}

    def _made_for(self, kind: str) -> Any:
        names = self._named_backends()
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
        return _group_of(names[kind], kind, self._origin, self.rank(), self.size())


def _group_of(name: str, kind: str, origin: Origin, rank: int, size: int) -> Any:
    """A group of torch's own with that backend alone."""
    store = dist.PrefixStore(f"beside/{kind}/", origin.store)
    made: Any = dist.ProcessGroup(store, rank, size)
    if name == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = origin.timeout
        options.global_ranks_in_group = origin.ranks
        options.group_name = origin.group_id
        backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        backend._set_sequence_number_for_group()
        number = made.BackendType.NCCL
    elif name == "gloo" and dist.is_gloo_available():
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=origin.timeout)
        number = made.BackendType.GLOO
    else:
        raise ValueError(
            f"the backend {name!r} for tensors on {kind} cannot be used beside {NAME!r}: expected "
            "nccl or gloo, as far as this torch has them"
        )
    made._set_default_backend(number)
    made._register_backend(torch.device(kind), number, backend)
    made._set_group_name(origin.group_id)
    return made


def by_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose tensors may be the business of another backend of the group."""
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
    """The type of device of the first tensor; where there is none, nothing travels."""
    for one in args:
        found = one
        while isinstance(found, list | tuple) and found:
            found = found[0]
        if isinstance(found, torch.Tensor):
            return str(found.device.type)
    return "cpu"


def close_all() -> None:
    """Groups that nobody destroyed end in order, so that peers see no loss."""
    for group in list(_open):
        group.shutdown()
