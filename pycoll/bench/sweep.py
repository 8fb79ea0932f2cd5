"""The measuring side of a sweep: runs on every rank, reports on rank 0.

One *sample* is a batch of back-to-back operations, long enough that the clock does not matter; its
time is that of the slowest rank, divided by the batch. The samples of all algorithms are
interleaved, so that they meet the same noise; median and 99th percentile are over samples.

A network may carry more for a while than it can in the long run: shaped links have buckets of
tokens. What it can is seen where ``sustained_s`` asks for it: then samples of one algorithm follow
each other without a rest, behind so long of the same that does not count.
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

from pycoll.bench.case import Case, elements, make_case
from pycoll.bench.inputs import array_type
from pycoll.bench.metrics import Measurement, percentile
from pycoll.collective import REDUCING, ROOTED, Collective
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.foreign_words import about_dtype

if TYPE_CHECKING:
    from pycoll.communicator import Communicator
    from pycoll.topology import Topology

#: A sample shorter than this says more about the clock and the scheduler than about the operation.
_SAMPLE_S = 500e-6
_BATCH_MAX = 1000
#: A sample of what is sustained lasts so long, against which the rest before it is little.
_SUSTAINED_SAMPLE_S = 2e-3
#: So many must have lasted as long as a sample.
_LONG_BATCHES = 2
#: However long they take, so many samples are taken.
_SAMPLES_MIN = 5


@dataclass(frozen=True)
class SweepOptions:
    """What to measure; the command line's words."""

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
        """InvalidArgumentError for what ``size`` ranks cannot measure."""
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
                raise InvalidArgumentError(f"op is {self.op!r}: the bench has no pairs to reduce")
        if kind in ROOTED and not 0 <= self.root < size:
            raise InvalidArgumentError(f"root is {self.root}: expected a rank below {size}")
        if self.graph and self.device == "cpu":
            raise InvalidArgumentError("graph is for --device cuda")
        if self.begin_bytes > self.end_bytes:
            raise InvalidArgumentError(
                f"the first size, {self.begin_bytes}, is above the last, {self.end_bytes}"
            )

    def sizes(self, size: int) -> list[int]:
        """The message sizes in bytes, ascending, as ``size`` ranks can have them."""
        item = array_type(self.dtype).itemsize
        sizes: dict[int, None] = {}
        wanted = self.begin_bytes
        while wanted <= self.end_bytes:
            sizes[elements(self.collective, self.dtype, wanted, size) * item] = None
            wanted = max(wanted, 1) * self.factor
        return list(sizes)

    def names(self, topology: Topology) -> list[str]:
        """The algorithms asked for, "all" spelled out; InvalidArgumentError for what cannot run."""
        from pycoll.algorithms import lookup
        from pycoll.config import Config
        from pycoll.select import candidates

        kind = Collective[self.collective.upper()]
        if self.algorithms == ["all"]:
            return list(candidates(kind, topology, Config.read().deterministic))
        for name in self.algorithms:
            lookup(kind, name)  # says what is wrong with it
        return list(self.algorithms)


def _slowest(comm: Communicator, times: list[float]) -> list[float]:
    line = np.array(times, np.float64)
    comm.all_reduce(line, "max", out=line)
    return [float(value) for value in line]


def _single_s(comm: Communicator, case: Case, name: str | None) -> float:
    """About what one operation takes amid others; alike on all ranks. Batches double until two
    have lasted as long as a sample: the first operations make plans, and find nothing in caches."""
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


#: Of each way its samples, in seconds of an operation, and how many operations each was.
_Sampled = tuple[list[list[float]], list[int]]


def _in_turns(
    comm: Communicator, case: Case, ways: list[str | None], options: SweepOptions
) -> _Sampled:
    batches = [_batch_of(_SAMPLE_S, _single_s(comm, case, name)) for name in ways]
    times: list[list[float]] = [[] for _ in ways]
    begin = time.perf_counter()
    for done in range(1, options.samples + 1):
        for index, name in enumerate(ways):
            # Sums in place grow without end; every sample starts from the exact inputs.
            case.fill()
            case.time(name, 1)  # the one behind a fill is not like those behind others
            times[index].append(case.time(name, batches[index]))
        spent = _slowest(comm, [time.perf_counter() - begin])[0]
        if done >= _SAMPLES_MIN and spent > options.budget_s:
            break
    return times, batches


def _sustained(
    comm: Communicator, case: Case, ways: list[str | None], options: SweepOptions
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


def measure(
    comm: Communicator, options: SweepOptions, names: list[str], nbytes: int
) -> Iterator[Measurement]:
    """Measure one size with every algorithm (the selector's choice if none), interleaved unless
    ``sustained_s`` asks for one after the other."""
    ways: list[str | None] = [*names] or [None]
    case = make_case(comm, options, nbytes)
    wrong: list[int | None] = [None] * len(ways)
    if options.check:
        counts = np.array([case.count_wrong(name) for name in ways], np.int64)
        wrong = [int(number) for number in comm.all_reduce(counts)]
    sample = _sustained if options.sustained_s else _in_turns
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
    """Which ranks share a host."""
    from pycoll.topology import topology_of

    labels = {rank: host for host, ranks in enumerate(comm.hosts) for rank in ranks}
    return topology_of([labels[rank] for rank in range(comm.size)])


def sweep(comm: Communicator, options: SweepOptions) -> Iterator[Measurement]:
    """Every measurement of the sweep in order; to be called on all ranks alike."""
    options.validate(comm.size)
    names = options.names(hosts_of(comm))
    for nbytes in options.sizes(comm.size):
        yield from measure(comm, options, names, nbytes)


def main(argv: list[str]) -> int:
    """Run the sweep that ``argv[0]`` (JSON) describes; rank 0 writes JSON lines to ``argv[1]``."""
    import pycoll

    options = SweepOptions(**json.loads(argv[0]))
    try:
        comm = pycoll.init()
        with open(argv[1] if comm.rank == 0 else os.devnull, "w", encoding="utf-8") as sink:
            for line in sweep(comm, options):
                print(json.dumps(asdict(line)), file=sink, flush=True)
        pycoll.finalize()
    except PycollError as error:
        print(f"pycoll bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
