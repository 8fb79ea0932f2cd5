"""Operations that nobody waits for at once, and reductions that users write."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, Work

Comm = pycoll.Communicator


def test_work_gives_the_result_again_and_again() -> None:
    def rank(comm: Comm) -> None:
        x = np.arange(4) + comm.rank
        work = comm.all_reduce(x, async_op=True)
        assert isinstance(work, Work)
        found = work.wait()
        assert found.tolist() == [1, 3, 5, 7] and work.wait() is found and work.done()

    world_in_threads(2).run(rank)


def test_many_operations_are_in_flight_and_end_in_order() -> None:
    def rank(comm: Comm) -> None:
        works = [comm.all_reduce(np.full(5000, i + comm.rank), async_op=True) for i in range(50)]
        works[-1].wait()
        assert all(work.done() for work in works)
        for i, work in enumerate(works):
            assert (work.wait() == 3 * i + 3).all()

    world_in_threads(3).run(rank)


def test_one_thread_drives_all_ranks_with_async_op() -> None:
    communicators = world_in_threads(3).communicators
    works = [comm.all_reduce(comm.rank + 1, async_op=True) for comm in communicators]
    assert [work.wait() for work in works] == [6, 6, 6]


def test_dropped_works_run_on_and_keep_their_arrays() -> None:
    pycoll.register_op("slow sum", lambda a, b: (time.sleep(0.002), a + b)[1])

    def rank(comm: Comm) -> None:
        out = np.zeros(3000)
        for step in range(20):
            comm.all_reduce(np.full(3000, float(step)), "slow sum", out=out, async_op=True)
        comm.barrier()
        assert (out == 19 * 2).all()

    world_in_threads(2).run(rank)


def test_wait_with_a_timeout_may_be_repeated() -> None:
    world = world_in_threads(2)
    first, second = world.communicators
    work = first.all_reduce(np.ones(3), async_op=True)
    with pytest.raises(pycoll.TimeoutError):
        work.wait(timeout=0.05)
    assert not work.done() and first.failure is None
    assert second.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
    assert work.wait(timeout=10).tolist() == [2, 2, 2]


@pytest.mark.parametrize("timeout", [0, -1, "soon", float("nan"), True])
def test_wait_refuses_timeouts_that_are_none(timeout: Any) -> None:
    def rank(comm: Comm) -> str:
        work = comm.barrier(async_op=True)
        with pytest.raises(InvalidArgumentError) as caught:
            work.wait(timeout)
        work.wait()
        return str(caught.value)

    assert all("timeout is" in text for text in world_in_threads(2).run(rank))


def test_an_absent_rank_is_named_after_the_deadline() -> None:
    world = fresh_world(3)
    try:
        for comm in world.communicators:
            comm.timeout_s = 1.0
        others = threading.Barrier(2)  # who comes a timeout later would be absent as well

        def rank(comm: Comm) -> None:
            if comm.rank != 1:
                others.wait()
                comm.all_reduce(np.ones(3))

        errors = world.outcomes(rank)
        for rank_, error in enumerate(errors):
            if rank_ != 1:
                assert isinstance(error, pycoll.TimeoutError | pycoll.PeerLostError), error
        timeouts = [e for e in errors if isinstance(e, pycoll.TimeoutError)]
        assert timeouts and all(isinstance(e, TimeoutError) for e in timeouts)
        assert any(e.ranks == (1,) and "rank 1" in str(e) for e in timeouts)
        assert all(e.operation == "all_reduce" for e in timeouts)
        with pytest.raises(pycoll.PycollError):
            world.communicators[0].barrier()
    finally:
        world.close()


def test_closing_ends_what_runs_with_an_error() -> None:
    world = fresh_world(2)
    work = world.communicators[0].all_reduce(np.ones(3), async_op=True)
    world.communicators[0].close()
    with pytest.raises(pycoll.PycollError):
        work.wait(10)
    world.close()


# ---- reductions of users


def test_ops_of_users() -> None:
    pycoll.register_op("logaddexp", np.logaddexp, identity=-np.inf)

    def keep_larger(a: Any, b: Any) -> None:
        np.copyto(a, b, where=np.abs(b) > np.abs(a))

    pycoll.register_op("absmax", keep_larger)

    def rank(comm: Comm) -> None:
        x = np.array([1.0, -3.0, 2.0]) * (comm.rank + 1)
        assert comm.all_reduce(x, "absmax").tolist() == [3, -9, 6]
        same = np.zeros(2)
        found = comm.all_reduce(same, "logaddexp", deterministic=True)
        assert np.allclose(found, np.log(3))
        assert comm.exscan(0.0, "logaddexp") == [-np.inf, 0.0, np.logaddexp(0, 0)][comm.rank]
        assert comm.reduce_scatter(np.arange(3), "absmax").tolist() == [comm.rank]
        with pytest.raises(InvalidArgumentError, match="without identity="):
            comm.exscan(x, "absmax")

    world_in_threads(3).run(rank)


@given(st.integers(1, 9), st.integers(0, 8), st.sampled_from(["all_reduce", "reduce", "scan"]))
def test_ops_that_do_not_commute_keep_the_order(size: int, root: int, name: str) -> None:
    """Composition of maps x -> ax + b modulo a prime; an element is the pair (a, b)."""

    def compose(f: Any, g: Any) -> Any:
        a, b = f.real * g.real % 10_007, (f.real * g.imag + f.imag) % 10_007
        return a + 1j * b

    pycoll.register_op("compose", compose, commutative=False)
    rng = np.random.default_rng(size)
    maps = rng.integers(1, 100, (size, 40)) + 1j * rng.integers(0, 100, (size, 40))
    partial = [maps[0]]
    for one in maps[1:]:
        partial.append(compose(partial[-1], one))
    root %= size

    def rank(comm: Comm) -> Any:
        if name == "reduce":
            return comm.reduce(maps[comm.rank], root, "compose")
        return getattr(comm, name)(maps[comm.rank], "compose")

    found = world_in_threads(size).run(rank)
    if name == "scan":
        assert [one.tolist() for one in found] == [one.tolist() for one in partial]
    elif name == "reduce":
        assert found[root].tolist() == partial[-1].tolist()
    else:
        assert all(one.tolist() == partial[-1].tolist() for one in found)


# ---- wait_all


def test_wait_all_gives_results_in_order() -> None:
    def rank(comm: Comm) -> None:
        works = [comm.all_reduce(comm.rank + one, async_op=True) for one in range(9)]
        out = np.zeros(2)
        works += [comm.irecv(out, 1 - comm.rank), comm.isend(np.ones(2), 1 - comm.rank)]
        results = pycoll.wait_all(works)
        assert results[:9] == [1 + 2 * one for one in range(9)]
        assert results[9] is out and results[10] is None
        assert pycoll.wait_all([]) == []

    world_in_threads(2).run(rank)


def test_wait_all_raises_the_first_error_after_all_have_ended() -> None:
    def rank(comm: Comm) -> None:
        other = 1 - comm.rank
        outs = [np.zeros(3), np.zeros(7), np.zeros(4), np.zeros(3)]
        works: list[Any] = [comm.irecv(out, other, tag) for tag, out in enumerate(outs)]
        for tag in (3, 2, 1, 0):
            comm.send(np.ones(3), other, tag)
        with pytest.raises(pycoll.MismatchError, match=r"tag 1: .*24 bytes, the array has 56"):
            pycoll.wait_all(iter(works))
        assert all(work.done() for work in works)
        assert outs[0].tolist() == outs[3].tolist() == [1, 1, 1]

    world_in_threads(2).run(rank)


def test_wait_all_counts_what_still_runs_and_may_be_repeated() -> None:
    first, second = world_in_threads(2).communicators
    works = [first.all_reduce(one, async_op=True) for one in range(3)]
    with pytest.raises(pycoll.TimeoutError, match="3 of 3 operations are still under way"):
        pycoll.wait_all(works, timeout=0.05)
    for one in range(3):
        second.all_reduce(one)
    assert pycoll.wait_all(works, timeout=20) == [0, 2, 4]
    wrong: Any = [works[0], 3.0]
    with pytest.raises(InvalidArgumentError, match=r"works\[1\] is a float"):
        pycoll.wait_all(wrong)
    with pytest.raises(InvalidArgumentError, match="timeout is 0"):
        pycoll.wait_all(works, timeout=0)
