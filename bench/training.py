"""Compares training by all policies with the peers and with the wire's rate.

    .venv/bin/python bench/training.py --markdown bench/RESULTS.md --plot bench/training.svg

--budget-s sets its approximate time in seconds; a bar on stderr shows the progress.

Two ranks train on one host, and on two hosts (network namespaces, which need root) whose cable has
a rate of 10 Gb/s, which a token bucket at both ends enforces. training_models.py has the models.
training_worker.py has the ways to train: every policy of pycoll.torch's DistributedOptimizer,
tensor by tensor ("hvd"), DistributedDataParallel over pycoll and over Gloo, and Horovod where it is
installed. All ways are checked, and then their samples are interleaved (bench/jobs.py). They use
float32, one thread per rank, and SGD.

DistributedDataParallel is also compared separately, in more rounds. "ddp alone" sends nothing: it
shows the cost of the copies that DDP makes without any communication. "ddp in step" sends 32 bytes
for each bucket, so that ranks wait for the slower one, as over an infinitely fast network. The
additional time of a "ddp" step over "ddp in step" is communication. On a machine with other load it
is less than the additional time over "ddp alone", which is reported too.

Before the training, calls alone are timed: many small tensors, and sets of gradients
(training_calls.py). That part compares with Horovod and with one all_reduce, and has the targets.
Then the models of each scene are trained, or those of --model. A training step shows the same two
ratios for its communication that is not hidden. It communicates more slowly than the calls alone:
its gradients are new memory each time, which no peer has mapped, and it waits for the slower rank.
Horovod runs on one host only, with its own Python (setup_horovod.sh).

A time is that of a step of the slowest rank, as the median over rounds. Several steps in a row are
one sample, since the last step has no next forward pass. The time not hidden is the additional time
of a step over a step without other ranks, in the same rounds. The hidden share is 1 minus that time
divided by the time of one contiguous all_reduce of the same bytes. Ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import horovod_calls
import training_calls
from host_jobs import places_of
from hosts import DEVICE, TEN_GIGABIT, Hosts, obstacle
from jobs import Effort, Entrant, Job, Start, Starts, compare
from training_results import (
    DDP,
    EVERY,
    GLOO,
    HOROVOD,
    PARALLEL,
    RANKS,
    REAL,
    SCENES,
    Result,
    Scene,
    draw,
    head,
    judged,
    rows,
    write_markdown,
)

WORKER = str(Path(__file__).resolve().parent / "training_worker.py")
LIBRARIES = ("pycoll", "gloo", "horovod")
QUICK = ("few gradients", "small transformer")
#: Time for the calls, in units of the time for one comparison; all comparisons get equal times.
CALLS_SHARE = 0.6
#: Factor of the rounds for comparisons of few ways, whose rounds are shorter.
ROUNDS_OF_PARALLEL = 2


def free_ports() -> int:
    """Return the first of two consecutive ports that are free on this host."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                other.bind(("127.0.0.1", port + 1))
                return port


def starts_in(hosts: Hosts | None) -> Starts:
    """Return the starts of ranks with this Python: one on each host, or all on this host."""
    address, device, port = "127.0.0.1", "lo", free_ports()
    if hosts is not None:
        address, device = hosts.addresses[0], DEVICE

    def starts(name: str, ranks: int, path: str) -> list[Start]:
        worker = [sys.executable, WORKER, name, path]
        if name == "horovod":
            start = horovod_calls.started_by(ranks, WORKER, worker[2:])
            # Horovod negotiates in the background. Its limit must outlast the time in which the
            # job is stopped.
            words = {**start.environment, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3600"}
            return [Start(start.line, words)]
        places = places_of(name, address, device, ranks, port)
        if hosts is None:
            return [Start([*worker, *(json.dumps(places(rank, rank)) for rank in range(ranks))])]
        return [Start(hosts.on(rank, worker), places(rank, rank)) for rank in range(ranks)]

    return starts


def started(scene: Scene, folder: str, hosts: Hosts | None, libraries: Sequence[str]) -> list[Job]:
    """Start a job for each installed library; names the missing ones on stderr."""
    jobs = []
    for name in libraries:
        if name == "horovod" and (scene.is_wire or not horovod_calls.is_installed()):
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


def entrants_of(jobs: Sequence[Job], ways: Sequence[str]) -> list[Entrant]:
    """Return the entrants of one comparison: pycoll's ways, and the peers that can take part."""
    found = [Entrant(way, jobs[0], (("way", way),)) for way in ways]
    names = {"gloo": GLOO} if ways is PARALLEL else {"gloo": GLOO, "horovod": HOROVOD}
    peers = [job for job in jobs[1:] if job.name in names]
    return found + [Entrant(names[job.name], job, (("way", DDP),)) for job in peers]


def comparisons(scene: Scene, model: str, libraries: Sequence[str]) -> list[Sequence[str]]:
    """Return the lists of ways that are compared with each other."""
    by_itself = model in REAL and not scene.is_wire and "gloo" in libraries
    return [EVERY, PARALLEL] if by_itself else [EVERY]


class Progress:
    """A bar on stderr that shows the elapsed part of the whole time budget."""

    def __init__(self, budget_s: float, parts: float) -> None:
        self._begin, self._budget_s, self._left = time.monotonic(), budget_s, parts
        self._bar = click.progressbar(length=max(1, round(budget_s)), file=sys.stderr)

    def share_s(self, parts: float = 1.0) -> float:
        """Return the seconds for the next ``parts`` parts, out of the time that is left."""
        left_s = max(0.0, self._budget_s - (time.monotonic() - self._begin))
        share, self._left = left_s * parts / max(parts, self._left), self._left - parts
        return share

    def tick(self) -> None:
        """Update the bar."""
        elapsed = min(round(time.monotonic() - self._begin), self._bar.length or 0)
        self._bar.update(elapsed - self._bar.pos)

    def tell(self, text: str) -> None:
        """Show ``text`` as the label of the bar."""
        self._bar.label = text
        self._bar.render_progress()

    def hide(self) -> None:
        """Clear the bar's line on a terminal, so that other output can be printed there."""
        if sys.stderr.isatty():
            click.echo("\r\x1b[2K", nl=False, err=True)


def measure(
    scene: Scene,
    models: Sequence[str],
    rounds: int,
    libraries: Sequence[str],
    progress: Progress,
) -> Iterator[Result]:
    """Measure all models in one scene."""
    with contextlib.ExitStack() as cleanup:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory())
        hosts = None
        if scene.hosts > 1:
            hosts = cleanup.enter_context(Hosts(scene.hosts, TEN_GIGABIT))
        jobs = started(scene, folder, hosts, libraries)
        for job in jobs:
            cleanup.callback(job.close)
        for model in models:
            for ways in comparisons(scene, model, [job.name for job in jobs]):
                progress.tell(f"{model}; {scene.title}")
                entrants = entrants_of(jobs, ways)
                nbytes = max(entrants[0].order(what="bytes", collective=model))
                most = rounds * (ROUNDS_OF_PARALLEL if ways is PARALLEL else 1)
                effort = Effort(most, progress.share_s(), from_begin=True)
                times = compare(entrants, model, nbytes, effort, progress.tick)
                autos = [one for one in entrants if one.name == "auto"]
                why = autos[0].order(what="explain", collective=model)[0] if autos else ""
                yield Result(scene, model, ways, nbytes, times, why)


def show_calls(quick: bool, progress: Progress) -> training_calls.Found:
    """Measure the times of calls and print them."""
    sets = training_calls.SMALL_SETS if quick else training_calls.SETS
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
    parser.add_argument("--budget-s", type=float, default=540.0, help="about how long it all takes")
    parser.add_argument("--scene", type=int, choices=range(len(SCENES)), action="append")
    parser.add_argument("--model", choices=(*training_calls.SETS, *REAL, *QUICK), action="append")
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
    made = [comparisons(scene, model, libraries) for scene, models in work for model in models]
    parts = sum(len(ways) for ways in made) + with_calls * CALLS_SHARE
    progress = Progress(budget_s, parts)
    calls = None
    if with_calls:
        progress.tell(f"calls; {SCENES[0].title}")
        calls = show_calls(options.quick, progress)
    results: list[Result] = []
    for scene, models in work:
        for result in measure(scene, models, rounds, libraries, progress):
            progress.hide()
            print(f"# {result.title}")
            for row in rows(result):
                pairs = zip(head()[1:], row[1:], strict=True)
                print(f"{row[0]:<14} " + "  ".join(f"{t}: {c}" for t, c in pairs), flush=True)
            for text in (*judged(result), *result.why.splitlines()):
                print(f"# {text}")
            results.append(result)
    if options.plot is not None:
        draw(options.plot, [one for one in results if one.ways is EVERY])
    if options.markdown is not None:
        write_markdown(options.markdown, results, calls, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
