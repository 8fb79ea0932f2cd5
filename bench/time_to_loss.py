"""Loss and accuracy against seconds over slow links, and what DiLoCo loses to communication.

    .venv/bin/python bench/time_to_loss.py --markdown docs/results/compressed-training.md \
        --plot docs/results/time-to-loss.svg

A transformer (bench/learners.py) trains on hosts with a rank each, which are network namespaces
(bench/hosts.py), so the benchmark needs root. Each method trains for equally many seconds. The
clock stands while rank 0 measures the loss and the accuracy on data that no rank trains with.

Then DiLoCo trains with an outer step behind a delay, and with one that all ranks wait for. The time
lost to communication is that inside the calls that start it and wait for it. The share of the outer
step that is hidden is what these calls save against the second way.

``--quick`` trains a small transformer on two hosts for a second: no figure counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import page
from host_jobs import told_by_rank_0
from hosts import ONE_GIGABIT, Hosts, Shape, obstacle

TITLE = "Time to a loss over slow links"
SHAPES = {1000: ONE_GIGABIT, 100: Shape("100mbit", "32kb", bytes_per_s=100e6 / 8)}
#: At most this share of a step is lost to communication; at least this one of it is hidden.
LOST_MAX, HIDDEN_MIN = 0.02, 0.9
#: The methods of bench/learners.py; DiLoCo has other arguments here.
METHODS = ("float32", "int8", "top-k 1 %", "DiLoCo")
_EVERY, _DELAY = 50, 5
_ROUNDS = 6
#: Steps between two measurements of the loss. The first one is before a fragment is sent.
_PACE = 25
_WAIT_S = 900

#: Points (seconds, steps, loss, share of right predictions).
Curve = list[tuple[float, int, float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=4, help="hosts with a rank each")
    parser.add_argument("--megabit", type=int, default=1000, choices=tuple(SHAPES))
    parser.add_argument("--seconds", type=float, default=40, help="of training by each method")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="of DiLoCo")
    parser.add_argument("--quick", action="store_true", help="see above")
    parser.add_argument("--plot", type=Path, help="draw a .png, .pdf or .svg")
    parser.add_argument("--markdown", type=Path, help="a page whose section is replaced")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.hosts, given.seconds, given.rounds = 2, 1.0, 1
    if given.worker:
        work(given)
        return
    if why := obstacle():
        raise SystemExit(f"hosts cannot be made here: {why}")
    if given.plot is not None:
        from pycoll.tools.pictures import check_picture

        check_picture(given.plot)
    with Hosts(given.hosts, SHAPES[given.megabit]) as hosts:
        found = measured(hosts, sys.argv[1:])
    lines = told(found, given)
    print("\n".join(lines))
    if given.plot is not None:
        draw(given.plot, found["curves"], title_of(found, given))
    if given.markdown is not None:
        write(given.markdown, f"{TITLE}, {rate_of(given)}", lines, given.plot)


def measured(hosts: Hosts, words: Sequence[str]) -> dict[str, Any]:
    """Run a rank on each host with the same options, and return what rank 0 prints."""
    line = [sys.executable, __file__, "--worker", *words]
    text = told_by_rank_0(hosts, line, _WAIT_S, {"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


# The page


def rate_of(given: argparse.Namespace) -> str:
    """The rate of a link in words."""
    rate: int = given.megabit
    return f"{rate / 1000:g} Gb/s" if rate >= 1000 else f"{rate} Mb/s"


def title_of(found: dict[str, Any], given: argparse.Namespace) -> str:
    """The scene in one line."""
    return (
        f"{given.hosts} hosts, links of {rate_of(given)}, a transformer of "
        f"{found['nbytes'] / 1e6:.1f} MB of gradients"
    )


def told(found: dict[str, Any], given: argparse.Namespace) -> list[str]:
    """The lines of the section."""
    curves: dict[str, Curve] = found["curves"]
    goal = reached_by_all(curves)
    first = seconds_to(curves["float32"], goal)
    rows = []
    for name, curve in curves.items():
        seconds, steps = curve[-1][0], curve[-1][1]
        rows.append(
            [
                name,
                f"{1e3 * seconds / steps:.1f} ms",
                f"{lowest_of(curve):.3f}",
                f"{max(right for *_, right in curve):.1%}",
                f"{seconds_to(curve, goal):.1f} s",
                f"{speed_of(seconds_to(curve, goal), first):.2f}",
            ]
        )
    head = ("method", "a step", "lowest loss", "highest accuracy", f"time to {goal:.3f}")
    head += ("times float32's speed",)
    return [
        f"{title_of(found, given)}. Gradients are averaged after the backward pass. All ranks "
        f"share the cores of this machine. DiLoCo has every={_EVERY} and delay={_DELAY}. The loss "
        "is that of the next character, on data that no rank trains with; all methods reach that "
        "of the table.",
        "",
        *page.table(head, rows),
        "",
        *told_of_diloco(found["diloco"]),
    ]


def speed_of(seconds: float, first: float) -> float:
    """The speed of a method as a multiple of float32's, which takes ``first`` seconds. Both take
    none where the goal is the loss before the first step."""
    return 1.0 if seconds == first else first / max(seconds, 1e-9)


def reached_by_all(curves: dict[str, Curve]) -> float:
    """The lowest loss that every method reaches."""
    return max(lowest_of(curve) for curve in curves.values())


def lowest_of(curve: Curve) -> float:
    """The lowest loss."""
    return min(loss for _, _, loss, _ in curve)


def seconds_to(curve: Curve, goal: float) -> float:
    """The seconds after which a loss is reached, between two measurements by interpolation."""
    before = curve[0]
    for point in curve:
        if point[2] <= goal:
            fall = before[2] - point[2]
            share = 1.0 if fall <= 0 else (before[2] - goal) / fall
            return before[0] + share * (point[0] - before[0])
        before = point
    raise ValueError(f"the loss of {goal} is not reached")


def told_of_diloco(found: dict[str, float]) -> list[str]:
    """The lines about DiLoCo's outer step."""
    lost = found["delayed_s"] / (_EVERY * found["step_s"])
    hidden = 1 - found["delayed_s"] / found["waiting_s"]
    rows = [
        ["a step without communication", f"{1e3 * found['step_s']:.1f} ms", ""],
        ["communication of an outer step, waited for", f"{1e3 * found['waiting_s']:.1f} ms", ""],
        ["communication of an outer step, with delay", f"{1e3 * found['delayed_s']:.2f} ms", ""],
        ["lost of a step, on the average", f"{lost:.2%}", _verdict(lost <= LOST_MAX, LOST_MAX)],
        ["hidden of the outer step", f"{hidden:.1%}", _verdict(hidden >= HIDDEN_MIN, HIDDEN_MIN)],
        ["arithmetic of an outer step", f"{1e3 * found['arithmetic_s']:.1f} ms", ""],
        ["a step with DiLoCo, all in all", f"{1e3 * found['whole_s']:.1f} ms", ""],
    ]
    return [
        f"DiLoCo with every={_EVERY} and delay={_DELAY}, the mean over ranks and rounds:",
        "",
        *page.table(("what", "found", "target"), rows),
    ]


def _verdict(is_reached: bool, target: float) -> str:
    return f"{target:.0%}, {'reached' if is_reached else 'missed'}"


def write(path: Path, title: str, lines: Sequence[str], picture: Path | None) -> None:
    """Replace the section of the page."""
    told_lines = [page.origin(), "", *lines]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        told_lines += ["", f"![accuracy and loss against seconds, by method]({place})"]
    page.write_section(path, title, told_lines)


def draw(path: Path, curves: dict[str, Curve], title: str) -> None:
    """Draw the accuracy and the loss of each method against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    shown = ((100, 3, "characters predicted rightly, %"), (1, 2, "loss of the next character"))
    for axes, (scale, place, label) in zip(panels, shown, strict=True):
        for name, curve in curves.items():
            heights = [scale * one[place] for one in curve]
            axes.plot([one[0] for one in curve], heights, linewidth=1.2, label=name)
        axes.set_xlabel("seconds of training")
        axes.set_ylabel(label)
        axes.grid(alpha=0.4, linewidth=0.4)
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


# A rank


def work(given: argparse.Namespace) -> None:
    """One rank: train by all methods in turns; rank 0 prints the curves."""
    import learners
    import torch

    import pycoll

    torch.set_num_threads(1)
    comm = pycoll.init()
    shape = learners.SMALL if given.quick else learners.WIDE

    def made() -> Any:
        return learners.characters(0, comm.rank, comm.size, shape, 32, adam=1e-3)

    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    diloco = {"every": _EVERY, "outer": outer}
    methods = {name: learners.METHODS[name] for name in METHODS}
    methods["DiLoCo"] = learners.Method(diloco={**diloco, "delay": _DELAY})
    curves = {
        name: curve_of(comm, made(), method, given.seconds) for name, method in methods.items()
    }
    found = {
        "nbytes": made().nbytes,
        "curves": curves,
        "diloco": outer_steps(comm, made, diloco, given.rounds),
    }
    if comm.rank == 0:
        print(json.dumps(found))
    comm.barrier()
    pycoll.finalize()


def curve_of(comm: Any, task: Any, method: Any, seconds: float) -> Curve:
    """Train for some seconds of rank 0's clock; the curve of rank 0. Collective."""
    from learners import common

    stepper = method.wrapped(comm, task.optimizer)
    right, loss = task.score(None)
    points, step = [(0.0, 0, loss, right)], 0
    comm.barrier()
    begin = time.perf_counter()
    while comm.broadcast(points[-1][0], 0) < seconds:
        for _ in range(_PACE if step else _PACE - 1):
            train(task, stepper)
            step += 1
        comm.barrier()
        now = time.perf_counter()
        right, loss = task.score(common(stepper)) if comm.rank == 0 else (0.0, 0.0)
        # A loss that is not a number reaches no goal.
        points.append((now - begin, step, loss if math.isfinite(loss) else math.inf, right))
        comm.barrier()
        begin += time.perf_counter() - now
    stepper.finish()
    return points


def train(task: Any, stepper: Any) -> None:
    """Make one step."""
    stepper.zero_grad()
    task.loss().backward()
    stepper.step()


class TimedWork:
    """A Work that adds the time of its ``wait`` to that of its communicator."""

    def __init__(self, work: Any, owner: TimedComm) -> None:
        self._work, self._owner = work, owner

    def wait(self) -> Any:
        """Wait for the Work."""
        begin = time.perf_counter()
        try:
            return self._work.wait()
        finally:
            self._owner.seconds += time.perf_counter() - begin


class TimedComm:
    """A communicator that counts the time inside ``all_reduce`` and inside waits for it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(self, *args: Any, **words: Any) -> TimedWork:
        """Start an all_reduce."""
        begin = time.perf_counter()
        try:
            return TimedWork(self._comm.all_reduce(*args, **words), self)
        finally:
            self.seconds += time.perf_counter() - begin


def outer_steps(comm: Any, made: Any, diloco: dict[str, Any], rounds: int) -> dict[str, float]:
    """The times of a step and of an outer step, means over ranks and rounds. Collective."""
    alone = made()
    steps_of(comm, alone, alone.optimizer, range(_PACE))  # warms up
    steps = range(rounds * _EVERY)
    before = steps_of(comm, alone, alone.optimizer, steps)[0]
    lost, arithmetic, whole = rounds_of(comm, made(), {**diloco, "delay": _DELAY}, rounds)
    waiting = rounds_of(comm, made(), {**diloco, "delay": 0}, rounds)[0]
    after = steps_of(comm, alone, alone.optimizer, steps)[0]
    mine = {
        "step_s": (before + after) / 2,
        "delayed_s": lost,
        "arithmetic_s": arithmetic,
        "waiting_s": waiting,
        "whole_s": whole,
    }
    return {name: float(comm.all_reduce(one, "avg")) for name, one in mine.items()}


def rounds_of(
    comm: Any, task: Any, diloco: dict[str, Any], rounds: int
) -> tuple[float, float, float]:
    """Seconds of an outer step lost to communication, those of its arithmetic, those of a step.

    Ranks wait for each other in front of the steps that begin and end an outer step, so that its
    time has no differences between their speeds in it.
    """
    from learners import Method

    timed, delay = TimedComm(comm), diloco["delay"]
    stepper = Method(diloco=diloco).wrapped(timed, task.optimizer)
    # Half a round behind an outer step nothing is under way.
    first = 1 + _EVERY + _EVERY // 2
    steps_of(comm, task, stepper, range(1, first))
    timed.seconds = 0.0
    numbers = range(first, first + rounds * _EVERY)
    mean, inside = steps_of(comm, task, stepper, numbers, meetings={0, delay})
    usual = sorted(inside)[len(inside) // 2]
    due = [n for n, number in enumerate(numbers) if number % _EVERY in {0, delay}]
    extra = sum(inside[n] - usual for n in due) / rounds
    lost = timed.seconds / rounds
    return lost, max(0.0, extra - lost), mean


def steps_of(
    comm: Any, task: Any, stepper: Any, numbers: range, meetings: Collection[int] = ()
) -> tuple[float, list[float]]:
    """Make the steps of these numbers; the mean seconds of one, and those inside each ``step()``.

    ``meetings``: steps of a round in front of which ranks wait for each other.
    """
    inside = []
    comm.barrier()
    begin = time.perf_counter()
    for number in numbers:
        stepper.zero_grad()
        task.loss().backward()
        if number % _EVERY in meetings:
            comm.barrier()
        called = time.perf_counter()
        stepper.step()
        inside.append(time.perf_counter() - called)
    return (time.perf_counter() - begin) / len(numbers), inside


if __name__ == "__main__":
    main()
