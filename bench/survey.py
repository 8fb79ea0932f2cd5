"""Replay the measurements of the survey (arXiv 2005.13247) by the model, without any rank.

    python bench/survey.py [--cells FILE.csv] [--plot FOLDER]

It prints predicted and measured samples per second of every cell: a method, a model, a network and
a number of GPUs. The cells and the layer times are in bench/survey/, whose README names their
sources. Another file of cells with the same columns can be given. The constants of the model are in
`Constants`; they are the same for all models, and most of them for all networks.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pycoll.gradients.communication_plan import (
    A2A,
    HOST,
    IN,
    OUT,
    PS,
    Gradient,
    Rate,
    Rates,
    Stage,
)
from pycoll.gradients.points import Group, Point, plan_of
from pycoll.gradients.policies import Policy, point_of
from pycoll.gradients.simulate import simulate
from pycoll.tools.pictures import Panel, draw_panels, plain

FOLDER = Path(__file__).resolve().parent / "survey"
#: The error beyond which the table names a cell.
BOUND = 0.15
#: GPUs of a host.
PER_HOST = 4
#: The parts of BytePS and of ByteScheduler in bytes, as the survey's scripts set them, and the
#: credit of both.
PS_PART, A2A_PART, CREDIT = 4_096_000, 4_000_000, 16_000_000
#: Models whose all-reduce runs step by Adam or AdamW; all others step by SGD.
ADAM = ("BERT-Base", "BERT-Large")
#: The start and the seconds per byte by which the survey's MG-WFBP merges, by GPUs. Its scripts
#: have these tables, from another cluster; on one host it has one for all networks.
MERGES_BY = {
    "10GbE": {8: (5.23e-4, 8.57e-10), 16: (9.08e-4, 7.40e-10), 32: (4.05e-3, 8.64e-10)},
    "other": {
        4: (4.20e-5, 2.06e-10),
        8: (9.75e-5, 3.06e-10),
        16: (7.08e-4, 4.06e-10),
        32: (4.06e-4, 4.91e-10),
    },
}


class Network(NamedTuple):
    """A network of the survey, from its own point-to-point figures: s, and bytes/s each way."""

    alpha_s: float
    bandwidth: float


NETWORKS = {
    "10GbE": Network(95e-6, 1.13e9),
    "100GbE": Network(21e-6, 2.15e9),
    "100GbIB": Network(6.4e-6, 11.1e9),
}


class Constants(NamedTuple):
    """The constants of the model that the survey lacks, alike for all models and networks.

    ``backward``: the share of a step on one GPU that is the backward pass. Twice the forward pass
        is the usual rule.
    ``pcie``: bytes/s of a ring all-reduce over PCIe 3 with 4 GPUs on a host.
    ``agree_s``, ``agree_gpu_s``: seconds of a Horovod message: a constant, and more for each GPU.
        The survey runs Horovod without its cache, so all ranks negotiate every tensor.
    ``slowed``: the share of computing that is lost while a message moves at the rate of PCIe, in
        proportion at lower rates: copies and NCCL's kernels compete for memory and SMs.
    ``adam``: seconds per byte of gradients by which Adam takes longer than SGD.
    ``host_sum``: seconds per byte of BytePS's reduction inside a host and the broadcast back.
    ``ps_alpha_s``: seconds of a part of BytePS.
    ``ps_share``: the share of a link that BytePS's transport (ps-lite) uses.
    ``poll_s``: seconds that ByteScheduler's lock takes from the next forward pass, per module: its
        hooks poll, in Python, until the gradients of a module are there.
    ``part_s``: seconds of a part of ByteScheduler, which it hands to Horovod from Python, beyond
        those of a message of Horovod.
    """

    backward: float = 0.64
    pcie: float = 6.6e9
    agree_s: float = 50e-6
    agree_gpu_s: float = 17e-6
    slowed: float = 0.35
    adam: float = 115e-12
    host_sum: float = 0.38e-9
    ps_alpha_s: float = 80e-6
    ps_share: float = 0.6
    poll_s: float = 0.95e-3
    part_s: float = 0.15e-3


FITTED = Constants()


class Cell(NamedTuple):
    """A measurement: samples per second of all GPUs together, and its relative deviation."""

    model: str
    batch: int
    network: str
    method: str
    gpus: int
    single: float
    measured: float
    deviation: float

    @property
    def step_s(self) -> float:
        """The step on one GPU."""
        return self.batch / self.single


def network_of(word: str) -> Network:
    """The network of a word; 100 Gb Ethernet has several names. SystemExit for an unknown word."""
    found = "100GbE" if word.startswith("100Gb") and not word.endswith("IB") else word
    if found not in NETWORKS:
        raise SystemExit(f"network {word!r}: expected one of {', '.join(NETWORKS)}")
    return NETWORKS[found]


def read_cells(path: Path) -> list[Cell]:
    """The cells of a file; raises SystemExit with a reason if it is not one."""
    try:
        with path.open(newline="") as file:
            return [
                Cell(
                    row["model"],
                    int(row["batch"]),
                    row["network"],
                    row["method"],
                    int(row["gpus"]),
                    float(row["one_gpu_samples_per_s"]),
                    float(row["samples_per_s"]),
                    float(row.get("deviation") or 0.0) / float(row["samples_per_s"]),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise SystemExit(f"{path}: not a file of cells: {error!r}") from error


@cache
def layers(model: str) -> tuple[tuple[str, int, float], ...]:
    """Module, bytes and time of each gradient in the order of the backward pass, which ends at 1.

    Raises SystemExit for a model without a file of layers.
    """
    path = FOLDER / f"layers-{model.lower().replace('-', '_').replace('resnet_50', 'resnet50')}.csv"
    found, now = [], 0.0
    if not path.is_file():
        raise SystemExit(f"model {model!r} has no layers in {path}")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            now += float(row["microseconds_after_previous"])
            found.append((row["tensor"].rpartition(".")[0], 4 * int(row["elements"]), now))
    return tuple((module, nbytes, at / now) for module, nbytes, at in found)


def rates_of(cell: Cell, given: Constants) -> Rates:
    """The rates of a cell: a2a by Horovod and NCCL, ps by BytePS."""
    network = network_of(cell.network)
    gpus, hosts = cell.gpus, max(1, cell.gpus // PER_HOST)
    slowest = given.pcie if hosts == 1 else min(given.pcie, network.bandwidth)
    alpha = given.agree_s + given.agree_gpu_s * gpus
    if cell.method == "ByteScheduler-A2A":
        alpha += given.part_s
    ring = Rate(alpha, 2 * (gpus - 1) / gpus / slowest)
    stages = [Stage(Rate(given.ps_alpha_s, given.host_sum), (HOST,))]
    ps_rate = 1 / given.host_sum
    if hosts > 1:
        # As many servers as hosts: a server's link carries as much as a host's.
        link = 1 / (given.ps_share * network.bandwidth)
        stages.append(Stage(Rate(network.alpha_s, link), (OUT,)))
        stages.append(Stage(Rate(network.alpha_s, link), (IN,)))
        ps_rate = min(ps_rate, 1 / link)
    is_ps = cell.method.endswith("-PS")
    # The PS rows use SGD. ByteScheduler steps each parameter by itself as soon as its gradient is
    # there, in a thread that the rest of the step does not wait for.
    steps_apart = is_ps or cell.method == "ByteScheduler-A2A"
    busy = ps_rate * given.host_sum if is_ps else slowest / given.pcie
    return Rates(
        ring,
        ring,
        ring,
        slowed=given.slowed * busy,
        push_pull=tuple(stages),
        optimizer=Rate(0.0, given.adam if cell.model in ADAM and not steps_apart else 0.0),
    )


def point_for(cell: Cell, gradients: Sequence[Gradient], rates: Rates) -> Point:
    """The messages of a method, as the survey's programs cut them."""
    name = cell.method.rpartition("-")[0]
    if cell.method == "MG-WFBP":
        table = MERGES_BY["10GbE" if cell.network == "10GbE" else "other"]
        rate = Rate(*table.get(cell.gpus, MERGES_BY["other"][PER_HOST]))
        return point_of(Policy("mg_wfbp"), gradients, Rates(rate, rate, rate), (A2A,))
    if cell.method == "BSP-PS":
        return Point((Group(0, len(gradients), PS, PS_PART),))
    if cell.method in ("WFBP-PS", "ByteScheduler-PS"):
        # BytePS itself cuts and has priorities; "ByteScheduler" is a flag of its server.
        policy = Policy("bytescheduler", partition_bytes=PS_PART, credit_bytes=CREDIT)
        return point_of(policy, gradients, rates, (PS,))
    policies = {
        "BSP": Policy("bsp"),
        "WFBP": Policy("wfbp"),
        "ByteScheduler": Policy("bytescheduler", partition_bytes=A2A_PART, credit_bytes=CREDIT),
    }
    if name not in policies:
        raise SystemExit(f"method {cell.method!r} is not one of the survey's")
    return point_of(policies[name], gradients, rates, (A2A,))


def predict(cell: Cell, given: Constants = FITTED) -> float:
    """Samples per second by the model."""
    backward_s = given.backward * cell.step_s
    # BSP hands everything over at the end of the backward pass.
    starts = 1.0 if cell.method.startswith("BSP") else 0.0
    gradients = [
        Gradient(nbytes, max(at, starts) * backward_s) for _, nbytes, at in layers(cell.model)
    ]
    rates = rates_of(cell, given)
    plan = plan_of(cell.method, point_for(cell, gradients, rates), gradients, rates)
    forward_s, last_s = None, cell.step_s - backward_s
    if cell.method == "ByteScheduler-A2A":
        # Only this method lets the next forward pass begin before all gradients are reduced.
        forward_s, last_s = _forward_s(cell, given), 0.0
    outcome = simulate(plan, gradients, rates, forward_s)
    return cell.gpus * cell.batch / (last_s + outcome.step_s)


def _forward_s(cell: Cell, given: Constants) -> list[float]:
    """The forward time of each gradient's layer, with the hook of each module."""
    passes_s, before, seen, found = (1 - given.backward) * cell.step_s, 0.0, "", []
    for module, _, at in layers(cell.model):
        found.append((at - before) * passes_s + (given.poll_s if module != seen else 0.0))
        before, seen = at, module
    return found


def lines_of(cells: Sequence[Cell], given: Constants = FITTED) -> Iterator[str]:
    """The table of all cells, the errors by method, and the cells that miss by more than 15 %."""
    predicted = {cell: predict(cell, given) for cell in cells}
    errors = {cell: value / cell.measured - 1 for cell, value in predicted.items()}
    yield (
        f"{'model':<11} {'network':<9} {'method':<18} {'GPUs':>4} "
        f"{'measured':>9} {'predicted':>9} {'error':>7}"
    )
    for cell in sorted(cells, key=lambda one: (one.model, one.network, one.method, one.gpus)):
        yield (
            f"{cell.model:<11} {cell.network:<9} {cell.method:<18} {cell.gpus:>4} "
            f"{cell.measured:>9.1f} {predicted[cell]:>9.1f} {errors[cell]:>7.1%}"
        )
    yield ""
    yield f"{'method':<18} {'mean':>6} {'largest':>8}"
    for method in dict.fromkeys(cell.method for cell in cells):
        some = [abs(errors[cell]) for cell in cells if cell.method == method]
        yield f"{method:<18} {statistics.mean(some):>6.1%} {max(some):>8.1%}"
    sizes = [abs(error) for error in errors.values()]
    missed = [cell for cell in cells if abs(errors[cell]) > BOUND]
    yield f"{'all cells':<18} {statistics.mean(sizes):>6.1%} {max(sizes):>8.1%}"
    yield f"cells: {len(cells)}, beyond {BOUND:.0%}: {len(missed)}"
    for cell in missed:
        where = f"{cell.model}, {cell.network}, {cell.method}, {cell.gpus} GPUs"
        yield f"  {where}: {errors[cell]:+.1%} (the runs deviate by {cell.deviation:.0%})"
    yield from winners(cells, predicted)


def winners(cells: Sequence[Cell], predicted: Mapping[Cell, float]) -> Iterator[str]:
    """Whether the fastest method by the model is the fastest measured one, or within 3 % of it."""
    groups: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.model, cell.network, cell.gpus), []).append(cell)
    near = 0
    for group in groups.values():
        chosen = max(group, key=lambda one: predicted[one])
        near += chosen.measured >= 0.97 * max(one.measured for one in group)
    yield f"the model's best method is within 3 % of the best one in {near} of {len(groups)} scenes"


def draw(folder: Path, cells: Sequence[Cell]) -> None:
    """Draw the survey's figure from the prediction: a file per network, with a panel per model."""
    for network in dict.fromkeys(cell.network for cell in cells):
        panels = []
        for model in dict.fromkeys(cell.model for cell in cells):
            curves: dict[str, list[tuple[int, float]]] = {}
            for cell in cells:
                if (cell.network, cell.model) != (network, model):
                    continue
                curves.setdefault(cell.method, []).append((cell.gpus, predict(cell)))
            # BytePS has the scheduling of ByteScheduler-PS anyway: one curve shows both.
            curves.pop("ByteScheduler-PS", None)
            if curves:
                y_label = f"{model}, samples/s"
                panels.append(Panel(y_label, curves, "GPUs", plain, plain, low_is_good=False))
        title = f"{network}, predicted; WFBP-PS is ByteScheduler-PS as well"
        draw_panels(folder / f"survey-{network}.svg", panels, title)


def main() -> None:
    """Print the table of the cells; draw it on request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=Path, default=FOLDER / "throughput.csv")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the figures there")
    asked = parser.parse_args()
    cells = read_cells(asked.cells)
    for line in lines_of(cells):
        print(line)
    if asked.plot is not None:
        draw(asked.plot, cells)


if __name__ == "__main__":
    main()
