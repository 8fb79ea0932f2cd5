"""Backends of torch for the devices of a group that the backend pycoll does not serve.

This module holds the names of torch's internals that such groups need.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pycoll.doors import TORCH_TESTED, Door, expect

NAME = "pycoll"


class Origin(NamedTuple):
    """The arguments with which torch makes a group; other backends of the group use them too."""

    store: Any
    timeout: timedelta
    group_id: str
    ranks: list[int]


def named_backends(group: Any) -> dict[str, str]:
    """The backend names by type of device; {} for a group that torch has not made.

    Also {} where ``OTHER_BACKENDS`` is closed: by ``PYCOLL_OTHER_BACKENDS=0``, by the version of
    torch, or by its self-test.
    """
    if not OTHER_BACKENDS.is_open():
        return {}
    config = distributed_c10d._world.pg_backend_config.get(group)
    return dict(pair.split(":") for pair in config.split(",")) if config else {}


def group_of(name: str, kind: str, origin: Origin, rank: int, size: int) -> Any:
    """Make a process group of torch that has only the backend ``name``, for devices ``kind``."""
    store = dist.PrefixStore(f"backend/{kind}/", origin.store)
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
            f"the backend {name!r} for tensors on {kind} cannot be used together with {NAME!r}: "
            "expected nccl or gloo, as far as this torch has them"
        )
    made._set_default_backend(number)
    made._register_backend(torch.device(kind), number, backend)
    made._set_group_name(origin.group_id)
    return made


def _test() -> None:
    """Raise unless torch has the names that ``named_backends`` and ``group_of`` use."""
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    found = distributed_c10d._world.pg_backend_config.get(group)
    expect(found is None, "torch names backends of a group that it has not made")
    group._set_default_backend(group.BackendType.GLOO)
    for name in ("_register_backend", "_set_group_name"):
        expect(callable(getattr(group, name)), f"a group has no {name}")
    if dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=1)
        expect(
            callable(dist.ProcessGroupNCCL._set_sequence_number_for_group),
            "nccl's groups do not count their operations",
        )


#: The door to groups with several backends.
OTHER_BACKENDS = Door(
    "other backends than pycoll in a process group",
    _test,
    "pycoll serves the tensors of all devices.",
    "torch",
    TORCH_TESTED,
    "other_backends",
)
