"""JAX's arrays on a device, as far as a stand-in has them; run as on_device.py is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from device_ranks import ranks_of, text_of
from harness import ThreadWorld, fresh_world
from jax_stand_in import ArrayImpl, Device, install

import pycoll
from pycoll.tools.bench.cuda import Stream, array

install()


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(2)
    yield made
    made.close()


def test_results_are_new_arrays_ready_for_what_comes_next(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        for number in range(5):
            values = np.full((3, 20), number + comm.rank, np.float32)
            made = comm.all_reduce(ArrayImpl(values))
            ArrayImpl(np.full((3, 20), -1, np.float32))  # the same memory, if anybody let it go
            assert isinstance(made, ArrayImpl)
            np.testing.assert_array_equal(made.get(), np.full((3, 20), 2 * number + 1))
        x = ArrayImpl(np.arange(4.0) + comm.rank)
        again = comm.all_reduce(comm.all_reduce(x), "max")
        np.testing.assert_array_equal(again.get(), 2 * np.arange(4.0) + 1)
        np.testing.assert_array_equal(x.get(), np.arange(4.0) + comm.rank)
        gathered = comm.all_gather(ArrayImpl(np.full(2, comm.rank)))
        np.testing.assert_array_equal(gathered.get(), [0, 0, 1, 1])

    ranks_of(world, run)


def test_streams_of_the_caller_and_works(world: ThreadWorld) -> None:
    """What JAX does next waits for either."""

    def run(comm: pycoll.Communicator) -> None:
        other = Stream()
        for number in range(4):
            values = np.full(30, number + comm.rank)
            made = comm.all_reduce(ArrayImpl(values), stream=other)
            np.testing.assert_array_equal(made.get(), np.full(30, 2 * number + 1))
            work = comm.all_reduce(ArrayImpl(values), async_op=True)
            ArrayImpl(np.full(30, -1))  # the same memory, if anybody let it go
            np.testing.assert_array_equal(work.wait().get(), np.full(30, 2 * number + 1))
            work = comm.all_reduce(ArrayImpl(values), async_op=True, stream=other)
            np.testing.assert_array_equal(work.wait().get(), np.full(30, 2 * number + 1))
            both = comm.all_reduce([ArrayImpl(values), ArrayImpl(values[:7])])
            np.testing.assert_array_equal(both[1].get(), np.full(7, 2 * number + 1))

    ranks_of(world, run)


def test_messages_are_sent_from_jax_and_received_elsewhere(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        comm.all_reduce(ArrayImpl(np.ones(1)))
        out = array(np.zeros(5))
        with comm.group():
            comm.send(ArrayImpl(np.full(5, comm.rank + 1.0)), 1 - comm.rank)
            comm.recv(out, 1 - comm.rank)
        np.testing.assert_array_equal(out.get(), np.full(5, 2.0 - comm.rank))

    ranks_of(world, run)


def test_what_cannot_be(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x = ArrayImpl(np.ones(2))
        assert text_of(lambda: comm.all_reduce(x, out=x)) == (
            "out is a JAX array, which is immutable: omit out, the result is a new array"
        )
        both = ArrayImpl(np.ones(2), (Device(0), Device(1)))
        assert text_of(lambda: comm.all_reduce(both)) == (
            "x is a JAX array spread over 2 devices, but a rank has one: pass "
            "x.addressable_data(0), or jax.device_get(x)"
        )
        tpu = ArrayImpl(np.ones(2), (Device(0, "tpu"),))
        assert text_of(lambda: comm.all_reduce(tpu)) == (
            "x is a JAX array on tpu; pycoll takes those on CPU and CUDA devices: pass "
            "jax.device_get(x)"
        )

    ranks_of(world, run)
