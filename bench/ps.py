"""Takes the times of stores on parameter servers, next to all_reduce and to what links allow.

    .venv/bin/python bench/ps.py --markdown docs/results/parameter-servers.md

* A push_pull of 4 KiB by one worker and one server takes at most 3 times an all_reduce of two
  ranks, over shared memory and between hosts.
* Four workers and two servers exchange 64 MiB at 85 % of a link's rate, with links of 10 Gb/s, and
  a server uses at most 80 % of a core.
* SSP(3) makes at least 1.25 times the steps of "bsp", with workers that are 3 times slower in a
  random tenth of their steps.
* A push of 1 MiB to a chain of two or three servers takes at most 2.2 times as long as to one.
* Pulls and pushes of 100,000 rows of a table of 10,000,000 rows of 64 float32 run at 5 times the
  rate of torch.distributed.rpc.
* After the death of a server, no push waits longer than 2 seconds.
* In ten simulated hours with a fault in every minute, no push is lost and none applied twice.

Hosts are network namespaces (bench/hosts.py), so those rows need root. ``--quick`` runs each task
once, with short arrays and on this host only: it shows that the script works, and no figure counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page
from host_jobs import told_by_rank_0
from hosts import TEN_GIGABIT, Hosts, Shape, obstacle
from jobs import RUN_PYCOLL

TITLE = "Stores on parameter servers"
WORKER = str(Path(__file__).resolve().parent / "ps_worker.py")
RPC = str(Path(__file__).resolve().parent / "rpc_rows.py")
SIMULATION = "tests/ps/simulation/test_store_simulation.py"
HOURS = "test_ten_hours_with_a_fault_in_every_minute_lose_no_push"
#: Targets, in the order of the rows above.
LATENCY_MAX, RATE_MIN, CORE_MAX, STEPS_MIN, REPLICAS_MAX, FAILOVER_MAX = 3, 0.85, 0.8, 1.25, 2.2, 2
ROWS_MIN = 5
#: Rows of the table that torch.distributed.rpc holds too, and elements of a row.
ROWS, ROW_DIM = 10_000_000, 64
#: Most seconds of a task.
_TASK_S = 300
_SETTINGS = {"OMP_NUM_THREADS": "1", "PYCOLL_TIMEOUT_S": "60"}
MIB = 1 << 20


def here(task: str, workers: int, servers: int, rounds: int, nbytes: int) -> list[Any]:
    """Run a task on this host; return the lines of rank 0."""
    words = (task, str(workers), str(rounds), str(nbytes))
    tolerate = ("--tolerate", "1") if task == "failover" else ()
    line = [*RUN_PYCOLL, "-n", str(workers + servers), *tolerate, sys.executable, WORKER, *words]
    done = subprocess.run(
        line,
        env={**os.environ, **_SETTINGS},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TASK_S,
        check=True,
    )
    return [json.loads(one) for one in done.stdout.splitlines() if one.startswith("[")]


def between(
    shape: Shape | None, task: str, workers: int, servers: int, rounds: int, nbytes: int
) -> list[Any]:
    """Run a task with a host for each rank; return the lines of rank 0."""
    total = workers + servers
    words = (task, str(workers), str(rounds), str(nbytes))
    with Hosts(total, shape) as hosts:
        text = told_by_rank_0(hosts, [sys.executable, WORKER, *words], _TASK_S, _SETTINGS)
    return [json.loads(one) for one in text.splitlines()]


def row(name: str, figure: str, found: float, target: float, at_most: bool = True) -> list[str]:
    """A row of the table."""
    reached = found <= target if at_most else found >= target
    bound = "at most" if at_most else "at least"
    return [name, figure, f"{found:.2f}", f"{bound} {target:g}", "reached" if reached else "missed"]


def latency_row(name: str, lines: Sequence[Any]) -> list[str]:
    """push_pull over all_reduce: the median of the rounds' ratios."""
    ratios = [one[0]["store"] / one[0]["all_reduce_s"] for one in lines]
    times = [
        f"{1e6 * statistics.median(one[0][key] for one in lines):.1f} us"
        for key in ("store", "all_reduce_s")
    ]
    figure = f"push_pull {times[0]}, all_reduce {times[1]}"
    return row(f"push_pull of 4 KiB, {name}", figure, statistics.median(ratios), LATENCY_MAX)


def by_rpc(rows: int) -> dict[str, float]:
    """The seconds of a pull and a push by torch.distributed.rpc."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    other, first = (
        subprocess.Popen(
            [sys.executable, RPC, str(rank), port, str(rows)],
            env={**os.environ, **_SETTINGS},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    )
    try:
        text = first.communicate(timeout=_TASK_S)[0]
        if first.returncode or other.wait(timeout=30):
            raise SystemExit("rows by torch.distributed.rpc failed")
    finally:
        for one in (first, other):
            one.kill()
            one.wait()
    found: dict[str, float] = json.loads(text)
    return found


def table_rows(rounds: int, rows: int) -> list[list[str]]:
    """Pulls and pushes of rows, next to those by torch.distributed.rpc."""
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for _ in range(rounds):
        ours.append(here("rows", 1, 1, 1, rows * ROW_DIM * 4)[0][0]["store"])
        theirs.append(by_rpc(rows))
    made = []
    for call in ("pull", "push"):
        ratios = [rpc[call] / store[call] for store, rpc in zip(ours, theirs, strict=True)]
        times = [1e3 * statistics.median(one[call] for one in found) for found in (ours, theirs)]
        figure = f"{times[0]:.1f} ms, torch RPC {times[1]:.1f} ms"
        name = f"{call} of {rows // 100} of {rows} rows"
        made.append(row(name, figure, statistics.median(ratios), ROWS_MIN, False))
    return made


def simulated_hours() -> list[str]:
    """The row of the simulation, which is a test."""
    done = subprocess.run(
        [*(sys.executable, "-m", "pytest", "-q"), f"{SIMULATION}::{HOURS}"],
        cwd=page.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_TASK_S,
        check=False,
    )
    verdict = "reached" if done.returncode == 0 else "missed"
    return ["ten simulated hours", "a fault in every minute", "", "no push lost", verdict]


def rows_here(rounds: int, scale: int) -> list[list[str]]:
    """The rows that need one host."""
    rows = [latency_row("shared memory", here("latency", 1, 1, rounds, 4096))]
    seconds: dict[str, list[float]] = {}
    for line in here("steps", 4, 1, rounds, 4096):
        seconds.setdefault(line[0]["name"], []).append(max(one["store"] for one in line[:4]))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    figure = ", ".join(f"{name} {1e3 * one:.1f} ms a step" for name, one in medians.items())
    rows.append(
        row("SSP(3) over bsp", figure, medians["bsp"] / medians["SSP(3)"], STEPS_MIN, False)
    )
    pushes: dict[int, list[float]] = {}
    for line in here("replicas", 1, 3, rounds, MIB // scale):
        pushes.setdefault(line[0]["replicas"], []).append(line[0]["store"])
    times = {count: statistics.median(found) for count, found in pushes.items()}
    for count in (1, 2):
        figure = f"{1e6 * times[count]:.0f} us, alone {1e6 * times[0]:.0f} us"
        name = f"push of {MIB // scale} bytes to {count + 1} servers"
        rows.append(row(name, figure, times[count] / times[0], REPLICAS_MAX))
    waits = [here("failover", 1, 3, 1, MIB // scale)[0][0]["store"] for _ in range(rounds)]
    figure = f"longest waits {', '.join(f'{one:.2f}' for one in waits)} s"
    rows.append(row("failover", figure, max(waits), FAILOVER_MAX))
    return [*rows, *table_rows(min(rounds, 3), ROWS // scale**2), simulated_hours()]


def rows_between(rounds: int) -> list[list[str]]:
    """The rows that need several hosts."""
    rows = [latency_row("between hosts", between(None, "latency", 1, 1, rounds, 4096))]
    workers, servers, nbytes = 4, 2, 64 * MIB
    (line,) = between(TEN_GIGABIT, "throughput", workers, servers, max(5, rounds), nbytes)
    seconds = statistics.median(
        max(times) for times in zip(*(one["store"]["seconds"] for one in line[:4]), strict=True)
    )
    # A server receives, and sends, the shares of all workers.
    bound_s = workers * nbytes / servers / TEN_GIGABIT.bytes_per_s
    figure = f"{1e3 * seconds:.0f} ms, {1e3 * bound_s:.0f} ms at the links' rate"
    rows.append(row("64 MiB, 4 workers, 2 servers", figure, bound_s / seconds, RATE_MIN, False))
    core = max(line[0]["store"]["cores"])
    rows.append(row("the same, a server's core", "share of a core", core, CORE_MAX))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each task")
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--markdown", type=Path, help="a page whose section is replaced")
    options = parser.parse_args()
    rows = rows_here(1 if options.quick else options.rounds, 16 if options.quick else 1)
    if not options.quick:
        if why := obstacle():
            print(f"no rows between hosts: {why}")
        else:
            rows += rows_between(options.rounds)
    lines = page.table(("case", "times", "found", "target", "verdict"), rows)
    print("\n".join(lines))
    if options.markdown is not None:
        page.write_section(options.markdown, TITLE, [page.origin(), "", *lines])


if __name__ == "__main__":
    main()
