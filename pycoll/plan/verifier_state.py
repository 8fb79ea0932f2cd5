"""The state of the plan verifier: memory, channels, processes and vector clocks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from pycoll.plan.plan_format import Row
from pycoll.schedule.contributions import Value

#: (process index, time): the moment at which the process ran its row number ``time``.
Epoch = tuple[int, int]


class ProvedValue(NamedTuple):
    """A value in memory or in flight; ``final`` is set once a final row has made it.

    ``roundings``: the most times that any of its contributions has been encoded. ``sealed``: it was
    decoded from codes and has not been combined since. ``coded``: the memory holds its codes.
    """

    value: Value
    tile: int
    final: bool
    roundings: int = 0
    sealed: bool = False
    coded: bool = False


@dataclass(slots=True)
class Segment:
    """A segment in flight.

    ``consumed`` is the moment at which the receiver's row took it; until then the receiver may read
    the sender's memory.
    """

    chunk: int
    held: ProvedValue | None
    clock: list[int]
    exposed: bool = False  # the receiver reads it in place; a flush does not wait for that
    waits: bool = False  # the sender waits for the receiver's announcement of a write window
    consumed: Epoch | None = None
    coded: bool = False  # it holds codes


@dataclass(slots=True)
class Queue:
    """A channel: the processes at its ends, and its segments in flight."""

    sender: int
    receiver: int
    segments: deque[Segment] = field(default_factory=deque)


@dataclass(slots=True)
class MemoryAccesses:
    """The accesses to one segment of memory that later accesses must follow."""

    held: ProvedValue | None = None
    written: Epoch | None = None
    copied: Epoch | None = None  # copied from the input: a write, except in place
    reads: dict[int, int] = field(default_factory=dict)
    sends: list[tuple[Epoch, Segment]] = field(default_factory=list)  # sent from this memory


@dataclass(slots=True)
class Process:
    """One lane of one rank, or a part of it: its leading rows, or the rows after them."""

    rank: int
    lane: int
    rows: list[Row]
    recv: list[list[Queue]]
    send: list[list[Queue]]
    clock: list[int]
    has_leading: bool = False  # the previous process has its leading rows, first in every tile
    first: int = 0  # the number of rows of the lane before these
    tile: int = 0
    next: int = 0
