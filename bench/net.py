"""Ranks on several hosts, against the peers and against the wire: one command, one table.

    .venv/bin/python bench/net.py --markdown bench/RESULTS.md --plot bench/net.svg

The hosts are network namespaces (bench/hosts.py), so it takes root; they are removed whatever
happens. float32 sum, in place, NumPy arrays through the public API, processes; libraries in turns
(bench/jobs.py). The ratio to a peer is the median over rounds of its time divided by pycoll's of
the same round; of the MPIs the faster one counts.

Where pycoll's algorithms compete, `pycoll tune --quick` measures the network first, as it is asked
of users; against the peers it has the built-in figures.

Where the cable has a rate, a token bucket at both its ends keeps to it (tc-tbf), and the measure
of what it carries is iperf3: both ways at once, cubic, in turns with the libraries. busbw is bytes
that each rank must send, divided by the time.

Bytes on the wire are counted by the interface: all that a host sends in an operation, without the
headers of its packets, in the median of five counts. The formula has only the user's bytes, so
frames' headers (48 bytes for at most 64 KiB) and credits come on top.
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

from pycoll.bench import report
from pycoll.bench.metrics import Measurement, bus_factor

TITLE = "Between hosts, against the peers and the wire"
KIB, MIB = 1 << 10, 1 << 20
#: busbw as a share of what iperf3 carries, and of the cable's rate.
WIRE_SHARE = 0.9
#: How much slower the chosen algorithm may be than the best one.
CHOICE_SHARE = 0.9
#: How far the counted bytes may be above the formula, for headers and credits.
COUNT_SLACK = 0.01
#: Operations that are counted, and how often: what TCP sends twice on a busy machine is no part of
#: what an algorithm sends, and no more than the odd count has some of it.
_COUNTED = 4
_COUNTS = 5


@dataclass(frozen=True)
class Scene:
    """A world, and how what happened in it is judged: one text for each target."""

    title: str
    hosts: int
    per_host: int
    shape: Shape | None
    algorithms: tuple[str, ...]
    parts: tuple[Part, ...]
    judge: Callable[[Result], list[str]]

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


@dataclass(frozen=True)
class Part:
    """Message sizes with one pair of targets: so many times as fast as MPI and Gloo, or nothing."""

    sizes: tuple[int, ...]
    mpi: float = 0
    gloo: float = 0


@dataclass(frozen=True)
class Result:
    """One measured size. ``wire``: bytes per second each way; ``sent``: bytes by entrant."""

    scene: Scene
    part: Part
    nbytes: int
    times: dict[str, Times]
    wire: float | None
    sent: dict[str, float] = field(default_factory=dict)

    def busbw(self, name: str = "pycoll") -> float:
        """Bytes per second that each rank must send at least."""
        factor = bus_factor("all_reduce", self.scene.ranks)
        return factor * self.nbytes / self.times[name].median


def _verdict(what: str, found: float | None, target: float) -> str:
    """ "best MPI / pycoll 2.13 of 1.3, reached"."""
    if found is None:
        return f"{what} -"
    return f"{what} {found:.2f} of {target:g}, {'reached' if found >= target else 'missed'}"


def against_peers(result: Result) -> list[str]:
    """Times as fast as the best MPI, and as Gloo."""
    part, times = result.part, result.times
    return [
        _verdict("best MPI / pycoll", mpi_ratio(times), part.mpi),
        _verdict("Gloo / pycoll", ratio(times, "gloo"), part.gloo),
    ]


def against_wire(result: Result) -> list[str]:
    """busbw as a share of what iperf3 carries."""
    share = None if result.wire is None else result.busbw() / result.wire
    return [_verdict("busbw / iperf3", share, WIRE_SHARE)]


def of_choice(result: Result) -> list[str]:
    """The chosen algorithm as a share of the best one; of a long message, of the cable's rate."""
    best = min(one.median for name, one in result.times.items() if name != "pycoll")
    told = [_verdict("best / chosen", best / result.times["pycoll"].median, CHOICE_SHARE)]
    if result.nbytes == max(result.part.sizes) and result.scene.shape is not None:
        share = result.busbw() / result.scene.shape.bytes_per_s
        told.append(_verdict("busbw / line rate", share, WIRE_SHARE))
    return told


def of_levels(result: Result) -> list[str]:
    """Hierarchical against a flat ring: time, and bytes that left the first host."""
    flat, levels = "pycoll ring", "pycoll hierarchical"
    told = [_verdict("ring / hierarchical", ratio(result.times, flat, levels), 1)]
    for name, formula in ((levels, hierarchical_bytes(result)), (flat, ring_bytes(result))):
        share = result.sent[name] / formula
        right = 1 - COUNT_SLACK <= share <= 1 + COUNT_SLACK
        verdict = "as the formula" if right else "not the formula"
        told.append(f"{name.partition(' ')[2]} sends {share:.4f} of {formula:.0f} B, {verdict}")
    return told


def hierarchical_bytes(result: Result) -> float:
    """What a host sends: its ranks share n, and each reduces its share with its counterparts."""
    hosts = result.scene.hosts
    return 2 * (hosts - 1) / hosts * result.nbytes


def ring_bytes(result: Result) -> float:
    """What a host sends: one of its ranks is followed by a rank of the next host."""
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
    ),
    Scene(
        "2 hosts, 2 ranks each, cable of 10 Gb/s",
        hosts=2,
        per_host=2,
        shape=TEN_GIGABIT,
        algorithms=_LEVELS,
        parts=(Part((64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)),),
        judge=of_levels,
    ),
)
#: The same shape at sizes that a test can wait for.
QUICK_SIZES = {0: (64, MIB), 1: (4 * MIB,), 2: (16 * KIB, MIB), 3: (MIB,)}


def quick(scenes: Sequence[Scene]) -> list[Scene]:
    """Each scene with one part of few sizes."""
    return [
        replace(one, parts=(replace(one.parts[0], sizes=QUICK_SIZES[number]),))
        for number, one in enumerate(scenes)
    ]


def measure(scene: Scene, effort: Effort, libraries: Sequence[str]) -> Iterator[Result]:
    """All sizes of one scene, on hosts made for it."""
    # Algorithms compete among themselves; peers would only prolong that. What is chosen of them
    # follows from the network, so that is measured first.
    names = libraries[:1] if scene.algorithms else libraries
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        hosts = cleanup.enter_context(Hosts(scene.hosts, scene.shape))
        tuning = Path(folder) / "tuning.json" if scene.algorithms else None
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
    """Bytes that the first host sends in one operation; what surrounds operations cancels out."""

    def of_batch(batch: int) -> int:
        before = hosts.sent(0)
        entrant.order(what="time", collective="all_reduce", bytes=nbytes, batch=batch)
        return hosts.sent(0) - before

    counts = [of_batch(2 * _COUNTED) - of_batch(_COUNTED) for _ in range(_COUNTS)]
    return statistics.median(counts) / _COUNTED


# What is shown


def cells(result: Result, names: Sequence[str]) -> list[str]:
    """A table's row: bytes, times of each entrant, busbw, targets."""
    shown = []
    for name in names:
        one = result.times.get(name)
        shown.append("-" if one is None else " / ".join(map(_us, (one.median, one.p99))))
    verdicts = "; ".join(result.scene.judge(result))
    return [str(result.nbytes), *shown, f"{result.busbw() / 1e9:.3g}", verdicts]


def _us(seconds: float) -> str:
    return report.four_digits(seconds * 1e6)


def head(names: Sequence[str]) -> list[str]:
    """The titles above ``cells``."""
    return ["bytes", *names, "busbw GB/s", "targets"]


def names_of(results: Sequence[Result]) -> list[str]:
    """The entrants that were measured, pycoll first."""
    return list(dict.fromkeys(name for result in results for name in result.times))


def scene_lines(scene: Scene, results: Sequence[Result]) -> list[str]:
    """The scene's part of the page."""
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
        "libraries in turns; microseconds of the slowest rank, median / p99; ratios are medians "
        "over rounds (bench/net.py says how). Where algorithms compete, `pycoll tune --quick` has "
        "measured the network before.",
    ]
    for scene in dict.fromkeys(result.scene for result in results):
        lines += ["", *scene_lines(scene, [one for one in results if one.scene is scene])]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += ["", f"![time and bus bandwidth against message size]({place})"]
    page.write_section(path, TITLE, lines)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Time and bus bandwidth over the cable without a limit, a curve for each library."""
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
