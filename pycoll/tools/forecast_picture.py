"""The picture of a forecast: predicted times of every algorithm by message size and by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pycoll.cost.forecast import Forecast, Times, world_text
from pycoll.cost.selection import bytes_text, seconds_text
from pycoll.tools.pictures import Curve, Panel, draw_panels

_CHOSEN = "chosen"


def draw(path: Path, found: Forecast) -> None:
    """Draws the curves of all algorithms; a pale wide line marks the chosen algorithm."""
    asked = found.asked
    panels = []
    if found.by_bytes:
        panels.append(_panel(found.by_bytes))
    what = f", {bytes_text(asked.nbytes)}" if found.by_bytes else ""
    panels.append(
        replace(
            _panel(found.by_ranks),
            x_label=f"ranks, {asked.local_size} per host{what}",
            x_text=lambda number: f"{number:g}",
        )
    )
    title = f"{asked.collective.name.lower()} on {world_text(asked)}, predicted"
    draw_panels(path, panels, title)


def _panel(rows: Mapping[int, Times]) -> Panel:
    curves: dict[str, Curve] = {
        _CHOSEN: [(place, times.of[times.chosen]) for place, times in rows.items()]
    }
    for name in dict.fromkeys(name for times in rows.values() for name in times.of):
        curves[name] = [
            (place, times.of[name]) for place, times in rows.items() if name in times.of
        ]
    return Panel("time", curves, y_text=seconds_text, below=_CHOSEN)
