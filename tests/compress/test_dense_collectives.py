"""Collectives with dense codecs against NumPy, bit by bit, over all media."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import coded_sums
import numpy as np
import pytest
from harness import fresh_world, world_in_threads

import pycoll
from pycoll import _core
from pycoll.algorithms import lookup
from pycoll.comm.codecs import coding_of
from pycoll.compress import BF16, FP8, Block, Feedback, RandomK, Sign
from pycoll.errors import InvalidArgumentError, MismatchError, PeerLostError
from pycoll.plan.lowering import lower
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import single_host

Array = Any
CODECS = [
    BF16(),
    FP8(block=64),
    Block("int8", block=64),
    Block("int4", block=32),
    Block("int8", block=64, rounding="stochastic", seed=7),
    Block("int4", block=128, rounding="stochastic", seed=2**63),
    Sign(block=64),
]
LENGTHS = [0, 1, 2, 63, 65, 64 * 5, 1001, 20_011]
INT8 = Block("int8", block=64)


def values(rank: int, count: int) -> Array:
    """Values of many magnitudes."""
    random = np.random.default_rng(1000 * count + rank)
    return (random.standard_normal(count) * 2.0 ** random.integers(-20, 20, count)).astype(
        np.float32
    )


def ran(size: int, function: Callable[[pycoll.Communicator], Any], transports: str = "shm") -> Any:
    return world_in_threads(size, transports).run(function)


def sums(xs: list[Array], transports: str = "shm", op: str = "sum", **words: Any) -> list[Array]:
    """The all_reduce of ``xs`` on each rank. ``feedbacks``: one for each rank."""
    feedbacks = words.pop("feedbacks", [None] * len(xs))

    def call(comm: pycoll.Communicator) -> Array:
        return comm.all_reduce(xs[comm.rank], op, feedback=feedbacks[comm.rank], **words)

    found: list[Array] = ran(len(xs), call, transports)
    return found


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(("transports", "size"), [
    ("shm", 1), ("shm", 2), ("shm", 3), ("shm", 5), ("tcp", 2), ("tcp", 3)])  # fmt: skip
def test_all_reduce_gives_the_oracles_bits(codec: Any, transports: str, size: int) -> None:
    for count in LENGTHS:
        xs = [values(rank, count) for rank in range(size)]
        for op in ("sum", "avg"):
            expected = coded_sums.all_reduce(codec, xs, op == "avg")
            for found in sums(xs, transports, op, compress=codec):
                assert coded_sums.same(found, expected), (count, op)


def test_segments_of_every_length_and_order() -> None:
    """Many tiles, forwards and backwards, in the simulator and with segments below a block."""
    for seed in range(12):
        size, codec = 2 + seed % 4, CODECS[seed % len(CODECS)]
        count = 3000 + 777 * seed
        xs = [values(rank, count) for rank in range(size)]
        simulation = _core.Simulation(size, seed, "swarm")
        coding = coding_of(codec)
        assert coding is not None
        operations, outs = [], []
        for _ in range(2):
            for rank in range(size):
                algorithm = lookup(Collective.ALL_REDUCE, "direct")
                schedule = algorithm.build(size, only=rank)
                plan = _core.Plan(lower(algorithm.encode(schedule, single_host(size)), rank))
                request = _core.Request(
                    plan, dtype=11, op=0, counts=[count], plan_key=1,
                    segment_bytes=(64, 512, 1024)[seed % 3], codec=coding.native(),
                )  # fmt: skip
                outs.append(np.empty(count, np.float32))
                operations.append(
                    simulation.add(rank, request, _core.view(xs[rank]), _core.view(outs[-1]))
                )
        assert simulation.run(30.0), f"seed {seed}: it hangs"
        for operation in operations:
            simulation.check(operation)
        expected = coded_sums.all_reduce(codec, xs)
        assert all(coded_sums.same(found, expected) for found in outs), f"seed {seed}"


def test_a_lost_rank_is_named_by_all_others() -> None:
    for seed in range(6):
        size = 3 + seed % 3
        simulation = _core.Simulation(size, seed, "plain")
        coding = coding_of(INT8)
        assert coding is not None
        operations = []
        for rank in range(size - 1):
            algorithm = lookup(Collective.ALL_REDUCE, "direct")
            schedule = algorithm.encode(algorithm.build(size, only=rank), single_host(size))
            request = _core.Request(
                _core.Plan(lower(schedule, rank)), dtype=11, op=0, counts=[50_000], plan_key=1,
                codec=coding.native(),
            )  # fmt: skip
            x = values(rank, 50_000)
            operations.append(simulation.add(rank, request, _core.view(x), _core.view(x)))
        simulation.kill(size - 1)
        assert simulation.run(30.0)
        for operation in operations:
            with pytest.raises(PeerLostError) as lost:
                simulation.check(operation)
            assert lost.value.rank == size - 1


def test_nan_and_infinities_reach_all_ranks() -> None:
    for codec in CODECS:
        xs = [values(rank, 500) for rank in range(3)]
        xs[1][7], xs[2][300], xs[0][499] = np.nan, np.inf, -np.inf
        expected = coded_sums.all_reduce(codec, xs)
        assert np.isnan(expected[7]) and not np.isfinite(expected[[300, 499]]).any()
        for found in sums(xs, compress=codec):
            assert coded_sums.same(found, expected), codec


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_a_seed_draws_the_same_in_each_call_and_all_seeds_draw_the_mean(codes: str) -> None:
    """One value rounds alike in all calls with one seed; over seeds its mean is the value."""
    codec = Block(codes, 32, rounding="stochastic")
    top = 127 if codes == "int8" else 7
    x = np.full(32, 0.25 * top, np.float32)
    x[0] = top  # so the scale is 1
    x[1:] = np.floor(x[1:]) + np.float32(0.25)
    calls = 512

    def call(comm: pycoll.Communicator) -> tuple[list[Array], Array]:
        same = [comm.all_reduce(x, "avg", compress=codec) for _ in range(3)]
        drawn = [
            comm.all_reduce(x, "avg", compress=dataclasses.replace(codec, seed=seed))
            for seed in range(calls)
        ]
        return same, np.mean(np.float64(drawn), axis=0)

    for same, mean in ran(2, call):
        assert all(one.tobytes() == same[0].tobytes() for one in same)
        assert not np.allclose(same[0][1:], x[1:]), "a single seed has an error that stays"
        # Each value is rounded twice, with a deviation of at most half a code.
        assert np.abs(mean - x).max() < 6 * 0.71 / calls**0.5


def test_every_way_to_call() -> None:
    """In place, bound, asynchronous, of several axes, of no axis, in lists and in groups."""
    xs = [values(rank, 3 * 700).reshape(3, 700) for rank in range(3)]
    expected = coded_sums.all_reduce(INT8, xs)

    def calls(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank].copy()
        found = [comm.all_reduce(xs[comm.rank], compress=INT8)]
        bound = comm.all_reduce.bind(mine, out=mine, compress=INT8)
        bound()
        found.append(mine.copy())
        mine[:] = xs[comm.rank]
        found.append(bound().copy())
        found.append(comm.all_reduce(xs[comm.rank], compress=INT8, async_op=True).wait())
        out = np.empty_like(mine)
        comm.all_reduce(xs[comm.rank], out=out, compress=INT8, deterministic=True)
        found.append(out)
        with comm.group():
            alone = comm.all_reduce(xs[comm.rank], compress=INT8)
            listed = comm.all_reduce([xs[comm.rank]], compress=INT8)
        return [*found, alone.wait(), listed.wait()[0]]

    for transports in ("shm", "tcp"):
        for found in ran(3, calls, transports):
            assert all(coded_sums.same(one, expected) for one in found), transports


def test_the_arrays_of_a_list_travel_in_one_message() -> None:
    lengths = (0, 5, 300, 70_000, 1)
    xs = [[values(10 * rank + i, count) for i, count in enumerate(lengths)] for rank in range(2)]
    short = [0, 1, 2, 4]
    joined = [np.concatenate([mine[i] for i in short]) for mine in xs]
    message = coded_sums.all_reduce(INT8, joined)
    alone = coded_sums.all_reduce(INT8, [mine[3] for mine in xs])
    for asynchronous in (False, True):

        def call(comm: pycoll.Communicator, asynchronous: bool = asynchronous) -> list[Array]:
            made = comm.all_reduce(xs[comm.rank], compress=INT8, async_op=asynchronous)
            found: list[Array] = made.wait() if asynchronous else made
            return found

        for found in ran(2, call):
            assert coded_sums.same(np.concatenate([found[i] for i in short]), message)
            assert coded_sums.same(found[3], alone)


def test_short_arrays_of_a_group_travel_in_one_message() -> None:
    """Those with equal arguments; a Feedback of each keeps its part of what is left out."""
    lengths = (300, 70_000, 1, 0, 900)
    xs = [[values(10 * rank + i, count) for i, count in enumerate(lengths)] for rank in range(2)]
    short = [0, 2, 3, 4]
    joined = [np.concatenate([mine[i] for i in short]) for mine in xs]
    residuals = [np.zeros(len(joined[0]), np.float32) for _ in xs]
    rounds = [coded_sums.all_reduce(INT8, joined, residuals=residuals) for _ in range(2)]
    first = [np.concatenate([mine[i] for i in (0, 2)]) for mine in xs]
    plain = coded_sums.all_reduce(INT8, first)
    mean = coded_sums.all_reduce(INT8, [mine[4] for mine in xs], True)

    def call(comm: pycoll.Communicator) -> Any:
        mine, feedbacks = xs[comm.rank], [Feedback() for _ in lengths]
        found = []
        for _ in range(2):
            with comm.group():
                works = [
                    comm.all_reduce(one, compress=INT8, feedback=feedback)
                    for one, feedback in zip(mine, feedbacks, strict=True)
                ]
            found.append([work.wait() for work in works])
        assert [one.step for one in feedbacks] == [2] * len(lengths)
        with comm.group():
            alone = [comm.all_reduce(mine[i], compress=INT8) for i in (0, 2)]
            other = comm.all_reduce(mine[4], "avg", compress=INT8)
            # A Feedback serves two calls in turn.
            twice = [comm.all_reduce(mine[0], compress=INT8, feedback=feedbacks[0]) for _ in (0, 1)]
        assert feedbacks[0].step == 4 and not coded_sums.same(twice[0].wait(), twice[1].wait())
        kept = [one.residual for one in feedbacks]
        return found, kept, [one.wait() for one in alone], other.wait()

    for transports in ("shm", "tcp"):
        for rank, (found, kept, alone, other) in enumerate(ran(2, call, transports)):
            for one, expected in zip(found, rounds, strict=True):
                assert coded_sums.same(np.concatenate([one[i] for i in short]), expected)
            rests = np.concatenate([kept[i] for i in short[1:]])
            assert coded_sums.same(rests, residuals[rank][lengths[0] :])
            assert coded_sums.same(np.concatenate(alone), plain)
            assert coded_sums.same(other, mean)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_feedback_sends_later_what_was_left_out(codec: Any, op: str) -> None:
    """The residuals are the oracle's, on the ranks that send a part and on the one that owns it."""
    size, count = 3, 1500
    feedbacks = [Feedback() for _ in range(size)]
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    for step in range(3):
        xs = [values(10 * step + rank, count) for rank in range(size)]
        expected = coded_sums.all_reduce(codec, xs, op == "avg", residuals)
        for found in sums(xs, op=op, compress=codec, feedbacks=feedbacks):
            assert coded_sums.same(found, expected), step
        for feedback, residual in zip(feedbacks, residuals, strict=True):
            assert coded_sums.same(feedback.residual, residual), step
            assert feedback.step == step + 1


#: By codec: the largest number of a code, and the largest one of the drawn values.
GRIDS = [
    (INT8, 127, 120),
    (Block("int8", block=64, rounding="stochastic", seed=7), 127, 120),
    (Block("int4", block=32), 7, 5),
    (Block("int4", block=32, rounding="stochastic", seed=7), 7, 5),
    (FP8(block=64), 448, 384),
    (BF16(), 256, 250),
]


@pytest.mark.parametrize(("codec", "largest", "most"), GRIDS, ids=repr)
def test_nothing_is_lost_with_feedback(codec: Any, largest: int, most: int) -> None:
    """Values k 2^j whose sums are exact: all that was given is in the results or in residuals.

    Each block begins with ``largest`` 2^j on all of 4 ranks, and no other value and residual add up
    to more. So all scales, 2^j of a rank and 4 2^j of the owner, are powers of two.
    """
    ranks, part = 4, 225
    random = np.random.default_rng(3)
    within = np.arange(ranks * part) % part
    block = getattr(codec, "block", 64)
    unit = 2.0 ** (within // block % 5 - 3)
    given, got = np.zeros(ranks * part), np.zeros(ranks * part)
    feedbacks = [Feedback() for _ in range(ranks)]
    for step in range(8):
        drawn = random.integers(-4 * most, 4 * most + 1, (ranks, ranks * part)) / 4
        drawn[:, within % block == 0] = largest
        xs = list((drawn * unit).astype(np.float32))
        given += sum(xs)
        got += sums(xs, compress=codec, feedbacks=feedbacks)[0]
        held = sum(feedback.residual.astype(np.float64) for feedback in feedbacks)
        assert held.any() and np.array_equal(got + held, given), step


def test_signs_lose_nothing_with_feedback() -> None:
    """Blocks of m and -m, and sums of them whose mean magnitude is a whole number of m / 32: each
    step needs 5 bits more, and 4 steps fit into a float32."""
    ranks, block = 3, 32
    random = np.random.default_rng(3)
    count = ranks * 4 * block
    unit = 2.0 ** (np.arange(count) // block % 5 - 2)
    given, got = np.zeros(count), np.zeros(count)
    feedbacks = [Feedback() for _ in range(ranks)]
    for step in range(4):
        xs = list((random.choice((-1, 1), (ranks, count)) * unit).astype(np.float32))
        given += sum(xs)
        got += sums(xs, compress=Sign(block), feedbacks=feedbacks)[0]
        held = sum(feedback.residual.astype(np.float64) for feedback in feedbacks)
        assert held.any() and np.array_equal(got + held, given), step


def test_feedback_of_lists_and_bound_calls_and_momentum() -> None:
    xs = [[values(5 * rank + i, 400 + i) for i in range(2)] for rank in range(2)]

    def call(comm: pycoll.Communicator) -> Any:
        feedback, other = Feedback(), Feedback(momentum=0.5)
        comm.all_reduce(xs[comm.rank], compress=INT8, feedback=feedback)
        bound = comm.all_reduce.bind(xs[comm.rank][0], compress=INT8, feedback=other)
        return feedback.residual, bound().copy(), bound().copy(), other.residual

    joined = [np.concatenate(mine) for mine in xs]
    residuals = [np.zeros(801, np.float32) for _ in range(2)]
    coded_sums.all_reduce(INT8, joined, residuals=residuals)
    own = [np.zeros(400, np.float32) for _ in range(2)]
    first = coded_sums.all_reduce(INT8, [mine[0] for mine in xs], residuals=own)
    sped = [np.float32(0.5) * mine[0] + mine[0] for mine in xs]
    second = coded_sums.all_reduce(INT8, sped, residuals=own)
    for rank, (kept, one, two, last) in enumerate(ran(2, call)):
        assert coded_sums.same(np.concatenate(kept), residuals[rank])
        assert coded_sums.same(one, first) and coded_sums.same(two, second)
        assert coded_sums.same(last, own[rank])


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        (Block("int4", block=64), "codec int4 in blocks of 64"),
        (Block("int8", block=128), "codec int8 in blocks of 128"),
        (Block("int8", block=64, rounding="stochastic"), "rounded by chance"),
        (None, "op sum"),
    ],
    ids=repr,
)
def test_ranks_with_different_codecs_name_the_odd_one(codec: Any, words: str) -> None:
    world = fresh_world(3)
    outcomes = world.outcomes(
        lambda comm: comm.all_reduce(
            np.ones(1000, np.float32), compress=codec if comm.rank == 1 else INT8
        )
    )
    world.close()
    for outcome in outcomes:
        assert isinstance(outcome, MismatchError), outcome
        assert outcome.ranks == (1,)
        assert words in str(outcome) and "codec int8 in blocks of 64" in str(outcome)


def test_seeds_that_differ_are_a_mismatch() -> None:
    world = fresh_world(3)
    outcomes = world.outcomes(
        lambda comm: comm.all_reduce(
            np.ones(10, np.float32),
            compress=Block("int8", rounding="stochastic", seed=5 if comm.rank == 2 else 4),
        )
    )
    world.close()
    assert [getattr(one, "ranks", one) for one in outcomes] == [(2,)] * 3


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"x": np.ones(3, np.int32)}, "x is int32: compress needs float16, bfloat16, float32 or"),
        (
            {"x": np.ones(3, bool)},
            "x is bool: compress needs float16, bfloat16, float32 or",
        ),
        ({"x": np.ones(3, np.complex64)}, "x is complex64: compress needs float16, bfloat16"),
        ({"op": "max"}, "op is 'max': compress needs 'sum' or 'avg'"),
        ({"algorithm": "ring"}, "algorithm 'ring' takes no codec: values would be rounded more"),
        ({"algorithm": "ps"}, "algorithm 'ps' does not exist for all_reduce"),
        ({"compress": "int8"}, "compress is 'int8': expected a codec of pycoll.compress, or None"),
        ({"compress": Sign}, "expected a codec of pycoll.compress, or None"),
        ({"compress": None, "feedback": Feedback()}, "compress is None: pass a codec"),
        ({"feedback": 3}, "feedback is 3: expected a pycoll.compress.Feedback, or None"),
    ],
)
def test_bad_arguments_are_refused_before_any_byte(words: dict[str, Any], text: str) -> None:
    world = fresh_world(2)

    def call(comm: pycoll.Communicator) -> Any:
        given = {"x": np.ones(3, np.float32), "compress": INT8, **words}
        with pytest.raises(InvalidArgumentError) as refused:
            comm.all_reduce(given.pop("x"), given.pop("op", "sum"), **given)
        return str(refused.value)

    assert all(text in found for found in world.run(call))
    world.close()


def test_a_residual_of_another_shape_is_refused() -> None:
    world = fresh_world(2)

    def call(comm: pycoll.Communicator) -> None:
        feedback = Feedback()
        comm.all_reduce(np.ones(5, np.float32), compress=INT8, feedback=feedback)
        with pytest.raises(InvalidArgumentError, match=r"call feedback\.reset\(\)"):
            comm.all_reduce(np.ones(6, np.float32), compress=INT8, feedback=feedback)

    world.run(call)
    world.close()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_other_collectives_give_the_oracles_bits(codec: Any) -> None:
    size = 3
    xs = [values(rank, 60 * 7).reshape(60, 7) for rank in range(size)]
    rows = [31, 0, 29]

    def calls(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank]
        own = mine[: rows[comm.rank]]
        gathered = np.empty((60, 7), np.float32)
        place = sum(rows[: comm.rank])
        part = gathered[place : place + rows[comm.rank]]
        part[:] = own
        comm.all_gather(part, lengths=rows, out=gathered, compress=codec)
        return [
            comm.reduce_scatter(mine, compress=codec),
            comm.reduce_scatter(mine, splits=rows, compress=codec),
            comm.all_gather(own, compress=codec),
            gathered,
            comm.broadcast(mine.copy(), 1, compress=codec),
            comm.broadcast(mine.copy(), 2, compress=codec, async_op=True).wait(),
        ]

    alike = coded_sums.reduce_scatter(codec, xs, [20, 20, 20])
    split = coded_sums.reduce_scatter(codec, xs, rows)
    joined = np.concatenate(
        [
            coded_sums.rounded(codec, x[:length].reshape(-1), rank, rank)[0]
            for rank, (x, length) in enumerate(zip(xs, rows, strict=True))
        ]
    ).reshape(60, 7)
    sent = [coded_sums.rounded(codec, xs[r].reshape(-1), r, 0)[0].reshape(60, 7) for r in (1, 2)]
    for transports in ("shm", "tcp"):
        for rank, found in enumerate(ran(size, calls, transports)):
            for one, expected in zip(
                found, [alike[rank], split[rank], joined, joined, *sent], strict=True
            ):
                assert coded_sums.same(one, expected), (transports, rank)


@pytest.mark.parametrize("algorithm", ["direct", "binomial", "chain"])
def test_the_bits_of_a_broadcast_do_not_depend_on_the_algorithm(algorithm: str) -> None:
    for count in (1, 300, 40_000):
        x = values(1, count)
        expected = coded_sums.rounded(INT8, x, 1, 0)[0]

        def call(comm: pycoll.Communicator, x: Array = x, expected: Array = expected) -> bool:
            mine = x.copy()
            comm.broadcast(mine, 1, out=mine, compress=INT8, algorithm=algorithm)
            return coded_sums.same(mine, expected)

        assert all(ran(5, call))


@pytest.mark.parametrize("algorithm", ["ring", "direct", "recursive_doubling", "bruck"])
def test_the_bits_of_an_all_gather_do_not_depend_on_the_algorithm(algorithm: str) -> None:
    xs = [values(rank, 700) for rank in range(5)]
    expected = np.stack([coded_sums.rounded(INT8, x, r, r)[0] for r, x in enumerate(xs)])

    def call(comm: pycoll.Communicator) -> Array:
        return comm.all_gather(xs[comm.rank][None], compress=INT8, algorithm=algorithm)

    assert all(coded_sums.same(found, expected) for found in ran(5, call))


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1, 1)])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_hosts_encode_what_they_send_to_each_other(codec: Any, hosts: tuple[int, ...]) -> None:
    world = world_in_threads(len(hosts), "shm,tcp", hosts)
    for count in (3, 700, 9001):
        xs = [values(rank, count) for rank in range(len(hosts))]
        expected = coded_sums.all_reduce_between_hosts(codec, xs, hosts)

        def call(comm: pycoll.Communicator, xs: list[Array] = xs) -> list[Array]:
            mine = xs[comm.rank].copy()
            again = comm.all_reduce(mine, compress=codec)
            return [comm.all_reduce(mine, out=mine, compress=codec), again]

        for found in world.run(call):
            assert all(coded_sums.same(one, expected) for one in found), count


def test_all_collectives_between_hosts() -> None:
    hosts = (0, 0, 1, 1)
    xs = [np.full((8, 50), 2.0**rank, np.float32) for rank in range(4)]

    def calls(comm: pycoll.Communicator) -> list[Array]:
        mine = xs[comm.rank]
        return [
            comm.reduce_scatter(mine, compress=INT8),
            comm.all_gather(mine, compress=INT8)[::8],
            comm.broadcast(mine, 3, compress=INT8),
            comm.all_reduce(mine, "avg", compress=INT8, deterministic=True),
        ]

    for found in world_in_threads(4, "shm,tcp", hosts).run(calls):
        assert (found[0] == 15).all() and found[0].shape == (2, 50)
        assert found[1][:, 0].tolist() == [1, 2, 4, 8]
        assert (found[2] == 8).all() and (found[3] == 3.75).all()


def test_feedback_between_hosts_and_of_the_other_collectives() -> None:
    """What was given and not received is in the residuals."""
    hosts = (0, 0, 1, 1)
    random = np.random.default_rng(9)
    xs = [random.integers(-9, 10, (8, 64)).astype(np.float32) for _ in range(4)]

    def calls(comm: pycoll.Communicator) -> list[tuple[Array, Array]]:
        made = []
        for name, words in (
            ("all_reduce", {}),
            ("reduce_scatter", {}),
            ("all_gather", {}),
            ("broadcast", {"root": 2}),
        ):
            feedback = Feedback()
            call = getattr(comm, name)
            call(xs[comm.rank], compress=INT8, feedback=feedback, **words)
            result = call(xs[comm.rank], compress=INT8, feedback=feedback, **words)
            made.append((result, feedback.residual))
        return made

    for world in (world_in_threads(4, "shm,tcp", hosts), world_in_threads(4)):
        found = world.run(calls)
        assert np.abs(found[0][0][0] - sum(xs)).max() < 1
        for _, residual in (found[rank][0] for rank in range(4)):
            assert residual.shape == (8, 64) and np.abs(residual).max() < 1
        scattered = np.concatenate([found[rank][1][0] for rank in range(4)])
        assert np.abs(scattered - sum(xs)).max() < 1
        assert np.abs(found[1][2][0] - np.concatenate(xs)).max() < 0.2
        assert np.abs(found[1][3][0] - xs[2]).max() < 0.2
        assert found[0][3][1] is None and found[2][3][1] is not None


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "broadcast"])
def test_bad_arguments_of_the_other_collectives(name: str) -> None:
    world = fresh_world(2)

    def call(comm: pycoll.Communicator) -> None:
        run = getattr(comm, name)
        with pytest.raises(InvalidArgumentError, match="x is int64: compress needs float16"):
            run(np.ones((2, 2), np.int64), compress=INT8)
        with pytest.raises(InvalidArgumentError, match="feedback is None and compress"):
            run(np.ones((2, 2), np.float32), compress=RandomK(0.5, 1))
        with pytest.raises(InvalidArgumentError, match="compress is None: pass a codec"):
            run(np.ones((2, 2), np.float32), feedback=Feedback())

    world.run(call)
    world.close()


def test_values_on_the_grid_of_a_codec_are_the_plain_collective() -> None:
    """Whole numbers times a power of two, where each block has the largest one of its codec."""
    random = np.random.default_rng(4)
    for codec, largest in ((INT8, 127), (Block("int4", block=32), 7), (BF16(), 127)):
        given = random.integers(-largest, largest + 1, 4 * 640)
        given[::32] = largest
        x = given.astype(np.float32) * np.float32(2.0**-9)
        # One rank has values where the others have zeros, so that sums are on the grid too.
        xs = [np.where(np.arange(len(x)) // 640 == rank, x, np.float32(0)) for rank in range(4)]
        for op, divisor in (("sum", 1), ("avg", 4)):
            for found in sums(xs, op=op, compress=codec):
                assert coded_sums.same(found, x / np.float32(divisor)), (codec, op)
