"""Merges the timelines of ranks into one Chrome trace, which has a process per rank.

Ranks of one host read one clock, so their times are not shifted against each other. Between hosts
the merge compares the times of day that each rank noted when it began. The error between two hosts
is the difference of their clocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pycoll.config import RANKS_MAX
from pycoll.errors import InvalidArgumentError
from pycoll.gradients.step_record import CLOCK
from pycoll.untrusted import json_object, read_file, read_json

#: Longest file. An event takes some hundred bytes in the file, and many times that in memory.
FILE_BYTES_MAX = 1 << 30
#: Largest time of an event, longer than any process runs.
_TIME_US_MAX = 1e16

Event = dict[str, Any]


class Clock(NamedTuple):
    """A host's name, and the Unix time of its clock's zero in microseconds."""

    host: str
    zero_us: float


def siblings(path: Path) -> list[Path]:
    """Return the file of rank 0 and the files of ranks 1, 2, ... in its folder, which are named
    after it."""
    found = [path]
    while (more := path.with_name(f"{path.stem}.{len(found)}{path.suffix}")).exists():
        found.append(more)
    return found


def read(path: Path) -> list[Event]:
    """Return the events of one rank, also of one that died before it could complete the file.

    Raises InvalidArgumentError, with the file's name, for a file that cannot be read or is no
    timeline.
    """
    try:
        text = read_file(path, FILE_BYTES_MAX).decode()
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from None
    torn = ""
    try:
        events = read_json(text)
    except ValueError as error:
        torn = f": {error}"
        events = _whole_lines(text)
    if not isinstance(events, list) or not all(_is_event(event) for event in events):
        raise InvalidArgumentError(f"{path} is no timeline: expected a list of events with pid")
    if not events:
        raise InvalidArgumentError(f"{path} has no events{torn}")
    return events


def merge(paths: Sequence[Path]) -> list[Event]:
    """Return all events of all ranks on one clock, which starts at the first event.

    Raises InvalidArgumentError if two files are of one rank, and the errors of ``read``.
    """
    ranks: dict[int, Path] = {}
    found: list[Event] = []
    clocks: dict[int, Clock] = {}
    for path in paths:
        events = read(path)
        rank = int(events[0]["pid"])
        if rank in ranks:
            raise InvalidArgumentError(f"{ranks[rank]} and {path} are both of rank {rank}")
        ranks[rank] = path
        try:
            clocks[rank] = _clock(events)
        except ValueError as error:
            raise InvalidArgumentError(f"{path} has a {CLOCK} without a clock: {error}") from None
        found += [event for event in events if event.get("name") != CLOCK]
    zeros = _zeros(clocks)
    for event in found:
        event["ts"] += zeros[event["pid"]]
    begin = min(event["ts"] for event in found)
    for event in found:
        event["ts"] -= begin
    return [*_names(clocks), *sorted(found, key=lambda event: float(event["ts"]))]


def write(path: Path, events: Sequence[Event]) -> None:
    """Write a file for chrome://tracing or Perfetto."""
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict):
        return False
    rank, time_us = event.get("pid"), event.get("ts")
    whole = isinstance(rank, int) and 0 <= rank < RANKS_MAX
    return whole and isinstance(time_us, int | float) and abs(time_us) < _TIME_US_MAX


def _whole_lines(text: str) -> Any:
    """Parse an incomplete file: an event on each line, of which the last may be incomplete."""
    events = []
    for line in text.splitlines()[1:]:
        try:
            events.append(read_json(line.rstrip(",")))
        except ValueError:
            break
    return events


def _clock(events: Sequence[Event]) -> Clock:
    for event in events:
        if event.get("name") == CLOCK:
            known = json_object(event.get("args"), {"host": str, "unix_us": float})
            return Clock(known["host"], float(known["unix_us"]) - float(event["ts"]))
    return Clock("", 0.0)


def _zeros(clocks: dict[int, Clock]) -> dict[int, float]:
    """Return the offset to add to each rank's times; ranks of one host have the same offset."""
    by_host: dict[str, float] = {}
    for clock in clocks.values():
        by_host.setdefault(clock.host, clock.zero_us)
    return {rank: by_host[clock.host] for rank, clock in clocks.items()}


def _names(clocks: dict[int, Clock]) -> list[Event]:
    """Return the events that give each rank's rows a title and an order in viewers."""
    found: list[Event] = []
    for rank, clock in sorted(clocks.items()):
        title = f"rank {rank} on {clock.host}" if clock.host else f"rank {rank}"
        head: Event = {"ph": "M", "pid": rank, "tid": 0, "ts": 0}
        found.append({**head, "name": "process_name", "args": {"name": title}})
        found.append({**head, "name": "process_sort_index", "args": {"sort_index": rank}})
    return found
