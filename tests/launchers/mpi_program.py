"""The program of the tests with MPI launchers and Slurm: init(), a sum, one line of output.

Its argument is a text of steps: j joins and sums, e ends pycoll's world, m initializes MPI and sums
over it, f ends MPI, s sleeps for a minute, x ends the process as a failure.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

import numpy as np

import pycoll


def join() -> Any:
    comm = pycoll.init()
    total = comm.all_reduce(np.full(1000, comm.rank + 1.0))
    assert np.all(total == comm.size * (comm.size + 1) / 2), total
    return comm


def main(steps: str) -> None:
    comm: Any = None
    for step in steps:
        if step == "j":
            comm = join()
        elif step == "e":
            pycoll.finalize()
        elif step == "m":
            from mpi4py import MPI

            assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.Get_size() > 1
        elif step == "f":
            MPI.Finalize()
        elif step == "s":
            time.sleep(60)
        elif step == "x":
            sys.exit(3)
    # Launchers may mix lines that are written in pieces.
    line = f"{comm.rank} of {comm.size} on {socket.gethostname()}, {comm.hosts}\n"
    os.write(1, line.encode())


if __name__ == "__main__":
    main(sys.argv[1])
