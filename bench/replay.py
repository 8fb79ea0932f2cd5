"""Replays training steps by every method, on hosts with links of a given rate.

    .venv/bin/python bench/replay.py --markdown docs/results/replay.md --plot docs/results

The hosts are network namespaces (bench/hosts.py), so the benchmark needs root. Each worker and each
server has a host and a link of its own. The layers are those of bench/survey/; their sizes are
divided by SCALES, so a link of 1 Gb/s stands for one that is faster by that factor. Latencies are
not scaled. Time passes by a timer in the place of an accelerator (bench/replay_worker.py).

Scenes differ in the length of the passes: an all-reduce of all gradients as one message takes 0.5,
1 or 2 times the backward pass. The model's prediction uses the rates that pycoll measures on these
links. "Hidden" is the share of the communication, as these rates give it, that does not lengthen
the step. Methods of the survey wait for all gradients before the next forward pass; ByteScheduler,
dear and auto wait layer by layer.

A further line has one long message, through servers apart and by a ring; --link prints only that.
Rates are measured anew for every scene. A run takes about ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import page
from host_jobs import places_of
from hosts import DEVICE, ONE_GIGABIT, Hosts, obstacle

from pycoll.gradients.communication_plan import Gradient
from pycoll.gradients.compare import read_gradients
from pycoll.gradients.policies import Policy
from pycoll.gradients.step_record import Step, Travel
from pycoll.tools.overlaps import plot, seen_of

TITLE = "Replayed steps"
FOLDER = Path(__file__).resolve().parent
MIB = 1 << 20
#: Sizes are divided by these numbers, so that 6 to 7 million parameters are left of each model.
SCALES = {"resnet50": 4, "bert_base": 16}
#: Communication over backward pass, in the scenes.
RATIOS = (0.5, 1.0, 2.0)
#: The methods by name: policy, architecture, and whether the next forward pass waits layer by
#: layer. The search of auto may use any of these.
METHODS = {
    "BSP-PS": ("bsp", "ps", False),
    "WFBP-PS": ("wfbp", "ps", False),
    "ByteScheduler-PS": ("bytescheduler", "ps", True),
    "BSP-A2A": ("bsp", "a2a", False),
    "WFBP-A2A": ("wfbp", "a2a", False),
    "MG-WFBP": ("mg_wfbp", "a2a", False),
    "ByteScheduler-A2A": ("bytescheduler", "a2a", True),
    "fixed": ("fixed", "a2a", False),
    "dear": ("dear", "a2a", True),
    "auto": ("auto", "auto", True),
}
#: Targets: auto over the best named method; what mg_wfbp hides of what the model says can be
#: hidden; the model's error; a long message through servers, over its bytes by the link's rate.
AUTO_MAX, MG_WFBP_MIN, ERROR_MAX, SERVED_MAX = 1.03, 0.85, 0.10, 1.15
#: Methods that differ by less count as equal, in the table of findings.
EQUAL = 0.02
#: The long message.
LONG = 64 * MIB
#: Most seconds for the end of the ranks. Their operations have deadlines of their own.
_END_S = 60.0
_SETTINGS = {"OMP_NUM_THREADS": "1", "PYCOLL_TIMEOUT_S": "120"}


class Scene(NamedTuple):
    """A model, and the time of its communication over that of its backward pass."""

    model: str
    ratio: float

    @property
    def title(self) -> str:
        return f"{self.model}, communication {self.ratio:g} times the backward pass"


class Found(NamedTuple):
    """The step of a method in a scene; times are seconds."""

    scene: Scene
    method: str
    step_s: float
    predicted_s: float
    computing_s: float
    communication_s: float
    messages: int
    rates: list[Any]
    why: str
    record: list[Any]

    @property
    def error(self) -> float:
        """The prediction's relative error."""
        return self.predicted_s / self.step_s - 1

    def hidden(self, step_s: float) -> float:
        """The share of the communication that does not lengthen a step of this length."""
        exposed_s = max(0.0, step_s - self.computing_s)
        return 1 - min(1.0, exposed_s / self.communication_s)


def gradients_of(scene: Scene, workers: int) -> list[Gradient]:
    """The gradients of a scene: scaled sizes, and passes of the length that the ratio asks for."""
    path = FOLDER / "survey" / f"layers-{scene.model}.csv"
    scale = SCALES[scene.model]
    read = read_gradients(path)
    sizes = [max(4, one.nbytes // scale // 4 * 4) for one in read]
    ring_s = 2 * (workers - 1) / workers * sum(sizes) / ONE_GIGABIT.bytes_per_s
    factor = ring_s / scene.ratio / read[-1].ready_s
    return [Gradient(size, one.ready_s * factor) for size, one in zip(sizes, read, strict=True)]


def order_of(scene: Scene, method: str, workers: int, steps: int) -> dict[str, Any]:
    """The order for a worker; the sizes in a policy are scaled as well."""
    policy, architecture, overlaps = METHODS[method]
    plain = Policy(policy)
    words = ("bucket_bytes", "partition_bytes", "credit_bytes")
    parameters = {word: getattr(plain, word) // SCALES[scene.model] for word in words}
    return {
        "scene": scene.title,
        "gradients": gradients_of(scene, workers),
        "policy": policy,
        "architecture": architecture,
        "overlaps": overlaps,
        "parameters": parameters,
        "steps": steps,
    }


class Ranks:
    """Workers and servers, each on a host of its own, that run a list of orders."""

    def __init__(self, hosts: Hosts, workers: int, orders: Sequence[dict[str, Any]]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name, "orders.json")
        path.write_text(json.dumps(orders))
        size = len(hosts.names)
        places = places_of("pycoll", hosts.addresses[0], DEVICE, size)
        self._processes = []
        for rank in range(size):
            serves = rank >= workers
            program = (
                ["-m", "pycoll.ps"] if serves else [str(FOLDER / "replay_worker.py"), str(path)]
            )
            role = {"PYCOLL_ROLE": "server"} if serves else {}
            self._processes.append(
                subprocess.Popen(
                    hosts.on(rank, [sys.executable, *program]),
                    env={**os.environ, **places(rank, 0), **role, **_SETTINGS},
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    text=True,
                )
            )

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield what rank 0 prints; raises SystemExit where a rank fails."""
        assert self._processes[0].stdout is not None
        for line in self._processes[0].stdout:
            found = json.loads(line)
            if not found["right"]:
                raise SystemExit("a sum is wrong")
            yield found
        codes = [process.wait(timeout=_END_S) for process in self._processes]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")

    def close(self) -> None:
        """End the processes that are left."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def replay(
    scenes: Sequence[Scene], methods: Sequence[str], options: argparse.Namespace
) -> tuple[list[Found], dict[str, float]]:
    """Run everything; returns what each method took, and the times of the long message."""
    workers, servers = options.workers, options.servers
    links = {"servers apart": "servers", "ring": "ring"} if servers else {"ring": "ring"}
    orders: list[dict[str, Any]] = [
        {"algorithm": algorithm, "nbytes": options.long, "steps": options.steps}
        for algorithm in links.values()
    ]
    cases = [(scene, method) for scene in scenes for method in methods]
    orders += [order_of(scene, method, workers, options.steps) for scene, method in cases]
    found: list[Found] = []
    with contextlib.ExitStack() as cleanup:
        hosts = cleanup.enter_context(Hosts(workers + servers, ONE_GIGABIT))
        ranks = Ranks(hosts, workers, orders)
        cleanup.callback(ranks.close)
        answers = ranks.answers()
        long = {name: next(answers)["step_s"] for name in links}
        for (scene, method), answer in zip(cases, answers, strict=True):
            kept = {name: answer[name] for name in Found._fields[2:]}
            found.append(Found(scene, method, **kept))
            print(line_of(found[-1]), flush=True)
    return found, long


# Tables and pictures


HEAD = ("method", "step ms", "model ms", "model's error", "hidden", "model: hidden", "messages")


def cells_of(one: Found) -> list[str]:
    """A row of a scene's table."""
    return [
        one.method,
        f"{1e3 * one.step_s:.1f}",
        f"{1e3 * one.predicted_s:.1f}",
        f"{one.error:+.1%}",
        f"{one.hidden(one.step_s):.0%}",
        f"{one.hidden(one.predicted_s):.0%}",
        str(one.messages),
    ]


def line_of(one: Found) -> str:
    """A line for the terminal."""
    words = ", ".join(
        f"{head} {cell}" for head, cell in zip(HEAD[1:], cells_of(one)[1:], strict=True)
    )
    return f"{one.scene.title}: {one.method}: {words}"


class Finding(NamedTuple):
    """A claim of the survey: the first method takes less time than the second one, or not less.

    ``number``: in the survey's table II; the words are this bench's. ``models``: the scenes that
    it is about.
    """

    number: int
    claim: str
    faster: str
    slower: str
    models: tuple[str, ...] = tuple(SCALES)
    gains: bool = True


FINDINGS = (
    Finding(3, "WFBP gains over BSP, by servers", "WFBP-PS", "BSP-PS"),
    Finding(3, "WFBP gains over BSP, by all-reduce", "WFBP-A2A", "BSP-A2A"),
    Finding(4, "fusion gains over WFBP, by all-reduce", "MG-WFBP", "WFBP-A2A"),
    Finding(
        5,
        "partition gains over WFBP, by servers and with long tensors",
        "ByteScheduler-PS",
        "WFBP-PS",
        ("bert_base",),
    ),
    Finding(
        5, "partition does not gain, by all-reduce", "ByteScheduler-A2A", "WFBP-A2A", gains=False
    ),
    Finding(6, "servers gain over all-reduce, with WFBP", "WFBP-PS", "WFBP-A2A"),
)


def findings_of(found: Sequence[Found]) -> list[list[str]]:
    """The rows of the table of findings: number, claim, speed-up in each scene, verdict."""
    rows = []
    steps = {(one.scene, one.method): one.step_s for one in found}
    for finding in FINDINGS:
        gains = {
            scene: steps[scene, finding.slower] / steps[scene, finding.faster]
            for scene in dict.fromkeys(one.scene for one in found)
            if scene.model in finding.models
            and (scene, finding.slower) in steps
            and (scene, finding.faster) in steps
        }
        if not gains:
            continue
        held = [gain > 1 + EQUAL if finding.gains else gain < 1 + EQUAL for gain in gains.values()]
        verdict = "true" if all(held) else "false"
        if any(held) and not all(held):
            verdict = f"true in {sum(held)} of {len(held)} scenes"
        figures = ", ".join(
            f"{scene.model} {scene.ratio:g}: {gain:.2f}" for scene, gain in gains.items()
        )
        rows.append([str(finding.number), finding.claim, figures, verdict])
    return rows


def verdicts_of(found: Sequence[Found]) -> list[str]:
    """Compare with the targets."""
    lines = []
    for scene in dict.fromkeys(one.scene for one in found):
        by = {one.method: one for one in found if one.scene == scene}
        named = [one for one in by.values() if one.method != "auto"]
        if "auto" in by and named:
            best = min(named, key=lambda one: one.step_s)
            share = by["auto"].step_s / best.step_s
            word = "reached" if share <= AUTO_MAX else "missed"
            lines.append(
                f"{scene.title}: auto takes {share:.3f} times as long as {best.method}, the best "
                f"named method; at most {AUTO_MAX:g}, {word}"
            )
        if "MG-WFBP" in by:
            one = by["MG-WFBP"]
            able = one.hidden(one.predicted_s)
            share = one.hidden(one.step_s) / able if able > 0 else 1.0
            words = page.verdict("MG-WFBP hides, of what the model says,", share, MG_WFBP_MIN)
            lines.append(f"{scene.title}: {words}")
    errors = sorted(found, key=lambda one: abs(one.error))
    if errors:
        beyond = [one for one in errors if abs(one.error) > ERROR_MAX]
        mean = statistics.mean(abs(one.error) for one in errors)
        lines.append(
            f"the model errs by {mean:.1%} on average and by more than {ERROR_MAX:.0%} in "
            f"{len(beyond)} of {len(errors)} cases"
            + "".join(
                f"; {one.scene.model} {one.scene.ratio:g} {one.method} {one.error:+.1%}"
                for one in beyond
            )
        )
    return lines


def rates_text(rates: Sequence[Any]) -> str:
    """The measured rates, in words; ``rates`` has the fields of ``Rates``."""
    words = [
        f"{name} {1e6 * alpha:.0f} us + {1e9 * beta:.3g} ns/B"
        for name, (alpha, beta) in (
            *zip(("all_reduce", "reduce_scatter", "all_gather"), rates[:3], strict=True),
            *(("to servers", leg[0]) for leg in rates[6][:1]),
        )
    ]
    back = [f"back {1e6 * leg[2]:.0f} us later" for leg in rates[6][1:]]
    return ", ".join([*words, *back]) + "."


def long_line(long: dict[str, float], nbytes: int) -> str:
    """The long message, in units of its bytes by the link's rate."""
    unit_s = nbytes / ONE_GIGABIT.bytes_per_s
    words = ", ".join(f"{name} {took_s / unit_s:.2f} D/B" for name, took_s in long.items())
    line = f"{nbytes >> 20} MiB: {words}"
    if "servers apart" in long:
        share = long["servers apart"] / unit_s
        line += (
            f"; servers at most {SERVED_MAX:g}, {'reached' if share <= SERVED_MAX else 'missed'}"
        )
    return line


def step_of(record: Sequence[Any]) -> Step:
    """The record of a step, which has come as JSON."""
    step = Step(*record)
    return step._replace(travels=tuple(Travel(*one) for one in step.travels))


def draw(folder: Path, found: Sequence[Found]) -> list[Path]:
    """Draw a step of every method, in a picture for each model, at the scene in the middle."""
    paths = []
    for model in dict.fromkeys(one.scene.model for one in found):
        ratios = sorted({one.scene.ratio for one in found if one.scene.model == model})
        scene = Scene(model, ratios[len(ratios) // 2])
        paths.append(folder / f"replay-{model}.png")
        steps = [one for one in found if one.scene == scene]
        plot(paths[-1], [seen_of(step_of(one.record), 0, one.method) for one in steps])
    return paths


def lines_of(
    found: Sequence[Found], long: dict[str, float], options: argparse.Namespace
) -> list[str]:
    """The lines of the page."""
    sizes = ", ".join(f"{model} by {SCALES[model]}" for model in SCALES)
    lines = [
        page.origin(),
        "",
        f"{options.workers} workers and {options.servers} servers, each on a host of its own "
        f"(network namespaces) with a link of 1 Gb/s. Sizes are divided: {sizes}; latencies are "
        "not scaled. An accelerator's stand-in lets time pass by a timer; everything else is the "
        f"product. Medians of {options.steps} steps, each on the slowest rank.",
    ]
    for scene in dict.fromkeys(one.scene for one in found):
        here = [one for one in found if one.scene == scene]
        rates = f"Rates that pycoll measured: {rates_text(here[-1].rates)}"
        rows = [cells_of(one) for one in here]
        lines += ["", f"### {scene.title}", "", rates, "", *page.table(HEAD, rows)]
    if found:
        lines += ["", "### Targets", "", *(f"* {line}" for line in verdicts_of(found))]
        lines += ["", "### The survey's findings", ""]
        lines += page.table(("finding", "claim", "speed-up", "here"), findings_of(found))
    return [*lines, "", "### A long message", "", long_line(long, options.long)]


def main() -> int:
    """Replay the scenes that are asked for, and print and write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one scene, few methods and steps")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="steps that count")
    parser.add_argument("--model", choices=SCALES, action="append")
    parser.add_argument("--ratio", type=float, action="append", help="instead of 0.5, 1 and 2")
    parser.add_argument("--method", choices=METHODS, action="append")
    parser.add_argument("--link", action="store_true", help="only the long message")
    parser.add_argument("--markdown", type=Path, help="put the tables on this page")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw a step of each method")
    options = parser.parse_args()
    if options.workers < 2 or options.servers < 0 or options.steps < 1:
        parser.error("expected at least 2 workers, no less than 0 servers, and at least 1 step")
    if any(ratio <= 0 for ratio in options.ratio or ()):
        parser.error("expected ratios above 0")
    why = obstacle()
    if why:
        raise SystemExit(f"hosts cannot be made here: {why}")
    models = options.model or (["resnet50"] if options.quick else list(SCALES))
    ratios = options.ratio or ([1.0] if options.quick else RATIOS)
    quick = (
        ["BSP-PS", "MG-WFBP", "dear", "auto"] if options.servers else ["MG-WFBP", "dear", "auto"]
    )
    methods = options.method or (quick if options.quick else list(METHODS))
    if not options.servers:
        methods = [name for name in methods if not name.endswith("-PS")]
    options.steps = 2 if options.quick else options.steps
    options.long = MIB if options.quick else LONG
    scenes = [Scene(model, ratio) for model in models for ratio in ratios]
    begin_s = time.monotonic()
    found, long = replay([] if options.link else scenes, methods, options)
    lines = lines_of(found, long, options)
    print("\n".join(lines))
    print(f"took {time.monotonic() - begin_s:.0f} s")
    if options.plot is not None and found:
        for path in draw(options.plot, found):
            place = os.path.relpath(path, options.markdown.parent) if options.markdown else path
            lines += ["", f"![a step of every method]({place})"]
    if options.markdown is not None:
        page.write_section(options.markdown, TITLE, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
