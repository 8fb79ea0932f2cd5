"""A rank of bench/join.py that goes on after the last rank has been killed.

join_loss.py FOLDER

The ranks train: each step is an all_reduce of 1 MiB. The last rank writes the time and kills itself
in the middle. Each other rank shrinks, takes the state of the first one, and writes the time at
which its next step has ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import pycoll

STEPS_BEFORE = 20


def main() -> None:
    """Train until one step after the loss."""
    folder = Path(sys.argv[1])
    comm = pycoll.init()
    size = comm.size
    weights = np.zeros(1 << 18, np.float32)
    step = 0
    while comm.size == size:
        if comm.rank == size - 1 and step == STEPS_BEFORE:
            (folder / "killed").write_text(repr(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            weights += comm.all_reduce(np.ones_like(weights)) / comm.size
            step += 1
        except pycoll.PeerLostError:
            comm = comm.shrink()
            step = comm.broadcast_object(step)
            comm.broadcast(weights)
    weights += comm.all_reduce(np.ones_like(weights)) / comm.size
    assert (weights == step + 1).all()
    (folder / f"rank{comm.rank}").write_text(repr(time.monotonic()))


main()
