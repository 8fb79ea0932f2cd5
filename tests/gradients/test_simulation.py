"""The simulation of a step, against the same events by a slow clock."""

from __future__ import annotations

import random

import pytest

from pycoll.gradients.communication_plan import CommunicationPlan, Gradient, Rate, Rates
from pycoll.gradients.points import GRAIN
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


def test_computing_beside_a_message_takes_longer_where_both_share_cores() -> None:
    """A message of 8 s from the second 2 on, beside 6 s of what is left of a backward pass."""
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
