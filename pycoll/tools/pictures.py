"""Pictures: panels of curves side by side, drawn by matplotlib if it is installed.

Both axes of every panel are logarithmic. A name keeps its colour and its mark in all panels. If
there are many curves, only the curves that are best at some point have a colour and a name. A
dotted line shows the best value at each point, and the other curves are faint.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.tools.outputs import check_output

#: File name extensions of the supported formats.
PICTURES = (".png", ".pdf", ".svg")
#: Colours that colour-blind readers can distinguish (Okabe and Ito), and marks for print in grey.
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
#: Points (x, low, high).
Band = Sequence[tuple[int, float, float]]
#: The most curves that a reader can distinguish; of more, only the best have a colour.
_CURVES_MAX = 6
#: The most curves with bands.
_BANDS_MAX = 3
_BEST = "best of all"


def plain(value: float) -> str:
    """A number as the text of a tick."""
    return f"{value:g}"


def short_bytes(nbytes: float) -> str:
    """A number of bytes as the text of a tick."""
    for unit, scale in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:g} {unit}iB"
    return f"{nbytes:g} B"


@dataclass(frozen=True)
class Panel:
    """The points (x, y) of each curve, and the texts of the axes; most x are powers of two.

    ``below`` names a curve that is drawn as a wide pale line under all others. ``bands`` are areas
    in the colours of the curves with the same names. ``low_is_good``: whether the lowest or the
    highest values are best.
    """

    y_label: str
    curves: Mapping[str, Curve]
    x_label: str = "message size"
    x_text: Callable[[float], str] = short_bytes
    y_text: Callable[[float], str] = plain
    below: str | None = None
    bands: Mapping[str, Band] = field(default_factory=dict)
    low_is_good: bool = True

    def best(self) -> tuple[Curve, list[str]]:
        """The best value at each x, and the names of the best curves, the most frequent first."""
        at: dict[int, list[tuple[float, str]]] = {}
        for name, points in self.curves.items():
            for x, y in points if name != self.below else ():
                at.setdefault(x, []).append((y, name))
        choose = min if self.low_is_good else max
        best = {x: choose(values) for x, values in sorted(at.items())}
        wins = Counter(name for _, name in best.values())
        return [(x, y) for x, (y, _) in best.items()], [name for name, _ in wins.most_common()]


def check_picture(path: Path) -> None:
    """Raises InvalidArgumentError, before any work, if no picture can be written to ``path``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidArgumentError(
            "--plot needs matplotlib, which the extra [plot] installs: pip install '.[plot]' in "
            "pycoll's folder, or pip install matplotlib"
        )
    if path.suffix not in PICTURES:
        raise InvalidArgumentError(
            f"--plot: {path.name!r} must end in one of {', '.join(PICTURES)}"
        )
    check_output(path, "--plot")


def draw_panels(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Draws the panels from left to right, and one legend if there is more than one curve."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    every = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    below = {panel.below for panel in panels}
    names, faint = every, 0
    if len(set(every) - below) > _CURVES_MAX:
        best = list(dict.fromkeys(name for panel in panels for name in panel.best()[1]))
        names = [name for name in every if name in below or name in best[:_CURVES_MAX]]
        faint = len(every) - len(names)
    with pyplot.rc_context(_STYLE):
        legend = [*names, _BEST, f"{faint} others"] if faint else names
        figure, rows = pyplot.subplots(
            1,
            len(panels),
            figsize=_inches(len(panels), legend),
            layout="constrained",
            squeeze=False,
        )
        shown: dict[str, Any] = {}
        for axes, panel in zip(rows[0], panels, strict=True):
            for name, points in panel.curves.items():
                if name in names:
                    line = _draw_curve(axes, points, name, names, panel.below)
                    if len(legend) <= _BANDS_MAX:
                        _draw_band(axes, panel.bands.get(name, ()), line)
                    shown.setdefault(name, line)
                else:
                    shown[legend[-1]] = _draw_faint(axes, points)
            if faint:
                shown[_BEST] = _draw_best(axes, panel.best()[0])
            _draw_axes(axes, panel)
        if len(legend) > 1:
            figure.legend([shown[name] for name in legend], legend, loc="outside right center")
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=200)
        pyplot.close(figure)


def _inches(panels: int, names: Sequence[str]) -> tuple[float, float]:
    """Width and height of the figure; the legend adds to the width instead of shrinking panels."""
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


def _draw_faint(axes: Any, points: Curve) -> Any:
    (line,) = axes.plot(
        [x for x, _ in points], [y for _, y in points], color="0.8", linewidth=0.7, zorder=0.5
    )
    return line


def _draw_best(axes: Any, points: Curve) -> Any:
    (line,) = axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color="black",
        linestyle=":",
        linewidth=2,
        zorder=5,
    )
    return line


def _draw_band(axes: Any, band: Band, line: Any) -> None:
    if not band:
        return
    x, low, high = zip(*band, strict=True)
    axes.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


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
