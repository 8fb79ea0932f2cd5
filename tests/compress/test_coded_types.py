"""Dense codecs on arrays of float16, bfloat16 and float64 against NumPy, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coded_sums
import ml_dtypes
import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll.compress import BF16, FP8, Block, Feedback, Sign
from pycoll.errors import MismatchError

Array = Any
CODECS = [
    BF16(),
    FP8(block=64),
    Block("int8", block=64),
    Block("int4", block=32, rounding="stochastic", seed=3),
    Sign(block=64),
]
INT8 = Block("int8", block=64)
KINDS = [np.float16, ml_dtypes.bfloat16, np.float64]


def values(kind: Any, rank: int, count: int) -> Array:
    """Values of many magnitudes, float64 with bits that float32 does not hold."""
    random = np.random.default_rng(1000 * count + rank)
    scaled = random.standard_normal(count) * 2.0 ** random.integers(-12, 12, count)
    return np.asarray(scaled).astype(kind)


def ran(size: int, function: Callable[[pycoll.Communicator], Any], transports: str = "shm") -> Any:
    return world_in_threads(size, transports).run(function)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_all_reduce_gives_the_oracles_bits(kind: Any, codec: Any) -> None:
    for size, transports in ((1, "shm"), (3, "shm"), (2, "tcp")):
        for count in (0, 1, 63, 1001, 20_011):
            xs = [values(kind, rank, count) for rank in range(size)]
            for op in ("sum", "avg"):
                expected = coded_sums.all_reduce_of_type(codec, xs, op == "avg")

                def call(comm: pycoll.Communicator, xs: Any = xs, op: str = op) -> Array:
                    return comm.all_reduce(xs[comm.rank], op, compress=codec)

                for found in ran(size, call, transports):
                    assert coded_sums.same(found, expected, kind), (size, count, op)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_feedback_keeps_what_is_left_out(kind: Any, codec: Any, op: str) -> None:
    size, count = 3, 1500
    held = np.float64 if kind == np.float64 else np.float32
    feedbacks = [Feedback() for _ in range(size)]
    residuals = [np.zeros(count, held) for _ in range(size)]
    for step in range(3):
        xs = [values(kind, 10 * step + rank, count) for rank in range(size)]
        expected = coded_sums.all_reduce_of_type(codec, xs, op == "avg", residuals)

        def call(comm: pycoll.Communicator, xs: Any = xs) -> Array:
            return comm.all_reduce(
                xs[comm.rank], op, compress=codec, feedback=feedbacks[comm.rank], async_op=True
            ).wait()

        for found in ran(size, call):
            assert coded_sums.same(found, expected, kind), step
        for feedback, residual in zip(feedbacks, residuals, strict=True):
            assert coded_sums.same(feedback.residual, residual, held), step
            assert feedback.step == step + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", [BF16(), FP8(block=64), INT8, Block("int4", block=32)], ids=repr)
def test_sent_plus_residual_is_the_array_bit_for_bit(kind: Any, codec: Any) -> None:
    """Of a broadcast, whose result is what the root has sent."""
    x = values(kind, 7, 3000)
    wide = np.float64 if kind == np.float64 else np.float32

    def call(comm: pycoll.Communicator) -> tuple[Array, Array, Array]:
        feedback = Feedback()
        comm.broadcast(x, compress=codec, feedback=feedback)
        before = None if comm.rank else feedback.residual.copy()
        sent = comm.broadcast(x.astype(wide), compress=codec, feedback=feedback)
        return before, sent, feedback.residual

    before, sent, after = ran(2, call)[0]
    loses = not (isinstance(codec, BF16) and kind == ml_dtypes.bfloat16)
    assert before.dtype == wide and before.any() == after.any() == loses
    assert coded_sums.same(sent + after, x.astype(wide) + before, wide)


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_collectives_and_ways_to_call(kind: Any) -> None:
    size, rows = 3, [31, 0, 29]
    xs = [values(kind, rank, 420).reshape(60, 7) for rank in range(size)]
    narrow = [x.astype(np.float32) for x in xs]
    total = coded_sums.all_reduce_of_type(INT8, xs)
    joined = [
        coded_sums.rounded(INT8, x[:length].reshape(-1), rank, rank)[0].reshape(-1, 7)
        for rank, (x, length) in enumerate(zip(narrow, rows, strict=True))
    ]
    sent = coded_sums.rounded(INT8, narrow[1].reshape(-1), 1, 0)[0].reshape(60, 7)
    shares = coded_sums.reduce_scatter(INT8, narrow, rows)

    def calls(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank]
        own = mine[: rows[comm.rank]]
        gathered = np.empty((60, 7), kind)
        place = sum(rows[: comm.rank])
        gathered[place : place + len(own)] = own
        part = gathered[place : place + len(own)]
        comm.all_gather(part, lengths=rows, out=gathered, compress=INT8)
        again = mine.copy()
        bound = comm.all_reduce.bind(again, out=again, compress=INT8)
        bound()
        turned = np.ascontiguousarray(mine.T).T  # not in C order
        with comm.group():
            grouped = comm.all_reduce(mine, compress=INT8)
        filled = np.empty_like(mine)
        comm.all_reduce(turned, out=filled, compress=INT8)
        return [
            comm.reduce_scatter(mine, splits=rows, compress=INT8),
            comm.all_gather(own, compress=INT8),
            gathered,
            comm.broadcast(mine, 1, compress=INT8, async_op=True).wait(),
            again,
            filled,
            grouped.wait(),
            comm.all_reduce([mine], compress=INT8)[0],
        ]

    for rank, found in enumerate(ran(size, calls)):
        whole = np.concatenate(joined)
        wanted = [shares[rank], whole, whole, sent, total, total, total, total]
        for number, (one, expected) in enumerate(zip(found, wanted, strict=True)):
            assert coded_sums.same(one, expected.astype(kind), kind), (rank, number)


def test_a_list_of_all_types_travels_in_a_message_of_each() -> None:
    kinds = [np.float16, np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.float64]
    xs = [[values(kind, 9 * rank + i, 100 + i) for i, kind in enumerate(kinds)] for rank in (0, 1)]
    feedbacks = [Feedback(), Feedback()]

    def call(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank]
        work = comm.all_reduce(mine, compress=INT8, feedback=feedbacks[comm.rank], async_op=True)
        found: list[Array] = work.wait()
        return found

    found = ran(2, call)
    for members in ([0, 3], [1], [2, 5], [4]):
        joined = [np.concatenate([mine[i] for i in members]) for mine in xs]
        kind = joined[0].dtype
        held = [np.zeros(joined[0].shape, np.promote_types(np.float32, kind)) for _ in xs]
        expected = coded_sums.all_reduce_of_type(INT8, joined, residuals=held)
        for rank, one in enumerate(found):
            sums = np.concatenate([one[i] for i in members])
            rests = np.concatenate([feedbacks[rank].residual[i] for i in members])
            assert coded_sums.same(sums, expected, kind), (rank, members)
            assert coded_sums.same(rests, held[rank], held[rank].dtype), (rank, members)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_type_cannot_hold_shows(kind: Any) -> None:
    """Sums beyond float16, values beyond float32, NaN and infinities."""
    x = np.zeros(256, kind)
    x[0], x[70], x[140] = np.nan, np.inf, 6e4
    x[255] = 1e300 if kind == np.float64 else 1

    def call(comm: pycoll.Communicator) -> Array:
        return comm.all_reduce(x, compress=INT8)

    for found in ran(2, call):
        assert np.isnan(found[:128].astype(np.float32)).all()
        assert np.isinf(found[140]) == (kind == np.float16)
        assert np.isfinite(found[255].astype(np.float32)) == (kind != np.float64)


def test_ranks_with_arrays_of_different_types_name_the_odd_one() -> None:
    for others, odd in ((np.float32, np.float16), (np.float64, np.float32)):
        world = fresh_world(3)
        outcomes = world.outcomes(
            lambda comm, odd=odd, others=others: comm.all_reduce(
                np.ones(100, odd if comm.rank == 1 else others), compress=INT8
            )
        )
        world.close()
        for outcome in outcomes:
            assert isinstance(outcome, MismatchError), outcome
            assert outcome.ranks == (1,) and "arrays of other dtypes" in str(outcome)
