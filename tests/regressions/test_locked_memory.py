"""The mapping of the arena was as long as memory is twice, and a process that has all of its memory
locked (mlockall) was given pages for all of that and killed."""

from __future__ import annotations

import pytest
from harness import python

#: kB that a rank has in the end, and whether its array lies in the arena. Should the mapping be
#: filled after all, this process is the first that the system kills.
PROGRAM = """
import ctypes, os, sys
import numpy as np, pycoll
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("1000")
def lock(flags):
    if ctypes.CDLL(None).mlockall(flags) != 0:
        print("may not lock"), sys.exit()
when = os.environ["WHEN"]
if when == "before":
    lock(2)  # MCL_FUTURE
world = pycoll.local_world(2, shared_arrays=True)
array, buffer = np.ones(1 << 20), pycoll.empty(1 << 20)
buffer[:] = 1
if when == "after":
    lock(3)  # MCL_CURRENT | MCL_FUTURE
works = [comm.all_reduce(array, async_op=True) for comm in world]
assert all((work.wait() == 2).all() for work in works)
child = os.fork()
if child == 0:
    array[:] = 5
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0 and (array == 1).all()
again = np.ones(1 << 20)
with open("/proc/self/status") as file:
    (rss,) = (line.split()[1] for line in file if line.startswith("VmRSS:"))
print(rss, pycoll._core.is_reachable(again.ctypes.data, again.nbytes))
for comm in world:
    comm.close()
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_locked_process_has_what_it_uses(when: str) -> None:
    said = python(PROGRAM, WHEN=when)
    if said == "may not lock":
        pytest.skip("needs root, or ulimit -l unlimited, to lock memory")
    rss, _ = said.split()
    assert int(rss) < 1 << 20, f"{rss} kB for some arrays of 8 MiB"
