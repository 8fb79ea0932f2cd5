"""Composition: algorithms as phases of a larger algorithm, each on a group of ranks.

A phase renumbers the ranks of an algorithm to the members of its group. It maps each block of the
algorithm to a list of chunks of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from pycoll.algorithms.algorithm import Algorithm, Levels
from pycoll.algorithms.formulas import Cost
from pycoll.schedule.collectives import REDUCING
from pycoll.schedule.language import TOKEN, Schedule, Transfer
from pycoll.schedule.topology import Topology


class Group(NamedTuple):
    """Ranks that run a phase together. Block b of their algorithm is the chunks ``blocks[b]``."""

    members: Sequence[int]
    blocks: Sequence[Sequence[int]]
    root: int = 0


class Phase(NamedTuple):
    """One algorithm that several groups run at the same time.

    ``across`` is True if the groups span hosts and False if each group lies inside a host.
    """

    algorithm: Algorithm
    groups: Sequence[Group]
    across: bool = False
    topology: Topology | None = None

    @property
    def steps(self) -> int:
        """The steps of the slowest group."""
        sizes = {len(group.members) for group in self.groups}
        return max(self.algorithm.cost(size, self.topology).steps for size in sizes)


class Composition(NamedTuple):
    """The phases of a collective, and the number of chunks per block."""

    parts: int
    phases: Sequence[Phase]


def embed(
    schedule: Schedule,
    members: Sequence[int],
    blocks: Sequence[Sequence[int]],
    start: int,
    partial: bool,
) -> Iterator[Transfer]:
    """The transfers of a schedule as a phase of a larger one, with other ranks, chunks and steps.

    ``partial`` marks copies of values that a later phase combines further.
    """
    parts = schedule.parts
    chunks = [
        block[part * len(block) // parts : (part + 1) * len(block) // parts]
        for block in blocks
        for part in range(parts)
    ]
    for t in schedule.transfers:
        source, destination = members[t.source], members[t.destination]
        for chunk in chunks[t.chunk] if t.chunk != TOKEN else (TOKEN,):
            reduce = t.reduce and chunk != TOKEN
            unfinished = (partial or t.partial) and not reduce and chunk != TOKEN
            yield Transfer(
                start + t.step, chunk, source, destination, reduce, -2, t.before, t.lane, unfinished
            )


def run(phases: Sequence[Phase], only: int | None) -> Iterator[Transfer]:
    """The transfers of all phases; a phase starts after the last step of the previous phase."""
    start = 0
    last = max((i for i, phase in enumerate(phases) if combines(phase)), default=-1)
    for number, phase in enumerate(phases):
        for group in phase.groups:
            if only is not None and only not in group.members:
                continue
            schedule = phase.algorithm.build(
                len(group.members),
                root=group.root,
                only=None if only is None else group.members.index(only),
                topology=phase.topology,
            )
            yield from embed(schedule, group.members, group.blocks, start, number < last)
        start += phase.steps


def combines(phase: Phase) -> bool:
    """Whether the phase's algorithm reduces."""
    return phase.algorithm.collective in REDUCING


def levels(composition: Composition, size: int) -> Levels:
    """The cost inside hosts and the cost across hosts.

    The costs are upper bounds. They are exact if every rank has the maximum in every phase, as in
    all_reduce, reduce_scatter and all_gather on hosts of equal size.
    """
    message = message_chunks(composition)
    costs = []
    for across in (False, True):
        phases = [phase for phase in composition.phases if phase.across is across]
        loads = Loads(message, size)
        for phase in phases:
            loads.add(phase)
        sent, received, handled, reduced = loads.most()
        steps = sum(phase.steps for phase in phases)
        costs.append(Cost(steps, sent, received, handled, reduced, message))
    sharing = max(len(phase.groups) for phase in composition.phases if phase.across)
    return Levels(costs[0], costs[1], sharing)


Load = tuple[Fraction, Fraction, Fraction, Fraction]


class Loads:
    """Upper bounds of what each rank sends, receives, handles and reduces.

    The unit is a message of ``message`` chunks. Ranks with equal loads share one entry, so
    thousands of ranks need few additions.
    """

    def __init__(self, message: int, size: int) -> None:
        self._message = message
        nothing = Fraction(0)
        self._sums: list[Load] = [(nothing, nothing, nothing, nothing)]
        self._numbers: dict[Load, int] = {self._sums[0]: 0}
        #: The index into ``_sums`` of every rank.
        self._places = [0] * size

    def add(self, phase: Phase) -> None:
        """Adds the work of all groups of the phase."""
        behind: dict[tuple[int, ...], dict[int, int]] = {}
        for group in phase.groups:
            tokens = not group.blocks or TOKEN in group.blocks[0]
            largest = max((len(block) for block in group.blocks), default=1)
            kind = (len(group.members), largest, len(group.blocks), tokens)
            next_of = behind.setdefault(kind, {})
            for rank in group.members:
                place = self._places[rank]
                if place not in next_of:
                    next_of[place] = self._number(place, self._amounts(phase, *kind))
                self._places[rank] = next_of[place]

    def _amounts(self, phase: Phase, members: int, largest: int, blocks: int, tokens: bool) -> Load:
        cost = phase.algorithm.cost(members, phase.topology)
        share = Fraction(1 if tokens else largest * blocks, self._message)
        reduced = Fraction(0) if tokens else cost.reduced
        return share * cost.sent, share * cost.received, share * cost.handled, share * reduced

    def _number(self, place: int, more: Load) -> int:
        """The index into ``_sums`` of the sum of entry ``place`` and ``more``."""
        sent, received, handled, reduced = self._sums[place]
        load = (sent + more[0], received + more[1], handled + more[2], reduced + more[3])
        if load not in self._numbers:
            self._numbers[load] = len(self._sums)
            self._sums.append(load)
        return self._numbers[load]

    def most(self) -> Load:
        """The maxima over all ranks of the bytes sent, received, handled and reduced."""
        found = [self._sums[place] for place in set(self._places)]
        return (
            max(load[0] for load in found),
            max(load[1] for load in found),
            max(load[2] for load in found),
            max(load[3] for load in found),
        )


def message_chunks(composition: Composition) -> int:
    """The number of chunks of the whole message."""
    groups = [group for phase in composition.phases for group in phase.groups]
    # Equal groups share one list of blocks, and there may be thousands of groups.
    every = {id(group.blocks): group.blocks for group in groups}.values()
    return len({chunk for blocks in every for block in blocks for chunk in block})


def total(levels: Levels) -> Cost:
    """The sum of the cost inside hosts and the cost across hosts."""
    inside, across, _ = levels
    return Cost(
        inside.steps + across.steps,
        inside.sent + across.sent,
        inside.received + across.received,
        inside.handled + across.handled,
        inside.reduced + across.reduced,
        max(inside.chunks, across.chunks),
    )
