"""``pycoll tune`` on one machine: measures its codecs and links and stores the result.

For shared memory it first chooses the stores that fill slots: the same all_reduces run with every
kind.

For each transport it then finds the length of segments. It runs all_reduces of long messages with
every candidate length; a shorter one than the longest wins only if its times are clearly shorter.

Then it runs plans with known costs, over message sizes from a few bytes to more than the caches
hold. The link is the one that explains all these times best (see fit.py). Different lengths of
segments separate the cost of a segment from that of its bytes.

Each case is measured in three passes and the median counts. A virtual machine may move its cores
between two jobs, which changes the times of all later ones. So candidates are compared inside each
pass, where they run one after the other, and the median of these ratios decides.

For shared memory the plans run with ordinary and with shared arrays: copies through slots show the
rate of a copy, and segments that peers read in place the rate of such reads.
"""

from __future__ import annotations

import datetime
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from pycoll.algorithms import lookup
from pycoll.config import DEFAULT_TRANSPORTS, Config
from pycoll.cores import core_count
from pycoll.cost import slot_stores, tuning_file
from pycoll.cost.copying import choose_copies
from pycoll.cost.model import DEFAULT, LINKS, REACHED_BYTES, SEGMENT_BYTES, Parameters
from pycoll.cost.profiles import profile
from pycoll.cost.selection import (
    MEMORIES,
    ORDINARY,
    SHARED,
    bytes_text,
    candidates,
    latencies_text,
    predict,
    rates_text,
    seconds_text,
)
from pycoll.cost.tuning_file import Medium, Tuning
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology, single_host
from pycoll.tools.bench.command import launch_bench, progress_bar
from pycoll.tools.bench.measuring import BenchOptions
from pycoll.tools.bench.metrics import Measurement
from pycoll.tools.outputs import check_output
from pycoll.tools.tune.codec_speed import describe_codecs, measured_rates
from pycoll.tools.tune.fit import Fit, Observation, fit

#: Collectives whose plans separate the cost of moving from that of combining.
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
SEGMENTS = (SEGMENT_BYTES, SEGMENT_BYTES // 2, SEGMENT_BYTES // 4)
#: An option is chosen if its times are below this share of the usual option's times. A smaller gain
#: is noise.
_GAIN = 0.97
_RANKS_MAX = 8
#: Reports state the accuracy of predictions from this message size on, in bytes.
ACCURATE_BYTES = 1 << 16


@dataclass(frozen=True)
class TuneOptions:
    """The extent of a measurement; the default of ``ranks`` is one per core, 2 to 8."""

    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    ranks: int | None = None
    quick: bool = False
    path: Path | None = None

    @property
    def worlds(self) -> tuple[int, ...]:
        """The numbers of ranks of the measured jobs."""
        most = self.ranks or max(2, min(_RANKS_MAX, core_count()))
        return tuple(sorted({min(2, most), most}))

    @property
    def passes(self) -> int:
        """How often each case is measured."""
        return 1 if self.quick else 3

    def end_bytes(self, transport: str) -> int:
        """The length of the longest message in bytes."""
        if self.quick:
            return 1 << 19
        return 1 << 25 if transport == "shm" else 1 << 23

    def bench_options(
        self, collective: str, names: list[str], begin: int, end: int
    ) -> BenchOptions:
        """A short benchmark of these algorithms; without names, of the selector's choice."""
        return BenchOptions(
            collective=collective,
            begin_bytes=begin,
            end_bytes=end,
            algorithms=names,
            samples=5 if self.quick else 15,
            budget_s=0.02 if self.quick else 0.25,
        )


@dataclass(frozen=True)
class _Job:
    """One benchmark to run, with the values that its ranks use and the memory of their arrays."""

    transport: str
    ranks: int
    bench: BenchOptions
    values: Tuning
    memory: str = ORDINARY

    @property
    def measurements(self) -> int:
        return len(self.bench.sizes(self.ranks)) * max(1, len(self.bench.algorithms))


@dataclass(frozen=True)
class Case:
    """The case that a time was measured for.

    ``concurrent``: the number of groups that ran at the same time, each with one rank on every
    host; 0 for ranks of one host. ``memory``: the memory of the arrays, a value of MEMORIES.
    """

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    segment_bytes: int
    concurrent: int = 0
    memory: str = ORDINARY

    def observation(self, seconds: float) -> Observation:
        """The observation of this case: the time, and the costs of the case by the model."""
        kind = Collective[self.collective.upper()]
        algorithm = lookup(kind, self.algorithm)
        topology = (
            Topology.even(self.ranks, self.ranks) if self.concurrent else single_host(self.ranks)
        )
        links = DEFAULT._replace(segment_bytes=self.segment_bytes)
        copies = choose_copies(kind, self.ranks, self.nbytes, links)
        shape = profile(algorithm, topology, copies=copies)
        if self.memory == ORDINARY:
            shape = shape._replace(exposes=False)
        inside, across = shape.terms(self.nbytes, self.segment_bytes)
        if not self.concurrent:
            return Observation(inside, self.nbytes, seconds)
        shared = {
            "moved": across.moved * self.concurrent,
            "carried": across.carried * self.concurrent,
        }
        return Observation(across._replace(**shared), self.nbytes, seconds)


Times = dict[Case, float]
#: What `pycoll tune` chooses: a kind of stores, a length of segments.
Option = TypeVar("Option", str, int)


def observations(times: Times) -> list[Observation]:
    """The observations in order.

    Every collective has the same total weight, whatever its number of algorithms.
    """
    cases = Counter(case.collective for case in times)
    each = len(times) / len(cases)
    return [
        replace(case.observation(seconds), weight=each / cases[case.collective])
        for case, seconds in times.items()
    ]


def spills_from() -> int:
    """The bytes that a core touches before some miss its own cache.

    It is three quarters of the cache size that the system reports, because pages map to cache sets
    by chance.
    """
    from pycoll._core import core_cache_bytes

    return core_cache_bytes() // 4 * 3


class Tuner:
    """Runs the jobs of one ``pycoll tune``; ``say`` prints a line of its report."""

    def __init__(self, options: TuneOptions, start: Tuning, say: Callable[[str], None]) -> None:
        self._options = options
        self._start = start
        self._media = dict(start.media)
        self._slot_stores = start.slot_stores
        self._say = say
        self._progress = progress_bar()
        self._task = self._progress.add_task("measuring", total=self._total())

    def run(self) -> Tuning:
        """Measures codecs and all transports.

        Raises PycollError if a job failed or gave a wrong result.
        """
        with self._progress:
            codecs = measured_rates(self._options.quick)
            for line in describe_codecs(codecs):
                self._say(line)
            for transport in self._options.transports:
                if transport == "shm":
                    stores = self._in_passes(self._stores_jobs())
                    self._slot_stores = best_option(stores, slot_stores.STRING, slot_stores.GAIN)
                    self._say(f"  {transport:10} fills slots by {self._slot_stores} stores")
                segments = self._in_passes({n: self._segment_jobs(transport, n) for n in SEGMENTS})
                segment_bytes = best_option(segments, SEGMENT_BYTES)
                links = {segment_bytes: list(self._link_jobs(transport, segment_bytes))}
                passes = [*segments, *self._in_passes(links)]
                times = medians(one for each in passes for one in each.values())
                known = spills_from() if transport == "shm" else None
                found = fit(observations(times), LINKS[transport], spills_from=known)
                self._media[transport] = Medium(found.link, segment_bytes)
                for line in describe(transport, self._media[transport]):
                    self._say(line)
                for line in accuracy(list(times), found):
                    self._say(line)
        return self._start._replace(
            media=self._media,
            origin="measured just now",
            slot_stores=self._slot_stores,
            codecs=codecs,
        )

    def _total(self) -> int:
        jobs = [
            job
            for transport in self._options.transports
            for job in (
                *(j for bytes_ in SEGMENTS for j in self._segment_jobs(transport, bytes_)),
                *chain.from_iterable(self._stores_jobs().values() if transport == "shm" else ()),
                *self._link_jobs(transport, SEGMENT_BYTES),
            )
        ]
        return self._options.passes * sum(job.measurements for job in jobs)

    def _values(self, transport: str, segment_bytes: int) -> Tuning:
        """The present values, with another segment length for this transport."""
        changed = Medium(self._media[transport].link, segment_bytes)
        media = {**self._media, transport: changed}
        return Tuning(media, "being measured", slot_stores=self._slot_stores)

    def _stores_jobs(self) -> dict[str, list[_Job]]:
        """The jobs of each kind of stores, which only shared memory has."""
        jobs = self._segment_jobs("shm", SEGMENT_BYTES)
        return {
            kind: [replace(job, values=job.values._replace(slot_stores=kind)) for job in jobs]
            for kind in slot_stores.KINDS
        }

    def _segment_jobs(self, transport: str, segment_bytes: int) -> list[_Job]:
        end = min(1 << 22, self._options.end_bytes(transport))
        values, jobs = self._values(transport, segment_bytes), []
        for ranks in self._options.worlds:
            names = distinct_algorithms("all_reduce", ranks)
            options = self._options.bench_options("all_reduce", names, 1 << 18, end)
            jobs.append(_Job(transport, ranks, options, values))
        return jobs

    def _link_jobs(self, transport: str, segment_bytes: int) -> Iterator[_Job]:
        values = self._values(transport, segment_bytes)
        for ranks in self._options.worlds:
            for collective in COLLECTIVES:
                names = distinct_algorithms(collective, ranks)
                end = self._options.end_bytes(transport)
                for memory in MEMORIES if transport == "shm" else (ORDINARY,):
                    # Shorter arrays are copied in either memory.
                    begin = REACHED_BYTES if memory == SHARED else 32
                    options = self._options.bench_options(collective, names, begin, end)
                    yield _Job(transport, ranks, options, values, memory)

    def _in_passes(self, jobs: Mapping[Option, Sequence[_Job]]) -> list[dict[Option, Times]]:
        """Runs the jobs of all options in each pass, and returns the times of each pass."""
        return [
            {option: self._measure(those) for option, those in jobs.items()}
            for _ in range(self._options.passes)
        ]

    def _measure(self, jobs: Sequence[_Job]) -> Times:
        """Runs the jobs and returns the time of each case."""
        times: Times = {}
        for job in jobs:
            self._run(job, times)
        return times

    def _run(self, job: _Job, times: Times) -> None:
        wrong = 0
        segment_bytes = job.values.media[job.transport].segment_bytes

        def take(line: Measurement) -> None:
            nonlocal wrong
            wrong += line.wrong or 0
            place = (line.collective, line.algorithm, line.ranks, line.bytes)
            times[Case(*place, segment_bytes, memory=job.memory)] = line.median_s
            self._progress.advance(self._task)

        with tempfile.TemporaryDirectory(prefix="pycoll-tune-") as folder:
            path = Path(folder) / "tuning.json"
            tuning_file.store(job.values, path, "now")
            words = {**_surroundings((job.transport,), job.memory), "PYCOLL_TUNING": str(path)}
            status = launch_bench(job.bench, job.ranks, words, take)
        if status != 0 or wrong:
            raise PycollError(
                f"measuring {job.bench.collective} over {job.transport} on {job.ranks} ranks "
                + (f"gave {wrong} wrong elements" if wrong else f"ended with status {status}")
                + "; nothing was stored"
            )


def best_segment(times: Times) -> int:
    """The segment length with the shortest times; the longest one if it is nearly as good."""
    lengths: dict[int, Times] = defaultdict(dict)
    for case, seconds in times.items():
        lengths[case.segment_bytes][case] = seconds
    return best_option([lengths], max(lengths))


def best_option(
    passes: Sequence[Mapping[Option, Times]], usual: Option, gain: float = _GAIN
) -> Option:
    """The option with the shortest times; ``usual`` unless another one takes less than the share
    ``gain`` of its times.

    Times are compared with those of ``usual`` in the same pass; the median of the passes counts.
    """
    ratios = {
        option: statistics.median(mean(one[option]) / mean(one[usual]) for one in passes)
        for option in passes[0]
    }
    best = min(ratios, key=lambda option: ratios[option])
    return best if ratios[best] < gain else usual


def medians(passes: Iterable[Times]) -> Times:
    """The median time of each case."""
    found: dict[Case, list[float]] = defaultdict(list)
    for times in passes:
        for case, seconds in times.items():
            found[case].append(seconds)
    return {case: statistics.median(all_) for case, all_ in found.items()}


def mean(times: Times) -> float:
    """The geometric mean of all times."""
    return statistics.geometric_mean(times.values())


def distinct_algorithms(collective: str, ranks: int) -> list[str]:
    """The algorithms with different costs for this number of ranks.

    Of algorithms with equal costs only the first is included.
    """
    kind, topology = Collective[collective.upper()], single_host(ranks)
    first: dict[str, str] = {}
    for name in candidates(kind, topology):
        first.setdefault(repr(profile(lookup(kind, name), topology)), name)
    return list(first.values())


def describe(transport: str, medium: Medium) -> list[str]:
    """The text of the values of a link."""
    segment = f"segment of {bytes_text(medium.segment_bytes)}"
    return [
        f"  {transport:10} {latencies_text(medium.link, segment)}",
        f"  {'':10} {rates_text(medium.link)}",
    ]


def accuracy(cases: Sequence[Case], found: Fit) -> Iterator[str]:
    """For each collective, a line with the errors of the predictions from ACCURATE_BYTES on."""
    for collective in dict.fromkeys(case.collective for case in cases):
        errors = [
            error
            for case, error in zip(cases, found.errors, strict=True)
            if case.collective == collective and case.nbytes >= ACCURATE_BYTES
        ]
        if errors:
            middle = statistics.median(errors)
            yield (
                f"  {'':10} {collective}: half of {len(errors)} predictions from "
                f"{bytes_text(ACCURATE_BYTES)} on are within {_half_within(errors):.0%}, "
                f"the middle one is {middle:+.0%} off"
            )


def _half_within(errors: Sequence[float]) -> float:
    return statistics.median(map(abs, errors))


def place_to_store(path: Path | None) -> Path:
    """The file to write, by default that of this machine; its folder is created.

    Raises InvalidArgumentError with the reason if the file could not be written.
    """
    path = path or tuning_file.default_path()
    if path is None:
        raise InvalidArgumentError("there is no home folder to store the file in: give --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"cannot make {str(path.parent)!r}: {error.strerror}") from None
    check_output(path, "--output")
    return path


def run_tune(options: TuneOptions, say: Callable[[str], None]) -> Path:
    """Measures the machine, stores and reports the result; returns the path of the file.

    It starts from the values in use, so transports that are not measured keep theirs; a present
    file that cannot be read is ignored. Raises InvalidArgumentError before any measurement if the
    result could not be stored.
    """
    path = place_to_store(options.path)
    worlds = " and ".join(map(str, options.worlds))
    say(f"measuring {', '.join(options.transports)} on {worlds} ranks of this machine")
    found = Tuner(options, present(path), say).run()
    tuning_file.store(found, path, datetime.date.today().isoformat())
    say(f"stored in {path}")
    return path


def present(path: Path) -> Tuning:
    """The stored tuning; the built-in values if there is none or it cannot be read."""
    try:
        return tuning_file.load(path) if path.exists() else tuning_file.BUILT_IN
    except InvalidArgumentError:
        return tuning_file.BUILT_IN


# Predicted and measured times


class Comparison(NamedTuple):
    """A request to compare predicted and measured times, for sizes from ``begin_bytes`` by factors
    of 4 up to ``end_bytes``.

    Without ``algorithm``, each size uses the algorithm that the cost model chooses. ``memory``: the
    memory of the arrays, a value of MEMORIES. ``jobs``: a measured time is the median of that many
    jobs, since caches may by chance hold less of the memory of one job. ``budget_s``: seconds for
    each size of a job.
    """

    collective: str
    ranks: int
    begin_bytes: int
    end_bytes: int
    algorithm: str | None = None
    memory: str = SHARED
    jobs: int = 3
    budget_s: float = 0.5

    @property
    def bench_options(self) -> BenchOptions:
        """The options of each job."""
        return BenchOptions(
            collective=self.collective,
            begin_bytes=self.begin_bytes,
            end_bytes=self.end_bytes,
            algorithms=[] if self.algorithm is None else [self.algorithm],
            samples=15,
            budget_s=self.budget_s,
        )


class Compared(NamedTuple):
    """A predicted and a measured time, in s."""

    nbytes: int
    algorithm: str
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        """The predicted time, divided by the measured one."""
        return self.predicted_s / self.measured_s


def compare_sizes(asked: Comparison, config: Config, parameters: Parameters) -> Iterator[Compared]:
    """Measures and predicts every size.

    Raises PycollError if a job failed, and InvalidArgumentError for a request that cannot be
    measured.
    """
    options, host = asked.bench_options, single_host(asked.ranks)
    options.validate(asked.ranks)
    options.names(host)
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    words = _surroundings(config.transports, asked.memory)
    for line in _measured_in_jobs(asked, options, words):
        found[line.bytes, line.algorithm].append(line.median_s)
    kind = Collective[asked.collective.upper()]
    for (size, name), times in found.items():
        predicted = predict(kind, name, host, size, parameters, asked.memory)
        yield Compared(size, name, predicted, statistics.median(times))


def comparison_lines(
    collective: str,
    ranks: int,
    nbytes: int,
    algorithm: str | None,
    config: Config,
    parameters: Parameters,
    memory: str = SHARED,
) -> Iterator[str]:
    """The lines of a table of predicted and measured times, for message sizes up to ``nbytes``.

    ``memory``: the memory of the arrays, "ordinary" or "shared".

    Raises PycollError if the job failed, and InvalidArgumentError for a request that cannot be
    measured.
    """
    asked = Comparison(collective, ranks, min(nbytes, 64), nbytes, algorithm, memory)
    lines = compare_sizes(asked, config, parameters)
    head = f"  {'bytes':>10} {'predicted':>12} {'measured':>12} {'pred./meas.':>11}  algorithm"
    for number, one in enumerate(lines):
        if number == 0:
            yield head
        yield (
            f"  {one.nbytes:10d} {seconds_text(one.predicted_s):>12} "
            f"{seconds_text(one.measured_s):>12} {one.ratio:11.2f}  {one.algorithm}"
        )


def _measured_in_jobs(
    asked: Comparison, options: BenchOptions, words: Mapping[str, str]
) -> list[Measurement]:
    """The measurements of all jobs."""
    lines: list[Measurement] = []
    for _ in range(asked.jobs):
        status = launch_bench(options, asked.ranks, words, lines.append)
        if status != 0 or any(line.wrong for line in lines):
            raise PycollError(
                f"measuring {options.collective} on {asked.ranks} ranks ended with status {status}"
            )
    return lines


def _surroundings(transports: Sequence[str], memory: str) -> dict[str, str]:
    """The environment variables of the ranks of a job."""
    return {
        "PYCOLL_TRANSPORTS": ",".join(transports),
        "PYCOLL_SHARED_ARRAYS": "1" if memory == SHARED else "0",
    }
