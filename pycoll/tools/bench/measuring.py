"""The measuring side of a benchmark: runs on every rank and yields measurements.

One *sample* is a batch of back-to-back operations, long enough that the clock's resolution does not
matter. Its time is that of the slowest rank, divided by the number of operations. The samples of
all algorithms are interleaved, so that the same noise affects all of them. Median and 99th
percentile are over samples.

For a short time a network may carry more than it can sustain: shaped links have token buckets.
``sustained_s`` measures the sustained rate. The samples of one algorithm then follow each other
without a pause, after ``sustained_s`` seconds of the same operations that are not counted.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pycoll.comm.operations import internals_of
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.foreign_words import about_dtype
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.tools.bench.case import Case, elements
from pycoll.tools.bench.inputs import array_type
from pycoll.tools.bench.metrics import Measurement, percentile

if TYPE_CHECKING:
    from pycoll.comm.communicator import Communicator
    from pycoll.schedule.topology import Topology

#: Least seconds of a sample. In a shorter one, the clock and the scheduler dominate.
_SAMPLE_S = 500e-6
#: Most operations of a sample.
_BATCH_MAX = 1000
#: Seconds of a sample of the sustained rate, long against the pause between two samples.
_SUSTAINED_SAMPLE_S = 2e-3
#: The estimate of one operation's time ends after this many batches of the length of a sample.
_LONG_BATCHES = 2
#: Least number of samples, however long they take.
_SAMPLES_MIN = 5


@dataclass(frozen=True)
class BenchOptions:
    """The options of a benchmark, as the command line names them."""

    collective: str = "all_reduce"
    begin_bytes: int = 8
    end_bytes: int = 1 << 26
    factor: int = 4
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    algorithms: list[str] = field(default_factory=list)
    samples: int = 30
    budget_s: float = 1.5
    check: bool = True
    in_place: bool = True
    device: str = "cpu"
    graph: bool = False
    sustained_s: float = 0.0

    def validate(self, size: int) -> None:
        """Raise InvalidArgumentError for options that ``size`` ranks cannot measure."""
        from pycoll.ops import find_reduction
        from pycoll.types import LOCATION, DType

        words = [one.word for one in DType]
        if self.dtype not in words:
            raise InvalidArgumentError(
                f"dtype is {self.dtype!r}{about_dtype(self.dtype)}; there are {', '.join(words)}"
            )
        array_type(self.dtype)
        kind = Collective[self.collective.upper()]
        if kind in REDUCING:
            found = find_reduction(self.op, DType[self.dtype.upper()], self.collective)
            if found.code in LOCATION:
                raise InvalidArgumentError(
                    f"op is {self.op!r}: the benchmark has no (value, index) pairs to reduce"
                )
        if kind in ROOTED and not 0 <= self.root < size:
            raise InvalidArgumentError(f"root is {self.root}: expected a rank below {size}")
        if self.graph and self.device == "cpu":
            raise InvalidArgumentError("graph is for --device cuda")
        if self.begin_bytes > self.end_bytes:
            raise InvalidArgumentError(
                f"the first size, {self.begin_bytes}, is above the last, {self.end_bytes}"
            )

    def sizes(self, size: int) -> list[int]:
        """Return the message sizes in bytes, ascending, rounded to sizes possible on ``size``
        ranks."""
        item = array_type(self.dtype).itemsize
        sizes: dict[int, None] = {}
        wanted = self.begin_bytes
        while wanted <= self.end_bytes:
            sizes[elements(self.collective, self.dtype, wanted, size) * item] = None
            wanted = max(wanted, 1) * self.factor
        return list(sizes)

    def names(self, topology: Topology) -> list[str]:
        """Return the chosen algorithms, with "all" expanded. Raises InvalidArgumentError for one
        that cannot run."""
        from pycoll.algorithms import lookup
        from pycoll.config import Config
        from pycoll.cost.selection import candidates

        kind = Collective[self.collective.upper()]
        if self.algorithms == ["all"]:
            return list(candidates(kind, topology.by_domain, Config.read().deterministic))
        for name in self.algorithms:
            lookup(kind, name)  # raises for an unknown name
        return list(self.algorithms)


def _slowest(comm: Communicator, times: list[float]) -> list[float]:
    line = np.array(times, np.float64)
    comm.all_reduce(line, "max", out=line)
    return [float(value) for value in line]


def _single_s(comm: Communicator, case: Case, name: str | None) -> float:
    """Return about the seconds of one operation in a row of operations; equal on all ranks.

    The batch doubles until two batches have lasted as long as a sample: the first operations are
    slower, since they make plans and find cold caches.
    """
    case.time(name, 1)
    batch, long = 1, 0
    while True:
        single_s = max(_slowest(comm, [case.time(name, batch)])[0], 1e-9)
        if batch == _BATCH_MAX or batch * single_s >= _SAMPLE_S:
            long += 1
        else:
            batch = min(_BATCH_MAX, 2 * batch)
        if long == _LONG_BATCHES:
            return single_s


def _batch_of(seconds: float, single_s: float) -> int:
    return max(1, min(_BATCH_MAX, int(seconds / single_s)))


#: For each algorithm: its samples in seconds per operation, and the operations of each sample.
_Sampled = tuple[list[list[float]], list[int]]


def _in_rotation(
    comm: Communicator, case: Case, ways: list[str | None], options: BenchOptions
) -> _Sampled:
    batches = [_batch_of(_SAMPLE_S, _single_s(comm, case, name)) for name in ways]
    times: list[list[float]] = [[] for _ in ways]
    begin = time.perf_counter()
    for done in range(1, options.samples + 1):
        for index, name in enumerate(ways):
            # Repeated sums in place grow without bound, so every sample restores the inputs.
            case.fill()
            case.time(name, 1)  # not counted: the fill changes the state of the caches
            times[index].append(case.time(name, batches[index]))
        spent = _slowest(comm, [time.perf_counter() - begin])[0]
        if done >= _SAMPLES_MIN and spent > options.budget_s:
            break
    return times, batches


def _sample_sustained(
    comm: Communicator, case: Case, ways: list[str | None], options: BenchOptions
) -> _Sampled:
    times, batches = [], []
    for name in ways:
        single_s = _single_s(comm, case, name)
        batch = _batch_of(_SUSTAINED_SAMPLE_S, single_s)
        ahead = -(-_batch_of(options.sustained_s, single_s) // batch)
        found = []
        for _ in range(ahead + options.samples):
            case.fill()
            found.append(case.time(name, batch))
        times.append(found[ahead:])
        batches.append(batch)
    return times, batches


def _make_case(comm: Communicator, options: BenchOptions, nbytes: int) -> Case:
    """Make a case in host memory, or on this rank's device."""
    if options.device == "cpu":
        return Case(comm, options, nbytes)
    from pycoll.tools.bench.device_case import DeviceCase

    return DeviceCase(comm, options, nbytes)


def measure(
    comm: Communicator, options: BenchOptions, names: list[str], nbytes: int
) -> Iterator[Measurement]:
    """Measure one size with every algorithm, or with the selector's choice if ``names`` is empty.

    The samples of the algorithms are interleaved; with ``sustained_s`` they run one after the
    other.
    """
    ways: list[str | None] = [*names] or [None]
    case = _make_case(comm, options, nbytes)
    wrong: list[int | None] = [None] * len(ways)
    if options.check:
        counts = np.array([case.count_wrong(name) for name in ways], np.int64)
        wrong = [int(number) for number in comm.all_reduce(counts)]
    sample = _sample_sustained if options.sustained_s else _in_rotation
    times, batches = sample(comm, case, ways, options)
    for index, name in enumerate(ways):
        samples = _slowest(comm, times[index])
        yield Measurement(
            collective=options.collective,
            algorithm=name
            or comm.choice(options.collective, case.bytes, options.dtype, options.op),
            transport=comm.transport_names() if options.device == "cpu" else case.medium,
            ranks=comm.size,
            bytes=case.bytes,
            count=case.count,
            dtype=options.dtype,
            op=options.op,
            root=options.root,
            median_s=percentile(samples, 0.5),
            p99_s=percentile(samples, 0.99),
            wrong=wrong[index],
            iterations=len(samples) * batches[index],
            quartile_s=percentile(samples, 0.25),
            limit_share=case.limit_share(percentile(samples, 0.5)),
        )


def hosts_of(comm: Communicator) -> Topology:
    """Return the topology: the ranks of each host, and the domains inside hosts."""
    return internals_of(comm).compiler.topology


def measure_all(comm: Communicator, options: BenchOptions) -> Iterator[Measurement]:
    """Yield every measurement in order of size. All ranks call it alike."""
    options.validate(comm.size)
    names = options.names(hosts_of(comm))
    for nbytes in options.sizes(comm.size):
        yield from measure(comm, options, names, nbytes)


def main(argv: list[str]) -> int:
    """Run the benchmark that ``argv[0]`` (JSON of BenchOptions) describes. Rank 0 writes a line of
    JSON per measurement to the file ``argv[1]``. Returns the exit status."""
    import pycoll

    options = BenchOptions(**json.loads(argv[0]))
    try:
        comm = pycoll.init()
        with open(argv[1] if comm.rank == 0 else os.devnull, "w", encoding="utf-8") as sink:
            for line in measure_all(comm, options):
                print(json.dumps(asdict(line)), file=sink, flush=True)
        pycoll.finalize()
    except PycollError as error:
        print(f"pycoll bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
