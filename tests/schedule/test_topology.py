from __future__ import annotations

import pytest

from pycoll.schedule.topology import Topology, single_host, topology_of


def test_hosts_are_numbered_by_first_appearance_and_ranks_within_them_ascend() -> None:
    topology = topology_of(["n7", "n2", "n7", "n9", "n2", "n7"])
    assert topology.hosts == ((0, 2, 5), (1, 4), (3,))
    assert [topology.host_of(rank) for rank in range(6)] == [0, 1, 0, 2, 1, 0]
    assert [topology.local_rank(rank) for rank in range(6)] == [0, 0, 1, 0, 1, 2]
    assert [topology.local_size(rank) for rank in range(6)] == [3, 2, 3, 1, 2, 3]


def test_cross_ranks_count_only_hosts_that_have_the_local_rank() -> None:
    topology = topology_of("abbacb")  # a: 0 3, b: 1 2 5, c: 4
    assert [topology.cross_size(rank) for rank in range(6)] == [3, 3, 2, 2, 3, 1]
    assert [topology.cross_rank(rank) for rank in range(6)] == [0, 1, 1, 0, 2, 0]


@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (8, 2), (7, 3), (4, 4), (33, 5)])
def test_even_spreads_ranks_in_order_and_sizes_differ_by_one_at_most(size: int, hosts: int) -> None:
    topology = Topology.even(size, hosts)
    assert [rank for members in topology.hosts for rank in members] == list(range(size))
    sizes = [len(members) for members in topology.hosts]
    assert len(sizes) == hosts
    assert max(sizes) - min(sizes) <= 1
    assert topology.is_even == (size % hosts == 0)


@pytest.mark.parametrize(("size", "hosts"), [(2, 3), (4, 0), (0, 1)])
def test_even_refuses_hosts_without_ranks(size: int, hosts: int) -> None:
    with pytest.raises(ValueError, match=f"{hosts}.*{size}"):
        Topology.even(size, hosts)


def test_above_has_one_member_per_host_and_ends_with_the_last_level() -> None:
    topology = topology_of("aabbcc", ["x", "x", "x", "x", "y", "y"])
    above = topology.above()
    assert above is not None
    assert above.levels == ((0, 0, 1),)
    assert above.above() is None
    assert single_host(4).above() is None


def test_distance_is_the_innermost_level_that_two_ranks_share() -> None:
    topology = topology_of("aabbcc", ["x", "x", "x", "x", "y", "y"])
    assert [topology.distance(0, rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_topologies_are_values() -> None:
    assert topology_of("aab") == topology_of([5, 5, 1])
    assert hash(topology_of("aab")) == hash(topology_of("zzy"))


def test_a_host_in_two_racks_is_refused_naming_the_rank() -> None:
    with pytest.raises(ValueError, match=r"rank 2 .*levels must nest"):
        topology_of("aba", "xyy")


def test_levels_of_different_lengths_and_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="level 1 names 2 ranks, the hosts 3"):
        topology_of("aba", "xy")
    with pytest.raises(ValueError, match="cannot be empty"):
        topology_of([])
