"""Short exchanges of numbers and bytes between all ranks, at the beginning of calls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pycoll import _core
from pycoll.comm.operations import CallCompiler, salt
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES, DType

if TYPE_CHECKING:
    from array import array

    from pycoll.comm.plans import CallPlan

    _Memory = bytearray | memoryview | array[int]


class _Told(threading.local):
    """The outputs of the exchanges of a call that native code has begun on this thread."""

    outputs: list[bytes] | None = None


class Exchanges:
    """Internal exchanges, in host memory only. All ranks call each method at the same time.

    They avoid NumPy arrays, whose first view is slow. Each exchange is reported to native code,
    which runs it itself when it repeats the call.
    """

    def __init__(self, engine: _core.Communicator, compiler: CallCompiler) -> None:
        self._engine = engine
        self._compiler = compiler
        self._told = _Told()
        #: The value of ``engine.calls()`` after the newest exchange.
        self.newest = -1

    @property
    def quick_algorithm(self) -> str | None:
        """The algorithm for exchanges that happen once: on one host "direct", which takes one step.

        The prediction of all algorithms would take longer than such an exchange.
        """
        return "direct" if len(self._compiler.topology.hosts) == 1 else None

    def resume(self, told: list[bytes], call: Callable[[], Any]) -> Any:
        """Return ``call()``. Native code has run its first exchanges, with these outputs."""
        before, self._told.outputs = self._told.outputs, told
        try:
            return call()
        finally:
            self._told.outputs = before

    def all_gather_numbers(
        self, numbers: list[int], purpose: str, algorithm: str | None = None
    ) -> list[list[int]]:
        """Return the numbers of all ranks. Each rank passes the same count of numbers.

        ``purpose`` keeps different exchanges apart: the engine compares it on all ranks.
        """
        from array import array

        count = len(numbers)
        size = self._engine.size
        every = array("q", bytes(8 * size * count))
        counts = [count] * size
        self.all_gather_into(DType.INT64, array("q", numbers), every, counts, purpose, algorithm)
        flat = every.tolist()
        return [flat[first : first + count] for first in range(0, len(flat), count)]

    def all_gather_into(
        self,
        dtype: int,
        mine: bytes | memoryview | array[int],
        every: _Memory,
        counts: list[int],
        purpose: str,
        algorithm: str | None,
    ) -> None:
        """Gather ``counts`` elements of the ranks in ``every``."""
        nbytes = sum(counts) * ITEM_BYTES[dtype]
        compiled = self._compiler.compile(
            Collective.ALL_GATHER, dtype, None, 0, nbytes, algorithm, None, (salt(purpose),)
        )
        self._run(compiled, _core.view(mine), every, counts)

    def broadcast_numbers(self, numbers: list[int] | None, length: int, root: int) -> list[int]:
        """Return the root's ``length`` numbers on all ranks. The other ranks pass None."""
        from array import array

        line = array("q", bytes(8 * length) if numbers is None else numbers)
        compiled = self._compiler.compile(
            Collective.BROADCAST, DType.INT64, None, root, 8 * length, None, None, (salt("header"),)
        )
        mine = _core.view(line) if self._engine.rank == root else None
        self._run(compiled, mine, line, [length])
        return line.tolist()

    def gather_blobs(self, blob: bytes) -> list[bytes]:
        """Return bytes of any length from every rank; ``split`` exchanges identities this way."""
        algorithm = self.quick_algorithm
        lengths = [n for (n,) in self.all_gather_numbers([len(blob)], "blob", algorithm)]
        every = bytearray(sum(lengths))
        self.all_gather_into(DType.UINT8, blob, every, lengths, "blobs", algorithm)
        ends = itertools.accumulate(lengths)
        return [bytes(every[end - n : end]) for end, n in zip(ends, lengths, strict=True)]

    def _run(
        self,
        compiled: CallPlan,
        mine: _core.BufferView | None,
        every: _Memory,
        counts: list[int],
    ) -> None:
        """Run an exchange, unless native code has run it already, and report it to native code.

        ``mine`` is the input, and None without one. ``every`` receives the output. It may be the
        memory of ``mine``.
        """
        target = _core.view(every)
        request = compiled.request(counts)
        told = self._told.outputs
        if told:
            memoryview(every).cast("B")[:] = told.pop(0)
        else:
            self._engine.run(request, mine, target)
        self.newest = self._engine.calls()
        _core.offer_exchange(self._engine, request, mine, target)
