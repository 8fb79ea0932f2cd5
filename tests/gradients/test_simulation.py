"""The simulation of a step, against the same events by a slow clock and by single segments."""

from __future__ import annotations

import random

import pytest

from pycoll.gradients.communication_plan import (
    IN,
    OUT,
    PS,
    SERVER,
    CommunicationPlan,
    Gradient,
    Rate,
    Rates,
    Stage,
)
from pycoll.gradients.points import GRAIN, Group, Point, plan_of
from pycoll.gradients.policies import POLICIES, Policy, comm_plan_of
from pycoll.gradients.simulate import simulate

HALF = Rate(0.5, 0.005)
RATES = Rates(Rate(1.0, 0.01), HALF, HALF)
#: Whole seconds for whole grains, so that the simulation and the clock are both exact.
EXACT = Rates(Rate(2.0, 1 / GRAIN), Rate(1.0, 1 / GRAIN), Rate(3.0, 1 / GRAIN))


class Thread:
    """Computes gradients, and hands over what is there before it goes on; in whole seconds."""

    def __init__(self, backward: int, moments: list[int], host_s: float) -> None:
        self._backward, self._moments, self._host_s = backward, moments, host_s
        self._computed = self.handed = 0
        self._left: float | None = None  # of what is being handed over

    @property
    def is_free(self) -> bool:
        """Whether the forward pass may begin."""
        return self._computed == self._backward and self.handed == len(self._moments)

    def look(self) -> None:
        """A second begins."""
        while self.handed < len(self._moments):
            if self._left is None and self._moments[self.handed] <= self._computed:
                self._left = self._host_s
            if self._left != 0:
                break
            self.handed += 1
            self._left = None

    def spend(self) -> None:
        """It passes."""
        if self._left:
            self._left -= 1
        elif self._computed < self._backward:
            self._computed += 1


def by_a_slow_clock(
    comm_plan: CommunicationPlan, gradients: list[Gradient], forward_s: list[float], rates: Rates
) -> float:
    """The same events in whole seconds, one after the other."""
    backward = int(max(one.ready_s for one in gradients))
    rate = rates.all_reduce if comm_plan.gathers is None else rates.reduce_scatter
    queue = [(n, int(m.ready_s(gradients)), rate) for n, m in enumerate(comm_plan.messages)]
    queue += [(n, backward, rates.all_gather) for n in comm_plan.gathers or ()]
    last_entry = {number: place for place, (number, _, _) in enumerate(queue)}
    assert rates.slowed in (0.0, 1.0), "what is computed in a second is all or nothing"
    thread = Thread(backward, [ready for _, ready, _ in queue], rates.host_s)
    reduced: set[int] = set()
    layer, layer_left = len(gradients) - 1, -1.0
    place, left = 0, 0.0
    for second in range(100_000):
        thread.look()
        if place < thread.handed and left == 0:
            left = queue[place][2].seconds(comm_plan.messages[queue[place][0]].nbytes)
        if thread.is_free and layer_left < 0:
            needs = [
                n
                for n, message in enumerate(comm_plan.messages)
                if any(piece.gradient == layer for piece in message.pieces)
            ]
            if all(n in reduced for n in needs):
                layer_left = rates.await_s + forward_s[layer]
        stands_still = left > 0 and rates.slowed == 1.0
        if not stands_still:
            thread.spend()
        if left > 0:
            left -= 1
            if left == 0:
                number = queue[place][0]
                if last_entry[number] == place:
                    reduced.add(number)
                place += 1
        if layer_left >= 0 and not stands_still:
            layer_left -= 1
            if layer_left == 0:
                layer, layer_left = layer - 1, -1.0
                if layer < 0:
                    return float(second + 1)
    raise AssertionError("the step has no end")


@pytest.mark.parametrize(
    ("host_s", "slowed", "await_s"),
    [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 1.0, 0.0), (2.0, 1.0, 3.0)],
)
@pytest.mark.parametrize("name", POLICIES)
def test_the_simulation_is_that_of_a_slow_clock(
    name: str, host_s: float, slowed: float, await_s: float
) -> None:
    dice = random.Random(7)
    rates = EXACT._replace(host_s=host_s, slowed=slowed, await_s=await_s)
    for _ in range(50):
        count = dice.randrange(1, 7)
        moments = sorted(dice.randrange(0, 40) for _ in range(count))
        gradients = [Gradient(GRAIN * dice.randrange(1, 9), float(at)) for at in moments]
        forward_s = [float(dice.randrange(1, 9)) for _ in range(count)]
        few = 3 * GRAIN
        policy = Policy(name, bucket_bytes=5 * few, partition_bytes=few, credit_bytes=few)
        comm_plan = comm_plan_of(policy, gradients, rates)
        found = simulate(comm_plan, gradients, rates, forward_s)
        assert found.step_s == by_a_slow_clock(comm_plan, gradients, forward_s, rates)
        if slowed:
            continue
        waiting = simulate(comm_plan, gradients, rates)
        operations = len(comm_plan.messages) + len(comm_plan.gathers or ())
        assert waiting.step_s == max(*waiting.done_s, moments[-1] + operations * host_s)


def by_segments(counts: list[int], moments: list[int], took: list[int], hop: int) -> list[int]:
    """When messages of so many segments are back: every segment passes every leg by itself.

    ``took``: the seconds of a segment on each leg. ``hop``: the seconds between two legs.
    """
    free = [0] * len(took)
    ends = []
    for count, moment in zip(counts, moments, strict=True):
        for _ in range(count):
            at = moment
            for leg, seconds in enumerate(took):
                at = free[leg] = max(at + (hop if leg else 0), free[leg]) + seconds
        ends.append(free[-1])
    return ends


@pytest.mark.parametrize("took", [[1, 1], [1, 1, 1], [1, 2, 2], [1, 1, 3]])
@pytest.mark.parametrize("hop", [0, 4])
def test_segments_that_pass_on_as_they_come_are_those_of_single_segments(
    took: list[int], hop: int
) -> None:
    """Legs of a message to servers, none of which is slower than the one behind it."""
    dice = random.Random(11)
    stages = tuple(
        Stage(Rate(0.0, seconds / GRAIN), (place,), float(before + hop))
        for seconds, before, place in zip(
            took, [0, *took], (OUT, SERVER, IN)[: len(took)], strict=False
        )
    )
    rates = EXACT._replace(push_pull=stages)
    for _ in range(50):
        count = dice.randrange(1, 9)
        counts = [dice.randrange(1, 9) for _ in range(count)]
        moments = sorted(dice.randrange(0, 40) for _ in range(count))
        gradients = [Gradient(GRAIN * n, float(at)) for n, at in zip(counts, moments, strict=True)]
        found = simulate(comm_plan_of(Policy("wfbp"), gradients, rates, PS), gradients, rates)
        assert list(found.done_s) == by_segments(counts, moments, took, hop)
    alone_s = by_segments([5], [0], took, hop)[0]
    assert rates.alone_s(PS, 5 * GRAIN) == alone_s
    assert rates.busy(PS).seconds(5 * GRAIN) == 5 * max(took)


def test_a_message_of_another_architecture_waits_for_both_legs() -> None:
    one = Rate(0.0, 1 / GRAIN)
    rates = EXACT._replace(push_pull=(Stage(one, (OUT,)), Stage(one, (IN,), 3.0)))
    gradients = [Gradient(4 * GRAIN, 1.0), Gradient(4 * GRAIN, 2.0), Gradient(GRAIN, 3.0)]
    point = Point((Group(0, 1, PS), Group(1, 2, PS), Group(2, 3)))
    comm_plan = plan_of("some", point, gradients, rates)
    # The second one leaves when the first one has; the all_reduce when the second one is back.
    assert simulate(comm_plan, gradients, rates).done_s == (8.0, 12.0, 15.0)


def test_computing_next_to_a_message_takes_longer_where_both_share_cores() -> None:
    """A message of 8 s from the second 2 on, next to 6 s of what is left of a backward pass."""
    comm_plan = comm_plan_of(
        Policy("wfbp"), gradients := [Gradient(8, 2.0), Gradient(0, 8.0)], RATES
    )
    rates = Rates(Rate(0.0, 1.0), HALF, HALF)
    exposed = [
        simulate(comm_plan, gradients, rates._replace(slowed=slowed)).exposed_s
        for slowed in (0.0, 0.25, 0.5, 1.0)
    ]
    # It ends 2 s behind the backward pass, or with it; or the pass ends 2 s, or all of 6 s, later.
    assert exposed == [2.0, 2.0, 4.0, 8.0]


def test_priorities_shorten_the_step_where_the_forward_pass_overlaps() -> None:
    gradients = [Gradient(100_000, 1.0), Gradient(100, 2.0)]
    forward_s = [10.0, 500.0]
    step = {
        name: simulate(
            comm_plan_of(Policy(name, partition_bytes=6400, credit_bytes=6400), gradients, RATES),
            gradients,
            RATES,
            forward_s,
        ).step_s
        for name in POLICIES
    }
    assert step["bytescheduler"] < min(step["bsp"], step["wfbp"], step["mg_wfbp"], step["fixed"])


def test_messages_that_hold_up_the_thread_delay_the_gradients_behind_them() -> None:
    rates = RATES._replace(coded=(("a2a+one", Rate(1.0, 0.01)),))
    gradients = [Gradient(100, 1.0), Gradient(100, 2.0)]
    plan = comm_plan_of(Policy("wfbp"), gradients, rates, "a2a+one")
    assert simulate(plan, gradients, rates).done_s == (3.0, 5.0)
    held = simulate(plan, gradients, rates._replace(holding=("a2a+one",)))
    assert held.done_s == (3.0, 6.0) and held.exposed_s == 4.0
    free = comm_plan_of(Policy("wfbp"), gradients, rates, "a2a")
    assert simulate(free, gradients, rates._replace(holding=("a2a+one",))).done_s == (3.0, 5.0)
