"""The fit finds links that are known from the times of plans, also among noise."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from pycoll.algorithms import lookup
from pycoll.cost.model import LINKS, SEGMENT_BYTES, Link, Terms
from pycoll.cost.profiles import profile
from pycoll.cost.selection import MEMORIES, SHARED
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import single_host
from pycoll.tools.tune.fit import Observation, fit
from pycoll.tools.tune.machine_links import COLLECTIVES, Case, distinct_algorithms
from pycoll.tools.tune.machine_links import observations as weighed

KNOWN = Link(
    alpha=0.7e-6,
    beta=1 / 9e9,
    gamma=1 / 22e9,
    overhead=0.2e-6,
    spill=1 / 6e9,
    cache_bytes=1 << 23,
    call=0.5e-6,
)
SIZES = [32 * 4**power for power in range(11)]
RANDOM = int(os.environ.get("TEST_SEED", "0"))


def observations(
    link: Link,
    collectives: tuple[str, ...] = ("all_reduce", "broadcast", "all_gather"),
    worlds: tuple[int, ...] = (2, 4),
) -> list[Observation]:
    """Exact times of the plans that tune would run on so many ranks."""
    found = []
    for ranks in worlds:
        for word in collectives:
            for name in distinct_algorithms(word, ranks):
                shape = profile(lookup(Collective[word.upper()], name), single_host(ranks))
                for segment_bytes in (SEGMENT_BYTES, SEGMENT_BYTES // 4):
                    for nbytes in SIZES:
                        terms = shape.terms(nbytes, segment_bytes)[0]
                        found.append(Observation(terms, nbytes, link.seconds(terms, nbytes)))
    return found


@pytest.mark.parametrize("worlds", [(2,), (2, 4)])
def test_exact_times_give_the_link_back(worlds: tuple[int, ...]) -> None:
    found = fit(observations(KNOWN, worlds=worlds), LINKS["shm"])
    assert found.link.cache_bytes == KNOWN.cache_bytes
    for name in ("alpha", "beta", "gamma", "overhead", "spill", "call"):
        assert getattr(found.link, name) == pytest.approx(getattr(KNOWN, name), rel=0.02), name
    assert max(map(abs, found.errors)) < 0.01


@pytest.mark.parametrize("seed", range(RANDOM, RANDOM + 5))
def test_noise_and_stalls_spoil_predictions_little(seed: int) -> None:
    generator = random.Random(seed)
    exact = observations(KNOWN)
    noisy = [
        replace(
            one,
            seconds=one.seconds
            * generator.uniform(0.95, 1.1)
            * (generator.uniform(2, 20) if generator.random() < 0.05 else 1),
        )
        for one in exact
    ]
    link = fit(noisy, LINKS["shm"]).link
    for one in exact:
        assert link.seconds(one.terms, one.nbytes) == pytest.approx(one.seconds, rel=0.3)


def test_where_nothing_spills_what_the_caches_say_counts() -> None:
    short = [one for one in observations(KNOWN) if one.terms.touched < KNOWN.cache_bytes // 4]
    for known in (3 << 19, 1 << 23):
        assert fit(short, LINKS["shm"], spills_from=known).link.cache_bytes == known


def test_times_say_more_of_spilling_than_caches_do() -> None:
    found = fit(observations(KNOWN), LINKS["shm"], spills_from=KNOWN.cache_bytes // 4)
    assert found.link.cache_bytes == KNOWN.cache_bytes


def test_half_is_as_bad_as_twice() -> None:
    start = LINKS["shm"]._replace(spill=0.0)
    terms = Terms(1.0, 0.0, 1e6, 0.0)
    times = [2e-4, 8e-4]
    link = fit([Observation(terms, 1 << 20, s) for s in times], start, ("beta",)).link
    assert link.seconds(terms, 1 << 20) == pytest.approx(4e-4, rel=0.05)


def test_a_stall_counts_no_more_than_any_other_error() -> None:
    terms = Terms(1.0, 0.0, 1e6, 0.0)
    times = [4e-4, 4.1e-4, 3.9e-4, 4.05e-4, 1.0]
    link = fit([Observation(terms, 1 << 20, s) for s in times], LINKS["shm"], ("beta",)).link
    assert link.seconds(terms, 1 << 20) == pytest.approx(4e-4, rel=0.1)


def test_what_weighs_more_is_met_more_nearly() -> None:
    terms = Terms(1.0, 0.0, 1e6, 0.0)
    heavy, light = (Observation(terms, 1 << 20, s, weight=w) for s, w in ((4e-4, 9.0), (5e-4, 1.0)))
    link = fit([heavy, light], LINKS["shm"], ("beta",)).link
    assert link.seconds(terms, 1 << 20) == pytest.approx(4e-4 * 1.25**0.1, rel=0.02)


def test_collectives_weigh_alike_however_many_algorithms_they_have() -> None:
    cases = [
        Case("all_reduce", name, 2, 4096, SEGMENT_BYTES) for name in ("ring", "tree", "direct")
    ]
    cases.append(Case("broadcast", "direct", 2, 4096, SEGMENT_BYTES))
    found = weighed(dict.fromkeys(cases, 1e-6))
    assert [one.weight for one in found] == pytest.approx([2 / 3] * 3 + [2.0])
    assert sum(one.weight for one in found) == pytest.approx(len(cases))


def test_a_figure_that_nothing_shows_keeps_its_starting_value() -> None:
    start = LINKS["shm"]
    found = fit(observations(KNOWN, ("broadcast",)), start).link
    assert found.gamma == pytest.approx(start.gamma, rel=1e-3)
    assert found.beta == pytest.approx(KNOWN.beta, rel=0.02)


def test_no_figure_falls_to_nothing() -> None:
    flat = [replace(one, seconds=1e-6) for one in observations(KNOWN)]
    found, start = fit(flat, LINKS["shm"]).link, LINKS["shm"]
    assert found.beta > 0.01 * start.beta
    assert found.alpha > 0.01 * start.alpha


def test_nothing_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([], LINKS["shm"])


def test_both_memories_tell_copies_from_reads_in_place() -> None:
    """Long arrays that peers read in place say nothing of copies, and ordinary ones nothing of
    reads."""
    known = KNOWN._replace(beta=1 / 9e9, reach=1 / 31e9)
    found = []
    for memory in MEMORIES:
        for word in COLLECTIVES:
            for name in distinct_algorithms(word, 2):
                for nbytes in (32 * 8**power for power in range(8)):
                    case = Case(word, name, 2, nbytes, SEGMENT_BYTES, memory=memory)
                    one = case.observation(0.0)
                    assert memory == SHARED or one.terms.reached == 0
                    found.append(replace(one, seconds=known.seconds(one.terms, nbytes)))
    link = fit(found, LINKS["shm"]).link
    assert link.beta == pytest.approx(known.beta, rel=0.05)
    assert link.reach == pytest.approx(known.reach, rel=0.05)
