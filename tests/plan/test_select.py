"""The choice of algorithm: a pure function, cheap, and right where the answer is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest
from processor import quickest_s

from pycoll import model
from pycoll.algorithms import TABLE, Algorithm, lookup
from pycoll.collective import REDUCING, Collective
from pycoll.errors import InvalidArgumentError
from pycoll.lower import lower
from pycoll.model import (
    DEFAULT,
    Link,
    Parameters,
    Terms,
    profile_of_costs,
    profile_of_schedule,
)
from pycoll.plan_format import LEND, unpack
from pycoll.select import (
    DRAW,
    Measured,
    bytes_text,
    candidates,
    choose,
    explain_text,
    predict,
    seconds_text,
)
from pycoll.topology import Topology, single_host, topology_of
from pycoll.turns import Turns, turns_of

ALL_REDUCE = Collective.ALL_REDUCE
MESSAGES = (0, 8, 1024, 65_536, 1 << 20, 1 << 28)


def word(one: object) -> str:
    return one.name.lower() if isinstance(one, Collective) else str(one)


@pytest.mark.parametrize("kind", Collective, ids=word)
@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (2, 1), (5, 1), (8, 2), (9, 9), (16, 3)])
def test_the_choice_is_the_fastest_prediction_among_the_candidates_but_for_a_draw(
    kind: Collective, size: int, hosts: int
) -> None:
    topology = Topology.even(size, hosts)
    for nbytes in MESSAGES:
        choice = choose(kind, topology, nbytes)
        names = candidates(kind, topology)
        assert {choice.name, *(name for name, _ in choice.alternatives)} == set(names)
        assert choice.predicted_s == predict(kind, choice.name, topology, nbytes)
        times = [seconds for _, seconds in choice.alternatives]
        assert times == sorted(times)
        shortest = min((choice.predicted_s, *times))
        if choice.predicted_s == shortest:
            continue
        assert hosts > 1 and choice.predicted_s <= shortest * (1 + DRAW)
        assert choice.reason == "fewest steps within 10% of the shortest predicted time"
        steps = {name: lookup(kind, name).cost(size, topology).steps for name in names}
        for name, seconds in choice.alternatives:
            assert seconds > shortest * (1 + DRAW) or steps[choice.name] <= steps[name]


def test_what_takes_one_step_wins_a_draw_between_two_hosts() -> None:
    """Combining all of a message costs less than to answer with a half of it."""
    across = choose(ALL_REDUCE, Topology.even(2, 2), 1 << 24)
    assert across.name == "one_shot" and dict(across.alternatives)["tree"] < across.predicted_s
    assert choose(ALL_REDUCE, Topology.even(2, 1), 1 << 24).name == "tree"


def test_equal_arguments_give_equal_choices_whatever_was_asked_before() -> None:
    first = [choose(ALL_REDUCE, Topology.even(8, 2), n) for n in MESSAGES]
    model.profile.cache_clear()
    choose(ALL_REDUCE, single_host(3), 77)
    assert [choose(ALL_REDUCE, topology_of("xxxxyyyy"), n) for n in MESSAGES] == first


def cold_choices(kind: Collective, topology: Topology) -> Callable[[], None]:
    """Every call makes a choice that nothing remembered helps with, nor any choice before it."""
    sizes = count(1_000_003 * topology.size)

    def choose_cold() -> None:
        model.profile.cache_clear()
        choose(kind, topology, next(sizes))

    return choose_cold


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_a_cold_choice_on_one_host_takes_less_than_2_ms_up_to_16_ranks(kind: Collective) -> None:
    model.streams.cache_clear()
    for size in (2, 3, 8, 13, 16):
        assert quickest_s(cold_choices(kind, single_host(size)), 2e-3) < 2e-3, size


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_a_further_choice_between_hosts_takes_less_than_2_ms(kind: Collective) -> None:
    topology = Topology.even(16, 2)
    choose(kind, topology, 1)
    sizes = count(1_000_000)
    assert quickest_s(lambda: choose(kind, topology, next(sizes)), 2e-3) < 2e-3


def test_short_messages_take_few_steps_and_long_ones_few_bytes() -> None:
    topology = single_host(16)
    short = TABLE[ALL_REDUCE][choose(ALL_REDUCE, topology, 8).name].cost(16)
    long = TABLE[ALL_REDUCE][choose(ALL_REDUCE, topology, 1 << 28).name].cost(16)
    assert short.steps <= 4
    assert long.sent == min(one.cost(16).sent for one in TABLE[ALL_REDUCE].values() if flat(one))


def flat(algorithm: Algorithm) -> bool:
    return not algorithm.needs_topology


def test_long_messages_between_hosts_choose_a_hierarchy() -> None:
    choice = choose(ALL_REDUCE, topology_of("ab" * 8), 1 << 26)
    assert choice.name.startswith("hierarchical")
    flat_times = [s for name, s in choice.alternatives if not name.startswith("hierarchical")]
    assert choice.predicted_s < 0.7 * min(flat_times)


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
    alone = model.profile(TABLE[kind][name], single_host(2))
    assert alone.period[0].moved == moved


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
    assert predict(kind, "direct", single_host(2), cache // 2, parameters) == 0


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
def test_what_is_said_to_be_lent_plans_lend(kind: Collective) -> None:
    for algorithm in TABLE[kind].values():
        if algorithm.needs_topology or kind is Collective.BARRIER:
            continue
        plans = (unpack(lower(algorithm.build(4), rank)) for rank in range(4))
        lent = any(row.flags & LEND for plan in plans for row in plan.rows)
        assert lent == algorithm.lends, algorithm.name


def test_what_peers_read_in_place_moves_at_another_rate() -> None:
    short, long = model.REACHED_BYTES - 4, 1 << 26
    link = Link(0.0, 4e-9, 0.0, 0.0, spill=1e-9, cache_bytes=short, reach=1e-9)
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


@pytest.mark.parametrize("kind", sorted(REDUCING), ids=word)
def test_deterministic_and_ordered_requests_get_algorithms_that_promise_it(
    kind: Collective,
) -> None:
    for size, hosts in ((2, 1), (8, 2), (33, 3)):
        topology = Topology.even(size, hosts)
        for nbytes in MESSAGES:
            exact = choose(kind, topology, nbytes, deterministic=True)
            assert TABLE[kind][exact.name].rank_ordered
            ordered = choose(kind, topology, nbytes, commutes=False)
            assert TABLE[kind][ordered.name].keeps_order


def test_among_restricts_and_hierarchical_stands_for_all_hierarchies() -> None:
    topology = Topology.even(8, 2)
    assert choose(ALL_REDUCE, topology, 8, among=["chain"]).name == "chain"
    names = candidates(ALL_REDUCE, topology, among=("hierarchical", "ring"))
    assert names[0] == "ring"
    assert len(names) > 2
    assert all(name.startswith("hierarchical") for name in names[1:])
    assert candidates(ALL_REDUCE, single_host(8), among=("hierarchical", "ring")) == ("ring",)


def test_measured_rows_override_the_model_up_to_their_bound() -> None:
    topology = single_host(8)
    rows = [
        Measured(ALL_REDUCE, 4, 1 << 30, "one_shot"),
        Measured(ALL_REDUCE, 8, 4096, "chain"),
        Measured(ALL_REDUCE, 8, 1 << 20, "ring"),
    ]
    at = {n: choose(ALL_REDUCE, topology, n, measured=rows) for n in (8, 4096, 4097, 1 << 21)}
    assert [at[8].name, at[4096].name, at[4097].name] == ["chain", "chain", "ring"]
    assert "measured best up to 4 KiB" in at[8].reason
    assert at[1 << 21] == choose(ALL_REDUCE, topology, 1 << 21)


def test_a_measured_name_that_the_request_excludes_is_passed_over() -> None:
    rows = [Measured(ALL_REDUCE, 8, 1 << 30, "ring")]
    choice = choose(ALL_REDUCE, single_host(8), 64, deterministic=True, measured=rows)
    assert choice == choose(ALL_REDUCE, single_host(8), 64, deterministic=True)


def test_nothing_left_and_negative_bytes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"no algorithm for all_reduce of 8 ranks"):
        choose(ALL_REDUCE, single_host(8), 8, among=["bruck"])
    with pytest.raises(InvalidArgumentError, match="nbytes is -1"):
        choose(ALL_REDUCE, single_host(8), -1)


@pytest.mark.parametrize("kind", Collective, ids=word)
@pytest.mark.parametrize(("size", "hosts"), [(1, 1), (8, 1), (12, 3), (128, 16)])
def test_the_explanation_names_choice_time_and_reason(
    kind: Collective, size: int, hosts: int
) -> None:
    topology = Topology.even(size, hosts)
    text = explain_text(kind, topology, 1 << 20)
    choice = choose(kind, topology, 1 << 20)
    lines = text.splitlines()
    assert lines[0].startswith(f"{kind.name.lower()} of 1 MiB over {size} rank")
    assert f"algorithm  {choice.name}: " in lines[1]
    assert seconds_text(choice.predicted_s) in lines[2]
    assert choice.reason in lines[3]
    for name, seconds in choice.alternatives[:4]:
        assert f"{name}: {seconds_text(seconds)}" in text


def test_the_explanation_of_an_algorithm_that_was_asked_for_names_the_choice_too() -> None:
    topology = single_host(8)
    best = choose(ALL_REDUCE, topology, 4096).name
    text = explain_text(ALL_REDUCE, topology, 4096, algorithm="ring")
    assert "algorithm  ring: " in text
    assert f"asked for; {best} would be chosen" in text
    assert "sends 7 KiB (1.75 n)" in text
    with pytest.raises(InvalidArgumentError, match="'ringg' does not exist"):
        explain_text(ALL_REDUCE, topology, 4096, algorithm="ringg")


def test_a_thousand_ranks_are_predicted_from_formulas_in_seconds() -> None:
    topology = Topology.even(1024, 128)
    start = time.process_time()  # not the clock: others may compute beside the tests
    for kind in Collective:
        assert choose(kind, topology, 1 << 20).predicted_s > 0
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 30, "1 GiB"),
        (1020 << 20, "1020 MiB"),
        (3 << 40, "3 TiB"),
    ],
)
def test_bytes_are_written_in_binary_units(value: int, text: str) -> None:
    assert bytes_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.5, "2.5 s"), (0.0031, "3.1 ms"), (8e-6, "8 us"), (3e-7, "300 ns"), (0.9997, "1 s")],
)
def test_seconds_are_written_in_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds_text(value) == text


def test_ranks_that_share_cores_prefer_fewer_steps() -> None:
    alone, crowded = Parameters(), Parameters().crowded(4)
    assert Parameters().crowded(1) == Parameters().crowded(0.5) == alone
    assert crowded.inside.alpha > 4 * alone.inside.alpha and crowded.across == alone.across
    assert "4 ranks per core" in crowded.origin
    topology = single_host(8)
    for nbytes in (8, 1024):
        assert choose(ALL_REDUCE, topology, nbytes, parameters=crowded).name == "one_shot", nbytes
    assert choose(ALL_REDUCE, topology, 1 << 20, parameters=crowded).name == "direct"


def test_ranks_that_share_cores_leave_the_work_to_one_where_that_is_less_in_all() -> None:
    alone, crowded = Parameters(), Parameters().crowded(4)
    topology = single_host(8)
    for nbytes in (4096, 16384):
        assert choose(ALL_REDUCE, topology, nbytes, parameters=crowded).name == "star", nbytes
    for nbytes in (4096, 1 << 18, 1 << 24):
        assert (
            choose(Collective.BROADCAST, topology, nbytes, parameters=crowded).name == "direct"
        ), nbytes
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
    assert Turns(0.25, 0.5).shared(terms, 4.0) == Terms(1.0, 2.0, 25.0, 10.0, reached=12.5)
    # The busiest rank is at work all the time that its core has.
    assert Turns(0.1, 0.0).shared(terms, 2.0) == Terms(1.0, 4.0, 50.0, 20.0, reached=50.0)
