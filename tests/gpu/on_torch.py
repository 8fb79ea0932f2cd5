"""torch.distributed and Horovod's interface on CUDA tensors, ranks being threads; see
torch_stand_in.py."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from device_ranks import ranks_of
from harness import ThreadWorld, fresh_world
from torch_stand_in import CudaTensor, StreamStandIn, on_device, read, stood_in

import pycoll
from pycoll.compress import Block, Feedback, Sign, TopK
from pycoll.optim import Entry, Policy, Scheduler, average_gradients
from pycoll.tools.bench.cuda import Stream, array
from pycoll.torch import fsdp, hooks
from pycoll.torch.c10d import PycollProcessGroup
from pycoll.torch.c10d.group_work import Launched
from pycoll.torch.horovod.controller import Controller
from pycoll.torch.horovod.horovod_world import wait_for
from pycoll.torch.horovod.scaled_ops import Average, Sum
from pycoll.torch.horovod.tasks import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    ReduceScatter,
    reduction_of,
)
from pycoll.torch.horovod.timeline import Timeline
from pycoll.torch.horovod.variables import Variables

SIZE = 3


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    with stood_in():
        yield made
        made.close()


def values(rank: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 5) % 11).reshape(shape).double()


def every(*shape: int) -> torch.Tensor:
    return torch.stack([values(rank, *shape) for rank in range(SIZE)])


def options(kind: Any, **words: Any) -> Any:
    made = kind()
    for name, value in words.items():
        setattr(made, name, value)
    return made


def with_group(function: Callable[[PycollProcessGroup], Any]) -> Callable[..., Any]:
    return lambda comm: function(PycollProcessGroup(comm))


def done(work: Any) -> None:
    assert isinstance(work, Launched)
    assert work.wait() and work.wait()


def test_tensors_stand_in(world: ThreadWorld) -> None:
    """They are what the tests below take them for."""

    def run(comm: pycoll.Communicator) -> None:
        x = on_device(values(comm.rank, 4, 3))
        assert isinstance(x, CudaTensor) and x.is_cuda and x.device.type == "cuda"
        assert torch.equal(read(x.t().contiguous() + 1), values(comm.rank, 4, 3).t() + 1)
        x.t().narrow(0, 1, 2).copy_(on_device(values(7, 2, 4)))
        assert torch.equal(read(x)[:, 1:], values(7, 2, 4).t())
        assert x.new_empty(5).is_cuda

    ranks_of(world, run)


def test_reductions(world: ThreadWorld) -> None:
    def run(group: PycollProcessGroup) -> None:
        rank = group.rank()
        x = on_device(values(rank, 4, 6))
        done(group.allreduce([x], options(dist.AllreduceOptions)))
        assert torch.equal(read(x), every(4, 6).sum(0))
        whole = on_device(values(rank, 4, 6))
        done(group.allreduce([whole.t().narrow(0, 1, 5)], options(dist.AllreduceOptions)))
        assert torch.equal(read(whole.t().narrow(0, 1, 5)), every(4, 6).sum(0).t()[1:])
        several = [on_device(values(rank, n)) for n in (3, 700, 1)]
        done_at_once = group.allreduce_coalesced(several, options(dist.AllreduceOptions))
        assert done_at_once.wait()
        assert all(torch.equal(read(one), every(len(one)).sum(0)) for one in several)
        x = on_device(values(rank, 5))
        done(group.reduce([x], options(dist.ReduceOptions, rootRank=1)))
        assert torch.equal(read(x), every(5).sum(0) if rank == 1 else values(rank, 5))
        out = on_device(torch.zeros(4).double())
        done(group.reduce_scatter_single(out, on_device(values(rank, 4 * SIZE))))
        assert torch.equal(read(out), every(4 * SIZE).sum(0).view(SIZE, 4)[rank])
        parts = [on_device(values(rank, r + 1)) for r in range(SIZE)]
        out = on_device(torch.zeros(rank + 1).double())
        done(group.reduce_scatter([out], [parts]))
        assert torch.equal(read(out), every(rank + 1).sum(0))

    ranks_of(world, with_group(run))


def test_moving(world: ThreadWorld) -> None:
    def run(group: PycollProcessGroup) -> None:
        rank = group.rank()

        def space(*shape: int) -> CudaTensor:
            return on_device(torch.zeros(shape).double())

        x = on_device(values(rank, 5))
        done(group.broadcast([x], options(dist.BroadcastOptions, rootRank=2, rootTensor=0)))
        assert torch.equal(read(x), values(2, 5))
        outs = [space(r + 1, 2) for r in range(SIZE)]
        done(group.allgather([outs], [on_device(values(rank, rank + 1, 2))]))
        assert all(torch.equal(read(one), values(r, r + 1, 2)) for r, one in enumerate(outs))
        out = space(SIZE, 4)
        done(group.all_gather_single(out, on_device(values(rank, 4))))
        assert torch.equal(read(out), every(4))
        outs = [space(2, 2).t() for _ in range(SIZE)] if rank == 0 else []
        mine = on_device(values(rank, 2, 2))
        done(group.gather([outs], [mine], options(dist.GatherOptions, rootRank=0)))
        assert all(torch.equal(read(one), values(r, 2, 2)) for r, one in enumerate(outs))
        given = [[on_device(values(r, 3)) for r in range(SIZE)]] if rank == 0 else [[]]
        out = space(3)
        done(group.scatter([out], given, options(dist.ScatterOptions, rootRank=0)))
        assert torch.equal(read(out), values(rank, 3))
        outs = [space(r + 1) for r in range(SIZE)]
        done(group.alltoall(outs, [on_device(values(rank, rank + 1)) for _ in range(SIZE)]))
        assert all(torch.equal(read(one), values(r, r + 1)) for r, one in enumerate(outs))
        out = space((rank + 1) * SIZE)
        splits = [r + 1 for r in range(SIZE)]
        source = on_device(values(rank, sum(splits)))
        done(group.all_to_all_single(out, source, [rank + 1] * SIZE, splits))
        parts = [values(r, sum(splits)).split(splits)[rank] for r in range(SIZE)]
        assert torch.equal(read(out), torch.cat(parts))
        group.barrier(options(dist.BarrierOptions, device=torch.device("cuda", 0))).wait()

    ranks_of(world, with_group(run))


def test_messages(world: ThreadWorld) -> None:
    """Before and behind the first collective on the device."""

    def run(group: PycollProcessGroup) -> None:
        for _ in range(2):
            if group.rank() == 0:
                group.send([on_device(values(3, 4, 2))], 1, 0).wait()
            elif group.rank() == 1:
                out = on_device(torch.zeros(2, 4).double())
                work = group.recv([out.t()], 0, 0)
                assert work.wait()
                assert torch.equal(read(out), values(3, 4, 2).t())
                assert work.source_rank() == 0
            done(group.allreduce([on_device(values(0, 3))]))
        with pytest.raises(pycoll.InvalidArgumentError, match="a recv has to name its source"):
            group.recv_anysource([on_device(values(0, 3))], 0)

    ranks_of(world, with_group(run))


def test_streams_wait_and_the_host_does_not(world: ThreadWorld) -> None:
    """A stream that was not ordered behind an operation sees it late, or never; any may wait."""

    def run(group: PycollProcessGroup) -> None:
        rank, other, third = group.rank(), Stream(), Stream()
        for count in (3, 20_000):
            outs = [on_device(torch.zeros(count).double()).view(1, -1) for _ in range(SIZE)]
            x = on_device(values(rank, count))
            gathered = group.allgather([outs], [x.view(1, -1)])
            reduced = group.allreduce([on_device(values(rank, count, 2)).t()])
            future = reduced.get_future()
            assert future is reduced.get_future()
            with other:
                done(gathered)
                assert torch.equal(read(torch.cat(outs)), every(count))
            with third:
                done(gathered)
                assert torch.equal(read(outs[1])[0], values(1, count))
                (found,) = future.wait()
                assert torch.equal(read(found), every(count, 2).sum(0).t())
            done(reduced)
            while not gathered.is_completed():
                pass
            assert gathered.is_success() and gathered.exception() is None

    ranks_of(world, with_group(run))


def test_streams_of_torch_are_those_of_the_driver() -> None:
    with stood_in(), Stream() as stream:
        assert StreamStandIn(made=stream).cuda_stream == stream.number


def test_tensors_by_name(world: ThreadWorld) -> None:
    """Horovod's interface: other threads and streams than the caller's do the work."""

    def run(comm: pycoll.Communicator) -> None:
        rank, size = comm.rank, comm.size
        own = comm.split(0)
        assert own is not None
        home = Controller(own, range(size), Timeline(), Variables())

        def result_of(task: Any) -> Any:
            home.submit(task, None)
            return wait_for(task)

        average = reduction_of(Average)
        for _ in range(2):
            x, y = on_device(values(rank, 4, 3)), on_device(values(rank, 700))
            first = AllReduce([x, y.view(2, -1).t()], [x, y.view(2, -1).t()], average)
            new = x.new_empty(x.shape)
            second = AllReduce([x + 1], [new], reduction_of(Sum, 0.5, 2.0))
            host = values(rank, 5)
            third = AllReduce([host], [host], average)
            for number, task in enumerate((first, second, third)):
                home.submit(task, f"x{number}")
            assert wait_for(first)[0] is x
            wait_for(second), wait_for(third)
            assert torch.equal(read(x), every(4, 3).mean(0))
            assert torch.equal(read(y), every(700).mean(0))
            assert torch.equal(read(new), (every(4, 3) + 1).sum(0))
            assert torch.equal(host, every(5).mean(0))
        (joined,), _ = result_of(AllGather([on_device(values(rank, rank + 1, 2))]))
        assert torch.equal(read(joined), torch.cat([values(r, r + 1, 2) for r in range(size)]))
        root = on_device(values(rank, 3))
        result_of(Broadcast(root, root, 1, 1))
        assert torch.equal(read(root), values(1, 3))
        found, received = result_of(AllToAll(on_device(values(rank, 6)), [1, 2, 3]))
        parts = [values(r, 6).split([1, 2, 3])[rank] for r in range(size)]
        assert torch.equal(read(found), torch.cat(parts)) and received.tolist() == [rank + 1] * 3
        (share,) = result_of(ReduceScatter([on_device(values(rank, 6))], average))
        assert torch.equal(read(share), every(6).mean(0).split(2)[rank])
        comm.barrier()
        home.close()

    ranks_of(world, run)


def test_structures_of_device_arrays_are_averaged(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for step in range(2):
            mine = np.arange(6, dtype=np.float32).reshape(2, 3) + comm.rank + step
            tree = {"a": array(mine), "b": [mine.copy(), array(2 * mine)], "none": None}
            found = average_gradients(tree, comm=comm)
            wanted = mine - comm.rank + (comm.size - 1) / 2
            np.testing.assert_array_equal(found["a"].get(), wanted)
            np.testing.assert_array_equal(found["b"][0], wanted)
            np.testing.assert_array_equal(found["b"][1].get(), 2 * wanted)
            assert found["a"] is not tree["a"] and found["none"] is None
        other = np.zeros(3 + (comm.rank == 1), np.float32)
        with pytest.raises(pycoll.MismatchError, match="of rank 1 differ from those of rank 0"):
            average_gradients({"a": array(other)}, comm=comm)

    ranks_of(world, run)


class Bucket:
    """What hooks see of a GradBucket."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> torch.Tensor:
        return self._tensor

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def floats(rank: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return torch.randn(count, generator=generator)


def test_hooks_of_ddp_send_codes(world: ThreadWorld) -> None:
    """The bits are those of buckets in host memory; the future's reader sees the averages."""
    codec = Block("int8", block=64)

    def run(comm: pycoll.Communicator) -> None:
        group, kept = PycollProcessGroup(comm), Feedback()
        state = hooks.State(group, codec, start=2, min_bytes=0)
        for step in range(5):
            mine = floats(10 * step + comm.rank, 300)
            words = {"compress": codec, "feedback": kept} if step >= 2 else {}
            expected = comm.all_reduce(mine.numpy(), "avg", **words)
            bucket: Any = Bucket(on_device(mine))
            future = hooks.compress(state, bucket)
            with Stream():
                assert np.array_equal(read(future.wait()).numpy(), expected), step
        assert np.array_equal(np.asarray(state.feedbacks[0].residual), kept.residual)
        other = hooks.State(group, codec, start=2, min_bytes=0)
        other.load_state_dict(state.state_dict())
        assert other.feedbacks[0].norm() == kept.norm() > 0
        mine = floats(comm.rank, 500)
        for hook, block in (
            (hooks.quantization_pertensor_hook, 4096),
            (hooks.quantization_perchannel_hook, 512),
        ):
            bucket = Bucket(on_device(mine))
            found = read(hook(group, bucket).wait())
            expected = comm.all_reduce(mine.numpy(), "avg", compress=Block("int8", block))
            assert np.array_equal(found.numpy(), expected)

    ranks_of(world, run)


def test_the_collectives_of_fsdp2_send_codes(world: ThreadWorld) -> None:
    codec = Block("int4", block=64)

    def run(comm: pycoll.Communicator) -> None:
        group, kept, other = PycollProcessGroup(comm), Feedback(), Feedback()
        reduce_scatter = fsdp.CodedReduceScatter(codec, kept)
        for step in range(2):
            mine = floats(10 * step + comm.rank, 120 * SIZE)
            share = on_device(torch.zeros(120))
            reduce_scatter(share, on_device(mine), group, dist.ReduceOp.AVG)
            words: dict[str, Any] = {"compress": codec, "feedback": other}
            expected = comm.reduce_scatter(mine.numpy(), "avg", **words)
            assert np.array_equal(read(share).numpy(), expected), step
        every = on_device(torch.zeros(360))
        work = fsdp.CodedAllGather(codec)(every, share, group, async_op=True)
        done(work)
        assert np.array_equal(read(every).numpy(), comm.all_gather(expected, compress=codec))

    ranks_of(world, run)


def test_schedulers_send_codes_of_tensors_on_devices(world: ThreadWorld) -> None:
    """Each gradient has the bits of a call of its own; a checkpoint goes on where it was saved."""
    shapes: list[tuple[int, ...]] = [(30, 7), (7,), (0, 3), (900,)]
    entries = [Entry(f"g{number}", shape) for number, shape in enumerate(shapes)]
    policies = [Policy("wfbp"), Policy("fixed", bucket_bytes=900), Policy("bsp")]

    def given(number: int, rank: int, step: int) -> torch.Tensor:
        count = int(np.prod(shapes[number]))
        return floats(100 * step + 10 * number + rank, count).reshape(shapes[number])

    def allocate(count: int, kind: str) -> torch.Tensor:
        return on_device(torch.zeros(count, dtype=getattr(torch, kind)))

    def run(comm: pycoll.Communicator) -> None:
        codec = Sign(block=64)
        for policy in policies:
            words: dict[str, Any] = {"allocate": allocate, "policy": policy}
            scheduler = Scheduler(comm, entries, op="avg", compress=codec, **words)
            kept = [Feedback() for _ in shapes]
            for step in range(6):
                views = scheduler.begin()
                for number in reversed(range(len(shapes))):
                    views[number].copy_(on_device(given(number, comm.rank, step)))
                    scheduler.ready(number)
                scheduler.wait()
                for number, shape in enumerate(shapes):
                    x = given(number, comm.rank, step).numpy()
                    right = comm.all_reduce(x, compress=codec, feedback=kept[number])
                    found = read(views[number]).numpy()
                    assert found.shape == shape
                    assert np.array_equal(found, right / np.float32(SIZE)), (policy, step, number)
                if step == 4:
                    saved = scheduler.state_dict()
                    scheduler = Scheduler(comm, entries, op="avg", compress=codec, **words)
                    scheduler.load_state_dict(saved)
            with pytest.raises(pycoll.InvalidArgumentError, match="gradients are on a device: exp"):
                Scheduler(comm, entries, compress=TopK(0.5), **words)

    ranks_of(world, run)


def test_failures_are_told_as_torchs_programs_expect(world: ThreadWorld) -> None:
    def run(group: PycollProcessGroup) -> None:
        done(group.allreduce([on_device(values(0, 3))]))
        group.set_timeout(datetime.timedelta(seconds=1))
        if group.rank() == 0:
            return
        work = group.allreduce([on_device(values(0, 3))])
        limit = time.monotonic() + 20
        while work.exception() is None and time.monotonic() < limit:
            time.sleep(0.01)
        error = work.exception()
        assert work.is_completed() and not work.is_success()
        assert isinstance(error, dist.DistBackendError) and "rank 0" in str(error)
        with pytest.raises(dist.DistBackendError, match="rank 0"):
            group.allreduce([on_device(values(0, 3))])

    ranks_of(world, with_group(run))
