"""Wrapped optimizers lacked attributes of Horovod's that programs read, and optimizers without
state had no zeros as gradients after broadcast_optimizer_state."""

from __future__ import annotations

from typing import Any

import pytest
from harness import world_in_processes

import pycoll

pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
SIZE = 2
#: What Horovod's wrapped optimizers have in addition to torch's own attributes: all there is in
#: horovod/torch/optimizer.py at commit 2626dc8, of the usual optimizer and of that for Adasum.
_HOROVODS = (
    "_allreduce_delay _allreduce_grad_async _compression _grad_accs _group_counts "
    "_grouped_allreduce_grad_async _groups _handles _make_hook _p_to_group _parameter_names "
    "_register_hooks _requires_update _should_synchronize _sparse_allreduce_grad_async "
    "_starting_models _synchronized backward_passes_per_step find_duplicates "
    "gradient_predivide_factor load_state_dict op process_set set_backward_passes_per_step "
    "skip_synchronize sparse_as_dense step synchronize zero_grad"
)
#: Steps of Horovod's own way to reduce gradients, whose absence is explained.
_EXPLAINED = (
    "_allreduce_grad_async _grad_accs _group_counts _grouped_allreduce_grad_async _make_hook "
    "_p_to_group _register_hooks _sparse_allreduce_grad_async _starting_models "
    "find_duplicates"
)
HOROVODS, EXPLAINED = set(_HOROVODS.split()), set(_EXPLAINED.split())


def _net() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))


def _check_names_of_attributes(optimizer: Any) -> None:
    for name in HOROVODS - EXPLAINED:
        getattr(optimizer, name)
    for name in EXPLAINED | {"nothing_like_it"}:
        with pytest.raises(AttributeError) as caught:
            getattr(optimizer, name)
        text = str(caught.value)
        assert name in text and ("Horovod reduces" in text) == (name in EXPLAINED), text


def _check_values(hvd: Any) -> None:
    import torch

    net, extra = _net(), torch.nn.Linear(1, 1)
    groups = [{"params": list(one.parameters())} for one in net]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    names = ["allreduce.noname.0.0", "allreduce.noname.0.1"]
    names += ["allreduce.noname.1.0", "allreduce.noname.1.1"]
    assert optimizer._parameter_names == dict(zip(net.parameters(), names, strict=True))
    assert optimizer._requires_update == set(net.parameters())
    assert (optimizer.op, optimizer.gradient_predivide_factor) == (hvd.Average, 1.0)
    assert (optimizer.sparse_as_dense, optimizer._groups) == (False, None)
    assert optimizer.process_set is hvd.global_process_set
    assert optimizer._compression is hvd.Compression.none
    assert optimizer._handles == {} and set(optimizer._allreduce_delay.values()) == {1}
    net(torch.ones(1, 3)).sum().backward()
    assert set(optimizer._handles) == set(net.parameters())
    assert set(optimizer._allreduce_delay.values()) == {0}
    optimizer.step()
    assert optimizer._handles == {} and optimizer._should_synchronize
    optimizer.backward_passes_per_step = 2
    assert optimizer.backward_passes_per_step == 2
    for count in (1, 0):
        net(torch.ones(1, 3)).sum().backward()
        assert set(optimizer._allreduce_delay.values()) == {count}
    optimizer.step()
    with pytest.raises(ValueError, match="expected at least 1"):
        optimizer.backward_passes_per_step = 0
    given = [*net.named_parameters(), *(("more." + n, p) for n, p in extra.named_parameters())]
    pair = [tuple(net.parameters())[:2], list(net.parameters())[2:]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=1.0), given, groups=[list(one) for one in pair]
    )
    assert set(optimizer._parameter_names.values()) == {name for name, _ in given}
    net(torch.ones(1, 3)).sum().backward()
    assert set(optimizer._handles) == {tuple(one) for one in pair}
    optimizer.step()


def _check_zeros(hvd: Any) -> None:
    import torch

    table = torch.nn.Embedding(4, 2, sparse=True)
    for make, model, sparse in (
        (lambda p: torch.optim.SGD(p, lr=0.1), None, False),
        (lambda p: torch.optim.Adam(p, lr=0.1), None, False),
        (lambda p: torch.optim.SGD(p, lr=0.1), table, True),
        (lambda p: torch.optim.SparseAdam(p, lr=0.1), None, True),
    ):
        table.weight.grad = None
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        before = table.weight.detach().clone()
        for optimizer in (make([table.weight, frozen]), None):
            wrapped = optimizer or hvd.DistributedOptimizer(make([table.weight]))
            hvd.broadcast_optimizer_state(wrapped, 0, model)
            grad = table.weight.grad
            assert grad is not None and grad.is_sparse == sparse and not grad.requires_grad
            assert grad.shape == (4, 2) and not grad.to_dense().any()
            assert frozen.grad is None and torch.equal(table.weight, before)
            table.weight.grad = None
    net = _net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    kept = [one.grad.clone() for one in net.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(torch.equal(a.grad, b) for a, b in zip(net.parameters(), kept, strict=True))
    optimizer.step()
    optimizer.zero_grad()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(one.grad is None for one in net.parameters())


def check_all(comm: pycoll.Communicator) -> None:
    """One rank."""
    import torch

    import pycoll.torch as hvd

    hvd.init()
    for words in ({}, {"groups": 2}, {"op": hvd.Adasum}, {"policy": "bsp"}):
        net = _net()
        _check_names_of_attributes(
            hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **words)
        )
    _check_names_of_attributes(
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1), policy="fixed", model=net
        )
    )
    _check_values(hvd)
    _check_zeros(hvd)
    hvd.shutdown()


def test_attributes_and_zeros_are_horovods() -> None:
    world_in_processes(SIZE, check_all)
