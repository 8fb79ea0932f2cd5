"""Checks of what training programs get wrong, run on every rank; see torch_ranks.

Nothing hangs, the text says what is wrong and where, and what can go on goes on. What is wrong with
single operations is in hvd_reducing_checks and hvd_moving_checks.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from hvd_optimizer_checks import loss_of, network, sgd
from torch import nn
from torch_ranks import TIMEOUT_S, raised

import pycoll
import pycoll.torch as hvd
from pycoll.torch.horovod import horovod_world

WAYS: list[dict[str, Any]] = [{}, {"policy": "bsp"}, {"policy": "dear"}]


def made(net: nn.Module, **words: Any) -> Any:
    return hvd.DistributedOptimizer(sgd(net), net.named_parameters(), **words)


def ways(net: nn.Module) -> list[dict[str, Any]]:
    return [*WAYS, {"policy": "dear", "model": net}]


def check_names() -> None:
    net = network()
    named = list(net.named_parameters())
    for words in WAYS:
        for given, text in (
            ([*named, named[1]], "named_parameters has names twice: 0.bias"),
            (named[1:], "named_parameters lacks 1 of the optimizer's 4 parameters"),
            ([name for name, _ in named], "not a (name, parameter) pair"),
        ):
            told = raised(ValueError, hvd.DistributedOptimizer, sgd(net), given, **words)
            assert text in told, told


def check_a_parameter_that_never_gets_a_gradient() -> None:
    """It counts as zeros; weight decay and moments may still move it, alike on all ranks."""
    for way in range(4):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(1.0)
        optimizer = made(net, **ways(net)[way])
        for _ in range(5):
            optimizer.zero_grad()
            net[0](torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert torch.equal(net[1].weight, torch.ones(2, 2))
        assert not torch.equal(net[0].weight, torch.ones(2, 2))


def check_shapes_that_change_between_steps() -> None:
    if hvd.size() == 1:
        return
    for length in (3, 5, 3):
        assert hvd.allreduce(torch.ones(length), name="x", op=hvd.Sum)[0] == hvd.size()
    length = 4 if hvd.rank() == 1 else 3
    told = raised(hvd.HorovodInternalError, hvd.allreduce, torch.ones(length), name="x")
    assert "shape is " in told and "[[4]] on rank 1" in told, told
    for words in WAYS[1:]:
        net = network()
        optimizer = made(net, **words)
        loss_of(net, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        net[0].weight.data = torch.zeros(3, 5).double()
        loss = net(torch.ones(2, 5).double()).sum()
        told = raised(ValueError, loss.backward)
        assert "the gradient of '0.weight' has shape (3, 5)" in told, told
        assert "and had (3, 4)" in told and "make the optimizer anew" in told, told
    net = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
    for columns in (4, 5):
        net[0].weight.data = torch.zeros(3, columns).double()
        optimizer.zero_grad()
        net(torch.ones(2, columns).double()).sum().backward()
        optimizer.step()


def check_types_that_change_between_steps() -> None:
    if hvd.size() == 1:
        return
    net = network()
    optimizer = made(net, policy="bsp")
    loss_of(net, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    net.float()
    loss = net(torch.ones(2, 4)).sum()
    told = raised(ValueError, loss.backward)
    assert "type torch.float32, and had (2,) and torch.float64" in told, told


def check_ranks_with_different_parameters() -> None:
    """Rank 1 has a layer more, of one parameter: its name is told."""
    if hvd.size() == 1:
        return

    def layers() -> list[nn.Module]:
        more = [nn.Linear(2, 2, bias=False)] if hvd.rank() == 1 else []
        return [nn.Linear(2, 2), nn.Linear(2, 2), *more]

    for words in WAYS[1:]:
        net = nn.Sequential(*layers())
        made(net, **words)
        told = raised(hvd.HorovodInternalError, net(torch.ones(1, 2)).sum().backward)
        assert (
            "the gradients of rank 1 differ from those of rank 0: " in told and "2.weight" in told
        ), told
    # Without a policy tensors go one by one, so only time tells; the others are not disturbed.
    net = nn.Sequential(*layers())
    comm = horovod_world.current_world().everybody.comm
    comm.timeout_s = 1.0 if hvd.rank() == 1 else 3 * TIMEOUT_S
    optimizer = made(net)
    net(torch.ones(1, 2)).sum().backward()
    if hvd.rank() == 1:
        told = raised(hvd.HorovodInternalError, optimizer.step)
        assert "allreduce.2.weight" in told and "waited 1 s for rank" in told, told
        optimizer.load_state_dict(optimizer.state_dict())
    else:
        optimizer.step()
    comm.timeout_s = 3 * TIMEOUT_S
    hvd.barrier()


def check_steps_without_synchronization() -> None:
    if hvd.size() == 1:
        return
    for way in range(4):
        net = network()
        optimizer = made(net, **ways(net)[way])
        loss_of(net, 0, 0).backward()
        with optimizer.skip_synchronize():
            told = raised(RuntimeError, optimizer.step)
        assert "call optimizer.synchronize() before" in told
        told = raised(AssertionError, optimizer.zero_grad)
        assert "while gradients are being reduced" in told
        told = raised(AssertionError, loss_of(net, 0, 0).backward)
        assert "more than backward_passes_per_step=1 times before step()" in told
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()


def check_leaving_with_tensors_in_flight() -> None:
    """What waits for other ranks fails with the reason, and the next world is as good as new."""
    if hvd.size() == 1:
        return
    for way in range(4):
        net = network()
        optimizer = made(net, **ways(net)[way])
        loss_of(net, 0, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        handle = None
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(3), name="alone")
            loss_of(net, 0, 0).backward()
        pycoll.world().barrier()
        hvd.shutdown()
        if handle is not None:
            told = raised(hvd.HorovodInternalError, hvd.synchronize, handle)
            assert "allreduce.alone did not finish" in told, told
            raised((hvd.HorovodInternalError, ValueError), optimizer.synchronize)
        hvd.init()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        loss_of(net, 0, 0).backward()
        optimizer.step()
        told = hvd.allgather_object([one.detach().sum().item() for one in net.parameters()])
        assert all(one == told[0] for one in told)


def check_models_on_other_devices() -> None:
    net = nn.Linear(2, 2, device="meta")
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        for _ in range(2):
            told = raised(ValueError, call, net.weight.new_empty(2 * hvd.size(), 2))
            assert "a tensor is on meta, whose memory pycoll does not reach: pass one" in told, told
    told = raised(ValueError, hvd.broadcast_parameters, net.state_dict(), 0)
    assert "a tensor is on meta" in told, told
    if hvd.size() == 1:
        return
    told = raised(ValueError, made, net, policy="bsp")
    assert "'bias' is on meta: with a policy, parameters have to be in host memory" in told, told


def check_groups() -> None:
    net, other = network(), network()
    first = next(net.parameters())
    for groups, text in (
        (0, "groups is 0: expected a number above 0, or lists of parameters"),
        (True, "groups is True"),
        (2.5, "groups is 2.5"),
        ("all", "groups is 'all'"),
        ([first], "no list of parameters"),
        ([["a"]], "no list of parameters"),
        ([[first], [first]], "groups has a parameter twice"),
        ([[first], list(other.parameters())], "4 parameters that are not the optimizer's, the "),
    ):
        told = raised(ValueError, made, net, groups=groups)
        assert text in told, told


def check_compiled_modules_are_refused() -> None:
    """A matter of each rank by itself, and the compiler takes a second to import."""
    if hvd.size() > 1:
        return
    net = network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(network())
    text = raised(
        ValueError, hvd.DistributedOptimizer, sgd(script), None, policy="bsp", model=script
    )
    assert "model is a RecursiveScriptModule: parameters of compiled modules" in text, text
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    words = {"policy": "fixed", "model": net}
    net[1].compile(backend="eager")
    plain = torch.optim.SGD(net.parameters())
    text = raised(ValueError, hvd.DistributedOptimizer, plain, **words)
    assert "model has '1', which is compiled: parameters of compiled modules" in text, text
    compiled: Any = torch.compile(net, backend="eager")
    assert "leave out model=" in raised(
        ValueError, hvd.DistributedOptimizer, sgd(net), None, policy="bsp", model=compiled
    )


def check_models_that_steps_cannot_wait_for() -> None:
    net = network()

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def build(optimizer: Any = None, **words: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer or sgd(net), net.named_parameters(), **words)

    assert "policy is not" in raised(ValueError, build, model=net)
    assert "expected a torch.nn.Module" in raised(ValueError, build, policy="bsp", model=3)
    text = raised(ValueError, build, policy="bsp", model=net[0])
    assert "model lacks 2 of the optimizer's 4 parameters, the first being '2.weight'" in text
    for optimizer in (torch.optim.LBFGS(net.parameters()), Own(net.parameters(), lr=1.0)):
        text = raised(ValueError, build, optimizer, policy="bsp", model=net)
        assert "one of torch's" in text and type(optimizer).__name__ in text
