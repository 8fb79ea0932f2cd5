"""The model counts copies on the side that the rows of the plans name."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from pycoll.algorithms import TABLE, Algorithm, lookup
from pycoll.cost import loads, profiles
from pycoll.cost.copied_in_domains import SharedCopies
from pycoll.cost.copying import choose_copies, copied_in_place, kept_by
from pycoll.cost.model import DEFAULT, Parameters
from pycoll.cost.selection import HIERARCHIES, predict
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import TOKEN_ROW, unpack
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.copies import Copies, CopyStrategy
from pycoll.schedule.language import Schedule
from pycoll.schedule.topology import Topology, even_domains, single_host

KIB, MIB = 1 << 10, 1 << 20
#: One segment of each block, several, and more than the caches hold.
SIZES = (32 * KIB, 2 * MIB, 64 * MIB)
#: The share of a copy that the sender makes.
SHARE = {CopyStrategy.RECEIVER: 0.0, CopyStrategy.SPLIT: 0.5, CopyStrategy.SENDER: 1.0}
ALGORITHMS = [
    lookup(kind, name)
    for kind in Collective
    if kind is not Collective.BARRIER
    for name in dict.fromkeys((*TABLE[kind], *HIERARCHIES.get(kind, ())))
]

#: Strategies by (source, destination, lane), in the order in which the segments leave.
Sides = dict[tuple[int, int, int], list[CopyStrategy]]


def sides_of_rows(plans: list[bytes]) -> Sides:
    sides: Sides = defaultdict(list)
    for rank, plan in enumerate(map(unpack, plans)):
        for row in plan.rows:
            for end in row.send if row.chunk != TOKEN_ROW else ():
                peer, lane, _ = plan.channels[end]
                sides[rank, peer, lane].append(CopyStrategy(row.copies))
    return sides


class Spy(SharedCopies):
    """Keeps the last sides with which the model counted."""

    counted: Sides

    def __init__(self, schedule: Schedule, domains: tuple[int, ...], copies: Copies) -> None:
        super().__init__(schedule, domains, copies)
        Spy.counted = defaultdict(list)
        for t, row in self.sent:
            Spy.counted[t.source, t.destination, t.lane].append(row.copies)


@pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=lambda one: f"{one.collective.name.lower()}-{one.name}"
)
def test_domains_are_counted_with_the_sides_of_the_rows(
    algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "SharedCopies", Spy)
    kind = algorithm.collective
    for size, domains in ((4, 2), (7, 3), (12, 2), (20, 4)):
        topology = even_domains(single_host(size), domains)
        schedule = algorithm.build(size, topology=topology.by_domain)
        for nbytes in SIZES[:1] if kind in REDUCING else SIZES:
            profiles.profile.cache_clear()
            Spy.counted = {}
            predict(kind, algorithm.name, topology, nbytes)
            copies = choose_copies(kind, size, nbytes, DEFAULT)
            rows = sides_of_rows(lower_all(add_acknowledgements(schedule), copies))
            assert Spy.counted == (rows if algorithm.exposes else {}), (size, nbytes)
    profiles.profile.cache_clear()


def test_the_samples_have_every_side() -> None:
    """Own data of busy ranks is read up to the size of the caches, and written from there on."""
    found: Counter[tuple[Collective, CopyStrategy]] = Counter()
    for kind in (Collective.BROADCAST, Collective.GATHER, Collective.ALL_TO_ALL):
        for nbytes in SIZES:
            plans = lower_all(
                TABLE[kind]["direct"].build(2), choose_copies(kind, 2, nbytes, DEFAULT)
            )
            found.update((kind, side) for sides in sides_of_rows(plans).values() for side in sides)
    assert found[Collective.BROADCAST, CopyStrategy.SPLIT] == 3
    assert found[Collective.GATHER, CopyStrategy.RECEIVER] == 1
    assert found[Collective.GATHER, CopyStrategy.SENDER] == 2
    assert found[Collective.ALL_TO_ALL, CopyStrategy.RECEIVER] == 4
    assert found[Collective.ALL_TO_ALL, CopyStrategy.SENDER] == 2


@pytest.mark.parametrize("parameters", [DEFAULT, DEFAULT.with_ranks_per_core(2)])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_formulas_of_one_step_count_what_the_rows_copy(size: int, parameters: Parameters) -> None:
    """No rank passes on what it has received, so the formula has the strategy of all rows."""
    for kind in Collective:
        if kind in REDUCING or kind is Collective.BARRIER:
            continue
        algorithm, root = TABLE[kind]["direct"], 0
        for nbytes in SIZES:
            copies = choose_copies(kind, size, nbytes, parameters)
            plans = lower_all(algorithm.build(size, root=root), copies)
            copied: dict[int, float] = defaultdict(float)
            for (source, destination, _), sides in sides_of_rows(plans).items():
                for side in sides:
                    copied[source] += SHARE[side]
                    copied[destination] += 1 - SHARE[side]
            chunks = loads.message_chunks(algorithm.build(size))
            rooted = kind in (Collective.GATHER, Collective.SCATTER)
            most = max(
                copied[rank] / chunks + kept_by(kind, size) * (not rooted or rank == root)
                for rank in range(size)
            )
            counted = copied_in_place(kind, size, algorithm.cost(size), copies)
            assert counted == pytest.approx(most), (kind, nbytes, copies)
            shape = profiles.profile(algorithm, single_host(size), copies=copies)
            read = float(algorithm.cost(size).handled) / 2
            assert shape.period[0].fetched == pytest.approx(max(most, read)), (kind, nbytes)


def test_profiles_of_several_hosts_count_no_side() -> None:
    """So one profile serves all sizes of messages."""
    topology = Topology.even(8, 2)
    profiles.profile.cache_clear()
    for nbytes in SIZES:
        predict(Collective.ALL_GATHER, "ring", topology, nbytes)
    assert profiles.profile.cache_info().misses == 1
