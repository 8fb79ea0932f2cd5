"""Joining failed in processes with more than 1,024 descriptors, since it used select()."""

from __future__ import annotations

import os
import resource

import numpy as np
from harness import world_in_processes

import pycoll


def oversubscribed(comm: pycoll.Communicator) -> int:
    """Joins once more, with descriptors above those that select() takes."""
    pycoll.finalize()  # now: the numbers that it frees must be among those taken
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    taken = [os.dup(0) for _ in range(1100)]
    assert max(taken) >= 1024, f"the limit of descriptors, {soft}, could not be raised to {hard}"
    again = pycoll.init()
    with again.split(again.rank % 2) as half:
        total = int(half.all_reduce(np.array([again.rank]))[0])
    return total + 100 * int(again.all_reduce(np.array([1]))[0])


def test_joining_with_more_than_1024_descriptors() -> None:
    assert world_in_processes(4, oversubscribed, transports="shm,tcp") == [402, 404, 402, 404]
