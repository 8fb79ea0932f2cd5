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


def there_and_back(rank: int, send: Callable[[int], Any], recv: Callable[[int], Any]) -> Operation:
    """Return an operation in which rank 0 sends a message to rank 1 and gets another one back."""

    def operation() -> None:
        if rank == 0:
            send(1)
            recv(1)
        elif rank == 1:
            recv(0)
            send(0)

    return operation


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

    def operation(self, collective: str, x: Any, out: Any) -> Operation:
        comm, algorithm = self.comm, self.algorithm
        if algorithm is not None:
            return lambda: comm.all_reduce(x, out=x, algorithm=algorithm)
        at_root = out if self.rank == 0 else None
        equal = [len(x)] * self.size  # the peers' calls assume equal lengths
        return {
            "all_reduce": lambda: comm.all_reduce(x, out=x),
            "reduce": lambda: comm.reduce(x, out=at_root),
            "scan": lambda: comm.scan(x, out=out),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=out),
            "broadcast": lambda: comm.broadcast(x, root=0, out=x),
            "all_gather": lambda: comm.all_gather(x, lengths=equal, out=out),
            "gather": lambda: comm.gather(x, lengths=equal, out=at_root),
            "scatter": lambda: comm.scatter(x, out=out),
            "all_to_all": lambda: comm.all_to_all(x, out=out),
            "barrier": comm.barrier,
            "send_recv": there_and_back(
                self.rank, lambda peer: comm.send(x, peer), lambda peer: comm.recv(out, peer)
            ),
        }[collective]


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
        at_root = out if self.rank == 0 else None
        return {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, x),
            "reduce": lambda: comm.Reduce(x, at_root),
            "scan": lambda: comm.Scan(x, out),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, out),
            "broadcast": lambda: comm.Bcast(x, 0),
            "all_gather": lambda: comm.Allgather(x, out),
            "gather": lambda: comm.Gather(x, at_root),
            "scatter": lambda: comm.Scatter(x if self.rank == 0 else None, out),
            "all_to_all": lambda: comm.Alltoall(x, out),
            "barrier": comm.Barrier,
            "send_recv": there_and_back(
                self.rank, lambda peer: comm.Send(x, peer), lambda peer: comm.Recv(out, peer)
            ),
        }[collective]

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
        return {
            "all_reduce": lambda: dist.all_reduce(source),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source),
            "broadcast": lambda: dist.broadcast(source, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source),
        }[collective]


LIBRARIES = {"pycoll": Pycoll, "openmpi": Mpi, "mpich": Mpi, "gloo": Gloo}


#: Collectives whose input, or output, is a rank's share of the bytes. Of all others both are whole.
SHARE_IN, SHARE_OUT = ("all_gather", "gather"), ("reduce_scatter", "scatter")


def arrays(
    collective: str, nbytes: int, dtype: str, rank: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    kind, values = np.dtype(np.float32), 97
    if dtype != "float32":
        from pycoll.types import DType, numpy_dtype

        kind, values = numpy_dtype(DType[dtype.upper()]), 3  # sums are exact in 8-bit types too
    items = nbytes // kind.itemsize
    count = max(size, items // size * size) if size > 1 else max(1, items)
    x = ((np.arange(count) % values) + rank).astype(kind)
    if collective in SHARE_IN:
        x = x[: count // size].copy()
    return x, np.zeros(count // size if collective in SHARE_OUT else count, kind)


def shared(array: np.ndarray) -> np.ndarray:
    """Copy the array to memory that ranks of this host map, as with init(shared_arrays=True)."""
    import pycoll

    with pycoll.shared_arrays():
        return array.copy()


def tensor(array: np.ndarray) -> Any:
    """Return a torch tensor in the array's memory."""
    import torch

    return torch.from_numpy(array)


#: Functions that move an array to a kind of memory; ordinary arrays stay where they are.
MEMORY = {"ordinary": lambda array: array, "torch": tensor, "shared": shared}


def prepared(
    library: Any, collective: str, nbytes: int, memory: str, dtype: str
) -> tuple[Any, Any]:
    """Make this rank's arrays. ``memory`` is one of MEMORY, "ordinary" for all libraries but
    pycoll; ``dtype`` is a dtype word of pycoll, "float32" for all other libraries."""
    x, out = arrays(collective, nbytes, dtype, library.rank, library.size)
    return MEMORY[memory](x), MEMORY[memory](out)


def expected(collective: str, peers: list[np.ndarray], rank: int) -> np.ndarray:
    """Return the result of a rank that has one, from the inputs of all ranks."""
    size, kind = len(peers), peers[0].dtype

    def share(whole: np.ndarray) -> np.ndarray:
        return whole[len(whole) // size * rank : len(whole) // size * (rank + 1)]

    if collective in ("all_reduce", "reduce", "scan", "reduce_scatter"):
        total = np.sum(peers[: rank + 1] if collective == "scan" else peers, axis=0, dtype=kind)
        return share(total) if collective == "reduce_scatter" else total
    if collective in ("broadcast", "scatter"):
        return share(peers[0]) if collective == "scatter" else peers[0]
    if collective == "send_recv":
        return peers[1 - rank]
    return np.concatenate([share(one) for one in peers] if collective == "all_to_all" else peers)


def check(library: Any, collective: str, nbytes: int, memory: str, dtype: str) -> bool:
    """Return whether one operation gives the exact result."""
    rank, size = library.rank, library.size
    x, out = prepared(library, collective, nbytes, memory, dtype)
    peers = [arrays(collective, nbytes, dtype, one, size)[0] for one in range(size)]
    library.barrier()
    library.operation(collective, x, out)()
    waits = collective == "barrier"
    if waits or rank >= {"reduce": 1, "gather": 1, "send_recv": 2}.get(collective, size):
        return True  # this rank has no result
    result = x if collective in ("all_reduce", "broadcast") else out
    return bool(np.array_equal(np.asarray(result), expected(collective, peers, rank)))


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


def processor_time(operation: Operation, batch: int) -> float:
    """Return the mean seconds of processor time that this process spends on an operation."""
    begin = time.process_time()
    for _ in range(batch):
        operation()
    return (time.process_time() - begin) / batch


#: The measurements that an order may ask for; the check is another order.
MEASURES: dict[str, Callable[[Operation, int], Any]] = {
    "time": time_batch,
    "each": time_each,
    "processor": processor_time,
}


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
        took = MEASURES[order["what"]](operation, order["batch"])
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
