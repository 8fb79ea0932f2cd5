"""Worlds that are too large to be weighed cost what their schedules would say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import pytest

from pycoll.algorithms import Algorithm, lookup
from pycoll.cost.extrapolation import extrapolate
from pycoll.cost.forecast import with_links
from pycoll.cost.loads import SCHEDULE_SIZE_MAX, profile_of_schedule
from pycoll.cost.model import DEFAULT, Profile
from pycoll.cost.profiles import profile
from pycoll.cost.selection import candidates, choose, predict
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology

KIB, MIB = 1 << 10, 1 << 20
MESSAGES = (KIB, 64 * KIB, MIB, 64 * MIB, 1024 * MIB)
#: Built-in links, and a fabric that is about as fast as memory.
LINKS = (DEFAULT, with_links(DEFAULT, alpha=2e-6, beta=1 / 50e9))
LOCAL_SIZES = (1, 2, 4, 8)
#: Where larger schedules are drawn, which takes longer.
TWO_LOCAL_SIZES = (2, 8)
#: How far times may be off.
NEAR = 0.14
#: The same where steps or shares of a host follow no line: at radix 4 every second doubling makes a
#: step; which ranks of a host stand high in both trees changes from size to size.
UNEVEN = {"recursive_multiplying": 0.5, "tree": 0.4}
#: What combines pairs of ranks first where sizes are no powers of two.
FOLDING = ("halving_doubling", "recursive_doubling", "recursive_multiplying")
#: Of more chunks schedules take long to draw.
FEW_CHUNKS = 32


def word(one: object) -> str:
    return one.name.lower() if isinstance(one, Collective) else str(one)


def entries(kind: Collective, topology: Topology) -> Iterator[tuple[str, Algorithm]]:
    return ((name, lookup(kind, name)) for name in candidates(kind, topology))


def tolerance(name: str) -> float:
    return max((far for one, far in UNEVEN.items() if name.endswith(one)), default=NEAR)


@lru_cache(maxsize=512)
def weighed(one: Algorithm, topology: Topology) -> Profile:
    found = profile_of_schedule(one.build(topology.size, topology=topology), topology)
    return found._replace(exposes=one.exposes)


def ratios(kind: Collective, found: Profile, other: Profile) -> list[float]:
    sizes = (0,) if kind is Collective.BARRIER else MESSAGES
    return [found.seconds(n, links) / other.seconds(n, links) for n in sizes for links in LINKS]


def check(kind: Collective, name: str, found: Profile, counted: Profile, far: float) -> None:
    assert found.chunks == counted.chunks, name
    for ratio in ratios(kind, found, counted):
        assert 1 / (1 + far) <= ratio <= 1 + far, (name, ratio)


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_what_32_ranks_tell_of_64_the_schedules_confirm(kind: Collective) -> None:
    for local in LOCAL_SIZES:
        topology = Topology.even(64, 64 // local)
        for name, one in entries(kind, topology):
            found = extrapolate(one, topology, weighed_max=32)._replace(exposes=one.exposes)
            check(kind, name, found, weighed(one, topology), tolerance(name))


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_the_first_world_that_is_not_weighed_costs_what_its_schedule_says(
    kind: Collective,
) -> None:
    """72 ranks, where whatever folds begins to."""
    for local in TWO_LOCAL_SIZES:
        topology = Topology.even(72, 72 // local)
        assert topology.size > SCHEDULE_SIZE_MAX
        for name, one in entries(kind, topology):
            check(kind, name, profile(one, topology), weighed(one, topology), tolerance(name))


@pytest.mark.parametrize(("size", "hosts"), [(256, 32), (128, 4)])
@pytest.mark.parametrize("kind", Collective, ids=word)
def test_worlds_of_several_times_that_cost_what_their_schedules_say(
    kind: Collective, size: int, hosts: int
) -> None:
    topology = Topology.even(size, hosts)
    few = [
        (name, one)
        for name, one in entries(kind, topology)
        if one.cost(size, topology).chunks <= FEW_CHUNKS
        and not name.startswith(("one_shot", "direct"))
    ]
    for name, one in few:
        check(kind, name, profile(one, topology), weighed(one, topology), tolerance(name))


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_times_do_not_jump_where_weighing_ends(kind: Collective) -> None:
    """From 64 to 72 ranks they grow as steps do, but for what begins to fold."""
    for local in TWO_LOCAL_SIZES:
        small, large = (Topology.even(size, size // local) for size in (64, 72))
        for name, one in entries(kind, large):
            steps = one.cost(72, large).steps / one.cost(64, small).steps
            moved = ratios(kind, profile(one, large), weighed(one, small))
            assert min(moved) > 0.8, (local, name, min(moved))
            if not name.endswith((*FOLDING, *UNEVEN)):
                assert max(moved) < 1.25 * max(steps, 1), (local, name, max(moved))


def test_another_host_makes_long_messages_no_quicker_and_changes_no_choice() -> None:
    """Local work counts on both sides of 64 ranks, and hierarchies send tile behind tile."""
    fabric, nbytes = LINKS[1], 64 * MIB
    eight, nine = (Topology.even(hosts * 8, hosts) for hosts in (8, 9))
    for name in ("ring", "tree", "chain", "direct"):
        times = [predict(Collective.ALL_REDUCE, name, one, nbytes, fabric) for one in (eight, nine)]
        assert 0.98 * times[0] < times[1] < 1.3 * times[0], (name, times)
    chains = [
        predict(Collective.BROADCAST, "hierarchical:chain+chain", one, nbytes)
        for one in (eight, nine)
    ]
    assert chains[1] == pytest.approx(chains[0], rel=0.05)
    for hosts in (8, 9, 16, 64):
        topology = Topology.even(hosts * 8, hosts)
        choice = choose(Collective.ALL_REDUCE, topology, nbytes, parameters=fabric)
        assert choice.name.startswith("hierarchical"), (hosts, choice.name)


def test_ranks_dealt_out_in_turns_and_hosts_that_differ_are_told_of_too() -> None:
    dealt = Topology((tuple(rank % 12 for rank in range(96)),))
    for name in ("ring", "direct", "tree"):
        one = lookup(Collective.ALL_REDUCE, name)
        check(Collective.ALL_REDUCE, name, profile(one, dealt), weighed(one, dealt), 0.4)
    uneven = Topology.even(100, 9)
    assert not uneven.is_even
    for name in ("ring", "hierarchical"):
        one = lookup(Collective.ALL_REDUCE, name)
        found, counted = profile(one, uneven), weighed(one, uneven)
        for ratio in ratios(Collective.ALL_REDUCE, found, counted):
            assert 0.7 < ratio < 1.3, (name, ratio)
