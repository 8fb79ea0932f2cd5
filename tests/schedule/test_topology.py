from __future__ import annotations

import pytest

from pycoll.errors import InvalidArgumentError
from pycoll.schedule.topology import (
    Topology,
    even_domains,
    single_host,
    topology_of,
    with_domains,
)


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


def test_one_domain_changes_nothing() -> None:
    host = single_host(6)
    for names in ("aaaaaa", "abcdef", "aaaaab", (None,) * 6, (*"aaabb", None)):
        assert with_domains(host, names) == host
    assert host.by_domain is host and host.domain_count == 0


def test_domains_are_levels_inside_hosts() -> None:
    host = with_domains(single_host(8), "aabbccdd", "xxxxyyyy")
    assert host.inner == ((0, 0, 1, 1, 2, 2, 3, 3), (0, 0, 0, 0, 1, 1, 1, 1))
    assert with_domains(single_host(8), "xxxxyyyy", "aabbccdd") == host
    assert with_domains(single_host(8), "aabbccdd", "eeffgghh").inner == host.inner[:1]
    assert (host.local_rank(5), host.local_size(5), host.hosts) == (5, 8, (tuple(range(8)),))
    assert host.by_domain == Topology(host.inner)
    assert host.domain_count == 4 and host.workers == host


def test_levels_that_cross_are_cut_to_fit() -> None:
    host = with_domains(single_host(6), "aaaabb", "xxyyyy")
    fine, coarse = host.inner
    assert len(set(fine)) == 3 and len(set(coarse)) == 2
    host.by_domain.above()
    assert topology_of(fine, coarse).levels == host.inner


def test_names_count_within_a_host_that_they_split() -> None:
    two = Topology.even(8, 2)
    assert with_domains(two, "aabbaabb").inner == ((0, 0, 1, 1, 2, 2, 3, 3),)
    assert with_domains(two, "aabbcccc").inner == ((0, 0, 1, 1, 2, 2, 2, 2),)
    assert with_domains(two, "aaaacccc").inner == ()
    assert with_domains(two, "aabbaabb").by_domain.hosts == two.hosts


def test_ranks_that_serve_leave_domains_alone() -> None:
    host = even_domains(single_host(8), 2).serving(2)
    assert host.by_domain is host
    assert host.workers.inner == ((0, 0, 0, 0, 1, 1),)


def test_domains_of_the_wrong_number_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="7 domains are named for 8 ranks"):
        with_domains(single_host(8), "aabbccd")
    with pytest.raises(InvalidArgumentError, match=r"domains is 5; .* at least 2 of the 8 ranks"):
        even_domains(single_host(8), 5)
    assert even_domains(single_host(8), 1) == single_host(8)
