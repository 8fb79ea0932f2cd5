"""The work of a message through servers, as the cost formulas of the algorithms count it."""

from __future__ import annotations

from typing import NamedTuple

from pycoll.algorithms import lookup
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import single_host


class ServedWork(NamedTuple):
    """The bytes of a message of n bytes, in units of n.

    ``carried``: on the busiest link, each way. ``combined``: by the busiest rank that combines.
    """

    carried: float
    combined: float


def served_work(workers: int, servers: int) -> ServedWork:
    """The work where ``workers`` and ``servers`` have a link each, in the best split.

    With as many servers as workers or more, the servers combine all values. With fewer the workers
    combine a share as well; with 0 they combine all. These are the formulas of ``servers_mixed``,
    from which the choice of an algorithm follows too.
    """
    size = workers + servers
    found = lookup(Collective.ALL_REDUCE, "servers_mixed").cost(
        size, single_host(size).serving(servers)
    )
    return ServedWork(float(max(found.sent, found.received)), float(found.reduced))
