"""Every algorithm of the table, lowered: the plans of all ranks are proved, run, and mutated."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from mutants import judge_plans, judge_schedules
from simulate import plans_are_right

from pycoll.algorithms import TABLE, Algorithm
from pycoll.plan.lowering import add_acknowledgements, lower, lower_all
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import ROOTED
from pycoll.schedule.language import Schedule
from pycoll.schedule.proof import hears_all, verify_schedule
from pycoll.schedule.topology import Topology

ENTRIES = [algorithm for entries in TABLE.values() for algorithm in entries.values()]
each_algorithm = pytest.mark.parametrize(
    "algorithm", ENTRIES, ids=[f"{a.collective.name.lower()}-{a.name}" for a in ENTRIES]
)


def cases(algorithm: Algorithm, size: int) -> Iterator[dict[str, object]]:
    """The options to build it with: some roots, some topologies."""
    topologies: list[Topology | None] = [None]
    if algorithm.needs_topology:
        hosts = {1, 2, size} & set(range(1, size + 1))
        topologies = [Topology.even(size, count) for count in sorted(hosts)]
    roots = {0, size // 2, size - 1} if algorithm.collective in ROOTED else {0}
    for topology in topologies:
        for root in sorted(roots):
            yield {"root": root, "topology": topology}


def check(algorithm: Algorithm, size: int, options: dict[str, object]) -> Schedule:
    schedule = algorithm.build(size, **options)
    verify_schedule(schedule)
    whole = add_acknowledgements(schedule)
    assert hears_all(whole)
    plans = lower_all(whole)
    verify_plans(plans, everyone_heard=True)
    rng = random.Random(size)
    tiles = [rng.randint(1, 3) for _ in range(schedule.data_chunks)]
    verify_plans(plans, tiles_of=tiles.__getitem__, everyone_heard=True)
    for rank in {0, size // 2, size - 1}:
        part = algorithm.build(size, only=rank, **options)
        assert lower(add_acknowledgements(part), rank) == plans[rank], f"rank {rank}, {options}"
    if size <= 6:
        assert plans_are_right(plans, seed=size, runs=2, everyone_heard=True), options
    return whole


@each_algorithm
def test_plans_of_every_algorithm_are_proved(algorithm: Algorithm) -> None:
    for size in (1, 2, 3, 4, 5, 6, 8, 9):
        for options in cases(algorithm, size):
            check(algorithm, size, options)


@each_algorithm
def test_damaged_plans_of_every_algorithm_are_refused_or_harmless(algorithm: Algorithm) -> None:
    for size in (3, 4):
        options = list(cases(algorithm, size))[-1]
        name = f"{algorithm.collective.name} {algorithm.name} of {size}"
        schedule = algorithm.build(size, **options)
        tried, refused = judge_plans(name, add_acknowledgements(schedule))
        assert tried >= 30 and refused * 2 >= tried, f"{name}: {refused} of {tried}"
        tried, refused = judge_schedules(name, schedule)
        assert refused * 3 >= tried, f"{name}: {refused} of {tried}"
