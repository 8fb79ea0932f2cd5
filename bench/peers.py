"""Runs the same message sizes through pycoll, Open MPI, MPICH and torch's Gloo, side by side.

bench/jobs.py explains how samples are taken. The table has medians and the ratio of the best peer's
time to pycoll's (above 1: pycoll is faster). `bash bench/setup_peers.sh` installs the peers;
missing ones are named and left out. bench/shm.py is the benchmark with targets.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import page
from jobs import Effort, Entrant, Times, compare, mpi_ratio, ratio, start_jobs

#: Collective, bytes, and times by library.
Result = tuple[str, int, dict[str, Times]]
#: Name of the second column of pycoll, with arrays that ranks of the host can map
#: (docs/shared-arrays.md); short arrays are ordinary ones.
SHARED = "pycoll, shared"
COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")


def ratio_texts(times: dict[str, Times]) -> list[str]:
    """Format the ratios to the best MPI and to Gloo."""
    found = (mpi_ratio(times), ratio(times, "gloo"))
    return ["-" if one is None else f"{one:.2f}" for one in found]


def show(nbytes: int, times: dict[str, Times]) -> str:
    cells = "".join(f"{one.median * 1e6:15.2f}" for one in times.values())
    return f"{nbytes:12d}{cells}" + "".join(f"{text:>10}" for text in ratio_texts(times))


def _medians(times: dict[str, Times], names: list[str]) -> list[str]:
    return [f"{times[name].median * 1e6:.2f}" for name in names]


def write_markdown(path: Path, ranks: int, results: list[Result]) -> None:
    """Write the dated table to the page of results."""
    names = list(results[0][2])
    rows = [
        [collective, str(nbytes), *_medians(times, names), *ratio_texts(times)]
        for collective, nbytes, times in results
    ]
    head = ["collective", "bytes", *names, "best MPI / pycoll", "Gloo / pycoll"]
    what = "float32 sum, ordinary NumPy arrays first, processes; median microseconds."
    lines = [page.origin(), "", what, "", *page.table(head, rows)]
    page.write_section(path, f"Range of sizes, {ranks} ranks", lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--collective", choices=COLLECTIVES, action="append")
    parser.add_argument("--bytes", type=int, action="append", help="message sizes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    options = parser.parse_args()
    sizes = options.bytes or [8, 64, 1024, 16384, 262144, 1 << 20, 1 << 22, 1 << 25]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = start_jobs(options.ranks, folder)
        entrants = [Entrant(job.name, job) for job in jobs]
        entrants.insert(1, Entrant(SHARED, jobs[0], (("memory", "shared"),)))
        try:
            for collective in options.collective or ["all_reduce"]:
                print(f"# {collective}, {options.ranks} ranks, float32, NumPy; median us")
                names = "".join(f"{one.name:>15}" for one in entrants)
                print(f"#{'bytes':>11}{names}{'MPI/us':>10}{'Gloo/us':>10}")
                for nbytes in sizes:
                    times = compare(entrants, collective, nbytes, Effort(options.rounds))
                    print(show(nbytes, times), flush=True)
                    results.append((collective, nbytes, times))
        finally:
            for job in jobs:
                job.close()
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(options.ranks, results), indent=1))
    if options.markdown is not None:
        write_markdown(options.markdown, options.ranks, results)
    return 0


def as_json(ranks: int, results: list[Result]) -> dict[str, Any]:
    lines = []
    for collective, nbytes, times in results:
        medians = {name: one.median for name, one in times.items()}
        lines.append({"collective": collective, "bytes": nbytes, "times_s": medians})
    return {"ranks": ranks, "results": lines}


if __name__ == "__main__":
    sys.exit(main())
