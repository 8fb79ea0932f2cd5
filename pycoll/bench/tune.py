"""``pycoll tune``: measures this machine's links and keeps what it found for later jobs.

For each transport first the length of segments: all_reduces of messages that are cut in many, with
each candidate in turns; the shortest time wins, the longest segment among nearly equals. Then plans
whose costs are known, over message sizes from a few bytes to more than the caches hold. What
explains all these times best is the link (see fit); different lengths of segments are what tells
the cost of a segment from that of its bytes. Two passes, of which the better time of each case
counts: what disturbs only adds.
"""

from __future__ import annotations

import datetime
import math
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pycoll import tuning
from pycoll.algorithms import lookup
from pycoll.bench.command import launch_sweep, progress_bar
from pycoll.bench.fit import Fit, Observation, fit
from pycoll.bench.metrics import Measurement
from pycoll.bench.sweep import SweepOptions
from pycoll.bootstrap.cores import core_count
from pycoll.collective import Collective
from pycoll.config import DEFAULT_TRANSPORTS, Config
from pycoll.errors import InvalidArgumentError, PycollError
from pycoll.model import LINKS, SEGMENT_BYTES, Parameters
from pycoll.outputs import check_output
from pycoll.profiles import profile
from pycoll.select import (
    bytes_text,
    candidates,
    latencies_text,
    predict,
    rates_text,
    seconds_text,
)
from pycoll.topology import Topology, single_host
from pycoll.tuning import Medium, Tuning

#: Collectives whose plans show moving apart from combining.
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
SEGMENTS = (SEGMENT_BYTES, SEGMENT_BYTES // 2, SEGMENT_BYTES // 4)
#: A shorter segment must be so much faster to be taken; less is noise.
_GAIN = 0.97
_RANKS_MAX = 8
#: What is measured to be compared with predictions is the middle one of so many jobs.
_JOBS = 3
#: Predictions are meant to hold from this size on.
ACCURATE_BYTES = 1 << 16


@dataclass(frozen=True)
class TuneOptions:
    """What to measure. ``ranks``: in the largest job, by default one per core, 2 to 8."""

    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    ranks: int | None = None
    quick: bool = False
    path: Path | None = None

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks measured."""
        most = self.ranks or max(2, min(_RANKS_MAX, core_count()))
        return tuple(sorted({min(2, most), most}))

    @property
    def passes(self) -> int:
        """How often each case is measured."""
        return 1 if self.quick else 2

    def end_bytes(self, transport: str) -> int:
        """The longest message."""
        if self.quick:
            return 1 << 19
        return 1 << 25 if transport == "shm" else 1 << 23

    def sweep(self, collective: str, names: list[str], begin: int, end: int) -> SweepOptions:
        """A short sweep of these algorithms, or of the selector's without names."""
        return SweepOptions(
            collective=collective,
            begin_bytes=begin,
            end_bytes=end,
            algorithms=names,
            samples=5 if self.quick else 15,
            budget_s=0.02 if self.quick else 0.25,
        )


@dataclass(frozen=True)
class _Job:
    """One sweep to run, with the values that its ranks use meanwhile."""

    transport: str
    ranks: int
    sweep: SweepOptions
    values: Tuning

    @property
    def measurements(self) -> int:
        return len(self.sweep.sizes(self.ranks)) * max(1, len(self.sweep.algorithms))


@dataclass(frozen=True)
class Case:
    """What a time belongs to. ``beside``: groups that ran at the same time, each with a rank on
    every host; 0 for ranks of one host."""

    collective: str
    algorithm: str
    ranks: int
    nbytes: int
    segment_bytes: int
    beside: int = 0

    def observed(self, seconds: float) -> Observation:
        """The time with what the model says it consists of."""
        algorithm = lookup(Collective[self.collective.upper()], self.algorithm)
        topology = Topology.even(self.ranks, self.ranks) if self.beside else single_host(self.ranks)
        inside, across = profile(algorithm, topology).terms(self.nbytes, self.segment_bytes)
        if not self.beside:
            return Observation(inside, self.nbytes, seconds)
        shared = {"moved": across.moved * self.beside, "carried": across.carried * self.beside}
        return Observation(across._replace(**shared), self.nbytes, seconds)


Times = dict[Case, float]


def observations(times: Times) -> list[Observation]:
    """The times in order. A collective counts as much as any other, however many algorithms it
    has."""
    cases = Counter(case.collective for case in times)
    each = len(times) / len(cases)
    return [
        replace(case.observed(seconds), weight=each / cases[case.collective])
        for case, seconds in times.items()
    ]


def spills_from() -> int:
    """Bytes that a core touches before some miss its own cache, by what the system tells: three
    quarters of it, as pages lie by chance."""
    from pycoll._core import core_cache_bytes

    return core_cache_bytes() // 4 * 3


class Tuner:
    """Runs the jobs of one ``pycoll tune``. ``say`` prints a line of its report."""

    def __init__(self, options: TuneOptions, start: Tuning, say: Callable[[str], None]) -> None:
        self._options = options
        self._start = start
        self._media = dict(start.media)
        self._say = say
        self._progress = progress_bar()
        self._task = self._progress.add_task("measuring", total=self._total())

    def run(self) -> Tuning:
        """Measure all transports. PycollError if a job failed or gave a wrong result."""
        with self._progress:
            for transport in self._options.transports:
                times: Times = {}
                segment_bytes = self._best_segment(transport, times)
                self._measure_links(transport, segment_bytes, times)
                known = spills_from() if transport == "shm" else None
                found = fit(observations(times), LINKS[transport], spills_from=known)
                self._media[transport] = Medium(found.link, segment_bytes)
                for line in describe(transport, self._media[transport]):
                    self._say(line)
                for line in accuracy(list(times), found):
                    self._say(line)
        return self._start._replace(media=self._media, origin="measured just now")

    def _total(self) -> int:
        jobs = [
            job
            for transport in self._options.transports
            for job in (
                *(j for bytes_ in SEGMENTS for j in self._segment_jobs(transport, bytes_)),
                *self._link_jobs(transport, SEGMENT_BYTES),
            )
        ]
        return self._options.passes * sum(job.measurements for job in jobs)

    def _values(self, transport: str, segment_bytes: int) -> Tuning:
        """The present values, but for this transport's segments."""
        changed = Medium(self._media[transport].link, segment_bytes)
        return Tuning({**self._media, transport: changed}, "being measured")

    def _segment_jobs(self, transport: str, segment_bytes: int) -> Iterator[_Job]:
        end = min(1 << 22, self._options.end_bytes(transport))
        for ranks in self._options.worlds:
            names = distinct_algorithms("all_reduce", ranks)
            sweep = self._options.sweep("all_reduce", names, 1 << 18, end)
            yield _Job(transport, ranks, sweep, self._values(transport, segment_bytes))

    def _best_segment(self, transport: str, times: Times) -> int:
        for _ in range(self._options.passes):
            for segment_bytes in SEGMENTS:
                for job in self._segment_jobs(transport, segment_bytes):
                    self._measure(job, times)
        return best_segment(times)

    def _link_jobs(self, transport: str, segment_bytes: int) -> Iterator[_Job]:
        values = self._values(transport, segment_bytes)
        for ranks in self._options.worlds:
            for collective in COLLECTIVES:
                names = distinct_algorithms(collective, ranks)
                end = self._options.end_bytes(transport)
                sweep = self._options.sweep(collective, names, 32, end)
                yield _Job(transport, ranks, sweep, values)

    def _measure_links(self, transport: str, segment_bytes: int, times: Times) -> None:
        for _ in range(self._options.passes):
            for job in self._link_jobs(transport, segment_bytes):
                self._measure(job, times)

    def _measure(self, job: _Job, times: Times) -> None:
        """Run the job; keep the better time of each case."""
        wrong = 0
        segment_bytes = job.values.media[job.transport].segment_bytes

        def take(line: Measurement) -> None:
            nonlocal wrong
            wrong += line.wrong or 0
            case = Case(line.collective, line.algorithm, line.ranks, line.bytes, segment_bytes)
            times[case] = min(line.median_s, times.get(case, math.inf))
            self._progress.advance(self._task)

        with tempfile.TemporaryDirectory(prefix="pycoll-tune-") as folder:
            path = Path(folder) / "tuning.json"
            tuning.store(job.values, path, "now")
            words = {"PYCOLL_TRANSPORTS": job.transport, "PYCOLL_TUNING": str(path)}
            status = launch_sweep(job.sweep, job.ranks, words, take)
        if status != 0 or wrong:
            raise PycollError(
                f"measuring {job.sweep.collective} over {job.transport} on {job.ranks} ranks "
                + (f"gave {wrong} wrong elements" if wrong else f"ended with status {status}")
                + "; nothing was stored"
            )


def best_segment(times: Times) -> int:
    """The length with which the cases took least, the longest among nearly equals."""
    lengths = {case.segment_bytes for case in times}
    means = {segment_bytes: _mean(times, segment_bytes) for segment_bytes in lengths}
    best = min(means, key=lambda segment_bytes: means[segment_bytes])
    return best if means[best] < _GAIN * means[max(lengths)] else max(lengths)


def _mean(times: Times, segment_bytes: int) -> float:
    """The geometric mean of the times with segments of that length."""
    logs = [math.log(s) for case, s in times.items() if case.segment_bytes == segment_bytes]
    return math.exp(sum(logs) / len(logs))


def distinct_algorithms(collective: str, ranks: int) -> list[str]:
    """Algorithms that cost differently on so many ranks; of those that cost the same the first."""
    kind, topology = Collective[collective.upper()], single_host(ranks)
    first: dict[str, str] = {}
    for name in candidates(kind, topology):
        first.setdefault(repr(profile(lookup(kind, name), topology)), name)
    return list(first.values())


def describe(transport: str, medium: Medium) -> list[str]:
    """A link's figures in words."""
    segment = f"segment of {bytes_text(medium.segment_bytes)}"
    return [
        f"  {transport:10} {latencies_text(medium.link, segment)}",
        f"  {'':10} {rates_text(medium.link)}",
    ]


def accuracy(cases: Sequence[Case], found: Fit) -> Iterator[str]:
    """For each collective how far predictions are off, in the middle, where they should hold."""
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
    """Where to store, this machine's place by default; made, so that it can be written.

    InvalidArgumentError with the reason if it cannot.
    """
    path = path or tuning.default_path()
    if path is None:
        raise InvalidArgumentError("no home folder is known to store in: give --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(f"cannot make {str(path.parent)!r}: {error.strerror}") from None
    check_output(path, "--output")
    return path


def run_tune(options: TuneOptions, say: Callable[[str], None]) -> Path:
    """Measure, store, and say what was found; the file's path.

    Starts from the values in use, so that transports that are not measured keep theirs; a present
    file that cannot be read does not matter. InvalidArgumentError before anything is measured if
    the result could not be stored.
    """
    path = place_to_store(options.path)
    worlds = " and ".join(map(str, options.worlds))
    say(f"measuring {', '.join(options.transports)} on {worlds} ranks of this machine")
    found = Tuner(options, present(path), say).run()
    tuning.store(found, path, datetime.date.today().isoformat())
    say(f"stored in {path}")
    return path


def present(path: Path) -> Tuning:
    """What is stored there; the built-in values if that is nothing, or cannot be read."""
    try:
        return tuning.load(path) if path.exists() else tuning.BUILT_IN
    except InvalidArgumentError:
        return tuning.BUILT_IN


# Predicted against measured


def predicted_and_measured(
    collective: str,
    ranks: int,
    nbytes: int,
    algorithm: str | None,
    config: Config,
    parameters: Parameters,
) -> Iterator[str]:
    """Lines of a table: what the model says of sizes up to ``nbytes`` and what they take here.

    PycollError if the job failed; InvalidArgumentError for what cannot be measured.
    """
    names = [] if algorithm is None else [algorithm]
    options = SweepOptions(
        collective=collective,
        begin_bytes=min(nbytes, 64),
        end_bytes=nbytes,
        algorithms=names,
        samples=15,
        budget_s=0.5,
    )
    options.validate(ranks)
    options.names(single_host(ranks))
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for line in _measured_in_jobs(options, ranks, _surroundings(config)):
        found[line.bytes, line.algorithm].append(line.median_s)
    yield f"  {'bytes':>10} {'predicted':>12} {'measured':>12} {'pred./meas.':>11}  algorithm"
    for (size, name), times in found.items():
        kind = Collective[collective.upper()]
        predicted = predict(kind, name, single_host(ranks), size, parameters)
        measured = statistics.median(times)
        yield (
            f"  {size:10d} {seconds_text(predicted):>12} {seconds_text(measured):>12} "
            f"{predicted / measured:11.2f}  {name}"
        )


def _measured_in_jobs(
    options: SweepOptions, ranks: int, words: Mapping[str, str]
) -> list[Measurement]:
    """Of several jobs: in one memory may lie by chance where caches hold less of it."""
    lines: list[Measurement] = []
    for _ in range(_JOBS):
        status = launch_sweep(options, ranks, words, lines.append)
        if status != 0 or any(line.wrong for line in lines):
            raise PycollError(
                f"measuring {options.collective} on {ranks} ranks ended with status {status}"
            )
    return lines


def _surroundings(config: Config) -> Mapping[str, str]:
    return {"PYCOLL_TRANSPORTS": ",".join(config.transports)}
