"""The model of one host: what cores copy, fetch and touch, and what it takes to share them."""

from __future__ import annotations

import pytest

from pycoll.algorithms import TABLE, lookup
from pycoll.cost import model, profiles
from pycoll.cost.copying import choose_copies
from pycoll.cost.loads import profile_of_schedule
from pycoll.cost.model import DEFAULT, Link, Parameters, Terms
from pycoll.cost.oversubscription import Turns, turns_of
from pycoll.cost.profiles import profile_of_costs
from pycoll.cost.selection import choose, predict
from pycoll.plan.lowering import lower
from pycoll.plan.plan_format import ZERO_COPY, unpack
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import single_host

ALL_REDUCE = Collective.ALL_REDUCE


def word(one: object) -> str:
    return one.name.lower() if isinstance(one, Collective) else str(one)


@pytest.mark.parametrize(
    ("kind", "name", "moved"),
    [
        (Collective.ALL_REDUCE, "direct", 1.0),  # half to the peer and back, both ways
        (Collective.BROADCAST, "direct", 0.5),  # all of it, one way
        (Collective.ALL_GATHER, "direct", 1.0),  # half, both ways, and half from x to out
        (Collective.REDUCE_SCATTER, "direct", 0.75),
        (Collective.ALL_TO_ALL, "direct", 1.0),
    ],
)
def test_a_core_inside_a_host_copies_both_ways(kind: Collective, name: str, moved: float) -> None:
    alone = profiles.profile(TABLE[kind][name], single_host(2))
    assert alone.period[0].moved == moved


@pytest.mark.parametrize(
    ("kind", "size", "fetched"),
    [
        (ALL_REDUCE, 2, 1.0),  # half of the peer's input, half of the result
        (ALL_REDUCE, 4, 1.5),
        (Collective.REDUCE_SCATTER, 2, 0.75),
        (Collective.ALL_GATHER, 2, 1.0),
        (Collective.REDUCE, 2, 1.0),  # the root alone
        (Collective.REDUCE, 4, 3.0),
        (Collective.SCATTER, 2, 0.5),  # the root its block, the other one its own
        (Collective.GATHER, 2, 0.5),
        (Collective.SCATTER, 8, 7 / 16),  # all are fetched from one rank
        (Collective.BROADCAST, 2, 0.5),  # both copy half
        (Collective.BROADCAST, 3, 1.0),
    ],
)
def test_where_memory_is_reached_receivers_copy(
    kind: Collective, size: int, fetched: float
) -> None:
    copies = choose_copies(kind, size, 1 << 26, DEFAULT)
    shape = profiles.profile(TABLE[kind]["direct"], single_host(size), copies=copies)
    assert shape.period[0].fetched == pytest.approx(fetched)
    inside, _ = shape.terms(1 << 26)
    assert inside.moved == inside.reached == pytest.approx(fetched * (1 << 26), rel=0.02)
    copied, _ = shape.terms(1024)
    assert copied.reached == 0 and copied.moved <= 1024 * shape.first[0].moved


def test_a_scatter_is_two_operations() -> None:
    link = Link(alpha=1e-6, beta=0.0, gamma=0.0, overhead=0.0, call=1e-3)
    times = {
        kind: predict(kind, "direct", single_host(4), 8, Parameters(inside=link))
        for kind in (Collective.SCATTER, Collective.BROADCAST)
    }
    assert times[Collective.BROADCAST] == pytest.approx(1.001e-3)
    assert times[Collective.SCATTER] == pytest.approx(2.002e-3)
    assert predict(Collective.SCATTER, "direct", single_host(1), 8, Parameters(inside=link)) == 0


def test_a_short_gather_is_fetched_by_the_root_and_a_long_one_put_by_leaves() -> None:
    direct, segment = TABLE[Collective.GATHER]["direct"], DEFAULT.segment_bytes
    short, long = (
        profiles.profile(direct, single_host(2), copies=copies)
        for copies in (
            choose_copies(Collective.GATHER, 2, nbytes, DEFAULT)
            for nbytes in (2 * segment, 2 * segment + 1)
        )
    )
    assert short.first[0].fetched == pytest.approx(1.0)
    assert long.period[0].fetched == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        (Collective.ALL_REDUCE, 1.0),  # half of this rank's array and of the peer's
        (Collective.BROADCAST, 1.0),  # the same
        (Collective.ALL_GATHER, 2.0),  # x, the peer's x, and out
        (Collective.REDUCE_SCATTER, 1.5),  # half of x and of the peer's, and out
    ],
)
def test_what_a_core_touches_beyond_its_cache_spills(kind: Collective, touched: float) -> None:
    cache, nbytes = 1 << 20, 1 << 24
    link = Link(alpha=0.0, beta=0.0, gamma=0.0, overhead=0.0, spill=1e-9, cache_bytes=cache)
    parameters = Parameters(inside=link)
    missed = touched * nbytes - cache
    found = predict(kind, "direct", single_host(2), nbytes, parameters)
    assert found == pytest.approx(missed * 1e-9, rel=0.01)  # of the first tile nothing is shared
    assert predict(kind, "direct", single_host(2), cache // 4, parameters) == 0


def test_where_steps_are_free_only_bytes_count() -> None:
    free_steps = Link(alpha=0.0, beta=1e-9, gamma=0.0, overhead=0.0)
    times = {
        name: predict(ALL_REDUCE, name, single_host(8), 1 << 20, Parameters(inside=free_steps))
        for name in ("ring", "halving_doubling", "recursive_doubling")
    }
    assert times["ring"] == pytest.approx(2 * 7 / 8 * (1 << 20) * 1e-9)
    assert times["halving_doubling"] == pytest.approx(times["ring"])
    assert times["recursive_doubling"] == pytest.approx(3 * (1 << 20) * 1e-9)


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_exposes_flag_matches_the_plans(kind: Collective) -> None:
    for algorithm in TABLE[kind].values():
        if algorithm.needs_topology or kind is Collective.BARRIER:
            continue
        plans = (unpack(lower(algorithm.build(4), rank)) for rank in range(4))
        exposed = any(row.flags & ZERO_COPY for plan in plans for row in plan.rows)
        assert exposed == algorithm.exposes, algorithm.name


def test_what_peers_read_in_place_moves_at_another_rate() -> None:
    short, long = model.REACHED_BYTES - 4, 1 << 26
    link = Link(0.0, 4e-9, 0.0, 0.0, spill=1e-9, cache_bytes=2 * short, reach=1e-9)
    for name, rate in (("ring", 2e-9), ("recursive_doubling", 5e-9)):
        times = [
            predict(ALL_REDUCE, name, single_host(2), nbytes, Parameters(inside=link))
            for nbytes in (short, long)
        ]
        assert times == pytest.approx([short * 4e-9, long * rate], rel=1e-3), name
    apart = Parameters(inside=link._replace(reach=0.0))
    assert predict(ALL_REDUCE, "ring", single_host(2), long, apart) == pytest.approx(
        long * 5e-9, rel=1e-3
    )


def test_a_chain_pipelines_its_tiles() -> None:
    link = Parameters(inside=Link(alpha=0.0, beta=1e-9, gamma=0.0, overhead=0.0))
    tiles, segment = 64, model.SEGMENT_BYTES
    found = predict(Collective.BROADCAST, "chain", single_host(9), tiles * segment, link)
    assert found == pytest.approx((8 + tiles - 1) * segment * 1e-9)


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_formula_and_schedule_predict_alike_on_one_host(kind: Collective) -> None:
    for algorithm in TABLE[kind].values():
        if algorithm.needs_topology or kind is Collective.BARRIER:
            continue
        for size in (2, 3, 4, 7, 8, 16):
            topology = single_host(size)
            formula = profile_of_costs(algorithm, topology)
            schedule = profile_of_schedule(algorithm.build(size), topology)
            for nbytes in (8, 65_536, 1 << 24):
                ratio = formula.seconds(nbytes, DEFAULT) / schedule.seconds(nbytes, DEFAULT)
                assert 0.5 < ratio < 2, (algorithm.name, size, nbytes, ratio)


def test_ranks_that_share_cores_prefer_fewer_steps() -> None:
    alone, busy = Parameters(), Parameters().with_ranks_per_core(4)
    assert Parameters().with_ranks_per_core(1) == Parameters().with_ranks_per_core(0.5) == alone
    assert busy.inside.alpha > 4 * alone.inside.alpha and busy.across == alone.across
    assert busy.inside.call > 16 * alone.inside.call
    assert busy.inside.cache_bytes == alone.inside.cache_bytes // 4
    assert "4 ranks per core" in busy.origin
    pairs = Parameters().with_ranks_per_core(2)
    for nbytes in (8, 256, 1024):
        assert choose(ALL_REDUCE, single_host(4), nbytes, parameters=pairs).name == "one_shot"
    assert choose(ALL_REDUCE, single_host(8), 1 << 20, parameters=busy).name == "direct"


def test_ranks_that_share_cores_leave_the_work_to_one_where_that_is_less_in_all() -> None:
    alone, busy = Parameters(), Parameters().with_ranks_per_core(4)
    topology = single_host(8)
    for nbytes in (8, 4096, 16384):
        assert choose(ALL_REDUCE, topology, nbytes, parameters=busy).name == "star", nbytes
    for nbytes in (4096, 1 << 18, 1 << 24):
        assert choose(Collective.BROADCAST, topology, nbytes, parameters=busy).name == "direct", (
            nbytes
        )
        assert choose(ALL_REDUCE, topology, nbytes, parameters=alone).name != "star", nbytes
    assert choose(Collective.BROADCAST, topology, 1 << 24, parameters=alone).name != "direct"


def test_turns_count_what_ranks_do_on_average_and_what_they_hand_on() -> None:
    def turns(name: str, size: int) -> Turns:
        return turns_of(lookup(ALL_REDUCE, name).build(size))

    for size in (2, 3, 8):
        assert turns("direct", size) == (1.0, 0.0)
        assert turns("star", size) == (2 / size, 0.0)
        # Of 2(p-1) steps p-2 hand on what came in the step before.
        assert turns("ring", size) == (1.0, (size - 2) / (2 * size - 2))
    assert turns("star", 1) == Turns()
    terms = Terms(1.0, 8.0, 100.0, 40.0, reached=100.0)
    assert Turns(0.25, 0.5).share_cores(terms, 4.0) == Terms(1.0, 2.0, 25.0, 10.0, reached=12.5)
    # The busiest rank is at work all the time that its core has.
    assert Turns(0.1, 0.0).share_cores(terms, 2.0) == Terms(1.0, 4.0, 50.0, 20.0, reached=50.0)
