"""Checks of the backend pycoll of torch.distributed, run on every rank; see test_distributed."""

from __future__ import annotations

import datetime
import functools
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from c10d_future_checks import (  # noqa: F401  # checks of this module, too
    check_callbacks_may_wait,
    check_threads_of_futures_end_with_the_group,
)
from c10d_group_checks import (  # noqa: F401  # checks of this module, too
    check_groups_and_barriers,
    check_messages_from_anybody,
    check_objects_as_messages,
    check_other_backends_in_the_same_group,
    check_parts_of_a_group,
    every,
    values,
)
from c10d_splits_checks import (  # noqa: F401  # checks of this module, too
    check_one_kind_of_sizes_is_enough,
    check_rows_that_nobody_expects,
)
from torch.distributed.distributed_c10d import _coalescing_manager
from torch_ranks import raised


def check_backend() -> None:
    assert dist.get_backend() in ("pycoll", "cpu:pycoll")
    assert dist.group.WORLD is not None and dist.group.WORLD.name() == "pycoll"


def check_all_reduce() -> None:
    op = dist.ReduceOp
    wanted = {
        op.SUM: every().sum(0),
        op.AVG: every().mean(0),
        op.MIN: every().amin(0),
        op.MAX: every().amax(0),
        op.PRODUCT: every().prod(0),
    }
    for kind, value in wanted.items():
        found = values(dist.get_rank())
        dist.all_reduce(found, kind)
        assert torch.allclose(found, value, rtol=1e-15), kind
    bits = torch.tensor([1 << dist.get_rank(), 7])
    dist.all_reduce(bits, op.BOR)
    assert bits.tolist() == [2 ** dist.get_world_size() - 1, 7]
    view = values(dist.get_rank(), (4, 4)).t()[1:]
    dist.all_reduce(view)
    assert torch.equal(view, every((4, 4)).sum(0).t()[1:])
    half = values(dist.get_rank()).bfloat16()
    dist.all_reduce(half)
    assert torch.equal(half.double(), every().sum(0))
    cplx = torch.complex(values(dist.get_rank()), values(1))
    dist.all_reduce(cplx)
    assert torch.equal(cplx.real, every().sum(0))
    sparse = torch.sparse_coo_tensor([[dist.get_rank(), 7]], [1.0, 2.0], (8,))
    dist.all_reduce(sparse)
    dense = sparse.to_dense()
    assert dense[7] == 2.0 * dist.get_world_size() and dense[dist.get_rank()] == 1.0


def check_async_works_and_futures() -> None:
    tensors = [values(dist.get_rank()) + i for i in range(20)]
    works = [dist.all_reduce(one, async_op=True) for one in tensors]
    chained = works[0].get_future().then(lambda future: future.value()[0] + 1)
    assert torch.equal(chained.wait(), every().sum(0) + 1)
    for i, (work, one) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() and work.is_completed() and work.is_success()
        assert torch.equal(one, (every() + i).sum(0))
    assert works[0].get_future() is works[0].get_future()


def check_rooted() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    one = values(rank)
    dist.broadcast(one, root)
    assert torch.equal(one, values(root))
    one = values(rank)
    dist.reduce(one, root)
    assert torch.equal(one, every().sum(0) if rank == root else values(rank))
    outputs = [torch.empty(3, 2).double() for _ in range(size)] if rank == root else None
    dist.gather(values(rank), outputs, root)
    if outputs is not None:
        assert torch.equal(torch.stack(outputs), every())
    inputs = [values(r) + 1 for r in range(size)] if rank == root else None
    output = torch.empty(3, 2).double()
    dist.scatter(output, inputs, root)
    assert torch.equal(output, values(rank) + 1)


def check_gathering() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    outputs = [torch.empty(3, 2).double() for _ in range(size)]
    dist.all_gather(outputs, values(rank))
    assert torch.equal(torch.stack(outputs), every())
    uneven = [torch.empty(r + 1, 2).double() for r in range(size)]
    dist.all_gather(uneven, values(rank, (rank + 1, 2)))
    assert all(torch.equal(one, values(r, (r + 1, 2))) for r, one in enumerate(uneven))
    whole = torch.empty(3 * size, 2).double()
    share = whole[3 * rank : 3 * rank + 3].copy_(values(rank))
    dist.all_gather_single(whole, share)  # in place, as FSDP does
    assert torch.equal(whole.view(size, 3, 2), every())
    joined = torch.empty(3 * size, 2).double()
    dist.all_gather_single(joined, values(rank))
    assert torch.equal(joined.view(size, 3, 2), every())


def check_scattering() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = every((size, 4)).sum(0)[rank]
    output = torch.empty(4).double()
    dist.reduce_scatter(output, list(values(rank, (size, 4))))
    assert torch.equal(output, wanted)
    dist.reduce_scatter_single(output, values(rank, (size, 4)).flatten(), dist.ReduceOp.SUM)
    assert torch.equal(output, wanted)
    uneven = [values(rank, (r + 1,)) for r in range(size)]
    output = torch.empty(rank + 1).double()
    dist.reduce_scatter(output, uneven)
    assert torch.equal(output, every((rank + 1,)).sum(0))


def check_all_to_all() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(2 * size, dtype=torch.int64)
    dist.all_to_all_single(output, torch.arange(2 * size) + 100 * rank)
    assert output.tolist() == [2 * rank + i + 100 * r for r in range(size) for i in range(2)]
    given = torch.full((size * (size + 1) // 2, 2), float(rank))
    output = torch.empty((rank + 1) * size, 2)
    splits = [r + 1 for r in range(size)]
    dist.all_to_all_single(output, given, [rank + 1] * size, splits)
    assert output[:, 1].tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
    outputs = [torch.empty(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(outputs, list(given.split(splits)))
    assert torch.equal(torch.cat(outputs), output)


def check_messages() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        if rank == 0:
            dist.send(values(0), right, tag=3)
            dist.recv(found := torch.empty(3, 2).double(), left, tag=3)
        else:
            source = dist.recv(found := torch.empty(3, 2).double(), left, tag=3)
            assert source == left
            dist.send(values(rank), right, tag=3)
        assert torch.equal(found, values(left))
    first, second = torch.empty(3, 2).double(), torch.empty(3, 2).double()
    operations = [
        dist.P2POp(dist.irecv, second, left, tag=2),
        dist.P2POp(dist.irecv, first, left, tag=1),
        dist.P2POp(dist.isend, values(rank), right, tag=1),
        dist.P2POp(dist.isend, values(rank) + 1, right, tag=2),
    ]
    if size > 1:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(first, values(left)) and torch.equal(second, values(left) + 1)


def check_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    found: list[object] = [None] * size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
    assert found == [{"rank": r, "text": "x" * r} for r in range(size)]
    told = [rank if rank == size - 1 else None]
    dist.broadcast_object_list(told, size - 1)
    assert told == [size - 1]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [[r] for r in range(size)] if rank == 0 else None, 0)
    assert mine == [[rank]]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert rank or gathered == list(range(size))


def check_single_messages_with_tags() -> None:
    """They meet by tag, in whatever order they are waited for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1 or rank > 1:
        return
    if rank == 0:
        works = [dist.isend(values(tag), 1, tag=tag) for tag in (5, 6, 7)]
    else:
        found = {tag: torch.empty(3, 2).double() for tag in (7, 5, 6)}
        works = [dist.irecv(one, 0, tag=tag) for tag, one in found.items()]
    for work in reversed(works):
        assert work is not None and work.wait()
    assert rank == 0 or all(torch.equal(one, values(tag)) for tag, one in found.items())


def check_reductions_that_are_rare() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for op, wanted in (
        (dist.ReduceOp.BAND, functools.reduce(int.__and__, (r | 8 for r in range(size)))),
        (dist.ReduceOp.BXOR, functools.reduce(int.__xor__, (r | 8 for r in range(size)))),
    ):
        bits = torch.tensor([rank | 8])
        dist.all_reduce(bits, op)
        assert bits.item() == wanted, op
    scaled = values(rank)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(scaled, every().sum(0) / 2)
    for kind in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.float16, torch.float32):
        one = values(rank).to(kind)
        dist.all_reduce(one)
        assert one.dtype == kind and torch.equal(one.double(), every().sum(0)), kind
    flag = torch.tensor([rank == 0, False])
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    assert flag.tolist() == [True, False]


def check_means_whose_sums_leave_the_type() -> None:
    size = dist.get_world_size()
    cases = [
        (torch.float16, 40_000.0),
        (torch.float16, 2.0**-24),
        (torch.bfloat16, 3.0e38),
        (torch.uint8, 200),
        (torch.int8, -100),
        (torch.int64, 2**62 + 1),
    ]
    for kind, value in cases:
        mean = torch.full((4,), value, dtype=kind)
        found = mean.clone()
        dist.all_reduce(found, dist.ReduceOp.AVG)
        assert torch.equal(found, mean), (kind, found)
        dist.reduce(found, 0, dist.ReduceOp.AVG)
        assert torch.equal(found, mean), (kind, found)
        own = torch.empty(3, dtype=kind)
        dist.reduce_scatter_tensor(own, mean[0].repeat(3 * size), dist.ReduceOp.AVG)
        assert torch.equal(own, mean[:3]), (kind, own)


def check_premultiplied_sums_of_halves() -> None:
    """As FSDP2 divides gradients: products and partial sums are float32 until the end."""
    size = dist.get_world_size()
    op = dist._make_nccl_premul_sum(1 / size)
    for kind, value in ((torch.float16, 40_000.0), (torch.float16, 2.0**-24)):
        mean = torch.full((4,), value, dtype=kind)
        found = mean.clone()
        dist.all_reduce(found, op)
        assert torch.equal(found, mean), found
        strided = torch.full((4, 2), value, dtype=kind).t()
        dist.all_reduce(strided, op)
        assert (strided == value).all()
        dist.reduce(found, 0, op)
        assert torch.equal(found, mean), found
        own = torch.empty(3, dtype=kind)
        dist.reduce_scatter_tensor(own, mean[0].repeat(3 * size), op)
        assert torch.equal(own, mean[:3]), own
        dist.reduce_scatter(own, [mean[:3].clone() for _ in range(size)], op)
        assert torch.equal(own, mean[:3]), own


def check_names_of_other_versions() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, part = torch.empty(3 * size, 2).double(), torch.empty(4).double()
        dist.all_gather_into_tensor(whole, values(rank))
        assert torch.equal(whole.view(size, 3, 2), every())
        dist.reduce_scatter_tensor(part, values(rank, (size, 4)).flatten())
        assert torch.equal(part, every((size, 4)).sum(0)[rank])
        several = [values(rank), values(rank, (5,))]
        dist.all_reduce_coalesced(several)
        assert torch.equal(several[1], every((5,)).sum(0))
        lists = [[torch.empty(3, 2).double(), torch.empty(5).double()] for _ in range(size)]
        dist.all_gather_coalesced(lists, [values(rank), values(rank, (5,))])
        assert all(torch.equal(one[1], values(r, (5,))) for r, one in enumerate(lists))


def check_works_of_rooted_operations() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shared, summed = values(rank), values(rank)
    outputs = [torch.empty(3, 2).double() for _ in range(size)]
    works = [
        dist.broadcast(shared, 0, async_op=True),
        dist.reduce(summed, 0, async_op=True),
        dist.gather(values(rank), outputs if rank == 0 else None, 0, async_op=True),
        dist.scatter(
            own := torch.empty(3, 2).double(),
            [values(r) for r in range(size)] if rank == 0 else None,
            0,
            async_op=True,
        ),
    ]
    for work in works:
        assert work is not None and work.wait()
    assert torch.equal(shared, values(0)) and torch.equal(own, values(rank))
    assert rank or torch.equal(summed, every().sum(0))
    assert rank or torch.equal(torch.stack(outputs), every())


def check_coalesced() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = [values(rank), values(rank + 1, (5,)), values(rank, (2, 2)).t()]
    with _coalescing_manager():
        for one in tensors:
            dist.all_reduce(one)
    assert torch.equal(tensors[0], every().sum(0))
    assert torch.equal(tensors[2], every((2, 2)).sum(0).t())
    outputs = [torch.empty(3 * size, 2).double(), torch.empty(2 * size).double()]
    inputs = [values(rank), values(rank, (2,))]
    with _coalescing_manager(async_ops=True) as manager:
        for output, given in zip(outputs, inputs, strict=True):
            dist.all_gather_single(output, given)
    manager.wait()
    assert torch.equal(outputs[0].view(size, 3, 2), every())
    parts = [torch.empty(4).double(), torch.empty(1).double()]
    wholes = [values(rank, (4 * size,)), values(rank, (size,))]
    with _coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_single(part, whole)
    assert torch.equal(parts[0], every((4 * size,)).sum(0)[4 * rank : 4 * rank + 4])
    assert torch.equal(parts[1], every((size,)).sum(0)[rank : rank + 1])


def check_functional() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert torch.equal(functional.all_reduce(values(rank), "sum", world) + 0, every().sum(0))
    found = functional.all_gather_single(values(rank), 0, world)
    assert torch.equal(found + 0, every().flatten(0, 1))
    found = functional.reduce_scatter_single(values(rank, (size, 2)), "sum", 0, world)
    assert torch.equal(found + 0, every((size, 2)).sum(0)[rank : rank + 1])
    found = functional.broadcast(values(rank), size - 1, world)
    assert torch.equal(found + 0, values(size - 1))
    sizes = [1] * size
    found = functional.all_to_all_single(values(rank, (size, 2)), sizes, sizes, world)
    assert torch.equal(found + 0, every((size, 2))[:, rank])
    several = functional.all_reduce_coalesced([values(rank), values(rank, (4,))], "sum", world)
    assert torch.equal(several[1] + 0, every((4,)).sum(0))
    two = [values(rank, (2,)), values(rank)]
    several = functional.all_gather_single_coalesced(two, world)
    assert torch.equal(several[1] + 0, every().flatten(0, 1))
    parts = [values(rank, (size, 2)), values(rank, (2 * size,))]
    several = functional.reduce_scatter_single_coalesced(parts, "sum", [0, 0], world)
    assert torch.equal(several[0] + 0, every((size, 2)).sum(0)[rank : rank + 1])
    assert torch.equal(several[1] + 0, every((2 * size,)).sum(0)[2 * rank : 2 * rank + 2])
    given = values(rank, (size, 2)).requires_grad_()
    found = functional.all_to_all_single_autograd(given, sizes, sizes, world)
    (found * (rank + 1)).sum().backward()
    assert given.grad is not None and given.grad[:, 0].tolist() == [r + 1.0 for r in range(size)]


def check_timeouts_name_who_is_missing() -> None:
    """In a group of its own, since one that failed stays failed."""
    if dist.get_world_size() == 1:
        return
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    work = None
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        short = datetime.timedelta(seconds=0.2)
        raised(dist.DistBackendError, work.wait, short)
    dist.barrier()
    if dist.get_rank() > 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    assert work is not None and work.wait()
    short_group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    if dist.get_rank() == 0:
        text = raised(dist.DistBackendError, dist.all_reduce, torch.ones(1), group=short_group)
        missing = "rank 1 " if dist.get_world_size() == 2 else "ranks 1"
        assert "did not arrive" in text and missing in text, text
    dist.barrier()


def check_mismatches_are_told() -> None:
    if dist.get_world_size() == 1:
        return
    group = dist.new_group(timeout=datetime.timedelta(seconds=10))
    given = torch.ones(3 + (dist.get_rank() == 1))
    text = raised(dist.DistBackendError, dist.all_reduce, given, group=group)
    assert "rank 1" in text, text


def check_wrong_arguments() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(2)
    assert "elements: expected" in raised(
        ValueError, dist.all_gather_single, torch.empty(2 * size + 1), one
    )
    wrong = [torch.empty(3) for _ in range(size)]
    assert f"output {rank} has 3" in raised(ValueError, dist.all_gather, wrong, one)
    given = torch.ones(size)
    text = raised(ValueError, dist.all_to_all_single, given, given, [2] * size, [1] * size)
    assert f"add up to {2 * size}" in text


def check_tensors_that_are_no_arrays() -> None:
    """The error says what goes instead; nothing has moved, so one rank may meet it alone."""
    strange = {
        "torch.sparse_csr cannot be moved: pass its to_dense()": torch.eye(2).to_sparse_csr(),
        "torch.sparse_coo cannot be moved": torch.eye(2).to_sparse(),
        "torch.quint8 cannot be moved: pass its int_repr()": torch.quantize_per_tensor(
            torch.ones(2), 0.5, 0, torch.quint8
        ),
        "float8_e5m2fnuz cannot be moved: pass its view(torch.uint8)": torch.ones(2).to(
            torch.float8_e5m2fnuz
        ),
    }
    size = dist.get_world_size()
    for told, one in strange.items():
        assert told in raised(ValueError, dist.broadcast, one, 0)
        assert told in raised(ValueError, dist.all_gather, [one] * size, one)
        if size > 1:
            other = (dist.get_rank() + 1) % size
            assert told in raised(ValueError, dist.send, one, other)
            assert told in raised(ValueError, dist.recv, one, other)
    given = torch.full((2,), float(dist.get_rank() + 1)).to(torch.float8_e5m2fnuz)
    found = [torch.empty(2, dtype=torch.float8_e5m2fnuz) for _ in range(size)]
    dist.all_gather([one.view(torch.uint8) for one in found], given.view(torch.uint8))
    assert [one.float().tolist() for one in found] == [[r + 1.0] * 2 for r in range(size)]


def check_numbers_of_operations() -> None:
    world = dist.group.WORLD
    assert world is not None
    assert world._get_sequence_number_for_group() == 0
