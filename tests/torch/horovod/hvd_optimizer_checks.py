"""Checks of DistributedOptimizer and what surrounds it, run on every rank; see torch_ranks.

Gradients of whole numbers are exact in any order, so ranks' steps are compared bit by bit with
steps of one process that has the data of all.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch_ranks import raised

import pycoll.torch as hvd


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    for number, parameter in enumerate(net.parameters()):
        count = parameter.numel()
        with torch.no_grad():
            parameter.copy_(((torch.arange(count) + number) % 3 - 1.0).reshape(parameter.shape))
    return net


def batch(rank: int, step: int) -> torch.Tensor:
    return ((torch.arange(8.0) * 3 + rank * 5 + step) % 7 - 3).reshape(2, 4).double()


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    return net(batch(rank, step)).sum()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.25, momentum=0.5)


def expected(steps: int, passes: int = 1, average: bool = True) -> list[torch.Tensor]:
    """Parameters after ``steps`` on the losses of all ranks."""
    net = network()
    optimizer = sgd(net)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in range(hvd.size()):
                loss_of(net, rank, step * passes + number).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            if average:
                parameter.grad /= hvd.size()
        optimizer.step()
    return list(net.parameters())


def same(net: nn.Module, wanted: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for found, value in zip(net.parameters(), wanted, strict=True):
        assert torch.allclose(found, value, rtol=tolerance, atol=tolerance), (found, value)


def trained(steps: int = 4, passes: int = 1, **words: Any) -> tuple[nn.Sequential, Any]:
    net = network()
    words = {"named_parameters": net.named_parameters(), **words}
    optimizer = hvd.DistributedOptimizer(sgd(net), backward_passes_per_step=passes, **words)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(net, hvd.rank(), step * passes + number).backward()
        optimizer.step()
    return net, optimizer


def check_steps_are_those_of_one_process() -> None:
    net, optimizer = trained()
    same(net, expected(4))
    assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, torch.optim.SGD)
    same(trained(op=hvd.Sum)[0], expected(4, average=False))
    same(trained(named_parameters=None)[0], expected(4))
    same(trained(gradient_predivide_factor=2.0)[0], expected(4))
    same(trained(passes=3)[0], expected(4, passes=3))
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        same(trained(1, compression=compression)[0], expected(1), 0.02)


def check_groups() -> None:
    for groups in (1, 2, 3, 100):
        same(trained(groups=groups)[0], expected(4))
    with pytest.warns(DeprecationWarning, match="num_groups is now called groups"):
        same(trained(num_groups=2)[0], expected(4))
    net = network()
    first, second = list(net.parameters())[:2]
    optimizer = hvd.DistributedOptimizer(sgd(net), groups=[[first, second]])
    for step in range(2):
        optimizer.zero_grad()
        loss_of(net, hvd.rank(), step).backward()
        optimizer.step()
    same(net, expected(2))


def check_backward_orders_may_differ() -> None:
    """Ranks use two layers in opposite order, and one of them not at all in some steps."""
    left, right = nn.Linear(2, 2).double(), nn.Linear(2, 2).double()
    parameters = [*left.named_parameters("l"), *right.named_parameters("r")]
    for number, (_, parameter) in enumerate(parameters):
        nn.init.constant_(parameter, number + 1.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p for _, p in parameters], lr=0.5), named_parameters=parameters
    )
    for step in range(6):
        optimizer.zero_grad()
        x = torch.ones(1, 2).double()
        if (step + hvd.rank()) % 3 == 0:
            out = left(x)
        elif hvd.rank() % 2:
            out = left(right(x))
        else:
            out = right(left(x))
        out.sum().backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for _, p in parameters])
    assert all(torch.equal(one, flat) for one in hvd.allgather_object(flat))


def check_synchronize_and_skip() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(net, hvd.rank(), step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        with optimizer.skip_synchronize():
            optimizer.step()
    same(net, expected(3))
    loss_of(net, hvd.rank(), 3).backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("without optimizer.skip_synchronize()" in str(one.message) for one in caught)


def check_closures() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(net, hvd.rank(), step)
            loss.backward()
            return loss

        optimizer.step(closure)
    same(net, expected(3))


def check_parameters_that_come_later() -> None:
    """They step as if they had been there from the beginning, whatever they are called by."""
    for passes, given, groups in ((1, True, None), (3, True, 1), (1, False, None), (2, False, 2)):
        net = network()
        names = net.named_parameters() if given else None
        first = torch.optim.SGD(net[0].parameters(), lr=0.25, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(
            first, names, backward_passes_per_step=passes, groups=groups
        )
        optimizer.add_param_group({"params": net[2].weight})
        optimizer.add_param_group({"params": [net[2].bias]})
        for step in range(3):
            optimizer.zero_grad()
            for number in range(passes):
                loss_of(net, hvd.rank(), step * passes + number).backward()
            optimizer.step()
        same(net, expected(3, passes))


def check_parameters_that_cannot_come_later() -> None:
    net, other = network(), network()
    named = list(net[0].named_parameters())
    for policy in ("bsp", "dear"):
        words = {"policy": policy}
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net[0].parameters()), named, **words)
        group = {"params": list(net[2].parameters())}
        text = raised(ValueError, optimizer.add_param_group, group)
        assert "add_param_group with policy" in text and "leave the policy out" in text, text
        assert len(optimizer.param_groups) == 1
    given = [*named, ("allreduce.noname.1.0", net[2].bias)]
    plain = torch.optim.SGD([*net[0].parameters(), net[2].bias])
    optimizer = hvd.DistributedOptimizer(plain, given)
    text = raised(ValueError, optimizer.add_param_group, {"params": [other[0].weight]})
    assert "the group has the name 'allreduce.noname.1.0', which another" in text, text
    assert len(optimizer.param_groups) == 1


def check_gradients_that_nobody_reduces() -> None:
    if hvd.size() == 1:
        return
    for words in ({}, {"policy": "dear"}, {"backward_passes_per_step": 2}):
        net = network()
        net[2].requires_grad_(False)
        plain = sgd(net)
        optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), **words)
        for _ in range(2):
            loss_of(net, hvd.rank(), 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        net[2].bias.requires_grad_(True)
        loss_of(net, hvd.rank(), 0).backward()
        for call in (optimizer.step, optimizer.synchronize):
            text = raised(ValueError, call)
            assert "the gradient of '2.bias' is not reduced" in text, text
        net[2].bias.requires_grad_(False)
        net[2].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()
        extra = nn.Linear(4, 1).double()
        plain.add_param_group({"params": list(extra.parameters())})
        loss_of(net, hvd.rank(), 0).backward()
        optimizer.step()
        extra(batch(0, 0)).sum().backward()
        text = raised(ValueError, optimizer.step)
        assert "parameter 0 of param_groups[1] is not reduced" in text, text


def check_copies_are_refused() -> None:
    net = network()
    for words in ({}, {"policy": "bsp"}, {"op": hvd.Sum}, {"op": hvd.Adasum}):
        if "Adasum" in str(words) and hvd.size() & (hvd.size() - 1):
            continue
        optimizer = hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **words)
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            text = raised(TypeError, call, optimizer)
            assert "(SGD) cannot be copied or pickled" in text and "state_dict()" in text, text
        assert pickle.loads(pickle.dumps(optimizer.state_dict())) == optimizer.state_dict()


def check_schedulers_and_states() -> None:
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss_of(net, hvd.rank(), 0).backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.zero_grad()
    loss_of(net, hvd.rank(), 1).backward()
    optimizer.step()


def check_misuse_of_steps() -> None:
    if hvd.size() == 1:
        return  # nothing is reduced, so nothing can be in between
    net = network()
    optimizer = hvd.DistributedOptimizer(sgd(net), named_parameters=net.named_parameters())
    loss_of(net, hvd.rank(), 0).backward()
    assert "before optimizer.step()" in raised(AssertionError, optimizer.zero_grad)
    with optimizer.skip_synchronize():
        assert "call optimizer.synchronize() before" in raised(RuntimeError, optimizer.step)
    text = raised(AssertionError, loss_of(net, hvd.rank(), 1).backward)
    assert "more than backward_passes_per_step=1" in text
    optimizer.synchronize()
    assert "at least 1" in raised(ValueError, optimizer.set_backward_passes_per_step, 0)


def check_wrong_arguments() -> None:
    net = network()
    named = list(net.named_parameters())

    def text(**words: Any) -> str:
        return raised(ValueError, hvd.DistributedOptimizer, sgd(net), **words)

    assert "names twice: 0.weight" in text(named_parameters=[*named, named[0]])
    assert "lacks 3 of the optimizer's 4" in text(named_parameters=named[:1])
    assert "not a (name, parameter) pair" in text(named_parameters=list(net.parameters()))
    assert "groups is 0" in text(groups=0)
    assert "groups is -1" in text(groups=-1)
    assert "no list of parameters" in text(groups=[["a"]])
    assert "a parameter twice" in text(groups=[[named[0][1]], [named[0][1]]])
    assert "at least 1" in text(backward_passes_per_step=0)
    assert "with Average only" in text(gradient_predivide_factor=2.0, op=hvd.Sum)


def check_sparse_gradients() -> None:
    for as_dense in (False, True):
        table = nn.Embedding(6, 2, sparse=True).double()
        nn.init.constant_(table.weight, 1.0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0),
            named_parameters=table.named_parameters(),
            op=hvd.Sum,
            sparse_as_dense=as_dense,
        )
        table(torch.tensor([hvd.rank(), 5])).sum().backward()
        optimizer.step()
        wanted = torch.ones(6, 2).double()
        wanted[: hvd.size()] -= 1
        wanted[5] -= hvd.size()
        assert torch.equal(table.weight, wanted), as_dense


def check_adasum_optimizer() -> None:
    if hvd.size() & (hvd.size() - 1):
        return
    net, _ = trained(2, op=hvd.Adasum)
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert all(torch.equal(one, flat) for one in hvd.allgather_object(flat))
    alone = network()  # equal gradients: the adaptive sum of all is that of one
    optimizer = hvd.DistributedOptimizer(sgd(alone), op=hvd.Adasum)
    loss_of(alone, 0, 0).backward()
    optimizer.step()
    plain = network()
    other = sgd(plain)
    loss_of(plain, 0, 0).backward()
    other.step()
    same(alone, list(plain.parameters()))


def check_states_of_the_root() -> None:
    root = hvd.size() - 1
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.Adam(p, lr=0.5 + hvd.rank(), betas=(0.5, 0.25)),
        lambda p: torch.optim.SGD(p, lr=0.5 + hvd.rank(), momentum=0.5),
        lambda p: torch.optim.SGD(p, lr=0.5),
    ]
    for make in kinds:
        net = network()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(hvd.rank())
        optimizer = make(net.parameters())
        if hvd.rank() == root:
            loss_of(net, 0, 0).backward()
            optimizer.step()
        hvd.broadcast_parameters(net.state_dict(), root)
        hvd.broadcast_optimizer_state(optimizer, root)
        told = hvd.allgather_object((net.state_dict(), optimizer.state_dict()))
        for one in told:
            assert str(one) == str(told[root])
        assert optimizer.param_groups[0]["lr"] in (0.5, 0.5 + root)
        optimizer.step()
    hvd.broadcast_parameters(network().named_parameters(), 0)
    hvd.broadcast_parameters(list(network().parameters()), 0)
    lbfgs = torch.optim.LBFGS(network().parameters())
    assert "LBFGS" in raised(ValueError, hvd.broadcast_optimizer_state, lbfgs, 0)
    assert "no tensor" in raised(ValueError, hvd.broadcast_parameters, {"a": 1}, 0)
    assert "expected a dict" in raised(ValueError, hvd.broadcast_parameters, 3, 0)


def check_batch_norm_is_that_of_all_batches() -> None:
    rows = [torch.randn(r + 2, 3, 4, dtype=torch.float64) for r in range(hvd.size())]
    mine = rows[hvd.rank()].clone().requires_grad_()
    together = torch.cat(rows).requires_grad_()
    ours, theirs = hvd.SyncBatchNorm(3).double(), nn.BatchNorm1d(3).double()
    for norm in (ours, theirs):
        nn.init.constant_(norm.weight, 1.5)
    found, wanted = ours(mine), theirs(together)
    start = sum(len(one) for one in rows[: hvd.rank()])
    part = slice(start, start + len(mine))
    assert torch.allclose(found, wanted[part], rtol=1e-10)
    assert torch.allclose(ours.running_var, theirs.running_var, rtol=1e-10)
    assert torch.allclose(ours.running_mean, theirs.running_mean, rtol=1e-10)
    (found**3).sum().backward()
    (wanted**3).sum().backward()
    assert mine.grad is not None and together.grad is not None
    assert torch.allclose(mine.grad, together.grad[part], rtol=1e-8, atol=1e-10)
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    total = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
    assert torch.allclose(total, theirs.weight.grad, rtol=1e-8)
    assert torch.allclose(ours.eval()(mine), theirs.eval()(together)[part], rtol=1e-10)
    assert "at least 2" in raised(ValueError, ours, torch.ones(3).double())
