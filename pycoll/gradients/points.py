"""Points: the space of communication plans that policies and the search choose from.

A point says for every gradient with which neighbours it merges, whether that group goes whole or in
parts, and by which architecture. It also says in which order parts are sent, and whether messages
are reduced in halves. ``plan_of`` makes the communication plan of a point. Every policy is a
function that returns a point, and ``search`` walks from these points to better ones.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from pycoll.gradients.communication_plan import (
    A2A,
    CODED_KIND,
    CommunicationPlan,
    Gradient,
    GradientBucket,
    Piece,
    Rates,
    label_of,
)

#: Parts of a gradient begin at multiples of this many bytes, which suits cache lines and dtypes.
GRAIN = 64


class Group(NamedTuple):
    """The neighbouring gradients ``first`` to ``stop`` - 1, which are sent together.

    ``part_bytes``: cut into parts of up to this many bytes; 0 where the group goes whole. Where the
    architecture has a codec, values that it does not take go without.
    """

    first: int
    stop: int
    architecture: str = A2A
    part_bytes: int = 0


class Point(NamedTuple):
    """A point of the space.

    ``credit_bytes``: parts of front layers overtake others, except those that are committed, up to
    this many bytes at a time; 0 where messages keep the order of the backward pass. ``halves``:
    reduce_scatter during the backward pass and all_gather after it.
    """

    groups: tuple[Group, ...]
    credit_bytes: int = 0
    halves: bool = False


class Transfer(NamedTuple):
    """A message as the simulation sees it; ``numbers``: the gradients of which it has a piece."""

    ready_s: float
    nbytes: int
    architecture: str
    numbers: Sequence[int]


def plan_of(
    name: str, point: Point, gradients: Sequence[Gradient], rates: Rates
) -> CommunicationPlan:
    """The communication plan of a point. A pure function. ``name``: that of the policy."""
    messages = [part for group in point.groups for part in messages_of(group, gradients)]
    if point.credit_bytes:
        transfers = [transfer_of(message, gradients) for message in messages]
        order = by_priority(transfers, rates, point.credit_bytes)
        messages = [messages[number] for number in order]
    return CommunicationPlan(name, tuple(messages), gathers_of(point, len(messages)))


def gathers_of(point: Point, messages: int) -> tuple[int, ...] | None:
    """The order of the all_gathers of a point with this many messages, if it has any.

    The next forward pass first needs the gradients of its first layers, which are ready last.
    """
    return tuple(reversed(range(messages))) if point.halves else None


def transfer_of(message: GradientBucket, gradients: Sequence[Gradient]) -> Transfer:
    """The transfer of a message."""
    numbers = [piece.gradient for piece in message.pieces]
    return Transfer(message.ready_s(gradients), message.nbytes, message.architecture, numbers)


def messages_of(group: Group, gradients: Sequence[Gradient]) -> list[GradientBucket]:
    """The messages of a group: for each of its dtypes one, or the parts of one."""
    kinds: dict[str, list[int]] = {}
    for number in range(group.first, group.stop):
        kinds.setdefault(gradients[number].kind, []).append(number)
    made = []
    for kind, numbers in kinds.items():
        pieces = tuple(Piece(n, 0, gradients[n].nbytes) for n in numbers)
        is_plain = kind != CODED_KIND and label_of(group.architecture)
        message = GradientBucket(pieces, A2A if is_plain else group.architecture)
        length = max(GRAIN, group.part_bytes // GRAIN * GRAIN)
        made += _cut(message, length) if group.part_bytes else [message]
    return made


def _cut(message: GradientBucket, length: int) -> list[GradientBucket]:
    """Cut a message into parts of up to ``length`` bytes, which may end inside gradients."""
    parts: list[GradientBucket] = []
    pieces: list[Piece] = []
    space = length
    for number, start, stop in message.pieces:
        at = start
        while stop - at > space:
            # A cut inside a gradient lies at a multiple of GRAIN.
            fits = space // GRAIN * GRAIN
            if fits:
                pieces.append(Piece(number, at, at + fits))
            parts.append(message._replace(pieces=tuple(pieces)))
            pieces, space, at = [], length, at + fits
        if stop > at or start == stop:
            pieces.append(Piece(number, at, stop))
        space -= stop - at
    return [*parts, message._replace(pieces=tuple(pieces))] if pieces else parts


def by_priority(parts: Sequence[Transfer], rates: Rates, credit_bytes: int) -> list[int]:
    """The order of parts if, whenever credit is free, the part of the foremost layer is committed.

    A part takes credit when it is committed and returns it when it has been sent. A part that is
    longer than all credit is committed when no other part is. A part takes as long as the longest
    of its stages.
    """
    busy = {name: rates.busy(name) for name in {part.architecture for part in parts}}
    ready = [part.ready_s for part in parts]
    sizes = [part.nbytes for part in parts]
    took = [busy[part.architecture].seconds(part.nbytes) for part in parts]
    fronts = [-part.numbers[-1] for part in parts]
    arrivals = sorted(range(len(parts)), key=ready.__getitem__)
    waiting: list[tuple[int, int]] = []
    committed: deque[tuple[float, int]] = deque()
    order: list[int] = []
    now = free = 0.0
    used = arrived = 0
    while arrived < len(arrivals) or waiting:
        while arrived < len(arrivals) and ready[arrivals[arrived]] <= now:
            number = arrivals[arrived]
            arrived += 1
            heapq.heappush(waiting, (fronts[number], number))
        while committed and committed[0][0] <= now:
            used -= committed.popleft()[1]
        if waiting:
            number = waiting[0][1]
            if not committed or used + sizes[number] <= credit_bytes:
                heapq.heappop(waiting)
                free = (free if free > now else now) + took[number]
                committed.append((free, sizes[number]))
                used += sizes[number]
                order.append(number)
                continue
        if arrived == len(arrivals) or (committed and committed[0][0] < ready[arrivals[arrived]]):
            now = committed[0][0]
        else:
            now = ready[arrivals[arrived]]
    return order
