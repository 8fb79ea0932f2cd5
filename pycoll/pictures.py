"""Pictures for papers: panels of curves side by side, drawn by matplotlib where that is installed.

Both axes of every panel are logarithmic. A name keeps its colour and its mark in all panels.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pycoll.errors import InvalidArgumentError

#: Endings of the pictures that can be drawn.
PICTURES = (".png", ".pdf", ".svg")
#: Colours that stay apart for colour-blind readers (Okabe and Ito), and marks for print without.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#888888")
_MARKS = "os^Dv<>Pp*"
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.linewidth": 0.4,
    "grid.alpha": 0.6,
    "legend.frameon": False,
    "svg.fonttype": "none",
}

Curve = Sequence[tuple[int, float]]


def plain(value: float) -> str:
    """A number as ticks show it."""
    return f"{value:g}"


def short_bytes(nbytes: float) -> str:
    """A power of two in bytes as ticks show it."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}iB"
    return f"{nbytes:g} B"


@dataclass(frozen=True)
class Panel:
    """Points (x, y) of each curve, x being powers of two for the most part; what axes say.

    ``below`` names a curve that is drawn as a wide pale line under all others.
    """

    y_label: str
    curves: Mapping[str, Curve]
    x_label: str = "message size"
    x_text: Callable[[float], str] = short_bytes
    y_text: Callable[[float], str] = plain
    below: str | None = None


def check_picture(path: Path) -> None:
    """InvalidArgumentError, before any work, where no picture could be put at ``path``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs the package matplotlib; install it")
    if path.suffix not in PICTURES:
        raise InvalidArgumentError(
            f"--plot: {path.name!r} must end in one of {', '.join(PICTURES)}"
        )
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InvalidArgumentError(f"--plot: {str(path)!r} is no file that can be written")


def draw_panels(path: Path, panels: Sequence[Panel], title: str) -> None:
    """The panels from left to right, and one legend where there is more than one curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    with pyplot.rc_context(_STYLE):
        figure, every = pyplot.subplots(
            1,
            len(panels),
            figsize=_inches(len(panels), names),
            layout="constrained",
            squeeze=False,
        )
        shown: dict[str, Any] = {}
        for axes, panel in zip(every[0], panels, strict=True):
            for name, points in panel.curves.items():
                shown.setdefault(name, _draw_curve(axes, points, name, names, panel.below))
            _draw_axes(axes, panel)
        if len(names) > 1:
            lines = [shown[name] for name in names]
            figure.legend(lines, names, loc="outside right center")
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def _inches(panels: int, names: Sequence[str]) -> tuple[float, float]:
    """Width and height; a legend of long or many names makes no panel smaller."""
    longest = max(map(len, names), default=0)
    return 4.5 * panels + max(0.0, 0.08 * (longest - 10)), max(3.6, 0.19 * len(names) + 0.8)


def _draw_curve(
    axes: Any, points: Curve, name: str, names: Sequence[str], below: str | None
) -> Any:
    x, y = [point[0] for point in points], [point[1] for point in points]
    if name == below:
        (line,) = axes.plot(x, y, color="0.85", linewidth=6, solid_capstyle="round", zorder=1)
        return line
    index = [one for one in names if one != below].index(name)
    (line,) = axes.plot(
        x,
        y,
        color=_COLOURS[index % len(_COLOURS)],
        marker=_MARKS[index % len(_MARKS)],
        linestyle=("-", "--")[index // len(_COLOURS) % 2],
        markersize=3.5,
        linewidth=1.1,
        label=name,
    )
    return line


def _draw_axes(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.yaxis.set_major_formatter(lambda value, _: panel.y_text(value))
    seen = [x for points in panel.curves.values() for x, _ in points]
    first, last = min(seen).bit_length() - 1, max(seen).bit_length() - 1
    step = max(1, -(-(last - first) // 5))
    ticks = [1 << power for power in range(first, last + 1, step)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks, [panel.x_text(tick) for tick in ticks])
