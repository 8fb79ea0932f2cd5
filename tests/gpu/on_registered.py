"""Arrays that ranks have registered with each other, whose results land; run as on_device.py is."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import failure_of, on_stream, ranks_of, text_of
from harness import ThreadWorld, fresh_world, world_in_processes

import pycoll
from pycoll.tools.bench import cuda
from pycoll.tools.bench.cuda import Stream, array

SIZE = 3
#: Elements of float32 for which operations run in Simple; two shares, some segments each, and parts
#: that begin at 16 bytes on three ranks.
COUNT = 3 * 8 * 3000


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    made = fresh_world(SIZE)
    yield made
    made.close()


class Part:
    """Elements of an array, in its memory."""

    def __init__(self, whole: cuda.Array, begin: int, count: int) -> None:
        self.whole = whole
        facts = whole.__cuda_array_interface__
        address, is_read_only = facts["data"]
        itemsize = np.dtype(facts["typestr"]).itemsize
        self.__cuda_array_interface__ = {
            **facts,
            "data": (address + begin * itemsize, is_read_only),
            "shape": (count,),
        }


def values_of(comm: pycoll.Communicator, count: int = COUNT) -> Any:
    return np.arange(count, dtype=np.float32) % 1000 + comm.rank


def total_of(count: int = COUNT) -> Any:
    return np.arange(count, dtype=np.float32) % 1000 * SIZE + 3


def test_results_are_those_of_arrays_that_are_not_registered(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        x, out = array(values_of(comm)), array(np.zeros(COUNT, np.float32))
        gathered = array(np.zeros(3 * COUNT, np.float32))
        with comm.register(out, gathered) as held:
            assert held.nbytes == 4 * 4 * COUNT
            for algorithm in ("direct", "ring", "tree"):
                assert comm.all_reduce(x, out=out, algorithm=algorithm) is out
                np.testing.assert_array_equal(out.get(), total_of())
            comm.all_reduce(x, "avg", out=out)
            np.testing.assert_array_equal(out.get(), total_of() / 3)
            comm.broadcast(x, 1, out=out)
            np.testing.assert_array_equal(out.get(), values_of(comm) - comm.rank + 1)
            comm.all_gather(x, out=gathered)
            expected = comm.all_gather(values_of(comm))
            np.testing.assert_array_equal(gathered.get(), expected)
        assert held.nbytes == 0
        held.close()
        comm.all_reduce(x, out=out, algorithm="direct")
        np.testing.assert_array_equal(out.get(), total_of())

    ranks_of(world, run)


def test_in_place_and_parts_of_what_is_registered(world: ThreadWorld) -> None:
    """Also arrays of other lengths, and one rank's result elsewhere."""

    def run(comm: pycoll.Communicator) -> None:
        whole = array(np.zeros(COUNT + 64 * (1 + comm.rank), np.float32))
        with comm.register(whole) as held:
            assert held.nbytes == 4 * (COUNT + 64 * (1 + comm.rank))
            part: Any = Part(whole, 16, COUNT)
            for _ in range(3):
                filled = np.full(whole.shape[0], 7, np.float32)
                filled[16 : 16 + COUNT] = values_of(comm)
                whole.put(filled)
                comm.all_reduce(part, out=part, algorithm="direct")
                got = whole.get()
                np.testing.assert_array_equal(got[16 : 16 + COUNT], total_of())
                assert set(got[:16]) | set(got[16 + COUNT :]) == {7}
            other = array(np.zeros(COUNT, np.float32))
            target = other if comm.rank == 1 else part
            comm.all_reduce(array(values_of(comm)), out=target, algorithm="direct")
            got = other.get() if comm.rank == 1 else whole.get()[16 : 16 + COUNT]
            np.testing.assert_array_equal(got, total_of())

    ranks_of(world, run)


def test_graphs_are_replayed_and_outlive_the_registration(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        x, out = array(values_of(comm)), array(np.zeros(COUNT, np.float32))
        held = comm.register(out)
        comm.all_reduce(x, out=out, algorithm="direct")
        with stream.capture() as graph:
            comm.all_reduce(x, out=out, algorithm="direct")
        for round_ in range(4):
            if round_ == 2:
                held.close()  # the array lives on, as the graph's
            x.put(values_of(comm) + round_)
            graph.launch()
            stream.synchronize()
            np.testing.assert_array_equal(out.get(), total_of() + 3 * round_)

    ranks_of(world, run)


def test_arrays_live_until_nobody_writes_to_them(world: ThreadWorld) -> None:
    """And numbers are used again: there are 64."""

    def run(comm: pycoll.Communicator) -> None:
        stream = cuda.current()
        assert stream is not None
        x = array(np.ones(4, np.float32))
        for _ in range(4):
            outs = [array(np.zeros(8, np.float32)) for _ in range(20)]
            held = comm.register(*outs)
            assert held.nbytes == 20 * 32
            gone = [weakref.ref(out) for out in outs]
            del outs
            gc.collect()
            assert all(one() is not None for one in gone)
            held.close()
            stream.synchronize()
            comm.all_reduce(x)  # looks after what may go
        assert not any(one() for one in gone)

    ranks_of(world, run)


def test_bad_input(world: ThreadWorld) -> None:
    def run(comm: pycoll.Communicator) -> None:
        good = array(np.zeros(8, np.float32))
        text = text_of(lambda: comm.register(good) if comm.rank else comm.register(good, good))
        first = "rank 0" if comm.rank else "rank 1"
        count = 2 if comm.rank else 1
        assert text.startswith(f"register: {first} (")
        assert f"passed {count} arrays on devices, this rank {3 - count}" in text
        assert "all ranks register as many" in text
        with comm.group():
            assert "register inside a group" in text_of(lambda: comm.register(good))
        with comm.register(good, np.zeros(3), array(np.zeros(0))) as held:
            assert held.nbytes == 32
        assert "arrays[1]" in text_of(lambda: comm.register(good, "text"))

    ranks_of(world, run)


def in_process(comm: pycoll.Communicator) -> tuple[int, bool, bool]:
    """Peers by IPC handles."""
    with Stream():
        x = array(values_of(comm))
        out = array(np.zeros(COUNT, np.float32))
        right = True
        nbytes = 0
        for _ in range(3):
            with comm.register(out) as held:
                nbytes += held.nbytes
                comm.all_reduce(x, out=out, algorithm="direct")
                right &= bool((out.get() == np.arange(COUNT) % 1000 * 2 + 1).all())
        comm.all_reduce(x, out=out, algorithm="direct")
        right &= bool((out.get() == np.arange(COUNT) % 1000 * 2 + 1).all())
        return nbytes, right, comm.failure is None


def test_processes() -> None:
    assert world_in_processes(2, in_process) == [(3 * 4 * COUNT, True, True)] * 2


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("nothing", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class Virtual:
    """Elements in memory of cuMemCreate, which other processes map by its descriptor."""

    nbytes, device, shape = 4 * COUNT, 0, (COUNT,)

    def __init__(self) -> None:
        call, size = cuda.driver().call, ctypes.c_size_t(2 << 20)
        handle, address = ctypes.c_uint64(), ctypes.c_uint64()
        device = Location(1, 0)
        wanted = Properties(1, 1, device, None, (ctypes.c_ubyte * 8)())
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(wanted), ctypes.c_uint64(0))
        zero = ctypes.c_uint64(0)
        call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
        access = Access(device, 3)
        call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self.address = address.value
        self.stream = cuda.current()
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": self.shape,
            "typestr": "<f4",
            "data": (self.address, False),
            "strides": None,
        }


def with_descriptors(comm: pycoll.Communicator) -> tuple[int, bool]:
    with Stream():
        x, out = array(values_of(comm)), Virtual()
        got = array(np.zeros(COUNT, np.float32))
        with comm.register(out) as held:
            nbytes = held.nbytes
            target: Any = out
            comm.all_reduce(x, out=target, algorithm="direct", stream=cuda.current())
            cuda.copy(target, got)
            right = bool((got.get() == np.arange(COUNT) % 1000 * 2 + 1).all())
        return nbytes, right


def test_processes_with_memory_of_their_own_addresses() -> None:
    assert world_in_processes(2, with_descriptors) == [(4 * COUNT, True)] * 2


def test_a_failure_keeps_what_is_registered() -> None:
    world = fresh_world(2)

    def run(comm: pycoll.Communicator) -> None:
        out = array(np.zeros(COUNT, np.float32))
        held = comm.register(out)
        x = array(values_of(comm))
        comm.all_reduce(x, out=out, algorithm="direct")
        if comm.rank == 1:
            comm.close()
            return
        error = failure_of(comm.all_reduce(x, out=out, async_op=True).synchronize)
        assert isinstance(error, pycoll.PeerLostError)
        gone = weakref.ref(out)
        held.close()
        del out
        gc.collect()
        assert gone() is not None

    world.run(on_stream(run))
    world.close()
