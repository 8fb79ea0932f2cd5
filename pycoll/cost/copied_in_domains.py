"""The bytes that ranks copy between and inside domains of one host, counted from a schedule.

All ranks reach each other's memory, so each segment is copied once, by the side that the sender's
row names (`pycoll.plan.lowering.sending_rows`). A segment that the sender is to write, and that the
receiver combines or does not keep, is copied by both sides through slots. The memory of one rank
serves two readers at full speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from pycoll.cost.model import FAR_BETA
from pycoll.plan.lowering import sending_rows
from pycoll.schedule.copies import CopyStrategy
from pycoll.schedule.language import TOKEN

if TYPE_CHECKING:
    from pycoll.plan.lowering import SendingRow
    from pycoll.schedule.copies import Copies
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

    def __init__(self, schedule: Schedule, domains: tuple[int, ...], copies: Copies) -> None:
        self._domains = domains
        #: The data transfers between ranks, and the rows that send them.
        self.sent = [
            (t, row)
            for t, row in zip(schedule.transfers, sending_rows(schedule, copies), strict=True)
            if row is not None and t.chunk != TOKEN
        ]
        outputs = [schedule.outputs_of(rank) for rank in range(schedule.size)]

        def share_of(t: Transfer, row: SendingRow) -> float:
            if row.copies is not CopyStrategy.SENDER:
                return 0.5 if row.copies is CopyStrategy.SPLIT else 0.0
            stays = t.target < schedule.data_chunks
            stays = stays and t.target // schedule.parts in outputs[t.destination]
            return 1.0 if stays and not (t.reduce or t.partial) else 0.5

        #: By transfer: the share of the copy that its source makes.
        self._by_source = {id(t): share_of(t, row) for t, row in self.sent}

    def busiest(self, transfers: Iterable[Transfer]) -> Copied:
        """The copies of the rank, or of the memory, that takes longest for these transfers."""
        copies: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        reads: dict[int, float] = defaultdict(float)
        for t in transfers:
            share = self._by_source.get(id(t))
            if share is None:
                continue
            across = self._crosses(t)
            copies[t.source][across] += share
            copies[t.destination][across] += 1 - share
            reads[t.source] += 1 - share
        found = [Copied(*pair) for pair in copies.values()]
        found += [Copied(count / _READERS) for count in reads.values()]
        return max(found, key=lambda one: one.weight, default=Copied())

    def longest_path(self) -> Copied:
        """The copies until the last rank has a segment, if ranks do nothing else.

        A row writes a segment to all its receivers before one of them sees it.
        """
        written: dict[tuple[int, int], Copied] = defaultdict(Copied)
        for t, row in self.sent:
            if self._by_source[id(t)] == 1:
                key = (row.rank, row.row)
                written[key] = written[key].plus(self._crosses(t), 1.0)
        held: dict[tuple[int, int], Copied] = {}
        for t, row in self.sent:
            target = (t.destination, t.target)
            found = held.get((t.source, t.chunk), Copied())
            if self._by_source[id(t)] == 1:
                more = written[row.rank, row.row]
                found = Copied(found.inside + more.inside, found.across + more.across)
            else:
                found = found.plus(self._crosses(t), 1.0)
            held[target] = max(held.get(target, found), found, key=lambda one: one.weight)
        return max(held.values(), key=lambda one: one.weight, default=Copied())

    def _crosses(self, t: Transfer) -> bool:
        return self._domains[t.source] != self._domains[t.destination]
