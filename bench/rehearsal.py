"""The calls of one rank whose profile guides the optimized build; see optimize.sh.

Ranks with their own core wait by spinning and ranks that share a core by yielding, so optimize.sh
runs both. Long messages hardly matter for the profile: kernels take their time, and every build
compiles the kernels alike.
"""

from __future__ import annotations

import contextlib

import numpy as np

import pycoll

#: Number of calls by the message's size in bytes.
CALLS = {8: 4000, 1 << 10: 4000, 16 << 10: 1000, 256 << 10: 100, 4 << 20: 10}
#: Number of arrays of a group.
MANY = 16


def main() -> None:
    with pycoll.init() as comm:
        for nbytes, times in CALLS.items():
            for kind in (contextlib.nullcontext, pycoll.shared_arrays):
                with kind():
                    rehearse(comm, nbytes, times // 2)


def rehearse(comm: pycoll.Communicator, nbytes: int, times: int) -> None:
    """Make ``times`` calls on one kind of arrays, ordinary or shared; short ones are ordinary."""
    own = np.zeros(nbytes // 4, np.float32)
    every = np.zeros(own.size * comm.size, np.float32)
    bound = comm.all_reduce.bind(own, out=own)
    for number in range(times):
        comm.all_reduce(own, out=own)
        bound()
        if number % 8 == 0:
            others(comm, own, every)


def others(comm: pycoll.Communicator, own: np.ndarray, every: np.ndarray) -> None:
    """Make each of the less frequent calls once."""
    comm.broadcast(own, out=own)
    comm.all_gather(own, out=every)
    comm.reduce_scatter(every, out=own)
    works = [comm.all_reduce(own, out=own, async_op=True) for _ in range(4)]
    for work in works:
        work.wait()
    arrays = [own.copy() for _ in range(MANY)]
    comm.all_reduce(arrays, out=arrays)
    with comm.group():
        for one in arrays:
            comm.all_reduce(one, out=one)
    comm.barrier()


if __name__ == "__main__":
    main()
