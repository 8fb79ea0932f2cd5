"""Times the calls of training programs, without any training: part of bench/training.py.

Two ranks run on one host, and each of them runs all ways in rotation. Times are those of the slower
rank, as medians over rounds. Gloo runs in the same processes; it is idle while others are timed.

    1,000 tensors of 4 KiB     as a list, in a group, and one by one over Gloo, against one
                               all_reduce of 4 MiB
    sets of gradients          tensor by tensor (allreduce_async_, then synchronize) and by the
                               scheduler (all is ready, then wait), against one all_reduce and,
                               where it is built (horovod_calls.py), Horovod before and after;
                               and a pass over the memory: both ranks read and write theirs once,
                               which an all_reduce in place does at least
    negotiation                the exchanges of a step in addition to its messages

The sets are those of ResNet-50 and BERT-Base (training_models.py).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import horovod_calls
import page
from jobs import RUN_PYCOLL

SETS = ("ResNet-50, gradients", "BERT-Base, gradients")
#: Recorded rates of Horovod 0.28.1, in bytes per second, built for C++17, over Gloo with 2 ranks
#: and the same gradients on a machine of two cores. They are the peer's rates where Horovod is not
#: installed.
HOROVODS = {SETS[0]: 0.92e9, SETS[1]: 0.63e9}
SMALL_SETS = ("few gradients",)
MANY, EACH = 1000, 1024
GROUP, LIST, SINGLY, WHOLE = "group", "list", "Gloo, one by one", "one all_reduce"
ASYNC, SCHEDULER, PASS, BARRIER, OTHERS = (
    *("allreduce_async_", "scheduler", "a pass over the memory"),
    *("hvd.barrier()", "others per step"),
)
#: Least rounds of a measurement, where the time allows no more.
ROUNDS_MIN = 3
#: Shares of the time budget for the many tensors and for each set; the rest starts processes.
MANY_SHARE, SETS_SHARE = 0.5, 0.3

TICK_S = 0.2

Seconds = dict[str, float]


class Found(NamedTuple):
    """Seconds by way: of many small tensors, of each set, of negotiation; of Horovod by set."""

    many: Seconds
    sets: dict[str, Seconds]
    nbytes: dict[str, int]
    negotiation: Seconds
    horovod: Seconds = {}  # noqa: RUF012

    def horovods(self, name: str) -> float | None:
        """Return Horovod's bytes per second: of the same run, else the recorded rate."""
        if name in self.horovod:
            return self.nbytes[name] / self.horovod[name]
        return HOROVODS.get(name)


class Counted:
    """A communicator that counts its collectives."""

    def __init__(self, comm: Any) -> None:
        self._comm, self.calls = comm, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        self.calls += callable(found)
        return found


def in_rotation(
    comm: Any, ways: dict[str, Callable[[], Any]], rounds: int, budget_s: float
) -> Seconds:
    """Return the median time of each way on the slower rank. There are fewer rounds than
    ``rounds`` if the budget is too short."""
    import numpy as np

    took: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    begin = time.perf_counter()
    for way in ways.values():
        way()
    once = comm.all_reduce(time.perf_counter() - begin, "max")
    for _ in range(min(rounds, max(ROUNDS_MIN, int(budget_s / once)))):
        for name, way in ways.items():
            comm.barrier()
            begin = time.perf_counter()
            way()
            took[name].append(time.perf_counter() - begin)
    mine = np.array([took[name] for name in ways])
    slower = comm.all_reduce(mine, "max")
    return {name: statistics.median(row) for name, row in zip(ways, slower.tolist(), strict=True)}


def many_tensors(comm: Any, rounds: int, budget_s: float) -> Seconds:
    import torch
    import torch.distributed as dist

    tensors = [torch.zeros(EACH) for _ in range(MANY)]
    whole = torch.zeros(MANY * EACH + 24 * EACH)

    def group() -> None:
        with comm.group():
            for one in tensors:
                comm.all_reduce(one, out=one)

    def gloo() -> None:
        for one in tensors:
            dist.all_reduce(one)

    return in_rotation(
        comm,
        {
            WHOLE: lambda: comm.all_reduce(whole, out=whole),
            LIST: lambda: comm.all_reduce(tensors, out=tensors),
            GROUP: group,
            SINGLY: gloo,
        },
        rounds,
        budget_s,
    )


def a_set(
    comm: Any, hvd: Any, name: str, rounds: int, budget_s: float
) -> tuple[Seconds, int, float]:
    """Return the times of one set by way, its bytes, and the number of collectives of a scheduler
    step in addition to its messages, once its communication plan is fixed."""
    import torch
    import training_models

    from pycoll.gradients.scheduler import TIMED_STEPS
    from pycoll.optim import Entry, Scheduler

    shapes = [tuple(p.shape) for p in training_models.made(name, 0).model.parameters()][::-1]
    tensors = [torch.zeros(shape) for shape in shapes]
    nbytes = sum(one.numel() * 4 for one in tensors)
    whole = torch.zeros(nbytes // 4)
    counted = Counted(comm)
    entries = [Entry(str(number), shape) for number, shape in enumerate(shapes)]
    scheduler = Scheduler(counted, entries)

    def scheduled() -> None:
        scheduler.begin()
        for number in range(len(entries)):
            scheduler.ready(number)
        scheduler.wait()

    for _ in range(TIMED_STEPS + 1):
        scheduled()
    counted.calls = 0
    scheduled()
    others = counted.calls - len(scheduler.comm_plan.messages)
    ways = {
        WHOLE: lambda: comm.all_reduce(whole, out=whole),
        LIST: lambda: comm.all_reduce(tensors, out=tensors),
        ASYNC: lambda: horovod_calls.reduce_singly(hvd, tensors),
        SCHEDULER: scheduled,
        PASS: lambda: whole.mul_(1.0),
    }
    return in_rotation(comm, ways, rounds, budget_s), nbytes, float(others)


def on_a_rank(rounds: int, budget_s: float, sets: list[str]) -> Found:
    """Measure on this rank, together with the other ranks."""
    import torch
    import torch.distributed as dist

    import pycoll
    import pycoll.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    comm = pycoll.world().split(0)
    assert comm is not None
    with tempfile.TemporaryDirectory() as folder:
        path = hvd.broadcast_object(f"{folder}/store")
        dist.init_process_group(
            "gloo", init_method=f"file://{path}", rank=comm.rank, world_size=comm.size
        )
        many = many_tensors(comm, rounds, MANY_SHARE * budget_s)
        share_s = SETS_SHARE * budget_s / len(sets)
        found = {name: a_set(comm, hvd, name, rounds, share_s) for name in sets}
        alone = in_rotation(comm, {BARRIER: hvd.barrier}, 20 * rounds, budget_s)
        dist.destroy_process_group()
        # A store of torch that is destroyed waits for its file, which rank 0 deletes.
        hvd.barrier()
    negotiation = {**alone, OTHERS: max(others for _, _, others in found.values())}
    hvd.shutdown()
    return Found(
        many,
        {name: times for name, (times, _, _) in found.items()},
        {name: nbytes for name, (_, nbytes, _) in found.items()},
        negotiation,
    )


def measured(
    rounds: int, sets: tuple[str, ...], budget_s: float, tick: Callable[[], None]
) -> Found:
    """Measure with two ranks of this machine, for about ``budget_s`` seconds. Calls ``tick``
    repeatedly.

    Horovod, which needs its own launcher, runs before and after: the faster time counts.
    """
    before = horovod_calls.seconds_of(sets, rounds) if horovod_calls.is_installed() else {}
    ours = _ours(rounds, sets, budget_s, tick)
    after = horovod_calls.seconds_of(sets, rounds) if before else {}
    quicker = {name: min(took, after.get(name, took)) for name, took in before.items()}
    return ours._replace(horovod=quicker)


def _ours(rounds: int, sets: tuple[str, ...], budget_s: float, tick: Callable[[], None]) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        line = [*RUN_PYCOLL, "-n", "2", "--", sys.executable, str(Path(__file__).resolve())]
        words = [f"{folder}/found", str(rounds), f"{budget_s:g}", *sets]
        with subprocess.Popen([*line, *words]) as process:
            try:
                while process.poll() is None:
                    time.sleep(TICK_S)
                    tick()
            except BaseException:
                process.terminate()
                raise
        if process.returncode != 0:
            raise SystemExit(f"calls of training ended with status {process.returncode}")
        return Found(*json.loads(Path(folder, "found").read_text()))


def rows(found: Found) -> list[list[str]]:
    """Return rows of a table: the way, its figure, and the figure that it is compared with."""
    many = found.many
    lines = [[f"{MANY:,} tensors of 4 KiB: {way}", page.ms(many[way]), ""] for way in many]
    lines[0][0] = "one all_reduce of 4 MiB"
    for line, way in zip(lines[1:], [*many][1:], strict=True):
        line[2] = f"{many[way] / many[WHOLE]:.2f} of one all_reduce's time"
    for name, times in found.sets.items():
        for way, seconds in times.items():
            rate = found.nbytes[name] / seconds
            share = f"{times[WHOLE] / seconds:.2f} of one all_reduce's rate"
            lines.append([f"{name}: {way}", f"{rate / 1e9:.2f} GB/s", share])
        if name in found.horovod:
            rate = found.nbytes[name] / found.horovod[name]
            lines.append([f"{name}: Horovod, tensor by tensor", f"{rate / 1e9:.2f} GB/s", ""])
    lines.append(
        [f"negotiation: {BARRIER}, which is one", f"{found.negotiation[BARRIER] * 1e6:.1f} us", ""]
    )
    others = found.negotiation[OTHERS]
    name = "negotiation: the scheduler, in addition to its messages"
    lines.append([name, f"{others:g} exchanges", ""])
    return lines


def judged(found: Found) -> list[str]:
    """Return the figures and their targets."""
    many = found.many
    lines = [
        page.verdict(f"{SINGLY} / {LIST}", many[SINGLY] / many[LIST], 10),
        *(
            page.verdict(f"1.5 of {WHOLE} / {way}", 1.5 * many[WHOLE] / many[way], 1)
            for way in (LIST, GROUP)
        ),
    ]
    for name, times in found.sets.items():
        rate = found.nbytes[name] / times[ASYNC]
        horovods = found.horovods(name)
        if horovods is not None:
            lines.append(page.verdict(f"{name}: {ASYNC} / Horovod", rate / horovods, 10))
            limit = found.nbytes[name] / times[PASS] / horovods
            lines.append(f"{name}: {PASS} / Horovod {limit:.2f}, which nothing in place exceeds")
        share = times[WHOLE] / times[SCHEDULER]
        lines.append(page.verdict(f"{name}: {SCHEDULER}'s rate / {WHOLE}'s", share, 0.9))
    return lines


def main() -> None:
    path, rounds, budget_s, *sets = sys.argv[1:]
    found = on_a_rank(int(rounds), float(budget_s), sets)
    # All ranks have the same figures; rank 0 writes them.
    if os.environ.get("PYCOLL_RANK", "0") == "0":
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
