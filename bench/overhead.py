"""The cost of a call before any byte moves, and of a communicator before any call.

    .venv/bin/python bench/overhead.py --markdown bench/RESULTS.md

Calls on a world of one rank show the cost of Python, argument checks and the engine's entry. Worlds
of 2 ranks show how much asynchronous calls and groups save. Worlds of 8 ranks show the cost of
joining and splitting, and the memory. Times are medians in microseconds unless a line names another
unit.

A call is timed directly in a Python loop, without a function around it. The time of joining starts
when the last rank enters init(), includes the imports there, and ends when the last rank is ready.
Modules are read as bytecode, as they are once installed.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import page
from jobs import RUN_PYCOLL

import pycoll

TITLE = "Costs of calls and communicators"
MANY = 64
#: Bytes of each array of a fused batch.
FUSED_BYTES = (8, 64, 1024)
#: Calls between two readings of the clock.
BATCH = 5000
#: Factor of the rounds for calls that take microseconds only.
ROUNDS_OF_CALLS = 20
#: Seconds after which all ranks have surely reached the same place.
SETTLE_S = 0.3
#: Name, and value with its unit.
Figure = tuple[str, str]


def per_call(statements: Sequence[str], names: dict[str, Any], rounds: int) -> list[float]:
    """Return the median over rounds of the mean microseconds of each statement. In a round all
    statements are timed one after the other."""
    timers = [timeit.Timer(statement, globals=names) for statement in statements]
    turns = [[timer.timeit(BATCH) / BATCH * 1e6 for timer in timers] for _ in range(rounds + 1)]
    return [statistics.median(means) for means in zip(*turns[1:], strict=True)]


def us(value: float) -> str:
    return f"{page.three_digits(value)} us"


# One rank


def calls_alone(rounds: int) -> list[Figure]:
    """Time calls on a world of one rank, which has no peers and never waits."""
    (comm,) = pycoll.local_world(1)
    with comm:
        x = np.zeros(2, np.float32)
        names = {"comm": comm, "np": np, "x": x, "bound": comm.all_reduce.bind(x, out=x)}
        rows = {
            "np.add(x, x, out=x), for comparison": "np.add(x, x, out=x)",
            "all_reduce(x, out=x), NumPy": "comm.all_reduce(x, out=x)",
            "all_reduce.bind(x, out=x)(), NumPy": "bound()",
            "all_reduce(x, out=x, async_op=True).wait()": (
                "comm.all_reduce(x, out=x, async_op=True).wait()"
            ),
        }
        if importlib.util.find_spec("torch") is not None:
            import torch

            t = torch.zeros(2)
            names |= {"t": t, "bound_t": comm.all_reduce.bind(t, out=t)}
            rows["all_reduce(x, out=x), torch"] = "comm.all_reduce(t, out=t)"
            rows["all_reduce.bind(x, out=x)(), torch"] = "bound_t()"
        found = per_call(list(rows.values()), names, rounds)
        return [
            (f"1 rank, 8 B: {name}", f"{us(one)}, {one / found[0]:.2f} of np.add")
            for name, one in zip(rows, found, strict=True)
        ]


@functools.cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pycoll-bytecode-")


def with_bytecode() -> dict[str, str]:
    """Return the environment, changed so that Python writes bytecode."""
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": _bytecode().name}


def imports(rounds: int) -> list[Figure]:
    """Time imports in a fresh interpreter, without the interpreter's own start."""

    def start(code: str) -> float:
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=with_bytecode())
        return time.perf_counter() - begin

    codes = ("pass", "import numpy", "import pycoll", "import pycoll; pycoll.Communicator")
    start(codes[-1])
    turns = [[start(code) for code in codes] for _ in range(rounds)]
    bare, *others = map(statistics.median, zip(*turns, strict=True))
    names = ("import numpy, for comparison", "import pycoll", "import pycoll, and first use")
    return [(name, page.ms(seconds - bare)) for name, seconds in zip(names, others, strict=True)]


# Several ranks, as processes


#: Name of the mappings that hold the channels, in /proc; arrays are in other mappings.
_STAGING = "/memfd:pycoll ("


def staging_bytes() -> int:
    """Return the bytes in use of this process's mappings that are shared with other ranks."""
    total = 0
    shared = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            shared = _STAGING in line
        elif shared and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def mapped_bytes() -> int:
    """Return the bytes of these mappings' address ranges, touched or not."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _STAGING in line:
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            total += last - first
    return total


def on_each_rank(rounds: int) -> dict[str, float]:
    """Return the figures of this rank, in seconds and bytes."""
    found = {"entered": time.monotonic()}  # one clock for all processes
    comm = pycoll.init()
    found["ready"] = time.monotonic()
    # A rank that goes on would take a core from ranks that are not ready yet, so it sleeps. The
    # first barrier is timed separately.
    time.sleep(SETTLE_S)
    begin = time.perf_counter()
    comm.barrier()
    found["first_barrier_s"] = time.perf_counter() - begin
    pycoll.finalize()
    found["entered_again"] = time.monotonic()
    comm = pycoll.init()
    found["ready_again"] = time.monotonic()
    comm.barrier()
    begin = time.perf_counter()
    comm.split(0).close()
    found["first_split_s"] = time.perf_counter() - begin
    comm.barrier()  # the next steps would take cores from ranks that still split
    x = np.zeros(256, np.float32)
    comm.all_reduce(x, out=x)
    found |= {"mapped_bytes": mapped_bytes(), "small_bytes": staging_bytes()}
    long = np.zeros(1 << 20, np.float32)
    comm.all_reduce(long, out=long)
    found["long_bytes"] = staging_bytes()
    found |= calls_together(comm, rounds)
    pycoll.finalize()
    return found


def calls_together(comm: Any, rounds: int) -> dict[str, float]:
    """Return the seconds of calls that all ranks make together, by name."""
    x = [np.zeros(256, np.float32) for _ in range(MANY)]

    def blocking() -> None:
        for one in x:
            comm.all_reduce(one, out=one)

    def started() -> None:
        for work in [comm.all_reduce(one, out=one, async_op=True) for one in x]:
            work.wait()

    def split() -> None:
        child = comm.split(0)
        assert child is not None
        child.close()

    calls = {"blocking": blocking, "async": started}
    for nbytes in FUSED_BYTES:
        calls |= fused_calls(comm, nbytes)
    found = _together(comm, calls, rounds * ROUNDS_OF_CALLS)
    return found | _together(comm, {"split": split}, min(rounds, 5))


def fused_calls(comm: Any, nbytes: int) -> dict[str, Callable[[], None]]:
    """Return calls that reduce many arrays in place as one operation, and one array alone."""
    x = [np.zeros(nbytes // 4, np.float32) for _ in range(MANY)]

    def group() -> None:
        with comm.group():
            for one in x:
                comm.all_reduce(one, out=one)

    return {
        f"group {nbytes}": group,
        f"list {nbytes}": lambda: comm.all_reduce(x, out=x),
        f"one {nbytes}": lambda: comm.all_reduce(x[0], out=x[0]),
    }


def _together(comm: Any, calls: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each call. In a round all calls run one after the other."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for call, seconds in zip(calls.values(), spent.values(), strict=True):
            comm.barrier()
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
    return {name: statistics.median(seconds[1:]) for name, seconds in spent.items()}


def job(ranks: int, rounds: int) -> dict[str, float]:
    """Run a job and return the largest figure of all ranks, by name."""
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(Path(__file__).resolve())]
        line = [*RUN_PYCOLL, "-n", str(ranks), "--", *script]
        line += ["--rank-into", folder, "--rounds", str(rounds)]
        begin = time.perf_counter()
        subprocess.run(line, check=True, env=with_bytecode())
        whole = time.perf_counter() - begin
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(found) == ranks
    worst = {name: max(one[name] for one in found) for name in found[0]}
    return {**worst, "job_s": whole}


def jobs_of_two_and_eight(rounds: int) -> list[Figure]:
    """Measure asynchronous calls and groups on 2 ranks, joining and memory on 8."""
    job(2, 1)  # writes the bytecode
    two, eight = job(2, rounds), job(8, rounds)
    bytes_mapped = eight["mapped_bytes"]
    calls = [(f"1 KiB: {MANY} blocking", "blocking"), (f"1 KiB: {MANY} async", "async")]
    shares = []
    for nbytes in FUSED_BYTES:
        size = "1 KiB" if nbytes == 1024 else f"{nbytes} B"
        calls.append((f"{size}: one", f"one {nbytes}"))
        for way in ("group", "list"):
            name = f"{size}: a {way} of {MANY}"
            calls.append((name, f"{way} {nbytes}"))
            shares.append((f"{name}, of 8 times one", two[f"{way} {nbytes}"], two[f"one {nbytes}"]))
    return [
        *((f"2 ranks, {name}", us(two[key] * 1e6)) for name, key in calls),
        *((f"2 ranks, {name}", f"{many / (8 * one):.2f}") for name, many, one in shares),
        ("2 ranks: split and close", us(two["split"] * 1e6)),
        ("8 ranks: ready, after the last one's init()", page.ms(eight["ready"] - eight["entered"])),
        ("8 ranks: the first barrier, with what it imports", page.ms(eight["first_barrier_s"])),
        (
            "8 ranks: ready, after finalize()",
            page.ms(eight["ready_again"] - eight["entered_again"]),
        ),
        ("8 ranks: the first split and close", page.ms(eight["first_split_s"])),
        ("8 ranks: split and close", page.ms(eight["split"])),
        ("8 ranks: staging mapped per communicator and rank", mib(bytes_mapped)),
        ("8 ranks: staging mapped per peer", mib(bytes_mapped / 7)),
        ("8 ranks: staging resident after an all_reduce of 1 KiB", mib(eight["small_bytes"])),
        ("8 ranks: staging resident after one of 4 MiB", mib(eight["long_bytes"])),
    ]


def mib(count: float) -> str:
    return f"{count / (1 << 20):.3g} MiB"


def show(figures: Sequence[Figure]) -> None:
    for name, value in figures:
        print(f"{name:60}{value:>16}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    parser.add_argument("--rank-into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_into is not None:
        path = options.rank_into / f"{os.getpid()}.json"
        path.write_text(json.dumps(on_each_rank(options.rounds)))
        return 0
    figures: list[Figure] = []
    for part in (calls_alone, imports, jobs_of_two_and_eight):
        found = part(options.rounds)
        show(found)
        figures += found
    if options.markdown is not None:
        lines = [page.origin(), "", *page.table(["what", "cost"], figures)]
        page.write_section(options.markdown, TITLE, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
