"""Trains by each codec and by DiLoCo, and compares the accuracy with that of float32.

    .venv/bin/python bench/accuracy.py --markdown docs/results/compressed-training.md

Four ranks train two tasks (bench/learners.py) with five seeds each. A difference is that of the
same seed, averaged over the seeds. ``--quick`` trains digits for few steps on two ranks: it shows
that the script works, and no figure counts. All ranks must end with equal parameters. The status is
1 if a bound is missed or the comparison shows nothing, except with ``--quick``, whose single seed
says nothing about a bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import page
from jobs import RUN_PYCOLL

TITLE = "Accuracy by codec"
#: Percentage points of accuracy that a method may lose at most against float32.
BOUNDS = {"int8": 0.5, "int4": 1.0, "sign": 1.0, "top-k 1 %": 1.0, "DiLoCo": 1.0}
#: A method that must lose against the one with feedback; otherwise the test shows nothing.
WITHOUT, WITH = "top-k 1 %, no feedback", "top-k 1 %"
STEPS = {"digits": 600, "characters": 300}
_SEEDS, _RANKS = 5, 4
_QUICK = ("float32", "int8", WITH, WITHOUT, "DiLoCo")
_WAIT_S = 1200

#: By task and method: accuracy and loss of each seed.
Found = dict[str, dict[str, list[tuple[float, float]]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=_SEEDS)
    parser.add_argument("--ranks", type=int, default=_RANKS)
    parser.add_argument("--task", choices=tuple(STEPS), help="only this one")
    parser.add_argument("--steps", type=int, help="instead of the task's own number")
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--markdown", type=Path, help="a page whose section is replaced")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.seeds, given.ranks, given.task, given.steps = 1, 2, "digits", 60
    if given.worker:
        work(given)
        return
    begin = time.monotonic()
    found = measured(sys.argv[1:], given.ranks)
    lines = told(found, given.ranks)
    lines.append("")
    lines.append(f"It took {time.monotonic() - begin:.0f} s.")
    print("\n".join(lines))
    if given.markdown is not None:
        page.write_section(given.markdown, TITLE, [page.origin(), "", *lines])
    failed = failures(found)
    if failed and not given.quick:
        raise SystemExit("\n".join(failed))


def measured(words: Sequence[str], ranks: int) -> Found:
    """Run the workers with the same options, and return what rank 0 prints."""
    line = [*RUN_PYCOLL, "-n", str(ranks), "--", sys.executable, __file__, "--worker", *words]
    done = subprocess.run(
        line,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=_WAIT_S,
        check=True,
    )
    found: Found = {}
    for one in done.stdout.splitlines():
        if one.startswith("["):
            task, method, accuracy, loss = json.loads(one)
            found.setdefault(task, {}).setdefault(method, []).append((accuracy, loss))
    return found


def told(found: Found, ranks: int) -> list[str]:
    """The lines of the section: a table for each task."""
    lines = [
        f"{ranks} ranks. Accuracy is the share of right predictions on data that no rank trains "
        "with, in percent: the mean over the seeds, and the range. The difference to float32 is in "
        "percentage points, by the same seed.",
    ]
    for task, methods in found.items():
        head = ("method", "accuracy", "range", "difference", "loss", "bound")
        seeds = len(next(iter(methods.values())))
        rows = [row(name, methods) for name in methods]
        lines += ["", f"### {task.capitalize()}, {seeds} seeds", "", *page.table(head, rows)]
    return lines


def row(name: str, methods: dict[str, list[tuple[float, float]]]) -> list[str]:
    """The row of a method."""
    shares = [100 * accuracy for accuracy, _ in methods[name]]
    return [
        name,
        f"{statistics.mean(shares):.2f}",
        f"{min(shares):.2f} to {max(shares):.2f}",
        f"{lead(name, 'float32', methods):+.2f}",
        f"{statistics.mean(loss for _, loss in methods[name]):.4f}",
        judged(name, methods),
    ]


def lead(name: str, other: str, methods: dict[str, list[tuple[float, float]]]) -> float:
    """By how many percentage points a method is better than another one, on the average."""
    pairs = zip(methods[name], methods[other], strict=True)
    return statistics.mean(100 * (mine[0] - its[0]) for mine, its in pairs)


def keeps(name: str, methods: dict[str, list[tuple[float, float]]]) -> bool:
    """Whether a method keeps its bound, or, without feedback, loses what it must lose."""
    if name == WITHOUT:
        return lead(name, WITH, methods) < 0 and lead(name, "float32", methods) < 0
    bound = BOUNDS.get(name)
    return bound is None or lead(name, "float32", methods) >= -bound


def judged(name: str, methods: dict[str, list[tuple[float, float]]]) -> str:
    """The cell that says whether a method keeps its bound."""
    kept = keeps(name, methods)
    if name == WITHOUT:
        return "must be worse, " + ("is" if kept else "is not: the test shows nothing")
    bound = BOUNDS.get(name)
    return "" if bound is None else f"{-bound:g}, {'reached' if kept else 'missed'}"


def failures(found: Found) -> list[str]:
    """A line for each method and task whose bound is missed or whose comparison shows nothing."""
    return [
        f"{task}, {name}: {lead(name, 'float32', methods):+.2f} percentage points to float32, "
        f"bound {judged(name, methods)}"
        for task, methods in found.items()
        for name in methods
        if not keeps(name, methods)
    ]


def work(given: argparse.Namespace) -> None:
    """One rank: train everything; rank 0 prints a line for each result."""
    import learners
    import torch

    import pycoll

    torch.set_num_threads(1)
    comm = pycoll.init()
    tasks = [given.task] if given.task else list(STEPS)
    names = _QUICK if given.quick else learners.METHODS
    for task in tasks:
        for seed in range(given.seeds):
            for name in names:
                made = getattr(learners, task)(seed, comm.rank, comm.size)
                score = trained(comm, made, learners.METHODS[name], given.steps or STEPS[task])
                if comm.rank == 0:
                    print(json.dumps([task, name, *score]), flush=True)
    pycoll.finalize()


def trained(comm: Any, task: Any, method: Any, steps: int) -> tuple[float, float]:
    """Train, and return accuracy and loss. SystemExit if the ranks end with other parameters, or if
    a codec that has to leave something out has not been used."""
    stepper = method.wrapped(comm, task.optimizer)
    for _ in range(steps):
        stepper.zero_grad()
        task.loss().backward()
        stepper.step()
    stepper.finish()
    feedback = getattr(stepper, "feedback", None)
    if feedback is not None and feedback.norm() == 0:
        raise SystemExit(f"{method} left nothing out of any gradient")
    mine = [one.detach() for one in task.model.parameters()]
    for whole in (comm.all_gather(one.reshape(1, -1)) for one in mine):
        if not bool((whole == whole[:1]).all()):
            raise SystemExit(f"{method} ends with other parameters on some ranks")
    found: tuple[float, float] = task.score(None)
    return found


if __name__ == "__main__":
    main()
