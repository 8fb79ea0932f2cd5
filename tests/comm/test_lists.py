"""Lists of arrays: many as one message."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from call_ways import frames_of
from harness import fresh_world, world_in_threads
from hypothesis import given
from hypothesis import strategies as st

import pycoll
from pycoll import InvalidArgumentError, MismatchError, Work, _core
from pycoll.comm.fused_batches import FusedMemory
from pycoll.comm.operations import internals_of

Comm = pycoll.Communicator


@st.composite
def lists(draw: Any) -> list[tuple[str, int, str]]:
    """Types, lengths and where results go."""
    some = st.tuples(
        st.sampled_from(["float32", "int16", "bfloat16", "complex128", "uint8"]),
        st.sampled_from([0, 1, 7, 300, 70_000]),
        st.sampled_from(["new", "given", "same"]),
    )
    return draw(st.lists(some, max_size=12))


@given(lists(), st.sampled_from(["sum", "prod"]), st.integers(1, 5), st.integers(0, 1000))
def test_a_list_is_its_arrays(parts: list[Any], op: str, size: int, seed: int) -> None:
    inputs = [oracle.inputs(d, op, size, n, seed + i) for i, (d, n, _) in enumerate(parts)]
    expected = [oracle.fold(rows, op) for rows in inputs]

    def rank(comm: Comm) -> None:
        for way in ("call", "async", "group", "bind"):
            xs = [rows[comm.rank].copy() for rows in inputs]
            outs = [
                {"new": None, "given": np.zeros_like(x), "same": x}[how]
                for x, (_, _, how) in zip(xs, parts, strict=True)
            ]
            kept = [x.copy() for x in xs]
            if way == "call":
                found = comm.all_reduce(tuple(xs), op, out=outs)
            elif way == "async":
                work = comm.all_reduce(xs, op, out=outs, async_op=True)
                assert isinstance(work, Work)
                found = work.wait()
            elif way == "bind":
                found = comm.all_reduce.bind(xs, op, out=outs)()
            else:
                with comm.group():
                    work = comm.all_reduce(xs, op, out=outs)
                    other = comm.all_reduce(1)
                found = work.wait()
                assert other.wait() == comm.size
            assert found is outs
            made = comm.all_reduce(kept, op)
            assert isinstance(made, list)
            for one, out, right in zip(made, outs, expected, strict=True):
                assert oracle.same_bits(one, right), f"{way}, seed {seed}"
                assert out is None or oracle.same_bits(out, right), f"{way}, seed {seed}"

    world_in_threads(size).run(rank)


def test_lists_of_every_kind() -> None:
    def mean(a: Any, b: Any) -> Any:
        return a + b

    pycoll.register_op("sum_for_lists", mean, commutative=True)

    def rank(comm: Comm) -> None:
        mixed = [torch.ones(3), np.float32(2), 5, True, np.ones((2, 2))[::-1], b"\x01\x02"]
        found = comm.all_reduce(mixed, "max")
        assert [type(one).__name__ for one in found] == [
            *("Tensor", "float32", "int", "bool", "ndarray", "bytes")
        ]
        assert found[2] == 5 and found[4].shape == (2, 2)
        own = comm.all_reduce([np.ones(2), np.full(3, 2.0)], "sum_for_lists")
        assert [one.tolist() for one in own] == [[3, 3], [6, 6, 6]]
        strict = comm.all_reduce([np.ones(2)], deterministic=True, algorithm=None)
        assert strict[0].tolist() == [3, 3]
        assert comm.all_reduce([]) == [] and comm.all_reduce((), async_op=True).wait() == []

    world_in_threads(3).run(rank)


def test_long_arrays_travel_alone_and_a_message_has_a_bound() -> None:
    """Whatever a list consists of, it is one call, as errors show."""
    world = fresh_world(2)
    members = [np.ones(1 << 16, np.float32)] * 65  # 256 KiB each: 64 and 1
    long = [np.ones((1 << 16) + 1, np.float32)] * 2
    messages = _core.messages_of([(0, one.nbytes) for one in [*members, *long]])
    assert [len(one) for one in messages] == [64, 1, 1, 1]

    def rank(comm: Comm) -> None:
        for _ in range(2):  # the second time natively
            found = comm.all_reduce([*members, *long])
            assert all((one == 2).all() for one in found)
        comm.all_reduce(np.ones(3 + comm.rank))

    try:
        for error in world.outcomes(rank):
            assert isinstance(error, MismatchError) and "operation 3:" in str(error), error
    finally:
        world.close()


def test_a_list_has_the_bits_of_one_array() -> None:
    def rank(comm: Comm) -> None:
        rows = np.random.default_rng(comm.rank).standard_normal(3058).astype(np.float32)
        parts = np.split(rows, [1, 51, 3051])
        for strict in (False, True):
            whole = comm.all_reduce(rows, deterministic=strict)
            found = comm.all_reduce(parts, deterministic=strict)
            assert np.concatenate(found).tobytes() == whole.tobytes()

    world_in_threads(4).run(rank)


#: Elements of arrays, such that segments begin and end anywhere in them.
ODD = (1, 7, 4097, 0, 16_384, 3, 16_385, 16_383, 333, 60_001, 2)


@pytest.mark.parametrize(("size", "transports"), [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm")])
def test_long_lists_are_reduced_where_they_lie(size: int, transports: str) -> None:
    """By every way of moving segments: the bits are those of one array."""

    def rank(comm: Comm) -> None:
        dice = np.random.default_rng([5, comm.rank])
        whole = dice.standard_normal(sum(ODD)).astype(np.float32)
        for name in ("ring", "direct", "one_shot", "tree", "chain", "halving_doubling", None):
            right = comm.all_reduce(whole, "avg", algorithm=name)
            for way in ("new", "same", "mixed"):
                xs = [one.copy() for one in np.split(whole, np.cumsum(ODD)[:-1])]
                outs = None if way == "new" else [*xs]
                if way == "mixed":
                    outs = [np.zeros_like(x) if n % 2 else x for n, x in enumerate(xs)]
                found = comm.all_reduce(xs, "avg", out=outs, algorithm=name)
                assert np.concatenate(found).tobytes() == right.tobytes(), (name, way)

    world_in_threads(size, transports).run(rank)


def test_results_that_lie_in_other_arrays_of_the_list_do_no_harm() -> None:
    def rank(comm: Comm) -> None:
        for count in (10, 16_000):
            for _ in range(2):  # the second time natively
                a, b = np.full(count, 1.0), np.full(count, 2.0)
                comm.all_reduce([a, b], out=[b, a])
                assert (b == comm.size).all() and (a == 2 * comm.size).all()
                long, result = np.arange(2.0 * count), np.zeros(2 * count)
                wanted = comm.size * long
                comm.all_reduce([a, long], out=[long[count // 2 :][:count], result])
                assert (long[count // 2 :][:count] == 4 * comm.size).all()
                assert np.array_equal(result, wanted)

    world_in_threads(2).run(rank)


def test_common_lists_run_without_python() -> None:
    def rank(comm: Comm) -> list[str]:
        xs = [np.ones(5), torch.ones(3), np.ones((2, 3), np.float32)]
        comm.all_reduce(xs, out=xs)
        return frames_of(lambda: comm.all_reduce(xs, out=xs))

    for frames in world_in_threads(2).run(rank):
        assert frames == []


@pytest.mark.parametrize(
    ("x", "out", "text"),
    [
        ([np.ones(2), "ab"], None, "array 1 of x: "),
        ([np.ones(2), [np.ones(2)]], None, "array 1 of x: "),
        ([np.ones(2)], np.ones(2), "out is a ndarray, but x is a list"),
        ([np.ones(2)], [np.ones(2)] * 2, "out has 2 arrays, but x has 1"),
        ([np.ones(2), np.ones(3)], [None, np.ones(2)], "array 1 of x: out has shape"),
        ((np.ones(2), 3.0), (None, np.zeros(1)), "array 1 of x: out has shape"),
    ],
)
def test_bad_lists_are_refused_before_anything_moves(x: Any, out: Any, text: str) -> None:
    def rank(comm: Comm) -> None:
        for words in ({}, {"async_op": True}):
            with pytest.raises(InvalidArgumentError) as caught:
                comm.all_reduce(x, out=out, **words)
            assert text in str(caught.value)
        with comm.group():
            with pytest.raises(InvalidArgumentError) as caught:
                comm.all_reduce(x, out=out)
            assert text in str(caught.value)
        assert comm.all_reduce(1) == 2

    world_in_threads(2).run(rank)


def test_a_wrong_op_adds_nothing_to_a_group() -> None:
    def rank(comm: Comm) -> None:
        x = [np.ones(2, np.int32), np.ones(2)]
        with comm.group():
            with pytest.raises(InvalidArgumentError, match="bxor"):
                comm.all_reduce(x, "bxor", out=x)
            comm.all_reduce(1)
        assert x[0].tolist() == [1, 1]

    world_in_threads(2).run(rank)


def test_lists_of_other_lengths_are_told() -> None:
    world = fresh_world(2)
    try:
        for error in world.outcomes(lambda comm: comm.all_reduce([np.ones(2)] * (2 + comm.rank))):
            assert isinstance(error, MismatchError), error
    finally:
        world.close()


@pytest.mark.parametrize("way", ["list", "async", "bind", "group"])
@pytest.mark.parametrize("counts", [(2, 3), (20_000, 30_000)])
def test_arrays_that_are_cut_elsewhere_are_told(counts: tuple[int, int], way: str) -> None:
    def rank(comm: Comm) -> None:
        xs = [np.ones(count) for count in (counts if comm.rank == 0 else reversed(counts))]
        if way == "group":
            with comm.group():
                for x in xs:
                    comm.all_reduce(x)
        elif way == "bind":
            comm.all_reduce.bind(xs)()
        elif way == "async":
            comm.all_reduce(xs, async_op=True).wait()
        else:
            comm.all_reduce(xs)

    world = fresh_world(2)
    try:
        for error in world.outcomes(rank):
            assert isinstance(error, MismatchError), error
            for count in counts:
                assert f"arrays[0] of 2: float64, op sum, shape ({count},)" in str(error), error
    finally:
        world.close()


def test_ranks_may_read_the_same_list_in_different_ways() -> None:
    def rank(comm: Comm) -> None:
        for count in (3, 30_000):
            apart = np.ones(2 * count)[::2]
            xs = [np.ones(2), apart if comm.rank == 0 else np.ones(count), np.ones(0)]
            if comm.rank == 1:
                found = comm.all_reduce(xs, async_op=True).wait()
            elif comm.rank == 2:
                with comm.group():
                    works = [comm.all_reduce(x) for x in xs[:2]]
                found = [work.wait() for work in works]
            else:
                found = comm.all_reduce(xs)
            assert [x.tolist() for x in found[:2]] == [[3.0] * 2, [3.0] * count]

    world_in_threads(3).run(rank)


def test_lists_of_two_threads_keep_apart() -> None:
    entered = threading.Event()

    def rank(comm: Comm) -> list[float]:
        lists = [[np.full(3, 10.0 * which + i) for i in range(4)] for which in range(2)]
        for one in lists:
            comm.all_reduce(one)  # known from now on
        if comm.rank == 1:
            entered.wait()
            for one in lists:
                comm.all_reduce(one, out=one)
        else:
            threads = [
                threading.Thread(target=comm.all_reduce, args=(one,), kwargs={"out": one})
                for one in lists
            ]
            for thread in threads:
                thread.start()
                time.sleep(0.2)  # it waits for rank 1
            entered.set()
            for thread in threads:
                thread.join()
        return [x[0] for one in lists for x in one]

    expected = [20.0 * which + 2 * i for which in range(2) for i in range(4)]
    assert world_in_threads(2).run(rank) == [expected] * 2


def test_lists_in_flight_have_memory_of_their_own() -> None:
    """Later lists use the memory of earlier ones, and lists of one time never share any."""

    def rank(comm: Comm) -> None:
        places = set()
        for turn in range(4):
            sent = [[np.full(3000, 10 * turn + n + comm.rank) for _ in range(4)] for n in range(2)]
            works = [comm.all_reduce(one, async_op=True) for one in sent]
            for n, work in reversed(list(enumerate(works))):
                for found in work.wait():
                    assert np.array_equal(found, np.full(3000, 2 * (10 * turn + n) + 1))
            kept = internals_of(comm).runner.fused_memory._kept
            places.add(frozenset(one.ctypes.data for one in kept))
            assert len(kept) == 2
        assert len(places) == 1, "later lists use the memory of earlier ones"

    world_in_threads(2).run(rank)


def test_memory_of_lists_is_at_most_twice_as_long() -> None:
    kept = FusedMemory()
    long, short = kept.take(4096), kept.take(100)
    kept.give(long)
    assert kept.take(2047) is not long
    assert kept.take(2048) is long
    for memory in (long, short, kept.take(5000)):
        kept.give(memory)
    assert kept.take(4096) is not long, "only the two newest are kept"
