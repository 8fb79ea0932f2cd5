"""TopK, Threshold, PowerSGD and Custom in broadcast, all_gather and reduce_scatter, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll.compress import Block, Custom, Feedback, PowerSGD, RandomK, Threshold, TopK
from pycoll.errors import InvalidArgumentError, MismatchError, ReductionError

Array = Any
HALVES = Custom(lambda x: x.astype(np.float16).tobytes(), lambda b, n: np.frombuffer(b, "f2"), "f2")
CODECS = [TopK(0.25), Threshold(1.0), PowerSGD(1), HALVES]
WIDE = [*CODECS[:3], RandomK(0.25, 2)]
ROWS = [31, 0, 29]


def values(rank: int, kind: Any = np.float32) -> Array:
    return np.random.default_rng(rank).standard_normal((60, 7)).astype(kind)


def sent(codec: Any, x: Array, step: int = 0) -> Array:
    """What the codes of a block in call number ``step`` decode to."""
    return codec.decode_block(codec.encode_block(x, step), x.size, x.dtype).reshape(x.shape)


def ran(function: Callable[[pycoll.Communicator], Any], transports: str = "shm") -> Any:
    return world_in_threads(3, transports).run(function)


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_bits_are_those_of_blocks(codec: Any, kind: Any) -> None:
    xs = [values(rank, kind) for rank in range(3)]
    wide = [x.astype(np.float32) for x in xs]
    ends = np.cumsum([0, *ROWS])
    joined = np.concatenate([sent(codec, x[:n]) for x, n in zip(wide, ROWS, strict=True)])

    def calls(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank]
        gathered = np.empty((60, 7), kind)
        own = gathered[ends[comm.rank] : ends[comm.rank + 1]]
        own[...] = mine[: ROWS[comm.rank]]
        given = mine.copy()
        return [
            comm.all_gather(own, lengths=ROWS, out=gathered, compress=codec),
            comm.all_gather(mine[: ROWS[comm.rank]], compress=codec, async_op=True).wait(),
            comm.broadcast(given, 1, compress=codec, out=given),
            comm.reduce_scatter(mine, splits=ROWS, compress=codec),
            comm.reduce_scatter(mine, "avg", ROWS, compress=codec, async_op=True).wait(),
        ]

    for transports in ("shm", "tcp"):
        for rank, found in enumerate(ran(calls, transports)):
            own = slice(ends[rank], ends[rank + 1])
            parts = [x[own] if r == rank else sent(codec, x[own]) for r, x in enumerate(wide)]
            total = parts[0] + parts[1] + parts[2]
            wanted = [joined, joined, sent(codec, wide[1]), total, total / np.float32(3)]
            for one, expected in zip(found, wanted, strict=True):
                assert one.dtype == kind
                assert one.tobytes() == expected.astype(kind).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_what_is_left_out_is_sent_later(codec: Any) -> None:
    xs = [values(rank) for rank in range(3)]

    def calls(comm: pycoll.Communicator) -> list[tuple[Array, Array, Feedback]]:
        made = []
        for name, words in (("broadcast", {"root": 1}), ("all_gather", {}), ("reduce_scatter", {})):
            feedback = Feedback()
            call = getattr(comm, name)
            first = call(xs[comm.rank], compress=codec, feedback=feedback, **words)
            second = call(xs[comm.rank], compress=codec, feedback=feedback, **words)
            assert feedback.step == 2
            made.append((first, second, feedback))
        return made

    found = ran(calls)
    for rank, calls_of in enumerate(found):
        (_, cast, fed), (_, joined, held), (_, share, kept) = calls_of
        if rank == 1:
            rest = xs[1] - sent(codec, xs[1])
            assert np.array_equal(cast, sent(codec, xs[1] + rest, 1))
            assert np.array_equal(fed.residual, xs[1] + rest - cast)
        else:
            assert fed.residual is None
        rest = xs[rank] - sent(codec, xs[rank])
        again = sent(codec, xs[rank] + rest, 1)
        assert np.array_equal(joined[60 * rank :][:60], again)
        assert np.array_equal(held.residual, xs[rank] + rest - again)
        own = slice(20 * rank, 20 * rank + 20)
        total = np.zeros((20, 7), np.float32)
        for r, x in enumerate(xs):
            wanted = x[own] if r == rank else x[own] + (x[own] - sent(codec, x[own]))
            total = (wanted if r == rank else sent(codec, wanted, 1)) + (total if r else 0)
        assert np.allclose(share, total, atol=1e-5)
        assert not kept.residual[own].any() and kept.residual.any()


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
def test_powersgd_sends_in_time_what_it_leaves_out(name: str) -> None:
    """With one Q for all calls the residual would grow by about the norm of x in each."""
    xs = [values(rank) for rank in range(3)]

    def calls(comm: pycoll.Communicator) -> float:
        feedback = Feedback()
        for _ in range(100):
            getattr(comm, name)(xs[comm.rank], compress=PowerSGD(1), feedback=feedback)
        return feedback.norm()

    assert ran(calls)[0] < 40 * np.linalg.norm(xs[0])


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
def test_an_infinity_that_is_sent_leaves_nothing(name: str) -> None:
    x = values(0)
    x[25, 2], x[55, 3] = np.inf, np.nan

    def calls(comm: pycoll.Communicator) -> bool:
        feedback = Feedback()
        getattr(comm, name)(x, compress=TopK(0.25), feedback=feedback)
        return feedback.residual is None or bool(np.isfinite(feedback.residual).all())

    assert all(ran(calls))


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [RandomK(0.1, 1), TopK(0.01), PowerSGD(1), HALVES], ids=repr)
def test_nan_is_seen_on_all_ranks_and_leaves_no_residual(codec: Any, name: str) -> None:
    words: dict[str, Any] = {"root": 0} if name == "broadcast" else {}
    momentum = 0.5 if name == "reduce_scatter" and codec.sends_places else 0.0
    block = np.zeros(140 if name == "reduce_scatter" else 420, np.float32)
    hidden = 5
    if isinstance(codec, RandomK):
        hidden = int(np.setdiff1d(np.arange(14), codec.chosen(block))[0])

    def calls(comm: pycoll.Communicator) -> tuple[bool, bool, bool]:
        # Each block, the rows of rank 0, and in reduce_scatter those of another rank, has a NaN.
        x = values(comm.rank)
        feedback = Feedback(momentum=momentum)
        if comm.rank == 0:
            x[:14].reshape(-1)[hidden] = x[20:34].reshape(-1)[hidden] = np.nan
        first = getattr(comm, name)(x, compress=codec, feedback=feedback, **words)
        fed = feedback.residual
        second = getattr(comm, name)(values(comm.rank), compress=codec, feedback=feedback, **words)
        return (
            bool(np.isnan(first).any()),
            fed is None or bool(np.isfinite(fed).all()),
            bool(np.isfinite(second).all()),
        )

    found = ran(calls)
    sees = [True, True, name != "reduce_scatter"]  # no NaN in the rows of rank 2
    for (nan, rest, later), wanted in zip(found, sees, strict=True):
        assert (nan, rest) == (wanted, True)
        assert later or (momentum and wanted), "velocities of rows that are not encoded keep NaN"


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("codec", [Block("int8", 32), TopK(0.25)], ids=repr)
def test_groups_and_bound_calls(codec: Any, name: str) -> None:
    """They give the results and residuals of single calls; lists are refused."""
    words: dict[str, Any] = {"root": 1} if name == "broadcast" else {}

    def calls(comm: pycoll.Communicator) -> None:
        function = getattr(comm, name)
        x, y = values(comm.rank), values(comm.rank + 3)
        single, bound, grouped = Feedback(), Feedback(), Feedback()
        given = x.copy()
        call = function.bind(given, compress=codec, feedback=bound, **words)
        for one in (x, y, x):
            wanted = function(one, compress=codec, feedback=single, **words)
            given[:] = one
            assert call().tobytes() == wanted.tobytes()
            with comm.group():
                coded = function(one, compress=codec, feedback=grouped, **words)
                plain = comm.all_reduce(1)
            assert coded.wait().tobytes() == wanted.tobytes() and plain.wait() == comm.size
            held = np.asarray(single.residual)
            assert np.array_equal(held, np.asarray(bound.residual))
            assert np.array_equal(held, np.asarray(grouped.residual))
        assert single.step == bound.step == grouped.step == 3
        with pytest.raises(InvalidArgumentError, match="x"):
            function([x, y], compress=codec, **words)

    ran(calls)


def test_no_axes_nothing_and_one_rank() -> None:
    def calls(comm: pycoll.Communicator) -> list[Array]:
        empty = np.empty((0, 3), np.float32)
        return [
            comm.all_gather(np.float32(comm.rank), compress=HALVES),
            comm.broadcast(np.float32(comm.rank + 1), 0, compress=TopK(1.0)),
            comm.all_gather(empty, compress=TopK(0.5)),
            comm.reduce_scatter(empty, compress=HALVES),
        ]

    for size in (1, 3):
        for found in world_in_threads(size).run(calls):
            assert found[0].tolist() == list(range(size)) and float(found[1]) == 1
            assert found[2].shape == (0, 3) and found[3].shape == (0, 3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"compress": RandomK(0.5, 1)}, "feedback is None and compress is RandomK"),
        ({"algorithm": "direct"}, "algorithm is 'direct' and compress is TopK"),
        ({"compress": HALVES, "feedback": Feedback(warmup=3)}, "feedback has a warm-up, and comp"),
        ({"feedback": 3}, "feedback is 3: expected a pycoll.compress.Feedback"),
        ({"x": np.ones((3, 2)), "compress": HALVES}, "x is float64: compress needs float16, bf"),
        ({"x": np.ones((3, 2), np.int32)}, "x is int32: compress needs float16"),
        ({"out": np.ones((1, 1), np.float32)}, "out has shape"),
    ],
)
@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
def test_bad_calls_are_refused(name: str, words: dict[str, Any], text: str) -> None:
    world = fresh_world(2)
    given = {"x": np.ones((3, 2), np.float32), "compress": TopK(0.5), **words}
    x = given.pop("x")

    def call(comm: pycoll.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=text):
            getattr(comm, name)(x, **given)

    world.run(call)
    world.close()


@pytest.mark.parametrize("name", ["broadcast", "all_gather"])
def test_what_adds_nothing_up_has_no_momentum(name: str) -> None:
    def call(comm: pycoll.Communicator) -> None:
        with pytest.raises(InvalidArgumentError, match=f"sums up gradients, and {name} adds noth"):
            getattr(comm, name)(values(0), compress=TopK(0.5), feedback=Feedback(momentum=0.5))

    world_in_threads(2).run(call)


@pytest.mark.parametrize("codec", WIDE, ids=repr)
def test_float64_is_sent_as_it_is(codec: Any) -> None:
    """Residuals are float64, and the sum of what is sent and what is left is exact."""
    xs = [values(rank, np.float64) for rank in range(3)]

    def calls(comm: pycoll.Communicator) -> list[Array]:
        made = []
        for name, words in (("broadcast", {"root": 1}), ("all_gather", {}), ("reduce_scatter", {})):
            feedback, call = Feedback(), getattr(comm, name)
            call(xs[comm.rank], compress=codec, feedback=feedback, **words)
            made.append(call(xs[comm.rank], compress=codec, feedback=feedback, **words))
            assert feedback.residual is None or feedback.residual.dtype == np.float64
        return made

    twice = [sent(codec, x + (x - sent(codec, x)), 1) for x in xs]
    for rank, (cast, joined, share) in enumerate(ran(calls)):
        assert cast.tobytes() == twice[1].tobytes()
        assert joined.tobytes() == np.concatenate(twice).tobytes()
        own = slice(20 * rank, 20 * rank + 20)
        parts = [
            x[own] if r == rank else sent(codec, x[own] + (x[own] - sent(codec, x[own])), 1)
            for r, x in enumerate(xs)
        ]
        assert share.tobytes() == (parts[0] + parts[1] + parts[2]).tobytes()


def test_a_warm_up_sends_more_at_first() -> None:
    def calls(comm: pycoll.Communicator) -> list[int]:
        counts = []
        for codec in (TopK(0.01), RandomK(0.01, 1)):
            for name in ("broadcast", "all_gather", "reduce_scatter"):
                feedback, call = Feedback(warmup=1), getattr(comm, name)
                found = [
                    int(np.count_nonzero(call(values(0), compress=codec, feedback=feedback)))
                    for _ in range(2)
                ]
                counts += [round(one / found[-1]) for one in found]
        return counts

    # A density of 0.1 and then of 0.01, of 420 values; own rows of reduce_scatter are whole.
    for counts in ran(calls):
        assert counts == [8, 1, 8, 1, 1, 1] * 2


@pytest.mark.parametrize("masking", [False, True])
def test_momentum_of_reduce_scatter(masking: bool) -> None:
    """Whole numbers: own rows are sent whole, so masking clears their velocities."""
    xs = [np.rint(4 * values(rank)) for rank in range(3)]

    def calls(comm: pycoll.Communicator) -> list[Array]:
        feedback = Feedback(momentum=0.5, masking=masking)
        words = {"compress": TopK(1.0), "feedback": feedback}
        return [comm.reduce_scatter(xs[comm.rank], **words) for _ in range(3)]

    total = xs[0] + xs[1] + xs[2]
    for rank, found in enumerate(ran(calls)):
        own = total[20 * rank : 20 * rank + 20]
        for one, times in zip(found, (1, 1, 1) if masking else (1, 1.5, 1.75), strict=True):
            assert np.array_equal(one, own * np.float32(times))


@pytest.mark.parametrize("name", ["broadcast", "all_gather", "reduce_scatter"])
def test_ranks_that_differ_and_codecs_that_fail_end_all_ranks(name: str) -> None:
    def encoder(x: Array) -> bytes:
        raise ZeroDivisionError("mine")

    x = np.ones((6, 2), np.float32)
    for odd in (TopK(0.25), Custom(encoder, lambda b, n: np.zeros(n), "odd")):
        world = fresh_world(3)
        outcomes = world.outcomes(
            lambda comm, odd=odd: getattr(comm, name)(
                x, compress=odd if comm.rank == 0 else TopK(0.5)
            )
        )
        world.close()
        assert all(isinstance(one, Exception) for one in outcomes), outcomes
        if isinstance(odd, TopK):
            assert all(isinstance(one, MismatchError) and one.rank == 0 for one in outcomes)


def test_codes_that_do_not_decode_name_their_rank() -> None:
    bad = Custom(lambda x: b"1", lambda b, n: np.zeros(0), "bad")
    for name in ("broadcast", "all_gather", "reduce_scatter"):
        world = fresh_world(2)
        outcomes = world.outcomes(
            lambda comm, name=name: getattr(comm, name)(np.ones((4, 2), np.float32), compress=bad)
        )
        world.close()
        assert all(isinstance(one, ReductionError) for one in outcomes), (name, outcomes)
