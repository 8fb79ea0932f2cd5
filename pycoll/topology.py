"""Who shares a host with whom, and above hosts what else: pure values, agreed at start-up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pycoll.errors import InvalidArgumentError


class _Levels(NamedTuple):
    levels: tuple[tuple[int, ...], ...]


# A class of its own, whose objects have room for what cached_property remembers.
class Topology(_Levels):
    """One label per rank and level: ``levels[0][r]`` is the host of rank r, ``levels[1][r]`` its
    rack, and so on outwards. Labels count from 0 in order of first appearance.

    Make one with `topology_of` or `single_host`. The names local and cross are Horovod's: local
    ranks share a host, cross ranks share a place within their hosts.
    """

    @classmethod
    def even(cls, size: int, hosts: int) -> Topology:
        """Ranks in order on ``hosts`` hosts, equally many where that goes out even.

        Raises InvalidArgumentError unless there is a rank for every host.
        """
        if not 1 <= hosts <= size:
            raise InvalidArgumentError(f"hosts is {hosts}; it must be 1 to size, which is {size}")
        return cls((tuple(rank * hosts // size for rank in range(size)),))

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.levels[0])

    @cached_property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, ascending."""
        return groups_of(self.levels[0])

    def host_of(self, rank: int) -> int:
        """The index into ``hosts``."""
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
        """The place of ``rank`` among the ranks of its host."""
        return self.places[rank]

    def local_size(self, rank: int) -> int:
        """The ranks of its host."""
        return len(self.hosts[self.levels[0][rank]])

    def cross_rank(self, rank: int) -> int:
        """Its host's place among the hosts that have this local rank."""
        return self._peers(rank).index(self.host_of(rank))

    def cross_size(self, rank: int) -> int:
        """The hosts that have this local rank."""
        return len(self._peers(rank))

    def _peers(self, rank: int) -> list[int]:
        place = self.local_rank(rank)
        return [host for host, members in enumerate(self.hosts) if len(members) > place]

    @property
    def is_even(self) -> bool:
        """Whether all hosts have equally many ranks."""
        return len({len(members) for members in self.hosts}) == 1

    def above(self) -> Topology | None:
        """The levels above hosts, with one member per host; None if hosts are the last level."""
        if len(self.levels) == 1:
            return None
        return Topology(
            tuple(tuple(labels[members[0]] for members in self.hosts) for labels in self.levels[1:])
        )

    def distance(self, one: int, other: int) -> int:
        """0 on one host, 1 in one rack, ..., the number of levels if they share nothing."""
        for level, labels in enumerate(self.levels):
            if labels[one] == labels[other]:
                return level
        return len(self.levels)


def topology_of(hosts: Sequence[Hashable], *outer: Sequence[Hashable]) -> Topology:
    """The topology of ranks with these host names and, outwards, names of what hosts share.

    Raises InvalidArgumentError if the sequences differ in length or are empty, or if one host lies
    in two racks.
    """
    if not hosts:
        raise InvalidArgumentError("hosts: names one host per rank, so it cannot be empty")
    levels = []
    for number, names in enumerate((hosts, *outer)):
        if len(names) != len(hosts):
            raise InvalidArgumentError(
                f"level {number} names {len(names)} ranks, the hosts {len(hosts)}"
            )
        labels: dict[Hashable, int] = {}
        levels.append(tuple(labels.setdefault(name, len(labels)) for name in names))
    for number, (inner, wider) in enumerate(pairwise(levels)):
        seen: dict[int, int] = {}
        for rank, (group, around) in enumerate(zip(inner, wider, strict=True)):
            if seen.setdefault(group, around) != around:
                raise InvalidArgumentError(
                    f"rank {rank} and an earlier rank share group {group} of level {number} "
                    f"but not of level {number + 1}; levels must nest"
                )
    return Topology(tuple(levels))


def single_host(size: int) -> Topology:
    """All ranks on one host."""
    return Topology(((0,) * size,))


def groups_of(labels: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks with each label, ascending; labels are 0, 1, ... in order of first appearance."""
    groups: list[list[int]] = [[] for _ in range(max(labels) + 1)]
    for rank, label in enumerate(labels):
        groups[label].append(rank)
    return tuple(tuple(group) for group in groups)
