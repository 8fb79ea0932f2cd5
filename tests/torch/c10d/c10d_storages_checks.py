"""Checks of where gradients lie that DistributedDataParallel reduces; see test_distributed."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from c10d_training_checks import own_steps
from shared_storages import can_share, is_shared
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pycoll.torch.memory.storages import SharedStorages

WIDTH = 192
#: After these a bucket has been reduced twice since the last one was made.
STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).double()


def parallel(**words: bool) -> DistributedDataParallel:
    return DistributedDataParallel(network(), **words)


def train(net: nn.Module, steps: int) -> None:
    own_steps(net, torch.optim.SGD(net.parameters(), 0.01), steps)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [one.grad for one in net.parameters() if one.grad is not None]


def shares() -> bool:
    return can_share(dist.get_world_size())


def check_gradients_that_are_buckets_are_shared() -> None:
    net = parallel(gradient_as_bucket_view=True)
    train(net, 1)
    assert not any(is_shared(one) for one in gradients(net))
    train(net, STEPS)
    assert all(is_shared(one) for one in gradients(net)) == shares()
    plain = parallel()
    train(plain, 1)
    train(plain, STEPS)
    for found, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


def check_gradients_of_a_forked_child_are_its_own() -> None:
    net = parallel(gradient_as_bucket_view=True)
    train(net, STEPS)
    before = [one.clone() for one in gradients(net)]
    child = os.fork()
    if child == 0:
        for one in gradients(net):
            one.fill_(-7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(map(torch.equal, gradients(net), before))
    assert not any(is_shared(one) for one in gradients(net))
    train(net, 1)
    assert all(is_shared(one) for one in gradients(net)) == shares()


def check_gradients_that_numpy_sees_stay() -> None:
    net = parallel(gradient_as_bucket_view=True)
    train(net, 2)
    seen = [one.numpy() for one in gradients(net)]
    train(net, STEPS)
    for grad, view in zip(gradients(net), seen, strict=True):
        assert torch.equal(grad, torch.from_numpy(view))
        assert grad.data_ptr() == view.ctypes.data


def check_memory_of_the_group() -> None:
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    assert group.supports_tensor_alloc(cpu) == (dist.get_world_size() > 1)
    assert not group.supports_tensor_alloc(torch.device("cuda"))
    for count in (0, 1, 1 << 17):
        made = group.allocate_tensor(count, dtype=torch.bfloat16, device=cpu)
        assert made.shape == (count,)
        assert made.dtype == torch.bfloat16
        assert is_shared(made) == (shares() and count > 1)


def check_what_is_reduced_otherwise_stays() -> None:
    tensor = torch.zeros(1 << 16)
    for _ in range(3):
        dist.all_reduce(tensor)
    assert not is_shared(tensor)


def check_storages_that_are_gone_are_forgotten() -> None:
    storages = SharedStorages()

    class Settling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            storages.move_gradient(torch.zeros(1 << 14))
            return grad

    for _ in range(200):
        Settling.apply(torch.ones(1, requires_grad=True)).backward()
    assert 0 < len(storages._known) <= 64
