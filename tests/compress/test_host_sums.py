"""Codecs of several collectives on several hosts: the hosts' sums are encoded, bit by bit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import coded_sums
import numpy as np
import pytest
from harness import world_in_threads

import pycoll
from pycoll.compress import Custom, Feedback, PowerSGD, RandomK, Threshold, TopK
from pycoll.cost import codec_costs
from pycoll.errors import MismatchError, ReductionError

Array = Any
HALVES = Custom(lambda x: x.astype("f2").tobytes(), lambda b, n: np.frombuffer(b, "f2"), "halves")
HOSTS = [(0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1), (0, 0, 1, 1, 2, 2)]
SPARSE = [TopK(0.1), TopK(1.0), Threshold(0.8)]


def values(rank: int, count: int, kind: Any = np.float32) -> Array:
    return np.random.default_rng(100 * count + rank).standard_normal(count).astype(kind)


def halved(x: Array) -> Array:
    return x.astype(np.float16).astype(np.float32)


def add(arrays: Sequence[Array]) -> Array:
    return functools.reduce(operator.add, arrays)


class Oracle:
    """What the ranks of some hosts get, and what they hold back, a zero where they hold nothing."""

    def __init__(self, hosts: Sequence[int], count: int, kind: Any = np.float32) -> None:
        self.members = [[r for r, h in enumerate(hosts) if h == one] for one in sorted(set(hosts))]
        self.shards = coded_sums.cuts(count, min(map(len, self.members)))
        self.held = [np.zeros(count, kind) for _ in hosts]

    def sums(self, xs: Sequence[Array]) -> Array:
        """Each host's sum of a shard plus what its rank held back, by shard and host."""
        return [
            [
                add([xs[rank][shard] for rank in ranks]) + self.held[ranks[number]][shard]
                for ranks in self.members
            ]
            for number, shard in enumerate(self.shards)
        ]

    def places_and_values(
        self, codec: Any, xs: Sequence[Array], mean: bool, step: int = 0
    ) -> Array:
        out = np.zeros_like(xs[0])
        for number, (shard, sums) in enumerate(zip(self.shards, self.sums(xs), strict=True)):
            sent = []
            for ranks, one in zip(self.members, sums, strict=True):
                places = codec.chosen(one, step)
                sent.append(np.zeros_like(one))
                sent[-1][places] = one[places]
                rest = one.copy()
                rest[places] = 0
                self.held[ranks[number]][shard] = rest
            out[shard] = add(sent)
        return out / out.dtype.type(len(xs)) if mean else out

    def halves(self, xs: Sequence[Array], mean: bool) -> Array:
        out = np.zeros_like(xs[0])
        for number, shard in enumerate(self.shards):
            for home, within in enumerate(coded_sums.cuts(out[shard].size, len(self.members))):
                part = slice(shard.start + within.start, shard.start + within.stop)
                total = []
                for host, ranks in enumerate(self.members):
                    one = add([xs[rank][part] for rank in ranks])
                    if host != home:
                        wanted = one + self.held[ranks[number]][part]
                        one = halved(wanted)
                        self.held[ranks[number]][part] = wanted - one
                    total.append(one)
                found = add(total) / np.float32(len(xs)) if mean else add(total)
                held = self.held[self.members[home][number]]
                wanted = found + held[part]
                out[part] = halved(wanted)
                held[part] = wanted - out[part]
        return out


def called(
    hosts: Sequence[int], xs: Sequence[Any], codec: Any, op: str, feedbacks: Any = None
) -> list[Array]:
    def call(comm: pycoll.Communicator) -> Array:
        feedback = None if feedbacks is None else feedbacks[comm.rank]
        return comm.all_reduce(xs[comm.rank], op, compress=codec, feedback=feedback)

    return world_in_threads(len(hosts), "shm,tcp", tuple(hosts)).run(call)


def same(found: Sequence[Array], wanted: Array) -> None:
    for one in found:
        assert one.dtype == wanted.dtype and one.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("codec", SPARSE, ids=repr)
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_the_sums_of_hosts_are_sent(hosts: tuple[int, ...], codec: Any, op: str) -> None:
    for count, kind in ((0, "f4"), (1, "f4"), (7, "f8"), (997, "f4"), (6001, "f8"), (8192, "f4")):
        xs = [values(rank, count, kind) for rank in range(len(hosts))]
        wanted = Oracle(hosts, count, kind).places_and_values(codec, xs, op == "avg")
        same(called(hosts, xs, codec, op), wanted)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_functions_of_a_program_encode_the_sums_of_hosts(hosts: tuple[int, ...], op: str) -> None:
    for count in (0, 1, 7, 997, 4001):
        xs = [values(rank, count) for rank in range(len(hosts))]
        oracle = Oracle(hosts, count)
        feedbacks = [Feedback() for _ in hosts]
        for step in range(3):
            same(called(hosts, xs, HALVES, op, feedbacks), oracle.halves(xs, op == "avg"))
            for feedback, held in zip(feedbacks, oracle.held, strict=True):
                assert feedback.residual.tobytes() == held.tobytes(), step


@pytest.mark.parametrize("codec", [*SPARSE, TopK(0.01)], ids=repr)
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_sent_plus_residual_is_what_was_combined(hosts: tuple[int, ...], codec: Any) -> None:
    """The rank that encodes a shard keeps all of its residual; elsewhere it is 0."""
    count = 1500
    oracle = Oracle(hosts, count)
    feedbacks = [Feedback() for _ in hosts]
    for step in range(4):
        xs = [values(rank + 7 * step, count) for rank in range(len(hosts))]
        wanted = oracle.places_and_values(codec, xs, True, step)
        same(called(hosts, xs, codec, "avg", feedbacks), wanted)
        for feedback, held in zip(feedbacks, oracle.held, strict=True):
            assert feedback.residual.tobytes() == held.tobytes(), step


def test_lists_and_16_bits_between_hosts() -> None:
    hosts, codec = (0, 0, 1, 1), TopK(0.2)
    for kind in (np.float16, np.float32):
        lists = [[values(rank, 5, kind), values(rank + 9, 90, kind)] for rank in range(4)]
        wide = [np.concatenate(one).astype(np.float32) for one in lists]
        wanted = np.zeros(95, np.float32)
        # The first of two shards ends inside the second array.
        for piece in (slice(0, 5), slice(5, 48), slice(48, 95)):
            for ranks in ((0, 1), (2, 3)):
                one = add([wide[rank][piece] for rank in ranks])
                places = codec.chosen(one)
                wanted[piece][places] += one[places]
        for first, second in called(hosts, lists, codec, "sum"):
            assert first.tobytes() == wanted[:5].astype(kind).tobytes()
            assert second.tobytes() == wanted[5:].astype(kind).tobytes()


@pytest.mark.parametrize("codec", [TopK(0.05), Threshold(2.5), HALVES, RandomK(0.1, 3)], ids=repr)
def test_ranks_that_encode_other_values_lose_nothing(codec: Any) -> None:
    """Whole numbers: a Feedback goes from hosts to other hosts, to one host and back."""
    count, random = 301, np.random.default_rng(5)
    print("seed 5")
    feedbacks = [Feedback() for _ in range(4)]
    total = got = np.zeros(count, np.float32)
    for hosts in [(0, 0, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 1, 0), (0, 0, 0, 0)] * 2:
        xs = [random.integers(-9, 10, count).astype(np.float32) for _ in range(4)]
        total = total + sum(xs)
        found = called(hosts, xs, codec, "sum", feedbacks)
        same(found, found[0])
        got = got + found[0]
        held = sum(one.residual for one in feedbacks)
        assert np.array_equal(got + held, total), hosts


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_approximations_of_low_rank_are_alike_on_all_hosts(hosts: tuple[int, ...]) -> None:
    """What a rank gets has the same bits on all ranks, and misses the sum by all residuals."""
    feedbacks = [Feedback() for _ in hosts]
    for step in range(3):
        xs = [values(rank + 7 * step, 24 * 36).reshape(24, 36) for rank in range(len(hosts))]
        before = [one.residual for one in feedbacks] if step else [np.zeros_like(xs[0])]
        wanted = np.sum([*xs, *before], axis=0, dtype=np.float64)
        found = called(hosts, xs, PowerSGD(2), "sum", feedbacks)
        same(found, found[0])
        held = np.sum([one.residual for one in feedbacks], axis=0, dtype=np.float64)
        assert 0 < np.linalg.norm(held) < np.linalg.norm(wanted)
        assert np.allclose(found[0] + held, wanted, atol=1e-4), step


def test_momentum_is_that_of_the_sums_of_hosts() -> None:
    """Whole numbers and halves: with all values sent, the results are those of one velocity."""
    count, random = 64, np.random.default_rng(6)
    feedbacks = [Feedback(momentum=0.5, masking=False) for _ in range(4)]
    velocity = np.zeros(count, np.float32)
    for hosts in [(0, 0, 1, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 0, 0)]:
        xs = [random.integers(-9, 10, count).astype(np.float32) for _ in range(4)]
        velocity = velocity * np.float32(0.5) + sum(xs)
        same(called(hosts, xs, TopK(1.0), "sum", feedbacks), velocity)


def test_what_was_sent_begins_anew_on_the_rank_that_encodes() -> None:
    feedbacks = [Feedback(momentum=0.5) for _ in range(4)]
    xs = [np.float32([1, 9, 1, 9])] * 4
    assert called((0, 0, 1, 1), xs, TopK(0.5), "sum", feedbacks)[0].tolist() == [0, 36, 0, 36]
    held = [one.residual.tolist() for one in feedbacks]
    assert held == [[2, 0, 0, 0], [0, 0, 2, 0]] * 2
    called((0, 0, 1, 1), xs, TopK(0.5), "sum", feedbacks)
    # Velocities: 1 on from the call before where nothing was sent, and 0 where it was.
    assert feedbacks[0].residual.tolist() == [2 + 3, 0, 0, 0]


def test_errors_reach_all_ranks_of_all_hosts() -> None:
    def call(comm: pycoll.Communicator, when: str) -> Any:
        def encoder(x: Array) -> bytes:
            if comm.rank == 1 and when == "encode":
                raise RuntimeError("no codes today")
            return bytes(HALVES.encode(x))

        def decoder(codes: bytes, count: int) -> Array:
            if comm.rank == 1 and when == "decode":
                raise RuntimeError("no values today")
            return np.frombuffer(codes, np.float16)

        feedback = Feedback()
        count = 9 if when == "shape" and comm.rank == 1 else 8
        codec = Custom(encoder, decoder, "fails")
        try:
            comm.all_reduce(np.ones(count, np.float32), compress=codec, feedback=feedback)
        except Exception as error:
            assert feedback.step == 0 and not feedback.residual.any()
            assert comm.all_reduce(1) == 4
            return error
        return None

    world = world_in_threads(4, "shm,tcp", (0, 0, 1, 1))
    for when in ("encode", "decode", "shape"):
        found = world.outcomes(lambda comm, when=when: call(comm, when))
        for rank, error in enumerate(found):
            if rank == 1 and when != "shape":
                assert isinstance(error, RuntimeError), found
            else:
                assert error.rank == 1 and error.operation == "all_reduce", repr(error)
        if when == "decode":
            assert isinstance(found[0], ReductionError)
        if when == "shape":
            assert all(isinstance(one, MismatchError) for one in found)


def test_the_space_behind_heads_is_bounded_for_one_rank_and_for_all() -> None:
    assert [codec_costs.inline_bytes(size) for size in (1, 32, 33, 64)] == [1024, 1024, 992, 512]
    for size in (1, 2, 3, 7, 64, 1000, 100_000):
        space = codec_costs.inline_bytes(size)
        assert space * size <= 32 << 10 and space % codec_costs.NUMBER_BYTES == 0
