"""What the machine that runs plans (`pycoll.machine`) holds: memory, channels, lanes, and times."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pycoll.plan_format import Row
from pycoll.values import Value

#: (process, its time): the process ran its time-th row.
Epoch = tuple[int, int]


class Held(NamedTuple):
    """A value in a place or in flight; ``final`` once a final row made it."""

    value: Value
    tile: int
    final: bool


@dataclass(slots=True)
class Segment:
    """In flight. ``consumed`` is when the receiver's row took it; until then memory may be read."""

    chunk: int
    held: Held | None
    clock: list[int]
    lent: bool = False  # read where it lies, so no flush ends it
    consumed: Epoch | None = None


@dataclass(slots=True)
class Queue:
    """A channel: who ends it and what is in flight."""

    sender: int
    receiver: int
    segments: deque[Segment] = field(default_factory=deque)


@dataclass(slots=True)
class Place:
    """The accesses of one segment of memory that a later access must come after."""

    held: Held | None = None
    written: Epoch | None = None
    copied: Epoch | None = None  # from the input: a write unless in place
    reads: dict[int, int] = field(default_factory=dict)
    sends: list[tuple[Epoch, Segment]] = field(default_factory=list)  # straight from this memory


@dataclass(slots=True)
class Process:
    """One lane of one rank, or a part of it: the rows that lead it, or those behind them."""

    rank: int
    lane: int
    rows: list[Row]
    recv: list[list[Queue]]
    send: list[list[Queue]]
    clock: list[int]
    led: bool = False  # by the process in front of it, whose rows it runs first in every tile
    first: int = 0  # rows of the lane in front of these
    tile: int = 0
    next: int = 0
