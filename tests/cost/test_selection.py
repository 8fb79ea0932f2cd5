"""The choice of algorithm: a pure function, cheap, and right where the answer is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import pytest
from processor import calls_of

from pycoll.algorithms import TABLE, Algorithm, lookup
from pycoll.cost import profiles
from pycoll.cost.selection import (
    DRAW,
    Measured,
    bytes_text,
    candidates,
    choose,
    explain_text,
    predict,
    seconds_text,
)
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.topology import Topology, single_host, topology_of

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
    profiles.profile.cache_clear()
    choose(ALL_REDUCE, single_host(3), 77)
    assert [choose(ALL_REDUCE, topology_of("xxxxyyyy"), n) for n in MESSAGES] == first


def cold_choices(kind: Collective, topology: Topology) -> Callable[[], None]:
    """Every call makes a choice that nothing remembered helps with, nor any choice before it."""
    sizes = count(1_000_003 * topology.size)

    def choose_cold() -> None:
        profiles.profile.cache_clear()
        choose(kind, topology, next(sizes))

    return choose_cold


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_a_cold_choice_on_one_host_is_as_much_work_for_16_ranks_as_for_2(kind: Collective) -> None:
    work = {}
    for size in (2, 3, 8, 13, 16):
        choose_cold = cold_choices(kind, single_host(size))
        choose_cold()  # The loads of a size are counted once for all choices.
        work[size] = calls_of(choose_cold)
    assert max(work.values()) < 4_000, work
    assert work[16] < 1.3 * work[2], work


@pytest.mark.parametrize("kind", Collective, ids=word)
def test_a_further_choice_between_hosts_takes_few_thousand_calls(kind: Collective) -> None:
    """All candidates are predicted from profiles that the first choice has made."""
    topology = Topology.even(16, 2)
    choose(kind, topology, 1)
    sizes = count(1_000_000)
    assert calls_of(lambda: choose(kind, topology, next(sizes))) < 25_000


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
    assert f"requested; {best} would be chosen" in text
    assert "sends 7 KiB (1.75 n)" in text
    with pytest.raises(InvalidArgumentError, match="'ringg' does not exist"):
        explain_text(ALL_REDUCE, topology, 4096, algorithm="ringg")


def test_a_thousand_ranks_are_predicted_from_formulas_in_seconds() -> None:
    topology = Topology.even(1024, 128)
    start = time.process_time()  # not the clock: others may compute next to the tests
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
