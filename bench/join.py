"""How long does a world take to form, and what does it cost each rank?

    .venv/bin/python bench/join.py --markdown docs/results/joining.md

The time of joining starts when the last rank begins to import its library, and ends when the last
rank is ready. The time until ready starts with the command that starts the job. Hosts are network
namespaces of this machine, which mpirun and `pycoll run -H` enter through the same replacement of
ssh. The members of the large meeting are threads that use the ranks' client against the real store,
in another process. They exchange as many bytes as ranks do, and open no transports. Modules are
read as bytecode, as they are once installed, and a first run of each job is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page
from hosts import DEVICE, Hosts, obstacle
from jobs import RUN_PYCOLL, binaries_of
from overhead import with_bytecode

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.rendezvous.store import Place, StoreExchange
from pycoll.bootstrap.rendezvous.store_server import StoreServer

WORKER = str(Path(__file__).with_name("join_worker.py"))
LIBRARIES = ("pycoll", "openmpi")
#: Bytes of a rank's blob in each round of joining over TCP.
ROUNDS = (600, 200, 32, 8)
#: The targets: the ratio of ready times to those of Open MPI, and the time of the large meeting.
READY_RATIO, MEETING_S = 1.5, 10.0
_LIMIT_S = 120


def run_once(line: Sequence[str], environ: dict[str, str], folder: Path, ranks: int) -> list[Any]:
    """Run a job of the worker; return what its ranks have seen, and the time until ready."""
    for old in folder.glob("rank*"):
        old.unlink()
    began = time.monotonic()
    done = subprocess.run(
        line,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        env={**with_bytecode(), "OMP_NUM_THREADS": "1", **environ},
        check=False,
    )
    seen = [json.loads(one.read_text()) for one in folder.glob("rank*")]
    if done.returncode != 0 or len(seen) != ranks:
        raise SystemExit(f"{line[0]} ended with status {done.returncode}: {done.stderr[-2000:]}")
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


def line_on(hosts: Hosts, library: str, per_host: int, folder: Path, agent: Path) -> list[str]:
    """Return the command of a job on hosts, typed on the first of them."""
    worker = [str(binaries_of(library) / "python"), WORKER, library, str(folder)]
    names = ",".join(f"{name}:{per_host}" for name in hosts.names)
    if library == "pycoll":
        return hosts.on(0, [*RUN_PYCOLL, "-H", names, "--", *worker])
    launcher = str(binaries_of(library) / "mpiexec")
    through = ("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", DEVICE)
    places = ("--host", names, "--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE")
    include = ("--mca", "btl_tcp_if_include", DEVICE)
    return hosts.on(0, [launcher, "--allow-run-as-root", *through, *places, *include, *worker])


def write_ssh(folder: Path, agent: Path) -> None:
    """Write an ``ssh`` that takes pycoll's options and enters a host by ``agent``."""
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    skip = 'while [ "$1" != -- ]; do shift; done; shift; host=$1; shift'
    ssh.write_text(f'#!/bin/sh\n{skip}\nexec {agent} "$host" "$@"\n')
    ssh.chmod(0o755)


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
            run_once(line_here(library, 2, Path(path)), {}, Path(path), 2)
        for case in cases:
            for _ in range(rounds):
                for library in libraries:
                    line = line_here(library, case.ranks, Path(path))
                    case.add(library, run_once(line, {}, Path(path), case.ranks))
    return cases


def case_on_hosts(libraries: Sequence[str], count: int, per_host: int, rounds: int) -> Case:
    """Run a job with ``per_host`` ranks on each of ``count`` hosts."""
    case = Case(f"{count} hosts x {per_host} ranks", count * per_host)
    with tempfile.TemporaryDirectory() as path, Hosts(count) as hosts:
        folder = Path(path)
        agent = folder / "agent"
        hosts.write_agent(agent)
        write_ssh(folder, agent)
        # All namespaces are one machine, which pycoll would see.
        environ = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for number in range(rounds + 1):
            for library in libraries:
                line = line_on(hosts, library, per_host, folder, agent)
                seen = run_once(line, environ, folder, case.ranks)
                if number > 0:
                    case.add(library, seen)
    return case


def members(address: tuple[str, int], key: bytes, count: int) -> None:
    """Let ``count`` threads of this process join the meeting; for ``meeting``."""
    place = Place("the store", [(socket.AF_INET, address)])
    failures: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            exchange = StoreExchange(place, key, "join", rank, count, Deadline(60))
            for length in ROUNDS:
                blobs = exchange.all_gather(bytes(length))
                assert len(blobs) == count
            exchange.close()
        except BaseException as error:
            failures.append(error)

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    print(time.monotonic() - began, flush=True)


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
    why = obstacle()
    if why:
        raise SystemExit(f"no jobs on hosts: {why}")
    wanted = ((4, 2), (8, 8))
    cases = [case_on_hosts(libraries, *one, options.rounds) for one in wanted]
    text = f"Ready within {READY_RATIO:g} times the time of mpirun is wanted on 4 hosts."
    return [*times(cases), "", text]


def at_a_store(libraries: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Measure the large meeting; return the lines of the section."""
    seconds, size = meeting(options.meeting)
    return [
        f"{options.meeting} members, threads of one process, meet at a store in {seconds:.2f} s "
        f"(at most {MEETING_S:g} s is wanted). The process of the store grows by at most "
        f"{size / 1024:.1f} KiB for each of them (64 KiB)."
    ]


PARTS = {
    "one-host": ("Joining on one host", on_one_host),
    "hosts": ("Joining over hosts", over_hosts),
    "meeting": ("A large meeting", at_a_store),
}


def main() -> None:
    """Measure, print the page's sections, and write them with --markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="runs of each job by each library")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64], help="ranks on one host")
    parser.add_argument("--meeting", type=int, default=1024, help="members of the large meeting")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="what to do")
    parser.add_argument("--markdown", type=Path, help="the page whose sections to replace")
    parser.add_argument("--members", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.members is not None:
        count, port, key = options.members
        members(("127.0.0.1", int(port)), key.encode(), int(count))
        return
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
