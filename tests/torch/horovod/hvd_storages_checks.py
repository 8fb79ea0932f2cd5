"""Checks of where tensors lie that are reduced in place again and again; see torch_ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from shared_storages import can_share, is_shared

import pycoll.torch as hvd

#: More than what travels together with others.
LONG = (1 << 18) + 5


def made(count: int = LONG, factor: int = 1) -> torch.Tensor:
    return (torch.arange(count) % 97 + hvd.rank()).float() * factor


def total(count: int = LONG, factor: int = 1) -> torch.Tensor:
    ranks = hvd.size()
    return (torch.arange(count) % 97 * ranks + ranks * (ranks - 1) // 2).float() * factor


def reduce_to(tensor: torch.Tensor, name: str, factor: int) -> None:
    """In place, and look at what came out."""
    tensor.copy_(made(tensor.numel(), factor))
    hvd.allreduce_(tensor, name=name, op=hvd.Sum)
    assert torch.equal(tensor, total(tensor.numel(), factor)), (name, factor)


def check_what_comes_again_is_shared() -> None:
    several = [made() for _ in range(3)]
    for factor in range(1, 5):
        for one in several:
            one.copy_(made(LONG, factor))
        handles = [
            hvd.allreduce_async_(one, name=f"again {number}", op=hvd.Sum)
            for number, one in enumerate(several)
        ]
        for handle in handles:
            hvd.synchronize(handle)
        assert all(torch.equal(one, total(LONG, factor)) for one in several)
        moved = can_share(hvd.size()) and factor > 1
        assert [is_shared(one) for one in several] == [moved] * 3
    # Views that are made afterwards are views of the shared memory.
    several[0][7:9].fill_(-1)
    assert several[0][6:10].tolist()[1:3] == [-1, -1]


def check_what_is_short_or_new_each_time_stays() -> None:
    short = made(1000)
    for factor in range(1, 4):
        reduce_to(short, "short", factor)
        assert not is_shared(short)
        once = made()
        hvd.allreduce_(once, name="once", op=hvd.Sum)
        assert not is_shared(once) and torch.equal(once, total())


def check_what_somebody_else_knows_stays() -> None:
    ways: dict[str, Callable[[torch.Tensor], object]] = {
        "a view": lambda one: one[1:],
        "detached": lambda one: one.detach(),
        "NumPy's array": lambda one: one.numpy(),
        "NumPy's array, by DLPack": np.from_dlpack,
        "torch's own, by DLPack": torch.from_dlpack,
        "a capsule": torch.utils.dlpack.to_dlpack,
    }
    for what, way in ways.items():
        tensor = made()
        place, alias = tensor.data_ptr(), way(tensor)
        for factor in range(1, 5):
            reduce_to(tensor, what, factor)
        assert not is_shared(tensor) and tensor.data_ptr() == place, what
        if isinstance(alias, np.ndarray):
            assert (alias == tensor.numpy()).all(), what
        elif isinstance(alias, torch.Tensor):
            assert torch.equal(alias, tensor[-alias.numel() :]), what


def check_a_forked_child_has_its_own() -> None:
    tensor = made()
    for factor in (1, 2):
        reduce_to(tensor, "forked", factor)
    child = os.fork()
    if child == 0:
        tensor.fill_(-7)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(tensor, total(LONG, 2)) and not is_shared(tensor)
    reduce_to(tensor, "forked", 3)
    assert is_shared(tensor) == can_share(hvd.size())


def check_the_same_tensor_under_two_names() -> None:
    tensor = torch.ones(LONG)
    for _ in range(3):
        handles = [hvd.allreduce_async_(tensor, name=f"twice {n}", op=hvd.Sum) for n in range(2)]
        for handle in handles:
            hvd.synchronize(handle)
        assert (tensor == tensor[0]).all() and tensor[0] >= hvd.size()
        tensor.fill_(1)
