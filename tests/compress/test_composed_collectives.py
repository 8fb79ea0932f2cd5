"""Collectives of codecs that send places, matrices or a program's bytes, against NumPy."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll.compress import Custom, Feedback, PowerSGD, RandomK, Threshold, TopK
from pycoll.compress.sparse import SparseCodec
from pycoll.errors import InvalidArgumentError, MismatchError, PeerLostError, ReductionError

Array = Any
HALVES = Custom(
    lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, np.float16), "halves"
)
LENGTHS = [0, 1, 5, 1001]


def values(rank: int, count: int, kind: Any = np.float32) -> Array:
    return np.random.default_rng(1000 * count + rank).standard_normal(count).astype(kind)


def sums(
    xs: list[Any], codec: Any, op: str = "sum", feedbacks: Any = None, transports: str = "shm"
) -> list[Any]:
    """The all_reduce of ``xs`` on each rank."""

    def call(comm: pycoll.Communicator) -> Any:
        feedback = None if feedbacks is None else feedbacks[comm.rank]
        return comm.all_reduce(xs[comm.rank], op, compress=codec, feedback=feedback)

    return world_in_threads(len(xs), transports).run(call)


def sparse(codec: SparseCodec, x: Array, step: int = 0) -> Array:
    found = np.zeros_like(x)
    places = codec.chosen(x, step)
    found[places] = x[places]
    return found


def fold(arrays: list[Array], op: str) -> Array:
    total = functools.reduce(operator.add, arrays)
    return total / total.dtype.type(len(arrays)) if op == "avg" else total


def same(found: list[Array], wanted: Array) -> None:
    for one in found:
        assert one.dtype == wanted.dtype and one.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("codec", [TopK(0.01), TopK(0.6), Threshold(1.0)], ids=repr)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_places_and_values_are_folded_in_rank_order(codec: Any, op: str) -> None:
    for size in (1, 2, 3):
        for count in LENGTHS:
            for kind in (np.float32, np.float64):
                xs = [values(rank, count, kind) for rank in range(size)]
                wanted = fold([sparse(codec, x) for x in xs], op)
                same(sums(xs, codec, op), wanted)
    xs = [values(rank, 4001) for rank in range(3)]
    same(sums(xs, codec, op, transports="tcp"), fold([sparse(codec, x) for x in xs], op))


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_values_are_the_plain_collective(op: str) -> None:
    xs = [values(rank, 1000) for rank in range(3)]
    xs[0][:5] = -0.0
    xs[1][:3] = -0.0
    xs[2][:2] = -0.0
    xs[1][7] = np.nan
    xs[2][8] = np.inf
    run = world_in_threads(3).run
    plain = run(lambda comm: comm.all_reduce(xs[comm.rank], op, deterministic=True))[0]
    for codec in (TopK(1.0), Threshold(0)):
        same(sums(xs, codec, op), plain)
    # The residual, which is 0, turns -0 into 0.
    same(sums(xs, RandomK(1.0, 3), op, [Feedback() for _ in xs]), plain + np.float32(0))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_random_places_never_hide_what_is_not_finite(bad: float, kind: Any) -> None:
    """NaN comes at the first drawn place, on all ranks, in this call alone."""
    codec, count = RandomK(0.01, 1), 1000
    drawn = codec.chosen(np.zeros(count, np.float32), 0)
    hidden = int(np.setdiff1d(np.arange(count), drawn)[123])
    lists = [[np.ones(count, kind), np.ones(count, kind)] for _ in range(3)]
    lists[1][1][hidden] = bad
    feedbacks = [Feedback(momentum=0.5) for _ in lists]
    for found in sums(lists, codec, "avg", feedbacks):
        places = [np.flatnonzero(~np.isfinite(one)).tolist() for one in found]
        assert places == [[], [drawn[0]]] and np.isnan(found[1][drawn[0]])
        assert found[0][drawn].tolist() == [1] * len(drawn)
    for feedback in feedbacks:
        assert all(np.isfinite(one).all() for one in feedback.residual)
    lists[1][1][hidden] = 1
    for found in sums(lists, codec, "avg", feedbacks):
        assert all(np.isfinite(one).all() for one in found)
    large = np.full(count, np.finfo(kind).max / 8, kind)  # finite, though not their sum
    for one in sums([large] * 3, codec, "avg", [Feedback() for _ in lists]):
        assert np.isfinite(one).all()


def test_a_nan_that_is_drawn_changes_no_other_value() -> None:
    codec, count = RandomK(0.01, 1), 1000
    drawn = codec.chosen(np.zeros(count, np.float32), 0)
    x = np.ones(count, np.float32)
    x[drawn[4]] = np.nan
    for one in sums([x, x], codec, "sum", [Feedback(), Feedback()]):
        assert np.flatnonzero(np.isnan(one)).tolist() == [drawn[4]]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_thin_matrices_and_functions_forget_what_is_not_finite(bad: float) -> None:
    for codec in (PowerSGD(2), HALVES):
        xs = [np.random.default_rng(rank).standard_normal((40, 30)) for rank in range(3)]
        xs = [x.astype(np.float32) for x in xs]
        feedbacks = [Feedback() for _ in xs]
        sums(xs, codec, "sum", feedbacks)
        broken = [x.copy() for x in xs]
        broken[1][3, 4] = bad
        for one in sums(broken, codec, "sum", feedbacks):
            assert not np.isfinite(one[3, 4])
            assert np.isnan(one).all() or codec is HALVES
        for feedback in feedbacks:
            assert np.isfinite(feedback.residual).all()
        for one in sums(xs, codec, "sum", feedbacks):
            assert np.isfinite(one).all() and one.any()


def test_the_same_random_places_on_all_ranks_change_with_the_step() -> None:
    codec, count = RandomK(0.1, 5), 1001
    feedbacks = [Feedback() for _ in range(3)]
    residuals = [np.zeros(count, np.float32) for _ in range(3)]
    for step in range(4):
        xs = [values(rank + 10 * step, count) for rank in range(3)]
        wanted = [x + e for x, e in zip(xs, residuals, strict=True)]
        kept = [sparse(codec, one, step) for one in wanted]
        same(sums(xs, codec, "sum", feedbacks), fold(kept, "sum"))
        residuals = [one - sent for one, sent in zip(wanted, kept, strict=True)]
        for feedback, residual in zip(feedbacks, residuals, strict=True):
            assert feedback.residual.tobytes() == residual.tobytes()
    with pytest.raises(AssertionError, match="feedback is None and compress is RandomK"):
        sums(xs, codec)


def test_sums_over_time_lose_nothing() -> None:
    """Whole numbers: results and the last residuals add up to all arrays."""
    count = 500
    for codec in (TopK(0.02), Threshold(9.0), RandomK(0.02, 1)):
        feedbacks = [Feedback() for _ in range(3)]
        total = got = np.zeros(count, np.float32)
        random = np.random.default_rng(4)
        for _ in range(12):
            xs = [random.integers(-8, 9, count).astype(np.float32) for _ in range(3)]
            total = total + sum(xs)
            got = got + sums(xs, codec, "sum", feedbacks)[0]
        held = sum(one.residual for one in feedbacks)
        assert held.any() and np.array_equal(got + held, total)
        assert feedbacks[0].norm() == np.linalg.norm(feedbacks[0].residual.astype(np.float64))


def test_momentum_correction_with_all_values_is_momentum() -> None:
    for codec in (TopK(1.0), RandomK(1.0, 2)):
        feedbacks = [Feedback(momentum=0.5, masking=False) for _ in range(2)]
        velocities = [np.zeros(100, np.float32) for _ in range(2)]
        for step in range(4):
            xs = [values(rank + 10 * step, 100) for rank in range(2)]
            velocities = [v * np.float32(0.5) + x for v, x in zip(velocities, xs, strict=True)]
            same(sums(xs, codec, "avg", feedbacks), fold(velocities, "avg"))
            assert not feedbacks[0].residual.any()


def test_momentum_of_what_was_sent_is_cleared() -> None:
    feedbacks = [Feedback(momentum=0.5) for _ in range(2)]
    xs = [[np.float32([1, 9, 8]), np.float32([4, 99])] for _ in range(2)]
    sums(xs, TopK(0.34), "sum", feedbacks)
    # Of each array 2 of 3 and 1 of 2 entries are sent, and begin anew.
    assert feedbacks[0].residual[0].tolist() == [1, 0, 0]
    assert feedbacks[0].residual[1].tolist() == [4, 0]
    sums(xs, TopK(0.34), "sum", feedbacks)
    assert feedbacks[0].residual[0].tolist() == [1 + 1.5, 0, 0]
    assert feedbacks[0].residual[1].tolist() == [4 + 6, 0]


def test_a_warm_up_sends_more_at_first() -> None:
    feedbacks = [Feedback(warmup=1) for _ in range(2)]
    xs = [values(rank, 10_000) for rank in range(2)]
    first, second = (sums(xs, TopK(0.0001), "sum", feedbacks)[0] for _ in range(2))
    assert 100 <= np.count_nonzero(first) <= 200
    assert 1 <= np.count_nonzero(second) <= 2
    for codec in (Threshold(1), PowerSGD(1), HALVES):
        with pytest.raises(AssertionError, match="feedback has a warm-up, and compress is"):
            sums(xs, codec, "sum", feedbacks)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_functions_of_a_program_round_at_most_twice(op: str) -> None:
    def half(x: Array) -> Array:
        return x.astype(np.float16).astype(np.float32)

    for size, count in ((1, 5), (2, 0), (2, 1001), (3, 1000)):
        xs = [values(rank, count) for rank in range(size)]
        wanted = np.empty(count, np.float32)
        for owner, places in enumerate(np.array_split(np.arange(count), size)):
            own = [x[places] if r == owner else half(x[places]) for r, x in enumerate(xs)]
            wanted[places] = half(fold(own, op))
        same(sums(xs, HALVES, op), wanted)


def test_functions_of_a_program_have_feedback() -> None:
    """Whole numbers times powers of two: every sum is exact."""
    rounded = Custom(
        lambda x: np.rint(x / 8).astype(np.int16).tobytes(),
        lambda b, n: np.frombuffer(b, np.int16) * np.float32(8),
    )
    feedbacks = [Feedback() for _ in range(4)]
    total = got = np.zeros(100, np.float32)
    random = np.random.default_rng(4)
    for _ in range(6):
        xs = [random.integers(-99, 100, 100).astype(np.float32) for _ in range(4)]
        total = total + sum(xs)
        found = sums(xs, rounded, "sum", feedbacks)
        same(found, found[0])
        got = got + found[0]
    assert np.array_equal(got + sum(one.residual for one in feedbacks), total)


def test_a_matrix_of_low_rank_is_repeated() -> None:
    random = np.random.default_rng(1)
    low = (random.standard_normal((30, 2)) @ random.standard_normal((2, 20))).astype(np.float32)
    xs = [low * np.float32(rank + 1) for rank in range(3)]
    found = sums(xs, PowerSGD(2), "avg")
    same(found, found[0])
    assert np.abs(found[0] - low * 2).max() < 1e-5 * np.abs(low).max()
    short = [values(rank, 50) for rank in range(3)]
    run = world_in_threads(3).run
    plain = run(lambda comm: comm.all_reduce(short[comm.rank], "avg"))[0]
    lists = [[x, y] for x, y in zip(xs, short, strict=True)]
    for matrix, vector in sums(lists, PowerSGD(2), "avg"):
        assert np.abs(matrix - low * 2).max() < 1e-5 * np.abs(low).max()
        assert vector.tobytes() == plain.tobytes(), "an array of one axis is sent whole"


def test_a_kept_q_comes_near_the_best_product() -> None:
    random = np.random.default_rng(2)
    u, _ = np.linalg.qr(random.standard_normal((40, 40)))
    v, _ = np.linalg.qr(random.standard_normal((30, 30)))
    sizes = 2.0 ** -np.arange(30)
    matrix = (u[:, :30] * sizes @ v.T).astype(np.float32)
    feedbacks = [Feedback() for _ in range(2)]
    kept: list[Any] = []
    for _ in range(6):
        for one in feedbacks:
            one.residuals.memory((40, 30))[:] = 0  # only Q is kept
        kept.append(sums([matrix] * 2, PowerSGD(2), "avg", feedbacks)[0])
    best = np.sqrt(np.square(sizes[2:]).sum())
    errors = [float(np.linalg.norm(one - matrix)) for one in kept]
    assert errors[-1] < 1.01 * best < errors[0]
    left = feedbacks[0].residual
    assert np.abs(kept[-1] + left - matrix).max() < 1e-6


def test_frameworks_types_lists_and_out() -> None:
    torch = pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    jax = pytest.importorskip("jax.numpy", reason="no jax: pip install -r tests/requirements.txt")

    def call(comm: pycoll.Communicator) -> None:
        x = np.float32([[1, -8], [2, 3]])
        codec = TopK(0.5)
        wanted = np.float32([[0, -8], [0, 3]]) * 2
        for made in (torch.tensor(x), jax.asarray(x), x):
            found = comm.all_reduce(made, compress=codec)
            assert type(found) is type(made) and np.array_equal(np.asarray(found), wanted)
        for kind in (np.float16, "bfloat16", np.float64):
            found = comm.all_reduce(pycoll.empty(0, kind), compress=codec)
            found = comm.all_reduce(x.astype(found.dtype), compress=codec)
            assert np.array_equal(found.astype(np.float32), wanted)
        out = x.copy()
        assert comm.all_reduce(out, compress=codec, out=out) is out
        assert np.array_equal(out, wanted)
        pair, outs = [x, x[0].copy()], [np.empty_like(x), np.empty(2, np.float32)]
        assert comm.all_reduce(pair, compress=codec, out=outs) is outs
        assert np.array_equal(outs[0], wanted) and outs[1].tolist() == [0, -16]
        assert comm.all_reduce(3.0, compress=codec) == 6.0

    world_in_threads(2).run(call)


@pytest.mark.parametrize("codec", [TopK(0.1), RandomK(0.1, 1), PowerSGD(1), HALVES], ids=repr)
def test_works_groups_and_bound_calls(codec: Any) -> None:
    def call(comm: pycoll.Communicator) -> None:
        x = values(comm.rank, 400).reshape(20, 20)
        wanted = comm.all_reduce(x, compress=codec, feedback=Feedback())
        work = comm.all_reduce(x, compress=codec, feedback=Feedback(), async_op=True)
        plain = comm.all_reduce(1)
        found = work.wait()
        assert work.wait() is found and work.done() and plain == 2
        assert found.tobytes() == wanted.tobytes()
        with comm.group():
            grouped = comm.all_reduce(x, compress=codec, feedback=Feedback())
            other = comm.all_reduce(np.ones(2))
        assert grouped.wait().tobytes() == wanted.tobytes() and other.wait().tolist() == [2, 2]
        feedback, out = Feedback(), np.empty_like(x)
        bound = comm.all_reduce.bind(x, out=out, compress=codec, feedback=feedback)
        assert bound() is out and out.tobytes() == wanted.tobytes() and feedback.step == 1
        bound()
        assert feedback.step == 2

    world_in_threads(2).run(call)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (TopK(0.1), TopK(0.2), "with TopK"),
        (TopK(0.1), Threshold(0.1), "Threshold"),
        (RandomK(0.1, 1), RandomK(0.1, 2), "seed=2"),
        (PowerSGD(1), PowerSGD(2), "rank=2"),
        (HALVES, Custom(HALVES.encoder, HALVES.decoder, "others"), "others"),
    ],
    ids=repr,
)
def test_a_rank_with_another_codec_is_named(first: Any, second: Any, text: str) -> None:
    def call(comm: pycoll.Communicator) -> Any:
        codec = second if comm.rank == 2 else first
        x = np.ones((20, 20), np.float32)
        with pytest.raises(MismatchError, match=text.removeprefix("with ")) as caught:
            comm.all_reduce(x, compress=codec, feedback=Feedback())
        assert caught.value.rank == 2 and caught.value.operation == "all_reduce"
        assert str(caught.value).startswith("ranks called with different arguments: rank 2 called")
        with pytest.raises(MismatchError, match=r"rank 1 called all_reduce of .*, \[3\], sum"):
            comm.all_reduce(
                np.ones(3 if comm.rank == 1 else 4, np.float32),
                compress=first,
                feedback=Feedback(),
            )
        return comm.all_reduce(1)

    assert world_in_threads(4).run(call) == [4] * 4, "the communicator stays usable"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"x": np.ones(3, np.int32)}, "x is int32: compress needs float16, bfloat16, float32 or"),
        ({"x": [np.ones(3), True]}, r"x\[1\] is bool: compress needs"),
        ({"x": np.ones(3), "compress": HALVES}, "x is float64: compress needs float16, bfloat16"),
        ({"x": [np.ones(3), np.ones(3, np.float32)]}, r"x\[1\] is float32 and x\[0\] float64"),
        ({"x": []}, "x is an empty list: expected at least one array"),
        ({"op": "max"}, "op is 'max': compress needs 'sum' or 'avg'"),
        ({"feedback": 3}, "feedback is 3: expected a pycoll.compress.Feedback"),
        ({"algorithm": "ring"}, r"algorithm is 'ring' and compress is TopK\(density=0.1\)"),
        ({"out": np.ones(4, np.float32)}, "out has shape"),
        ({"stream": 3}, "stream is 3: compress takes arrays in host memory"),
        ({"compress": TopK}, "expected a codec of pycoll.compress, or None"),
    ],
    ids=str,
)
def test_bad_calls_are_refused_before_any_byte(words: Any, text: str) -> None:
    def call(comm: pycoll.Communicator) -> Any:
        given = {"x": np.ones(3, np.float32), "compress": TopK(0.1), **words}
        with pytest.raises(InvalidArgumentError, match=text):
            comm.all_reduce(given.pop("x"), given.pop("op", "sum"), **given)
        return comm.all_reduce(1)

    assert world_in_threads(2).run(call) == [2, 2]


def test_a_residual_of_another_array_is_refused() -> None:
    def call(comm: pycoll.Communicator) -> None:
        feedback = Feedback()
        comm.all_reduce(np.ones(3, np.float32), compress=TopK(0.5), feedback=feedback)
        for x in (np.ones(4, np.float32), np.ones(3, np.float64)):
            with pytest.raises(InvalidArgumentError, match=r"call feedback\.reset\(\)"):
                comm.all_reduce(x, compress=TopK(0.5), feedback=feedback)
        feedback.reset()
        comm.all_reduce(np.ones(4, np.float32), compress=TopK(0.5), feedback=feedback)

    world_in_threads(2).run(call)


def test_an_exception_of_a_function_reaches_all_ranks() -> None:
    def fails(rank: int, when: str) -> Custom:
        def encoder(x: Array) -> bytes:
            if rank == 1 and when == "encode":
                raise RuntimeError("no codes today")
            return bytes(HALVES.encode(x))

        def decoder(codes: bytes, count: int) -> Array:
            if rank == 1 and when == "decode":
                raise RuntimeError("no values today")
            return np.frombuffer(codes, np.float16)

        return Custom(encoder, decoder, "fails")

    def call(comm: pycoll.Communicator, when: str) -> Any:
        feedback = Feedback()
        try:
            comm.all_reduce(
                np.ones(8, np.float32), compress=fails(comm.rank, when), feedback=feedback
            )
        except Exception as error:
            assert feedback.residual is None or not feedback.residual.any()
            assert feedback.step == 0 and comm.all_reduce(1) == 3
            return error
        return None

    for when in ("encode", "decode"):
        found = world_in_threads(3).outcomes(lambda comm, when=when: call(comm, when))
        assert isinstance(found[1], RuntimeError) and "today" in str(found[1])
        for other in (found[0], found[2]):
            assert isinstance(other, InvalidArgumentError | ReductionError), other
            assert other.rank == 1 and other.operation == "all_reduce", repr(other)


def test_a_lost_rank_is_named_and_residuals_stay() -> None:
    world = fresh_world(3)
    feedbacks = [Feedback() for _ in range(3)]

    def call(comm: pycoll.Communicator) -> Any:
        if comm.rank == 2:
            comm.close()
            return 2
        with pytest.raises(PeerLostError) as caught:
            comm.all_reduce(
                np.ones(8, np.float32), compress=TopK(0.5), feedback=feedbacks[comm.rank]
            )
        assert caught.value.operation == "all_reduce"
        assert not feedbacks[comm.rank].residual.any() and feedbacks[comm.rank].step == 0
        return caught.value.rank

    assert world.run(call) == [2, 2, 2]
    world.close()
