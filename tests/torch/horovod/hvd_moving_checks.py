"""Checks of pycoll.torch's other operations, run on every rank; see torch_ranks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch_ranks import raised

import pycoll
import pycoll.torch as hvd


def rows_of(rank: int) -> torch.Tensor:
    return torch.arange(3 * (rank + 1), dtype=torch.float64).reshape(-1, 3) + 100 * rank


def all_rows() -> torch.Tensor:
    return torch.cat([rows_of(rank) for rank in range(hvd.size())])


def check_places() -> None:
    comm = pycoll.world()
    assert (hvd.rank(), hvd.size()) == (comm.rank, comm.size)
    assert (hvd.local_rank(), hvd.local_size()) == (comm.local_rank, comm.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (comm.cross_rank, comm.cross_size)
    assert hvd.is_initialized() and hvd.is_homogeneous() and not hvd.mpi_enabled()
    hvd.init()
    assert hvd.size() == comm.size


def check_allgather() -> None:
    assert torch.equal(hvd.allgather(rows_of(hvd.rank()), name="rows"), all_rows())
    none = torch.empty(0 if hvd.rank() == 0 else 2, 3)
    assert hvd.allgather(none).shape == (2 * (hvd.size() - 1), 3)
    handle = hvd.allgather_async(rows_of(hvd.rank()))
    assert torch.equal(hvd.synchronize(handle), all_rows())
    found = hvd.grouped_allgather([rows_of(hvd.rank()), torch.tensor([hvd.rank()])])
    assert torch.equal(found[0], all_rows()) and found[1].tolist() == list(range(hvd.size()))
    handle = hvd.grouped_allgather_async([rows_of(hvd.rank())], name="grouped")
    assert torch.equal(hvd.synchronize(handle)[0], all_rows())


def check_broadcast() -> None:
    root = hvd.size() - 1
    mine = torch.arange(6).reshape(2, 3) + hvd.rank()
    wanted = torch.arange(6).reshape(2, 3) + root
    assert torch.equal(hvd.broadcast(mine, root), wanted)
    assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), wanted)
    assert torch.equal(mine, torch.arange(6).reshape(2, 3) + hvd.rank())
    view = mine.clone().t()
    assert hvd.synchronize(hvd.broadcast_async_(view, root, name="view")) is view
    assert torch.equal(view, wanted.t())
    assert hvd.broadcast_(mine, root) is mine and torch.equal(mine, wanted)
    assert "expected one of" in raised(ValueError, hvd.broadcast, mine, hvd.size())


def check_alltoall() -> None:
    size, rank = hvd.size(), hvd.rank()
    equal = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert equal.tolist() == [2 * rank + i + 100 * r for r in range(size) for i in range(2)]
    splits = [target + 1 for target in range(size)]
    mine = torch.full((sum(splits), 2), float(rank))
    found, received = hvd.alltoall(mine, splits=torch.tensor(splits))
    assert received.tolist() == [rank + 1] * size
    assert found[:, 0].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
    found, received = hvd.synchronize(hvd.alltoall_async(mine, splits, name="async"))
    assert found.shape == ((rank + 1) * size, 2) and received.dtype is torch.int32
    for wrong, told in (
        ([0] * size, f"splits add up to 0, but tensor has {len(mine)} rows"),
        ([0.5] * size, "splits[0] is 0.5: expected a whole number"),
        ([True] * size, "splits[0] is True: expected a whole number"),
        ([1] * (size + 1), f"splits has {size + 1} entries: expected one for each of the {size}"),
        ([[1]] * size, "splits[0] is [1]: expected a whole number"),
        (1, f"splits is 1: expected {size} whole numbers"),
    ):
        text = raised(ValueError, hvd.alltoall, mine, wrong)
        assert told in text, text
    bad = [-1, *splits[1:-1], sum(splits) + 1]
    if size > 1:
        text = raised(ValueError, hvd.alltoall, mine, bad)
        assert "splits[0] is -1: expected a whole number of at least 0" in text, text
        assert "equally" in raised(ValueError, hvd.alltoall, torch.ones(size + 1))


def check_gradients() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = rows_of(rank).requires_grad_()
    weights = torch.cat([torch.full((r + 1, 3), float(r)) for r in range(size)])
    (hvd.allgather(x) * weights).sum().backward()
    assert x.grad is not None and (x.grad == rank).all(), "averaged, as in Horovod"
    y = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (hvd.broadcast(y, 0) * (rank + 1)).sum().backward()
    wanted = (size + 1) / 2 if rank == 0 else 0.0
    assert y.grad is not None and torch.allclose(y.grad, torch.full((3,), wanted).double())
    z = torch.ones(size, 2, dtype=torch.float64, requires_grad=True)
    found, _ = hvd.alltoall(z, [1] * size)
    (found * (rank + 1)).sum().backward()
    assert z.grad is not None and z.grad[:, 0].tolist() == [r + 1.0 for r in range(size)]


def check_objects() -> None:
    mine = {"rank": hvd.rank(), "text": "x" * (1000 * hvd.rank())}
    assert [one["rank"] for one in hvd.allgather_object(mine, name="o")] == [*range(hvd.size())]
    root = hvd.size() - 1
    found = hvd.broadcast_object(mine if hvd.rank() == root else None, root, name="b")
    assert found == {"rank": root, "text": "x" * (1000 * root)}


def check_sparse() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = torch.sparse_coo_tensor([[rank, 5]], [1.0 + rank, 2.0], (6,))
    wanted = torch.zeros(6)
    for r in range(size):
        wanted[r] += 1.0 + r
    wanted[5] += 2.0 * size
    found = hvd.sparse_allreduce_async(mine, "sparse", hvd.Sum)()
    assert found.is_sparse and torch.equal(found.to_dense(), wanted)
    found = hvd.sparse_allreduce_async(mine, "sparse", hvd.Average)()
    assert torch.allclose(found.to_dense(), wanted / size)
    empty = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0), (6,))
    found = hvd.sparse_allreduce_async(mine if rank == 0 else empty, None, hvd.Sum)()
    assert found.to_dense()[0] == 1.0
    assert "Sum and Average" in raised(ValueError, hvd.sparse_allreduce_async, mine, "s", hvd.Max)
    assert "layout" in raised(ValueError, hvd.sparse_allreduce_async, wanted, "s", hvd.Sum)


def check_join() -> None:
    """Rank r has r more batches than rank 0; the last rank joins last."""
    for _ in range(2):
        for step in range(hvd.rank() + 1):
            found = hvd.allreduce(torch.ones(2, 2), op=hvd.Sum, name=f"step {step}")
            assert (found == hvd.size() - step).all(), (step, found)
        assert hvd.join() == hvd.size() - 1
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def check_joined_ranks_take_part_in_nothing_else() -> None:
    if hvd.size() == 1:
        return
    if hvd.rank() > 0:
        for call in (
            lambda: hvd.broadcast(torch.ones(1), 1, name="late"),
            lambda: hvd.allgather(torch.ones(1)),
            lambda: hvd.allreduce(torch.ones(1), op=hvd.Max),
        ):
            assert "rank 0 has joined" in raised(hvd.HorovodInternalError, call)
    assert 0 < hvd.join() < hvd.size()
    hvd.barrier()


def check_process_sets() -> None:
    size, rank = hvd.size(), hvd.rank()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.size() is None and even.process_set_id is None
    assert "not registered" in raised(ValueError, hvd.barrier, even)
    if size == 1:
        assert "registered already" in raised(ValueError, hvd.add_process_set, even)
        return
    sets = [even, odd]
    for one in sets:
        assert hvd.add_process_set(one) is one
    mine = sets[rank % 2]
    assert mine.included() and mine.rank() == rank // 2 and mine.ranks is not None
    found = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
    assert found.item() == sum(mine.ranks)
    last = mine.ranks[-1]
    assert hvd.broadcast(torch.tensor(rank), last, process_set=mine).item() == last
    assert hvd.broadcast_object(rank, last, process_set=mine) == last
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    assert hvd.allgather_object(rank, process_set=mine) == mine.ranks
    hvd.barrier(process_set=mine)
    other = sets[1 - rank % 2]
    assert "not part" in raised(ValueError, hvd.allreduce, torch.ones(1), process_set=other)
    assert "registered already" in raised(ValueError, hvd.add_process_set, even.ranks)
    assert "from 0 to" in raised(ValueError, hvd.add_process_set, [0, size])
    assert "twice" in raised(ValueError, hvd.ProcessSet, [0, 0])
    assert "whole numbers" in raised(ValueError, hvd.ProcessSet, ["0"])
    for one in sets:
        assert hvd.remove_process_set(one)
    assert not hvd.remove_process_set(even) and not hvd.remove_process_set(hvd.global_process_set)
    assert hvd.global_process_set.size() == size and hvd.global_process_set.rank() == rank


def check_timeline() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        hvd.start_timeline(str(path), mark_cycles=True)
        assert "stop it first" in raised(ValueError, hvd.start_timeline, str(path))
        hvd.allreduce(torch.ones(3), name="traced")
        hvd.barrier()
        handles = [hvd.allreduce_async(torch.ones(3), name=f"f{n}") for n in range(20)]
        for handle in handles:
            hvd.synchronize(handle)
        hvd.stop_timeline()
        events = json.loads(path.read_text())
    names = {event.get("name") for event in events}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names
    rows = [e["tid"] for e in events if e.get("args") == {"name": "allreduce.traced"}]
    own = [e["ph"] for e in events if e["tid"] == rows[0] and e["ph"] in "BE"]
    assert own == ["B", "E", "B", "E"]
    # Each tensor's reduction has a number, and the first of those with it names them all.
    row_of = {e["args"]["name"]: e["tid"] for e in events if e.get("name") == "thread_name"}
    fused = {e["tid"]: e["args"] for e in events if e.get("name") == "ALLREDUCE"}
    assert set(fused) == {tid for name, tid in row_of.items() if name.startswith("allreduce.")}
    for number in {one["fusion"] for one in fused.values()}:
        rows = {tid for tid, one in fused.items() if one["fusion"] == number}
        assert {fused[tid]["of"] for tid in rows} == {len(rows)}
        lists = [fused[tid]["tensors"] for tid in rows if "tensors" in fused[tid]]
        assert len(lists) == (len(rows) > 1)
        assert all({row_of[name] for name in one} == rows for one in lists)
    hvd.stop_timeline()


def check_beginning_anew() -> None:
    size = hvd.size()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert "hvd.init()" in raised(ValueError, hvd.rank)
    sets = [hvd.ProcessSet([0, 1])] if size > 2 else []
    hvd.init(process_sets=sets)
    assert hvd.size() == size and all(one.process_set_id == 1 for one in sets)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    hvd.shutdown()
    hvd.init(process_sets=[[0]] if size > 1 else [])  # plain lists of ranks serve as well
    assert size == 1 or "registered already" in raised(ValueError, hvd.add_process_set, [0])
