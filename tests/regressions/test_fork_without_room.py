"""A fork near vm.max_map_count left arrays shared with the child without a word, since failed
system calls were ignored: what the child wrote changed its parent's arrays."""

from __future__ import annotations

import json

import pytest
from harness import python

#: Maps single pages until few mappings are left, and forks by os.fork and by C's fork().
PROGRAM = """
import ctypes, json, multiprocessing, os, sys
import numpy as np, pycoll
limit = int(open("/proc/sys/vm/max_map_count").read())
if limit > 300_000:
    print(json.dumps(None)), sys.exit()
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
world = pycoll.local_world(2, shared_arrays=True)
# Every other one, so that no two become one mapping.
arrays = [np.full(4096, number) for number in range(2000)][::2]
reached = pycoll._core.is_reachable(arrays[9].ctypes.data, arrays[9].nbytes)
pages = limit - sum(1 for _ in open("/proc/self/maps")) - 100
taken = [libc.mmap(None, 4096, 1 + 2 * (n % 2), 0x22, -1, 0) for n in range(pages)]

def write_all():
    for array in arrays:
        array[:] = -1
    os._exit(0)

def fork(way):
    try:
        child = way()
    except OSError as error:
        return str(error)
    if child == 0:
        write_all()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def by_multiprocessing():
    worker = multiprocessing.get_context("fork").Process(target=write_all)
    worker.start()
    return worker.pid

ways = [os.fork, by_multiprocessing, ctypes.PyDLL(None).fork]
full = [fork(way) for way in ways]
for page in taken:
    libc.munmap(ctypes.c_void_p(page), ctypes.c_size_t(4096))
free = [fork(way) for way in (os.fork, ctypes.PyDLL(None).fork)]
changed = sum(not (array == 2 * place).all() for place, array in enumerate(arrays))
print(json.dumps([reached, full, free, changed]))
for comm in world:
    comm.close()
"""


def test_a_fork_that_cannot_isolate_its_child_is_an_error() -> None:
    found = json.loads(python(PROGRAM))
    if found is None:
        pytest.skip("needs sysctl vm.max_map_count of at most 300,000")
    reached, full, free, changed = found
    if not reached:
        pytest.skip("huge pages of shared memory need Linux 6.1 or newer")
    assert changed == 0, f"{changed} of 1000 arrays"
    refused, refused_worker, aborted = full
    for text in (refused, refused_worker):
        assert "this process cannot fork" in text
        assert "vm.max_map_count" in text
    assert aborted == -6  # SIGABRT, before any code of the child
    assert free == [0, 0]


def test_without_shared_arrays_nothing_is_refused() -> None:
    assert python(PROGRAM.replace("shared_arrays=True", "shared_arrays=False")).endswith(
        "[false, [0, 0, 0], [0, 0], 0]"
    )
