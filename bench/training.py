"""Training by all policies, against the peers and against the wire: one command, one table.

    .venv/bin/python bench/training.py --markdown bench/RESULTS.md --plot bench/training.svg

takes about eight minutes, --budget-s more or less; a bar on stderr says how far it is.

Two ranks, on one host and on two hosts (network namespaces, which take root) whose cable carries 10
Gb/s by a token bucket at both its ends. What is trained is in training_models.py, how in
training_worker.py: every policy of pycoll.torch's DistributedOptimizer, tensor by tensor ("hvd"),
DistributedDataParallel over pycoll and over Gloo, and Horovod where it is installed. "ddp alone"
sends nothing: it shows what DistributedDataParallel copies for itself; what a step takes longer
than that is communication. All are checked, and then take turns (bench/jobs.py); float32, one
thread per rank, SGD.

Before that, calls alone are timed: many small tensors, and sets of gradients (training_calls.py).
Models are then trained where something is to be reached by them, or where --model says.

A time is that of a step of the slowest rank, the median over rounds; several steps in a row are one
sample, since the last one has no next forward pass. Not hidden is what a step takes longer than the
same without other ranks, in the same rounds. The share hidden is what of one contiguous all_reduce
of the same bytes that is less. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import page
import training_calls
from host_jobs import places_of
from hosts import DEVICE, TEN_GIGABIT, Hosts, obstacle
from jobs import Effort, Entrant, Job, Start, Starts, Times, compare, ratio

from pycoll.bench import report
from pycoll.optim import POLICIES

TITLE = "Training, by policies and against the peers"
WORKER = str(Path(__file__).resolve().parent / "training_worker.py")
RANKS = 2
LIBRARIES = ("pycoll", "gloo", "horovod")
#: Names of entrants: of the pycoll job by their way, of others by the library.
ALONE, WHOLE, SINGLY, DDP_ALONE, DDP, GLOO, HOROVOD = (
    *("alone", "all_reduce", "hvd", "ddp alone", "ddp", "Gloo DDP", "Horovod"),
)
SETS = training_calls.SETS
REAL = ("MLP, 25 M", "transformer")
QUICK = ("few gradients", "small transformer")
HOROVODS = training_calls.HOROVODS


@dataclass(frozen=True)
class Scene:
    """Where the ranks are, and what is trained there unless something else is asked for."""

    title: str
    hosts: int
    models: tuple[str, ...]

    @property
    def is_wire(self) -> bool:
        """Whether bytes go over a cable with a rate."""
        return self.hosts > 1


SCENES = (
    Scene("2 ranks on one host", 1, (SETS[0], *REAL)),
    Scene("2 hosts, cable of 10 Gb/s", RANKS, REAL[1:]),
)
#: What calls take of the time, in trained models; the rest is shared equally.
CALLS_SHARE = 0.6


@dataclass(frozen=True)
class Result:
    """One model in one scene. ``why``: what auto says of its choice."""

    scene: Scene
    model: str
    nbytes: int
    times: dict[str, Times]
    why: str

    def exposed(self, name: str, than: str = ALONE) -> float:
        """Seconds that a step takes longer than without other ranks; at least a microsecond."""
        pairs = zip(self.times[name].batches, self.times[than].batches, strict=True)
        return max(1e-6, statistics.median(step - less for step, less in pairs))

    def hidden(self, name: str) -> float:
        """The share of one contiguous all_reduce that computing hides."""
        return max(0.0, 1 - self.exposed(name) / self.times[WHOLE].median)


# Jobs


def free_ports() -> int:
    """The first of two neighbouring ports that are free here now."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


def starts_in(hosts: Hosts | None) -> Starts:
    """Ranks by this Python, one on each host, or all here."""
    address, device, port = "127.0.0.1", "lo", free_ports()
    if hosts is not None:
        address, device = hosts.addresses[0], DEVICE

    def starts(name: str, ranks: int, path: str) -> list[Start]:
        worker = [sys.executable, WORKER, name, path]
        if name == "horovod":
            return [Start(["horovodrun", "-np", str(ranks), *worker])]
        places = places_of(name, address, device, ranks, port)
        if hosts is None:
            return [Start([*worker, *(json.dumps(places(rank, rank)) for rank in range(ranks))])]
        return [Start(hosts.on(rank, worker), places(rank, rank)) for rank in range(ranks)]

    return starts


def started(scene: Scene, folder: str, hosts: Hosts | None, libraries: Sequence[str]) -> list[Job]:
    """A job for each library that is there; says on stderr which are not."""
    jobs = []
    for name in libraries:
        if name == "horovod" and (importlib.util.find_spec(name) is None or scene.is_wire):
            why = "is compared on one host only" if scene.is_wire else "not installed, left out"
            print(f"# {name}: {why}", file=sys.stderr)
            continue
        try:
            jobs.append(Job(name, RANKS, folder, starts_in(hosts)))
        except (OSError, ValueError) as error:
            if name == "pycoll":
                raise SystemExit(f"pycoll did not start: {error}") from error
            print(f"# {name}: did not start ({error}), left out", file=sys.stderr)
    return jobs


def entrants_of(jobs: Sequence[Job]) -> list[Entrant]:
    """Those that are compared."""
    ways = (ALONE, WHOLE, *POLICIES, "auto", SINGLY, DDP_ALONE, DDP)
    found = [Entrant(way, jobs[0], (("way", way),)) for way in ways]
    names = {"gloo": GLOO, "horovod": HOROVOD}
    return found + [Entrant(names[job.name], job, (("way", DDP),)) for job in jobs[1:]]


class Progress:
    """A bar on stderr, filled as the time goes that everything may take together."""

    def __init__(self, budget_s: float, parts: float) -> None:
        self._begin, self._budget_s, self._left = time.monotonic(), budget_s, parts
        self._bar = click.progressbar(length=max(1, round(budget_s)), file=sys.stderr)

    def share_s(self, parts: float = 1.0) -> float:
        """The seconds that the next so many parts have, of what is left for all."""
        left_s = max(0.0, self._budget_s - (time.monotonic() - self._begin))
        share, self._left = left_s * parts / max(parts, self._left), self._left - parts
        return share

    def tick(self) -> None:
        """Show how far it is."""
        elapsed = min(round(time.monotonic() - self._begin), self._bar.length or 0)
        self._bar.update(elapsed - self._bar.pos)

    def tell(self, text: str) -> None:
        """Say what is under way."""
        self._bar.label = text
        self._bar.render_progress()

    def hide(self) -> None:
        """Make room for other output."""
        if sys.stderr.isatty():
            click.echo("\r\x1b[2K", nl=False, err=True)


def measure(
    scene: Scene,
    models: Sequence[str],
    rounds: int,
    libraries: Sequence[str],
    progress: Progress,
) -> Iterator[Result]:
    """All models in one scene."""
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        hosts = None
        if scene.hosts > 1:
            hosts = cleanup.enter_context(Hosts(scene.hosts, TEN_GIGABIT))
        jobs = started(scene, folder, hosts, libraries)
        for job in jobs:
            cleanup.callback(job.close)
        for model in models:
            progress.tell(f"{model}; {scene.title}")
            entrants = entrants_of(jobs)
            nbytes = max(entrants[0].order(what="bytes", collective=model))
            effort = Effort(rounds, progress.share_s(), from_begin=True)
            times = compare(entrants, model, nbytes, effort, progress.tick)
            auto = next(one for one in entrants if one.name == "auto")
            why = auto.order(what="explain", collective=model)[0]
            yield Result(scene, model, nbytes, times, why)


# What is shown


def judged(result: Result) -> list[str]:
    """What was to be reached with this model in this scene."""
    told = []
    times = result.times
    if result.model in HOROVODS and not result.scene.is_wire:
        rate = result.nbytes / result.exposed(SINGLY)
        told.append(page.verdict("tensor by tensor / Horovod", rate / HOROVODS[result.model], 10))
        share = times[WHOLE].median / result.exposed("auto")
        told.append(page.verdict("scheduler's rate / contiguous all_reduce's", share, 0.9))
    if result.model in REAL and GLOO in times and not result.scene.is_wire:
        shorter = result.exposed(GLOO, DDP_ALONE) / result.exposed(DDP, DDP_ALONE)
        told.append(page.verdict("communication of Gloo DDP / DDP", shorter, 5))
        shorter = result.exposed(GLOO) / result.exposed(DDP)
        told.append(f"with what DistributedDataParallel copies for itself {shorter:.2f}")
    if result.scene.is_wire:
        best = min((name for name in POLICIES), key=lambda name: times[name].median)
        told.append(page.verdict(f"{best} / auto", ratio(times, best, "auto") or 0, 0.97))
        for name in ("wfbp", "bsp"):
            told.append(page.verdict(f"{name} / mg_wfbp", ratio(times, name, "mg_wfbp") or 0, 1))
    return told


def head() -> list[str]:
    """The titles above ``rows``."""
    return ["way", "step, ms", "not hidden, ms", "hidden", "Gloo DDP / this"]


def rows(result: Result) -> list[list[str]]:
    """A row for each way of training."""
    found = []
    for name, one in result.times.items():
        cells = [name, report.four_digits(one.median * 1e3)]
        if name in (ALONE, WHOLE):
            found.append([*cells, "-", "-", "-"])
            continue
        against = ratio(result.times, GLOO, name)
        found.append(
            [
                *cells,
                report.four_digits(result.exposed(name) * 1e3),
                f"{result.hidden(name):.0%}",
                "-" if against is None else f"{against:.2f}",
            ]
        )
    return found


def write_markdown(
    path: Path,
    results: Sequence[Result],
    calls: training_calls.Found | None,
    picture: Path | None,
) -> None:
    """Replace this command's section of the page."""
    lines = [
        page.origin(),
        "",
        "float32, SGD, one thread per rank, ways in turns; milliseconds of a step of the slowest "
        "rank, medians over rounds (bench/training.py says how).",
    ]
    for result in results:
        lines += ["", f"### {result.model}, {result.nbytes / 1e6:.0f} MB; {result.scene.title}", ""]
        lines += page.table(head(), rows(result))
        lines += ["", *(f"{line}." for line in judged(result))]
        lines += ["", "```", *result.why.splitlines(), "```"]
    if calls is not None:
        lines += ["", f"### Calls; {SCENES[0].title}", ""]
        lines += page.table(["what", "measured", "against"], training_calls.rows(calls))
        lines += ["", *(f"{line}." for line in training_calls.judged(calls))]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += ["", f"![a step of every way: computing, and what is not hidden]({place})"]
    page.write_section(path, TITLE, lines)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Bars of the steps: what is computed, and communication that is not hidden."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(
        1, len(results), figsize=(3.2 * len(results), 3.6), squeeze=False, layout="constrained"
    )
    for axes, result in zip(every[0], results, strict=True):
        names = [name for name in result.times if name not in (ALONE, WHOLE)][::-1]
        alone = result.times[ALONE].median * 1e3
        axes.barh(names, [alone] * len(names), color="0.75", label="computing")
        late = [result.exposed(name) * 1e3 for name in names]
        axes.barh(names, late, left=alone, color="C0", label="not hidden")
        axes.set_title(f"{result.model}\n{result.scene.title}", fontsize=9)
        axes.set_xlabel("ms per step")
    every[0][0].legend(fontsize=8)
    figure.savefig(path)


def show_calls(quick: bool, progress: Progress) -> training_calls.Found:
    """Measure what calls take, and print it."""
    sets = training_calls.SMALL_SETS if quick else SETS
    budget_s = progress.share_s(CALLS_SHARE)
    found = training_calls.measured(3 if quick else 15, sets, budget_s, progress.tick)
    progress.hide()
    for what, measured, against in training_calls.rows(found):
        print(f"{what:<60}{measured:>14}  {against}", flush=True)
    for text in training_calls.judged(found):
        print(f"# {text}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few rounds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--budget-s", type=float, default=420.0, help="about how long it all takes")
    parser.add_argument("--scene", type=int, choices=range(len(SCENES)), action="append")
    parser.add_argument("--model", choices=(*SETS, *REAL, *QUICK), action="append")
    parser.add_argument("--library", choices=LIBRARIES[1:], action="append", help="only these")
    parser.add_argument("--without-calls", action="store_true", help="steps of training only")
    parser.add_argument("--markdown", type=Path, help="put the tables on this page")
    parser.add_argument("--plot", type=Path, help="draw a .png, .pdf or .svg")
    options = parser.parse_args()
    rounds, budget_s = (3, 4.0) if options.quick else (options.rounds, options.budget_s)
    libraries = ("pycoll", *(options.library or LIBRARIES[1:]))
    chosen = options.model or (QUICK if options.quick else None)
    work: list[tuple[Scene, Sequence[str]]] = []
    for scene in (SCENES[number] for number in options.scene or range(len(SCENES))):
        why = obstacle() if scene.is_wire else ""
        if why:
            print(f"# {scene.title}: hosts cannot be made here: {why}", file=sys.stderr)
        else:
            work.append((scene, chosen or scene.models))
    with_calls = not options.without_calls and any(scene is SCENES[0] for scene, _ in work)
    parts = sum(len(models) for _, models in work) + with_calls * CALLS_SHARE
    progress = Progress(budget_s, parts)
    calls = None
    if with_calls:
        progress.tell(f"calls; {SCENES[0].title}")
        calls = show_calls(options.quick, progress)
    results: list[Result] = []
    for scene, models in work:
        for result in measure(scene, models, rounds, libraries, progress):
            progress.hide()
            print(f"# {result.model}, {result.nbytes / 1e6:.0f} MB; {scene.title}")
            for row in rows(result):
                pairs = zip(head()[1:], row[1:], strict=True)
                print(f"{row[0]:<14} " + "  ".join(f"{t}: {c}" for t, c in pairs), flush=True)
            for text in (*judged(result), *result.why.splitlines()):
                print(f"# {text}")
            results.append(result)
    if options.plot is not None:
        draw(options.plot, results)
    if options.markdown is not None:
        write_markdown(options.markdown, results, calls, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
