"""The results of bench/training.py: names, times, targets, tables and pictures."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import page
import training_calls
from jobs import Times, ratio

from pycoll.optim import POLICIES
from pycoll.tools.bench import report

TITLE = "Training, by policies and against the peers"
#: Names of entrants: those of the pycoll job are named by their way, others by the library.
ALONE, WHOLE, SINGLY, DDP_ALONE, IN_STEP, DDP, GLOO, HOROVOD = (
    *("alone", "all_reduce", "hvd", "ddp alone", "ddp in step", "ddp", "Gloo DDP", "Horovod"),
)
#: The ways that are compared for each model: all; for real models on one host also those of
#: DistributedDataParallel separately.
EVERY = (ALONE, WHOLE, *POLICIES, "auto", SINGLY, DDP_ALONE, DDP)
PARALLEL = (ALONE, DDP_ALONE, IN_STEP, DDP)
RANKS = 2
REAL = ("MLP, 25 M", "transformer")


@dataclass(frozen=True)
class Scene:
    """The hosts of the ranks, and the models that are trained there by default."""

    title: str
    hosts: int
    models: tuple[str, ...]

    @property
    def is_wire(self) -> bool:
        """Whether bytes go over a cable with a rate."""
        return self.hosts > 1


SCENES = (
    Scene("2 ranks on one host", 1, (training_calls.SETS[0], *REAL)),
    Scene("2 hosts, cable of 10 Gb/s", RANKS, REAL[1:]),
)


@dataclass(frozen=True)
class Result:
    """The times of ways to train one model in one scene. ``why``: the explanation of auto's
    choice."""

    scene: Scene
    model: str
    ways: Sequence[str]
    nbytes: int
    times: dict[str, Times]
    why: str

    @property
    def title(self) -> str:
        """The model and the scene, for a heading."""
        some = ", DistributedDataParallel" if self.ways is PARALLEL else ""
        return f"{self.model}, {self.nbytes / 1e6:.0f} MB{some}; {self.scene.title}"

    def exposed(self, name: str, than: str = ALONE) -> float:
        """Return the additional seconds of a step over one of ``than``, at least a microsecond."""
        pairs = zip(self.times[name].batches, self.times[than].batches, strict=True)
        return max(1e-6, statistics.median(step - less for step, less in pairs))

    def hidden(self, name: str) -> float:
        """Return the share of one contiguous all_reduce's time that computation hides."""
        return max(0.0, 1 - self.exposed(name) / self.times[WHOLE].median)


def judged(result: Result) -> list[str]:
    """Return the figures and targets of this model in this scene."""
    lines = []
    times = result.times
    if HOROVOD in times:
        times_less = result.exposed(HOROVOD) / result.exposed(SINGLY)
        lines.append(f"Horovod's time not hidden / that of tensor by tensor {times_less:.2f}")
    if result.ways is EVERY and not result.scene.is_wire:
        share = times[WHOLE].median / result.exposed("auto")
        lines.append(f"one all_reduce / auto's time not hidden {share:.2f}")
    if result.ways is PARALLEL and GLOO in times:
        shorter = {
            than: result.exposed(GLOO, than) / result.exposed(DDP, than)
            for than in (IN_STEP, DDP_ALONE, ALONE)
        }
        lines.append(page.verdict("communication of Gloo DDP / DDP", shorter[IN_STEP], 5))
        lines.append(f"including the wait for the slower rank {shorter[DDP_ALONE]:.2f}")
        lines.append(f"including that wait and DDP's own copies {shorter[ALONE]:.2f}")
    if result.scene.is_wire:
        best = min((name for name in POLICIES), key=lambda name: times[name].median)
        lines.append(page.verdict(f"{best} / auto", ratio(times, best, "auto") or 0, 0.97))
        for name in ("wfbp", "bsp"):
            lines.append(page.verdict(f"{name} / mg_wfbp", ratio(times, name, "mg_wfbp") or 0, 1))
    return lines


def head() -> list[str]:
    """Return the titles of the columns of ``rows``."""
    return ["way", "step, ms", "not hidden, ms", "hidden", "Gloo DDP / this"]


def rows(result: Result) -> list[list[str]]:
    """Return a row for each way of training."""
    found = []
    for name, one in result.times.items():
        cells = [name, report.four_digits(one.median * 1e3)]
        if name in (ALONE, WHOLE):
            found.append([*cells, "-", "-", "-"])
            continue
        against = ratio(result.times, GLOO, name)
        found.append(
            [
                *cells,
                report.four_digits(result.exposed(name) * 1e3),
                f"{result.hidden(name):.0%}" if WHOLE in result.times else "-",
                "-" if against is None else f"{against:.2f}",
            ]
        )
    return found


def write_markdown(
    path: Path,
    results: Sequence[Result],
    calls: training_calls.Found | None,
    picture: Path | None,
) -> None:
    """Replace this command's section of the page."""
    lines = [
        page.origin(),
        "",
        "float32, SGD, one thread per rank, interleaved samples; milliseconds of a step of the "
        "slowest rank, medians over rounds (bench/training.py says how).",
    ]
    for result in results:
        lines += ["", f"### {result.title}", ""]
        lines += page.table(head(), rows(result))
        lines += ["", *(f"{line}." for line in judged(result))]
        if result.why:
            lines += ["", "```", *result.why.splitlines(), "```"]
    if calls is not None:
        lines += ["", f"### Calls; {SCENES[0].title}", ""]
        lines += page.table(["what", "measured", "against"], training_calls.rows(calls))
        lines += ["", *(f"{line}." for line in training_calls.judged(calls))]
    if picture is not None:
        place = os.path.relpath(picture, path.parent)
        lines += [
            "",
            f"![a step of every way: computation, and communication that is not hidden]({place})",
        ]
    page.write_section(path, TITLE, lines)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Draw bars of the steps: computation, and communication that is not hidden."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, every = pyplot.subplots(
        1, len(results), figsize=(3.2 * len(results), 3.6), squeeze=False, layout="constrained"
    )
    for axes, result in zip(every[0], results, strict=True):
        names = [name for name in result.times if name not in (ALONE, WHOLE)][::-1]
        alone = result.times[ALONE].median * 1e3
        axes.barh(names, [alone] * len(names), color="0.75", label="computing")
        late = [result.exposed(name) * 1e3 for name in names]
        axes.barh(names, late, left=alone, color="C0", label="not hidden")
        axes.set_title(f"{result.model}\n{result.scene.title}", fontsize=9)
        axes.set_xlabel("ms per step")
    every[0][0].legend(fontsize=8)
    figure.savefig(path)
