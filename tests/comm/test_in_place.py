"""all_reduce(x, out=x), which has a way of its own: as any other call, alone and not alone."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from call_ways import defined, frames_of
from harness import fresh_world, world_in_threads

import pycoll
from pycoll import ClosedError, InvalidArgumentError, Work
from pycoll.algorithms import TABLE
from pycoll.schedule.collectives import Collective

Comm = pycoll.Communicator


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 128, 20_000])
def test_in_place_is_the_definition(size: int, count: int) -> None:
    def rank(comm: Comm) -> None:
        for dtype in (np.float32, np.int64, np.complex128, np.bool_):
            begin = (np.arange(count) % 3 + comm.rank).astype(dtype)
            expected = defined(comm, "all_reduce")(begin.copy())
            for turn in range(3):
                x = begin.copy().reshape(1, -1) if turn == 2 else begin.copy()
                assert comm.all_reduce(x, out=x) is x
                assert x.dtype == dtype and (x.reshape(-1) == expected).all()
        tensor = torch.full((count,), 1.0)
        for turn in range(1, 4):
            assert comm.all_reduce(tensor, out=tensor) is tensor
            assert tensor.tolist() == [float(comm.size**turn)] * count

    world_in_threads(size).run(rank)


def test_in_place_calls_no_python_the_second_time() -> None:
    comm = world_in_threads(1).communicators[0]
    x = np.ones(3)
    reduce = comm.all_reduce
    reduce(x, out=x)
    assert frames_of(lambda: reduce(x, out=x)) == []


def test_arrays_that_are_not_so_plain_go_the_long_way() -> None:
    def rank(comm: Comm) -> None:
        x = np.ones((4, 4))
        comm.all_reduce(x, out=x)
        for odd in (np.ones((4, 8))[:, ::2], np.ones(16).astype(">f8")):
            with pytest.raises(InvalidArgumentError):
                comm.all_reduce(odd, out=odd)
        frozen = np.ones(16)
        frozen.flags.writeable = False
        with pytest.raises(InvalidArgumentError, match="read-only"):
            comm.all_reduce(frozen, out=frozen)
        z = torch.ones(8, dtype=torch.complex64).conj().imag
        assert z.is_neg()
        with pytest.raises(InvalidArgumentError):
            comm.all_reduce(z, out=z)

    for size in (1, 2):
        world_in_threads(size).run(rank)


def test_other_arguments_are_not_overlooked() -> None:
    def rank(comm: Comm) -> None:
        x = np.full(4, 1.0 + comm.rank)
        comm.all_reduce(x, out=x)
        assert x.tolist() == [3] * 4
        x[:] = 1 + comm.rank
        assert comm.all_reduce(x, "max", out=x) is x and x.tolist() == [2] * 4
        x[:] = 1 + comm.rank
        assert comm.all_reduce(x, out=x, op="prod") is x and x.tolist() == [2] * 4
        out = np.zeros(4)
        assert comm.all_reduce(x, out=out) is out and out.tolist() == [4] * 4
        work = comm.all_reduce(x, out=x, async_op=True)
        assert isinstance(work, Work) and work.wait() is x and x.tolist() == [4] * 4
        with comm.group():
            work = comm.all_reduce(x, out=x)
        assert work.wait() is x and x.tolist() == [8] * 4

    world_in_threads(2).run(rank)


@pytest.mark.parametrize("size", [1, 2])
def test_a_closed_communicator_says_so_in_place_too(size: int) -> None:
    world = fresh_world(size)

    def rank(comm: Comm) -> Any:
        x = np.ones(4)
        bound = comm.all_reduce.bind(x, out=x)
        for _ in range(3):
            comm.all_reduce(x, out=x)
            bound()
        comm.barrier()
        comm.close()
        for call in (lambda: comm.all_reduce(x, out=x), bound):
            with pytest.raises(ClosedError):
                call()

    world.run(rank)
    world.close()


def test_a_forked_child_hears_that_the_communicator_is_its_parent_s() -> None:
    comm = world_in_threads(1).communicators[0]
    x = np.ones(4)
    bound = comm.all_reduce.bind(x, out=x)
    for _ in range(2):
        comm.all_reduce(x, out=x)
        bound()
    pid = os.fork()
    if pid == 0:
        wrong = 2
        for call in (lambda: comm.all_reduce(x, out=x), bound):
            try:
                call()
            except ClosedError:
                wrong -= 1
        os._exit(wrong)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    bound()


def test_a_reduction_must_not_call_in_place_either() -> None:
    (comm,) = pycoll.local_world(1)
    others = pycoll.local_world(2)
    x = np.ones(4)
    comm.all_reduce(x, out=x)
    errors: list[BaseException] = []

    def fold(target: Any, source: Any) -> None:
        try:
            comm.all_reduce(x, out=x)
        except InvalidArgumentError as error:
            errors.append(error)
        target += source

    pycoll.register_op("calls in place", fold)
    threads = [
        threading.Thread(target=lambda one=one: one.all_reduce(np.ones(2), "calls in place"))
        for one in others
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors and all("by a user's reduction" in str(error) for error in errors)
    for one in (comm, *others):
        one.close()


# ---- blocks that are where they belong


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("each", [0, 1, 9_000])
def test_own_rows_of_the_result_are_gathered_in_place(
    size: int, each: int, transports: str
) -> None:
    def rank(comm: Comm) -> None:
        rows = [each + peer % 2 for peer in range(size)]
        first = sum(rows[: comm.rank])
        mine = slice(first, first + rows[comm.rank])
        expected = np.arange(sum(rows) * 3.0).reshape(-1, 3)
        for name in [None, *TABLE[Collective.ALL_GATHER]]:
            if name is not None and TABLE[Collective.ALL_GATHER][name].needs_topology:
                continue
            for lengths in (None, rows):
                out = np.full_like(expected, -1)
                out[mine] = expected[mine]
                found = comm.all_gather(out[mine], out=out, lengths=lengths, algorithm=name)
                assert found is out and (out == expected).all(), name
        for root in range(size):
            out = np.full_like(expected, -1)
            out[mine] = expected[mine]
            comm.gather(out[mine], root, out=out if comm.rank == root else None)
            assert comm.rank != root or (out == expected).all()

    world_in_threads(size, transports).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_root_scatters_to_its_own_rows(size: int) -> None:
    def rank(comm: Comm) -> None:
        for root in range(size):
            for rows in (0, 7, 30_000):
                x = np.arange(rows * 2.0).reshape(-1, 2)
                shares = [rows // size + (peer < rows % size) for peer in range(size)]
                first = sum(shares[: comm.rank])
                own = x[first : first + shares[comm.rank]]
                expected = own.copy()
                if comm.rank == root:
                    found = comm.scatter(x, root, out=own)
                    assert (x == np.arange(rows * 2.0).reshape(-1, 2)).all()
                else:
                    found = comm.scatter(None, root)
                assert (found == expected).all()

    world_in_threads(size).run(rank)


def test_rows_of_others_are_still_refused() -> None:
    out = np.zeros((4, 3))

    def rank(comm: Comm) -> None:
        for wrong in (out[1:3], out[2:4]) if comm.rank == 0 else (out[:2], out[1:3]):
            with pytest.raises(InvalidArgumentError, match="out overlaps x partly"):
                comm.all_gather(wrong, out=out, lengths=[2, 2])

    world_in_threads(2).run(rank)
