"""The page of results: each command owns a section there and replaces nothing else."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pycoll.bench.report import machine_text

ROOT = Path(__file__).resolve().parent.parent


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]


def verdict(what: str, found: float, target: float) -> str:
    """ "DDP: communication 6.1 of 5 times shorter than Gloo's, reached"."""
    return f"{what} {found:.2f} of {target:g}, {'reached' if found >= target else 'missed'}"


def machine() -> str:
    """Processor, cores and kernel, in words."""
    return f"{machine_text()}, Linux {platform.release()}"


def commit() -> str:
    """The commit that is checked out, or "unknown" outside a checkout."""
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def origin() -> str:
    """Machine, date, commit and kind of build: what a section begins with."""
    from pycoll._core import LAID_OUT

    load = os.getloadavg()[0]
    build = "make optimized" if LAID_OUT else "a plain build"
    return (
        f"{machine()}; {datetime.date.today()}, commit {commit()}, {build}, "
        f"load {load:.1f} at the end."
    )


def write_section(path: Path, title: str, lines: Sequence[str]) -> None:
    """Put the section ``## title`` on the page, in the place of an older one of that title."""
    text = path.read_text() if path.exists() else "# Results\n"
    head = f"## {title}"
    parts = ("\n" + text).split("\n## ")
    kept = [part.strip("\n") for part in parts if part.partition("\n")[0] != title]
    places = [number for number, part in enumerate(parts) if part.partition("\n")[0] == title]
    place = places[0] if places else len(kept)
    section = "\n".join([head, "", *lines])
    pieces = [kept[0], *("## " + part for part in kept[1:])]
    pieces.insert(place, section)
    path.write_text("\n\n".join(pieces) + "\n")
