"""Steps that change no more, and what interrupts them: the negotiation and the controller by
themselves, with ranks as threads."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

import pytest
import torch
from harness import Counting, fresh_world, world_in_threads
from torch_ranks import raised

import pycoll
from pycoll.torch import Sum
from pycoll.torch.horovod.controller import HELP_S, Controller
from pycoll.torch.horovod.horovod_errors import HorovodInternalError
from pycoll.torch.horovod.negotiation import Negotiation
from pycoll.torch.horovod.tasks import AllReduce, Barrier, reduction_of
from pycoll.torch.horovod.timeline import Timeline
from pycoll.torch.horovod.variables import Variables

Comm = pycoll.Communicator
PLAIN = json.dumps({"shape": [3], "joinable": True})
SEED = os.environ.get("TEST_SEED", "0")


def test_a_step_of_known_names_is_one_exchange_whatever_the_order() -> None:
    def rank(comm: Comm) -> list[str]:
        counting: Any = Counting(comm)
        negotiation = Negotiation(counting, range(comm.size))
        mine = random.Random(f"{SEED}/{comm.rank}")
        names = [f"t{number}" for number in range(200)]
        for step in range(8):
            if step == 2:
                counting.calls.clear()
            mine.shuffle(names)
            for name in names:
                negotiation.add(name, PLAIN, False)
            assert sorted(one.key for one in negotiation.round().ready) == sorted(names)
            assert not negotiation.waits
        calls: list[str] = counting.calls
        return calls

    assert world_in_threads(3).run(rank) == [["all_reduce"] * 6] * 3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sets_that_change_settle_when_the_last_rank_has_a_name(size: int) -> None:
    """Every rank knows from the seed what the others have, and so what each round must settle."""

    def rank(comm: Comm) -> int:
        negotiation = Negotiation(comm, range(comm.size))
        common = random.Random(f"{SEED}/{size}")
        names = [f"t{number}" for number in range(90)]
        have: list[set[str]] = [set() for _ in range(size)]
        count = 0
        for step in range(60):
            whole_step = step % 4 < 2
            for r in range(size):
                wanted = [n for n in names if n not in have[r]]
                if not whole_step:
                    wanted = common.sample(wanted, common.randrange(len(wanted) + 1))
                common.shuffle(wanted)
                have[r].update(wanted)
                for name in wanted if r == comm.rank else ():
                    negotiation.add(name, PLAIN, name == "t7")
            ready = negotiation.round().ready
            expected = set.intersection(*have)
            assert {one.key for one in ready} == expected and len(ready) == len(expected)
            assert not any(one.problem for one in ready)
            for one in have:
                one.difference_update(expected)
            assert negotiation.waits == bool(have[comm.rank])
            count += len(ready)
        return count

    assert len(set(world_in_threads(size).run(rank))) == 1


def test_other_terms_after_steady_steps_are_a_problem_of_that_name_alone() -> None:
    other = json.dumps({"shape": [4], "joinable": True})

    def rank(comm: Comm) -> list[list[str]]:
        negotiation = Negotiation(comm, range(comm.size))
        found = []
        for step in range(6):
            for name in ("a", "b", "c"):
                odd = step == 3 and name == "b" and comm.rank == 1
                negotiation.add(name, other if odd else PLAIN, False)
            problems = []
            while negotiation.waits:
                problems += [one.problem for one in negotiation.round().ready if one.problem]
            found.append(problems)
        return found

    text = "the ranks disagree about b: shape is [3] on rank 0, [4] on rank 1"
    assert world_in_threads(2).run(rank) == [[[], [], [], [text], [], []]] * 2


def test_a_rank_that_joins_after_steady_steps_gives_zeros_to_all_names() -> None:
    def rank(comm: Comm) -> tuple[list[int], int | None]:
        negotiation = Negotiation(comm, range(comm.size))
        names = [f"t{number}" for number in range(70)]
        counts = []
        last = None
        for step in range(7):
            if comm.rank == 1 and step == 4:
                negotiation.join()
            for name in names if comm.rank != 1 or step < 4 else ():
                negotiation.add(name, PLAIN, False)
            count = 0
            while count < len(names):
                ready = negotiation.round().ready
                assert not any(one.problem for one in ready)
                count += len(ready)
            counts.append(count)
        if comm.rank != 1:
            negotiation.join()
        while last is None:
            last = negotiation.round().last_joined
        assert not negotiation.waits
        return counts, last

    first, *others = world_in_threads(3).run(rank)
    assert first[0] == [70] * 7 and first[1] == 2
    assert all(other == first for other in others)


def test_a_round_that_others_stay_away_from_is_ended_later() -> None:
    gone_on = threading.Event()

    def rank(comm: Comm) -> list[str]:
        negotiation = Negotiation(comm, range(comm.size))
        negotiation.add("x", PLAIN, False)
        if comm.rank != 0:
            assert gone_on.wait(60)
            return [one.key for one in negotiation.round().ready]
        negotiation.begin()
        for _ in range(2):
            assert negotiation.end(0.02) is None
            assert negotiation.under_way and negotiation.waits
        gone_on.set()
        found = negotiation.end(None)
        assert found is not None and not negotiation.under_way
        return [one.key for one in found.ready]

    assert world_in_threads(2).run(rank) == [["x"]] * 2


# Coordinators


def controller_of(comm: Comm) -> Controller:
    own = comm.split(0)
    assert own is not None
    return Controller(own, range(comm.size), Timeline(), Variables())


def reduction(value: float, count: int = 3) -> AllReduce:
    tensors = [torch.full((count,), value)]
    return AllReduce(tensors, tensors, reduction_of(Sum))


def result_of(controller: Controller, task: AllReduce) -> list[float]:
    assert controller.wait(task, None)
    if task.error is not None:
        raise task.error
    values: list[float] = task.result[0].tolist()
    return values


def test_whoever_waits_leaves_the_round_to_the_thread_when_others_are_late() -> None:
    def rank(comm: Comm) -> list[float]:
        controller = controller_of(comm)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(10 * HELP_S)
        task = reduction(1.0 + comm.rank)
        controller.submit(task, "x", waits=True)
        if comm.rank == 0:
            assert not controller.wait(task, HELP_S / 4)
        found = result_of(controller, task)
        comm.barrier()
        controller.close()
        return found

    assert world_in_threads(2).run(rank) == [[3.0] * 3] * 2


def test_an_interrupt_while_waiting_for_others_loses_nothing() -> None:
    def rank(comm: Comm) -> list[list[float]]:
        controller = controller_of(comm)
        comm.barrier()
        first = reduction(1.0 + comm.rank)
        if comm.rank == 0:
            ending = controller._negotiation.end

            def interrupted(limit_s: float | None) -> Any:
                controller._negotiation.end = ending  # type: ignore[method-assign]  # once
                raise KeyboardInterrupt

            controller._negotiation.end = interrupted  # type: ignore[method-assign]  # see above
            controller.submit(first, "x", waits=True)
            raised(KeyboardInterrupt, controller.wait, first, None)
            comm.barrier()
        else:
            comm.barrier()
            controller.submit(first, "x")
        second = reduction(2.0)
        controller.submit(second, "y")
        found = [result_of(controller, one) for one in (first, second)]
        comm.barrier()
        controller.close()
        return found

    assert world_in_threads(2).run(rank) == [[[3.0] * 3, [4.0] * 3]] * 2


def test_what_each_rank_alone_has_fails_with_the_names_of_the_others() -> None:
    def rank(comm: Comm) -> tuple[list[str], list[float]]:
        controller = controller_of(comm)
        for step in range(3):
            tasks = [reduction(float(step)) for _ in range(40)]
            for number, task in enumerate(tasks):
                controller.submit(task, f"t{number}")
            assert all(result_of(controller, one) == [2.0 * step] * 3 for one in tasks)
        controller.comm.timeout_s = 2.0
        alone, shared = reduction(1.0), reduction(2.0)
        controller.submit(alone, f"only {comm.rank}")
        controller.submit(shared, "t0")
        both = result_of(controller, shared)
        told = raised(HorovodInternalError, result_of, controller, alone)
        controller.comm.timeout_s = 30.0
        # A rank that waits for nothing takes no part, and the other has still to be told.
        end = reduction(1.0)
        controller.submit(end, "end")
        assert result_of(controller, end) == [2.0] * 3
        comm.barrier()
        controller.close()
        return [told], both

    world = fresh_world(2)
    try:
        (told0, both0), (told1, both1) = world.run(rank)
    finally:
        world.close()
    assert both0 == both1 == [4.0] * 3
    assert "allreduce.only 0 waited 2 s for rank 1, while rank 0 had it" in told0[0], told0
    assert "allreduce.only 1 waited 2 s for rank 0, while rank 1 had it" in told1[0], told1


def test_tensors_that_lie_otherwise_on_one_rank_are_reduced_with_the_others() -> None:
    """How a tensor lies in memory is no matter of terms, so messages must not depend on it."""

    def rank(comm: Comm) -> list[list[float]]:
        controller = controller_of(comm)
        for _ in range(3):
            odd = torch.arange(12.0).reshape(3, 4)
            given = odd.t().contiguous().t() if comm.rank == 1 else odd
            needs = torch.ones(5, requires_grad=comm.rank == 1)
            tasks = [reduction(1.0), reduction(2.0)]
            tasks += [AllReduce([one], [one], reduction_of(Sum)) for one in (given, needs)]
            for number, task in enumerate(tasks):
                controller.submit(task, f"t{number}")
            for task in tasks:
                result_of(controller, task)
            assert torch.equal(given, 2 * torch.arange(12.0).reshape(3, 4))
            assert needs.detach().tolist() == [2.0] * 5
        comm.barrier()
        controller.close()
        return [one.result[0].tolist() for one in tasks[:2]]

    assert world_in_threads(2).run(rank) == [[[2.0] * 3, [4.0] * 3]] * 2


def test_barriers_without_a_name_travel_as_bits_after_a_while() -> None:
    def rank(comm: Comm) -> int:
        controller = controller_of(comm)
        negotiation = controller._negotiation
        words = 0
        telling = negotiation._share_news

        def counted(*args: Any) -> Any:
            nonlocal words
            words += 1
            return telling(*args)

        negotiation._share_news = counted  # type: ignore[method-assign]  # to see that it rests
        for number in range(100):
            task = Barrier()
            controller.submit(task, None, waits=True)
            assert controller.wait(task, None) and task.error is None
            if number == 49:
                words = 0
        comm.barrier()
        controller.close()
        return words

    assert world_in_threads(2).run(rank) == [0, 0]


def test_steady_barriers_and_reductions_take_few_steps_in_python() -> None:
    """Functions that the only rank enters: what a call costs in addition to the exchange."""

    def entered(controller: Controller, task: Any, name: str | None) -> int:
        count = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(note)
        try:
            controller.submit(task, name, waits=True)
            controller.wait(task, None)
        finally:
            sys.setprofile(None)
        return count

    def rank(comm: Comm) -> list[int]:
        controller = controller_of(comm)
        for _ in range(70):
            found = [
                entered(controller, Barrier(), None),
                entered(controller, reduction(1.0), "x"),
            ]
        controller.close()
        return found

    (counts,) = world_in_threads(1).run(rank)
    assert counts[0] <= 18 and counts[1] <= 23, counts
