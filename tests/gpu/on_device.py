"""Device arrays through the public interface; run by test_fake.py and test_gpu.py.

Ranks are threads on one device, each with a stream of its own. Whatever driver is found as
libcuda.so.1 is used: that of the tests, or NVIDIA's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import ranks_of, text_of
from harness import ThreadWorld, fresh_world
from oracle import DTYPES, inputs, ops_for

import pycoll
from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream, array

SIZE = 3


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


# Results


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_gives_the_bits_of_the_host(world: ThreadWorld, dtype: str) -> None:
    ops = ops_for(dtype)
    rows = {op: inputs(dtype, op, SIZE, 33, 7) for op in ops}

    def reduce(comm: pycoll.Communicator) -> None:
        made = {op: comm.all_reduce(array(rows[op][comm.rank]), op) for op in ops}
        for op, result in made.items():
            assert isinstance(result, cuda.Array)
            expected = comm.all_reduce(rows[op][comm.rank], op)
            assert result.get().tobytes() == expected.tobytes(), op

    ranks_of(world, reduce)


def test_every_collective(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        mine = np.arange(12.0).reshape(6, 2) + 100 * comm.rank
        rows = mine[: comm.rank + 1]

        def same(call: Callable[[Any], Any], values: Any) -> None:
            made, expected = call(array(values)), call(values)
            if expected is None:
                assert made is None
            else:
                np.testing.assert_array_equal(made.get(), expected)

        same(lambda x: comm.broadcast(x, 1), mine)
        same(lambda x: comm.reduce(x, 2), mine)
        same(comm.reduce_scatter, mine)
        same(comm.all_gather, rows)
        same(lambda x: comm.all_gather(x, lengths=[1, 2, 3]), rows)
        same(lambda x: comm.gather(x, 1), rows)
        same(lambda x: comm.scatter(x, 1), mine)
        same(comm.all_to_all, mine)
        same(comm.scan, mine)
        same(lambda x: comm.exscan(x, "max"), mine)
        same(lambda x: comm.exscan(x, "prod", async_op=True).wait(), mine.astype(np.int8))
        same(lambda x: comm.all_to_all(x, [1, 2, 3]), mine)
        same(comm.all_reduce, np.empty((0, 3)))

    ranks_of(world, run)


def test_every_algorithm_and_long_messages(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        values = np.arange(700, dtype=np.int32) * (comm.rank + 1)
        for algorithm in ("ring", "tree", "direct", "chain", "one_shot"):
            made = comm.all_reduce(array(values), algorithm=algorithm)
            np.testing.assert_array_equal(made.get(), np.arange(700) * 6)
        values = np.arange(60_000, dtype=np.float32) + comm.rank
        made = comm.all_reduce(array(values), "avg", algorithm="ring")
        np.testing.assert_array_equal(made.get(), np.arange(60_000) + 1)

    ranks_of(world, run)


def test_lists_and_groups(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        both = comm.all_reduce([array(np.ones(3)), array(np.arange(5))])
        np.testing.assert_array_equal(both[0].get(), [3, 3, 3])
        np.testing.assert_array_equal(both[1].get(), np.arange(5) * 3)
        with comm.group():
            first = comm.all_reduce(array(np.ones(4)))
            second = comm.broadcast(array(np.full(2, comm.rank)), 2)
        np.testing.assert_array_equal(first.wait().get(), [3, 3, 3, 3])
        np.testing.assert_array_equal(second.wait().get(), [2, 2])

    ranks_of(world, run)


def test_many_arrays_are_one_launch(world: ThreadWorld) -> None:
    """Also in place, of no elements, on several streams, and more than one launch takes."""

    def run(comm: pycoll.Communicator) -> None:
        lengths = [5, 0, 1, 33, 300, 7]
        values = [np.arange(n, dtype=np.float32) + comm.rank for n in lengths]
        expected = [np.arange(n) * 3.0 + 3 for n in lengths]
        numbers = [np.arange(n, dtype=np.int8) for n in (3, 9)]
        arrays = [array(one) for one in [*values, *numbers]]
        for async_op in (False, True):
            made = comm.all_reduce(arrays, async_op=async_op)
            for result, right in zip(made.wait() if async_op else made, expected, strict=False):
                np.testing.assert_array_equal(result.get(), right)
        np.testing.assert_array_equal(made.synchronize(30)[7].get(), np.arange(9) * 3)
        assert comm.all_reduce(arrays, out=arrays) is arrays
        other = Stream()
        cuda.current().synchronize()  # type: ignore[union-attr] # on_stream made one
        with comm.group():
            first = comm.all_reduce(arrays[3], out=arrays[3])
            second = comm.all_reduce(arrays[4], stream=other)
            third = comm.all_reduce(arrays[0], "max")
            last = comm.all_reduce([arrays[5], arrays[2]])
        assert first.wait() is arrays[3]
        np.testing.assert_array_equal(arrays[3].get(), expected[3] * 3)
        with other:
            np.testing.assert_array_equal(second.wait().get(), expected[4] * 3)
        np.testing.assert_array_equal(third.wait().get(), expected[0])
        np.testing.assert_array_equal(last.wait()[1].get(), expected[2] * 3)
        many = comm.all_reduce([array(np.full(2, n)) for n in range(300)], "avg")
        assert [int(one.get()[1]) for one in many] == list(range(300))
        nothing = comm.all_reduce([array(np.ones(0)), array(np.ones((2, 0)))])
        assert [one.shape for one in nothing] == [(0,), (2, 0)]
        mixed = comm.all_reduce([np.ones(2), array(np.ones(3)), np.ones(4)])
        np.testing.assert_array_equal(mixed[1].get(), np.full(3, 3.0))
        np.testing.assert_array_equal(mixed[2], np.full(4, 3.0))

    ranks_of(world, run)


def test_lists_are_captured_and_replayed(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        arrays = [array(np.full(n, 1.0)) for n in (3, 40, 5)]
        comm.all_reduce(arrays, out=arrays)
        with stream.capture() as graph:
            comm.all_reduce(arrays, out=arrays)
            comm.all_reduce(arrays, out=arrays, async_op=True).wait()
        for _ in range(2):
            graph.launch()
        for one in arrays:
            np.testing.assert_array_equal(one.get(), np.full(one.shape, 3.0**5))

    ranks_of(world, run)


# Streams


def test_results_in_place_come_behind_each_other(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(50))
        for _ in range(6):
            assert comm.all_reduce(x, out=x) is x
        np.testing.assert_array_equal(x.get(), np.full(50, 3.0**6))

    ranks_of(world, run)


def test_memory_that_is_let_go_is_not_used_while_it_is_read(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        for number in range(8):
            values = np.full(40, number + comm.rank)
            works = [comm.all_reduce(array(values), async_op=True)]
            array(np.full(40, -1)), array(np.full(40, -2))  # the same memory, if anybody let it go
            made = works.pop().wait()
            np.testing.assert_array_equal(made.get(), np.full(40, 3 * number + 3))
            x = array(values)
            cuda.current().synchronize()  # type: ignore[union-attr] # on_stream made one
            made = comm.all_reduce(x, stream=other)
            del x
            array(np.full(40, -1))
            with other:
                np.testing.assert_array_equal(made.get(), np.full(40, 3 * number + 3))

    ranks_of(world, run)


def test_a_work_is_waited_for_by_streams_and_by_hosts(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        works = [comm.all_reduce(array(np.full(9, n)), async_op=True) for n in range(5)]
        for number, work in enumerate(works):
            made = work.wait() if number % 2 else work.synchronize(30)
            np.testing.assert_array_equal(made.get(), np.full(9, 3 * number))
            assert work.done()

    ranks_of(world, run)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_graphs_are_replayed_between_calls(world: ThreadWorld, mode: int) -> None:
    """Captured in each of the driver's modes: global, of the thread, relaxed."""

    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        x, y = array(np.ones(20)), array(np.zeros(20))
        pending = comm.all_reduce(array(np.ones(20)), async_op=True)
        comm.barrier()
        with stream.capture(mode) as graph:
            assert pending.done() in (False, True)
            comm.all_reduce(x, out=x)
            comm.all_reduce(x, out=y, async_op=True).wait()
            comm.broadcast(y, comm.size - 1, out=y)
        comm.barrier()  # a global capture of one thread is in the way of all
        np.testing.assert_array_equal(pending.wait().get(), np.full(20, 3.0))
        factor = 1.0
        for _ in range(4):
            graph.launch()
            comm.all_reduce(x, out=x)
            factor *= 9
        np.testing.assert_array_equal(x.get(), np.full(20, factor))
        np.testing.assert_array_equal(y.get(), np.full(20, factor))

    ranks_of(world, run)


def test_what_cannot_be_captured_is_told(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        x = array(np.ones(3))
        y, other = array(np.ones(3)), Stream()

        def two_streams() -> None:
            with comm.group():
                comm.all_reduce(y, out=y, stream=other)
                comm.all_reduce(x, out=x)

        before = comm.all_reduce(x, async_op=True)
        with stream.capture():
            text = text_of(before.wait)
            assert "began before the capture" in text
            assert text_of(two_streams) == (
                "the stream is being captured, and another stream cannot wait for it: in a "
                "capture, pass arrays of the captured stream, and no other stream="
            )
            inside = comm.all_reduce(x, out=x, async_op=True)
            inside.wait()
            assert "part of a graph" in text_of(inside.synchronize)
        before.wait()
        assert "belongs into the capture" in text_of(inside.wait)

    ranks_of(world, run)


# Bad input


def test_arrays_that_do_not_belong_together(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        assert text_of(lambda: comm.all_reduce(x, out=np.ones(4))) == (
            "out is on cpu, but x is on cuda:0: pass both on one device"
        )
        assert text_of(lambda: comm.all_reduce(np.ones(4), out=x)) == (
            "out is on cuda:0, but x is on cpu: pass both on one device"
        )
        if cuda.driver().count() > 1:
            with Stream(1):
                there = array(np.ones(4))
            assert text_of(lambda: comm.all_reduce(x, out=there)) == (
                "out is on cuda:1, but x is on cuda:0: pass both on one device"
            )
            assert text_of(lambda: comm.all_reduce(there)) == (
                "x is on cuda:1, but this rank uses cuda:0: a communicator stays with the device "
                "of its first device array"
            )
            assert "x is on cuda:1, but this rank uses cuda:0" in text_of(
                lambda: comm.all_reduce([x, there])
            )
            assert "x is on cuda:1, but this rank uses cuda:0" in text_of(
                lambda: comm.send(there, 0)
            )
        for call in (
            lambda: comm.broadcast(np.ones(4), 0, out=x),
            lambda: comm.reduce(np.ones(4), 0, out=x),
        ):
            assert "out is on cuda:0, but x is on cpu: pass both on one device" in text_of(call)
        comm.all_reduce(x, out=x)
        np.testing.assert_array_equal(x.get(), np.full(4, 3.0))

    ranks_of(world, run)


def test_what_the_root_of_a_scatter_refuses_is_told_to_all(world: ThreadWorld) -> None:
    """None launches anything that would wait for the root."""

    def run(comm: pycoll.Communicator) -> None:
        x = array(np.arange(2.0 * comm.size))
        for words in ({"out": np.zeros(2)}, {"stream": "soon"}, {"out": array(np.zeros(3))}):
            text = text_of(
                lambda words=words: comm.scatter(x, 1, **(words if comm.rank == 1 else {}))
            )
            assert ("rank 1 " in text and "has refused" in text) == (comm.rank != 1)
            comm.barrier()  # of several refusals that nobody heard, only the last is told
        expected = [2.0 * comm.rank, 2.0 * comm.rank + 1]
        np.testing.assert_array_equal(comm.scatter(x, 1).get(), expected)

    ranks_of(world, run)


def test_streams_that_cannot_be_used(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        comm.all_reduce(x, out=x)
        assert text_of(lambda: comm.all_reduce(np.ones(4), stream=Stream())) == (
            "stream is for device arrays, but x is in host memory: omit it"
        )
        assert "expected a stream of torch" in text_of(lambda: comm.all_reduce(x, stream="main"))
        assert "give each thread a stream of its own" in text_of(
            lambda: comm.all_reduce(x, stream=0)
        )
        if cuda.driver().count() > 1:
            assert text_of(lambda: comm.all_reduce(x, stream=Stream(1))) == (
                "stream is of another device than this rank's, which is device 0: pass a stream of "
                "that device"
            )

    ranks_of(world, run)


def test_memory_that_is_gone(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        gone = array(np.ones(1 << 20))
        cuda.current().synchronize()  # type: ignore[union-attr] # on_stream made one
        comm.barrier()
        gone.free()
        assert text_of(lambda: comm.all_reduce(gone)) == (
            "x is memory that the CUDA driver does not know: was it freed?"
        )

    ranks_of(world, run)


def test_what_runs_on_the_host_only(world: ThreadWorld) -> None:
    pycoll.register_op("on_device_test", lambda a, b: np.add(a, b, out=b))

    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones(4))
        for call in (
            lambda: comm.all_reduce(x, "on_device_test"),
            lambda: comm.reduce(x, 0, "on_device_test"),
            lambda: comm.all_reduce([x, x], "on_device_test"),
            lambda: comm.scan(x, "on_device_test"),
        ):
            assert "a reduction registered by the user runs on the host only" in text_of(call)
        pairs = array(np.ones((4, 2)))
        for call in (
            lambda: comm.all_reduce(pairs, "maxloc"),
            lambda: comm.all_reduce([pairs, pairs], "minloc"),
        ):
            assert "is for arrays in host memory: copy the pairs there" in text_of(call)
        np.testing.assert_array_equal(comm.all_reduce(x).get(), np.full(4, 3.0))

    ranks_of(world, run)
