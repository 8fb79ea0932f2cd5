"""Loads: latencies, segments and bytes of each tile, from a formula or from a schedule."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from pycoll.cost.copied_in_domains import Copied, SharedCopies
from pycoll.cost.copying import kept_by
from pycoll.cost.model import Load, Profile
from pycoll.schedule.collectives import Collective

if TYPE_CHECKING:
    from pycoll.algorithms import Algorithm
    from pycoll.algorithms.formulas import Cost
    from pycoll.schedule.copies import Copies
    from pycoll.schedule.language import Schedule, Transfer
    from pycoll.schedule.topology import Topology

#: Up to this number of ranks, schedules are counted transfer by transfer.
SCHEDULE_SIZE_MAX = 64
#: A size at which every algorithm exists and has its characteristic waits.
SMALL_SIZE = 4


def load_inside(cost: Cost) -> Load:
    """The work of the busiest rank for a tile inside a host, where its core copies both ways."""
    return _load(float(cost.handled) / 2, cost)


def load_across(cost: Cost) -> Load:
    """The work of the busiest rank for a tile across hosts, where both directions run at once."""
    return _load(float(max(cost.sent, cost.received)), cost)


def _load(moved: float, cost: Cost) -> Load:
    return Load(0, moved * cost.chunks, moved, float(cost.reduced))


def first_of(load: Load, steps: int, chunks: int) -> Load:
    """The load of the first tile through all steps; in each step at least one chunk moves."""
    moved = max(load.moved, steps / chunks)
    stretch = moved / load.moved if load.moved else 1.0
    return Load(steps, load.segments * stretch, moved, load.combined * stretch)


@lru_cache(maxsize=256)
def streams(algorithm: Algorithm) -> bool:
    """Whether tiles follow each other without waiting for answers, as along a chain or a tree."""
    schedule = algorithm.build(SMALL_SIZE)
    return max(answers_expected(schedule).values(), default=0) == 0


def answers_expected(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Per (rank, lane): the number of steps in which it receives after an earlier send."""
    sent: dict[tuple[int, int], int] = {}
    received: dict[tuple[int, int], set[int]] = defaultdict(set)
    for t in schedule.transfers:
        sent.setdefault((t.source, t.lane), t.step)
        received[t.destination, t.lane].add(t.step)
    return {
        place: sum(step > sent[place] for step in steps)
        for place, steps in received.items()
        if place in sent
    }


def profile_of_domains(schedule: Schedule, topology: Topology, copies: Copies) -> Profile:
    """The profile on one host, whose domains are the hosts of ``topology``.

    ``fetched`` counts what the busiest rank copies, inside and across, where memory is reached.
    """
    found = profile_of_schedule(schedule, topology)
    shared = SharedCopies(schedule, topology.levels[0], copies)
    chunks = message_chunks(schedule)
    steps: dict[int, list[Transfer]] = defaultdict(list)
    for t in schedule.transfers:
        steps[t.step].append(t)
    kept = kept_by(schedule.collective, schedule.size)
    each = [shared.busiest(transfers) for transfers in steps.values()]
    in_steps = Copied(sum(one.inside for one in each), sum(one.across for one in each))
    first = max(in_steps, shared.longest_path(), key=lambda one: one.weight)
    for loads, one in ((found.first, first), (found.period, shared.busiest(schedule.transfers))):
        loads[0].fetched = one.inside / chunks + kept
        loads[1].fetched = one.across / chunks
    return found._replace(domains=True)


def profile_of_schedule(schedule: Schedule, topology: Topology) -> Profile:
    """The profile counted from the transfers of the schedule.

    Per step it takes the busiest rank inside hosts and the busiest host across hosts.
    """
    from pycoll.schedule.language import TOKEN

    size, host = schedule.size, topology.levels[0]
    chunks = message_chunks(schedule)
    steps: dict[tuple[int, bool], _Tally] = {}
    whole = (_Tally(across=False), _Tally(across=True))
    for t in schedule.transfers:
        across = host[t.source] != host[t.destination]
        ends = (host[t.source], host[t.destination]) if across else (t.source, t.destination)
        for tally in (steps.setdefault((t.step, across), _Tally(across)), whole[across]):
            tally.add(t.source, t.destination, ends, t.chunk != TOKEN, t.reduce)
    first = (Load(), Load())
    crossing = {step for step, across in steps if across}
    for (step, across), tally in steps.items():
        load = first[across]
        load.waits += across or step not in crossing
        # Inside a host the sender copies a segment and then the receiver copies it.
        load.segments += max(tally.segments(), 1)
        load.moved += max(tally.most_moved(), len(tally.carried) > 0) / chunks
        load.combined += tally.most_combined() / chunks
        load.flow += across * tally.flow() / chunks
    period = tuple(
        Load(
            0,
            tally.segments(),
            tally.most_moved() / chunks,
            tally.most_combined() / chunks,
            across * tally.flow() / chunks,
        )
        for across, tally in enumerate(whole)
    )
    for load in (first[0], period[0]):
        load.moved += kept_by(schedule.collective, size)
    waits = max(answers_expected(schedule).values(), default=0)
    share = len(crossing) / max(schedule.steps, 1)
    period[0].waits, period[1].waits = waits * (1 - share), waits * share
    return Profile(first, (period[0], period[1]), chunks if size > 1 else 1)


def message_chunks(schedule: Schedule) -> int:
    """The number of chunks of the message n (see formulas.py)."""
    if schedule.collective is Collective.BARRIER:
        return 1
    alone = schedule.collective is Collective.ALL_TO_ALL
    return schedule.data_chunks // (schedule.size if alone else 1)


_Ends = dict[tuple[int, bool], int]


class _Tally:
    """Counts of segments per rank or host and direction (True: received)."""

    def __init__(self, across: bool) -> None:
        self._across = across
        self.handled: _Ends = defaultdict(int)
        self.carried: _Ends = defaultdict(int)
        self.flowed: _Ends = defaultdict(int)
        self.folded: dict[int, int] = defaultdict(int)

    def add(
        self, source: int, destination: int, ends: tuple[int, int], data: bool, reduce: bool
    ) -> None:
        self.handled[source, False] += 1
        self.handled[destination, True] += 1
        if data:
            self.carried[ends[0], False] += 1
            self.carried[ends[1], True] += 1
            self.flowed[source, False] += 1
            self.flowed[destination, True] += 1
        if reduce:
            self.folded[destination] += 1

    def segments(self) -> float:
        return self._busiest(self.handled)

    def most_moved(self) -> float:
        return self._busiest(self.carried)

    def flow(self) -> int:
        return max(self.flowed.values(), default=0)

    def most_combined(self) -> int:
        return max(self.folded.values(), default=0)

    def _busiest(self, counts: _Ends) -> float:
        """The largest count.

        Across hosts both directions run at the same time; inside a host one core does both.
        """
        if self._across:
            return max(counts.values(), default=0)
        ends = {end for end, _ in counts}
        return max((counts[end, False] + counts[end, True] for end in ends), default=0) / 2
