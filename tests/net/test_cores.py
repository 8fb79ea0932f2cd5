"""What ranks tell each other of their cores."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycoll.bootstrap.cores import core_numbers, core_text
from pycoll.bootstrap.identity import Identity, cores_beside, ranks_per_core
from pycoll.config import Config

CORES = st.sets(st.integers(0, 300), min_size=1)


@given(CORES)
def test_cores_come_back(cores: set[int]) -> None:
    assert core_numbers(core_text(cores)) == cores


def test_cores_are_told_as_ranges() -> None:
    assert core_text({3, 0, 1, 2, 8, 10, 11}) == "0-3,8,10-11"


@pytest.mark.parametrize("text", ["", "x", "3-1", "-1", "0-65536", "1,,2", "0-9999999999"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        core_numbers(text)


def world(*cores_of_ranks: str, hosts: str = "") -> list[Identity]:
    mine = Identity.mine(Config())
    return [
        mine._replace(cores=cores, host_id=hosts[rank : rank + 1])
        for rank, cores in enumerate(cores_of_ranks)
    ]


def test_ranks_that_are_bound_to_cores_of_their_own_do_not_share_them() -> None:
    bound = world("0", "1", "2", "3")
    assert ranks_per_core(bound) == 1
    assert cores_beside(bound, 2) == 4
    assert ranks_per_core(world("0-1", "0-1")) == 1
    assert ranks_per_core(world("0", "0", "0")) == 3
    assert ranks_per_core(world(*["0-1"] * 8)) == 4


def test_hosts_have_cores_of_their_own() -> None:
    ranks = world("0-3", "0", "0-3", "0", "0", hosts="abaab")
    assert ranks_per_core(ranks) == 2
    assert [cores_beside(ranks, rank) for rank in range(5)] == [4, 1, 4, 4, 1]


def test_an_identity_with_other_cores_is_refused() -> None:
    (mine,) = world("0-1")
    assert Identity.from_bytes(mine.to_bytes()) == mine
    with pytest.raises(ValueError):
        Identity.from_bytes(mine._replace(cores="all").to_bytes())
