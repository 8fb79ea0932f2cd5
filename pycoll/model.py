"""How long an algorithm takes: links, loads, and the time of a message in tiles.

An operation has a cost of its own (call). A rank's work in a step is latency (alpha), a cost per
segment (overhead), bytes moved (beta) and bytes combined (gamma). The first tile passes through all
steps; each further one comes a *period* later, which is what the busiest rank does for one tile,
plus a latency for each time that it has to wait for an answer to what it sent.

    time = call + first tile through all steps + (tiles - 1) * period

Ranks of a host share its link to other hosts: bytes across are counted by host, and beside them
what the busiest rank moves, which alone may not fill the link (see docs/choice.md).

Messages that are too long for the caches move slower; by how much is the link's *spill*. Long ones
that peers on the host read where they lie move faster, at its *reach*. Loads are in profiles.py.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from pycoll.turns import Turns

#: Most bytes of a chunk that travel as one segment; what transports have room for.
SEGMENT_BYTES = 65536


class Terms(NamedTuple):
    """What a message costs over one kind of link: counts, and bytes. Times are linear in these,
    but for ``flow``, of which only the excess over ``moved`` counts, and ``carried``, all that the
    busiest host's link carries, of which only the excess over everything else does. ``reached`` is
    the part of ``moved`` that peers read where it lies, if the message is long enough; ``touched``
    the memory that a core reads and writes, inside a host. ``calls``: operations that it takes."""

    waits: float
    segments: float
    moved: float
    combined: float
    flow: float = 0.0
    reached: float = 0.0
    carried: float = 0.0
    touched: float = 0.0
    calls: float = 1.0


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
    ``call``: s of an operation itself, whatever its steps.
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
    call: float = 0.0

    def seconds(self, terms: Terms, nbytes: int) -> float:
        """The time of a message of ``nbytes`` that costs ``terms``."""
        handling = terms.waits * self.alpha + terms.segments * self.overhead
        handling += self.call * terms.calls if terms.waits else 0.0
        reached = terms.reached if self.reach else 0.0
        spill = self.spill * spilled(terms, nbytes, self.cache_bytes)
        moved = (terms.moved - reached) * self.beta + reached * self.reach + spill
        moving = max(moved, terms.flow * self.flow)
        busy = handling + moving + terms.combined * self.gamma
        return max(busy, terms.carried * self.sustained)


#: From here on arrays may lie where peers reach them, and parts of those pass without a copy. The
#: model takes that for given: it knows of no array where it lies (docs/shared-arrays.md).
REACHED_BYTES, LENT_BYTES = 8192, 4096
#: s until each of k ranks on a core had its turn, by k squared: so many turns, and in each a look
#: at peers that are as many. An operation of one step took 4 us with 2 ranks per core, 15 to 20
#: with 4, 75 to 100 with 8 (64 B, 2 cores). By k, what a further step takes: less than the messages
#: that it saves where all_reduce of up to 1 KiB goes by way of one of 8 ranks (0.9 of the time).
TURNS_S, TURN_S = 1e-6, 0.35e-6


def spilled(terms: Terms, nbytes: int, cache_bytes: int) -> float:
    """The bytes that miss the caches. Inside a host, where operations sweep to and fro, what does
    not fit; from two thirds of the caches on some of it, by where pages happen to lie. Between
    hosts none of a message that fits, all of one that is 4 times as long."""
    if terms.touched:
        over, width = terms.touched - cache_bytes, cache_bytes / 3
        return max(over, 0.0) if abs(over) >= width else (over + width) ** 2 / (4 * width)
    return terms.moved * min(1.0, max(0.0, log2(max(nbytes, 1) / cache_bytes) / 2))


#: Orders of magnitude on present machines; `pycoll tune` measures better ones.
LINKS: dict[str, Link] = {
    "shm": Link(
        alpha=0.15e-6,
        beta=1 / 15e9,
        gamma=1 / 30e9,
        overhead=0.08e-6,
        reach=1 / 40e9,
        call=0.3e-6,
    ),
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
            call=self.inside.call + ranks_per_core**2 * TURNS_S,
            alpha=self.inside.alpha + ranks_per_core * TURN_S,
            beta=self.inside.beta * ranks_per_core,
            gamma=self.inside.gamma * ranks_per_core,
            overhead=self.inside.overhead * ranks_per_core,
            spill=self.inside.spill * ranks_per_core,
            cache_bytes=int(self.inside.cache_bytes / ranks_per_core),
            reach=self.inside.reach * ranks_per_core,
        )
        origin = f"{self.origin}, {ranks_per_core:.3g} ranks per core"
        return self._replace(inside=inside, origin=origin, per_core=ranks_per_core)


DEFAULT = Parameters()


class Load:
    """Work over one kind of link: latencies waited for, segments, and bytes in units of n.

    Inside hosts ``fetched`` is what the busiest rank moves where peers read what is sent where it
    lies, as much as else if it is not given. Across hosts ``moved`` is what all ranks of the
    busiest host move over its link, and ``flow`` what the busiest rank does of that.
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
        self._fetched: float | None = None

    @property
    def fetched(self) -> float:
        """In units of n."""
        return self.moved if self._fetched is None else self._fetched

    @fetched.setter
    def fetched(self, share: float) -> None:
        self._fetched = share


class Profile(NamedTuple):
    """What a tile costs inside and across hosts: the ``first``; a ``period`` per further one.
    ``lends``: peers on a host may read what is sent where it lies. ``turns``: see turns.py.
    ``touches``: bytes that a core touches for one that it moves. ``calls``: operations, of which
    all but one are short and of one step."""

    first: tuple[Load, Load]
    period: tuple[Load, Load]
    chunks: int
    lends: bool = False
    turns: Turns = Turns()
    touches: float = 2.0
    calls: float = 1.0

    def tiles(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
        """Tiles that a message of ``nbytes`` is cut in."""
        return max(1, -(-nbytes // (self.chunks * segment_bytes)))

    def terms(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> tuple[Terms, Terms]:
        """What the whole message costs inside and across hosts."""
        tiles = self.tiles(nbytes, segment_bytes)
        part = nbytes / tiles
        inside = _terms(self.first[0], self.period[0], tiles - 1, part)
        reaches = self.lends and nbytes >= max(REACHED_BYTES, self.chunks * LENT_BYTES)
        moved = inside.reached if reaches else inside.moved
        inside = inside._replace(moved=moved, reached=moved if reaches else 0.0)
        waits = inside.waits + self.calls - 1
        inside = inside._replace(waits=waits, touched=inside.moved * self.touches, calls=self.calls)
        across = _terms(self.first[1], self.period[1], tiles - 1, part)
        return inside, across._replace(reached=0.0, carried=nbytes * self.period[1].moved)

    def seconds(self, nbytes: int, parameters: Parameters) -> float:
        """The predicted time of the whole message."""
        inside, across = self.terms(nbytes, parameters.segment_bytes)
        if parameters.per_core > 1:
            each = self.period[0]
            fetches = each.fetched / each.moved if inside.reached else 1.0
            inside = self.turns.shared(inside, parameters.per_core, fetches)
        within = parameters.inside.seconds(inside, nbytes)
        return within + parameters.across.seconds(across, nbytes)


def _terms(first: Load, period: Load, further: int, part: float) -> Terms:
    return Terms(
        first.waits + further * period.waits,
        first.segments + further * period.segments,
        part * (first.moved + further * period.moved),
        part * (first.combined + further * period.combined),
        part * (first.flow + further * period.flow),
        part * (first.fetched + further * period.fetched),
    )
