"""Codes in plans: which algorithms carry them, and what the proof refuses."""

from __future__ import annotations

import random

import pytest

from pycoll import _core
from pycoll.algorithms import TABLE, Algorithm, lookup
from pycoll.cost.selection import CODED as HIERARCHIES
from pycoll.errors import InvalidArgumentError
from pycoll.plan.lowering import add_acknowledgements, lower, lower_all
from pycoll.plan.plan_format import ENCODE, pack, unpack
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import CODED, ROOTED, Collective
from pycoll.schedule.language import Schedule, ScheduleError
from pycoll.schedule.topology import Topology, single_host

FLAT = [
    one for kind in sorted(CODED) for one in TABLE[kind].values() if one.coded and not one.levels
]
SIZES = [*range(1, 14), 17, 33]
DAMAGED = [
    (Collective.ALL_REDUCE, "direct"),
    (Collective.ALL_GATHER, "ring"),
    (Collective.BROADCAST, "chain"),
    (Collective.REDUCE_SCATTER, "direct"),
]


def coded(algorithm: Algorithm, topology: Topology, root: int = 0) -> Schedule:
    schedule = algorithm.build(topology.size, topology=topology, root=root)
    return add_acknowledgements(algorithm.encode(schedule, topology))


def check(schedule: Schedule) -> None:
    verify_plans(lower_all(schedule), coded=schedule.coded, everyone_heard=True)


@pytest.mark.parametrize("algorithm", FLAT, ids=lambda one: f"{one.collective.name}-{one.name}")
def test_flat_algorithms_are_proved(algorithm: Algorithm) -> None:
    for size in SIZES:
        for root in {0, size - 1} if algorithm.collective in ROOTED else {0}:
            check(coded(algorithm, single_host(size), root))


@pytest.mark.parametrize("kind", sorted(HIERARCHIES), ids=lambda kind: kind.name)
def test_hierarchies_are_proved_and_encode_between_hosts_only(kind: Collective) -> None:
    for name in HIERARCHIES[kind]:
        for size, hosts in (
            (2, 2),
            (4, 2),
            (5, 2),
            (6, 3),
            (7, 3),
            (9, 3),
            (8, 8),
            (3, 1),
            (33, 5),
        ):
            topology = Topology.even(size, hosts)
            for root in {0, size - 1} if kind in ROOTED else {0}:
                check(coded(lookup(kind, name), topology, root))


def test_the_other_algorithms_are_refused_by_the_proof() -> None:
    """The flag in the table is what the proof says."""
    for kind in CODED:
        for algorithm in TABLE[kind].values():
            if algorithm.coded or algorithm.levels is not None:
                continue
            with pytest.raises(InvalidArgumentError, match="takes no codec: values would be"):
                algorithm.encode(algorithm.build(4), single_host(4))
            if algorithm.build(4).parts != TABLE[kind]["direct"].build(4).parts:
                continue  # provable, but blocks would begin at other places
            assert not any(
                is_proved(algorithm.build(size)._replace(coded=tuple(range(size))))
                for size in (5, 6, 8)
            ), algorithm.name


def is_proved(schedule: Schedule) -> bool:
    try:
        check(add_acknowledgements(schedule))
    except ScheduleError:
        return False
    return True


def test_one_rank_alone_rounds_too() -> None:
    schedule = coded(lookup(Collective.ALL_REDUCE, "direct"), single_host(1))
    text = str(_core.Plan(lower(schedule, 0)))
    assert text.splitlines()[-1] == "lane 0: chunk 0: in[0] -> out[0] (encode)"


def test_the_text_says_where_codes_travel() -> None:
    schedule = coded(lookup(Collective.ALL_REDUCE, "direct"), single_host(2))
    assert str(_core.Plan(lower(schedule, 0))).splitlines()[1:] == [
        "lane 0: chunk 1: in[1] -> codes send 1 (encode)",
        "lane 0: chunk 0: in[0] + codes recv 1 -> out[0], codes send 1 (final, encode)",
        "lane 0: chunk 1: codes recv 1 -> out[1]",
    ]


def test_the_codes_of_a_long_list_of_receivers_wait_in_scratch() -> None:
    """A row sends to eight peers at most; the others get the same codes, not new ones."""
    schedule = coded(lookup(Collective.ALL_REDUCE, "direct"), single_host(20))
    plan = unpack(lower(schedule, 0))
    encoding = [row for row in plan.rows if row.coded_local & ENCODE and row.chunk == 0]
    assert len(encoding) == 1
    passing = [row for row in plan.rows if row.passes_codes and row.coded_send]
    assert sum(len(row.send) for row in (*encoding, *passing)) == 19


def test_damaged_codes_are_refused() -> None:
    """A row that says something else about its codes is malformed or breaks the proof, unless it
    says the same to all: a value that nobody decodes."""
    tried = 0
    draw = random.Random(20261127)
    for kind, name in DAMAGED:
        for size in (2, 3, 5, 11):
            schedule = coded(lookup(kind, name), single_host(size))
            plans = lower_all(schedule)
            for _ in range(40):
                rank = draw.randrange(size)
                plan = unpack(plans[rank])
                at = draw.randrange(len(plan.rows))
                row = plan.rows[at]
                field = draw.choice(["coded_recv", "coded_send", "coded_local"])
                changed = getattr(row, field) ^ 1 << draw.randrange(3)
                rows = list(plan.rows)
                rows[at] = row._replace(**{field: changed})
                mutant = [*plans]
                mutant[rank] = pack(plan._replace(rows=tuple(rows)))
                tried += 1
                with pytest.raises(ScheduleError):
                    verify_plans(mutant, coded=schedule.coded)
    assert tried == 640


def test_collectives_without_codes_are_refused() -> None:
    plans = lower_all(lookup(Collective.GATHER, "direct").build(3))
    plan = unpack(plans[1])
    rows = (plan.rows[0]._replace(coded_send=1, coded_local=ENCODE, flags=0, copies=0),)
    with pytest.raises(ScheduleError, match="gather takes no codec"):
        verify_plans([plans[0], pack(plan._replace(rows=rows)), plans[2]])


def test_a_rank_that_decodes_cannot_encode_again() -> None:
    """Inside a host in full precision first, and from there to others: rounded anew."""
    schedule = lookup(Collective.BROADCAST, "chain").build(4)._replace(coded=(0, 0, 1, 2))
    with pytest.raises(ScheduleError, match="which it has decoded from others"):
        lower_all(schedule)
