"""A case on devices: device arrays, times from events, optionally replayed from a graph."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from pycoll.errors import InvalidArgumentError
from pycoll.tools.bench import cuda, inputs
from pycoll.tools.bench.case import Case
from pycoll.tools.bench.metrics import bus_factor

if TYPE_CHECKING:
    from pycoll.comm.communicator import Communicator
    from pycoll.tools.bench.measuring import BenchOptions


class _Device:
    """The state that all cases of a rank share: its device, chosen by its local rank, and a stream
    there."""

    def __init__(self, comm: Communicator) -> None:
        try:
            devices = cuda.driver().count()
        except (OSError, cuda.DriverError) as error:
            raise InvalidArgumentError(f"device is cuda, but there is none: {error}") from None
        if devices == 0:
            raise InvalidArgumentError("device is cuda, but the driver sees none")
        self.stream = cuda.Stream(comm.local_rank % devices)
        self.clock = cuda.Clock(self.stream)
        #: Ranks per device, rounded up.
        self.sharing = -(-comm.local_size // devices)
        #: Whether all ranks are on this machine and each has its own device.
        self.has_own = self.sharing == 1 and 1 < comm.size == comm.local_size
        rate = 0.0
        # Only rank 0 measures: ranks that share a device would disturb each other.
        if comm.rank == 0:
            with self.stream:
                measure = functools.partial(cuda.link_bandwidth, 1)
                rate = (measure if self.has_own else cuda.copy_bandwidth)(nbytes=1 << 26)
        line = np.array([rate])
        comm.all_reduce(line, "max", out=line)
        #: Bytes per second of copies from the first to the second device if ``has_own``, else of
        #: copies inside a device, counted read and written.
        self.bandwidth = float(line[0])


_devices: WeakKeyDictionary[Communicator, _Device] = WeakKeyDictionary()


class DeviceCase(Case):
    """A Case with device arrays. ``medium`` says how many ranks share a device."""

    def __init__(self, comm: Communicator, options: BenchOptions, nbytes: int) -> None:
        super().__init__(comm, options, nbytes)
        if comm not in _devices:
            _devices[comm] = _Device(comm)
        self._device = _devices[comm]
        self._graphs: dict[tuple[str | None, int], cuda.Graph] = {}
        with self._device.stream:
            self._there = cuda.array(self._source)
            self._out_there = self._there if self._in_place else cuda.array(self._out)
        if "out" in self._words:
            self._words["out"] = self._out_there
        sharing = self._device.sharing
        self.medium = "cuda" if sharing == 1 else f"cuda ({sharing} ranks per device)"

    def fill(self) -> None:
        """Restore the exact inputs."""
        with self._device.stream:
            self._there.put(self._kept)

    def run(self, algorithm: str | None) -> None:
        """Enqueue one operation."""
        with self._device.stream:
            self._method(self._there, algorithm=algorithm, **self._words)

    def time(self, algorithm: str | None, batch: int) -> float:
        """Return the mean seconds of ``batch`` operations, by the device's clock."""
        graph = self._graph_of(algorithm, batch) if self._options.graph else None
        self._device.stream.synchronize()
        self._comm.barrier()
        self._device.clock.start()
        if graph is not None:
            graph.launch()
        else:
            for _ in range(batch):
                self.run(algorithm)
        return self._device.clock.stop() / batch

    def limit_share(self, seconds: float) -> float | None:
        """Return the share of the hardware's limit that ``seconds`` reach; None if it is unknown.

        On one device that all ranks share, the limit of an all_reduce is to read every input byte
        and to write every output byte once. If each rank has its own device, the limit is the rate
        of the driver's copies between two devices, for the bytes of the slowest link.
        """
        collective, size = self._options.collective, self._comm.size
        if self._device.has_own:
            best = self.bytes * bus_factor(collective, size) / self._device.bandwidth
        elif collective == "all_reduce" and self._device.sharing == size:
            best = 2 * self.bytes * size / self._device.bandwidth
        else:
            return None
        return best / seconds if seconds else None

    def _graph_of(self, algorithm: str | None, batch: int) -> cuda.Graph:
        key = (algorithm, batch)
        if key not in self._graphs:
            self.run(algorithm)  # a run before the capture, so that everything is prepared
            self._device.stream.synchronize()
            with self._device.stream.capture() as graph:
                for _ in range(batch):
                    self.run(algorithm)
            self._graphs[key] = graph
        return self._graphs[key]

    def _clear(self) -> None:
        with self._device.stream:
            self._out_there.put(np.zeros_like(self._out))

    def _result(self) -> inputs.Array:
        with self._device.stream:
            result: Any = self._out_there.get()
        return np.asarray(result)
