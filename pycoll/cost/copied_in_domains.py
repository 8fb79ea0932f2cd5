"""The bytes that ranks copy between and inside domains of one host, counted from a schedule.

All ranks reach each other's memory, so each segment is copied once, by one side
(`pycoll.plan.lowering` chooses it). A rank that passes on a segment that it has just received
writes it into the output of each receiver. Other segments are read by their receivers, except for
partial sums, which are copied by both sides through slots. The memory of one rank serves two
readers at full speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pycoll.cost.model import FAR_BETA
from pycoll.schedule.language import TOKEN

if TYPE_CHECKING:
    from pycoll.schedule.language import Schedule, Transfer

#: The readers that the memory of one rank serves at full speed.
_READERS = 2


class Copied(NamedTuple):
    """The chunks that the busiest rank copies inside its domain and between domains."""

    inside: float = 0.0
    across: float = 0.0

    @property
    def weight(self) -> float:
        """The time, in units of a copy inside a domain."""
        return self.inside + FAR_BETA * self.across

    def plus(self, across: bool, share: float) -> Copied:
        """These copies and one more."""
        return Copied(self.inside + share * (not across), self.across + share * across)


class SharedCopies:
    """The sides that copy the transfers of ``schedule``; ``domains`` are labels of the ranks."""

    def __init__(self, schedule: Schedule, domains: tuple[int, ...]) -> None:
        self._schedule, self._domains = schedule, domains
        #: By transfer: the share of the copy that its source makes.
        self._by_source: dict[int, float] = {}
        arrived: set[tuple[int, int]] = set()
        arriving: list[tuple[int, int]] = []
        outputs = [schedule.outputs_of(rank) for rank in range(schedule.size)]
        step = -1
        for t in schedule.transfers:
            if t.step != step:
                arrived.update(arriving)
                arriving, step = [], t.step
            if t.chunk == TOKEN:
                continue
            stays = t.target < schedule.data_chunks
            stays = stays and t.target // schedule.parts in outputs[t.destination]
            share = 0.0
            if (t.source, t.chunk) in arrived:
                share = 1.0 if stays and not (t.reduce or t.partial) else 0.5
            self._by_source[id(t)] = share
            arriving.append((t.destination, t.target))

    def busiest(self, transfers: Iterable[Transfer]) -> Copied:
        """The copies of the rank, or of the memory, that takes longest for these transfers."""
        copies: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        reads: dict[int, float] = defaultdict(float)
        for t in transfers:
            if t.chunk == TOKEN:
                continue
            across = self._crosses(t)
            share = self._by_source[id(t)]
            copies[t.source][across] += share
            copies[t.destination][across] += 1 - share
            reads[t.source] += 1 - share
        found = [Copied(*pair) for pair in copies.values()]
        found += [Copied(count / _READERS) for count in reads.values()]
        return max(found, key=lambda one: one.weight, default=Copied())

    def longest_path(self) -> Copied:
        """The copies until the last rank has a segment, if ranks do nothing else.

        A rank writes a segment that it passes on to all its receivers before one of them sees it,
        because one row does so.
        """
        written: dict[tuple[int, int], Copied] = {}
        for t in self._moving():
            if self._by_source[id(t)] == 1:
                place = (t.source, t.chunk)
                written[place] = written.get(place, Copied()).plus(self._crosses(t), 1.0)
        held: dict[tuple[int, int], Copied] = {}
        for t in self._moving():
            place, target = (t.source, t.chunk), (t.destination, t.target)
            found = held.get(place, Copied())
            if self._by_source[id(t)] == 1:
                more = written[place]
                found = Copied(found.inside + more.inside, found.across + more.across)
            else:
                found = found.plus(self._crosses(t), 1.0)
            held[target] = max(held.get(target, found), found, key=lambda one: one.weight)
        return max(held.values(), key=lambda one: one.weight, default=Copied())

    def _moving(self) -> Iterator[Transfer]:
        return (t for t in self._schedule.transfers if t.chunk != TOKEN)

    def _crosses(self, t: Transfer) -> bool:
        return self._domains[t.source] != self._domains[t.destination]
