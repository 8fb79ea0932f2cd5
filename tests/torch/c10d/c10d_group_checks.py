"""Checks of groups, of messages between their members, and of other backends; see c10d_checks,
which takes them in so that they need no world of their own."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch_ranks import raised


def values(rank: int, shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 5) % 11).reshape(shape).double()


def every(shape: tuple[int, ...] = (3, 2)) -> torch.Tensor:
    return torch.stack([values(rank, shape) for rank in range(dist.get_world_size())])


def check_messages_from_anybody() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    if rank:
        # The order of ranks is that in which they were let go.
        dist.recv(torch.empty(1), 0)
        dist.send(values(rank), 0, tag=9)
        return
    seen = []
    for other in reversed(range(1, size)):
        dist.send(torch.ones(1), other)
        found = torch.empty(2, 3).double().t()
        seen.append(dist.recv(found, tag=9))
        assert torch.equal(found, values(seen[-1]))
    assert seen == list(reversed(range(1, size)))


def check_parts_of_a_group() -> None:
    """dist.split_group is for machines with a GPU; up to there it is told of one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    group.eager_connect_single_device(torch.device("cuda", 0))
    accelerator = mock.patch.multiple(
        torch.accelerator, is_available=lambda: True, current_accelerator=lambda: None
    )
    halves = [list(range(0, size, 2)), list(range(1, size, 2))]
    with accelerator:
        part = dist.split_group(split_ranks=[one for one in halves if one])
    group.bound_device_id = None
    mine = halves[rank % 2]
    assert dist.get_process_group_ranks(part) == mine
    found = values(rank)
    dist.all_reduce(found, group=part)
    assert torch.equal(found, every()[mine].sum(0))
    told: list[object] = [None] * len(mine)
    dist.all_gather_object(told, rank, group=part)
    assert told == mine
    with accelerator:
        group.eager_connect_single_device(torch.device("cuda", 0))
        first = dist.split_group(split_ranks=[[0]])
        group.bound_device_id = None
    # From torch 2.14 on, it is NON_GROUP_MEMBER for whoever is in no part.
    assert (first in (None, dist.GroupMember.NON_GROUP_MEMBER)) == (rank > 0)
    dist.destroy_process_group(part)


def check_other_backends_in_the_same_group() -> None:
    """Tensors of another type of device are the business of the backend that has its name."""
    one = torch.ones(2, device="meta")
    config = distributed_c10d._world.pg_backend_config
    world = dist.group.WORLD
    assert world is not None
    text = raised((ValueError, dist.DistBackendError), dist.all_reduce, one)
    if config[world] == "cpu:pycoll,cuda:pycoll":
        assert "process group was made for cpu:pycoll,cuda:pycoll" in text
    assert "meta" in text
    group = dist.new_group(backend="cpu:pycoll,meta:gloo")
    mine = values(dist.get_rank())
    dist.all_reduce(mine, group=group)
    assert torch.equal(mine, every().sum(0))
    other = group.backend_for("meta")
    assert isinstance(other._get_backend(one.device), dist.ProcessGroupGloo)
    assert other is group.backend_for("meta") and other.size() == dist.get_world_size()
    asked = mock.Mock()
    with mock.patch.dict(group._other_backends, meta=asked):
        dist.all_reduce(one, group=group)
        dist.all_gather_single(torch.empty(2 * other.size(), device="meta"), one, group=group)
    assert [call[0] for call in asked.method_calls] == ["allreduce", "all_gather_single"]
    assert asked.method_calls[0].args[0][0] is one
    strange = dist.new_group(backend="cpu:pycoll,meta:mpi")
    text = raised(ValueError, dist.all_reduce, one, group=strange)
    assert "'mpi' for tensors on meta cannot be used together with 'pycoll'" in text
    dist.barrier()
    for made in (group, strange):
        dist.destroy_process_group(made)


def check_groups_and_barriers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    evens = list(range(0, size, 2))
    group = dist.new_group(evens)
    if rank in evens:
        found = torch.tensor([float(rank)])
        dist.all_reduce(found, group=group)
        assert found.item() == sum(evens)
        dist.broadcast(found, evens[-1], group=group)
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    mine, _ = dist.new_subgroups(1)
    found = torch.ones(1)
    dist.all_reduce(found, group=mine)
    assert found.item() == 1.0
    dist.barrier(async_op=True).wait()


def check_objects_as_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return
    told: list[object] = [{"from": rank}, "y" * 1000]
    found: list[object] = [None, None]
    if rank == 0:
        dist.send_object_list(told, 1)
    elif rank == 1:
        assert dist.recv_object_list(found, 0) == 0
        assert found == [{"from": 0}, "y" * 1000]
