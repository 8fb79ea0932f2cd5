"""Compares ranks on several hosts with the peers and with the wire's rate.

    .venv/bin/python bench/net.py --markdown bench/RESULTS.md --plot bench/net.svg

The hosts are network namespaces (bench/hosts.py), so the benchmark needs root; it always removes
them. The ranks are processes that reduce NumPy arrays (float32 sum, in place) through the public
API. The samples of the libraries are interleaved (bench/jobs.py). The ratio to a peer is the median
over rounds of the peer's time divided by pycoll's time of the same round. Of the MPIs the faster
one counts.

Where pycoll's algorithms are compared with each other, `pycoll tune --quick` measures the network
first, as the documentation advises. In comparisons with the peers pycoll uses the built-in figures.

Where a cable has a rate, a token bucket at both ends enforces it (tc-tbf). iperf3 measures what the
cable carries, in both directions at once, with cubic, interleaved with the libraries. busbw is the
bytes that each rank must send, divided by the time.

The interface counts the bytes on the wire: all bytes that a host sends in an operation, without the
headers of packets, as the median of several counts. The formula has only the user's bytes; headers
of frames (48 bytes for at most 64 KiB) and credits are extra.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import page
from host_jobs import starts_on, tune
from hosts import ONE_GIGABIT, TEN_GIGABIT, Hosts, Shape, Wire, obstacle
from jobs import LIBRARIES, Effort, Entrant, Job, Times, compare, mpi_ratio, ratio, start_jobs

from pycoll.tools.bench import report
from pycoll.tools.bench.metrics import Measurement, bus_factor

TITLE = "Between hosts, against the peers and the wire"
KIB, MIB = 1 << 10, 1 << 20
#: Target of busbw as a share of iperf3's rate, and of the cable's rate.
WIRE_SHARE = 0.9
#: Target of the chosen algorithm's speed as a share of the best one's.
CHOICE_SHARE = 0.9
#: Most excess of the counted bytes over the formula, for headers and credits.
COUNT_SLACK = 0.01
#: Operations of one count, and number of counts. The median leaves out the few counts in which TCP
#: has retransmitted bytes on a busy machine.
_COUNTED = 4
_COUNTS = 5


@dataclass(frozen=True)
class Scene:
    """A world to measure, with the function that compares its results with the targets.

    ``tuned``: the network is measured first, so that the choice among ``algorithms`` knows it.
    """

    title: str
    hosts: int
    per_host: int
    shape: Shape | None
    algorithms: tuple[str, ...]
    parts: tuple[Part, ...]
    judge: Callable[[Result], list[str]]
    tuned: bool = False

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Part:
    """Message sizes with one pair of targets, the ratios to MPI and to Gloo; 0: no target."""

    sizes: tuple[int, ...]
    mpi: float = 0
    gloo: float = 0


@dataclass(frozen=True)
class Result:
    """One measured size. ``wire``: iperf3's bytes per second each way; ``sent``: bytes that a host
    sent, by entrant."""

    scene: Scene
    part: Part
    nbytes: int
    times: dict[str, Times]
    wire: float | None
    sent: dict[str, float] = field(default_factory=dict)

    def busbw(self, name: str = "pycoll") -> float:
        """Return the bytes per second that each rank must send at least."""
        factor = bus_factor("all_reduce", self.scene.ranks)
        return factor * self.nbytes / self.times[name].median


def _verdict(what: str, found: float | None, target: float) -> str:
    """Format a ratio and its target: "best MPI / pycoll 2.13 of 1.3, reached"."""
    if found is None:
        return f"{what} -"
    return f"{what} {found:.2f} of {target:g}, {'reached' if found >= target else 'missed'}"


def against_peers(result: Result) -> list[str]:
    """Judge the ratios to the best MPI and to Gloo."""
    part, times = result.part, result.times
    return [
        _verdict("best MPI / pycoll", mpi_ratio(times), part.mpi),
        _verdict("Gloo / pycoll", ratio(times, "gloo"), part.gloo),
    ]


def against_wire(result: Result) -> list[str]:
    """Judge busbw as a share of iperf3's rate."""
    share = None if result.wire is None else result.busbw() / result.wire
    return [_verdict("busbw / iperf3", share, WIRE_SHARE)]


def of_choice(result: Result) -> list[str]:
    """Judge the chosen algorithm's speed as a share of the best one's, and for a long message as a
    share of the cable's rate."""
    best = min(one.median for name, one in result.times.items() if name != "pycoll")
    lines = [_verdict("best / chosen", best / result.times["pycoll"].median, CHOICE_SHARE)]
    if result.nbytes == max(result.part.sizes) and result.scene.shape is not None:
        share = result.busbw() / result.scene.shape.bytes_per_s
        lines.append(_verdict("busbw / line rate", share, WIRE_SHARE))
    return lines


def of_levels(result: Result) -> list[str]:
    """Compare hierarchical with a flat ring: time, and bytes that left the first host."""
    flat, levels = "pycoll ring", "pycoll hierarchical"
    lines = [_verdict("ring / hierarchical", ratio(result.times, flat, levels), 1)]
    for name, formula in ((levels, hierarchical_bytes(result)), (flat, ring_bytes(result))):
        share = result.sent[name] / formula
        right = 1 - COUNT_SLACK <= share <= 1 + COUNT_SLACK
        verdict = "as the formula" if right else "not the formula"
        lines.append(f"{name.partition(' ')[2]} sends {share:.4f} of {formula:.0f} B, {verdict}")
    return lines


def hierarchical_bytes(result: Result) -> float:
    """Return the bytes that a host sends: its ranks share the message, and each reduces its share
    with its counterparts on the other hosts."""
    hosts = result.scene.hosts
    return 2 * (hosts - 1) / hosts * result.nbytes


def ring_bytes(result: Result) -> float:
    """Return the bytes that a host sends: those of the one rank whose successor in the ring is on
    the next host."""
    ranks = result.scene.ranks
    return 2 * (ranks - 1) / ranks * result.nbytes


_CHOICES = ("ring", "tree", "halving_doubling")
_LEVELS = ("hierarchical", "ring")
SCENES = (
    Scene(
        "2 hosts, 1 rank each, cable without a limit",
        hosts=2,
        per_host=1,
        shape=None,
        algorithms=(),
        parts=(
            Part((8, 64, KIB, 16 * KIB), 1.3, 10),
            Part((64 * KIB, 256 * KIB, MIB), 1.3, 4),
            Part((16 * MIB, 64 * MIB, 256 * MIB), 1.3, 2.5),
        ),
        judge=against_peers,
    ),
    Scene(
        "2 hosts, 1 rank each, cable of 10 Gb/s",
        hosts=2,
        per_host=1,
        shape=TEN_GIGABIT,
        algorithms=(),
        parts=(Part((16 * MIB, 64 * MIB, 256 * MIB)),),
        judge=against_wire,
    ),
    Scene(
        "4 hosts on a bridge, 1 rank each, cables of 1 Gb/s",
        hosts=4,
        per_host=1,
        shape=ONE_GIGABIT,
        algorithms=_CHOICES,
        parts=(Part((KIB, 16 * KIB, 128 * KIB, MIB, 8 * MIB, 64 * MIB)),),
        judge=of_choice,
        tuned=True,
    ),
    Scene(
        "2 hosts, 2 ranks each, cable of 10 Gb/s",
        hosts=2,
        per_host=2,
        shape=TEN_GIGABIT,
        algorithms=_LEVELS,
        parts=(Part((64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)),),
        judge=of_levels,
        tuned=True,
    ),
)
#: Sizes of a quick run, short enough for a test.
QUICK_SIZES = {0: (64, MIB), 1: (4 * MIB,), 2: (16 * KIB, MIB), 3: (MIB,)}


def quick(scenes: Sequence[Scene]) -> list[Scene]:
    """Reduce each scene to one part with few sizes. Only that which judges the choice of an
    algorithm is tuned."""
    return [
        replace(
            one,
            parts=(replace(one.parts[0], sizes=QUICK_SIZES[number]),),
            tuned=one.tuned and one.judge is of_choice,
        )
        for number, one in enumerate(scenes)
    ]


def measure(scene: Scene, effort: Effort, libraries: Sequence[str]) -> Iterator[Result]:
    """Measure all sizes of one scene, on hosts made for it."""
    # A comparison of algorithms does not need the peers. The choice of an algorithm depends on the
    # network, so the network is measured first.
    names = libraries[:1] if scene.algorithms else libraries
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        hosts = cleanup.enter_context(Hosts(scene.hosts, scene.shape))
        tuning = Path(folder) / "tuning.json" if scene.tuned else None
        if tuning is not None:
            tune(hosts, scene.per_host, tuning)
        starts = starts_on(hosts, scene.per_host, Path(folder), tuning)
        jobs = start_jobs(scene.ranks, folder, names, starts)
        for job in jobs:
            cleanup.callback(job.close)
        for part in scene.parts:
            for nbytes in part.sizes:
                yield _measure_size(scene, part, nbytes, hosts, jobs, effort)


def _measure_size(
    scene: Scene, part: Part, nbytes: int, hosts: Hosts, jobs: Sequence[Job], effort: Effort
) -> Result:
    entrants = [Entrant(job.name, job) for job in jobs]
    entrants += [
        Entrant(f"pycoll {name}", jobs[0], (("algorithm", name),)) for name in scene.algorithms
    ]
    wire = Wire(hosts) if scene.judge is against_wire else None
    times = compare(entrants, "all_reduce", nbytes, effort, None if wire is None else wire.sample)
    sent = {}
    if scene.judge is of_levels:
        sent = {one.name: _sent_by(hosts, one, nbytes) for one in entrants}
    return Result(scene, part, nbytes, times, None if wire is None else wire.median, sent)


def _sent_by(hosts: Hosts, entrant: Entrant, nbytes: int) -> float:
    """Return the bytes that the first host sends in one operation. Bytes of the surrounding orders
    cancel out."""

    def of_batch(batch: int) -> int:
        before = hosts.sent(0)
        entrant.order(what="time", collective="all_reduce", bytes=nbytes, batch=batch)
        return hosts.sent(0) - before

    counts = [of_batch(2 * _COUNTED) - of_batch(_COUNTED) for _ in range(_COUNTS)]
    return statistics.median(counts) / _COUNTED


# Tables and pictures


def cells(result: Result, names: Sequence[str]) -> list[str]:
    """Return a table's row: bytes, times of each entrant, busbw, targets."""
    shown = []
    for name in names:
        one = result.times.get(name)
        shown.append("-" if one is None else " / ".join(map(page.us, (one.median, one.p99))))
    verdicts = "; ".join(result.scene.judge(result))
    return [str(result.nbytes), *shown, f"{result.busbw() / 1e9:.3g}", verdicts]


def head(names: Sequence[str]) -> list[str]:
    """Return the titles of the columns of ``cells``."""
    return ["bytes", *names, "busbw GB/s", "targets"]


def names_of(results: Sequence[Result]) -> list[str]:
    """Return the entrants that were measured, pycoll first."""
    return list(dict.fromkeys(name for result in results for name in result.times))


def scene_lines(scene: Scene, results: Sequence[Result]) -> list[str]:
    """Return the lines of the scene's part of the page."""
    names = names_of(results)
    lines = [
        f"### {scene.title}",
        "",
        *page.table(head(names), [cells(result, names) for result in results]),
    ]
    rates = [result.wire for result in results if result.wire is not None]
    if rates:
        lines += ["", f"iperf3 carries {min(rates) / 1e9:.3g} GB/s each way, both ways at once."]
    return lines


def write_markdown(path: Path, results: Sequence[Result], picture: Path | None) -> None:
    """Replace this command's section of the page."""
    lines = [
        page.origin(),
        "",
        "all_reduce, float32 sum, in place, NumPy arrays, processes on network namespaces, "
        "interleaved samples; microseconds of the slowest rank, median / p99; ratios are medians "
        "over rounds (bench/net.py explains them). Where algorithms compete, `pycoll tune --quick` "
        "has measured the network before.",
    ]
    for scene in dict.fromkeys(result.scene for result in results):
        lines += ["", *scene_lines(scene, [one for one in results if one.scene is scene])]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += ["", f"![time and bus bandwidth against message size]({place})"]
    page.write_section(path, TITLE, lines)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw time and bus bandwidth over the cable without a limit, a curve per library."""
    mine = [result for result in results if result.scene.judge is against_peers]
    curves = {
        name: [_point(result, name) for result in mine if name in result.times]
        for name in names_of(mine)
    }
    report.draw(path, curves, "all_reduce in place, 2 hosts, float32, TCP over veth; median")


def _point(result: Result, name: str) -> Measurement:
    times = result.times[name]
    return Measurement(
        collective="all_reduce",
        algorithm=name,
        transport="tcp",
        ranks=result.scene.ranks,
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=8.0, help="longest time for one size")
    parser.add_argument("--scene", type=int, choices=range(len(SCENES)), action="append")
    parser.add_argument("--library", choices=LIBRARIES[1:], action="append", help="only these")
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    parser.add_argument("--plot", type=Path, help="draw a .png, .pdf or .svg")
    options = parser.parse_args()
    why = obstacle()
    if why:
        raise SystemExit(f"hosts cannot be made here: {why}")
    effort = Effort(4, 0.5) if options.quick else Effort(options.rounds, options.budget_s)
    libraries = ("pycoll", *(options.library or LIBRARIES[1:]))
    scenes = quick(SCENES) if options.quick else list(SCENES)
    results: list[Result] = []
    for scene in [scenes[number] for number in options.scene or range(len(scenes))]:
        print(f"# {scene.title}; us of the slowest rank, median / p99; ratio of target")
        for result in measure(scene, effort, libraries):
            names = list(result.times)
            line = [f"{t}: {c}" for t, c in zip(head(names), cells(result, names), strict=True)]
            print("  ".join(line), flush=True)
            results.append(result)
    if options.plot is not None:
        draw(options.plot, results)
    if options.markdown is not None:
        write_markdown(options.markdown, results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
