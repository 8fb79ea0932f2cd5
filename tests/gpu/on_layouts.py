"""Device arrays that are not in C order, those that export themselves by DLPack alone, and
stand-ins of libraries' arrays; run as on_device.py is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from array_stand_ins import CuPyArray, NumbaArray, cupy_on, installed
from device_ranks import Gate, ranks_of, text_of
from dlpack_arrays import Exported, exposed
from harness import ThreadWorld, fresh_world

import pycoll
from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream, array

SIZE = 3


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


# Arrays that are not in C order


class Strided:
    """Every second column of a device array, in columns from the last to the first."""

    def __init__(self, values: Any, writable: bool = True) -> None:
        self.values = np.asarray(values)
        rows, columns = self.values.shape
        wide = np.full((rows, 2 * columns), 77, self.values.dtype)
        wide[:, ::-2] = self.values
        self.wide = array(wide)

    def __array_namespace__(self) -> Any:
        return self.wide.__array_namespace__()

    @property
    def device(self) -> int:
        return self.wide.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        facts = self.wide.__cuda_array_interface__
        rows, columns = self.values.shape
        item = self.values.dtype.itemsize
        last = (facts["data"][0] + (2 * columns - 1) * item, False)
        strides = (2 * columns * item, -2 * item)
        return {**facts, "data": last, "shape": (rows, columns), "strides": strides}

    def get(self) -> np.ndarray[Any, Any]:
        wide = self.wide.get()
        assert (wide[:, ::2] == 77).all()
        return wide[:, ::-2]


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64", "complex128"])
def test_strided_arrays_are_packed_and_unpacked(world: ThreadWorld, dtype: str) -> None:
    def run(comm: pycoll.Communicator) -> None:
        values = np.arange(15).reshape(5, 3).astype(dtype) + comm.rank
        total = 3 * np.arange(15).reshape(5, 3) + 3
        x, out = Strided(values), Strided(np.zeros((5, 3), dtype))
        np.testing.assert_array_equal(comm.all_reduce(x).get(), total)
        assert comm.all_reduce(x, out=out) is out
        np.testing.assert_array_equal(out.get(), total)
        assert comm.all_reduce(array(values), out=out, async_op=True).wait() is out
        np.testing.assert_array_equal(out.get(), total)
        assert comm.exscan(x, out=out) is out
        expected = comm.exscan(values)
        np.testing.assert_array_equal(out.get(), expected)
        np.testing.assert_array_equal(comm.all_gather(x).get(), comm.all_gather(values))
        both = comm.all_reduce([x, array(values)], out=[x, out])
        np.testing.assert_array_equal(both[0].get(), total)
        np.testing.assert_array_equal(both[1].get(), total)

    ranks_of(world, run)


def test_strided_arrays_on_other_streams_and_in_graphs(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream, other = cuda.current(), Stream()
        assert stream is not None
        x, out = Strided(np.ones((4, 2))), Strided(np.zeros((4, 2)))
        stream.synchronize()
        for number in range(12):
            with other:
                x.wide.put(np.full((4, 4), number))
                out.wide.put(np.full((4, 4), 77))
                other.synchronize()
                before = [array(np.full((4, 2), -3.0)), array(np.full((4, 2), -4.0))]
                del before
                comm.all_reduce(x, out=out, stream=stream)
                # What copies took, if anybody let it go; and what the next copies take.
                array(np.full((4, 2), -1.0)), array(np.full((4, 2), -2.0))
            np.testing.assert_array_equal(out.get(), np.full((4, 2), 3.0 * number))
        comm.barrier()
        with stream.capture(2) as graph:  # copies take new memory, which other modes forbid
            comm.all_reduce(x, out=x)
        x.wide.put(Strided(np.ones((4, 2))).wide.get())
        others = [array(np.full((4, 2), -1.0)) for _ in range(3)]
        for _ in range(3):
            graph.launch()
        for one in others:
            np.testing.assert_array_equal(one.get(), np.full((4, 2), -1.0))
        np.testing.assert_array_equal(x.get(), np.full((4, 2), 27.0))

    ranks_of(world, run)


def test_out_whose_elements_share_memory(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = array(np.ones((2, 3)))

        class Repeated(Strided):
            @property
            def __cuda_array_interface__(self) -> dict[str, Any]:
                facts = x.__cuda_array_interface__
                return {**facts, "strides": (0, 8)}

        assert "has elements that share memory" in text_of(
            lambda: comm.all_reduce(x, out=Repeated(np.ones((2, 3))))
        )
        repeated = comm.all_reduce(Repeated(np.ones((2, 3))))
        np.testing.assert_array_equal(repeated.get(), np.full((2, 3), 3.0))

    ranks_of(world, run)


# DLPack alone


def test_dlpack_alone(world: ThreadWorld) -> None:
    """The exporter is asked to order its stream before the operation's, for x and for out."""

    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        x = Exported(np.arange(6.0).reshape(2, 3) + comm.rank, skip=3)
        out = Exported(np.zeros((2, 3)))
        assert comm.all_reduce(x, out=out, stream=stream) is out
        np.testing.assert_array_equal(out.get(), 3 * np.arange(6).reshape(2, 3) + 3)
        assert x.streams[-1] == out.streams[-1] == stream.number
        made = comm.all_reduce(x, stream=stream)
        assert isinstance(made, Exported)
        np.testing.assert_array_equal(made.get(), 3 * np.arange(6).reshape(2, 3) + 3)
        refused = Exported(np.ones(3), refuses=True)
        assert text_of(lambda: comm.all_reduce(refused, stream=stream)) == (
            "x cannot be exported through DLPack: it is not mine to give"
        )
        assert "the default one" in text_of(lambda: comm.all_reduce(x))

    before = exposed()
    ranks_of(world, run)
    world.run(lambda comm: comm.barrier())
    assert exposed() <= before + 4 * SIZE  # what the last operations of each rank still hold


def test_messages_of_elements_that_do_not_lie_together(world: ThreadWorld) -> None:
    values = np.arange(24.0).reshape(6, 4).T

    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(array(np.ones(1)))
        x, out = Strided(values + comm.rank), Strided(np.zeros((4, 6)))
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with comm.group():
            comm.send(x, right)
            comm.recv(out, left)
        np.testing.assert_array_equal(out.get(), values + left)

    ranks_of(world, run)


# Each library's own notion of a stream


@pytest.mark.parametrize("kind", [CuPyArray, NumbaArray])
def test_operations_run_in_the_stream_that_the_library_says(
    world: ThreadWorld, kind: type[Any]
) -> None:
    """Whatever other stream is current is held up meanwhile."""
    gate = Gate()

    def made(values: Any, stream: Stream) -> Any:
        data = np.asarray(values)
        x = kind(data.shape, data.dtype, stream)
        x.put_in(stream, data)
        return x

    def run(comm: pycoll.Communicator) -> None:
        mine, other = cuda.current(), Stream()
        assert mine is not None
        comm.barrier()
        gate.hold(mine)
        with cupy_on(other):
            x = made(np.arange(30.0) + comm.rank, other)
            total = comm.all_reduce(x)
            assert type(total) is kind
            np.testing.assert_array_equal(total.get_in(other), 3 * np.arange(30.0) + 3)
            assert comm.all_reduce(x, "max", out=total) is total
            work = comm.all_gather(made(np.full(comm.rank + 1, comm.rank), other), async_op=True)
            np.testing.assert_array_equal(work.wait().get_in(other), [0, 1, 1, 2, 2, 2])
            np.testing.assert_array_equal(total.get_in(other), np.arange(30.0) + 2)
        comm.barrier()
        gate.open()
        mine.synchronize()

    with installed():
        ranks_of(world, run)
