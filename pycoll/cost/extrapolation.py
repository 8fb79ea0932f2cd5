"""Profiles of worlds that are too large to count their schedules transfer by transfer.

The profile is extrapolated from counted worlds of the same kind: with the same number of ranks per
host if that fits, but fewer hosts, and again with half as many. The *guide* of a figure is the
value that the cost formula gives for all links together. A figure is extrapolated as a straight
line over its guide. A ring, for example, keeps the same share of its bytes inside hosts for any
number of hosts, and recursive doubling the same number of steps.

    hosts of 8:   4 x 8, 8 x 8                                      -> 128 x 8
    hosts of 32:  2 x 8, 4 x 8 -> 128 x 8;  2 x 16, 4 x 16 -> 128 x 16;  both -> 128 x 32

The line passes through the largest counted world, so predictions are continuous there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from pycoll.cost.loads import (
    SCHEDULE_SIZE_MAX,
    first_of,
    load_across,
    load_inside,
    profile_of_schedule,
)
from pycoll.cost.model import Load, Profile
from pycoll.schedule.topology import Topology

if TYPE_CHECKING:
    from pycoll.algorithms import Algorithm

#: The least number of hosts of a counted world, if the world to predict has as many.
_HOSTS = 4


class _World(NamedTuple):
    """A world of equal hosts with ``local`` ranks each.

    ``dealt``: ranks were assigned to the hosts round-robin instead of host by host.
    """

    hosts: int
    local: int
    dealt: bool = False

    @property
    def size(self) -> int:
        return self.hosts * self.local

    @property
    def topology(self) -> Topology:
        if self.dealt:
            return Topology((tuple(rank % self.hosts for rank in range(self.size)),))
        return Topology.even(self.size, self.hosts)


class _Figures(NamedTuple):
    """A profile in numbers that grow linearly.

    ``counts`` has counts of chunks instead of shares of the message. ``sharing`` has, per load, the
    number of ranks that share the link of their host instead of the bytes that they move together.
    """

    counts: tuple[float, ...]
    sharing: tuple[float, ...]
    chunks: int


def extrapolate(
    algorithm: Algorithm, topology: Topology, weighed_max: int = SCHEDULE_SIZE_MAX
) -> Profile:
    """The profile on several hosts, from schedules of at most ``weighed_max`` ranks.

    Hosts are assumed to be equal. If the ranks of a host are not consecutive, ranks are assumed to
    be assigned to the hosts round-robin.
    """
    world = _alike(algorithm, topology)
    locals_ = [world.local]
    limit = weighed_max // min(world.hosts, _HOSTS)
    if world.local > limit:
        locals_ = _smaller(world.local, limit, 1)[-2:]
    lines = [_along_hosts(algorithm, world._replace(local=n), weighed_max) for n in locals_]
    if len(lines) == 1:
        return _profile_of(lines[0])
    guides = [_guide(algorithm, world._replace(local=n)) for n in (*locals_, world.local)]
    reach = (world.local - locals_[0]) / (locals_[1] - locals_[0])
    sharing = [
        one + max(two - one, 0.0) * reach
        for one, two in zip(lines[0].sharing, lines[1].sharing, strict=True)
    ]
    return _profile_of(_line(lines, guides)._replace(sharing=tuple(sharing)))


def _alike(algorithm: Algorithm, topology: Topology) -> _World:
    """The world of equal hosts that is most similar to ``topology``."""
    largest = max(len(members) for members in topology.hosts)
    if algorithm.needs_topology:
        return _World(len(topology.hosts), largest)
    dealt = any(members[-1] - members[0] >= len(members) for members in topology.hosts)
    return _World(max(2, round(topology.size / largest)), largest, dealt)


def _along_hosts(algorithm: Algorithm, world: _World, weighed_max: int) -> _Figures:
    """The figures from worlds with fewer hosts, or from the schedule of a small world."""
    limit = weighed_max // world.local
    if world.hosts <= limit:
        return _figures_from_schedule(algorithm, world)
    numbers = _smaller(world.hosts, limit, world.local)
    worlds = [world._replace(hosts=n) for n in numbers]
    guides = [_guide(algorithm, one) for one in (*worlds, world)]
    return _line([_figures_from_schedule(algorithm, one) for one in worlds], guides)


def _smaller(number: int, limit: int, factor: int) -> list[int]:
    """Up to three smaller numbers, at least 2, ascending: halved until they are at most ``limit``.

    A number that is no power of two (with ``factor``) gives other such numbers, because some
    algorithms fold ranks there.
    """
    alike = _is_power(number * factor)
    halved: float = number
    while halved > limit:
        halved /= 2
    found: list[int] = []
    while halved >= 1.5 and len(found) < 3:
        near = sorted(range(2, limit + 1), key=lambda n: abs(n - halved))
        fitting = (n for n in near[:2] if _is_power(n * factor) is alike)
        found.append(next(fitting, near[0]))
        halved, limit = found[-1] / 2, found[-1] - 1
    return found[::-1]


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0


def _line(known: list[_Figures], guides: list[_Figures]) -> _Figures:
    """The figures at the last guide, extrapolated from the largest known figures.

    The slope is taken to the nearest smaller world whose guide differs, because the steps of a
    radix-4 algorithm grow with every second doubling only.
    """
    high = known[-1]

    def extend_count(i: int) -> float:
        *earlier, near, wanted = (guide.counts[i] for guide in guides)
        for figures, guide in zip(known[-2::-1], earlier[::-1], strict=True):
            if guide != near:
                slope = max(high.counts[i] - figures.counts[i], 0.0) / (near - guide)
                return high.counts[i] + slope * (wanted - near)
        return high.counts[i]

    counts = tuple(extend_count(i) for i in range(len(high.counts)))
    return _Figures(counts, high.sharing, guides[-1].chunks)


@lru_cache(maxsize=1024)
def _figures_from_schedule(algorithm: Algorithm, world: _World) -> _Figures:
    """The figures counted from the schedule of ``world``."""
    topology = world.topology
    schedule = algorithm.build(world.size, topology=topology)
    return _figures_of(profile_of_schedule(schedule, topology))


@lru_cache(maxsize=1024)
def _guide(algorithm: Algorithm, world: _World) -> _Figures:
    """The figures of the formula; for a flat algorithm, all work counts both inside and across."""
    if algorithm.levels is not None:
        near, far, _ = algorithm.levels(world.topology)
    else:
        near = far = algorithm.cost(world.size)
    inside, across = load_inside(near), load_across(far)
    first = (
        first_of(inside, near.steps, near.chunks),
        first_of(across, far.steps, far.chunks),
    )
    inside.waits, across.waits = near.steps, far.steps
    for load in (first[1], across):
        load.flow = load.moved
    return _figures_of(Profile(first, (inside, across), near.chunks))


def _figures_of(profile: Profile) -> _Figures:
    counts, sharing = [], []
    for inside, across in (profile.first, profile.period):
        for load, moved in ((inside, inside.moved), (across, across.flow)):
            shares = (moved * profile.chunks, load.combined * profile.chunks)
            counts += [load.waits, load.segments, *shares]
        sharing.append(across.moved / across.flow if across.flow else 1.0)
    return _Figures(tuple(counts), tuple(sharing), profile.chunks)


def _profile_of(figures: _Figures) -> Profile:
    loads = []
    for i in range(0, len(figures.counts), 4):
        waits, segments, moved, combined = figures.counts[i : i + 4]
        loads.append(Load(waits, segments, moved / figures.chunks, combined / figures.chunks))
    for across, ranks in zip(loads[1::2], figures.sharing, strict=True):
        across.flow = across.moved
        across.moved *= ranks
    return Profile((loads[0], loads[1]), (loads[2], loads[3]), figures.chunks)
