"""Collectives of device arrays with codecs; run by test_fake.py and test_gpu.py.

The result has the bits of arrays in host memory. For dense codecs tests/support/coded_sums.py has
them in NumPy, and for TopK the functions below.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import coded_sums
import ml_dtypes
import numpy as np
import pytest
from device_ranks import failure_of, ranks_of, text_of
from harness import ThreadWorld, fresh_world

import pycoll
from pycoll.compress import BF16, FP8, Block, Feedback, PowerSGD, RandomK, Sign, Threshold, TopK
from pycoll.device.sparse_rounds import SparseCall
from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream, array

SIZE = 3
INT8 = Block("int8", block=64)
CODECS = [
    BF16(),
    FP8(block=64),
    INT8,
    Block("int4", block=32),
    Block("int8", block=64, rounding="stochastic", seed=7),
    Block("int4", block=128, rounding="stochastic", seed=2**63),
    Sign(block=64),
]
LENGTHS = [0, 1, 2, 65, 64 * 5, 1501]


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


def values(rank: int, count: int) -> Any:
    """Values of many magnitudes."""
    random = np.random.default_rng(1000 * count + rank)
    return (random.standard_normal(count) * 2.0 ** random.integers(-20, 20, count)).astype(
        np.float32
    )


def given(count: int, first: int = 0) -> list[Any]:
    return [values(first + rank, count) for rank in range(SIZE)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_all_reduce_gives_the_oracles_bits(world: ThreadWorld, codec: Any) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for count in LENGTHS:
            op = "avg" if count % 2 else "sum"
            expected = coded_sums.all_reduce(codec, given(count), op == "avg")
            x = array(values(comm.rank, count))
            made = comm.all_reduce(x, op, compress=codec)
            assert isinstance(made, cuda.Array)
            assert coded_sums.same(made.get(), expected), (count, op)
            assert coded_sums.same(x.get(), values(comm.rank, count))

    ranks_of(world, run)


@pytest.mark.parametrize("size", [1, 2])
def test_other_numbers_of_ranks(size: int) -> None:
    made = fresh_world(size)

    def run(comm: pycoll.Communicator) -> None:
        xs = [values(rank, 700) for rank in range(size)]
        expected = coded_sums.all_reduce(INT8, xs, True)
        found = comm.all_reduce(array(xs[comm.rank]), "avg", compress=INT8)
        assert coded_sums.same(found.get(), expected)

    ranks_of(made, run)
    made.close()


def check_every_way_to_call(
    world: ThreadWorld, codec: Any, xs: list[Any], expected: Any, short: Any
) -> None:
    """In place, of several axes, asynchronous, on a stream, bound, in lists and in groups.

    ``xs``: the arrays of the ranks, whose sum is ``expected``; ``short``: that of given(65).
    """

    def run(comm: pycoll.Communicator) -> None:
        mine = xs[comm.rank]
        found = [comm.all_reduce(array(mine), compress=codec, async_op=True).wait()]
        out = array(np.zeros_like(mine))
        x, other = array(mine), Stream()
        cuda.current().synchronize()  # type: ignore[union-attr] # on_stream made one
        assert comm.all_reduce(x, out=out, compress=codec, stream=other) is out
        other.synchronize()
        found.append(out)
        place = array(mine)
        found.append(comm.all_reduce(place, out=place, compress=codec))
        bound = comm.all_reduce.bind(array(mine), compress=codec)
        found += [bound(), bound()]
        with comm.group():
            alone = comm.all_reduce(array(mine), compress=codec)
            listed = comm.all_reduce([array(mine)], compress=codec)
        found += [alone.wait(), listed.wait()[0]]
        both = [array(mine), array(values(comm.rank, 65))]
        for async_op in (False, True):
            made = comm.all_reduce(both, compress=codec, async_op=async_op)
            first, second = made.wait() if async_op else made
            found.append(first)
            assert coded_sums.same(second.get(), short)
        assert all(coded_sums.same(one.get(), expected) for one in found)

    ranks_of(world, run)


def test_every_way_to_call(world: ThreadWorld) -> None:
    xs = [values(rank, 300).reshape(20, 15) for rank in range(SIZE)]
    sums = [coded_sums.all_reduce(INT8, arrays) for arrays in (xs, given(65))]
    check_every_way_to_call(world, INT8, xs, *sums)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_other_collectives_give_the_bits_of_the_host(world: ThreadWorld, codec: Any) -> None:
    """The parts are equal, as plans cut them, or of any lengths; with residuals, twice."""
    xs = [values(rank, 61 * 7).reshape(61, 7) for rank in range(SIZE)]
    rows = [31, 0, 30]

    def run(comm: pycoll.Communicator) -> None:
        mine = xs[comm.rank]
        calls: list[tuple[Any, Any]] = [
            (mine, comm.reduce_scatter),
            (mine, lambda x, **words: comm.reduce_scatter(x, "avg", rows, **words)),
            (mine[:20], comm.all_gather),
            (mine[: rows[comm.rank]], comm.all_gather),
            (mine, lambda x, **words: comm.broadcast(x, 1, **words)),
            (mine, lambda x, **words: comm.broadcast(x, 2, async_op=True, **words).wait()),
        ]
        for number, (given, call) in enumerate(calls):
            kept, other = Feedback(), Feedback()
            for _ in range(2):
                expected = call(given, compress=codec, feedback=kept)
                found = call(array(given), compress=codec, feedback=other)
                assert coded_sums.same(found.get(), expected), number
            left = other.residual
            assert (left is None) == (kept.residual is None), number
            assert left is None or coded_sums.same(np.asarray(left), kept.residual), number
            plain = call(array(given), compress=codec)
            assert coded_sums.same(plain.get(), call(given, compress=codec)), number

    ranks_of(world, run)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_feedback_stays_on_the_device(world: ThreadWorld, codec: Any) -> None:
    """Its residuals are the oracle's; checkpoints hold them, and a load goes on bit by bit."""
    count, steps = 500, 3
    residuals = [np.zeros(count, np.float32) for _ in range(SIZE)]
    expected, kept = [], []
    for step in range(steps):
        expected.append(coded_sums.all_reduce(codec, given(count, 10 * step), True, residuals))
        kept.append([one.copy() for one in residuals])

    def run(comm: pycoll.Communicator) -> None:
        feedback = Feedback()
        for step in range(steps):
            x = array(values(10 * step + comm.rank, count))
            found = comm.all_reduce(x, "avg", compress=codec, feedback=feedback)
            assert coded_sums.same(np.asarray(feedback.residual), kept[step][comm.rank]), step
            assert coded_sums.same(found.get(), expected[step])
            assert feedback.step == step + 1
            saved = feedback.state_dict()
            assert coded_sums.same(saved["residuals"][0], kept[step][comm.rank])
            feedback = Feedback()
            feedback.load_state_dict(saved)
        assert np.isclose(feedback.norm(), np.linalg.norm(kept[-1][comm.rank].astype(float)))

    ranks_of(world, run)


def test_feedback_of_lists_and_of_host_and_device_in_turn(world: ThreadWorld) -> None:
    residuals = [np.zeros(200, np.float32) for _ in range(SIZE)]
    expected = [
        coded_sums.all_reduce(INT8, given(200, 10 * step), residuals=residuals) for step in range(3)
    ]

    def run(comm: pycoll.Communicator) -> None:
        feedback, other = Feedback(), Feedback()
        for step, right in enumerate(expected):
            x: Any = values(10 * step + comm.rank, 200)
            found = comm.all_reduce(x if step == 1 else array(x), compress=INT8, feedback=feedback)
            assert coded_sums.same(found if step == 1 else found.get(), right), step
            both = [array(x), array(x[:7])]
            work = comm.all_reduce(both, compress=INT8, feedback=other, async_op=True)
            words = {"compress": INT8, "feedback": other}
            again = text_of(functools.partial(comm.all_reduce, both, **words))
            assert "whose Work has not been waited for" in again
            assert coded_sums.same(work.wait()[0].get(), right), step
        assert [one.shape for one in other.residual] == [(200,), (7,)]

    ranks_of(world, run)


def test_lists_of_many_arrays_of_several_types(world: ThreadWorld) -> None:
    """Each array has the bits that it has alone, empty ones and residuals included."""
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16]
    lengths = [(37 * number) % 150 for number in range(40)]

    def run(comm: pycoll.Communicator) -> None:
        feedback, alone = Feedback(momentum=0.5), [Feedback(momentum=0.5) for _ in lengths]
        for step in range(2):
            given = [
                (values(100 * step + 10 * number + comm.rank, count) / 1024).astype(
                    kinds[number % 3]
                )
                for number, count in enumerate(lengths)
            ]
            words = {"compress": INT8, "async_op": bool(step)}
            made = comm.all_reduce([array(x) for x in given], "avg", feedback=feedback, **words)
            found = made.wait() if step else made
            for number, x in enumerate(given):
                one = comm.all_reduce(array(x), "avg", compress=INT8, feedback=alone[number])
                assert coded_sums.same(found[number].get(), one.get(), x.dtype), (step, number)
                left = np.asarray(alone[number].residual)
                assert coded_sums.same(np.asarray(feedback.residual[number]), left), (step, number)

    ranks_of(world, run)


def test_lists_that_differ_are_a_mismatch() -> None:
    made = fresh_world(2)

    def run(comm: pycoll.Communicator) -> None:
        comm.timeout_s = 5
        lengths = (64, 64, 128) if comm.rank else (64, 128, 64)
        given = [array(np.ones(count, np.float32)) for count in lengths]
        error = failure_of(comm.all_reduce(given, compress=INT8, async_op=True).synchronize)
        assert isinstance(error, pycoll.MismatchError), error

    ranks_of(made, run)
    made.close()


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_types_of_16_bits_give_the_bits_of_the_host(world: ThreadWorld, kind: Any) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for codec in CODECS:
            kept, other = Feedback(), Feedback()
            for step in range(2):
                x = (values(10 * step + comm.rank, 301) / 1024).astype(kind)
                expected = comm.all_reduce(x, "avg", compress=codec, feedback=kept)
                found = comm.all_reduce(array(x), "avg", compress=codec, feedback=other)
                assert coded_sums.same(found.get(), expected, kind), (codec, step)
                assert coded_sums.same(np.asarray(other.residual), kept.residual), (codec, step)
            expected = comm.reduce_scatter(x, compress=codec)
            assert coded_sums.same(
                comm.reduce_scatter(array(x), compress=codec).get(), expected, kind
            )
            expected = comm.broadcast(x, 1, compress=codec)
            found = comm.broadcast(array(x), 1, compress=codec)
            assert coded_sums.same(found.get(), expected, kind), codec

    ranks_of(world, run)


def test_momentum_correction_is_that_of_the_host(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        kept, other = Feedback(momentum=0.9), Feedback(momentum=0.9)
        for step in range(3):
            x = values(10 * step + comm.rank, 300)
            expected = comm.all_reduce(x, "avg", compress=INT8, feedback=kept)
            found = comm.all_reduce(array(x), "avg", compress=INT8, feedback=other)
            assert coded_sums.same(found.get(), expected), step
            saved, right = other.state_dict(), kept.state_dict()
            for name in ("residuals", "velocities"):
                assert coded_sums.same(saved[name][0], right[name][0]), (name, step)
            if step:
                other = Feedback(momentum=0.9)
                other.load_state_dict(saved)

    ranks_of(world, run)


def test_calls_are_captured_and_replayed(world: ThreadWorld) -> None:
    """A replay adds what the last one left out; the first call with a Feedback is no replay."""
    residuals = [np.zeros(150, np.float32) for _ in range(SIZE)]
    expected = [coded_sums.all_reduce(INT8, given(150), residuals=residuals) for _ in range(4)]

    def run(comm: pycoll.Communicator) -> None:
        stream, feedback = cuda.current(), Feedback()
        assert stream is not None
        x = array(values(comm.rank, 150))
        out = array(np.zeros(150, np.float32))
        with stream.capture():
            text = text_of(lambda: comm.all_reduce(x, compress=INT8, feedback=feedback))
            assert "make one call with it before the capture begins" in text
        comm.barrier()
        comm.all_reduce(x, out=out, compress=INT8, feedback=feedback)
        assert coded_sums.same(out.get(), expected[0])
        comm.barrier()  # no rank may wait for its device while another one captures
        with stream.capture() as graph:
            comm.all_reduce(x, out=out, compress=INT8, feedback=feedback)
        comm.barrier()
        for step in range(1, 4):
            graph.launch()
            assert coded_sums.same(out.get(), expected[step]), step
        assert coded_sums.same(np.asarray(feedback.residual), residuals[comm.rank])

    ranks_of(world, run)


def test_values_that_are_no_numbers_reach_all_ranks(world: ThreadWorld) -> None:
    xs = given(300)
    xs[1][7], xs[2][200], xs[0][299] = np.nan, np.inf, -np.inf

    def run(comm: pycoll.Communicator) -> None:
        for codec in CODECS:
            expected = coded_sums.all_reduce(codec, xs)
            found = comm.all_reduce(array(xs[comm.rank]), compress=codec)
            assert coded_sums.same(found.get(), expected), codec

    ranks_of(world, run)


def test_bad_arguments_are_told(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(6, np.float32))
        wanted = {
            "x is float64 on a device: compress takes float16, bfloat16 and": lambda: (
                comm.all_reduce(array(np.ones(6)), compress=INT8)
            ),
            "op is 'max': compress needs 'sum' or 'avg'": lambda: comm.all_reduce(
                x, "max", compress=INT8
            ),
            "algorithm 'ring' takes no codec": lambda: comm.all_reduce(
                x, algorithm="ring", compress=INT8
            ),
            "compress is None: pass a codec": lambda: comm.all_reduce(x, feedback=Feedback()),
            "x is on cuda:0: TopK(density=0.5) takes arrays in host memory in all_gather. Take "
            "BF16, FP8, Block or Sign": lambda: comm.all_gather(x, compress=TopK(0.5)),
            "with compress pass lists of one kind": lambda: comm.all_reduce(
                [x, np.ones(3, np.float32)], compress=INT8
            ),
        }
        for text, call in wanted.items():
            assert text in text_of(call)
        feedback = Feedback()
        comm.all_reduce(x, compress=INT8, feedback=feedback)
        other = array(np.ones(7, np.float32))
        text = text_of(lambda: comm.all_reduce(other, compress=INT8, feedback=feedback))
        assert "call feedback.reset()" in text

    ranks_of(world, run)


def test_ranks_with_different_codecs_are_a_mismatch() -> None:
    made = fresh_world(2)

    def run(comm: pycoll.Communicator) -> None:
        comm.timeout_s = 5
        x = array(np.ones(100, np.float32))
        comm.all_reduce(x, compress=INT8)
        codec = Block("int8", block=64, rounding="stochastic") if comm.rank else INT8
        error = failure_of(comm.all_reduce(x, compress=codec, async_op=True).synchronize)
        assert isinstance(error, pycoll.MismatchError), error

    ranks_of(made, run)
    made.close()


def places_of(x: Any, density: float) -> Any:
    """The places that TopK sends, of one axis; of equal magnitudes the first ones."""
    kept = min(x.size, int(np.ceil(density * x.size)))
    keys = np.where(np.isnan(x), 0x7F800001, np.abs(x).view(np.int32)).astype(np.int64)
    return np.sort(np.argsort(-keys, kind="stable")[:kept])


def top_k_sum(xs: list[Any], density: float, averages: bool = False) -> Any:
    """The all_reduce by TopK: what ranks send, added up in rank order."""
    total = np.zeros(xs[0].size, np.float32)
    with np.errstate(all="ignore"):
        for rank, x in enumerate(one.reshape(-1) for one in xs):
            places = places_of(x, density)
            total[places] = x[places] if rank == 0 else total[places] + x[places]
        return (total / np.float32(len(xs)) if averages else total).reshape(xs[0].shape)


def odd_values(rank: int, count: int) -> Any:
    """Few magnitudes, so that most are ties, zeros of both signs, and what is no number."""
    made = np.random.default_rng(count + rank).integers(-2, 3, count).astype(np.float32)
    made[::7] *= -1
    if count > 40:
        made[[3, 11, count // 2]] = np.nan
        made[[5, 17, count - 1]] = np.inf, -np.inf, np.inf
    return made


@pytest.mark.parametrize("draw", [values, odd_values], ids=["many", "odd"])
def test_top_k_gives_the_bits_of_the_host(world: ThreadWorld, draw: Any) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for number, count in enumerate(LENGTHS):
            op = "avg" if count % 2 else "sum"
            for density in (1e-9, 0.01, 0.3, 1.0)[number % 2 :: 2]:
                codec, mine = TopK(density), draw(comm.rank, count)
                x = array(mine)
                found = comm.all_reduce(x, op, compress=codec).get()
                assert coded_sums.same(found, comm.all_reduce(mine, op, compress=codec)), count
                xs = [draw(rank, count) for rank in range(SIZE)]
                right = top_k_sum(xs, density, op == "avg")
                assert coded_sums.same(found, right), (count, density)
                assert coded_sums.same(x.get(), mine)

    ranks_of(world, run)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_top_k_among_other_numbers_of_ranks(size: int) -> None:
    made = fresh_world(size)

    def run(comm: pycoll.Communicator) -> None:
        kept, other = Feedback(), Feedback()
        for step in range(2):
            x = values(10 * step + comm.rank, 700)
            expected = comm.all_reduce(x, "avg", compress=TopK(0.1), feedback=kept)
            found = comm.all_reduce(array(x), "avg", compress=TopK(0.1), feedback=other)
            assert coded_sums.same(found.get(), expected)
            assert coded_sums.same(np.asarray(other.residual), kept.residual)

    ranks_of(made, run)
    made.close()


def test_every_way_to_call_with_top_k(world: ThreadWorld) -> None:
    xs = [values(rank, 300).reshape(20, 15) for rank in range(SIZE)]
    sums = [top_k_sum(arrays, 0.2) for arrays in (xs, given(65))]
    check_every_way_to_call(world, TopK(0.2), xs, *sums)


def test_top_k_of_lists_of_several_types(world: ThreadWorld) -> None:
    """Each array has the bits that it has alone, empty ones and residuals included."""
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16]
    lengths = [(37 * number) % 150 for number in range(35)]
    codec = TopK(0.1)

    def run(comm: pycoll.Communicator) -> None:
        feedback, alone = Feedback(momentum=0.5), [Feedback(momentum=0.5) for _ in lengths]
        for step in range(2):
            given = [
                (values(100 * step + 10 * number + comm.rank, count) / 1024).astype(
                    kinds[number % 3]
                )
                for number, count in enumerate(lengths)
            ]
            arrays = [array(x) for x in given]
            made = comm.all_reduce(arrays, "avg", compress=codec, feedback=feedback)
            for number, x in enumerate(given):
                one = comm.all_reduce(x, "avg", compress=codec, feedback=alone[number])
                assert coded_sums.same(made[number].get(), one, x.dtype), (step, number)
                left = np.asarray(feedback.residual[number])
                assert coded_sums.same(left, alone[number].residual), (step, number)

    ranks_of(world, run)


def test_what_top_k_sends_and_keeps_is_the_gradient(world: ThreadWorld) -> None:
    """Bit for bit; checkpoints hold it, and calls with arrays on the host go on."""
    count, codec = 650, TopK(0.05)

    def run(comm: pycoll.Communicator) -> None:
        feedback, left = Feedback(), np.zeros(count, np.float32)
        for step in range(4):
            xs = [values(10 * step + rank, count) for rank in range(SIZE)]
            wanted = xs[comm.rank] + left
            on_host = step == 2
            x = xs[comm.rank] if on_host else array(xs[comm.rank])
            comm.all_reduce(x, compress=codec, feedback=feedback)
            places, kept = places_of(wanted, 0.05), np.asarray(feedback.residual)
            sent = np.zeros(count, np.float32)
            sent[places] = wanted[places]
            assert len(places) == 33
            assert not kept[places].any()
            assert coded_sums.same(sent + kept, wanted), step
            saved, left = feedback.state_dict(), kept.copy()
            if step == 0:
                feedback = Feedback()
                feedback.load_state_dict(saved)
        assert feedback.step == 4

    ranks_of(world, run)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_momentum_masking_and_warm_up_are_those_of_the_host(
    world: ThreadWorld, kind: Any, masking: bool
) -> None:
    words: dict[str, Any] = {"momentum": 0.9, "masking": masking, "warmup": 2}

    def run(comm: pycoll.Communicator) -> None:
        kept, other = Feedback(**words), Feedback(**words)
        for step in range(4):
            x = (values(10 * step + comm.rank, 520) / 1024).astype(kind)
            expected = comm.all_reduce(x, "avg", compress=TopK(0.01), feedback=kept)
            found = comm.all_reduce(array(x), "avg", compress=TopK(0.01), feedback=other)
            assert coded_sums.same(found.get(), expected, kind), step
            saved, right = other.state_dict(), kept.state_dict()
            for name in ("residuals", "velocities"):
                assert coded_sums.same(saved[name][0], right[name][0]), (name, step)
            if kind is np.float32:  # values of 16 bits may be 0 themselves
                assert np.all(saved["velocities"][0] != 0) != masking

    ranks_of(world, run)


def test_calls_with_top_k_are_captured_and_replayed(world: ThreadWorld) -> None:
    """A replay adds what the last one left out; no graph holds a call of a warm-up."""
    count, codec = 600, TopK(0.1)

    def run(comm: pycoll.Communicator) -> None:
        stream, feedback, kept = cuda.current(), Feedback(warmup=1), Feedback(warmup=1)
        assert stream is not None
        mine = values(comm.rank, count)
        x, out = array(mine), array(np.zeros(count, np.float32))
        with stream.capture():
            text = text_of(lambda: comm.all_reduce(x, compress=codec, feedback=feedback))
            assert "make the calls of the warm-up before the capture begins" in text
        with stream.capture():
            text = text_of(lambda: comm.all_reduce(x, compress=codec, feedback=Feedback()))
            assert "make one call with it before the capture begins" in text
        comm.barrier()
        expected = [comm.all_reduce(mine, compress=codec, feedback=kept) for _ in range(4)]
        comm.all_reduce(x, out=out, compress=codec, feedback=feedback)
        assert coded_sums.same(out.get(), expected[0])
        comm.barrier()  # no rank may wait for its device while another one captures
        with stream.capture() as graph:
            comm.all_reduce(x, out=out, compress=codec, feedback=feedback)
        comm.barrier()
        for step in range(1, 4):
            graph.launch()
            assert coded_sums.same(out.get(), expected[step]), step
        assert coded_sums.same(np.asarray(feedback.residual), kept.residual)

    ranks_of(world, run)


def test_bad_arguments_of_sparse_codecs_are_told(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x, codec = array(np.ones(6, np.float32)), TopK(0.5)
        stays = "x is on cuda:0: this codec takes arrays in host memory. Take BF16, FP8, "
        for other in (Threshold(1), RandomK(0.5, seed=1), PowerSGD(1)):
            words = {"compress": other, "feedback": Feedback()}
            assert stays in text_of(functools.partial(comm.all_reduce, x, **words))
        wanted = {
            "x is float64 on a device: compress takes float16, bfloat16 and": lambda: (
                comm.all_reduce(array(np.ones(6)), compress=codec)
            ),
            "x is int32": lambda: comm.all_reduce(array(np.ones(6, np.int32)), compress=codec),
            "op is 'max': compress needs 'sum' or 'avg'": lambda: comm.all_reduce(
                x, "max", compress=codec
            ),
            "which runs several collectives: leave algorithm out": lambda: comm.all_reduce(
                x, algorithm="ring", compress=codec
            ),
            "feedback is 3: expected a pycoll.compress.Feedback": lambda: comm.all_reduce(
                x, compress=codec, feedback=3
            ),
            "with compress pass lists of one kind": lambda: comm.all_reduce(
                [x, np.ones(3, np.float32)], compress=codec
            ),
            "takes arrays in host memory in reduce_scatter": lambda: comm.reduce_scatter(
                x, compress=codec
            ),
        }
        for text, call in wanted.items():
            assert text in text_of(call)
        feedback = Feedback()
        comm.all_reduce(x, compress=codec, feedback=feedback)
        seven = array(np.ones(7, np.float32))
        text = text_of(lambda: comm.all_reduce(seven, compress=codec, feedback=feedback))
        assert "call feedback.reset()" in text
        work = comm.all_reduce(x, compress=codec, feedback=feedback, async_op=True)
        text = text_of(lambda: comm.all_reduce(x, compress=codec, feedback=feedback))
        assert "whose Work has not been waited for" in text
        work.wait()

    ranks_of(world, run)


def test_ranks_with_different_densities_are_a_mismatch() -> None:
    made = fresh_world(2)

    def run(comm: pycoll.Communicator) -> None:
        comm.timeout_s = 5
        x = array(np.ones(100, np.float32))
        comm.all_reduce(x, compress=TopK(0.5))
        codec = TopK(0.5 + comm.rank / 1000)  # of 100 values they keep 50 and 51
        error = failure_of(comm.all_reduce(x, compress=codec, async_op=True).synchronize)
        assert isinstance(error, pycoll.MismatchError), error

    ranks_of(made, run)
    made.close()


@pytest.fixture
def spoils(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the ``places`` that calls of a thread send, or receive from ``sender`` if it is set."""
    mine, right = threading.local(), SparseCall.rounds

    def rounds(call: SparseCall, ends: Any, scratch: int) -> Any:
        (made,) = right(call, ends, scratch)
        sender = getattr(mine, "sender", None)
        begin = made.source[0] if sender is None else made.target[0] + sender * call.stride
        steps = [
            ("fill", begin + 4 * at, 4, 1, place.to_bytes(4, "little"))
            for at, place in enumerate(getattr(mine, "places", []))
        ]
        if sender is None:
            made.before.extend(steps)
        else:
            made.after[:0] = steps
        return [made]

    monkeypatch.setattr(SparseCall, "rounds", rounds)
    return mine


def refusal_of(comm: pycoll.Communicator, call: Callable[[], Any], sender: int) -> bool:
    """Check what a call raises at last. Return whether kernels of this rank have found it.

    They may have been stopped before, if another rank was first.
    """
    error = failure_of(call)
    assert isinstance(error, pycoll.ReductionError), error
    assert (error.rank, error.ranks) == (sender, (sender,))
    text = f"rank {sender} sent codes of an array on a device that do not decode: their places do "
    assert text in str(error).replace(f" ({comm.names[sender]})", "")
    again = failure_of(lambda: comm.all_reduce(array(np.ones(3, np.float32))))
    assert isinstance(again, pycoll.ReductionError), again
    return "told by" not in str(error)


@pytest.mark.parametrize(
    ("places", "async_op"),
    [([0, 1, 300], False), ([0, 2**32 - 1, 2], True), ([5, 5, 9], True), ([7, 6, 8], False)],
)
def test_wrong_places_of_a_rank_are_found_by_all(
    spoils: Any, places: list[int], async_op: bool
) -> None:
    """The result is NaN, so that it shows also where no call follows."""
    made, codec = fresh_world(2), TopK(0.01)

    def run(comm: pycoll.Communicator) -> bool:
        x, out = array(values(comm.rank, 300)), array(np.zeros(300, np.float32))
        comm.all_reduce(x, compress=codec)
        if comm.rank == 1:
            spoils.places = places
        work = comm.all_reduce(x, "avg", out=out, compress=codec, async_op=async_op)
        is_own = refusal_of(comm, work.synchronize if async_op else comm.barrier, 1)
        assert np.isnan(out.get()).all() or not is_own
        return is_own

    assert any(ranks_of(made, run))
    made.close()


def test_places_that_one_rank_finds_wrong_are_told_to_all(spoils: Any) -> None:
    """Of a list, the array of these places is NaN, and no other one."""
    made, codec = fresh_world(SIZE), TopK(0.1)
    expected = top_k_sum(given(65), 0.1)

    def run(comm: pycoll.Communicator) -> None:
        halves = (values(comm.rank, 30) / 1024).astype(np.float16)
        xs = [array(halves), array(values(comm.rank, 65))]
        comm.all_reduce(xs, compress=codec)
        if comm.rank == 0:
            spoils.sender, spoils.places = 2, [4, 3, 2]
        first, second = comm.all_reduce(xs, compress=codec)
        is_own = refusal_of(comm, comm.barrier, 2)
        if comm.rank == 0:
            assert is_own
            assert np.isnan(first.get()).all()
            assert coded_sums.same(second.get(), expected)
        else:
            assert not is_own

    ranks_of(made, run)
    made.close()


def test_wrong_places_in_a_graph_are_found(spoils: Any) -> None:
    made, codec = fresh_world(2), TopK(0.01)

    def run(comm: pycoll.Communicator) -> bool:
        stream = cuda.current()
        assert stream is not None
        x, out = array(values(comm.rank, 300)), array(np.zeros(300, np.float32))
        comm.all_reduce(x, out=out, compress=codec)
        assert not np.isnan(out.get()).any()
        if comm.rank == 1:
            spoils.places = [5, 5, 9]
        comm.barrier()  # no rank may wait for its device while another one captures
        with stream.capture() as graph:
            comm.all_reduce(x, out=out, compress=codec)
        comm.barrier()
        graph.launch()
        is_own = refusal_of(comm, comm.barrier, 1)
        assert np.isnan(out.get()).all() or not is_own
        return is_own

    assert any(ranks_of(made, run))
    made.close()
