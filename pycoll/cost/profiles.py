"""The profile of an algorithm on a topology, from which the model predicts its time.

On one host, where all links are equal, the profile comes from the cost formula. On several hosts it
comes from the transfers of the schedule. For worlds too large to build their schedules, it is
extrapolated from smaller worlds (extrapolation.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from pycoll.cost.copying import copied_in_place, kept_by
from pycoll.cost.extrapolation import extrapolate
from pycoll.cost.loads import (
    SCHEDULE_SIZE_MAX,
    first_of,
    load_inside,
    profile_of_domains,
    profile_of_schedule,
    streams,
)
from pycoll.cost.model import Load, Profile
from pycoll.cost.oversubscription import Turns, turns_of
from pycoll.schedule.collectives import Collective
from pycoll.schedule.copies import USUAL

if TYPE_CHECKING:
    from pycoll.algorithms import Algorithm
    from pycoll.schedule.copies import Copies
    from pycoll.schedule.topology import Topology


@lru_cache(maxsize=1024)
def profile(
    algorithm: Algorithm,
    topology: Topology,
    oversubscribed: bool = False,
    domains: bool = False,
    copies: Copies = USUAL,
) -> Profile:
    """The work of the algorithm on this topology, with root 0.

    ``copies``: what `choose_copies` chose for the plan. It counts where all ranks are on one host
    and read in place. If ``oversubscribed`` is set, ranks share cores, and the profile includes the
    balance of the work. ``domains``: the hosts of ``topology`` are domains of one host.
    """
    size = topology.size
    counted = len(topology.hosts) > 1 and size <= SCHEDULE_SIZE_MAX
    # Formulas count the busiest rank, and servers are busy with other work than workers.
    if domains and counted and algorithm.exposes:
        found = profile_of_domains(algorithm.build(size, topology=topology), topology, copies)
    elif topology.servers or counted:
        found = profile_of_schedule(algorithm.build(size, topology=topology), topology)
    else:
        found = profile_of_costs(algorithm, topology, copies)
    alone = len(topology.hosts) == 1
    takes_turns = oversubscribed and alone and size <= SCHEDULE_SIZE_MAX
    turns = turns_of(algorithm.build(size, topology=topology)) if takes_turns else Turns()
    # A copy touches two places; a reduction in place reads and writes one.
    touches = 1.0 if algorithm.collective is Collective.ALL_REDUCE else 2.0
    # The root of a scatter first announces the shape in a short operation.
    announces = algorithm.collective is Collective.SCATTER and alone and size > 1
    return found._replace(
        exposes=algorithm.exposes, turns=turns, touches=touches, calls=2.0 if announces else 1.0
    )


def profile_of_costs(algorithm: Algorithm, topology: Topology, copies: Copies = USUAL) -> Profile:
    """The profile from the formula; on several hosts it is extrapolated from smaller schedules."""
    if len(topology.hosts) > 1:
        return extrapolate(algorithm, topology)
    cost = algorithm.cost(topology.size)
    period = load_inside(cost)
    first = first_of(period, cost.steps, cost.chunks)
    period.waits = 0 if streams(algorithm) else max(cost.steps - 1, 0)
    collective, size = algorithm.collective, topology.size
    for load in (first, period):
        load.moved += kept_by(collective, size)
    copied = copied_in_place(collective, size, cost, copies)
    # The memory of one rank serves at most two concurrent readers at full speed.
    period.fetched = max(copied, float(cost.handled) / 2)
    first.fetched = max(period.fetched, cost.steps / cost.chunks)
    return Profile((first, Load()), (period, Load()), cost.chunks)
