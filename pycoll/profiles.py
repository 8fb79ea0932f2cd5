"""What algorithms cost on a topology: latencies, segments and bytes of each tile of a message.

On one host from the cost formula, where all links are alike. On several hosts from the transfers
of the schedule itself, and for sizes at which drawing whole schedules would take long from smaller
schedules (see extrapolation).
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import TYPE_CHECKING

from pycoll.collective import Collective
from pycoll.model import Load, Profile
from pycoll.turns import Turns, turns_of

if TYPE_CHECKING:
    from pycoll.algorithms import Algorithm
    from pycoll.costs import Cost
    from pycoll.schedule import Schedule
    from pycoll.topology import Topology

#: Up to this size schedules are weighed transfer by transfer.
SCHEDULE_SIZE_MAX = 64
#: Collectives in which a rank's own block goes to another place of its own.
_KEEPING = (
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.GATHER,
    Collective.REDUCE_SCATTER,
    Collective.SCATTER,
)
#: A size at which every algorithm exists and shows how it waits.
SMALL_SIZE = 4


@lru_cache(maxsize=1024)
def profile(algorithm: Algorithm, topology: Topology, crowded: bool = False) -> Profile:
    """What the algorithm does on this topology, for root 0; with its turns where ``crowded``."""
    size = topology.size
    if len(topology.hosts) > 1 and size <= SCHEDULE_SIZE_MAX:
        found = profile_of_schedule(algorithm.build(size, topology=topology), topology)
    else:
        found = profile_of_costs(algorithm, topology)
    counted = crowded and len(topology.hosts) == 1 and size <= SCHEDULE_SIZE_MAX
    turns = turns_of(algorithm.build(size, topology=topology)) if counted else Turns()
    # A copy touches two places. Sums in place are read and written in one.
    touches = 1.0 if algorithm.collective is Collective.ALL_REDUCE else 2.0
    # The root of a scatter first tells what there is.
    told = algorithm.collective is Collective.SCATTER and len(topology.hosts) == 1 and size > 1
    return found._replace(
        lends=algorithm.lends, turns=turns, touches=touches, calls=2.0 if told else 1.0
    )


def profile_of_costs(algorithm: Algorithm, topology: Topology) -> Profile:
    """From the formula; on several hosts from smaller schedules, carried on along the formula."""
    if len(topology.hosts) > 1:
        from pycoll.extrapolation import extrapolated

        return extrapolated(algorithm, topology)
    cost = algorithm.cost(topology.size)
    period = copied(cost)
    first = first_of(period, cost.steps, cost.chunks)
    period.waits = 0 if streams(algorithm) else max(cost.steps - 1, 0)
    for load in (first, period):
        load.moved += kept_by(algorithm.collective, topology.size)
    period.fetched = fetched(algorithm.collective, topology.size, cost)
    first.fetched = max(period.fetched, cost.steps / cost.chunks)
    if algorithm.collective is Collective.GATHER:
        # While all is short the root fetches it.
        first.fetched = float(cost.received) + kept_by(Collective.GATHER, topology.size)
    return Profile((first, Load()), (period, Load()), cost.chunks)


def kept_by(collective: Collective, size: int) -> float:
    """What a rank copies from its input to its output by itself, in units of n. The result of a
    reduce_scatter is half a copy: it is read where it is combined."""
    if collective not in _KEEPING:
        return 0.0
    return (0.5 if collective is Collective.REDUCE_SCATTER else 1.0) / size


def fetched(collective: Collective, size: int, cost: Cost) -> float:
    """What the busiest core copies where peers read what is sent where it lies, in units of n.

    Who receives fetches, beside what it keeps; the root of a scatter has only that to do. Leaves of
    a gather put theirs where they belong, and of two ranks the root of a broadcast half of it. But
    nobody's memory is read faster than by two at once.
    """
    kept = kept_by(collective, size)
    sent, received = float(cost.sent), float(cost.received)
    own = received + kept
    if collective is Collective.GATHER:
        own = max(sent, kept)
    elif collective is Collective.SCATTER:
        own = max(received, kept)
    elif collective is Collective.BROADCAST and size == 2:
        own = received / 2
    return max(own, float(cost.handled) / 2)


def copied(cost: Cost) -> Load:
    """What the busiest rank does for a tile inside a host: its core moves bytes both ways."""
    return _load(float(cost.handled) / 2, cost)


def carried(cost: Cost) -> Load:
    """What the busiest rank does for a tile across hosts, where both ways are free at once."""
    return _load(float(max(cost.sent, cost.received)), cost)


def _load(moved: float, cost: Cost) -> Load:
    return Load(0, moved * cost.chunks, moved, float(cost.reduced))


def first_of(load: Load, steps: int, chunks: int) -> Load:
    """The way of the first tile: in each step at least one chunk moves somewhere."""
    moved = max(load.moved, steps / chunks)
    stretch = moved / load.moved if load.moved else 1.0
    return Load(steps, load.segments * stretch, moved, load.combined * stretch)


@lru_cache(maxsize=256)
def streams(algorithm: Algorithm) -> bool:
    """Whether tiles follow each other without waiting for answers, as along a chain or tree."""
    schedule = algorithm.build(SMALL_SIZE)
    return max(answers_awaited(schedule).values(), default=0) == 0


def answers_awaited(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Per (rank, lane): steps in which it receives after it has sent in an earlier one."""
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


def profile_of_schedule(schedule: Schedule, topology: Topology) -> Profile:
    """From the transfers: per step the busiest rank inside, and the busiest host across."""
    from pycoll.schedule import TOKEN

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
        # Inside a host, what one rank copies to send it another one copies when it has come.
        load.segments += max(tally.segments(), 1)
        load.moved += max(tally.moved(), len(tally.carried) > 0) / chunks
        load.combined += tally.combined() / chunks
        load.flow += across * tally.flow() / chunks
    period = tuple(
        Load(
            0,
            tally.segments(),
            tally.moved() / chunks,
            tally.combined() / chunks,
            across * tally.flow() / chunks,
        )
        for across, tally in enumerate(whole)
    )
    for load in (first[0], period[0]):
        load.moved += kept_by(schedule.collective, size)
    waits = max(answers_awaited(schedule).values(), default=0)
    share = len(crossing) / max(schedule.steps, 1)
    period[0].waits, period[1].waits = waits * (1 - share), waits * share
    return Profile(first, (period[0], period[1]), chunks if size > 1 else 1)


def message_chunks(schedule: Schedule) -> int:
    """Chunks of the message n (see costs)."""
    if schedule.collective is Collective.BARRIER:
        return 1
    alone = schedule.collective is Collective.ALL_TO_ALL
    return schedule.data_chunks // (schedule.size if alone else 1)


_Ends = dict[tuple[int, bool], int]


class _Tally:
    """Counts of segments by who handles them, and whether to receive them."""

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

    def moved(self) -> float:
        return self._busiest(self.carried)

    def flow(self) -> int:
        return max(self.flowed.values(), default=0)

    def combined(self) -> int:
        return max(self.folded.values(), default=0)

    def _busiest(self, counts: _Ends) -> float:
        """Across hosts both ways are free at once; inside, one core goes both."""
        if self._across:
            return max(counts.values(), default=0)
        ends = {end for end, _ in counts}
        return max((counts[end, False] + counts[end, True] for end in ends), default=0) / 2
