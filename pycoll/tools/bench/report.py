"""The reports of a benchmark: a table on the screen, JSON in a file, a picture."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pycoll.cores import core_count
from pycoll.cost.tuning_file import processor_name
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.tools.bench.metrics import Measurement
from pycoll.tools.pictures import Panel, draw_panels

if TYPE_CHECKING:
    from pycoll.tools.bench.measuring import BenchOptions

#: Name, unit and width of each column. With an algorithm's name they fit in 100 characters.
_COLUMNS = (
    ("size", "B", 10),
    ("count", "elem.", 10),
    ("type", "", 0),
    ("redop", "", 6),
    ("root", "", 5),
    ("time", "us", 8),
    ("p99", "us", 8),
    ("algbw", "GB/s", 6),
    ("busbw", "GB/s", 6),
    ("#wrong", "", 7),
)


def _line(cells: Sequence[Any], dtype: str) -> str:
    widths = (width or max(5, len(dtype) + 1) for _, _, width in _COLUMNS)
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def header(line: Measurement, options: BenchOptions, several: bool) -> list[str]:
    """Return a line with the benchmark's options and the table's two header lines, as nccl-tests
    prints them."""
    in_place = " in place" if options.in_place else ""
    return [
        f"# {line.collective} on {line.ranks} ranks over {line.transport}{in_place}; time of the "
        "slowest rank, median and p99",
        "#" + _line([name for name, _, _ in _COLUMNS], line.dtype)[1:] + " algorithm" * several,
        "#" + _line([unit for _, unit, _ in _COLUMNS], line.dtype)[1:],
    ]


def row(line: Measurement, several: bool) -> str:
    """Return one line of the table."""
    kind = Collective[line.collective.upper()]
    cells = (
        line.bytes,
        line.count if line.count < 10**9 else f"{line.count:.4g}",
        line.dtype,
        line.op if kind in REDUCING else "none",
        line.root if kind in ROOTED else -1,
        four_digits(line.median_s * 1e6),
        four_digits(line.p99_s * 1e6),
        four_digits(line.algbw),
        four_digits(line.busbw),
        _number_wrong(line.wrong),
    )
    share = "" if line.limit_share is None else f" {line.limit_share:.0%} of the limit"
    return _line(cells, line.dtype) + (f" {line.algorithm}" if several else "") + share


def four_digits(value: float) -> str:
    """Format with about four digits, and with an exponent only from 1e7 on."""
    for limit, style in ((100, ".2f"), (1000, ".1f"), (1e7, ".0f")):
        if value < limit:
            return f"{value:{style}}"
    return f"{value:.2g}"


def _number_wrong(wrong: int | None) -> str:
    if wrong is None:
        return "N/A"
    return str(wrong) if wrong < 10**6 else f"{wrong:.0e}"


def trailer(lines: Sequence[Measurement]) -> list[str]:
    """Return the closing lines: the number of wrong elements and the average bus bandwidth."""
    wrong = sum(line.wrong or 0 for line in lines)
    checked = all(line.wrong is not None for line in lines)
    average = sum(line.busbw for line in lines) / max(1, len(lines))
    verdict = ("OK" if wrong == 0 else "FAILED") if checked else "not checked"
    return [
        f"# wrong elements        : {wrong} {verdict}",
        f"# average bus bandwidth : {average:.4g} GB/s",
    ]


def write_json(path: Path, lines: Sequence[Measurement], config: dict[str, Any]) -> None:
    """Write all measurements with algbw and busbw, in GB/s."""
    results = [{**asdict(line), "algbw": line.algbw, "busbw": line.busbw} for line in lines]
    path.write_text(json.dumps({"config": config, "results": results}, indent=1) + "\n")


def plot(path: Path, lines: Sequence[Measurement], options: BenchOptions) -> None:
    """Draw time and bus bandwidth against message size, one curve per algorithm."""
    # If the selector chooses, there is one curve, along which the algorithm may change.
    chosen = not options.algorithms
    names = ["chosen"] if chosen else list(dict.fromkeys(line.algorithm for line in lines))
    curves = {name: [line for line in lines if chosen or line.algorithm == name] for name in names}
    first = lines[0]
    what = f"{first.collective}, {first.ranks} ranks, {first.dtype}, {first.transport}"
    day = datetime.date.today().isoformat()
    draw(path, curves, f"{what}; median (band: up to p99)\n{machine_text()}, {day}")


def machine_text() -> str:
    """Return the processor's name and the number of usable cores."""
    return f"{processor_name() or platform.machine()}, {core_count()} cores"


def draw(
    path: Path,
    curves: Mapping[str, Sequence[Measurement]],
    title: str,
    below: str | None = None,
) -> None:
    """Draw time and bus bandwidth of each curve, with logarithmic axes.

    ``below``: the curve that is drawn as a wide pale line under the others, if there is one.
    """
    times = {name: [(one.bytes, one.median_s * 1e6) for one in c] for name, c in curves.items()}
    late = {
        name: [(one.bytes, one.median_s * 1e6, max(one.median_s, one.p99_s) * 1e6) for one in c]
        for name, c in curves.items()
    }
    rates = {name: [(one.bytes, one.busbw) for one in c] for name, c in curves.items()}
    panels = (
        Panel("time (µs)", times, bands=late, below=below),
        Panel("bus bandwidth (GB/s)", rates, low_is_good=False, below=below),
    )
    draw_panels(path, panels, title)
