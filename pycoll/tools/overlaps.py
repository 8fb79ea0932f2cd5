"""The steps with a policy in a timeline: the hidden share of communication, and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.step_record import STEP, Step
from pycoll.tools.pictures import check_picture
from pycoll.tools.timelines import Event

Span = tuple[float, float]


class Seen(NamedTuple):
    """One step of one rank; times are in microseconds.

    ``backward`` is the span of the backward pass. ``ready`` are the times at which gradients became
    ready. ``wires`` are the spans of communication, each with the name of its message. ``waits``
    are the spans in which the program waited.
    """

    rank: int
    number: int
    policy: str
    backward: Span
    ready: tuple[float, ...]
    wires: tuple[tuple[Span, str], ...]
    waits: tuple[Span, ...]

    @property
    def hidden(self) -> float:
        """The share of the communication time in which the program did not wait; 1 without any."""
        total = sum(end - begin for (begin, end), _ in self.wires)
        return 1 - self.exposed_us / total if total > 0 else 1.0

    @property
    def exposed_us(self) -> float:
        """The time in which the program waited while a message was under way."""
        return sum(
            max(0.0, min(end, stop) - max(begin, start))
            for (begin, end), _ in self.wires
            for start, stop in self.waits
        )

    @property
    def end_us(self) -> float:
        """The end of the last span of the step."""
        ends = [end for (_, end), _ in self.wires] + [end for _, end in self.waits]
        return max([self.backward[1], *ends])


def steps_of(events: Sequence[Event]) -> list[Seen]:
    """Return all steps of a timeline, by rank and number; empty without a policy.

    Raises InvalidArgumentError if an event of a step lacks a field that pycoll writes.
    """
    try:
        return _steps_of(events)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        text = f"the timeline has a broken event of the category {STEP}: {error!r}"
        raise InvalidArgumentError(text) from None


def seen_of(step: Step, rank: int, name: str = "") -> Seen:
    """Return a step as ``plot`` takes it, from the record that an observer got.

    ``name`` stands for the policy in the title, by default that of the step.
    """

    def us(begin_s: float, end_s: float) -> Span:
        return 1e6 * begin_s, 1e6 * end_s

    return Seen(
        rank,
        step.number,
        name or step.policy,
        us(step.begin_s, step.flushed_s),
        tuple(1e6 * at_s for _, at_s in step.ready),
        tuple((us(one.starts_s, one.ends_s), f"{one.what} {one.message}") for one in step.travels),
        tuple(us(*one) for one in step.waits),
    )


def _steps_of(events: Sequence[Event]) -> list[Seen]:
    found: dict[tuple[int, int], dict[str, list[Event]]] = {}
    for event in events:
        if event.get("cat") == STEP and "is" in event.get("args", {}):
            key = (int(event["pid"]), int(event["args"]["step"]))
            found.setdefault(key, {}).setdefault(event["args"]["is"], []).append(event)
    return [
        Seen(
            rank,
            number,
            str(kinds["backward"][0]["args"]["policy"]),
            _span(kinds["backward"][0]),
            tuple(float(one["ts"]) for one in kinds.get("ready", [])),
            tuple((_span(one), str(one["name"])) for one in kinds.get("wire", [])),
            tuple(_span(one) for one in kinds.get("wait", [])),
        )
        for (rank, number), kinds in sorted(found.items())
        if "backward" in kinds
    ]


def _span(event: Event) -> Span:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def lines_of(steps: Sequence[Seen]) -> list[str]:
    """Return a line for each rank: the number of steps, and the median of the hidden share."""
    lines = []
    for rank in sorted({one.rank for one in steps}):
        own = [one for one in steps if one.rank == rank]
        share = statistics.median(one.hidden for one in own)
        policies = ", ".join(dict.fromkeys(one.policy for one in own))
        what = f"{share:.0%} of the time on the wire hidden"
        lines.append(f"rank {rank}: {len(own)} steps by {policies}, {what}")
    return lines


def choose_step(steps: Sequence[Seen], number: int | None) -> list[Seen]:
    """Return every rank's step of that number.

    Without a number, it is that of the first rank's step with the median hidden share.

    Raises InvalidArgumentError if there is no such step.
    """
    if not steps:
        raise InvalidArgumentError(
            "the timeline has no steps with a policy: record one with DistributedOptimizer("
            "..., policy=...)"
        )
    if number is None:
        first = [one for one in steps if one.rank == steps[0].rank]
        number = sorted(first, key=lambda one: one.hidden)[len(first) // 2].number
    found = [one for one in steps if one.number == number]
    if not found:
        known = sorted({one.number for one in steps})
        raise InvalidArgumentError(
            f"step is {number}: the timeline has steps {known[0]} to {known[-1]}"
        )
    return found


def plot(path: Path, steps: Sequence[Seen]) -> None:
    """Draw one step of every rank: the backward pass above, communication below.

    Raises the InvalidArgumentError of `check_picture`.
    """
    check_picture(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(
        len(steps), 1, figsize=(9, 1 + 1.4 * len(steps)), squeeze=False, layout="constrained"
    )
    for axes, step in zip(every[:, 0], steps, strict=True):
        zero = step.backward[0]
        width = step.backward[1] - zero
        axes.broken_barh([(0, width / 1e3)], (1.1, 0.8), color="0.8")
        axes.vlines([(at - zero) / 1e3 for at in step.ready], 1.1, 1.3, color="0.3", linewidth=0.6)
        bars = [((a - zero) / 1e3, (b - a) / 1e3) for (a, b), _ in step.wires]
        axes.broken_barh(bars, (0.1, 0.8), color="C0", edgecolor="white", linewidth=0.5)
        late = [((a - zero) / 1e3, (b - a) / 1e3) for a, b in step.waits]
        axes.broken_barh(late, (0.0, 0.1), color="C3")
        axes.set_yticks([0.05, 0.5, 1.5], ["waits", "wire", "backward"])
        axes.set_xlim(0, (step.end_us - zero) / 1e3)
        messages = f"{len(step.wires)} message{'s' if len(step.wires) != 1 else ''}"
        title = f"rank {step.rank}, step {step.number}, {step.policy}: {messages}"
        axes.set_title(f"{title}, {step.hidden:.0%} of communication hidden", fontsize=9)
    every[-1, 0].set_xlabel("ms since the backward pass began")
    figure.savefig(path)
    pyplot.close(figure)
