"""The page of results: each command owns one section of the page and replaces only that."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pycoll.tools.bench import report

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def three_digits(value: float) -> str:
    """Format with three significant digits, and never with an exponent: 1140 is "1140"."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def us(seconds: float) -> str:
    """Format a time in microseconds, without the unit."""
    return report.four_digits(seconds * 1e6)


def ms(seconds: float) -> str:
    """Format a time in milliseconds, with the unit."""
    return f"{three_digits(seconds * 1e3)} ms"


def verdict(what: str, found: float, target: float) -> str:
    """Format a figure and its target: "UCX / pycoll 1.21 of 1.2, reached"."""
    return f"{what} {found:.2f} of {target:g}, {'reached' if found >= target else 'missed'}"


def machine() -> str:
    """Describe the processor, the cores and the kernel."""
    return f"{report.machine_text()}, Linux {platform.release()}"


def commit() -> str:
    """Return the commit that is checked out, or "unknown" outside a checkout."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def origin() -> str:
    """Return the first line of a section: machine, date, commit and kind of build."""
    from pycoll._core import LAID_OUT

    load = os.getloadavg()[0]
    build = "make optimized" if LAID_OUT else "a plain build"
    return (
        f"{machine()}; {datetime.date.today()}, commit {commit()}, {build}, "
        f"load {load:.1f} at the end."
    )


def wrapped(line: str) -> str:
    """A line of prose in lines of at most 100 columns; tables and pictures stay as they are."""
    if line.startswith(("|", "!", "#")):
        return line
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)


def write_section(path: Path, title: str, lines: Sequence[str]) -> None:
    """Write the section ``## title`` to the page; it replaces an older section of that title."""
    text = path.read_text() if path.exists() else "# Results\n"
    head = f"## {title}"
    parts = ("\n" + text).split("\n## ")
    kept = [part.strip("\n") for part in parts if part.partition("\n")[0] != title]
    places = [number for number, part in enumerate(parts) if part.partition("\n")[0] == title]
    place = places[0] if places else len(kept)
    section = "\n".join([head, "", *map(wrapped, lines)])
    pieces = [kept[0], *("## " + part for part in kept[1:])]
    pieces.insert(place, section)
    path.write_text("\n\n".join(pieces) + "\n")
