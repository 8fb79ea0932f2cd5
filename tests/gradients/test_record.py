"""Steps of a scheduler as observers are told of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from harness import world_in_threads
from test_scheduler import ENTRIES, SMALL, STEPS, order_of, train

import pycoll
from pycoll import _core
from pycoll.gradients.step_record import Step, StepKeeper
from pycoll.optim import Policy, Scheduler


class Kept:
    """An observer that records every step but the first."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.asked = 0

    @property
    def is_recording(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def scheduled(self, step: Step) -> None:
        self.steps.append(step)


@pytest.mark.parametrize("size", [1, 2])
def test_steps_are_told_to_an_observer(size: int) -> None:
    def run(comm: pycoll.Communicator, policy: Policy) -> None:
        kept = Kept()
        scheduler = Scheduler(comm, ENTRIES, policy=policy, observer=kept)
        train(comm, scheduler, False)
        assert [one.number for one in kept.steps] == list(range(1, STEPS))
        for number, step in enumerate(kept.steps, 1):
            assert [name for name, _ in step.ready] == [
                ENTRIES[n].name for n in order_of(comm.rank, number)
            ]
            assert step.begin_s <= step.ready[0][1] and step.ready[-1][1] <= step.flushed_s
            assert step.flushed_s <= step.end_s
            free_s = step.begin_s
            for one in step.travels:
                assert one.sent_s <= one.starts_s <= one.ends_s <= step.end_s
                assert one.starts_s >= free_s
                free_s = one.ends_s
            assert size == 1 or free_s > step.travels[0].starts_s
            assert all(begin <= end for begin, end in step.waits)
        last, comm_plan = kept.steps[-1], scheduler.comm_plan
        assert last.policy == comm_plan.policy
        sent = [one.nbytes for one in last.travels if one.what != "all_gather"]
        assert sent == [message.nbytes for message in comm_plan.messages]
        halves = [one.message for one in last.travels if one.what == "all_gather"]
        assert halves == list(comm_plan.gathers or ())

    _core.record_ends(True)
    try:
        for policy in (Policy("fixed", **SMALL), Policy("dear", **SMALL)):
            world_in_threads(size).run(lambda comm, p=policy: run(comm, p))
    finally:
        _core.record_ends(False)


def test_works_know_their_ends_where_these_are_recorded() -> None:
    def run(comm: pycoll.Communicator) -> bool:
        comm.barrier()
        begin_s = time.perf_counter()
        work = comm.all_reduce(np.ones(3), async_op=True)
        work.wait()
        end_s = work.ended_s()
        assert end_s is None or begin_s <= end_s <= time.perf_counter()
        return end_s is None

    assert world_in_threads(2).run(run) == [True] * 2
    _core.record_ends(True)
    try:
        assert world_in_threads(2).run(run) == [False] * 2
    finally:
        _core.record_ends(False)


def test_a_keeper_has_the_newest_step_with_the_ends_of_its_messages() -> None:
    keeper = StepKeeper()

    def run(comm: pycoll.Communicator) -> None:
        mine = keeper if comm.rank == 0 else None
        scheduler = Scheduler(comm, ENTRIES, policy=Policy("fixed", **SMALL), observer=mine)
        train(comm, scheduler, False)

    keeper.record(True)
    try:
        world_in_threads(2).run(run)
    finally:
        keeper.record(False)
    assert keeper.step is not None and keeper.step.number == STEPS - 1
    assert all(one.starts_s < one.ends_s for one in keeper.step.travels)
    assert keeper.step.travels
