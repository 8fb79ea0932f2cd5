"""Checks of what is unlike on one rank: where tensors lie, and what fails there alone.

Run on every rank; see torch_ranks. The other ranks get the result, or an error that names the rank.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch_ranks import raised

import pycoll.torch as hvd
from pycoll.torch.horovod import tasks

#: As the ranks' default device it has every tensor that forgets to say where it belongs fail.
NOWHERE = "meta"


def last() -> bool:
    return hvd.rank() == hvd.size() - 1


def check_elements_that_share_a_place() -> None:
    one = torch.ones(1).expand(3)
    windows = torch.arange(4.0).as_strided((3, 2), (1, 1))
    for shared in (one, one.expand(2, 3), windows, torch.ones(2, 1, 2).expand(2, 3, 2)):
        for call in (hvd.allreduce_, hvd.allreduce_async_):
            told = raised(ValueError, call, shared, name="shared")
            assert f"tensor has shape {tuple(shared.shape)} and strides" in told, told
            assert "share one place in memory" in told and "pass clone()" in told, told
        for call in (hvd.broadcast_, hvd.broadcast_async_):
            assert "share one place" in raised(ValueError, call, shared, 0, name="shared")
        for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
            assert "tensors[1] has" in raised(ValueError, call, [torch.ones(2), shared])
        assert "share one place" in raised(ValueError, hvd.broadcast_parameters, [shared], 0)
        assert torch.equal(hvd.allreduce(shared, name="whole"), shared)


def check_gaps_are_not_shared() -> None:
    """Axes that step over each other's elements, and such as have one step only."""
    memory = torch.zeros(12)
    for found in (
        memory.as_strided((3, 2), (2, 3)),
        memory.as_strided((1, 4), (0, 3)),
        memory[::3],
        memory.reshape(3, 4).t(),
        torch.ones(1).expand(0, 3),
    ):
        found.fill_(hvd.rank() + 1.0)
        hvd.allreduce_(found, op=hvd.Sum, name="gaps")
        assert torch.all(found == hvd.size() * (hvd.size() + 1) / 2), found
        hvd.broadcast_(found, 0, name="gaps")


def check_views_that_only_one_rank_has() -> None:
    """pycoll writes to no conjugated or negated view, which the other ranks cannot know."""
    total = sum(complex(1, -rank) for rank in range(hvd.size()))
    for _ in range(2):
        mine = torch.full((4,), complex(1, -hvd.rank()))
        given = torch.full((4,), complex(1, hvd.rank())).conj() if last() else mine
        other = torch.full((3,), complex(0, hvd.rank() + 1.0))
        negated = other.conj().imag if last() else torch.full((3,), -hvd.rank() - 1.0)
        handles = [
            hvd.allreduce_async_(one, op=hvd.Sum, name=name)
            for name, one in (("conj", given), ("neg", negated), ("plain", torch.ones(3)))
        ]
        results = [hvd.synchronize(handle) for handle in handles]
        assert torch.equal(results[0], torch.full((4,), total)), results
        assert torch.equal(results[1], torch.full((3,), -hvd.size() * (hvd.size() + 1) / 2))
        assert torch.equal(results[2], torch.full((3,), float(hvd.size())))
        hvd.broadcast_(given, hvd.size() - 1, name="conj")
        assert torch.equal(given, torch.full((4,), total))


def check_tensors_of_inference_mode() -> None:
    with torch.inference_mode():
        given = torch.ones(2, 3).t()
        handle = hvd.allreduce_async_(given, op=hvd.Sum, name="inferred")
    assert torch.all(hvd.synchronize(handle) == hvd.size())


def check_a_result_that_one_rank_cannot_put() -> None:
    """It is that rank's loss alone, and the world goes on."""
    broken = mock.patch.object(tasks, "_place", side_effect=RuntimeError("no memory"))
    for call in (
        lambda: hvd.allreduce_(torch.ones(2, 3).t(), op=hvd.Sum, name="put"),
        lambda: hvd.broadcast_(torch.full((2, 3), float(hvd.size())).t(), 0, name="put"),
    ):
        if not last():
            assert torch.all(call() == hvd.size())
            continue
        with broken:
            told = raised(hvd.HorovodInternalError, call)
        assert f"ran, but rank {hvd.rank()} could not put its result in place: no memory" in told
    assert torch.all(hvd.allreduce(torch.ones(2)) == 1)


def check_a_default_device_is_not_the_hosts() -> None:
    with torch.device("cpu"):
        mine = torch.full((2 * hvd.size(), 2), float(hvd.rank()))
        rows = torch.ones(hvd.rank() + 1, 3)
        sparse = torch.eye(3).to_sparse()
        layer = torch.nn.BatchNorm1d(2)
    rank, size = hvd.rank(), hvd.size()
    with torch.device(NOWHERE):
        assert torch.ones(1).is_meta
        for op in (hvd.Average, hvd.Max, hvd.Adasum):
            if op != hvd.Adasum or not size & (size - 1):
                assert hvd.allreduce(mine, op=op).shape == mine.shape
        hvd.grouped_allreduce_([mine.clone(), rows.sum(0)], postscale_factor=0.5)
        assert len(hvd.allgather(rows)) == size * (size + 1) // 2
        assert len(hvd.grouped_allgather([rows, mine])) == 2
        assert torch.all(hvd.broadcast(mine, size - 1) == size - 1)
        assert hvd.alltoall(mine).shape == mine.shape
        found, splits = hvd.alltoall(mine, [2] * size)
        assert splits.tolist() == [2] * size and found.shape == mine.shape
        told = raised(ValueError, hvd.alltoall, mine, torch.full((size,), 2))
        assert "splits is on meta" in told, told
        assert hvd.reducescatter(mine, op=hvd.Sum).shape == (2, 2)
        assert hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)().to_dense()[0, 0] == size
        assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
        assert hvd.allgather_object(rank) == list(range(size))
        hvd.broadcast_parameters(layer.state_dict(), 0)
        hvd.barrier()
        assert hvd.join() in range(size)
        if size > 1:
            assert hvd.remove_process_set(hvd.add_process_set([0]))


def check_training_under_a_default_device() -> None:
    rank = hvd.rank()
    ways: list[dict[str, Any]] = [{}, {"groups": 1}, {"policy": "dear"}, {"policy": "auto"}]
    for words in ways:
        with torch.device("cpu"):
            net = torch.nn.Sequential(torch.nn.Linear(2, 2), hvd.SyncBatchNorm(2))
            rows = torch.arange(6.0).reshape(3, 2) * (rank + 1) + rank
        with torch.device(NOWHERE):
            plain = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.5)
            hvd.broadcast_parameters(net.state_dict(), 0)
            optimizer = hvd.DistributedOptimizer(plain, net.named_parameters(), **words)
            hvd.broadcast_optimizer_state(optimizer, 0)
            state = hvd.elastic.TorchState(net, optimizer, epoch=0)
            state.sync()
            for _ in range(2):
                optimizer.zero_grad()
                (net(rows) ** 3).sum().backward()
                optimizer.step()
            state.commit()
            state.restore()
        flat = torch.cat([p.detach().flatten() for p in net.parameters()])
        assert all(torch.equal(one, flat) for one in hvd.allgather_object(flat)), words


def check_z_a_rank_that_cannot_make_what_travels() -> None:
    """It has to leave, since the others are in the task already: all hear of it, and of whom."""
    broken = mock.patch.object(tasks.AllReduce, "enter", side_effect=RuntimeError("no memory"))
    if last():
        with broken:
            told = raised(hvd.HorovodInternalError, hvd.allreduce, torch.ones(2), name="made")
        assert f"rank {hvd.rank()} left, since allreduce.made failed there: no memory" in told, told
    else:
        told = raised(hvd.HorovodInternalError, hvd.allreduce, torch.ones(2), name="made")
        assert f"rank {hvd.size() - 1}" in told, told
    assert "rank" in raised(hvd.HorovodInternalError, hvd.allreduce, torch.ones(2), name="next")
    hvd.shutdown()
    hvd.init()
    assert torch.all(hvd.allreduce(torch.ones(2)) == 1)
