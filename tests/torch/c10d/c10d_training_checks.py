"""Checks of torch's own training layers over the backend pycoll; see test_distributed.

Losses are sums, and every layer is compared with a plain one that has the data of all ranks.
"""

from __future__ import annotations

import copy
import datetime

import torch
import torch.distributed as dist
from c10d_state_checks import (  # noqa: F401  # checks of this module, too
    check_checkpoints_are_saved_meanwhile,
    check_devices_of_a_group,
    check_one_rank_has_the_state_for_all,
    check_sharded_state_of_the_first_fsdp,
)
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torch_ranks import raised

import pycoll
from pycoll.optim import Policy
from pycoll.torch.method_hooks import MethodState, method_hook

#: On a busy machine; less than the patience of whoever waits for all checks.
WORKERS_START_WITHIN = datetime.timedelta(seconds=100)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return ((torch.arange(8.0) * 3 + rank * 5 + step) % 7 - 3).reshape(2, 4).double()


def averaged_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            (net(batch(rank, step)).sum() / dist.get_world_size()).backward()
        optimizer.step()


def own_steps(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        net(batch(dist.get_rank(), step)).sum().backward()
        optimizer.step()


def plain(steps: int, rate: float = 0.1) -> nn.Sequential:
    net = network()
    averaged_steps(net, torch.optim.Adam(net.parameters(), rate), steps)
    return net


def same(found: nn.Module, wanted: nn.Module, tolerance: float = 1e-9) -> None:
    for a, b in zip(found.parameters(), wanted.parameters(), strict=True):
        whole = a.full_tensor() if isinstance(a, DTensor) else a
        assert torch.allclose(whole, b, rtol=tolerance, atol=tolerance)


def check_ddp() -> None:
    for words in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}):
        net = DistributedDataParallel(network(), **words)
        own_steps(net, torch.optim.Adam(net.parameters(), 0.1), 4)
        same(net, plain(4))


def check_ddp_begins_with_the_root() -> None:
    net = network()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(dist.get_rank())
    same(DistributedDataParallel(net), network())


def check_ddp_no_sync() -> None:
    net = DistributedDataParallel(network())
    with net.no_sync():
        net(batch(dist.get_rank())).sum().backward()
    net(batch(dist.get_rank(), 1)).sum().backward()
    wanted = network()
    for step in (0, 1):
        for rank in range(dist.get_world_size()):
            (wanted(batch(rank, step)).sum() / dist.get_world_size()).backward()
    for a, b in zip(net.parameters(), wanted.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-9)


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList([nn.Linear(4, 4).double() for _ in range(2)])

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        found: torch.Tensor = self.layers[which](x)
        return found


def check_ddp_with_unused_parameters() -> None:
    net = DistributedDataParallel(Branches(), find_unused_parameters=True)
    wanted = Branches()
    size = dist.get_world_size()
    for step in range(3):
        net(batch(dist.get_rank()), (dist.get_rank() + step) % 2).sum().backward()
        for rank in range(size):
            (wanted(batch(rank), (rank + step) % 2).sum() / size).backward()
    for a, b in zip(net.parameters(), wanted.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-9)


def check_ddp_hooks() -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        net = DistributedDataParallel(network())
        net.register_comm_hook(None, hook)
        net(batch(dist.get_rank())).sum().backward()
        wanted = network()
        for rank in range(dist.get_world_size()):
            (wanted(batch(rank)).sum() / dist.get_world_size()).backward()
        tolerance = 1e-9 if hook is default_hooks.allreduce_hook else 0.05
        for a, b in zip(net.parameters(), wanted.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            assert torch.allclose(a.grad, b.grad, rtol=tolerance, atol=tolerance), hook


def check_ddp_by_methods() -> None:
    """Every method gives the same bits, across the steps in which DDP makes its buckets anew."""

    def trained(policy: str | Policy, architecture: str | None) -> list[torch.Tensor]:
        net = DistributedDataParallel(network(), bucket_cap_mb=0.0001)
        state = MethodState(net, policy, architecture=architecture)
        net.register_comm_hook(state, method_hook)
        own_steps(net, torch.optim.Adam(net.parameters(), 0.1), 6)
        assert dist.get_world_size() == 1 or "messages of 4 gradients" in state.explain()
        state.close()
        return [parameter.detach() for parameter in net.parameters()]

    wanted = [parameter.detach() for parameter in plain(6).parameters()]
    first = trained("BSP-A2A", None)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(first, wanted, strict=True))
    parts = Policy("bytescheduler", partition_bytes=64, credit_bytes=128)
    for policy, architecture in (
        ("WFBP-PS", None),
        (parts, "ps"),
        ("dear", None),
        ("auto", "auto"),
    ):
        found = trained(policy, architecture)
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True)), policy


def check_methods_of_ddp_say_what_they_need() -> None:
    net = DistributedDataParallel(network())
    alone = pycoll.local_world(1)[0] if dist.get_world_size() > 1 else None
    for words, told in (
        ({"policy": "BSP"}, "policy is 'BSP': expected one of bsp, "),
        ({"architecture": "both"}, "architecture is 'both': expected one of a2a, ps, auto"),
        ({"comm": alone}, "comm has rank 0 of 1, and the process group of the model has rank"),
    ):
        if words.get("comm", 0) is not None:
            assert told in raised(pycoll.InvalidArgumentError, MethodState, net, **words)
    assert "expected a Distributed" in raised(pycoll.InvalidArgumentError, MethodState, network())


def check_ddp_hooks_that_wait_for_collectives() -> None:
    """PowerSGD's reduces twice, the second time in a callback of the first."""
    net = DistributedDataParallel(nn.Linear(32, 32, bias=False).double())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    given = torch.arange(32.0).double().reshape(1, 32)
    for step in range(4):
        net.zero_grad()
        net(given * (dist.get_rank() + 1)).sum().backward()
        # Of rank one, and alike in all rows: what the hook keeps of it is all of it.
        wanted = given.expand(32, 32) * (dist.get_world_size() + 1) / 2
        assert torch.allclose(net.module.weight.grad, wanted, rtol=1e-5), step


def check_ddp_sync_batch_norm_is_not_for_cpu() -> None:
    """torch's own refuses host tensors with any backend; hvd.SyncBatchNorm does not."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4).double())
    try:
        net(batch(0))
    except ValueError as error:
        assert "SyncBatchNorm" in str(error)
    else:
        assert dist.get_world_size() == 1


def check_ddp_join_of_uneven_inputs() -> None:
    net = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with net.join():
        for step in range(dist.get_rank() + 1):
            optimizer.zero_grad()
            net(batch(dist.get_rank(), step)).sum().backward()
            optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    found = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(found, flat)
    assert all(torch.equal(one, flat) for one in found)


def check_zero() -> None:
    net = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    own_steps(net, optimizer, 3)
    same(net, plain(3))
    optimizer.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(net.parameters()))


def check_fsdp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = network()
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    own_steps(net, torch.optim.Adam(net.parameters(), 0.1), 3)
    same(net, plain(3))


def check_fsdp_asks_the_group_for_memory() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = fully_shard(network(), mesh=mesh)
    net.set_allocate_memory_from_process_group_for_comm(True)
    own_steps(net, torch.optim.Adam(net.parameters(), 0.1), 2)
    same(net, plain(2))


def check_dtensor() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(float(6 * size)).reshape(2 * size, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(rows.to_local(), whole[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), whole)
    other = distribute_tensor(whole.t().contiguous(), mesh, [Replicate()])
    assert torch.equal((rows @ other).full_tensor(), whole @ whole.t())
    assert rows.sum().full_tensor() == whole.sum()


def check_workers_of_data_loaders() -> None:
    """A worker that is spawned imports torch, which takes seconds of a core: two are enough, and no
    rank's operation waits while the other's worker does so."""
    data = TensorDataset(torch.arange(12.0))
    rank, size = dist.get_rank(), dist.get_world_size()
    store = distributed_c10d._get_default_store()
    for context in ("fork", "spawn") if size == 2 else ("fork",):
        sampler = DistributedSampler(data, shuffle=False)
        loader = DataLoader(
            data, 2, sampler=sampler, num_workers=1, multiprocessing_context=context
        )
        found = torch.zeros(1)
        for step, (values,) in enumerate(loader):
            if step == 0:
                store.set(f"{context}/{rank}", "its worker works")
                store.wait([f"{context}/{one}" for one in range(size)], WORKERS_START_WITHIN)
            found += values.sum()
            dist.all_reduce(copy.deepcopy(found))
        dist.all_reduce(found)
        assert found.item() >= 66.0
