"""What ranks of engines do in these tests."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import pycoll


def add(x: float) -> tuple[int, int, list[float]]:
    comm = pycoll.world()
    return comm.rank, comm.size, comm.all_reduce(np.ones(3) * x).tolist()


def place() -> tuple[int, int, float]:
    """The rank, the number of hosts, and a sum over all ranks."""
    comm = pycoll.world()
    return comm.rank, comm.cross_size, float(comm.all_reduce(float(comm.rank)))


def executor() -> int:
    """The process that has started the one which forks Spark's tasks."""
    pycoll.world().barrier()
    with open(f"/proc/{os.getppid()}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def fail(at: int) -> None:
    comm = pycoll.world()
    if comm.rank == at:
        raise KeyError(f"rank {at} has no answer")
    comm.barrier()


def die(at: int) -> None:
    comm = pycoll.world()
    if comm.rank == at:
        os._exit(3)
    comm.barrier()


def caught(call: Any) -> str:
    """The error that the call raises, with its class."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
