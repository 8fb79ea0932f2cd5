"""A rank of an elastic job for test_elastic_launch: sums ones over the ranks of each world.

    elastic_rank.py FOLDER

It writes every world that it has been in, and every sum, to FOLDER. At each step it follows the
command in FOLDER/do: "kill N" ends rank N by SIGKILL, "end" ends all. It does the same as
pycoll.torch's elastic.run, without torch, which takes long to import.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import pycoll
from pycoll.bootstrap.rendezvous import elastic_worker

FOLDER = Path(sys.argv[1])


def note(text: str) -> None:
    with (FOLDER / "said").open("a") as file:
        file.write(text + "\n")


def done(comm: pycoll.Communicator) -> bool:
    """One world, until it ends; whether the job has."""
    note(f"{os.getpid()} is {comm.rank} of {comm.size}")
    for step in range(100_000):
        number, _, word = (FOLDER / "do").read_text().partition(" ")
        if word == f"kill {comm.rank}" and comm.size == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        mine = np.array(
            [1, int(elastic_worker.changed()), int(word == "end" and comm.size == int(number))]
        )
        total, changed, end = comm.all_reduce(mine).tolist()
        assert total == comm.size
        if end:
            return True
        if changed:
            return False
        time.sleep(0.01 if step < 1000 else 0.1)
    return False


while True:
    try:
        pycoll.init()
        if done(pycoll.world()):
            break
    except (pycoll.PeerLostError, pycoll.TimeoutError):
        pass
    pycoll.finalize()
