"""How long an algorithm takes: links, loads, and the time of a message in tiles.

A rank's work in a step is latency (alpha), a cost per segment (overhead), bytes moved (beta)
and bytes combined (gamma). The first tile passes through all steps; each further one comes a
*period* later, which is what the busiest rank does for one tile, plus a latency for each time
that it has to wait for an answer to what it sent.

    time = first tile through all steps + (tiles - 1) * period

Ranks of a host share its link to other hosts: bytes across are counted by host, and beside them
what the busiest rank moves, which alone may not fill the link (see docs/choice.md).

Messages that are too long for the caches move slower; by how much is the link's *spill*. Long ones
that peers on the host read where they lie move faster, at its *reach*. Loads
come from the schedule itself, from the cost formula where all links are alike, and for sizes at
which drawing whole schedules would take long from smaller schedules (see extrapolation).
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, NamedTuple

from pycoll.collective import Collective
from pycoll.turns import Turns, turns_of

if TYPE_CHECKING:
    # Those who only want to know what links cost, to join or to tune, need no algorithm.
    from pycoll.algorithms import Algorithm
    from pycoll.costs import Cost
    from pycoll.schedule import Schedule
    from pycoll.topology import Topology

#: Most bytes of a chunk that travel as one segment; what transports have room for.
SEGMENT_BYTES = 65536
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


class Terms(NamedTuple):
    """What a message costs over one kind of link: counts, and bytes. Times are linear in these,
    but for ``flow``, of which only the excess over ``moved`` counts, and ``carried``, all that the
    busiest host's link carries, of which only the excess over everything else does. ``reached`` is
    the part of ``moved`` that peers read where it lies, if the message is long enough; ``touched``
    the memory that a core reads and writes, inside a host."""

    waits: float
    segments: float
    moved: float
    combined: float
    flow: float = 0.0
    reached: float = 0.0
    carried: float = 0.0
    touched: float = 0.0


class Link(NamedTuple):
    """What a kind of link costs.

    ``alpha``: s until a message is there; ``beta``: s/byte, of a whole host across hosts, each way;
    inside a host of one rank, whose core copies what it sends and what it receives, so that it is
    twice a copy's; ``gamma``: s/byte to combine; ``overhead``: s of processor per segment.
    ``spill``: further s/byte of what misses ``cache_bytes``, see :func:`spilled`. ``flow``:
    s/byte that one rank takes across hosts, however idle its host's link; 0 where it fills that.
    ``reach``: s/byte, instead of beta, of what peers read where it lies; 0 where they cannot.
    ``sustained``: s/byte that a host's link takes in the long run, where it carries bursts faster:
    of message after message it passes on the one while ranks handle the next; 0 where beta is all.
    """

    alpha: float
    beta: float
    gamma: float
    overhead: float
    spill: float = 0.0
    cache_bytes: int = 1 << 22
    flow: float = 0.0
    reach: float = 0.0
    sustained: float = 0.0

    def seconds(self, terms: Terms, nbytes: int) -> float:
        """The time of a message of ``nbytes`` that costs ``terms``."""
        handling = terms.waits * self.alpha + terms.segments * self.overhead
        reached = terms.reached if self.reach else 0.0
        spill = self.spill * spilled(terms, nbytes, self.cache_bytes)
        moved = (terms.moved - reached) * self.beta + reached * self.reach + spill
        moving = max(moved, terms.flow * self.flow)
        busy = handling + moving + terms.combined * self.gamma
        return max(busy, terms.carried * self.sustained)


#: From here on NumPy's arrays lie where peers reach them, and parts of them pass without a copy.
REACHED_BYTES, LENT_BYTES = 8192, 4096
#: s until a core that several ranks share has gone from one that waits to the next.
TURN_S = 1.5e-6


def spilled(terms: Terms, nbytes: int, cache_bytes: int) -> float:
    """The bytes that miss the caches. Inside a host, where operations sweep to and fro, what does
    not fit; between hosts none of a message that fits, all of one that is 4 times as long."""
    if terms.touched:
        return max(0.0, terms.touched - cache_bytes)
    return terms.moved * min(1.0, max(0.0, log2(max(nbytes, 1) / cache_bytes) / 2))


#: Orders of magnitude on present machines; `pycoll tune` measures better ones.
LINKS: dict[str, Link] = {
    "shm": Link(alpha=0.3e-6, beta=1 / 15e9, gamma=1 / 30e9, overhead=0.08e-6, reach=1 / 40e9),
    "tcp": Link(alpha=8e-6, beta=1 / 5e9, gamma=1 / 30e9, overhead=2e-6),
    "verbs": Link(alpha=2e-6, beta=1 / 25e9, gamma=1 / 30e9, overhead=0.3e-6),
    "sim": Link(alpha=1e-6, beta=1 / 10e9, gamma=1 / 30e9, overhead=0.1e-6),
}


class Parameters(NamedTuple):
    """The links inside hosts and across them, and how long segments are.

    ``origin`` says in words where the values come from. ``per_core``: ranks that share a core; what
    they do inside a host takes so many times as long here.
    """

    inside: Link = LINKS["shm"]
    across: Link = LINKS["tcp"]
    segment_bytes: int = SEGMENT_BYTES
    origin: str = "built in"
    per_core: float = 1.0

    def crowded(self, ranks_per_core: float) -> Parameters:
        """The same where ranks share cores: they work in turns, and so does whoever is awaited."""
        if ranks_per_core <= 1:
            return self
        inside = self.inside._replace(
            alpha=self.inside.alpha + ranks_per_core * TURN_S,
            beta=self.inside.beta * ranks_per_core,
            gamma=self.inside.gamma * ranks_per_core,
            overhead=self.inside.overhead * ranks_per_core,
            spill=self.inside.spill * ranks_per_core,
            reach=self.inside.reach * ranks_per_core,
        )
        origin = f"{self.origin}, {ranks_per_core:.3g} ranks per core"
        return self._replace(inside=inside, origin=origin, per_core=ranks_per_core)


DEFAULT = Parameters()


class Load:
    """Work over one kind of link: latencies waited for, segments, and bytes in units of n.

    Across hosts ``moved`` is what all ranks of the busiest host move over its link, and ``flow``
    what the busiest rank does of that.
    """

    def __init__(
        self,
        waits: float = 0,
        segments: float = 0,
        moved: float = 0,
        combined: float = 0,
        flow: float = 0,
    ) -> None:
        self.waits, self.segments = waits, segments
        self.moved, self.combined, self.flow = moved, combined, flow


class Profile(NamedTuple):
    """What a tile costs inside and across hosts: the ``first``; a ``period`` per further one.
    ``lends``: peers on a host may read what is sent where it lies. ``turns``: see turns.py.
    ``touches``: bytes that a core touches for one that it moves."""

    first: tuple[Load, Load]
    period: tuple[Load, Load]
    chunks: int
    lends: bool = False
    turns: Turns = Turns()
    touches: float = 2.0

    def tiles(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
        """Tiles that a message of ``nbytes`` is cut in."""
        return max(1, -(-nbytes // (self.chunks * segment_bytes)))

    def terms(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> tuple[Terms, Terms]:
        """What the whole message costs inside and across hosts."""
        tiles = self.tiles(nbytes, segment_bytes)
        part = nbytes / tiles
        inside = _terms(self.first[0], self.period[0], tiles - 1, part)
        if self.lends and nbytes >= max(REACHED_BYTES, self.chunks * LENT_BYTES):
            inside = inside._replace(reached=inside.moved)
        inside = inside._replace(touched=inside.moved * self.touches)
        across = _terms(self.first[1], self.period[1], tiles - 1, part)
        return inside, across._replace(carried=nbytes * self.period[1].moved)

    def seconds(self, nbytes: int, parameters: Parameters) -> float:
        """The predicted time of the whole message."""
        inside, across = self.terms(nbytes, parameters.segment_bytes)
        if parameters.per_core > 1:
            inside = self.turns.shared(inside, parameters.per_core)
        within = parameters.inside.seconds(inside, nbytes)
        return within + parameters.across.seconds(across, nbytes)


def _terms(first: Load, period: Load, further: int, part: float) -> Terms:
    return Terms(
        first.waits + further * period.waits,
        first.segments + further * period.segments,
        part * (first.moved + further * period.moved),
        part * (first.combined + further * period.combined),
        part * (first.flow + further * period.flow),
    )


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
    return found._replace(lends=algorithm.lends, turns=turns, touches=touches)


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
    return Profile((first, Load()), (period, Load()), cost.chunks)


def kept_by(collective: Collective, size: int) -> float:
    """What a rank copies from its input to its output by itself, in units of n. The result of a
    reduce_scatter is half a copy: it is read where it is combined."""
    if collective not in _KEEPING:
        return 0.0
    return (0.5 if collective is Collective.REDUCE_SCATTER else 1.0) / size


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
