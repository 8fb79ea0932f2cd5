"""The search of auto: walk from the points of the named policies to points with a shorter step.

A move changes one group of a point: it merges the group with the next one, splits it, flips its
architecture, or cuts it into parts. Other moves change the order of parts, or the halves, of the
whole point. The search keeps a move that shortens the simulated step, and visits the longest groups
first. It ends when no move shortens the step, or when it has used up its budget. The budget counts
simulated messages and gradients, not seconds, so all ranks end at the same point.

The result is never worse than the best start. It is a local optimum, not always the best point.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pycoll.gradients.communication_plan import A2A, Gradient, Rates
from pycoll.gradients.points import (
    GRAIN,
    Group,
    Point,
    Transfer,
    by_priority,
    gathers_of,
    messages_of,
    transfer_of,
)
from pycoll.gradients.simulate import Step, play

#: Simulated messages and gradients of a search, over all of its starts.
BUDGET = 6_000
#: The number of starts for each architecture: the best of the named points.
STARTS = 3
#: The least relative gain of a move.
GAIN_MIN = 1e-6
#: The numbers of equal parts into which a move may cut a group.
PARTS = (2, 4, 8)


class Scored(NamedTuple):
    """A point and its communication that is not hidden, in seconds."""

    exposed_s: float
    point: Point


class Scene:
    """The values that all ranks agreed on, and the points that were simulated with them.

    Not thread-safe. ``work`` counts the simulated messages and gradients.
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        rates: Rates,
        forward_s: Sequence[float] | None,
        architectures: Sequence[str],
    ) -> None:
        self.gradients, self.rates, self.forward_s = gradients, rates, forward_s
        self.architectures = architectures
        self.work = 0
        self._step = Step(gradients, rates, forward_s)
        self._before = [0, *itertools.accumulate(one.nbytes for one in gradients)]
        self._one_kind = len({one.kind for one in gradients}) < 2
        self._transfers: dict[Group, list[Transfer]] = {}
        self._known: dict[Point, float] = {}

    def nbytes(self, group: Group) -> int:
        """The bytes of a group."""
        return self._before[group.stop] - self._before[group.first]

    def exposed_s(self, point: Point) -> float:
        """The communication of a point that is not hidden, as ``simulate`` finds it."""
        known = self._known.get(point)
        if known is None:
            transfers = [one for group in point.groups for one in self._of(group)]
            if point.credit_bytes:
                order = by_priority(transfers, self.rates, point.credit_bytes)
                transfers = [transfers[number] for number in order]
            gathers = gathers_of(point, len(transfers))
            played = play(transfers, gathers, self._step)
            # Finding the order takes longer than simulating it.
            self.work += (3 if point.credit_bytes else 1) * len(transfers) + len(self.gradients)
            known = self._known[point] = played.exposed_s
        return known

    def _of(self, group: Group) -> list[Transfer]:
        made = self._transfers.get(group)
        if made is None:
            first, stop, architecture, part_bytes = group
            nbytes = self.nbytes(group)
            # A group that is no longer than a part is one message.
            is_whole = not part_bytes or nbytes <= max(GRAIN, part_bytes // GRAIN * GRAIN)
            if self._one_kind and is_whole:
                last_s = self.gradients[stop - 1].ready_s
                made = [Transfer(last_s, nbytes, architecture, range(first, stop))]
            else:
                messages = messages_of(group, self.gradients)
                made = [transfer_of(message, self.gradients) for message in messages]
            self._transfers[group] = made
        return made


def search(scene: Scene, starts: Sequence[Point], budget: int) -> Scored | None:
    """The best point that moves reach from the best of ``starts``; None without starts.

    ``budget``: the simulated messages and gradients of all moves together.
    """
    scored = [Scored(scene.exposed_s(point), point) for point in dict.fromkeys(starts)]
    scored.sort(key=lambda one: one.exposed_s)
    best = []
    for architecture in scene.architectures:
        best += [one for one in scored if _begins_by(architecture, one.point)][:STARTS]
    best.sort(key=lambda one: one.exposed_s)
    end = scene.work + budget
    found = []
    for place, start in enumerate(best):
        share = (end - scene.work) // (len(best) - place)
        found.append(_climb(scene, start, scene.work + share))
    return min(found, key=lambda one: one.exposed_s, default=None)


def _begins_by(architecture: str, point: Point) -> bool:
    """Whether the first group uses this architecture; a point without groups uses any."""
    return not point.groups or point.groups[0].architecture == architecture


def _climb(scene: Scene, now: Scored, end: int) -> Scored:
    """Make moves that shorten the step until none is left, or until ``scene.work`` is ``end``."""
    better = True
    while better:
        better = False
        order = sorted(now.point.groups, key=lambda one: (-scene.nbytes(one), one.first))
        for group in [None, *order]:
            if group is not None and group not in now.point.groups:
                continue
            moves = _orders(scene, now.point) if group is None else _moves(scene, now.point, group)
            for point in moves:
                if scene.work >= end:
                    return now
                exposed_s = scene.exposed_s(point)
                if exposed_s < now.exposed_s - GAIN_MIN * abs(now.exposed_s):
                    now, better = Scored(exposed_s, point), True
                    break
    return now


def _moves(scene: Scene, point: Point, group: Group) -> Iterator[Point]:
    """The points that differ in this group."""
    place = point.groups.index(group)

    def with_groups(*groups: Group, until: int = place + 1) -> Point:
        return point._replace(groups=(*point.groups[:place], *groups, *point.groups[until:]))

    by = (A2A,) if point.halves else tuple(scene.architectures)
    nbytes = scene.nbytes(group)
    lengths = [-(-nbytes // (count * GRAIN)) * GRAIN for count in PARTS]
    for architecture in by:
        for length in dict.fromkeys((0, *(one for one in lengths if one < nbytes))):
            other = Group(group.first, group.stop, architecture, length)
            if other != group:
                yield with_groups(other)
    if place + 1 < len(point.groups):
        after = point.groups[place + 1]
        for like in dict.fromkeys((group[2:], after[2:])):
            yield with_groups(Group(group.first, after.stop, *like), until=place + 2)
    for at in _splits(scene, group):
        first, last = group._replace(stop=at), group._replace(first=at)
        yield with_groups(first, last)
        for architecture in by:
            if architecture != group.architecture:
                yield with_groups(first, last._replace(architecture=architecture))
                yield with_groups(first._replace(architecture=architecture), last)


def _splits(scene: Scene, group: Group) -> list[int]:
    """The places to split a group at: all places of a short one, three of a long one."""
    count = group.stop - group.first
    if count <= 6:
        return list(range(group.first + 1, group.stop))
    return [group.first + 1, group.first + count // 2, group.stop - 1]


def _orders(scene: Scene, point: Point) -> Iterator[Point]:
    """The points with another order of parts, where the next forward pass can gain by it.

    Some of them also cut all long groups, since an order gains little without parts.
    """
    if scene.forward_s is None or not point.groups:
        return
    lengths = [one.part_bytes or scene.nbytes(one) for one in point.groups]
    for count in PARTS[:2]:
        length = -(-max(lengths) // (count * GRAIN)) * GRAIN
        groups = tuple(
            one._replace(part_bytes=length) if scene.nbytes(one) > length else one
            for one in point.groups
        )
        yield Point(groups, credit_bytes=length)
    for credit_bytes in dict.fromkeys((0, 1, max(lengths), 2 * max(lengths))):
        if credit_bytes != point.credit_bytes:
            yield point._replace(credit_bytes=credit_bytes, halves=False)
    if all(group.architecture == A2A for group in point.groups) and not point.halves:
        yield point._replace(credit_bytes=0, halves=True)
