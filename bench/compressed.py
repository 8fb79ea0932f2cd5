"""Rates of all_reduce between hosts by codec, against float32 and torch's hooks over Gloo.

    .venv/bin/python bench/compressed.py --hosts 4 --gigabit 1 --markdown bench/RESULTS.md

The hosts are network namespaces (bench/hosts.py), so the benchmark needs root. The ranks run all
entrants in turns, so the same noise meets all of them. A time is that of the slowest rank.
The table has the median rate in float32 bytes per second, and the median over rounds of float32's
time divided by the entrant's. Codecs have feedback; results are checked against float32's.

"link" is the time that the bytes of the busiest cable take at its rate. No entrant is faster; the
rest of its time goes to the processors, which all hosts share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import page
from host_jobs import told_by_rank_0
from hosts import DEVICE, ONE_GIGABIT, TEN_GIGABIT, Hosts, obstacle

#: Times of float32's rate that an entrant reaches at least, by rate of the cable in Gb/s.
TARGETS = {
    1: {"bf16": 1.9, "int8": 3.0, "int4": 5.0, "sign": 15.0, "top-k 1 %": 10.0},
    10: {"bf16": 1.9, "int8": 3.0},
}
#: Times of the rate of torch's hooks over Gloo.
HOOK_TARGET = 2.0
PAIRS = (("bf16", "gloo fp16"), ("powersgd 4", "gloo powersgd 4"))
#: Largest error of a result, as a share of the largest value; the others are only approximations.
ERRORS = {"float32": 1e-5, "gloo": 1e-5, "bf16": 0.02, "int8": 0.03, "gloo fp16": 0.01}
_COLUMNS = 1024
_WAIT_S = 600
_HEAD = ("entrant", "MB/s", "times float32", "target", "ms", "link ms")


class Round(NamedTuple):
    """One call: seconds of the slowest rank, and bytes of the busiest cable in one direction."""

    seconds: float
    wire: int


Rounds = dict[str, list[Round]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host")
    parser.add_argument("--gigabit", type=int, default=1, choices=(1, 10), help="rate of a cable")
    parser.add_argument("--mib", type=float, default=16, help="MiB of float32 on each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--markdown", type=Path, help="put the table on this page")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    if why := obstacle():
        raise SystemExit(f"hosts cannot be made here: {why}")
    with Hosts(given.hosts, ONE_GIGABIT if given.gigabit == 1 else TEN_GIGABIT) as hosts:
        tell(given, measured(hosts, given))


def measured(hosts: Hosts, given: argparse.Namespace) -> Rounds:
    """The rounds of each entrant."""
    size = ["--mib", str(given.mib), "--rounds", str(given.rounds)]
    line = [sys.executable, __file__, "--worker", *size]
    text = told_by_rank_0(hosts, line, _WAIT_S, {"OMP_NUM_THREADS": "1"}, given.per_host)
    found: dict[str, list[tuple[float, int]]] = json.loads(text.splitlines()[-1])
    return {name: [Round(*one) for one in rounds] for name, rounds in found.items()}


def tell(given: argparse.Namespace, rounds: Rounds) -> None:
    """Print a line for each entrant, with its target, and put them on the page."""
    nbytes = given.mib * 2**20
    cable = (ONE_GIGABIT if given.gigabit == 1 else TEN_GIGABIT).bytes_per_s
    cores = len(os.sched_getaffinity(0))
    ranks = "" if given.per_host == 1 else f" of {given.per_host} ranks"
    scene = f"{given.hosts} hosts{ranks}, {given.gigabit} Gb/s, {given.mib:g} MiB of float32"
    print(f"# {scene}")

    def ratio(slow: str, fast: str) -> float:
        pairs = zip(rounds[slow], rounds[fast], strict=True)
        return statistics.median(a.seconds / b.seconds for a, b in pairs)

    rows = []
    print("".join(f"{word:>16}" for word in _HEAD))
    for name, taken in rounds.items():
        seconds, wire = map(statistics.median, zip(*taken, strict=True))
        target = TARGETS[given.gigabit].get(name)
        parts = (seconds, wire / cable)
        figures = (nbytes / seconds / 1e6, ratio("float32", name))
        shown = [page.three_digits(figure) for figure in figures]
        shown.append("" if target is None else f"{target:g}")
        shown += [page.three_digits(1e3 * part) for part in parts]
        rows.append([name, *shown])
        print("".join(f"{word:>16}" for word in rows[-1]))
    notes = [
        f"{ours} is {ratio(theirs, ours):.2f} x {theirs}, target {HOOK_TARGET:g}"
        for ours, theirs in PAIRS
    ]
    for note in notes:
        print(f"# {note}")
    if given.markdown is not None:
        what = (
            f"all_reduce with avg, ranks on each host: {given.per_host}, {cores} cores for all "
            f"hosts, {given.rounds} rounds in turns, medians. `link`: the bytes of the busiest "
            "cable at its rate."
        )
        told = "; ".join(notes) + "."
        lines = [page.origin(), "", what, "", *page.table(_HEAD, rows), "", told]
        page.write_section(given.markdown, f"Codecs between {scene}", lines)


def work(given: argparse.Namespace) -> None:
    """One rank: run all entrants in turns; rank 0 prints their times."""
    import pycoll

    comm = pycoll.init()
    rows = max(1, int(given.mib * 2**20 / 4 / _COLUMNS))
    x = np.random.default_rng(comm.rank).standard_normal((rows, _COLUMNS)).astype(np.float32)
    runs = entrants(comm, x)
    wanted = comm.all_reduce(x, "avg")
    for name, run in runs.items():
        bound = ERRORS.get(name)
        error = float(np.abs(run() - wanted).max() / np.abs(wanted).max())
        if bound is not None and error > bound:
            raise SystemExit(f"{name} is wrong by {error:.3g} of the largest value")
    rounds: Rounds = {name: [] for name in runs}
    for _ in range(given.rounds):
        for name, run in runs.items():
            rounds[name].append(one_round(comm, run))
    if comm.rank == 0:
        print(json.dumps(rounds))
    comm.barrier()


def one_round(comm: Any, run: Callable[[], Any]) -> Round:
    """Run an entrant once on all ranks."""
    comm.barrier()
    before, begin = wire_bytes(), time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    comm.barrier()  # peers may still wait for bytes of this rank
    wire = [a - b for a, b in zip(wire_bytes(), before, strict=True)]
    return Round(float(comm.all_reduce(taken, "max")), int(comm.all_reduce(max(wire), "max")))


def wire_bytes() -> tuple[int, int]:
    """The bytes that this host's cable has carried in each direction."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    fields = next(line for line in lines if line.strip().startswith(f"{DEVICE}:")).split()
    return int(fields[1]), int(fields[9])


def entrants(comm: Any, x: Any) -> dict[str, Callable[[], Any]]:
    """Functions that average ``x`` over the ranks."""
    from pycoll.compress import BF16, Block, Feedback, PowerSGD, Sign, TopK

    codecs: dict[str, Any] = {
        "bf16": BF16(),
        "int8": Block("int8"),
        "int4": Block("int4"),
        "sign": Sign(),
        "top-k 1 %": TopK(0.01),
        "powersgd 4": PowerSGD(4),
    }
    out = np.empty_like(x)

    def coded(codec: Any) -> Callable[[], Any]:
        feedback = Feedback()
        return lambda: comm.all_reduce(x, "avg", out=out, compress=codec, feedback=feedback)

    runs: dict[str, Callable[[], Any]] = {"float32": lambda: comm.all_reduce(x, "avg", out=out)}
    runs |= {name: coded(codec) for name, codec in codecs.items()}
    return runs | hooks_over_gloo(x)


def hooks_over_gloo(x: Any) -> dict[str, Callable[[], Any]]:
    """The hooks of torch over Gloo, on a bucket with one matrix."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    dist.init_process_group("gloo")
    source, held = torch.from_numpy(x), torch.empty(x.shape)

    class Bucket:
        """The methods of a GradBucket that hooks call."""

        def buffer(self) -> Any:
            return held.view(-1)

        def gradients(self) -> list[Any]:
            return [held]

        def index(self) -> int:
            return 0

        def is_last(self) -> bool:
            return True

    def hooked(hook: Any, state: Any) -> Callable[[], Any]:
        def run() -> Any:
            held.copy_(source)
            return hook(state, Bucket()).wait().view(x.shape).numpy()

        return run

    state = powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2)
    state.iter = 2
    return {
        "gloo": hooked(default_hooks.allreduce_hook, None),
        "gloo fp16": hooked(default_hooks.fp16_compress_hook, None),
        "gloo powersgd 4": hooked(powerSGD_hook.powerSGD_hook, state),
    }


if __name__ == "__main__":
    main()
