"""The cost of an algorithm on oversubscribed cores, where several ranks share a core.

If each rank has a core, the busiest rank determines the time. If several ranks share a core, the
core does the work of all of them, so the average work of a rank counts. An algorithm that works
through one rank is then no worse than one that balances the work. The exception is a rank with more
work than the ranks of a core together.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pycoll.cost.model import Terms
    from pycoll.schedule.language import Schedule


class Turns(NamedTuple):
    """The balance of an algorithm's work over the ranks.

    ``evenness``: the average number of bytes that a rank sends and receives, as a share of that of
    the busiest rank. ``handed_on``: the share of transfers that are partial sums to be combined
    further; receivers never read those in place, because they have just been made.
    """

    evenness: float = 1.0
    handed_on: float = 0.0

    def share_cores(self, terms: Terms, per_core: float, fetches: float = 1.0) -> Terms:
        """Converts ``terms`` of the busiest rank to ``per_core`` ranks per core.

        ``fetches``: ``moved`` of the busiest rank, divided by its value if all ranks copied what
        they send and receive.
        """
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
    """Counts the balance from the transfers, each of which moves the same number of bytes."""
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
