"""How long does a world take to form, and what does it cost each rank?

    .venv/bin/python bench/join.py --markdown docs/results/joining.md

The time of joining starts when the last rank begins to import its library, and ends when the last
rank is ready. The time until ready starts with the command that starts the job. Hosts are network
namespaces of this machine, which mpirun and `pycoll run -H` enter through the same replacement of
ssh. Jobs of srun and Ray need their programs: Debian's packages slurm-wlm and munge, and a Python
that has ray. The members of the large meeting are threads that use the ranks' client against the
real store, in another process. They exchange as many bytes as ranks do, and open no transports.
Modules are read as bytecode, as they are once installed, and a first run of each job is not
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import page
from hosts import Hosts, obstacle
from jobs import RUN_PYCOLL, binaries_of
from overhead import with_bytecode
from start_ways import WAYS, begin, end_well, ready_to_run

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.rendezvous.store import StoreExchange
from pycoll.bootstrap.rendezvous.store_connection import StoreAddress
from pycoll.bootstrap.rendezvous.store_server import StoreServer

WORKER = str(Path(__file__).with_name("join_worker.py"))
LOSS = str(Path(__file__).with_name("join_loss.py"))
LIBRARIES = ("pycoll", "openmpi")
#: Bytes of a rank's blob in each round of joining over TCP.
ROUNDS = (600, 200, 32, 8)
#: The targets: the ratio of ready times to those of Open MPI, the time of the large meeting, and
#: the seconds from the death of a rank until the others have gone on.
READY_RATIO, MEETING_S, LOSS_S = 1.5, 10.0, 3.0
#: Hosts, and ranks on each of them.
Shape = tuple[int, int]
#: Processes of the members of the large meeting. In one process, all of them would wait for the
#: interpreter's lock.
_PROCESSES = 64


def seen_by(run: Callable[[], None], folder: Path, ranks: int) -> list[Any]:
    """Run a job of the worker; return what its ranks have seen, and the time until ready."""
    for old in folder.glob("rank*"):
        old.unlink()
    began = time.monotonic()
    run()
    seen = [json.loads(one.read_text()) for one in folder.glob("rank*")]
    if len(seen) != ranks:
        raise SystemExit(f"{len(seen)} of {ranks} ranks have joined")
    for one in seen:
        one["until_ready"] = one["ready"] - began
    return seen


def line_here(library: str, ranks: int, folder: Path) -> list[str]:
    """Return the command of a job with all ranks on this host."""
    worker = [str(binaries_of(library) / "python"), WORKER, library, str(folder)]
    if library == "pycoll":
        return [*RUN_PYCOLL, "-n", str(ranks), "--", *worker]
    launcher = str(binaries_of(library) / "mpiexec")
    return [launcher, "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), *worker]


def here(library: str, ranks: int, folder: Path) -> Callable[[], None]:
    """Return a function that runs a job with all ranks on this host."""
    return lambda: end_well(begin(line_here(library, ranks, folder)))


def joining_s(seen: list[Any]) -> float:
    """Return the seconds from the last rank's beginning until the last rank is ready."""
    return float(max(one["ready"] for one in seen) - max(one["began"] for one in seen))


def ready_s(seen: list[Any]) -> float:
    """Return the seconds from the command until the last rank is ready."""
    return float(max(one["until_ready"] for one in seen))


class Case:
    """The runs of one job by all libraries, which take turns."""

    def __init__(self, name: str, ranks: int) -> None:
        self.name, self.ranks = name, ranks
        self.runs: dict[str, list[list[Any]]] = {}

    def add(self, library: str, seen: list[Any]) -> None:
        """Add a run."""
        self.runs.setdefault(library, []).append(seen)
        figures = f"joining {joining_s(seen):.3f} s, ready {ready_s(seen):.2f} s"
        print(f"{self.name}, {library}: {figures}", file=sys.stderr, flush=True)

    def median(self, library: str, figure: Any) -> float:
        """Return the median over the runs of a library."""
        return float(statistics.median(figure(seen) for seen in self.runs[library]))

    def row(self) -> list[str]:
        """Return the row of the table of times."""
        cells = [self.name]
        for figure in (joining_s, ready_s):
            times = {one: self.median(one, figure) for one in self.runs}
            cells += [f"{times[one]:.2f} s" if one in times else "-" for one in LIBRARIES]
            ratio = times["pycoll"] / times["openmpi"] if len(times) > 1 else None
            cells.append("-" if ratio is None else f"{ratio:.2f}")
        return cells


def cases_here(libraries: Sequence[str], counts: Sequence[int], rounds: int) -> list[Case]:
    """Run jobs with all ranks on this host."""
    cases = [Case(f"{ranks} ranks on one host", ranks) for ranks in counts]
    with tempfile.TemporaryDirectory() as path:
        for library in libraries:
            seen_by(here(library, 2, Path(path)), Path(path), 2)
        for case in cases:
            for _ in range(rounds):
                for library in libraries:
                    job = here(library, case.ranks, Path(path))
                    case.add(library, seen_by(job, Path(path), case.ranks))
    return cases


def case_on_hosts(way: str, libraries: Sequence[str], shape: Shape, rounds: int) -> Case:
    """Run jobs on hosts: those of pycoll by one way, in turns with those of mpirun."""
    count, per_host = shape
    case = Case(f"{count} hosts x {per_host} ranks, {way}", count * per_host)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = stack.enter_context(Hosts(count))
        run = {"pycoll": stack.enter_context(ready_to_run(way, world))}
        run["openmpi"] = stack.enter_context(ready_to_run("mpirun", world))
        for number in range(rounds + 1):
            for library in libraries:
                worker = [str(binaries_of(library) / "python"), WORKER, library, str(folder)]
                job = functools.partial(run[library], worker, per_host)
                seen = seen_by(job, folder, case.ranks)
                if number > 0:
                    case.add(library, seen)
    return case


def seconds_of_losses(shape: Shape, rounds: int) -> list[float]:
    """Let a rank on the last host be killed; return the seconds until the others go on."""
    count, per_host = shape
    found = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = stack.enter_context(Hosts(count))
        run = stack.enter_context(ready_to_run("pycoll run -H", world, "--tolerate", "1"))
        for _ in range(rounds):
            for old in folder.iterdir():
                old.unlink()
            run([sys.executable, LOSS, str(folder)], per_host)
            ends = [float(one.read_text()) for one in folder.glob("rank*")]
            if len(ends) != count * per_host - 1:
                raise SystemExit(f"{len(ends)} ranks went on")
            found.append(max(ends) - float((folder / "killed").read_text()))
    return found


def members(address: tuple[str, int], key: bytes, count: int) -> None:
    """Let ``count`` threads of several processes join the meeting; for ``meeting``."""
    fork = multiprocessing.get_context("fork")
    numbers = [range(first, count, _PROCESSES) for first in range(min(_PROCESSES, count))]
    start = fork.Barrier(len(numbers) + 1)
    processes = [
        fork.Process(target=_join_all, args=(start, address, key, ranks, count))
        for ranks in numbers
    ]
    for process in processes:
        process.start()
    start.wait()
    began = time.monotonic()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("some members did not join")
    print(time.monotonic() - began, flush=True)


def _join_all(
    start: Any, address: tuple[str, int], key: bytes, ranks: Sequence[int], count: int
) -> None:
    """Let a thread for each of these ranks join."""
    store = StoreAddress("the store", [(socket.AF_INET, address)])
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            exchange = StoreExchange(store, key, "join", rank, count, Deadline(60))
            for length in ROUNDS:
                blobs = exchange.all_gather(bytes(length))
                assert len(blobs) == count
            exchange.close()
        except BaseException as error:
            failures.append(error)

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    start.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def meeting(count: int) -> tuple[float, float]:
    """Let ``count`` members meet at a store of this process. Return the seconds, and the most bytes
    of this process for each of them."""
    key = secrets.token_hex(16)
    listener = listen_tcp("127.0.0.1")
    address = listener.getsockname()[:2]
    store = StoreServer(listener, count, key.encode(), "join", "the benchmark")
    before = _resident()
    most = before
    store.start()
    line = [sys.executable, __file__, "--members", str(count), str(address[1]), key]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        most = max(most, _resident())
        time.sleep(0.005)
    assert process.stdout is not None
    if process.returncode != 0:
        raise SystemExit("the members did not meet")
    seconds = float(process.stdout.read())
    store.close()
    return seconds, (most - before) / count


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def times(cases: Sequence[Case]) -> list[str]:
    """Return the table of times."""
    head = ["job", *(f"{one} joins" for one in LIBRARIES), "ratio"]
    head += [*(f"{one} ready" for one in LIBRARIES), "ratio"]
    return page.table(head, [case.row() for case in cases])


def growth(few: Case, many: Case) -> list[str]:
    """Return what each peer costs the rank that has the most."""
    lines = []
    for library in many.runs:
        grown = []
        for name in ("memory", "descriptors"):

            def largest(seen: list[Any], name: str = name) -> float:
                return float(max(one[name] for one in seen))

            rise = many.median(library, largest) - few.median(library, largest)
            grown.append(rise / (many.ranks - few.ranks))
        own = " (at most 16 and 2 are wanted)" if library == "pycoll" else ""
        lines += [
            "",
            f"From {few.ranks} to {many.ranks} ranks, the rank of {library} with the most takes "
            f"{grown[0] / 1024:.1f} KiB and {grown[1]:.2f} descriptors more for each peer{own}.",
        ]
    return lines


def on_one_host(libraries: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Measure jobs on this host; return the lines of the section."""
    cases = cases_here(libraries, options.ranks, options.rounds)
    rest = growth(cases[0], cases[-1]) if len(cases) > 1 else []
    return [*times(cases), *rest]


def over_hosts(libraries: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Measure jobs on network namespaces; return the lines of the section."""
    _check_hosts()
    cases, notes = [], []
    for way in options.ways:
        _, obstacle_of = WAYS[way]
        if why := obstacle_of():
            notes.append(f"Not run by {way}: {why}.")
        else:
            cases.append(case_on_hosts(way, libraries, (4, 2), options.rounds))
    cases.append(case_on_hosts("pycoll run -H", libraries, (8, 8), options.rounds))
    text = (
        f"Ready within {READY_RATIO:g} times the time of mpirun is wanted on 4 hosts. Each way "
        "took turns with mpirun. Daemons of Slurm and nodes of Ray ran before the command, and so "
        "did the driver of living actors. A rank of Ray begins to join when Ray has started its "
        "task."
    )
    return [*times(cases), "", " ".join([text, *notes])]


def after_a_loss(libraries: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Measure how soon survivors go on; return the lines of the section."""
    _check_hosts()
    found = seconds_of_losses((4, 2), options.rounds)
    return [
        f"A rank on one of 4 hosts with 2 ranks each is killed. The others shrink, take the state "
        f"of rank 0, and have ended their next step {max(found):.2f} s after it at the latest, in "
        f"{len(found)} runs (at most {LOSS_S:g} s is wanted)."
    ]


def _check_hosts() -> None:
    why = obstacle()
    if why:
        raise SystemExit(f"no jobs on hosts: {why}")


def at_a_store(libraries: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Measure the large meeting; return the lines of the section."""
    seconds, size = meeting(options.meeting)
    return [
        f"{options.meeting} members, threads of {min(_PROCESSES, options.meeting)} processes, meet "
        f"at a store in {seconds:.2f} s (at most {MEETING_S:g} s is wanted). The process of the "
        f"store grows by at most {size / 1024:.1f} KiB for each of them (64 KiB)."
    ]


PARTS = {
    "one-host": ("Joining on one host", on_one_host),
    "hosts": ("Joining over hosts", over_hosts),
    "loss": ("After the loss of a rank", after_a_loss),
    "meeting": ("A large meeting", at_a_store),
}


def main() -> None:
    """Measure, print the page's sections, and write them with --markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each job by each library")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="ranks on one host")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="how to start")
    parser.add_argument("--meeting", type=int, default=1024, help="members of the large meeting")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to do")
    parser.add_argument("--markdown", type=Path, help="the page whose sections to replace")
    parser.add_argument("--members", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.members is not None:
        count, port, key = options.members
        members(("127.0.0.1", int(port)), key.encode(), int(count))
        return
    os.environ.update(with_bytecode())
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    libraries = [one for one in LIBRARIES if (binaries_of(one) / "python").exists()]
    for part in options.parts:
        title, measure = PARTS[part]
        lines = measure(libraries, options)
        lines = [page.origin(), "", *lines]
        print("\n".join([f"## {title}", "", *lines]))
        if options.markdown is not None:
            page.write_section(options.markdown, title, lines)


if __name__ == "__main__":
    main()
