"""Hierarchical algorithms: links inside hosts move most data, links across move each byte once.

    all_reduce over 2 hosts of 2:     inside        across         inside
                                      scatter       per shard      gather
      host A: ranks 0 1               0:s0 1:s1     0-2: s0        0<->1
      host B: ranks 2 3               2:s0 3:s1     1-3: s1        2<->3

Every phase is an ordinary algorithm on a group of ranks, whose chunks map to chunks of the whole.
With several levels the phase across hosts is a hierarchy itself. Hosts may have different numbers
of ranks: on a host of g ranks the rank with local rank s mod g owns shard s.

The cost in steps is the sum over the phases. Across hosts a rank sends its shard only: n/g bytes
for an all_reduce on hosts of g ranks, times the factor of the outer algorithm. `Algorithm.levels`
gives both parts.

Source: Cho et al., "BlueConnect: decomposing all-reduce for deep learning on heterogeneous network
hierarchy", MLSys 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import lcm
from typing import NamedTuple

from pycoll.algorithms.algorithm import Algorithm, Levels
from pycoll.algorithms.composition import Composition, Group, Phase, levels, run, total
from pycoll.algorithms.formulas import Cost
from pycoll.algorithms.pattern import finish
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import TOKEN, Schedule
from pycoll.schedule.topology import Topology

Table = Mapping[Collective, Mapping[str, Algorithm]]

#: Maps a reduce_scatter to the all_gather that inverts it, where the names differ.
BACK = {"halving_doubling": "recursive_doubling"}


class Parts(NamedTuple):
    """The sources of the phases: the table, the names of both algorithms, and the topology."""

    table: Table
    inner: str
    outer: str
    topology: Topology

    def inside(self, collective: Collective) -> Algorithm:
        """The algorithm inside hosts."""
        names = self.table[collective]
        return names[self.inner if self.inner in names else BACK[self.inner]]

    def across(self, collective: Collective, groups: Sequence[Group]) -> Phase:
        """The phase across hosts; it is a hierarchy itself if there are levels above hosts."""
        outer = self.table[collective].get(self.outer)
        if outer is not None and outer.serves:
            return Phase(outer, groups, True, self._topology_with_servers())
        above = self.topology.above()
        if above is None:
            return Phase(self.table[collective][self.outer], groups, True)
        algorithm = compose(self.table, collective, self.inner, self.outer)
        return Phase(algorithm, groups, True, above)

    def _topology_with_servers(self) -> Topology:
        """One worker of each host, and all servers, each on a host of its own."""
        servers = self.topology.servers
        size = len(self.topology.workers.hosts) + servers
        return Topology.even(size, size).serving(servers)

    def sharing(self, shard: int) -> tuple[int, ...]:
        """The ranks that run a shard's phase across hosts: its owners, then the servers."""
        size = self.topology.size
        return (
            *owners(self.topology.workers, shard),
            *range(size - self.topology.servers, size),
        )


def shard_count(topology: Topology) -> int:
    """The number of shards: one per rank of the largest host."""
    return max(len(members) for members in topology.hosts)


def owners(topology: Topology, shard: int) -> tuple[int, ...]:
    """The rank of each host that owns the shard."""
    return tuple(members[shard % len(members)] for members in topology.hosts)


def all_reduce(use: Parts, root: int) -> Composition:
    """Reduce_scatter inside hosts, all_reduce across hosts per shard, all_gather inside hosts."""
    topology = use.topology.workers
    shards = shard_count(topology)
    across = use.across(Collective.ALL_REDUCE, ())
    parts = parts_of(across, len(use.sharing(0)))

    @cache
    def shares(members: int) -> list[list[int]]:
        return [
            [s * parts + i for s in range(place, shards, members) for i in range(parts)]
            for place in range(members)
        ]

    inside = [Group(members, shares(len(members))) for members in topology.hosts]
    per_shard = [Group(use.sharing(s), [range(s * parts, (s + 1) * parts)]) for s in range(shards)]
    phases = [
        Phase(use.inside(Collective.REDUCE_SCATTER), inside),
        use.across(Collective.ALL_REDUCE, per_shard),
        Phase(use.inside(Collective.ALL_GATHER), inside),
    ]
    return Composition(shards * parts, phases)


def all_reduce_by_leaders(use: Parts, root: int) -> Composition:
    """Reduce to one leader per host, all_reduce among leaders, broadcast; for short messages."""
    hosts = use.topology.workers.hosts
    up, down = use.inside(Collective.REDUCE), use.inside(Collective.BROADCAST)
    parts = parts_of(use.across(Collective.ALL_REDUCE, ()), len(use.sharing(0)))
    for members in hosts:
        parts = lcm(parts, *(parts_of(Phase(way, ()), len(members)) for way in (up, down)))
    everything = [range(parts)]
    inside = [Group(members, everything) for members in hosts]
    leaders = Group(use.sharing(0), everything)
    return Composition(
        parts,
        [Phase(up, inside), use.across(Collective.ALL_REDUCE, [leaders]), Phase(down, inside)],
    )


def spread_blocks(topology: Topology) -> tuple[list[Group], list[Group]]:
    """Groups inside hosts and across hosts for collectives with one block per rank.

    On every host of g ranks, the block of a rank belongs to the rank whose local rank is the
    block's local rank modulo g.
    """
    hosts = topology.hosts

    @cache
    def shares(members: int) -> list[list[int]]:
        kept: list[list[int]] = [[] for _ in range(members)]
        for block, place in enumerate(topology.places):
            kept[place % members].append(block)
        return kept

    inside = [Group(members, shares(len(members))) for members in hosts]
    across = [
        Group(owners(topology, place), [members[place : place + 1] for members in hosts])
        for place in range(shard_count(topology))
    ]
    return inside, across


def reduce_scatter(use: Parts, root: int) -> Composition:
    """Reduce_scatter inside hosts, on the blocks of each local rank, then across hosts."""
    inside, across = spread_blocks(use.topology)
    phases = [
        Phase(use.inside(Collective.REDUCE_SCATTER), inside),
        use.across(Collective.REDUCE_SCATTER, across),
    ]
    return Composition(1, phases)


def all_gather(use: Parts, root: int) -> Composition:
    """All_gather across hosts, on the blocks of each local rank, then inside hosts."""
    inside, across = spread_blocks(use.topology)
    phases = [
        use.across(Collective.ALL_GATHER, across),
        Phase(use.inside(Collective.ALL_GATHER), inside),
    ]
    return Composition(1, phases)


def rooted_phases(use: Parts, root: int, collective: Collective) -> tuple[int, Phase, Phase]:
    """The number of parts, the phase across leaders and that inside hosts of a broadcast or reduce.

    The root is the leader of its host.
    """
    topology = use.topology
    home = topology.host_of(root)
    leaders = [members[0] for members in topology.hosts]
    leaders[home] = root
    inside = use.inside(collective)
    parts = parts_of(use.across(collective, ()), len(leaders))
    for members in topology.hosts:
        parts = lcm(parts, parts_of(Phase(inside, ()), len(members)))
    everything = [range(parts)]
    groups = [
        Group(members, everything, members.index(leader))
        for members, leader in zip(topology.hosts, leaders, strict=True)
    ]
    across = use.across(collective, [Group(leaders, everything, home)])
    return parts, across, Phase(inside, groups)


def broadcast(use: Parts, root: int) -> Composition:
    """Broadcast from the root to one leader per host, then inside hosts."""
    parts, across, inside = rooted_phases(use, root, Collective.BROADCAST)
    return Composition(parts, [across, inside])


def reduce(use: Parts, root: int) -> Composition:
    """Reduce inside hosts to one leader per host, then across hosts."""
    parts, across, inside = rooted_phases(use, root, Collective.REDUCE)
    return Composition(parts, [inside, across])


def by_host(use: Parts, root: int, collective: Collective) -> tuple[Phase, Phase]:
    """(phase across leaders, phase inside hosts) of a gather or scatter.

    A leader handles all blocks of its host.
    """
    _, across, inside = rooted_phases(use, root, collective)
    hosts = use.topology.hosts
    groups = [
        Group(group.members, [(rank,) for rank in group.members], group.root)
        for group in inside.groups
    ]
    leaders = across.groups[0]
    whole = Group(leaders.members, hosts, leaders.root)
    return use.across(collective, [whole]), Phase(inside.algorithm, groups)


def gather(use: Parts, root: int) -> Composition:
    """Gather inside hosts to one leader per host, then all blocks of a host across."""
    across, inside = by_host(use, root, Collective.GATHER)
    return Composition(1, [inside, across])


def scatter(use: Parts, root: int) -> Composition:
    """Scatter the blocks of each host to its leader, then inside the host."""
    across, inside = by_host(use, root, Collective.SCATTER)
    return Composition(1, [across, inside])


def barrier(use: Parts, root: int) -> Composition:
    """Tokens to one leader per host, a barrier among the leaders, tokens back."""
    hosts = use.topology.hosts
    inside = [Group(members, [(TOKEN,)]) for members in hosts]
    phases = [
        Phase(use.inside(Collective.REDUCE), inside),
        use.across(Collective.BARRIER, [Group(owners(use.topology, 0), [])]),
        Phase(use.inside(Collective.BROADCAST), inside),
    ]
    return Composition(1, phases)


def parts_of(phase: Phase, size: int) -> int:
    """The number of parts per block of the phase's algorithm for ``size`` ranks."""
    return phase.algorithm.build(size, only=0, topology=phase.topology).parts


COMPOSERS: dict[Collective, Callable[[Parts, int], Composition]] = {
    Collective.ALL_REDUCE: all_reduce,
    Collective.REDUCE: reduce,
    Collective.BROADCAST: broadcast,
    Collective.REDUCE_SCATTER: reduce_scatter,
    Collective.ALL_GATHER: all_gather,
    Collective.GATHER: gather,
    Collective.SCATTER: scatter,
    Collective.BARRIER: barrier,
}


def compose(table: Table, collective: Collective, inner: str, outer: str) -> Algorithm:
    """The hierarchy of the algorithm ``inner`` inside hosts and ``outer`` across hosts.

    Raises KeyError with the name if the table lacks one. An all_reduce works on shards if the table
    has ``inner`` for reduce_scatter. Otherwise it uses leaders and needs ``inner`` for reduce and
    broadcast.
    """
    if collective not in COMPOSERS:
        raise KeyError(collective.name.lower())
    composer = COMPOSERS[collective]
    if collective is Collective.ALL_REDUCE and inner not in table[Collective.REDUCE_SCATTER]:
        composer = all_reduce_by_leaders
    needed = [(collective, outer)]
    if composer is all_reduce:
        needed.append((Collective.REDUCE_SCATTER, inner))
    elif composer in (all_reduce_by_leaders, barrier):
        needed += [(Collective.REDUCE, inner), (Collective.BROADCAST, inner)]
    else:
        needed.append((collective, inner))
    for kind, name in needed:
        if name not in table[kind]:
            raise KeyError(name)

    def build(size: int, *, topology: Topology, root: int = 0, only: int | None = None) -> Schedule:
        composition = composer(Parts(table, inner, outer, topology), root)
        return finish(
            collective,
            size,
            run(composition.phases, only),
            parts=composition.parts,
            root=root,
            only=only,
            servers=topology.servers,
        )

    def by_level(topology: Topology) -> Levels:
        return levels(composer(Parts(table, inner, outer, topology), 0), topology.size)

    def formula(size: int, *, topology: Topology) -> Cost:
        return total(by_level(topology))

    return Algorithm(
        collective,
        f"hierarchical:{inner}+{outer}",
        build,
        formula,
        f"{inner} inside hosts, {outer} across them",
        "Cho et al., BlueConnect, MLSys 2019",
        levels=by_level,
        serves=table[collective][outer].serves,
        coded=table[collective][outer].coded,
    )
