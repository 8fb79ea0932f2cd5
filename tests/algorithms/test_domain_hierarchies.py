"""Hierarchies over the domains of one host: proved for 1 to 33 ranks, lowered, proved again."""

from __future__ import annotations

import pytest

from pycoll.algorithms import HIERARCHIES, lookup
from pycoll.cost.model import DEFAULT
from pycoll.cost.selection import HIERARCHIES as OTHERS
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import Collective
from pycoll.schedule.proof import verify_schedule
from pycoll.schedule.topology import Topology, single_host, with_domains

#: How ranks lie in caches and, where there are two, memory domains of one host.
SHAPES = {
    "even": lambda rank: (rank // 4,),
    "interleaved": lambda rank: (rank % 3,),
    "uneven": lambda rank: (min(rank // 5, rank % 7),),
    "caches of two nodes": lambda rank: (rank // 3, rank // 12),
    "uneven caches of uneven nodes": lambda rank: (rank // (2 + rank % 2), rank // 13),
}


def host_of(shape: str, size: int) -> Topology:
    names = [SHAPES[shape](rank) for rank in range(size)]
    return with_domains(single_host(size), *zip(*names, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_has_levels_inside_the_host(shape: str) -> None:
    assert host_of(shape, 33).inner
    assert host_of(shape, 1).by_domain == single_host(1)


@pytest.mark.parametrize("kind", HIERARCHIES, ids=lambda kind: kind.name.lower())
def test_hierarchies_over_domains_are_proved(kind: Collective) -> None:
    names = ("hierarchical", *OTHERS.get(kind, ()))
    shapes = list(SHAPES)
    proved = 0
    for size in range(1, 34):
        # Every size meets a shape and a name, and every shape and name many sizes.
        shape, name = shapes[size % len(shapes)], names[size % len(names)]
        topology = host_of(shape, size).by_domain
        schedule = lookup(kind, name).build(size, topology=topology)
        verify_schedule(schedule)
        verify_plans(lower_all(add_acknowledgements(schedule)), everyone_heard=True)
        proved += len(topology.hosts) > 1
    assert proved > 20


@pytest.mark.parametrize("kind", HIERARCHIES, ids=lambda kind: kind.name.lower())
def test_hierarchies_of_64_cores_are_proved(kind: Collective) -> None:
    """Eight cores share a cache, and four caches a memory."""
    caches, memories = zip(*((rank // 8, rank // 32) for rank in range(64)), strict=True)
    topology = with_domains(single_host(64), caches, memories).by_domain
    assert len(topology.hosts) > 1
    for name in ("hierarchical", *OTHERS.get(kind, ())):
        schedule = lookup(kind, name).build(64, topology=topology)
        verify_schedule(schedule)
        verify_plans(lower_all(add_acknowledgements(schedule)), everyone_heard=True)


def test_domains_below_an_oversubscribed_host_are_not_followed() -> None:
    from pycoll.cost.selection import followed_topology

    host = host_of("even", 16)
    assert followed_topology(host, DEFAULT).hosts == host.by_domain.hosts
    assert followed_topology(host, DEFAULT.with_ranks_per_core(2)) is host
