"""Long NumPy arrays of those who share a host: where they lie, and that nobody can tell otherwise.

They are ordinary unless shared_arrays is asked for, in one of three ways. That collectives on both
kinds are right test_shared_kinds shows; here is what an allocator must be, and what a fork must
leave alone.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROOT, python, world_in_processes

import pycoll
from pycoll import _core
from pycoll.cost import model

Comm = pycoll.Communicator
SHARED = {"PYCOLL_SHARED_ARRAYS": "1"}
LONG = 3_000_000
SHORT = _core.SHARED_BYTES_MIN - 8
#: More than would ever be taken at once: an eighth of the machine's memory.
HUGE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8 + 1


def is_reachable(array: Any) -> bool:
    begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
    with open("/proc/self/maps") as file:
        ours = [line.split()[0].split("-") for line in file if "/memfd:pycoll-arrays" in line]
    return any(int(low, 16) <= begin and end <= int(high, 16) for low, high in ours)


def has_huge_pages() -> bool:
    """Whether the kernel gives them to whoever asks for shared memory by MADV_COLLAPSE."""
    return tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1)


pytestmark = pytest.mark.skipif(
    not has_huge_pages(), reason="shared arrays of NumPy need Linux 6.1 or newer"
)


def test_structures_are_laid_out_as_numpy_has_them() -> None:
    folders = (str(ROOT), np.get_include(), sysconfig.get_path("include"))
    done = subprocess.run(
        [
            *("c++", "-std=c++20", "-fsyntax-only", *(f"-I{folder}" for folder in folders)),
            str(Path(__file__).parent / "numpy_layout.cpp"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_cost_model_knows_from_which_size_on() -> None:
    assert _core.SHARED_BYTES_MIN == model.REACHED_BYTES
    assert _core.UNCOPIED_BYTES_MIN == model.UNCOPIED_BYTES


def check_who_is_reachable(comm: Comm) -> None:
    assert is_reachable(np.ones(LONG, np.uint8))
    assert is_reachable(np.zeros(LONG, np.uint8))
    assert is_reachable(np.arange(LONG) + 1)
    assert is_reachable(comm.all_reduce(np.ones(LONG, np.uint8)))
    assert not is_reachable(np.ones(SHORT, np.uint8))
    assert not is_reachable(np.empty(HUGE, np.uint8))
    comm.close()
    assert not is_reachable(np.ones(LONG, np.uint8))


def test_long_arrays_can_be_reached_while_there_is_a_world() -> None:
    world_in_processes(2, check_who_is_reachable, **SHARED)


def check_that_there_is_nobody(comm: Comm) -> None:
    assert not is_reachable(np.ones(LONG, np.uint8)), comm.rank


def test_arrays_are_ordinary_unless_somebody_asks() -> None:
    world_in_processes(2, check_that_there_is_nobody)


def test_who_is_alone_on_a_host_has_ordinary_arrays() -> None:
    world_in_processes(1, check_that_there_is_nobody, **SHARED)
    world_in_processes(2, check_that_there_is_nobody, transports="tcp", **SHARED)


def in_thread() -> bool:
    """Whether an array is reachable that a thread makes which begins now."""
    found = []
    thread = threading.Thread(target=lambda: found.append(is_reachable(np.ones(LONG, np.uint8))))
    thread.start()
    thread.join()
    return found[0]


def test_an_argument_asks_for_all_threads() -> None:
    earlier = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        begun = pool.submit(lambda: earlier.wait(60) and is_reachable(np.ones(LONG, np.uint8)))
        world = pycoll.local_world(2, shared_arrays=True)
        assert is_reachable(np.ones(LONG, np.uint8))
        assert in_thread()
        earlier.set()
        assert begun.result()
    for comm in world:
        comm.close()
    assert not is_reachable(np.ones(LONG, np.uint8))
    assert not in_thread()


def test_an_argument_wins_over_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLL_SHARED_ARRAYS", "1")
    for comm in pycoll.local_world(2, shared_arrays=False):
        assert not is_reachable(np.ones(LONG, np.uint8))
        comm.close()


@pytest.mark.parametrize("odd", [1, "yes"])
def test_an_argument_that_is_no_truth_value_is_refused(odd: Any) -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match=f"shared_arrays is {odd!r}: expected"):
        pycoll.local_world(2, shared_arrays=odd)


def test_a_block_asks_for_its_thread() -> None:
    with pycoll.shared_arrays():
        kept = np.ones(LONG, np.uint8)
        with pycoll.shared_arrays():
            assert is_reachable(np.zeros(LONG, np.uint8))
        assert is_reachable(np.zeros(LONG, np.uint8))
        assert not is_reachable(np.ones(SHORT, np.uint8))
        assert not in_thread()
    assert not is_reachable(np.ones(LONG, np.uint8))
    assert is_reachable(kept)
    assert kept.sum() == LONG
    with pytest.raises(ZeroDivisionError), pycoll.shared_arrays():
        raise ZeroDivisionError
    assert not is_reachable(np.ones(LONG, np.uint8))


def test_a_block_asks_for_its_task() -> None:
    async def inside(entered: asyncio.Event) -> bool:
        with pycoll.shared_arrays():
            entered.set()
            await asyncio.sleep(0)
            return is_reachable(np.ones(LONG, np.uint8))

    async def outside(entered: asyncio.Event) -> bool:
        await entered.wait()
        return is_reachable(np.ones(LONG, np.uint8))

    async def both() -> list[bool]:
        entered = asyncio.Event()
        return await asyncio.gather(inside(entered), outside(entered))

    assert asyncio.run(both()) == [True, False]


def test_an_allocator_of_somebody_else_is_left_alone() -> None:
    """Made of NumPy's own, by another name."""
    said = python(
        """
import ctypes, numpy as np, pycoll
from numpy._core import _multiarray_umath as core
api = ctypes.pythonapi
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
pointers = ctypes.POINTER(ctypes.c_void_p)
table = ctypes.cast(api.PyCapsule_GetPointer(core._ARRAY_API, None), pointers)
take = ctypes.PYFUNCTYPE(ctypes.py_object)(table[305])
put = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[304])
handler = ctypes.create_string_buffer(ctypes.string_at(
    api.PyCapsule_GetPointer(take(), b"mem_handler"), 168), 168)
handler.value = b"somebody"
put(api.PyCapsule_New(ctypes.addressof(handler), b"mem_handler", None))
import warnings
left, right = pycoll.local_world(2, shared_arrays=True)
print(core.get_handler_name(np.ones(1 << 20)))
with warnings.catch_warnings(record=True) as heard, pycoll.shared_arrays():
    print(core.get_handler_name(np.ones(1 << 20)))
print(*(one.category.__name__ + str(one.message) for one in heard))
left.close(), right.close()
"""
    )
    first, second, warning = said.splitlines()
    assert first == second == "somebody"
    assert warning.startswith("RuntimeWarning")
    assert "another allocator of NumPy's, somebody" in warning


def test_arrays_behave_as_ever() -> None:
    world = pycoll.local_world(2, shared_arrays=True)
    random = np.random.default_rng(5)
    for nbytes in (SHORT, SHORT + 8, 200_000, LONG, 2 << 20):
        for _ in range(3):
            words = random.integers(0, 1 << 62, nbytes // 8)
            assert not np.zeros(nbytes // 8, np.int64).any()
            copy = words.copy()
            copy.resize(2 * len(words), refcheck=False)
            assert np.array_equal(copy[: len(words)], words)
            assert not copy[len(words) :].any()
            copy.resize(len(words) // 3, refcheck=False)
            assert np.array_equal(copy, words[: len(words) // 3])
            copy.resize(0, refcheck=False)
            assert np.array_equal(np.sort(words)[[0, -1]], [words.min(), words.max()])
    kept = np.arange(LONG)
    for comm in world:
        comm.close()
    grown = kept.copy()
    kept.resize(2 * LONG, refcheck=False)
    assert np.array_equal(kept[:LONG], grown)


def test_nothing_is_left_when_the_last_world_and_array_have_gone() -> None:
    said = python(
        """
import numpy as np, pycoll
def files():
    with open("/proc/self/maps") as file:
        return len({line.split()[4] for line in file if "/memfd:pycoll" in line})
first, second = (pycoll.local_world(2, shared_arrays=True) for _ in range(2))
array = np.ones(1 << 20)
for comm in first + second:
    assert files()
    comm.close()
del first, second, comm
print(files(), array.sum())
del array
print(files())
"""
    )
    assert said.split() == ["1", "1048576.0", "0"]


def in_child(check: Any, meanwhile: Any) -> bool:
    """Whether ``check()`` holds in a forked child, once ``meanwhile()`` has run in the parent."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(reader, 1)
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    meanwhile()
    os.write(writer, b"x")
    os.close(writer)
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def check_forks(comm: Comm) -> None:
    mine = np.full(LONG, comm.rank + 1.0)
    other = np.full(LONG, 7.0)
    begun = np.full(LONG, comm.rank + 1.0)
    work = comm.all_reduce(begun, out=begun, async_op=True)

    def change() -> None:
        nonlocal other
        mine[:] = 5
        del other

    def check() -> bool:
        seen = mine.min() == mine.max() == comm.rank + 1 and other.min() == other.max() == 7
        mine[:] = 6
        begun[:] = 8
        fresh = np.full(LONG, 2.0)
        return bool(seen and fresh.sum() == 2 * LONG and not is_reachable(fresh))

    assert in_child(check, change)
    assert mine.min() == mine.max() == 5
    work.wait()
    assert begun.min() == begun.max() == comm.size * (comm.size + 1) / 2
    for array in (mine, begun, np.full(LONG, 5.0)):
        array[:] = comm.rank + 1
        assert comm.all_reduce(array, out=array) is array
        assert array.min() == array.max() == comm.size * (comm.size + 1) / 2
    comm.barrier()


def test_a_forked_child_has_copies_and_the_parent_goes_on() -> None:
    for size in (2, 3):
        world_in_processes(size, check_forks, **SHARED)


def check_grandchildren(comm: Comm) -> None:
    mine = np.full(LONG, 3.0)

    def nested() -> bool:
        mine[:] += 1
        below = in_child(lambda: mine.min() == mine.max() == 4, lambda: mine.fill(9))
        return bool(below and mine.min() == mine.max() == 9)

    assert in_child(nested, lambda: mine.fill(1))
    assert mine.min() == mine.max() == 1, comm.rank


def test_a_child_s_child_too() -> None:
    world_in_processes(2, check_grandchildren, **SHARED)
