"""Checks of pycoll.torch's reductions, run on every rank; see torch_ranks."""

from __future__ import annotations

import random

import torch
from torch_ranks import raised

import pycoll.torch as hvd

TYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)


def values(rank: int, dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    """Small whole numbers that differ per element and rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 5) % 11).reshape(shape).to(dtype)


def every(dtype: torch.dtype, shape: tuple[int, ...] = (5, 3)) -> torch.Tensor:
    return torch.stack([values(rank, dtype, shape) for rank in range(hvd.size())])


def check_all_ops_and_types() -> None:
    for dtype in TYPES:
        mine, all_values = values(hvd.rank(), dtype), every(dtype).double()
        expected = {
            hvd.Sum: all_values.sum(0),
            hvd.Min: all_values.amin(0),
            hvd.Max: all_values.amax(0),
            hvd.Product: (all_values % 4).prod(0),
        }
        for op, value in expected.items():
            given = mine % 4 if op == hvd.Product else mine
            found = hvd.allreduce(given, op=op)
            assert found.dtype == dtype and torch.equal(found, value.to(dtype)), (dtype, op)
        average = hvd.allreduce(mine)
        wanted = (all_values.sum(0) / hvd.size()).to(dtype)
        assert torch.equal(average, wanted), dtype
        assert torch.equal(mine, values(hvd.rank(), dtype))


def check_means_whose_sums_leave_the_type() -> None:
    cases = [
        (torch.float16, 40_000.0),
        (torch.float16, 2.0**-24),
        (torch.bfloat16, 3.0e38),
        (torch.uint8, 200),
        (torch.int8, -100),
        (torch.int64, -(2**62) - 1),
    ]
    for dtype, value in cases:
        mean = torch.full((2 * hvd.size(),), value, dtype=dtype)
        assert torch.equal(hvd.allreduce(mean), mean), dtype
        assert torch.equal(hvd.grouped_allreduce([mean, mean[:1]])[0], mean), dtype
        assert torch.equal(hvd.reducescatter(mean), mean[:2]), dtype
    large = torch.full((3,), 20_000.0, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(large, postscale_factor=2.0), 2 * large)
    assert torch.equal(hvd.allreduce(large, prescale_factor=2.0), 2 * large)


def check_in_place_and_handles() -> None:
    tensor = values(hvd.rank(), torch.float32)
    handle = hvd.allreduce_async_(tensor, name="in place", op=hvd.Sum)
    assert hvd.synchronize(handle) is tensor
    assert hvd.synchronize(handle) is None
    assert "was never given out" in raised(ValueError, hvd.poll, handle)
    assert torch.equal(tensor, every(torch.float32).sum(0))
    strided = values(hvd.rank(), torch.float32, (4, 6)).t()[1:]
    hvd.allreduce_(strided, op=hvd.Sum)
    assert torch.equal(strided, every(torch.float32, (4, 6)).sum(0).t()[1:])


def check_works_overlap() -> None:
    tensors = [torch.full((1000,), float(i)) for i in range(64)]
    handles = [hvd.allreduce_async(t, op=hvd.Sum) for t in tensors]
    assert not all(hvd.poll(handle) for handle in handles), "nothing was asynchronous"
    for i, handle in enumerate(handles):
        assert (hvd.synchronize(handle) == i * hvd.size()).all()


def check_orders_may_differ() -> None:
    """Named tensors in another order on each rank, many times, so that numbers are used too."""
    names = [f"t{i}" for i in range(20)]
    mine = random.Random(hvd.rank())
    for step in range(15):
        mine.shuffle(names)
        handles = {}
        for name in names:
            tensor = torch.full((3,), float(int(name[1:]) + step + hvd.rank()))
            handles[name] = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum)
        mine.shuffle(names)
        ranks = sum(range(hvd.size()))
        for name in names:
            wanted = (int(name[1:]) + step) * hvd.size() + ranks
            assert hvd.synchronize(handles[name]).tolist() == [wanted] * 3


def check_shapes_may_change_between_steps() -> None:
    for shape in ((3,), (3,), (4, 2), (4, 2), (3,)):
        found = hvd.allreduce(torch.ones(shape), name="changes", op=hvd.Sum)
        assert found.tolist() == torch.full(shape, float(hvd.size())).tolist()


def check_scales() -> None:
    mine = values(hvd.rank(), torch.int32)
    wide = every(torch.int32).double()
    found = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    wanted = ((wide * 0.5).int().sum(0).double() * 1.5).int()
    assert torch.equal(found, wanted)
    found = hvd.allreduce(mine.double(), prescale_factor=0.5, postscale_factor=2.0)
    assert torch.allclose(found, wide.mean(0), rtol=1e-15)
    half = hvd.allreduce(values(hvd.rank(), torch.float16), op=hvd.Sum, postscale_factor=0.25)
    assert half.dtype is torch.float16 and torch.equal(half.double(), wide.sum(0) * 0.25)


def check_compression() -> None:
    mine = values(hvd.rank(), torch.float32)
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        found = hvd.allreduce(mine, compression=compression, op=hvd.Sum)
        assert found.dtype is torch.float32 and torch.equal(found, every(torch.float32).sum(0))
    small, note = hvd.Compression.bf16.compress(mine)
    assert small.dtype is torch.bfloat16 and note is torch.float32
    assert hvd.Compression.fp16.compress(torch.ones(1, dtype=torch.int64))[1] is None


def check_groups() -> None:
    mine = [values(hvd.rank(), dtype, (n, 2)) for n, dtype in enumerate(TYPES, 1)]
    wanted = [every(dtype, (n, 2)).sum(0).to(dtype) for n, dtype in enumerate(TYPES, 1)]
    found = hvd.grouped_allreduce(mine, op=hvd.Sum)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    handle = hvd.grouped_allreduce_async(mine, name="g", op=hvd.Sum)
    assert all(torch.equal(a, b) for a, b in zip(hvd.synchronize(handle), wanted, strict=True))
    assert hvd.grouped_allreduce_(mine, op=hvd.Sum)[0] is mine[0]
    assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
    handle = hvd.grouped_allreduce_async_(mine, op=hvd.Max)
    assert all(torch.equal(a, b) for a, b in zip(hvd.synchronize(handle), wanted, strict=True))


def check_reducescatter() -> None:
    rows = 2 * hvd.size() + 1  # rank 0 gets one more
    mine = values(hvd.rank(), torch.float64, (rows, 3))
    total = every(torch.float64, (rows, 3)).sum(0)
    start = 0 if hvd.rank() == 0 else 2 * hvd.rank() + 1
    wanted = total[start : 3 if hvd.rank() == 0 else start + 2]
    if hvd.size() == 1:
        wanted = total
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), wanted)
    assert torch.allclose(hvd.reducescatter(mine, postscale_factor=2.0), wanted * 2 / hvd.size())
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum)), wanted)
    one, two = hvd.grouped_reducescatter([mine, 2 * mine], op=hvd.Sum)
    assert torch.equal(one, wanted) and torch.equal(two, 2 * wanted)
    handle = hvd.grouped_reducescatter_async([mine], op=hvd.Sum)
    assert torch.equal(hvd.synchronize(handle)[0], wanted)
    assert "no rows" in raised(ValueError, hvd.reducescatter, torch.tensor(1.0))
    text = raised(hvd.HorovodInternalError, hvd.reducescatter, mine, op=hvd.Adasum)
    assert "does not support" in text


def check_gradients() -> None:
    size = hvd.size()
    x = values(hvd.rank(), torch.float64).requires_grad_()
    weights = values(hvd.rank() + 3, torch.float64)
    for op, share in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        x.grad = None
        (hvd.allreduce(x, op=op, prescale_factor=2.0) * weights).sum().backward()
        # The gradient of the sum of all ranks' losses.
        others = torch.stack([values(r + 3, torch.float64) for r in range(size)]).sum(0)
        assert x.grad is not None and torch.allclose(x.grad, others * 2.0 * share, rtol=1e-15)
    x.grad = None
    a, b = hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name="both")
    (a + b).sum().backward()
    assert x.grad is not None and (x.grad == 3 * size).all()
    rows = values(hvd.rank(), torch.float64, (2 * size, 2)).requires_grad_()
    own = hvd.reducescatter(rows, op=hvd.Sum)
    (own * (hvd.rank() + 1)).sum().backward()
    wanted = torch.arange(1, size + 1).repeat_interleave(2).double() * size
    assert rows.grad is not None and torch.equal(rows.grad, wanted[:, None].expand(-1, 2))


def check_adasum() -> None:
    if hvd.size() & (hvd.size() - 1):
        text = raised(ValueError, hvd.allreduce, torch.ones(2), op=hvd.Adasum)
        assert "power of two" in text
        return
    same = torch.tensor([3.0, -1.0, 2.0])
    assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)
    apart = torch.zeros(hvd.size())
    apart[hvd.rank()] = hvd.rank() + 1.0
    found = hvd.allreduce(apart, op=hvd.Adasum, name="apart")
    assert torch.equal(found, torch.arange(1.0, hvd.size() + 1))
    assert hvd.allreduce(torch.zeros(3), op=hvd.Adasum).tolist() == [0.0] * 3


def check_disagreements_are_told_alike_and_harm_nothing() -> None:
    if hvd.size() == 1:
        return
    odd = hvd.rank() == 1
    cases = [
        ("shape", lambda: hvd.allreduce(torch.ones(3 + odd), name="x"), "shape is [[3]] on rank"),
        (
            "dtype",
            lambda: hvd.allreduce(torch.ones(3, dtype=(torch.float32, torch.int32)[odd]), name="x"),
            'dtype is ["float32"] on rank',
        ),
        ("op", lambda: hvd.allreduce(torch.ones(3), name="x", op=(hvd.Sum, hvd.Max)[odd]), "op is"),
        ("root", lambda: hvd.broadcast(torch.ones(3), int(odd), name="x"), "root_rank is 0 on"),
        (
            "scale",
            lambda: hvd.allreduce(torch.ones(3), name="x", prescale_factor=1.0 + odd),
            "prescale_factor is 1.0 on",
        ),
        ("rows", lambda: hvd.allgather(torch.ones(2, 1 + odd), name="x"), "shape of a row is"),
    ]
    for _ in range(2):  # the second time, names were in use already
        hvd.allreduce(torch.ones(3), name="x")
        for what, call, text in cases:
            found = raised(hvd.HorovodInternalError, call)
            assert text in found and "rank 1" in found, (what, found)
            assert len(set(hvd.allgather_object(found))) == 1
        assert hvd.allreduce(torch.ones(3), name="x", op=hvd.Sum).tolist() == [hvd.size()] * 3


def check_a_name_in_flight_twice() -> None:
    """The one before cannot end: another rank has not come to it yet."""
    if hvd.size() == 1:
        return
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
        text = raised(ValueError, hvd.allreduce_async, torch.ones(2), name="twice")
        assert "still under way" in text
        hvd.barrier()
    else:
        hvd.barrier()
        handle = hvd.allreduce_async(torch.ones(2), name="twice", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


def check_wrong_arguments() -> None:
    x = torch.ones(2)
    assert "give only op" in raised(ValueError, hvd.allreduce, x, average=True, op=hvd.Sum)
    assert "expected one of Average" in raised(ValueError, hvd.allreduce, x, op="sum")
    assert "at least one tensor" in raised(ValueError, hvd.grouped_allreduce, [])
    assert "tensors only" in raised(ValueError, hvd.grouped_allreduce, [x, 3])
    assert "sparse_allreduce_async" in raised(ValueError, hvd.allreduce, x.to_sparse())
    assert "expected a ProcessSet" in raised(ValueError, hvd.allreduce, x, process_set=3)
    assert torch.equal(hvd.allreduce(x, average=False), x * hvd.size())
