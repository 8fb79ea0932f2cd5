"""What an algorithm costs ranks that take turns on a core.

With a core for each rank, the busiest one decides. Where several share one, it does the work of
them all: what ranks do on average counts, so that an algorithm by way of one rank is no worse than
one in which all do their part, unless that rank alone has more to do than a core's ranks together.

With 8 ranks on 2 cores, broadcast from the root itself took 0.5 of a double binary tree's time at
256 KiB and 0.6 at 4 MiB, and all_reduce by way of one rank 0.65 of the two-shot's from 4 to 8 KiB;
with 16 ranks 0.4 from 1 to 4 KiB.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pycoll.model import Terms
    from pycoll.schedule import Schedule


class Turns(NamedTuple):
    """``evenness``: what ranks send and receive on average, as a share of what the busiest one
    does. ``handed_on``: the share of transfers that are sums to be combined further; nobody reads
    those where they lie, since they were just made."""

    evenness: float = 1.0
    handed_on: float = 0.0

    def shared(self, terms: Terms, per_core: float, fetches: float = 1.0) -> Terms:
        """``terms`` of the busiest rank, for so many ranks on each core. ``fetches``: its share of
        ``moved``, by what it would be if all copied what they send and receive."""
        share = max(self.evenness, 1 / per_core)
        copies = max(self.evenness / fetches, 1 / per_core)
        return terms._replace(
            segments=terms.segments * share,
            moved=terms.moved * copies,
            touched=terms.touched * copies,
            combined=terms.combined * share,
            reached=terms.reached * copies * (1 - self.handed_on),
        )


def turns_of(schedule: Schedule) -> Turns:
    """Counted from the transfers, each of which moves as much as any other."""
    handled: Counter[int] = Counter()
    combined: set[tuple[int, int]] = set()
    handed_on = 0
    for t in schedule.transfers:
        handled.update((t.source, t.destination))
        handed_on += t.partial or (t.reduce and (t.source, t.chunk) in combined)
        if t.reduce:
            combined.add((t.destination, t.target))
    count = len(schedule.transfers)
    if count == 0:
        return Turns()
    return Turns(2 * count / schedule.size / max(handled.values()), handed_on / count)
