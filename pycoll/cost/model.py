"""The cost model: links, loads, and the predicted time of a message that is cut into tiles.

An operation has a fixed cost (call). The work of a rank in a step is a latency (alpha), a cost per
segment (overhead), bytes moved (beta) and bytes combined (gamma). The first tile passes through all
steps. Each further tile ends one *period* later: the work of the busiest rank for one tile, plus a
latency for each time that the rank waits for an answer to what it sent.

    time = call + first tile through all steps + (tiles - 1) * period

The ranks of a host share its link to other hosts, so bytes across are counted by host. The bytes of
the busiest rank are counted too, because one rank alone may not fill the link (see docs/choice.md).

Messages that exceed the caches move slower; the link's *spill* is the extra cost. Long messages
that peers on the host read in place move faster, at the link's *reach*. Loads are in profiles.py.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from pycoll.cost import codec_rates
from pycoll.cost.codec_rates import CodecRate
from pycoll.cost.oversubscription import Turns

#: The most bytes of a segment; the size of the transports' slot buffers.
SEGMENT_BYTES = 65536
#: The same where servers combine the values. A worker receives nothing until the servers have a
#: segment of every worker, so shorter segments let results travel while values still arrive.
SERVED_SEGMENT_BYTES = 32768


class Terms(NamedTuple):
    """The costs of a message over one kind of link, as counts and bytes.

    The time is linear in these, with two exceptions. Of ``flow`` (bytes of the busiest rank) only
    the excess of its time over that of ``moved`` counts. Of ``carried`` (all bytes on the link of
    the busiest host) only the excess of its time over all other time counts. ``reached`` is the
    part of ``moved`` that peers read in place if the message is long enough. ``touched`` is the
    memory in bytes that a core reads and writes inside a host. ``calls`` is the number of
    operations.
    """

    waits: float
    segments: float
    moved: float
    combined: float
    flow: float = 0.0
    reached: float = 0.0
    carried: float = 0.0
    touched: float = 0.0
    calls: float = 1.0

    def shrunk(self, ratio: float) -> Terms:
        """The costs where codes travel in place of values, with ``ratio`` times their bytes."""
        return self._replace(
            moved=self.moved * ratio,
            flow=self.flow * ratio,
            carried=self.carried * ratio,
            touched=self.touched * ratio,
        )


class Link(NamedTuple):
    """The costs of one kind of link.

    ``alpha``: s until a message has arrived. ``beta``: s/byte. Across hosts it is the cost of a
    whole host's link, each way. Inside a host it is the cost of one rank, whose core copies sent
    and received bytes, so it is twice the cost of a copy. ``gamma``: s/byte to combine.
    ``overhead``: s of processor time per segment.

    ``spill``: additional s/byte of bytes that miss ``cache_bytes``, see :func:`spilled_bytes`.
    ``flow``: s/byte of one rank across hosts, even if the link of its host is idle; 0 if one rank
    fills the link. ``reach``: s/byte, instead of beta, of bytes that peers read in place; 0 if
    peers cannot, as across hosts. Across domains of one host flow is the cost of such bytes too.

    ``sustained``: s/byte that the link of a host takes permanently, if the link moves bursts faster
    than that: while ranks handle one message, the link drains the previous one; 0 if beta says all.
    ``call``: s of an operation itself, independent of its steps.
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
        """The time of a message of ``nbytes`` with the costs ``terms``, in s."""
        handling = terms.waits * self.alpha + terms.segments * self.overhead
        handling += self.call * terms.calls if terms.waits else 0.0
        reached = terms.reached if self.reach else 0.0
        spill = self.spill * spilled_bytes(terms, nbytes, self.cache_bytes)
        moved = (terms.moved - reached) * self.beta + reached * self.reach + spill
        moving = max(moved, terms.flow * self.flow)
        busy = handling + moving + terms.combined * self.gamma
        return max(busy, terms.carried * self.sustained)


#: From these sizes on, arrays (REACHED_BYTES) can be in memory that peers reach, and peers read
#: chunks (UNCOPIED_BYTES) of them without a copy. The model assumes reachable memory for all
#: arrays, because it does not know where an array is (docs/shared-arrays.md).
REACHED_BYTES, UNCOPIED_BYTES = 8192, 4096
#: Oversubscription, k ranks per core. TURNS_S, in s per k squared: the extra time of an operation.
#: All k ranks run one after the other, and each polls a number of peers that grows with k. TURN_S,
#: in s per k: the extra time of a further step.
TURNS_S, TURN_S = 1e-6, 0.35e-6


def spilled_bytes(terms: Terms, nbytes: int, cache_bytes: int) -> float:
    """The number of bytes that miss the caches.

    Inside a host successive operations traverse memory in alternating directions, so only the
    excess over the caches misses. From two thirds of the caches on a part misses, because pages map
    to cache sets by chance. Between hosts no byte of a message that fits misses, and all bytes of a
    message 4 times as long as the caches.
    """
    if terms.touched:
        over, width = terms.touched - cache_bytes, cache_bytes / 3
        return max(over, 0.0) if abs(over) >= width else (over + width) ** 2 / (4 * width)
    return terms.moved * min(1.0, max(0.0, log2(max(nbytes, 1) / cache_bytes) / 2))


#: Built-in values, which are right in their order of magnitude; `pycoll tune` measures better ones.
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


#: Links between domains of a host, where `pycoll tune` has measured none. The first two values are
#: the latency and the cost of a byte of one rank, as multiples of those inside a domain. The third
#: is the s/byte of a domain's link, which its ranks share; docs/decisions/levels-inside-hosts.md
#: names the sources.
FAR_ALPHA, FAR_BETA, DOMAIN_BETA = 4.0, 2.0, 1 / 48e9


def between_domains(inside: Link) -> Link:
    """The assumed link between domains of a host, from the link inside a domain."""
    return Link(
        alpha=inside.alpha * FAR_ALPHA,
        beta=DOMAIN_BETA,
        gamma=inside.gamma,
        overhead=inside.overhead,
        flow=(inside.reach or inside.beta) * FAR_BETA,
        reach=inside.reach * FAR_BETA,
    )


class Parameters(NamedTuple):
    """The links inside hosts and across hosts, and the length of segments in bytes.

    ``origin`` is a text that names the source of the values. ``per_core`` is the number of ranks
    that share a core; work inside a host takes ``per_core`` times as long. ``between`` is the
    measured link between domains of one host; None: it is assumed, see `between_domains`.
    ``codecs``: the rates of codecs on one core.
    """

    inside: Link = LINKS["shm"]
    across: Link = LINKS["tcp"]
    segment_bytes: int = SEGMENT_BYTES
    origin: str = "built in"
    per_core: float = 1.0
    between: Link | None = None
    codecs: tuple[CodecRate, ...] = codec_rates.BUILT_IN

    @property
    def of_domains(self) -> Parameters:
        """The parameters of one host whose domains take the place of hosts."""
        return self._replace(across=self.between or between_domains(self.inside))

    @property
    def of_servers(self) -> Parameters:
        """The parameters of operations in which servers combine the values."""
        return self._replace(segment_bytes=min(self.segment_bytes, SERVED_SEGMENT_BYTES))

    def with_ranks_per_core(self, ranks_per_core: float) -> Parameters:
        """The parameters for several ranks per core, which take turns on it."""
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

    Inside hosts ``fetched`` is what the busiest rank moves if peers read sent data in place; it
    defaults to ``moved``. Across hosts ``moved`` is what all ranks of the busiest host move over
    its link, and ``flow`` the share of the busiest rank.
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
        """Bytes that the busiest rank moves if peers read sent data in place, in units of n."""
        return self.moved if self._fetched is None else self._fetched

    @fetched.setter
    def fetched(self, share: float) -> None:
        self._fetched = share


class Profile(NamedTuple):
    """The costs of tiles inside and across hosts: the ``first`` one, and a ``period`` per other.

    ``exposes``: peers on a host may read sent data in place. ``turns``: the balance of the work
    over the ranks, see oversubscription.py. ``touches``: bytes of memory that a core touches per
    byte moved. ``calls``: the number of operations; all but one of them are short and have one
    step. ``domains``: the hosts are domains of one host, so peers read in place across them too.
    """

    first: tuple[Load, Load]
    period: tuple[Load, Load]
    chunks: int
    exposes: bool = False
    turns: Turns = Turns()
    touches: float = 2.0
    calls: float = 1.0
    domains: bool = False

    def tiles(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> int:
        """The number of tiles into which a message of ``nbytes`` is cut."""
        return max(1, -(-nbytes // (self.chunks * segment_bytes)))

    def terms(self, nbytes: int, segment_bytes: int = SEGMENT_BYTES) -> tuple[Terms, Terms]:
        """The costs of the whole message inside hosts and across hosts."""
        tiles = self.tiles(nbytes, segment_bytes)
        part = nbytes / tiles
        inside = _terms(self.first[0], self.period[0], tiles - 1, part)
        reaches = self.exposes and nbytes >= max(REACHED_BYTES, self.chunks * UNCOPIED_BYTES)
        moved = inside.reached if reaches else inside.moved
        inside = inside._replace(moved=moved, reached=moved if reaches else 0.0)
        waits = inside.waits + self.calls - 1
        inside = inside._replace(waits=waits, touched=inside.moved * self.touches, calls=self.calls)
        across = _terms(self.first[1], self.period[1], tiles - 1, part)
        if reaches and self.domains:
            across = across._replace(flow=across.reached)
        return inside, across._replace(reached=0.0, carried=nbytes * self.period[1].moved)

    def seconds(self, nbytes: int, parameters: Parameters) -> float:
        """The predicted time of the whole message, in s."""
        inside, across = self.terms(nbytes, parameters.segment_bytes)
        if parameters.per_core > 1:
            each = self.period[0]
            fetches = each.fetched / each.moved if inside.reached else 1.0
            inside = self.turns.share_cores(inside, parameters.per_core, fetches)
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
