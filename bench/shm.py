"""Compares ranks that share memory with the peers and with the memory's rate.

    .venv/bin/python bench/shm.py --markdown bench/RESULTS.md --plot bench/shm.svg

The ranks are processes with arrays of float32 (sums in place if the collective allows it) that call
the public API. The samples of the libraries are interleaved (bench/jobs.py). The ratio to a peer is
the median over rounds of the peer's time divided by pycoll's time of the same round. Of the MPIs
the faster one counts. "bytes" are those of the whole message: a rank of gather or all_gather gives
its share of them, and one of scatter or reduce_scatter gets its share. send_recv is a message from
rank 0 to rank 1 and another one back.

The limit of a long all_reduce is 2 n p / B: each of p ranks reads its n bytes once and writes them
once. B is the rate of the memory when every core runs `a += b` at once, as threads of one process,
on its own arrays that fit in no cache, in the same run. Three bytes count for each byte of `a`: `a`
is read and written while `b` is read. B is the median over rounds, and the share is limit / time.

The first column of pycoll has ordinary NumPy arrays and the second torch tensors, which are copied
through slots. From 8 KiB on a third column has shared arrays, which peers on the same host read in
place (docs/shared-arrays.md). The table has the shares of the limit of all kinds.

Where many ranks share two cores, the table also has the processor time of all ranks together.

For an all_reduce of 2 ranks from 64 KiB up, the table also has the time of a bare exchange of as
many bytes: two processes with nothing but slots between them, and ordinary memory
(bare_exchange.cpp), in the same rounds. It is a lower bound for libraries with slots on this
machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import page
from bare_exchange import BareExchange, built
from jobs import LIBRARIES, Effort, Entrant, Job, Times, compare, mpi_ratio, ratio, start_jobs

from pycoll.tools.bench import report
from pycoll.tools.bench.metrics import Measurement
from pycoll.tools.info import facts

TITLE = "Shared memory, against the peers and the hardware"
KIB, MIB = 1 << 10, 1 << 20
#: Names of the columns of pycoll with torch tensors, and with arrays that peers read in place.
TORCH, SHARED = "pycoll, torch", "pycoll, shared arrays"
#: The kinds of memory of pycoll's columns, and what texts call them.
KINDS = {"pycoll": "ordinary arrays", TORCH: "torch tensors", SHARED: "shared arrays"}
#: Bytes of `a` per core when measuring B. With `b` that is more than any cache has per core.
RATE_BYTES = 64 * MIB
#: Targets of the share of the limit, by kind of memory.
SHARES = {"pycoll": 0.65, TORCH: 0.65, SHARED: 0.70}
#: Least message sizes at which shared arrays, and the bare exchange, are measured too.
SHARED_BYTES, LONG_BYTES = 8 * KIB, 64 * KIB


@dataclass(frozen=True)
class Row:
    """Message sizes with their targets: the least ratios to the faster MPI, of ordinary and of
    shared arrays, and to Gloo, which is left out without a target."""

    collective: str
    ranks: int
    sizes: tuple[int, ...]
    mpi: float
    shared: float
    gloo: float | None = None
    limit: bool = False
    #: Whether the processor time of all ranks is measured too.
    processor: bool = False
    #: The least mean, over the sizes, of the ratios of ordinary arrays.
    mean: float | None = None


#: Collectives that move values without adding them.
MOVING = ("broadcast", "all_gather", "gather", "scatter", "all_to_all")
ADDING = ("reduce_scatter", "reduce", "scan")


def _long(collective: str) -> Row:
    sizes = (64, 4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    gloo = 10 if collective in ("broadcast", "all_gather", "reduce_scatter") else None
    if collective in MOVING:
        return Row(collective, 2, sizes, 1.15, 1.15, gloo, mean=1.3)
    return Row(collective, 2, sizes[:-1], 1.7, 1.7, gloo)


def _shared_cores(ranks: int, collective: str) -> Row:
    sizes = (64, 4 * KIB, 64 * KIB, MIB, 16 * MIB)
    return Row(collective, ranks, sizes, 1.5, 1.5)


ROWS = (
    Row("all_reduce", 2, (8, 64, 256, KIB), 2, 1.5, 50),
    Row("all_reduce", 2, (4 * KIB, 8 * KIB, 16 * KIB), 2, 1.5, 40),
    Row("all_reduce", 2, (64 * KIB,), 2, 2, 10),
    Row("all_reduce", 2, (256 * KIB, MIB, 4 * MIB, 16 * MIB), 1.8, 2, 10),
    Row("all_reduce", 2, (32 * MIB, 64 * MIB), 2.5, 3, 6),
    Row("all_reduce", 2, (256 * MIB,), 2.5, 4, 8, limit=True),
    *map(_long, (*MOVING, *ADDING)),
    Row("send_recv", 2, (8, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB), 1.2, 1.2),
    # Oversubscribed: these ranks run on two cores, also on a machine that has more.
    *(_shared_cores(4, collective) for collective in ("all_reduce", *MOVING, *ADDING)),
    Row("all_reduce", 8, (64,), 2.5, 2.5, 5),
    Row("all_reduce", 8, (KIB, 16 * KIB), 2, 3, 5),
    Row("all_reduce", 8, (MIB, 4 * MIB, 16 * MIB), 1.5, 2, 2),
    *(_shared_cores(8, collective) for collective in (*MOVING, *ADDING)),
    Row("all_reduce", 64, (64,), 1, 1, processor=True),
    Row("barrier", 64, (0,), 1, 1, processor=True),
)
#: The rows of a quick run, short enough for a test.
QUICK = (
    Row("all_reduce", 2, (64, 16 * KIB), 2, 1.5, 50),
    Row("all_reduce", 2, (MIB,), 1.8, 4, 8, limit=True),
    Row("all_gather", 2, (16 * KIB,), 1.15, 1.1, 10, mean=1.3),
    Row("send_recv", 2, (64,), 1.2, 1.2),
    Row("all_reduce", 4, (KIB,), 1.5, 3, 5, processor=True),
)
OVERSUBSCRIBED_CORES = 2
#: Rows of more ranks have no torch tensors.
TORCH_RANKS_MAX = 8
#: Seconds of a measurement of processor time.
PROCESSOR_S = 0.5


@dataclass(frozen=True)
class Result:
    """One measured size. ``rate``: B in bytes per second, if the row has a limit. ``bare_s``:
    seconds of a bare exchange, if it was measured. ``processor_s``: seconds of processor time of
    all ranks, by library, if they were measured."""

    row: Row
    nbytes: int
    times: dict[str, Times]
    rate: float | None
    bare_s: float | None
    processor_s: dict[str, float]

    def share(self, name: str) -> float | None:
        """Return the reached share of the limit; None without a limit."""
        if self.rate is None or name not in self.times:
            return None
        return limit_s(self, self.rate) / self.times[name].median


def limit_s(result: Result, rate: float) -> float:
    """Return the least seconds of an all_reduce at ``rate`` bytes of memory per second."""
    return 2 * result.nbytes * result.row.ranks / rate


class MemoryRate:
    """Samples of B: `a += b` on all cores at once."""

    def __init__(self, nbytes: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._pairs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._bytes = 3 * nbytes * len(self._cores)
        self.samples: list[float] = []

        def make(core: int) -> None:
            # The core that will use the memory writes it first, so that it is near that core.
            self._pairs[core] = (
                np.ones(nbytes // 4, np.float32),
                np.ones(nbytes // 4, np.float32),
            )

        self._on_every_core(make)

    def _on_every_core(self, work: Callable[[int], None]) -> None:
        def run(core: int) -> None:
            os.sched_setaffinity(0, {core})
            work(core)

        threads = [threading.Thread(target=run, args=(core,)) for core in self._cores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def sample(self) -> None:
        """Add a sample: all bytes divided by the time of the slowest core."""
        gate = threading.Barrier(len(self._cores))
        spent: list[float] = []

        def add(core: int) -> None:
            a, b = self._pairs[core]
            gate.wait()
            begin = time.perf_counter()
            np.add(a, b, out=a)
            spent.append(time.perf_counter() - begin)

        self._on_every_core(add)
        self.samples.append(self._bytes / max(spent))

    @property
    def median(self) -> float:
        """Return the median in bytes per second."""
        return statistics.median(self.samples)


@contextlib.contextmanager
def cores_for(ranks: int) -> Iterator[None]:
    """Within the context, bind this process and its children to two cores if there are more than
    two ranks, so that these are oversubscribed; else leave all cores."""
    every = os.sched_getaffinity(0)
    if ranks > 2:
        os.sched_setaffinity(0, sorted(every)[:OVERSUBSCRIBED_CORES])
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def measure(rows: Sequence[Row], effort: Effort, libraries: Sequence[str]) -> Iterator[Result]:
    """Measure all rows, grouped by their number of ranks."""
    for ranks in dict.fromkeys(row.ranks for row in rows):
        mine = [row for row in rows if row.ranks == ranks]
        names = [one for one in libraries if one != "gloo" or any(row.gloo for row in mine)]
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
            program = built(folder) if ranks == 2 else None
            with cores_for(ranks):
                jobs = start_jobs(ranks, folder, names)
            for job in jobs:
                cleanup.callback(job.close)
            for row in mine:
                for nbytes in row.sizes:
                    yield _measured(row, nbytes, jobs, effort, program)


def _measured(
    row: Row, nbytes: int, jobs: Sequence[Job], effort: Effort, program: Path | None
) -> Result:
    entrants = [Entrant(job.name, job) for job in jobs if row.gloo or job.name != "gloo"]
    long = nbytes >= LONG_BYTES
    if nbytes >= SHARED_BYTES:
        entrants.insert(1, Entrant(SHARED, jobs[0], (("memory", "shared"),)))
    # torch takes seconds to import: that of many ranks would take minutes.
    if has_torch() and row.collective != "barrier" and row.ranks <= TORCH_RANKS_MAX:
        entrants.insert(1, Entrant(TORCH, jobs[0], (("memory", "torch"),)))
    rate = MemoryRate(min(RATE_BYTES, nbytes)) if row.limit else None
    bare = None
    if program is not None and long and row.collective == "all_reduce":
        bare = BareExchange(program, nbytes)

    def sample() -> None:
        if rate is not None:
            rate.sample()
        if bare is not None:
            bare.sample()

    times = compare(entrants, row.collective, nbytes, effort, sample)
    if bare is not None:
        bare.close()
    rate_found, bare_found = (None if one is None else one.median for one in (rate, bare))
    spent = processor_times(entrants, row, nbytes, times) if row.processor else {}
    return Result(row, nbytes, times, rate_found, bare_found, spent)


def has_torch() -> bool:
    """Return whether this Python, which also runs pycoll's ranks, has torch."""
    return importlib.util.find_spec("torch") is not None


def processor_times(
    entrants: Sequence[Entrant], row: Row, nbytes: int, times: dict[str, Times]
) -> dict[str, float]:
    """Return each library's seconds of processor time in an operation, of all ranks together."""
    found = {}
    for one in entrants:
        batch = max(1, int(PROCESSOR_S / times[one.name].median))
        words = {"collective": row.collective, "bytes": nbytes, "batch": batch, "warm": 1}
        found[one.name] = sum(one.order(what="processor", **words))
    return found


# Tables and pictures


def ratio_text(found: float | None, target: float) -> str:
    """Format a ratio and its target: "2.13 of 1.5, reached", or a dash without that peer."""
    if found is None:
        return "-"
    verdict = "reached" if found >= target else "missed"
    return f"{found:.2f} of {target:g}, {verdict}"


def cells(result: Result, names: Sequence[str]) -> list[str]:
    """Return a table's row: the case, times of each library, ratios with their targets."""
    row, times = result.row, result.times
    shown = []
    for name in names:
        one = times.get(name)
        shown.append("-" if one is None else " / ".join(map(page.us, (one.median, one.p99))))
    return [
        *(row.collective, str(row.ranks), str(result.nbytes), *shown),
        "-" if result.bare_s is None else page.us(result.bare_s),
        ratio_text(mpi_ratio(times), row.mpi),
        ratio_text(mpi_ratio(times, TORCH), row.mpi),
        ratio_text(mpi_ratio(times, SHARED), row.shared),
        "-" if row.gloo is None else ratio_text(ratio(times, "gloo"), row.gloo),
    ]


def head(names: Sequence[str]) -> list[str]:
    """Return the titles of the columns of ``cells``."""
    ratios = ("best MPI / pycoll", f"best MPI / {TORCH}", f"best MPI / {SHARED}", "Gloo / pycoll")
    return ["collective", "ranks", "bytes", *names, "bare exchange", *ratios]


def lines_of(results: Sequence[Result]) -> list[str]:
    """Return the lines below the table: shares of the limit, means, processor times, and what
    ``pycoll info`` says of slots."""
    slots = f"pycoll info says of shared memory: {dict(facts())['transport shm']}"
    return [*limit_lines(results), *mean_lines(results), *processor_lines(results), slots]


def mean_lines(results: Sequence[Result]) -> list[str]:
    """Return the lines with the mean ratio of each row that has a target of it."""
    lines = []
    for row in dict.fromkeys(one.row for one in results if one.row.mean is not None):
        assert row.mean is not None
        for name in ("pycoll", TORCH):
            ratios = [mpi_ratio(one.times, name) for one in results if one.row is row]
            found = [one for one in ratios if one is not None]
            if found:
                mean = ratio_text(statistics.mean(found), row.mean)
                case = f"{row.collective} on {row.ranks} ranks, {KINDS[name]}"
                lines.append(f"{case}: best MPI / pycoll {mean}, mean")
    return lines


def processor_lines(results: Sequence[Result]) -> list[str]:
    """Return the lines with the processor time of all ranks."""
    return [
        f"{one.row.collective} of {one.nbytes} bytes on {one.row.ranks} ranks takes processor "
        "time, us of all ranks: "
        + ", ".join(f"{name} {page.us(spent)}" for name, spent in one.processor_s.items())
        for one in results
        if one.processor_s
    ]


def limit_lines(results: Sequence[Result]) -> list[str]:
    """Return the lines that compare the longest all_reduce with the memory's rate."""
    lines = []
    for result in results:
        for name, target in SHARES.items():
            share = result.share(name)
            if share is None or result.rate is None:
                continue
            aim = f", target {target:.0%}, {'reached' if share >= target else 'missed'}"
            lines.append(
                f"{result.row.collective} of {result.nbytes} bytes on {result.row.ranks} ranks, "
                f"{KINDS[name]}: {share:.0%} of 2np/B{aim} "
                f"(B = {result.rate / 1e9:.3g} GB/s: a += b on all cores, 3 bytes per byte of a)"
            )
    return lines


def names_of(results: Sequence[Result]) -> list[str]:
    """Return the libraries that were measured, pycoll first."""
    known = (*KINDS, *LIBRARIES[1:])
    return [name for name in known if any(name in result.times for result in results)]


def write_markdown(
    path: Path, results: Sequence[Result], texts: Sequence[str], picture: Path | None
) -> None:
    """Replace this command's section of the page; ``texts`` are the lines below the table."""
    names = names_of(results)
    lines = [
        page.origin(),
        "",
        "float32 sum, in place, ordinary NumPy arrays first, processes, interleaved samples; "
        "microseconds of the slowest rank, median / p99; ratios are medians over rounds "
        "(bench/shm.py says how). Shared arrays are those of docs/shared-arrays.md. "
        "A bare exchange is what two processes need that have nothing but slots between them.",
        "",
        *page.table(head(names), [cells(result, names) for result in results]),
    ]
    for text in texts:
        lines += ["", text + "."]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += ["", f"![time and bus bandwidth against message size]({place})"]
    page.write_section(path, TITLE, lines)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw time and bus bandwidth of the all_reduce of 2 ranks, a curve per library, and one of
    the limit of long messages."""
    mine = [result for result in results if (result.row.collective, result.row.ranks) == _DRAWN]
    curves = {
        name: [_point(result, name, result.times[name]) for result in mine if name in result.times]
        for name in names_of(mine)
    }
    rates = [result.rate for result in mine if result.rate is not None]
    if rates:
        limits = [(one, limit_s(one, rates[-1])) for one in mine if one.nbytes >= LONG_BYTES]
        curves[_LIMIT] = [_point(one, "limit", Times([s], [s])) for one, s in limits]
    title = "all_reduce in place, 2 ranks, float32, shared memory; median"
    report.draw(path, curves, title, below=_LIMIT)


_DRAWN = ("all_reduce", 2)
_LIMIT = "limit, 2np/B"


def _point(result: Result, name: str, times: Times) -> Measurement:
    row = result.row
    return Measurement(
        collective=row.collective,
        algorithm=name,
        transport="shm",
        ranks=row.ranks,
        bytes=result.nbytes,
        count=result.nbytes // 4,
        dtype="float32",
        op="sum",
        root=-1,
        median_s=times.median,
        p99_s=times.p99,
        wrong=0,
        iterations=len(times.batches),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--budget-s", type=float, default=8.0, help="longest time for one size")
    parser.add_argument("--ranks", type=int, action="append", help="only rows of these ranks")
    parser.add_argument("--collective", action="append", help="only rows of these")
    parser.add_argument("--library", choices=LIBRARIES[1:], action="append", help="only these")
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    parser.add_argument("--plot", type=Path, help="draw a .png, .pdf or .svg")
    options = parser.parse_args()
    effort = Effort(4, 0.5) if options.quick else Effort(options.rounds, options.budget_s)
    libraries = ("pycoll", *(options.library or LIBRARIES[1:]))
    rows = [
        row
        for row in (QUICK if options.quick else ROWS)
        if (not options.ranks or row.ranks in options.ranks)
        and (not options.collective or row.collective in options.collective)
    ]
    if not rows:
        parser.error("no row has these ranks and collectives")
    print("# us of the slowest rank, median / p99; ratio of target")
    results: list[Result] = []
    try:
        for result in measure(rows, effort, libraries):
            names = list(result.times)
            line = [f"{t}: {c}" for t, c in zip(head(names), cells(result, names), strict=True)]
            print(line[0].partition(": ")[2] + "  " + "  ".join(line[1:]), flush=True)
            results.append(result)
    finally:
        # A run takes half an hour: where a row fails, those before it are kept.
        if results:
            finish(results, options)
    return 0


def finish(results: Sequence[Result], options: argparse.Namespace) -> None:
    """Print the lines below the table, draw the picture, and write the page."""
    texts = lines_of(results)
    for text in texts:
        print(f"# {text}")
    if options.plot is not None:
        draw(options.plot, results)
    if options.markdown is not None:
        write_markdown(options.markdown, results, texts, options.plot)


if __name__ == "__main__":
    sys.exit(main())
