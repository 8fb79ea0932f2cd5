"""The simulation of a host with domains: against cases counted by hand, and against the model."""

from __future__ import annotations

import sys
from math import inf

import pytest
from harness import ROOT

from pycoll.algorithms import lookup
from pycoll.cost.model import DEFAULT, Link
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import Plan, unpack
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import even_domains, single_host

sys.path.insert(0, str(ROOT / "bench"))
from domains import BOUND, COLLECTIVES, Kind, row_of
from simulated_host import Distance, Host, simulate

KIB, MIB = 1 << 10, 1 << 20
#: Nothing but what a test adds costs anything.
FREE = Link(alpha=0.0, beta=0.0, gamma=0.0, overhead=0.0)
NOTHING = Distance(0.0, 0.0, 0.0)


def plans(kind: Collective, name: str, size: int, domains: int = 1) -> list[Plan]:
    topology = even_domains(single_host(size), domains).by_domain
    schedule = lookup(kind, name).build(size, topology=topology)
    return [unpack(image) for image in lower_all(add_acknowledgements(schedule))]


@pytest.mark.parametrize(
    ("kind", "name", "size", "steps"),
    [
        (Collective.ALL_REDUCE, "ring", 5, 8),
        (Collective.ALL_REDUCE, "recursive_doubling", 16, 4),
        (Collective.ALL_GATHER, "ring", 6, 5),
        (Collective.BARRIER, "dissemination", 9, 4),
    ],
)
def test_each_step_takes_a_latency(kind: Collective, name: str, size: int, steps: int) -> None:
    host = Host((), (Distance(1e-6, 0.0, 0.0),), (), FREE)
    nbytes = 0 if kind is Collective.BARRIER else 64
    assert simulate(host, plans(kind, name, size), nbytes) == pytest.approx(steps * 1e-6)


def test_the_call_and_each_segment_take_time() -> None:
    core = FREE._replace(call=5e-6, overhead=2e-6)
    host = Host((), (NOTHING,), (), core)
    # Each of two ranks sends a segment and receives one.
    found = simulate(host, plans(Collective.ALL_GATHER, "direct", 2), 64)
    assert found == pytest.approx(5e-6 + 2 * 1e-6)


@pytest.mark.parametrize(("nbytes", "each"), [(4 * KIB, 2e-9 + 2e-9), (MIB, 3e-9)])
def test_bytes_are_read_in_place_or_copied_twice(nbytes: int, each: float) -> None:
    """A slot is filled at beta / 2 and read at the price of a slot; long arrays are read in place.

    A rank also copies its own block: at beta, or at the price of a read."""
    host = Host((), (Distance(0.0, 3e-9, 2e-9),), (), FREE._replace(beta=4e-9))
    own = 4e-9 if nbytes < 8 * KIB else 3e-9
    found = simulate(host, plans(Collective.ALL_GATHER, "direct", 2), nbytes)
    assert found == pytest.approx(nbytes / 2 * (each + own))


@pytest.mark.parametrize(("name", "crossing"), [("direct", 4 * 0.5), ("ring", 7 / 8)])
def test_the_ranks_of_a_domain_share_its_link(name: str, crossing: float) -> None:
    """Bytes that enter a domain of 4 of 8 ranks: each rank takes the half that it lacks by itself,
    and a ring brings 7 of 8 blocks."""
    labels = tuple(rank // 4 for rank in range(8))
    host = Host((labels,), (NOTHING, NOTHING), (1e-9,), FREE)
    found = simulate(host, plans(Collective.ALL_GATHER, name, 8, 2), 8 * MIB)
    assert found == pytest.approx(crossing * 8 * MIB * 1e-9, rel=0.1)


def test_the_distance_counts_domains_inside_domains() -> None:
    caches = tuple(rank // 2 for rank in range(8))
    nodes = tuple(rank // 4 for rank in range(8))
    distances = tuple(Distance(alpha, 0.0, 0.0) for alpha in (1e-6, 3e-6, 7e-6))
    host = Host((caches, nodes), distances, (0.0, 0.0), FREE)
    # Doubling exchanges inside caches, then inside nodes, then between them.
    found = simulate(host, plans(Collective.ALL_REDUCE, "recursive_doubling", 8), 64)
    assert found == pytest.approx(11e-6)


def test_a_run_beyond_the_limit_is_given_up() -> None:
    host = Host((), (Distance(1e-6, 0.0, 0.0),), (), FREE)
    assert simulate(host, plans(Collective.ALL_REDUCE, "ring", 5), 64, limit=5e-6) == inf


def test_memory_takes_time_where_arrays_are_in_no_cache() -> None:
    host = Host((), (NOTHING,), (), FREE, memory=1e-9)
    found = simulate(host, plans(Collective.ALL_GATHER, "direct", 2), MIB)
    assert found > MIB * 1e-9
    assert simulate(host._replace(memory=0.0), plans(Collective.ALL_GATHER, "direct", 2), MIB) == 0


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda kind: kind.name.lower())
def test_the_chosen_algorithm_is_near_the_quickest_simulated_one(collective: Collective) -> None:
    """On 16 cores in 4 caches; bench/domains.py has 64 cores."""
    kind = Kind("4 caches of 4 cores", 4)
    sizes = (0,) if collective is Collective.BARRIER else (64, 64 * KIB, MIB)
    for nbytes in sizes:
        row = row_of(kind, collective, nbytes, 16)
        assert row.ratio <= (1 + BOUND if nbytes != 64 * KIB else 1.25), row


def test_the_simulation_takes_as_long_as_the_formula_where_nothing_is_shared() -> None:
    """Two ranks in one cache: the model's links, and its time."""
    from pycoll.cost.selection import predict

    core = DEFAULT.inside
    host = Host((), (Distance(core.alpha, core.reach, core.beta / 2),), (), core)
    for kind, name in ((Collective.ALL_REDUCE, "direct"), (Collective.ALL_GATHER, "direct")):
        for nbytes in (64, MIB):
            told = predict(kind, name, single_host(2), nbytes)
            found = simulate(host, plans(kind, name, 2), nbytes)
            assert found == pytest.approx(told, rel=0.5), (kind, nbytes)
