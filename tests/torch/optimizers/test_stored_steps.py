"""DistributedOptimizer with a consistency: workers and servers as threads, and as processes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import TIMEOUT_S, each, succeeded
from torch import nn
from torch_ranks import raised

import pycoll
import pycoll.torch as hvd
from pycoll import ps

SCRIPT = (Path(__file__).parent / "stored_training").with_suffix(".py")
STEPS = 5


class Worker:
    """A worker of ``run``: its number, its store, and a barrier of the workers."""

    def __init__(self, number: int, store: ps.Store, barrier: threading.Barrier) -> None:
        self.number = number
        self.store = store
        self.barrier = barrier

    def wrapped(self, optimizer: torch.optim.Optimizer, **words: Any) -> Any:
        return hvd.DistributedOptimizer(optimizer, architecture="ps", store=self.store, **words)


def run(work: Callable[[Worker], Any], workers: int = 2, **terms: Any) -> list[Any]:
    comms = pycoll.local_world(workers + 1, timeout_s=TIMEOUT_S)
    barrier = threading.Barrier(workers, timeout=TIMEOUT_S)

    def rank(comm: pycoll.Communicator) -> Any:
        if comm.rank == workers:
            return ps.serve_store(comm, [workers], **terms)
        with ps.connect(comm) as store:
            return work(Worker(comm.rank, store, barrier))

    with ThreadPoolExecutor(len(comms)) as pool:
        outcomes = each(pool, rank, comms)
    for comm in comms:
        comm.close()
    return succeeded(outcomes[:workers])


def network(seed: int = 1) -> nn.Sequential:
    draw = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return net


def give(net: nn.Module, worker: int, step: int) -> list[torch.Tensor]:
    """Random gradients of a worker in a step; returns them."""
    draw = torch.Generator().manual_seed(100 * step + worker)
    found = []
    for parameter in net.parameters():
        grad = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)
        found.append(parameter.grad)
    return found


Make = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


@pytest.mark.parametrize("consistency", ["bsp", ps.SSP(0), ps.BSP(elastic=True)])
@pytest.mark.parametrize("name", MAKERS)
def test_bulk_synchronous_steps_have_the_bits_of_one_process(name: str, consistency: Any) -> None:
    expected = network()
    alone = MAKERS[name](expected.parameters())
    for step in range(STEPS):
        first, second = (give(expected, worker, step) for worker in range(2))
        for parameter, a, b in zip(expected.parameters(), first, second, strict=True):
            parameter.grad = (a + b) / 2
        alone.step()

    def work(worker: Worker) -> None:
        net = network()
        optimizer = worker.wrapped(MAKERS[name](net.parameters()), consistency=consistency)
        for step in range(STEPS):
            give(net, worker.number, step)
            optimizer.step()
        for found, right in zip(net.parameters(), expected.parameters(), strict=True):
            assert torch.equal(found, right)
        assert "servers return the mean" in optimizer.explain()
        told = f"add_param_group with {ps.consistency.consistency_of(consistency)}: the store"
        assert told in raised(ValueError, optimizer.add_param_group, {})

    run(work, consistency=consistency)


def test_elastic_steps_go_on_with_the_mean_of_the_workers_that_are_left() -> None:
    elastic, left = ps.BSP(elastic=True), 2
    expected = network()
    alone = MAKERS["SGD"](expected.parameters())
    for step in range(STEPS):
        grads = [give(expected, worker, step) for worker in range(2 if step < left else 1)]
        for parameter, *found in zip(expected.parameters(), *grads, strict=True):
            parameter.grad = sum(found[1:], found[0]) / len(found)
        alone.step()

    def work(worker: Worker) -> None:
        net = network()
        optimizer = worker.wrapped(MAKERS["SGD"](net.parameters()), consistency=elastic)
        for step in range(left if worker.number else STEPS):
            give(net, worker.number, step)
            optimizer.step()
        if worker.number == 0:
            for found, right in zip(net.parameters(), expected.parameters(), strict=True):
                assert torch.equal(found, right)
            assert all(one["gone"] == [1] for one in optimizer.store.stats()["shards"])

    run(work, consistency=elastic)


@pytest.mark.parametrize("consistency", ["asp", ps.SSP(1)])
def test_every_gradient_is_applied_once_and_workers_begin_alike(consistency: Any) -> None:
    """Whole numbers times a power of two are exact in any order."""

    def work(worker: Worker) -> list[list[float]]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).double())
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(1.0 + worker.number)
        groups = [{"params": net[0].parameters()}, {"params": net[1].parameters(), "lr": 0.25}]
        optimizer = worker.wrapped(torch.optim.SGD(groups, lr=0.125))
        # No worker pushes until all have pulled.
        worker.barrier.wait()
        assert all((parameter == 1).all() for parameter in net.parameters())
        for step in range(20):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, float(step + 100 * worker.number))
            optimizer.step()
        worker.barrier.wait()
        optimizer.zero_grad()
        optimizer.step()
        return [parameter.flatten().tolist() for parameter in net.parameters()]

    total = 2 * sum(range(20)) + 20 * 100
    first, second = 1 - 0.125 * total, 1 - 0.25 * total
    wanted = [[first] * 4, [first] * 2, [second] * 2, [second]]
    assert run(work, consistency=consistency) == [wanted] * 2


@pytest.mark.parametrize("consistency", ["asp", ps.SSP(2), ps.Backup(0.5)])
def test_a_worker_that_joined_by_a_ticket_trains_with_the_others(consistency: Any) -> None:
    def work(worker: Worker) -> None:
        net, other = network(), network(seed=2)
        optimizer = worker.wrapped(torch.optim.SGD(net.parameters(), lr=0.125))
        give(net, 0, 1)
        optimizer.step()
        with ps.connect(ticket=optimizer.store.ticket()) as joined:
            second = hvd.DistributedOptimizer(
                torch.optim.SGD(other.parameters(), lr=0.125), architecture="ps", store=joined
            )
            # It takes the parameters that the servers hold, whatever it began with.
            before = [parameter.clone() for parameter in other.parameters()]
            for found, right in zip(before, net.parameters(), strict=True):
                assert torch.equal(found, right)
            given = give(other, 1, 2)
            second.step()
            for found, old, grad in zip(other.parameters(), before, given, strict=True):
                assert torch.equal(found, old - 0.125 * grad)
            optimizer.zero_grad()
            optimizer.step()
            for found, right in zip(net.parameters(), other.parameters(), strict=True):
                assert torch.equal(found, right)
            clocks = optimizer.store.stats()["shards"][0]["clocks"]
            assert len(clocks) == 2, clocks

    run(work, workers=1, consistency=consistency)


def test_backup_steps_by_the_mean_of_those_that_came_in_time() -> None:
    def work(worker: Worker) -> float:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = worker.wrapped(torch.optim.SGD([parameter], lr=0.5))
        for _ in range(20):
            parameter.grad = torch.full((1,), 4.0)
            optimizer.step()
        worker.barrier.wait()
        (shard,) = worker.store.stats()["shards"]
        worker.barrier.wait()
        pulled = worker.store.pull("allreduce.noname.0.0").item()
        # Whoever is in a mean, it is 4, unless the divisor counts another number of workers.
        assert pulled == -2.0 * shard["rounds"], (pulled, shard)
        assert 20 <= shard["rounds"] <= 40
        return float(shard["dropped"])

    run(work, consistency=ps.Backup(0.5))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), betas=(0.8, 0.99), eps=1e-6),
    ],
)
def test_servers_step_as_torch_does_with_settings_that_change(make: Make) -> None:
    def work(worker: Worker) -> None:
        net, other = network(), network()
        optimizer, alone = worker.wrapped(make(net.parameters())), make(other.parameters())
        schedules = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in (optimizer, alone)]
        for step in range(STEPS):
            give(net, 0, step)
            give(other, 0, step)
            for one, schedule in zip((optimizer, alone), schedules, strict=True):
                one.step()
                schedule.step()
        for found, right in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(found, right, rtol=1e-5, atol=1e-6)
        assert optimizer.state_dict()["state"] == {}

    run(work, workers=1, consistency="asp")


def test_hooks_closures_and_sparse_gradients_are_heard() -> None:
    def work(worker: Worker) -> None:
        rows = nn.Embedding(4, 2, sparse=True)
        nn.init.zeros_(rows.weight)
        optimizer = worker.wrapped(torch.optim.SGD(rows.parameters(), lr=1.0), sparse_as_dense=True)
        seen: list[str] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))

        def closure() -> torch.Tensor:
            seen.append("closure")
            loss: torch.Tensor = rows(torch.tensor([1, 1, 3])).sum()
            loss.backward()
            return loss.detach()

        assert optimizer.step(closure) == 0
        assert seen == ["before", "closure", "after"]
        assert rows.weight[:, 0].tolist() == [0, -2, 0, -1]
        optimizer.zero_grad()
        assert optimizer.step() is None
        assert "servers step" in optimizer.explain() and "store: asp" in optimizer.explain()

    run(work, workers=1, consistency="asp")


def bad_arguments(worker: Worker) -> None:
    net = network()

    def made(optimizer: Any = None, **words: Any) -> str:
        given = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
        words = {"architecture": "ps", "store": worker.store, **words}
        return raised(ValueError, hvd.DistributedOptimizer, given, **words)

    assert "architecture is None" in made(architecture=None)
    assert "architecture is 'a2a'" in made(architecture="a2a", consistency="asp")
    assert 'consistency is \'asap\': expected "bsp", "asp"' in made(consistency="asap")
    assert "consistency is bsp and the store has asp" in made(consistency="bsp")
    assert "store is 7: expected" in made(store=7)
    for words in (
        {"policy": "bsp"},
        {"groups": 2},
        {"model": net},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"compression": pycoll.compress.Block("int8")},
    ):
        (name,) = words
        told = made(**words)
        assert f"{name} is" in told and "with a store" in told, told
    kinds: list[tuple[str, Any]] = [
        ("optimizer is a AdamW: servers step by torch.optim.SGD, ", torch.optim.AdamW),
        ("optimizer is a RMSprop: servers step by", torch.optim.RMSprop),
        ("[0] has weight_decay=0.1", lambda p: torch.optim.Adam(p, weight_decay=0.1)),
        ("[0] has amsgrad=True", lambda p: torch.optim.Adam(p, amsgrad=True)),
        ("[0] has dampening=0.5", lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.5)),
        ("[0] has lr_decay=0.1", lambda p: torch.optim.Adagrad(p, lr_decay=0.1)),
        ("[0] has maximize=True", lambda p: torch.optim.SGD(p, 0.1, maximize=True)),
    ]
    for text, kind in kinds:
        assert text in made(kind(net.parameters())), made(kind(net.parameters()))
    begun = torch.optim.Adam(net.parameters())
    give(net, 0, 0)
    begun.step()
    assert "optimizer has a state for" in made(begun)
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    assert "no parameter that needs a gradient" in made(torch.optim.SGD([frozen], lr=0.1))
    whole = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    assert "has type torch.complex64: servers step" in made(torch.optim.SGD([whole], lr=0.1))
    elsewhere = nn.Parameter(torch.ones(1, device="meta"))
    assert "is on meta: servers hold" in made(torch.optim.SGD([elsewhere], lr=0.1))


def test_wrong_arguments_are_told_before_anything_is_sent() -> None:
    def work(worker: Worker) -> None:
        bad_arguments(worker)
        assert worker.store.stats()["keys"] == {}

    run(work, workers=1, consistency="asp")


def test_wrong_use_is_told() -> None:
    def work(worker: Worker) -> None:
        net = network()
        make = MAKERS["SGD"]
        optimizer = worker.wrapped(make(net.parameters()))
        told = raised(ValueError, worker.wrapped, make(net.parameters()))
        assert "the store has a key 'allreduce.noname.0.0 and 1 more' already" in told, told
        assert "add_param_group with asp" in raised(ValueError, optimizer.add_param_group, {})
        assert "each worker pushes" in raised(AssertionError, optimizer.skip_synchronize)
        alone = make(net.parameters())
        give(net, 0, 0)
        optimizer.step()
        same = [parameter.clone() for parameter in net.parameters()]
        for parameter, value in zip(net.parameters(), same, strict=True):
            parameter.data.copy_(value)
        optimizer.step()
        with torch.no_grad():
            net[1].bias[0] += 1
        told = raised(ValueError, optimizer.step)
        assert "'allreduce.noname.0.3' was changed after the last step" in told, told
        with torch.no_grad():
            net[1].bias[0] -= 1
        alone.step()
        told = raised(ValueError, optimizer.load_state_dict, alone.state_dict())
        assert "state_dict has a state" in told
        settings = optimizer.state_dict()
        settings["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(settings)
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.param_groups[0]["dampening"] = 0.5
        assert "has dampening=0.5" in raised(ValueError, optimizer.step)

    run(work, workers=1, consistency="asp")


def test_processes_train_digits_with_the_servers_of_their_job() -> None:
    pytest.importorskip("sklearn", reason="no scikit-learn: pip install -r tests/requirements.txt")
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "2", "--servers", "1", str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * 5,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(one[one.index("{") :]) for one in done.stdout.splitlines() if "{" in one]
    assert len(found) == 2
    for one in found:
        assert one["bits are those of the synchronous way"] is True
        assert one["asp"] > 0.8 and one["SSP(2)"] > 0.8, one
        assert 'consistency is "SSP(2)" on rank 0, "asp" on rank 1' in one["differ"], one


def test_a_job_without_servers_is_told_how_to_start_them() -> None:
    hvd.init()
    try:
        optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
        told = raised(
            ValueError,
            hvd.DistributedOptimizer,
            optimizer,
            architecture="ps",
            consistency="asp",
        )
        assert "consistency is asp and the job has no servers: start some (pycoll run" in told
    finally:
        hvd.shutdown()
