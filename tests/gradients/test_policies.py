"""Agendas: each is whole, merges are the best there are, and priorities are kept.

The oracle for merges is every way there is to merge, timed by the simulation (test_simulation.py).
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycoll.errors import InvalidArgumentError
from pycoll.gradients import policies
from pycoll.gradients.chooser import MERGING, OVERTAKING, decide
from pycoll.gradients.communication_plan import (
    CommunicationPlan,
    Gradient,
    GradientBucket,
    Piece,
    Rate,
    Rates,
    check,
)
from pycoll.gradients.methods import method_of
from pycoll.gradients.points import GRAIN, by_priority, transfer_of
from pycoll.gradients.policies import POLICIES, Policy, comm_plan_of
from pycoll.gradients.simulate import simulate

RATE = Rate(1.0, 0.01)
HALF = Rate(0.5, 0.005)
RATES = Rates(RATE, HALF, HALF)


def gradients_of(seed: int, count: int, kinds: Sequence[str] = ("float32",)) -> list[Gradient]:
    dice = random.Random(seed)
    now = 0.0
    found = []
    for _ in range(count):
        now += dice.choice((0.0, 0.25, 1.0, 3.0)) * dice.random()
        nbytes = dice.choice((0, 4, 64, 100, 1000, 5000))
        found.append(Gradient(nbytes, now, dice.choice(kinds)))
    return found


def every_policy() -> list[Policy]:
    small = [
        Policy(name, bucket_bytes=n, partition_bytes=n, credit_bytes=n, merge_bytes=merge)
        for name in POLICIES
        for n in (1, 70, 1000)
        for merge in (1, 500)
    ]
    return [*small, *MERGING, *OVERTAKING]


def merges(count: int) -> list[list[range]]:
    """Every way to cut ``count`` gradients into groups of neighbours."""
    return [
        [range(a, b) for a, b in itertools.pairwise((0, *cuts, count))]
        for number in range(count)
        for cuts in itertools.combinations(range(1, count), number)
    ]


def merged(groups: list[range], gradients: list[Gradient]) -> CommunicationPlan:
    messages = []
    for group in groups:
        for kind in dict.fromkeys(gradients[n].kind for n in group):
            numbers = [n for n in group if gradients[n].kind == kind]
            pieces = tuple(Piece(n, 0, gradients[n].nbytes) for n in numbers)
            messages.append(GradientBucket(pieces))
    return CommunicationPlan("some", tuple(messages))


def end_of_groups(groups: list[range], gradients: list[Gradient], rates: Rates) -> float:
    """The last end if a group starts, with a message per kind, when all of it is handed over."""
    rate = rates.all_reduce
    free = held_up = 0.0
    for group in groups:
        kinds = {gradients[n].kind for n in group}
        nbytes = sum(gradients[n].nbytes for n in group)
        held_up += len(kinds) * rates.host_s
        free = max(free, gradients[group[-1]].ready_s + held_up)
        free += len(kinds) * rate.alpha + nbytes * rate.beta
    return max(free, gradients[-1].ready_s + held_up)


@pytest.mark.parametrize("kinds", [("float32",), ("float32", "float16")])
@pytest.mark.parametrize("policy", every_policy(), ids=str)
def test_each_byte_travels_once(policy: Policy, kinds: tuple[str, ...]) -> None:
    for seed in range(20):
        gradients = gradients_of(seed, seed, kinds)
        comm_plan = comm_plan_of(policy, gradients, RATES)
        check(comm_plan, gradients)
        assert comm_plan == comm_plan_of(policy, gradients, RATES)


def test_a_broken_communication_plan_is_found() -> None:
    gradients = [Gradient(100, 0.0), Gradient(100, 1.0), Gradient(8, 2.0, "int32")]
    a, b, c = Piece(0, 0, 100), Piece(1, 0, 100), Piece(2, 0, 8)
    good = (GradientBucket((a, b)), GradientBucket((c,)))
    check(CommunicationPlan("good", good), gradients)
    for bad in (
        good[:1],
        (*good, GradientBucket((a,))),
        (GradientBucket((a, b, c)),),
        (GradientBucket((b, a)), good[1]),
        (GradientBucket(()), *good),
        (GradientBucket((Piece(0, 0, 64), b)), GradientBucket((Piece(0, 64, 100),)), good[1]),
        (GradientBucket((a, Piece(1, 64, 100))), GradientBucket((Piece(1, 0, 64),)), good[1]),
    ):
        with pytest.raises(AssertionError):
            check(CommunicationPlan("bad", bad), gradients)
    with pytest.raises(AssertionError):
        check(CommunicationPlan("bad", good, (0, 0)), gradients)


@given(st.integers(0, 2**32), st.integers(1, 9), st.booleans())
def test_mg_wfbp_is_the_best_of_all_merges(seed: int, count: int, mixed: bool) -> None:
    gradients = gradients_of(seed, count, ("float32", "int8") if mixed else ("float32",))
    dice = random.Random(seed)
    rate = Rate(dice.choice((0.0, 0.1, 1, 5)), 10 ** dice.uniform(-5, 0))
    rates = RATES._replace(all_reduce=rate, host_s=dice.choice((0.0, 0.01, 0.3, 2.0)))
    found = simulate(comm_plan_of(Policy("mg_wfbp"), gradients, rates), gradients, rates)
    least = min(end_of_groups(groups, gradients, rates) for groups in merges(count))
    assert found.step_s <= least * (1 + 1e-12)
    if not mixed:
        least = min(
            simulate(merged(groups, gradients), gradients, rates).step_s for groups in merges(count)
        )
        assert found.step_s == pytest.approx(least, rel=1e-12)


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_the_soonest_way_is_that_of_the_search_through_all_beginnings(
    seed: int, count: int
) -> None:
    """Figures are fractions of two, so that sums are exact and ties are ties."""
    dice = random.Random(seed)
    scale = dice.choice((0, 1, 16, 256))
    kinds = ("float32", "float16", "int8", "bool")[: dice.randrange(1, 5)]
    change = dice.choice((0.1, 1))
    now, kind, gradients = 0.0, kinds[0], []
    for _ in range(count):
        now += dice.randrange(scale + 1) / 64
        kind = dice.choice(kinds) if dice.random() < change else kind
        gradients.append(Gradient(dice.choice((0, 1, 8, 64, 1000)), now, kind))
    rate = Rate(dice.choice((0, 1, 64, 640)) / 64, dice.choice((0, 1, 16)) / 1024)
    costs = [("a2a", rate)]
    if dice.random() < 0.5:
        costs.append(("ps", Rate(dice.choice((0, 16, 320)) / 64, dice.choice((0, 2, 8)) / 1024)))
    host_s = dice.choice((0, 1, 64)) / 64
    found = policies._soonest_way(gradients, costs, host_s)
    assert found == policies._best_way(gradients, costs, host_s, 1, float("inf"))


def test_thousands_of_gradients_are_merged_in_no_time() -> None:
    """In steps of n log n; n squared took seconds."""
    dice = random.Random(1)
    now, gradients = 0.0, []
    for _ in range(20_000):
        now += dice.random() * 2e-5
        kind = dice.choice(("float32", "bfloat16"))
        gradients.append(Gradient(dice.choice((256, 4096, 1 << 20)), now, kind))
    for host_s in (0.0, 20e-6):
        rates = Rates(Rate(50e-6, 2e-10), HALF, HALF, host_s)
        begin = time.process_time()
        check(comm_plan_of(Policy("mg_wfbp"), gradients, rates), gradients)
        assert time.process_time() - begin < 10


def test_what_merging_is_for() -> None:
    """A dear start merges all; a free one merges nothing; a late gradient goes by itself."""
    even = [Gradient(100, float(n)) for n in range(6)]

    def sizes(alpha: float, beta: float, gradients: list[Gradient]) -> list[int]:
        rates = RATES._replace(all_reduce=Rate(alpha, beta))
        comm_plan = comm_plan_of(Policy("mg_wfbp"), gradients, rates)
        return [len(message.pieces) for message in comm_plan.messages]

    assert sizes(100.0, 1e-6, even) == [6]
    assert sizes(0.0, 0.005, even) == [1] * 6
    assert sizes(3.0, 0.0, [*even, Gradient(100, 50.0)])[-1] == 1


def test_fixed_fills_buckets() -> None:
    gradients = [Gradient(n, 0.0) for n in (30, 30, 30, 500, 10, 90, 1)]
    comm_plan = comm_plan_of(Policy("fixed", bucket_bytes=100), gradients, RATES)
    assert [message.nbytes for message in comm_plan.messages] == [90, 500, 100, 1]


def test_parts_are_cut_at_grains_and_no_longer_than_asked() -> None:
    gradients = [Gradient(1000, 0.0), Gradient(40, 0.0), Gradient(300, 0.0)]
    policy = Policy("bytescheduler", partition_bytes=200, merge_bytes=5000)
    comm_plan = comm_plan_of(policy, gradients, RATES)
    check(comm_plan, gradients)
    assert max(message.nbytes for message in comm_plan.messages) <= 200
    starts = [piece.start for message in comm_plan.messages for piece in message.pieces]
    assert all(start % GRAIN == 0 for start in starts)


def parts_by_priority(credit_bytes: int, sent_s: float) -> list[int]:
    """A back layer of four parts at 0 s, a front layer of two at 1.5 parts' time."""
    gradients = [Gradient(400, 0.0), Gradient(200, 1.5 * sent_s)]
    parts = [GradientBucket((Piece(0, n, n + 100),)) for n in range(0, 400, 100)]
    parts += [GradientBucket((Piece(1, n, n + 100),)) for n in range(0, 200, 100)]
    rates = RATES._replace(all_reduce=Rate(0.0, sent_s / 100))
    return by_priority([transfer_of(part, gradients) for part in parts], rates, credit_bytes)


def test_front_layers_overtake_between_parts() -> None:
    assert parts_by_priority(100, 1.0) == [0, 1, 4, 5, 2, 3]


def test_what_is_committed_on_credit_is_not_overtaken() -> None:
    assert parts_by_priority(200, 1.0) == [0, 1, 2, 4, 5, 3]
    assert parts_by_priority(400, 1.0) == [0, 1, 2, 3, 4, 5]
    assert parts_by_priority(1, 1.0) == [0, 1, 4, 5, 2, 3], "longer than all credit: one at a time"


# auto


def test_auto_merges_where_each_start_costs_and_the_step_waits_for_all() -> None:
    gradients = [Gradient(100, n * 0.01) for n in range(30)]
    decision = decide(Policy(), gradients, RATES)
    assert decision.comm_plan.policy == "mg_wfbp"
    assert decision.why.startswith("auto takes mg_wfbp: ")
    assert "wfbp" in decision.why and "bsp" in decision.why and "not hidden" in decision.why


def test_auto_sends_one_message_where_each_holds_up_the_thread_more_than_it_hides() -> None:
    """Ten small gradients, a cheap channel: to send each by itself hides all but the last of them,
    but takes ten times 20 us from the backward pass."""
    gradients = [Gradient(4096, 30e-6 * (n + 1)) for n in range(10)]
    cheap = Rates(Rate(5e-6, 1e-10), Rate(3e-6, 5e-11), Rate(3e-6, 5e-11))
    free = decide(Policy(), gradients, cheap)
    dear = decide(Policy(), gradients, cheap._replace(host_s=20e-6))
    assert len(free.comm_plan.messages) == 10
    assert len(dear.comm_plan.messages) == 1
    assert "each message takes 0 ns from the thread that computes" in free.why
    assert "each message takes 20 us from the thread that computes" in dear.why
    held_up = cheap._replace(host_s=20e-6)
    each, one = (simulate(made.comm_plan, gradients, held_up) for made in (free, dear))
    assert each.exposed_s > 200e-6 > one.exposed_s


def test_auto_hides_nothing_where_computing_stands_still_meanwhile() -> None:
    gradients = [Gradient(1 << 20, 1e-3 * (n + 1)) for n in range(10)]
    rates = Rates(Rate(50e-6, 1e-9), Rate(25e-6, 5e-10), Rate(25e-6, 5e-10), 5e-6)
    separate = decide(Policy(), gradients, rates)
    shared = decide(Policy(), gradients, rates._replace(slowed=1.0))
    assert len(separate.comm_plan.messages) > 1 == len(shared.comm_plan.messages)
    assert "100% of computing is lost" in shared.why and "is lost" not in separate.why


def test_auto_cuts_where_a_long_message_would_hold_up_the_next_forward_pass() -> None:
    long, fast = 400 << 20, Rates(Rate(1e-4, 1e-9), Rate(5e-5, 5e-10), Rate(5e-5, 5e-10))
    gradients = [Gradient(long, 0.01), Gradient(1000, 0.02)]
    decision = decide(Policy(), gradients, fast, [0.01, 0.6])
    parts = [one for one in decision.comm_plan.messages if one.pieces[0].gradient == 0]
    assert len(parts) > 1 or decision.comm_plan.gathers is not None
    assert decision.exposed_s < 0.01
    assert decide(Policy(), gradients, fast).comm_plan.policy == "mg_wfbp"


def test_auto_waits_for_all_at_once_where_single_waits_take_longer_than_they_hide() -> None:
    gradients = [Gradient(1 << 20, 1e-3 * (n + 1)) for n in range(10)]
    rates = Rates(Rate(1e-4, 1e-9), Rate(5e-5, 5e-10), Rate(5e-5, 5e-10), 5e-6)
    forward_s = [0.5e-3] * 10
    free = decide(Policy(), gradients, rates, forward_s)
    short = decide(Policy(), gradients, rates._replace(await_s=1e-6), forward_s)
    long = decide(Policy(), gradients, rates._replace(await_s=1e-3), forward_s)
    assert free.singly and short.singly and not long.singly
    assert free.comm_plan == short.comm_plan and "at once" not in free.why
    assert "a gradient by itself takes 1 us from the next forward pass" in short.why
    assert ", all at once: the least communication" in long.why.splitlines()[0]
    waiting = decide(Policy(), gradients, rates)
    assert long.comm_plan == waiting.comm_plan and waiting.singly


def test_a_draw_goes_to_waiting_for_all_at_once() -> None:
    gradients = [Gradient(1 << 20, 1e-3 * (n + 1)) for n in range(10)]
    rates = Rates(Rate(1e-4, 1e-9), Rate(5e-5, 5e-10), Rate(5e-5, 5e-10), 5e-6)
    forward_s = [5e-5] * 10
    assert decide(Policy(), gradients, rates, forward_s).singly
    drawn = decide(Policy(), gradients, rates._replace(await_s=1e-9), forward_s)
    assert not drawn.singly
    head, *lines = drawn.why.splitlines()
    times = dict(re.findall(r"  (\S.*?) +(\S+ \S+) not hidden", "\n".join(lines)))
    assert "takes mg_wfbp, all at once" in head
    assert times["mg_wfbp, all at once"] == times["mg_wfbp"] == next(iter(times.values()))


@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_auto_is_never_behind_a_candidate(seed: int, count: int, overlaps: bool) -> None:
    gradients = gradients_of(seed, count)
    forward_s = [0.5] * count if overlaps else None
    best = simulate(
        decide(Policy(), gradients, RATES, forward_s).comm_plan, gradients, RATES, forward_s
    )
    for policy in (*MERGING, *(OVERTAKING if overlaps else ())):
        comm_plan = comm_plan_of(policy, gradients, RATES)
        assert best.step_s <= simulate(comm_plan, gradients, RATES, forward_s).step_s + 1e-12


# Wrong requests


def test_wrong_policies_are_refused() -> None:
    half: Any = 1.5
    assert method_of("bsp") == (Policy("bsp"), None)
    for text, make in {
        "policy is 'best'": lambda: Policy("best"),
        "policy is 3": lambda: method_of(3),
        "bucket_bytes is 0": lambda: Policy("fixed", bucket_bytes=0),
        "credit_bytes is True": lambda: Policy("bytescheduler", credit_bytes=True),
        "partition_bytes is 1.5": lambda: Policy("bytescheduler", partition_bytes=half),
    }.items():
        with pytest.raises(InvalidArgumentError, match=text):
            make()
    with pytest.raises(InvalidArgumentError, match="gradient 1 is ready before"):
        comm_plan_of(Policy("wfbp"), [Gradient(1, 2.0), Gradient(1, 1.0)], RATES)
