"""Ranks that meet by a function of the program: threads, processes over pipes, over a Manager.

    python -m gathering pipes 4

starts ranks of multiprocessing, which print what they got.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import pycoll

Gather = Callable[[bytes], Any]


class ThreadGather:
    """An engine whose members are threads. ``calls[rank]`` holds what the rank gave."""

    def __init__(self, size: int, limit_s: float = 30.0) -> None:
        self.calls: list[list[bytes]] = [[] for _ in range(size)]
        self._barrier = threading.Barrier(size)
        self._limit_s = limit_s

    def of(self, rank: int) -> Gather:
        def all_gather(blob: bytes) -> list[bytes]:
            self.calls[rank].append(blob)
            number = len(self.calls[rank]) - 1
            self._barrier.wait(self._limit_s)
            return [own[number] for own in self.calls]

        return all_gather

    def end(self) -> None:
        """Let calls that still wait raise."""
        self._barrier.abort()


def work(rank: int, size: int, all_gather: Gather, transports: Sequence[str]) -> None:
    """What each process does."""
    comm = pycoll.init(rank=rank, size=size, all_gather=all_gather, transports=list(transports))
    total = comm.all_reduce(np.arange(5) + rank)
    print(f"{rank} of {comm.size}: {total.tolist()}", flush=True)
    pycoll.finalize()


def over_pipe(rank: int, size: int, pipe: Connection, transports: Sequence[str]) -> None:
    def all_gather(blob: bytes) -> list[bytes]:
        pipe.send_bytes(blob)
        return list(pipe.recv())

    work(rank, size, all_gather, transports)
    pipe.close()


def over_manager(rank: int, size: int, blobs: Any, barrier: Any, transports: Sequence[str]) -> None:
    calls = iter(range(100))

    def all_gather(blob: bytes) -> list[bytes]:
        number = next(calls)
        blobs[number, rank] = blob
        barrier.wait(60)
        return [blobs[number, other] for other in range(size)]

    work(rank, size, all_gather, transports)


def serve(pipes: list[Connection]) -> None:
    """Gather until every member has closed its pipe."""
    while True:
        try:
            blobs = [pipe.recv_bytes() for pipe in pipes]
        except EOFError:
            return
        for pipe in pipes:
            pipe.send(blobs)


def main(kind: str, size: int, transports: Sequence[str]) -> int:
    spawn = multiprocessing.get_context("spawn")
    if kind == "manager":
        with spawn.Manager() as manager:
            blobs, barrier = manager.dict(), manager.Barrier(size)
            each = [(rank, size, blobs, barrier, transports) for rank in range(size)]
            return _run([spawn.Process(target=over_manager, args=args) for args in each])
    pairs = [spawn.Pipe() for _ in range(size)]
    processes = [
        spawn.Process(target=over_pipe, args=(rank, size, theirs, transports))
        for rank, (_, theirs) in enumerate(pairs)
    ]

    def deal() -> None:
        for _, theirs in pairs:
            theirs.close()
        serve([ours for ours, _ in pairs])

    return _run(processes, deal)


def _run(processes: list[Any], meanwhile: Callable[[], None] = lambda: None) -> int:
    for process in processes:
        process.start()
    meanwhile()
    for process in processes:
        process.join(60)
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")))
