"""Native calls: they give and raise what the definitions in Python do, and cost no Python code."""

from __future__ import annotations

import dis
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from call_ways import defined, frames_of, outcome
from harness import world_in_threads

import pycoll
from pycoll import InvalidArgumentError, Work

Comm = pycoll.Communicator
DTYPES = ("bool", "int8", "int64", "uint16", "float16", "bfloat16", "float32", "complex128")
SHAPES = ((), (1,), (7,), (0,), (4, 3), (3, 0), (2, 2, 2), (9000,))


#: Calls that native code knows, of an array x with as many rows as ranks or more.
CALLS: dict[str, Callable[[Callable[..., Any], Any, int], Any]] = {
    "all_reduce": lambda call, x, size: call(x),
    "all_reduce max": lambda call, x, size: call(x, "max"),
    "all_reduce avg": lambda call, x, size: call(x, op="avg", deterministic=True),
    "all_reduce ring": lambda call, x, size: call(x, algorithm="ring"),
    "broadcast": lambda call, x, size: call(x, size - 1),
    "reduce": lambda call, x, size: call(x, root=size - 1, op="sum"),
    "reduce into": lambda call, x, size: call(
        x, root=size - 1, out=x.clone() if isinstance(x, torch.Tensor) else x.copy()
    ),
    "scan": lambda call, x, size: call(x),
    "reduce_scatter": lambda call, x, size: call(x),
    "all_gather": lambda call, x, size: call(x, lengths=[x.shape[0] if x.ndim else 1] * size),
    "all_gather told": lambda call, x, size: call(x),
    "gather": lambda call, x, size: call(x, size - 1, lengths=[len(x) if x.ndim else 1] * size),
    "gather told": lambda call, x, size: call(x, root=size - 1),
    "scatter": lambda call, x, size: call(x if x.ndim else x.reshape(1), size - 1),
    "all_to_all": lambda call, x, size: call(x),
    "exscan": lambda call, x, size: call(x),
    "exscan max": lambda call, x, size: call(x, "max"),
    "barrier": lambda call, x, size: call(),
}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_give_the_same(dtype: str, kind: str) -> None:
    if kind == "torch" and dtype == "uint16":
        pytest.skip("torch has few operations on uint16; the case of numpy covers it")

    def rank(comm: Comm) -> None:
        for number, shape in enumerate(SHAPES):
            count = int(np.prod(shape))
            x: Any = oracle.inputs(dtype, "sum", comm.size, count, number)[comm.rank].reshape(shape)
            if kind == "torch":
                x = torch.from_numpy(np.real(x).astype("f4")).to(getattr(torch, dtype))
            for text, make in CALLS.items():
                name = text.partition(" ")[0]
                reference = outcome(lambda: make(defined(comm, name), x, comm.size))  # noqa: B023
                for _ in range(2):  # the first may be the definition's, which fills the table
                    found = outcome(lambda: make(getattr(comm, name), x, comm.size))  # noqa: B023
                    assert found == reference, (text, shape)

    world_in_threads(3).run(rank)


@pytest.mark.parametrize("text", CALLS)
def test_known_calls_run_no_python(text: str) -> None:
    name, make = text.partition(" ")[0], CALLS[text]

    def rank(comm: Comm) -> list[str]:
        x = np.arange(6.0)
        call = getattr(comm, name)
        make(call, x, comm.size)
        return frames_of(lambda: make(call, x, comm.size))

    for frames in world_in_threads(2).run(rank):
        assert set(frames) <= {"frame", "<lambda>"} or all("<lambda>" in one for one in frames)


def test_the_interpreter_remembers_methods() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("needs Python 3.11, whose interpreter remembers methods")
    # A communicator of its own: a read of its __dict__ would end the fast look-up for it.
    (comm,) = pycoll.local_world(1)

    def call() -> None:
        x = np.zeros(2, np.float32)
        for _ in range(100):
            comm.all_reduce(x, out=x)

    call()
    comm.close()
    names = [one.opname for one in dis.get_instructions(call, adaptive=True)]
    assert any(re.match("LOAD_(METHOD|ATTR_METHOD)_(WITH_VALUES|NO_DICT)", name) for name in names)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"op": "nope"}, "op is 'nope'"),
        ({"op": None}, "op is None"),
        ({"algorithm": 3}, "algorithm is 3"),
        ({"op": "band"}, "op 'band' is not defined for float64"),
        ({"algorithm": "nope"}, "nope"),
        ({"out": np.zeros(4)}, r"out has shape \(4,\)"),
        ({"out": np.zeros(3, "f4")}, "out has dtype float32"),
        ({"out": np.zeros(6)[::2]}, "not contiguous"),
        ({"out": np.broadcast_to(np.zeros(1), 3)}, "read-only"),
        ({"out": 5}, "scalar"),
    ],
)
def test_both_ways_raise_the_same(words: dict[str, Any], match: str) -> None:
    comm = world_in_threads(1).communicators[0]
    x = np.ones(3)
    comm.all_reduce(x, out=np.zeros(3))
    found = outcome(lambda: comm.all_reduce(x, **words))
    assert found == outcome(lambda: defined(comm, "all_reduce")(x, **words))
    assert found[0] is InvalidArgumentError and found[2] == "all_reduce"
    with pytest.raises(InvalidArgumentError, match=match):
        comm.all_reduce.bind(x, **words)()


def test_overlapping_memory_is_refused_and_neighbours_are_not() -> None:
    comm = world_in_threads(1).communicators[0]
    memory = np.arange(10.0)
    comm.all_reduce(memory[:4], out=memory[4:8])
    assert memory[4:8].tolist() == [0, 1, 2, 3]
    assert comm.all_reduce(memory[:4], out=memory[0:4]).tolist() == [0, 1, 2, 3]
    for part in (slice(2, 6), slice(3, 7)):
        with pytest.raises(InvalidArgumentError, match="out overlaps x partly"):
            comm.all_reduce(memory[:4], out=memory[part])
    with pytest.raises(InvalidArgumentError, match="cannot work in place"):
        comm.reduce_scatter(memory[:4], out=memory[:4])


def test_odd_inputs_go_the_long_way_and_come_out_right() -> None:
    def rank(comm: Comm) -> None:
        grid = np.arange(12.0).reshape(3, 4)
        matrix = grid.view(np.matrix) if hasattr(np, "matrix") else grid
        foreign = np.arange(3, dtype=">f4")
        for _ in range(2):
            assert comm.all_reduce(grid.T).tolist() == (2 * grid.T).tolist()
            assert comm.all_reduce(grid[:, ::2]).tolist() == (2 * grid[:, ::2]).tolist()
            assert type(comm.all_reduce(matrix)) is np.ndarray
            assert comm.all_reduce(3) == 6 and comm.all_reduce([True][0]) is True
            assert comm.all_reduce(np.float32(2)) == 4
            assert comm.broadcast(b"abc") == b"abc"
            with pytest.raises(InvalidArgumentError, match="byte order"):
                comm.all_reduce(foreign)
            with pytest.raises(InvalidArgumentError, match="masked array"):
                comm.all_reduce(np.ma.masked_array([1.0, 2.0], [True, False]))
            with pytest.raises(TypeError):
                comm.all_reduce()
            with pytest.raises(TypeError):
                comm.all_reduce(grid, "sum", grid)
            with pytest.raises(TypeError):
                comm.all_reduce(grid, sum="op")
            assert comm.all_reduce(x=grid, **{"".join(["o", "p"]): "max"}).tolist() == grid.tolist()

    world_in_threads(2).run(rank)


def test_lazy_tensors_and_parameters() -> None:
    def rank(comm: Comm) -> None:
        plain = torch.tensor([1.0 + 2.0j])
        negated = plain.conj().imag
        parameter = torch.nn.Parameter(torch.ones(3))
        for _ in range(2):
            assert comm.all_reduce(plain.conj()).tolist() == [2 - 4j]
            assert negated.is_neg() and comm.all_reduce(negated).tolist() == [-4.0]
            with pytest.raises(InvalidArgumentError, match="negated view"):
                comm.all_reduce(negated, out=negated)
            with torch.no_grad():
                found = comm.all_reduce(parameter)
            assert type(found) is torch.Tensor and not found.requires_grad
            assert comm.broadcast(parameter, out=parameter) is parameter
            assert comm.all_reduce(torch.ones(2, 3).T).shape == (3, 2)
            with pytest.raises(InvalidArgumentError, match="sparse"):
                comm.all_reduce(torch.eye(3).to_sparse())
            with pytest.raises(InvalidArgumentError, match="meta"):
                comm.all_reduce(torch.ones(3, device="meta"))

    world_in_threads(2).run(rank)


def test_references_do_not_leak() -> None:
    comm = world_in_threads(1).communicators[0]
    x, out, tensor = np.ones(3), np.zeros(3), torch.ones(3)
    lengths = [3]
    operation = comm.all_reduce.bind(x, out=out)

    def all_of_them() -> None:
        comm.all_reduce(x, out=out)
        comm.all_reduce(x)
        comm.all_reduce(tensor)
        comm.all_gather(x, lengths=lengths)
        comm.all_reduce(x, out=out, async_op=True).wait()
        operation()
        bound = comm.barrier
        bound()

    watched = (x, out, tensor, lengths, comm, None, True, "sum", Comm.all_reduce, operation)
    all_of_them()
    before = [sys.getrefcount(one) for one in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(100_000 // 7):
        all_of_them()
    after = [sys.getrefcount(one) for one in watched]
    # What is immortal, or used by others in the meantime, may differ by a few.
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True)), (before, after)
    assert sys.getallocatedblocks() - blocks < 2000


def test_async_calls() -> None:
    def rank(comm: Comm) -> None:
        arrays = [np.full(5, float(number + comm.rank)) for number in range(64)]
        for _ in range(3):
            works = [comm.all_reduce(x, async_op=True) for x in arrays]
            assert all(type(work) is Work for work in works)
            for number, work in reversed(list(enumerate(works))):
                assert work.wait().tolist() == [2.0 * number + 1] * 5 and work.done()
                assert work.wait(timeout=1) is work.wait(1)
            with pytest.raises(TypeError):
                works[0].wait(1, 2)
            with pytest.raises(TypeError):
                works[0].wait(patience=1)
        with pytest.raises(TypeError):
            Work()

    world_in_threads(2).run(rank)


def test_async_calls_end_without_anybodys_help() -> None:
    first, second = world_in_threads(2).communicators
    x, y = np.ones(3), np.full(3, 2.0)
    for _ in range(20):
        x[:], y[:] = 1, 2
        works = [comm.all_reduce(a, out=a, async_op=True) for comm, a in ((first, x), (second, y))]
        end = time.monotonic() + 30
        while not all(work.done() for work in works):
            assert time.monotonic() < end
        assert x.tolist() == y.tolist() == [3, 3, 3]


def test_native_calls_follow_what_ranks_exchange_first() -> None:
    """One rank's arguments stay the same, and those of the other change."""

    def rank(comm: Comm) -> None:
        for lengths in ((2, 2), (2, 3), (2, 2), (2, 0), (2, 3), (2, 2)):
            x = np.full(lengths[comm.rank], float(comm.rank))
            wanted = [0.0] * lengths[0] + [1.0] * lengths[1]
            assert comm.all_gather(x).tolist() == wanted
            found = comm.gather(x, root=1)
            assert (None if comm.rank == 0 else found.tolist() == wanted) in (None, True)
        for rows in ([1, 3], [2, 2], [1, 3], None, [4, 0], [2, 2]):
            whole = np.arange(4.0) if comm.rank == 0 else None
            part = comm.scatter(whole, splits=rows)
            first = (rows or [2, 2])[0]
            assert (
                part.tolist() == list(range(4))[slice(first) if comm.rank == 0 else slice(first, 4)]
            )
        for _ in range(2):
            with pytest.raises(pycoll.MismatchError):
                comm.all_gather(np.zeros(2, np.float32 if comm.rank else np.float64))
            assert comm.all_gather(np.zeros(2)).shape == (4,)

    world_in_threads(2).run(rank)


def test_bound_calls_that_began_in_a_group_become_native() -> None:
    def rank(comm: Comm) -> list[str]:
        x = np.ones(3)
        bound = comm.all_reduce.bind(x, out=x)
        with comm.group():
            bound()
        bound()
        return frames_of(bound)

    assert world_in_threads(2).run(rank) == [[], []]
