"""Side by side: the same sweep through pycoll, Open MPI, MPICH and torch's Gloo, in one run.

Every library runs as a job of its own that stays up; for each size the jobs take turns, a sample
each, so that they meet the same noise. A sample is a batch of back-to-back operations, its time
that of the slowest rank. Printed are medians and the ratio of the best peer's time to pycoll's
(above 1: pycoll is faster). `bash bench/setup_peers.sh` installs the peers; missing ones are
named and left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = str(ROOT / "bench" / "peer_worker.py")
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")


def environment_of(name: str) -> Path:
    return ROOT / (".venv" if name == "pycoll" else f".peers/{name}") / "bin"


def command(name: str, ranks: int, path: str) -> list[str] | None:
    """How to start the job, or None when the library is not installed."""
    binaries = environment_of(name)
    python = str(binaries / "python")
    if not os.path.exists(python):
        return None
    worker = [python, WORKER, name, path]
    if name == "pycoll":
        return [str(binaries / "pycoll"), "run", "-n", str(ranks), "--", *worker]
    if name == "gloo":
        return [
            *(python, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), WORKER, name, path),
        ]
    launcher = [str(binaries / "mpiexec"), "-n", str(ranks)]
    if name == "openmpi":
        launcher += ["--oversubscribe", "--allow-run-as-root"]
    return [*launcher, *worker]


class Job:
    """A running library: its processes and a connection to each rank."""

    def __init__(self, name: str, ranks: int, folder: str) -> None:
        self.name = name
        path = os.path.join(folder, name)
        line = command(name, ranks, path)
        assert line is not None
        quiet = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{environment_of(name)}:{os.environ['PATH']}",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            listener.settimeout(90)
            self.process = subprocess.Popen(line, env=quiet, stdout=subprocess.DEVNULL)
            self.ranks = [listener.accept()[0] for _ in range(ranks)]
        self.readers = [rank.makefile("r") for rank in self.ranks]
        for reader in self.readers:
            json.loads(reader.readline())

    def order(self, **words: Any) -> list[Any]:
        line = (json.dumps(words) + "\n").encode()
        for rank in self.ranks:
            rank.sendall(line)
        return [json.loads(reader.readline()) for reader in self.readers]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_jobs(ranks: int, folder: str) -> list[Job]:
    jobs = []
    for name in ("pycoll", "openmpi", "mpich", "gloo"):
        if command(name, ranks, "") is None:
            print(f"# {name}: not installed, left out (bench/setup_peers.sh)", file=sys.stderr)
            continue
        try:
            jobs.append(Job(name, ranks, folder))
        except (OSError, ValueError) as error:
            print(f"# {name}: did not start ({error}), left out", file=sys.stderr)
    return jobs


def compare(jobs: list[Job], collective: str, nbytes: int, rounds: int) -> dict[str, float]:
    """Median seconds per operation of every library, interleaved."""
    for job in jobs:
        if not all(job.order(what="check", collective=collective, bytes=nbytes)):
            raise SystemExit(f"{job.name} gave a wrong result for {collective} of {nbytes} bytes")
    batches = {}
    for job in jobs:
        single = max(job.order(what="time", collective=collective, bytes=nbytes, batch=2))
        batches[job.name] = max(1, min(500, int(2e-3 / max(single, 1e-7))))
    samples: dict[str, list[float]] = {job.name: [] for job in jobs}
    for _ in range(rounds):
        for job in jobs:
            batch = batches[job.name]
            times = job.order(what="time", collective=collective, bytes=nbytes, batch=batch)
            samples[job.name].append(max(times))
    return {name: statistics.median(times) for name, times in samples.items()}


def show(nbytes: int, times: dict[str, float]) -> str:
    cells = "".join(f"{times[name] * 1e6:14.2f}" for name in times)
    mine = times["pycoll"]
    mpi = [times[name] for name in ("openmpi", "mpich") if name in times]
    ratios = f"{min(mpi) / mine:10.2f}" if mpi else f"{'-':>10}"
    ratios += f"{times['gloo'] / mine:10.2f}" if "gloo" in times else f"{'-':>10}"
    return f"{nbytes:12d}{cells}{ratios}"


def append_markdown(path: Path, ranks: int, results: list[dict[str, Any]]) -> None:
    """Add a dated table to the page of results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    names = list(results[0]["times_s"])
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(": ")[2]
            break
    lines = [
        "",
        f"## {ranks} ranks, {datetime.date.today()}, commit {commit}",
        "",
        f"{model}, {len(os.sched_getaffinity(0))} cores, Linux {platform.release()}; float32 sum, "
        "NumPy arrays, processes; median microseconds, libraries taking turns in one run.",
        "",
        "| collective | bytes | " + " | ".join(names) + " | best MPI / pycoll | Gloo / pycoll |",
        "|---" * (len(names) + 4) + "|",
    ]
    for result in results:
        times = result["times_s"]
        mpi = [times[name] for name in ("openmpi", "mpich") if name in times]
        cells = [result["collective"], str(result["bytes"])]
        cells += [f"{times[name] * 1e6:.2f}" for name in names]
        cells.append(f"{min(mpi) / times['pycoll']:.2f}" if mpi else "-")
        cells.append(f"{times['gloo'] / times['pycoll']:.1f}" if "gloo" in times else "-")
        lines.append("| " + " | ".join(cells) + " |")
    with path.open("a") as page:
        page.write("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--collective", choices=COLLECTIVES, action="append")
    parser.add_argument("--bytes", type=int, action="append", help="message sizes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="append the table to this file")
    options = parser.parse_args()
    sizes = options.bytes or [8, 64, 1024, 16384, 262144, 1 << 20, 1 << 22, 1 << 25]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = start_jobs(options.ranks, folder)
        try:
            for collective in options.collective or ["all_reduce"]:
                print(f"# {collective}, {options.ranks} ranks, float32, NumPy; median us")
                names = "".join(f"{job.name:>14}" for job in jobs)
                print(f"#{'bytes':>11}{names}{'MPI/us':>10}{'Gloo/us':>10}")
                for nbytes in sizes:
                    times = compare(jobs, collective, nbytes, options.rounds)
                    print(show(nbytes, times), flush=True)
                    results.append({"collective": collective, "bytes": nbytes, "times_s": times})
        finally:
            for job in jobs:
                job.close()
    if options.json is not None:
        options.json.write_text(json.dumps({"ranks": options.ranks, "results": results}, indent=1))
    if options.markdown is not None:
        append_markdown(options.markdown, options.ranks, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
