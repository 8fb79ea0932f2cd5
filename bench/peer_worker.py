"""One rank of one library under comparison, controlled by bench/jobs.py.

    python peer_worker.py LIBRARY SOCKET

The process connects to the controller's unix socket, sends its rank, size and pid, and then times
the operations that the controller orders. Between orders the controller stops the process, so that
an idle library does not disturb the measured one.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Operation = Callable[[], Any]


class Pycoll:
    def __init__(self) -> None:
        import pycoll

        pycoll.init()
        self.comm = pycoll.world()
        self.rank, self.size = self.comm.rank, self.comm.size
        #: The algorithm of all_reduce; None leaves the choice to pycoll.
        self.algorithm: str | None = None

    def barrier(self) -> None:
        self.comm.barrier()

    def operation(self, collective: str, x: np.ndarray, out: np.ndarray) -> Operation:
        comm, algorithm = self.comm, self.algorithm
        if collective == "all_reduce":
            if algorithm is not None:
                return lambda: comm.all_reduce(x, out=x, algorithm=algorithm)
            return lambda: comm.all_reduce(x, out=x)
        if collective == "broadcast":
            return lambda: comm.broadcast(x, root=0, out=x)
        if collective == "all_gather":
            lengths = [len(x)] * self.size  # the peers' calls assume equal lengths
            return lambda: comm.all_gather(x, lengths=lengths, out=out)
        return lambda: comm.reduce_scatter(x, out=out)


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi = MPI
        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def barrier(self) -> None:
        self.comm.Barrier()

    def operation(self, collective: str, x: np.ndarray, out: np.ndarray) -> Operation:
        comm, mpi = self.comm, self.mpi
        if collective == "all_reduce":
            return lambda: comm.Allreduce(mpi.IN_PLACE, x)
        if collective == "broadcast":
            return lambda: comm.Bcast(x, 0)
        if collective == "all_gather":
            return lambda: comm.Allgather(x, out)
        return lambda: comm.Reduce_scatter_block(x, out)

    def leave(self) -> None:
        """Finalize MPI: without it the launcher reports the process's end as a crash."""
        self.mpi.Finalize()


class Gloo:
    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        self.dist.barrier()

    def operation(self, collective: str, x: np.ndarray, out: np.ndarray) -> Operation:
        dist = self.dist
        source, target = self.torch.from_numpy(x), self.torch.from_numpy(out)
        if collective == "all_reduce":
            return lambda: dist.all_reduce(source)
        if collective == "broadcast":
            return lambda: dist.broadcast(source, 0)
        if collective == "all_gather":
            return lambda: dist.all_gather_into_tensor(target, source)
        return lambda: dist.reduce_scatter_tensor(target, source)


LIBRARIES = {"pycoll": Pycoll, "openmpi": Mpi, "mpich": Mpi, "gloo": Gloo}


def arrays(
    collective: str, nbytes: int, dtype: str, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    kind, values = np.dtype(np.float32), 97
    if dtype != "float32":
        from pycoll.types import DType, numpy_dtype

        kind, values = numpy_dtype(DType[dtype.upper()]), 3  # sums are exact in 8-bit types too
    items = nbytes // kind.itemsize
    count = max(size, items // size * size) if size > 1 else max(1, items)
    total = ((np.arange(count) % values) + rank).astype(kind)
    share = total[: count // size].copy()
    if collective == "all_gather":
        return share, np.zeros(count, kind)
    return total, np.zeros(count // size, kind)


def shared(array: np.ndarray) -> np.ndarray:
    """Copy the array to memory that ranks of this host map, as with init(shared_arrays=True)."""
    import pycoll

    with pycoll.shared_arrays():
        return array.copy()


#: Functions that move an array to a kind of memory; ordinary arrays stay where they are.
MEMORY = {"ordinary": lambda array: array, "shared": shared}


def prepared(
    library: Any, collective: str, nbytes: int, memory: str, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Make this rank's arrays. ``memory`` is one of MEMORY, "ordinary" for all libraries but
    pycoll; ``dtype`` is a dtype word of pycoll, "float32" for all other libraries."""
    x, out = arrays(collective, nbytes, dtype, library.rank, library.size)
    return MEMORY[memory](x), MEMORY[memory](out)


def check(library: Any, collective: str, nbytes: int, memory: str, dtype: str) -> bool:
    """Return whether one operation gives the exact result."""
    size = library.size
    x, out = prepared(library, collective, nbytes, memory, dtype)
    peers = [arrays(collective, nbytes, dtype, rank, size)[0] for rank in range(size)]
    library.barrier()
    library.operation(collective, x, out)()
    if collective == "all_reduce":
        return bool(np.array_equal(x, sum(peers)))
    if collective == "broadcast":
        return bool(np.array_equal(x, peers[0]))
    if collective == "all_gather":
        return bool(np.array_equal(out, np.concatenate(peers)))
    share = len(out) * library.rank
    return bool(np.array_equal(out, sum(peers)[share : share + len(out)]))


def time_batch(operation: Operation, batch: int) -> float:
    """Return the mean seconds of back-to-back operations."""
    begin = time.perf_counter()
    for _ in range(batch):
        operation()
    return (time.perf_counter() - begin) / batch


def time_each(operation: Operation, batch: int) -> list[float]:
    """Return the seconds of every operation, the clock's reading included."""
    clock = time.perf_counter
    marks = [clock()]
    for _ in range(batch):
        operation()
        marks.append(clock())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def serve(library: Any, controller: socket.socket) -> None:
    orders = controller.makefile("r")
    cases: dict[tuple[str, int, str, str, str | None], Operation] = {}

    def answer(value: Any) -> None:
        controller.sendall((json.dumps(value) + "\n").encode())

    answer({"rank": library.rank, "size": library.size, "pid": os.getpid()})
    for line in orders:
        order = json.loads(line)
        words = (order.get("memory", "ordinary"), order.get("dtype", "float32"))
        case = (order["collective"], order["bytes"], *words)
        key = (*case, order.get("algorithm"))
        library.algorithm = key[-1]
        if order["what"] == "check":
            # Keep the arrays of one case only, with all kinds of memory that it is measured in.
            for old in [old for old in cases if old[:2] != key[:2]]:
                del cases[old]
            answer(check(library, *case))
            continue
        if key not in cases:
            x, out = prepared(library, *case)
            # Repeated sums in place would soon be infinite. Emulated processors and the kernels of
            # small floats are slow with infinities.
            x[:] = 0
            cases[key] = library.operation(key[0], x, out)
        operation = cases[key]
        library.barrier()
        for _ in range(order.get("warm", 1)):
            operation()
        library.barrier()
        measure = time_each if order["what"] == "each" else time_batch
        took = measure(operation, order["batch"])
        library.barrier()  # a rank that answers early would take a core from ranks not done yet
        answer(took)


def main() -> None:
    name, path = sys.argv[1:]
    library = LIBRARIES[name]()
    with socket.socket(socket.AF_UNIX) as controller:
        controller.connect(path)
        serve(library, controller)
    if isinstance(library, Mpi):
        library.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
