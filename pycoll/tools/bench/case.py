"""One collective on one message size: its arrays, how to run it, and its expected result."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.tools.bench import inputs
from pycoll.types import OPS, DType, identity_bytes

if TYPE_CHECKING:
    from pycoll.comm.communicator import Communicator
    from pycoll.tools.bench.measuring import BenchOptions

#: Collectives whose message is made of one equal share per rank.
SHARED = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
#: Collectives that can work in place.
IN_PLACE = ("all_reduce", "broadcast", "reduce", "scan")
#: Elements that are compared at once, which bounds the memory of a check.
_CHECK_SLICE = 1 << 20


def elements(collective: str, dtype: str, nbytes: int, size: int) -> int:
    """Return the elements of a message of about ``nbytes``: at least one, and at least one per rank
    and a multiple of ``size`` for a collective of SHARED."""
    count = max(1, nbytes // inputs.array_type(dtype).itemsize)
    return max(size, count // size * size) if collective in SHARED else count


class Case:
    """The arrays of one size, which all algorithms use in turn.

    ``bytes`` is the size as nccl-tests counts it: that of the gathered array for all_gather and
    gather, that of the input for the others. ``count`` is the column of that name in nccl-tests:
    one rank's share for a collective of SHARED, else all elements.
    """

    #: The medium of the messages, if it is not the communicator's transports.
    medium = ""

    def __init__(self, comm: Communicator, options: BenchOptions, nbytes: int) -> None:
        self._comm = comm
        self._options = options
        self._method = getattr(comm, options.collective)
        name, size, rank = options.collective, comm.size, comm.rank
        total = elements(name, options.dtype, nbytes, size)
        self._share = share = total // size
        mine = share if name in ("all_gather", "gather") else total
        result = share if name in ("reduce_scatter", "scatter") else total
        self._kept = inputs.contribution(options.dtype, options.op, rank, size, mine)
        self._source = self._kept.copy()
        self._in_place = options.in_place and name in IN_PLACE
        self._out = self._source if self._in_place else np.zeros(result, self._source.dtype)
        self.count = share if name in SHARED else total
        self.bytes = total * self._source.dtype.itemsize
        self._words: dict[str, Any] = {}
        kind = Collective[name.upper()]
        if kind in REDUCING:
            self._words["op"] = options.op
        if kind in ROOTED:
            self._words["root"] = options.root
        if name in ("all_gather", "gather"):
            self._words["lengths"] = [share] * size
        self._has_result = not (name in ("reduce", "gather") and rank != options.root)
        if self._has_result:
            self._words["out"] = self._out

    def fill(self) -> None:
        """Restore the exact inputs."""
        np.copyto(self._source, self._kept)

    def run(self, algorithm: str | None) -> None:
        """Run one operation."""
        self._method(self._source, algorithm=algorithm, **self._words)

    def time(self, algorithm: str | None, batch: int) -> float:
        """Return the mean seconds of ``batch`` back-to-back operations, which all ranks begin
        together. The barrier at the end keeps a rank that is done from taking a shared core."""
        self._comm.barrier()
        begin = time.perf_counter()
        for _ in range(batch):
            self.run(algorithm)
        end = time.perf_counter()
        self._comm.barrier()
        return (end - begin) / batch

    def limit_share(self, seconds: float) -> float | None:
        """Return the share of the hardware's limit that ``seconds`` reach; None if unknown."""
        return None

    def _clear(self) -> None:
        self._out.view(np.uint8)[:] = 0

    def _result(self) -> inputs.Array:
        return self._out

    def count_wrong(self, algorithm: str | None) -> int:
        """Run once; return how many elements of this rank differ from the exact result."""
        self.fill()
        if not self._in_place:
            self._clear()  # the array may hold the result of another algorithm
        self._comm.barrier()
        self.run(algorithm)
        if not self._has_result:
            return 0
        wrong = 0
        result = self._result()
        for start in range(0, len(result), _CHECK_SLICE):
            piece = result[start : start + _CHECK_SLICE]
            wrong += int(np.count_nonzero(piece != self._expected_values(start, len(piece))))
        return wrong

    def _expected_values(self, start: int, count: int) -> inputs.Array:
        options, size, rank = self._options, self._comm.size, self._comm.rank
        name, dtype, op = options.collective, options.dtype, options.op
        offset = rank * self._share if name in ("reduce_scatter", "scatter") else 0
        if name == "exscan" and rank == 0:
            element = identity_bytes(DType[dtype.upper()], OPS[op])
            return np.frombuffer(element * count, self._out.dtype)
        if Collective[name.upper()] in REDUCING:
            last = {"scan": rank + 1, "exscan": rank}.get(name, size)
            return inputs.reduce_values(dtype, op, range(last), size, offset + start, count)
        if name in ("broadcast", "scatter"):
            line = inputs.values(dtype, op, options.root, size, offset + start, count)
            return line.astype(self._out.dtype)
        return self._blocks(start, start + count)

    def _blocks(self, start: int, end: int) -> inputs.Array:
        """Return elements of a result that holds the blocks of all ranks in rank order."""
        options, size, share = self._options, self._comm.size, self._share
        offset = self._comm.rank * share if options.collective == "all_to_all" else 0
        parts = []
        for peer in range(start // share, (end - 1) // share + 1):
            first, last = max(start, peer * share), min(end, (peer + 1) * share)
            begin = first - peer * share + offset
            parts.append(inputs.values(options.dtype, options.op, peer, size, begin, last - first))
        return np.concatenate(parts).astype(self._out.dtype)
