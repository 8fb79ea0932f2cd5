"""The topology: the host of every rank, the levels above hosts (racks), and domains inside them.

A topology is an immutable value that all ranks agree on at start-up.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pycoll.errors import InvalidArgumentError


class _Levels(NamedTuple):
    levels: tuple[tuple[int, ...], ...]
    servers: int = 0
    inner: tuple[tuple[int, ...], ...] = ()


# A subclass of the NamedTuple: only its objects have the __dict__ that cached_property needs.
class Topology(_Levels):
    """One label per rank and level, from hosts outwards.

    ``levels[0][r]`` is the host of rank r, ``levels[1][r]`` its rack, and so on. Labels count from
    0 in order of first appearance. `topology_of` and `single_host` make a topology. The names local
    and cross are Horovod's: local ranks share a host, cross ranks have the same local rank on
    different hosts.

    The last ``servers`` ranks serve: they contribute nothing to a collective and receive no result.

    ``inner``: labels of the same kind for levels inside hosts, the smallest groups first: ranks
    whose cores share a last-level cache, or a memory domain. `with_domains` adds them.
    """

    @classmethod
    def even(cls, size: int, hosts: int) -> Topology:
        """Distributes ranks 0..size-1 in order over ``hosts`` hosts.

        The hosts have equal numbers of ranks if ``hosts`` divides ``size``; otherwise the numbers
        differ by at most one. Raises InvalidArgumentError unless 1 <= hosts <= size.
        """
        if not 1 <= hosts <= size:
            raise InvalidArgumentError(f"hosts is {hosts}; it must be 1 to size, which is {size}")
        return cls((tuple(rank * hosts // size for rank in range(size)),))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.levels[0])

    def serving(self, servers: int) -> Topology:
        """Returns this topology with the last ``servers`` ranks as servers.

        Raises InvalidArgumentError unless at least one rank is left to work.
        """
        if not 0 <= servers < self.size:
            raise InvalidArgumentError(
                f"servers is {servers}: expected 0 to {self.size - 1}, so that at least one of "
                f"{self.size} ranks works"
            )
        return self._replace(servers=servers)

    @property
    def workers(self) -> Topology:
        """The topology of the ranks that do not serve."""
        count = self.size - self.servers
        return Topology(
            tuple(labels[:count] for labels in self.levels),
            inner=tuple(labels[:count] for labels in self.inner),
        )

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, ascending."""
        return groups_of(self.levels[0])

    def host_of(self, rank: int) -> int:
        """The host of ``rank``, as an index into ``hosts``."""
        return self.levels[0][rank]

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The local rank of every rank."""
        places = [0] * self.size
        for members in self.hosts:
            for place, rank in enumerate(members):
                places[rank] = place
        return tuple(places)

    def local_rank(self, rank: int) -> int:
        """The position of ``rank`` among the ranks of its host."""
        return self.places[rank]

    def local_size(self, rank: int) -> int:
        """The number of ranks on the host of ``rank``."""
        return len(self.hosts[self.levels[0][rank]])

    def cross_rank(self, rank: int) -> int:
        """The position of the host of ``rank`` among the hosts that have this local rank."""
        return self._peers(rank).index(self.host_of(rank))

    def cross_size(self, rank: int) -> int:
        """The number of hosts that have the local rank of ``rank``."""
        return len(self._peers(rank))

    def _peers(self, rank: int) -> list[int]:
        place = self.local_rank(rank)
        return [host for host, members in enumerate(self.hosts) if len(members) > place]

    @property
    def is_even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return len({len(members) for members in self.hosts}) == 1

    def above(self) -> Topology | None:
        """The topology of the levels above hosts, with one rank per host.

        The result is None if hosts are the last level.
        """
        if len(self.levels) == 1:
            return None
        return Topology(
            tuple(tuple(labels[members[0]] for members in self.hosts) for labels in self.levels[1:])
        )

    @cached_property
    def by_domain(self) -> Topology:
        """The topology that hierarchies follow: on one host its domains take the place of hosts.

        It is this topology if no domain is known, if there are several hosts, or if ranks serve.
        """
        if not self.inner or self.servers or len(self.hosts) > 1:
            return self
        return Topology(self.inner)

    @property
    def domain_count(self) -> int:
        """The number of groups of the smallest level inside hosts; 0 if there is none."""
        return len(set(self.inner[0])) if self.inner else 0

    def distance(self, one: int, other: int) -> int:
        """The lowest level that both ranks share: 0 for a host, 1 for a rack, and so on.

        The result is the number of levels if they share none.
        """
        for level, labels in enumerate(self.levels):
            if labels[one] == labels[other]:
                return level
        return len(self.levels)


def topology_of(hosts: Sequence[Hashable], *outer: Sequence[Hashable]) -> Topology:
    """Makes a topology from one host name per rank and, outwards, one name per rank and level.

    Raises InvalidArgumentError if the sequences differ in length or are empty, or if the levels do
    not nest (one host in two racks).
    """
    if not hosts:
        raise InvalidArgumentError("hosts: names one host per rank, so it cannot be empty")
    levels = []
    for number, names in enumerate((hosts, *outer)):
        if len(names) != len(hosts):
            raise InvalidArgumentError(
                f"level {number} names {len(names)} ranks, the hosts {len(hosts)}"
            )
        levels.append(number_names(names))
    for number, (inner, wider) in enumerate(pairwise(levels)):
        seen: dict[int, int] = {}
        for rank, (group, around) in enumerate(zip(inner, wider, strict=True)):
            if seen.setdefault(group, around) != around:
                raise InvalidArgumentError(
                    f"rank {rank} and an earlier rank share group {group} of level {number} "
                    f"but not of level {number + 1}; levels must nest"
                )
    return Topology(tuple(levels))


def with_domains(topology: Topology, *names: Sequence[Hashable]) -> Topology:
    """Adds levels inside hosts, from sequences with the name of a domain per rank.

    Names count within a host only; None stands for an unknown domain. A sequence splits a host if
    it names a domain for each of its ranks, and at least two of these domains have several ranks.
    All ranks of any other host form one group. Where two sequences split a host differently, the
    smaller groups are the intersections. Equal levels count once. Raises InvalidArgumentError if a
    sequence has another length.
    """
    levels: list[tuple[Hashable, ...]] = []
    for one in names:
        if len(one) != topology.size:
            raise InvalidArgumentError(f"{len(one)} domains are named for {topology.size} ranks")
        # Every communicator computes this, and most machines have one domain.
        if len(set(one)) > 1:
            levels.append(_splitting(topology, one))
    levels.sort(key=lambda labels: len(set(labels)))
    hosts = number_names(topology.levels[0])
    found: list[tuple[int, ...]] = []
    around = hosts
    for labels in levels:
        around = number_names(tuple(zip(around, labels, strict=True)))
        if around not in (hosts, *found):
            found.append(around)
    return topology._replace(inner=tuple(found[::-1]))


def _splitting(topology: Topology, names: Sequence[Hashable]) -> tuple[Hashable, ...]:
    """One label per rank: its name if the names split the host of the rank usefully, else None."""
    labels = list(names)
    for members in topology.hosts:
        groups: dict[Hashable, int] = {}
        for rank in members:
            groups[names[rank]] = groups.get(names[rank], 0) + 1
        if None in groups or sum(count > 1 for count in groups.values()) < 2:
            for rank in members:
                labels[rank] = None
    return tuple(labels)


def even_domains(topology: Topology, domains: int) -> Topology:
    """Distributes the ranks of every host in order over ``domains`` domains.

    Raises InvalidArgumentError unless each domain gets at least two ranks of the smallest host.
    """
    least = min(len(members) for members in topology.hosts)
    if domains != 1 and not 1 <= domains <= least // 2:
        raise InvalidArgumentError(
            f"domains is {domains}; it must be 1, or leave at least 2 of the {least} ranks of a "
            "host to each domain"
        )
    sizes = [len(topology.hosts[host]) for host in topology.levels[0]]
    places = zip(topology.places, sizes, strict=True)
    return with_domains(topology, [place * domains // size for place, size in places])


def number_names(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Numbers for the names, from 0 in order of first appearance."""
    seen: dict[Hashable, int] = {}
    return tuple(seen.setdefault(name, len(seen)) for name in names)


def single_host(size: int) -> Topology:
    """The topology of ``size`` ranks on one host."""
    return Topology(((0,) * size,))


def groups_of(labels: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each label, ascending; labels are 0, 1, ... in order of first appearance."""
    groups: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for rank, label in enumerate(labels):
        groups[label].append(rank)
    return tuple(tuple(group) for group in groups)
