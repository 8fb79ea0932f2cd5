"""Drawings of algorithms, made from the schedules that pycoll proves and runs.

    python docs/site/drawings.py FOLDER    # ring.svg, double_binary_tree.svg, hierarchy.svg

Each function reads nothing but the transfers of a schedule, so a drawing cannot disagree with the
algorithm. The site's build calls them; the files are not committed.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot  # after the choice of the backend

from pycoll.algorithms import lookup
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import Schedule, Transfer
from pycoll.schedule.topology import Topology

INK = "#263238"
REDUCE_COLOUR, COPY_COLOUR = "#1565c0", "#ef6c00"
Point = tuple[float, float]


def arrow(axes: Any, start: Point, end: Point, colour: str, *, bend: float = 0.0) -> None:
    """An arrow between two nodes that stops short of both."""
    axes.annotate(
        "",
        xy=end,
        xytext=start,
        arrowprops={
            "arrowstyle": "-|>",
            "color": colour,
            "linewidth": 1.6,
            "shrinkA": 11,
            "shrinkB": 11,
            "connectionstyle": f"arc3,rad={bend}",
        },
    )


def node(axes: Any, at: Point, text: str, fill: str = "white") -> None:
    """A rank: a circle with its number."""
    axes.scatter(*at, s=340, color=fill, edgecolors=INK, linewidths=1.2, zorder=3)
    axes.text(*at, text, ha="center", va="center", color=INK, fontsize=10, zorder=4)


def colour_of(transfer: Transfer) -> str:
    """Blue for a transfer that is added to what is there, orange for a copy."""
    return REDUCE_COLOUR if transfer.reduce else COPY_COLOUR


def bare(axes: Any, title: str) -> None:
    """A panel without axes, with a title."""
    axes.set_title(title, fontsize=10, color=INK)
    axes.set_axis_off()
    axes.set_aspect("equal")
    axes.margins(0.25)


def legend(figure: Any) -> None:
    """One line below all panels: what the two colours mean."""
    handles = [
        matplotlib.lines.Line2D(
            [], [], color=REDUCE_COLOUR, label="sent and added to what is there"
        ),
        matplotlib.lines.Line2D([], [], color=COPY_COLOUR, label="sent and copied"),
    ]
    figure.legend(handles=handles, loc="lower center", ncols=2, frameon=False, fontsize=9)


def by_step(schedule: Schedule) -> dict[int, list[Transfer]]:
    """The transfers of each step, in the order of the steps."""
    steps: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in schedule.transfers:
        steps[transfer.step].append(transfer)
    return dict(sorted(steps.items()))


def contributions(schedule: Schedule) -> Iterable[tuple[int, list[Transfer], list[list[int]]]]:
    """Each step with its transfers, and for every rank's chunks how many ranks they hold then."""
    chunks = range(schedule.parts)
    held = [[{rank} for _ in chunks] for rank in range(schedule.size)]
    for step, transfers in by_step(schedule).items():
        before = [[set(one) for one in row] for row in held]
        for one in transfers:
            value = before[one.source][one.chunk]
            old = held[one.destination][one.target]
            held[one.destination][one.target] = value | old if one.reduce else set(value)
        yield step, transfers, [[len(one) for one in row] for row in held]


def cells(axes: Any, at: Point, counts: Sequence[int], full: int) -> None:
    """One square per chunk, darker the more ranks' values it holds; full ones have a frame."""
    side = 0.24
    for chunk, count in enumerate(counts):
        x = at[0] + (chunk - len(counts) / 2) * side
        square = matplotlib.patches.Rectangle(
            (x, at[1]),
            side * 0.9,
            side * 0.9,
            facecolor=REDUCE_COLOUR,
            alpha=0.15 + 0.85 * (count - 1) / (full - 1),
        )
        axes.add_patch(square)
        text = {"ha": "center", "va": "center", "fontsize": 7}
        colour = "white" if count > full / 2 else INK
        axes.text(x + side * 0.45, at[1] + side * 0.42, str(count), color=colour, **text)


def draw_ring(size: int = 4) -> Any:
    """One panel per step: who sends which chunk, and how complete each chunk is afterwards."""
    schedule = lookup(Collective.ALL_REDUCE, "ring").build(size)
    panels = list(contributions(schedule))
    columns = math.ceil(len(panels) / 2)
    figure, grid = pyplot.subplots(2, columns, figsize=(3.3 * columns, 7))
    for axes, (step, transfers, held) in zip(grid.flat, panels, strict=False):
        spots = [
            (math.sin(2 * math.pi * rank / size), math.cos(2 * math.pi * rank / size))
            for rank in range(size)
        ]
        for one in transfers:
            start, end = spots[one.source], spots[one.destination]
            arrow(axes, start, end, colour_of(one), bend=0.18)
            middle = [0.68 * (a + b) for a, b in zip(start, end, strict=True)]
            text = f"chunk {one.chunk}"
            axes.text(*middle, text, ha="center", va="center", fontsize=7, color=INK)
        for rank, spot in enumerate(spots):
            node(axes, spot, str(rank))
            above = 0.26 if spot[1] > 0.5 else -0.52
            cells(axes, (spot[0], spot[1] + above), held[rank], size)
        bare(axes, f"step {step + 1}")
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    legend(figure)
    return figure


def tree_levels(edges: Sequence[tuple[int, int]], size: int) -> dict[int, int]:
    """Distance of each rank from the root, by edges (child, parent)."""
    parent = dict(edges)
    return {rank: _depth(rank, parent) for rank in range(size)}


def _depth(rank: int, parent: dict[int, int]) -> int:
    return 0 if rank not in parent else 1 + _depth(parent[rank], parent)


def draw_double_binary_tree(size: int = 8) -> Any:
    """Both trees side by side: each reduces half of the message to its root and sends it back."""
    schedule = lookup(Collective.ALL_REDUCE, "tree").build(size)
    edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in schedule.transfers:
        if one.reduce:
            edges[one.chunk].append((one.source, one.destination))
    figure, grid = pyplot.subplots(1, len(edges), figsize=(5.2 * len(edges), 4.4), squeeze=False)
    for axes, (chunk, pairs) in zip(grid.flat, sorted(edges.items()), strict=True):
        level = tree_levels(pairs, size)
        spots = {rank: (float(rank), -1.6 * level[rank]) for rank in range(size)}
        for child, parent in pairs:
            arrow(axes, spots[child], spots[parent], REDUCE_COLOUR, bend=0.12)
            arrow(axes, spots[parent], spots[child], COPY_COLOUR, bend=0.12)
        inner = {parent for _, parent in pairs}
        for rank, spot in spots.items():
            node(axes, spot, str(rank), "#cfd8dc" if rank in inner else "white")
        bare(axes, f"tree {chunk + 1}: half {chunk + 1} of the message")
    legend(figure)
    return figure


def draw_hierarchy(hosts: int = 2, local: int = 4) -> Any:
    """The three phases: inside every host, between hosts, inside every host."""
    topology = Topology.even(hosts * local, hosts)
    schedule = lookup(Collective.ALL_REDUCE, "hierarchical").build(hosts * local, topology=topology)
    host_of = {rank: host for host, ranks in enumerate(topology.hosts) for rank in ranks}
    phases: list[list[Transfer]] = []
    crossing: bool | None = None
    for transfers in by_step(schedule).values():
        crosses = any(host_of[one.source] != host_of[one.destination] for one in transfers)
        if crosses != crossing:
            phases.append([])
            crossing = crosses
        phases[-1] += transfers
    figure, grid = pyplot.subplots(len(phases), 1, figsize=(5.6, 3.4 * len(phases)), squeeze=False)
    for axes, transfers in zip(grid.flat, phases, strict=True):
        spots: dict[int, Point] = {}
        for host, ranks in enumerate(topology.hosts):
            for place, rank in enumerate(ranks):
                spots[rank] = (place * 1.5, -host * 1.9)
            frame = matplotlib.patches.FancyBboxPatch(
                (-0.45, -host * 1.9 - 0.5),
                1.5 * (len(ranks) - 1) + 0.9,
                1.0,
                boxstyle="round,pad=0.1",
                fill=False,
                color="#90a4ae",
            )
            axes.add_patch(frame)
            axes.text(-1.2, -host * 1.9, f"host {host}", fontsize=9, color=INK, ha="right")
        drawn = {(one.source, one.destination, one.reduce) for one in transfers}
        inside = all(host_of[a] == host_of[b] for a, b, _ in drawn)
        for source, destination, reduces in sorted(drawn):
            colour = REDUCE_COLOUR if reduces else COPY_COLOUR
            far = abs(spots[source][0] - spots[destination][0])
            bend = 0.25 if inside and far > 2 else 0.12 if reduces else 0.3
            arrow(axes, spots[source], spots[destination], colour, bend=bend)
        for rank, spot in spots.items():
            node(axes, spot, str(rank))
        bare(axes, "inside every host" if inside else "between the hosts, one shard per rank")
        axes.margins(0.12)
    legend(figure)
    return figure


DRAWINGS = {
    "ring": draw_ring,
    "double_binary_tree": draw_double_binary_tree,
    "hierarchy": draw_hierarchy,
}


def write_all(folder: Path) -> list[Path]:
    """Write every drawing into ``folder`` as SVG; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in DRAWINGS.items():
        figure = draw()
        path = folder / f"{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
        written.append(path)
    return written


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
