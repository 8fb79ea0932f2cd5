"""The real executor of all ranks over the virtual network, hundreds of seeds.

Every test is a function of its seed: the failing one is printed, and running it again replays the
same events in the same order. TEST_SEED shifts all seeds: a longer hunt sees new ones.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import Case, random_case

from pycoll import _core
from pycoll.errors import (
    ClosedError,
    MismatchError,
    PeerLostError,
    PycollError,
    TimeoutError,
)
from pycoll.schedule.collectives import Collective

BASE = int(os.environ.get("TEST_SEED", "0"))
HORIZON_S = 60.0


def seeds(count: int) -> list[int]:
    return [BASE * 1_000_003 + number for number in range(count)]


def outcome(simulation: object, operation: int) -> PycollError | None:
    try:
        simulation.check(operation)
    except PycollError as error:
        return error
    return None


def all_reduce(size: int, count: int, algorithm: str = "ring", **words: object) -> Case:
    case = Case(Collective.ALL_REDUCE, algorithm, size, 0, [count], **words)
    case.prepare()
    return case


def check_swarm(case: Case, seed: int) -> None:
    simulation = _core.Simulation(case.size, seed, "swarm")
    operations = [case.add_to(simulation, rank) for rank in range(case.size)]
    where = f"seed {seed}: {case} over {simulation}"
    assert simulation.run(HORIZON_S), f"{where}: it hangs"
    for rank, operation in enumerate(operations):
        simulation.check(operation)
        assert case.wrong_at(rank) is None, f"{where}: {case.wrong_at(rank)}"


@pytest.mark.parametrize("block", range(20))
def test_every_collective_is_exact_whatever_the_network_does(block: int) -> None:
    for seed in seeds(400)[block * 20 : block * 20 + 20]:
        check_swarm(random_case(seed), seed)


@pytest.mark.parametrize("algorithm", ["one_shot", "direct"])
def test_folds_longer_than_a_row_are_exact(algorithm: str) -> None:
    for seed in seeds(12):
        check_swarm(all_reduce(10 + seed % 11, 3000, algorithm), seed)


@pytest.mark.parametrize("block", range(15))
def test_under_faults_every_survivor_finishes_right_or_names_the_lost_rank(block: int) -> None:
    for seed in seeds(300)[block * 20 : block * 20 + 20]:
        cases = [random_case(seed * 7 + turn, (2, 7)) for turn in range(3)]
        size = cases[0].size
        cases = [case for case in cases if case.size == size]
        simulation = _core.Simulation(size, seed, "faults", horizon_s=200e-6)
        entered = [[case.add_to(simulation, rank) for case in cases] for rank in range(size)]
        where = f"seed {seed}: {[str(case) for case in cases]} over {simulation}"
        assert simulation.run(HORIZON_S), f"{where}: it hangs"
        for rank in range(size):
            if simulation.dead(rank):
                continue
            failed = False
            for case, operation in zip(cases, entered[rank], strict=True):
                error = outcome(simulation, operation)
                if error is None:
                    assert not failed, f"{where}: rank {rank} went on after a failure"
                    assert case.wrong_at(rank) is None, f"{where}: {case.wrong_at(rank)}"
                    continue
                failed = True
                assert isinstance(error, PeerLostError), f"{where}: rank {rank}: {error!r}"
                assert error.ranks, where
                assert f"rank {error.rank}" in str(error), f"{where}: {error}"


def test_a_dead_rank_is_named_by_every_survivor() -> None:
    for seed in seeds(40):
        size = 2 + seed % 6
        case = all_reduce(size, 50_000)
        victim = seed % size
        simulation = _core.Simulation(size, seed, "plain")
        operations = [case.add_to(simulation, rank) for rank in range(size) if rank != victim]
        simulation.kill(victim)
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for operation in operations:
            error = outcome(simulation, operation)
            assert isinstance(error, PeerLostError), f"seed {seed}: {error!r}"
            assert error.rank == victim, f"seed {seed}: {error}"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("count", {}),
        ("op", {"op": 1}),
        ("dtype", {"dtype": 3}),
        ("algorithm", {"plan_key": 2}),
    ],
)
def test_ranks_that_disagree_all_say_so_and_name_the_odd_one(
    what: str, words: dict[str, int]
) -> None:
    for seed in seeds(20):
        size = 3 + seed % 5
        odd = seed % size
        case = all_reduce(size, 40_000 if seed % 2 else 10)
        other = all_reduce(size, 999) if what == "count" else case
        simulation = _core.Simulation(size, seed, "swarm")
        operations = [
            other.add_to(simulation, rank, **words)
            if rank == odd
            else case.add_to(simulation, rank)
            for rank in range(size)
        ]
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        texts = set()
        for rank, operation in enumerate(operations):
            error = outcome(simulation, operation)
            assert isinstance(error, MismatchError), f"seed {seed}, {what}, rank {rank}: {error!r}"
            assert error.ranks == (odd,), f"seed {seed}, {what}, rank {rank}: {error}"
            texts.add(str(error))
        assert len(texts) == 1, f"seed {seed}: ranks tell different stories: {texts}"


def test_another_collective_on_one_rank_is_a_mismatch_on_all() -> None:
    for seed in seeds(40):
        size = 3 + seed % 5
        odd = seed % size
        case = all_reduce(size, 5_000)
        other = Case(Collective.BROADCAST, "binomial", size, odd, [5_000])
        other.prepare()
        simulation = _core.Simulation(size, seed, "swarm")
        operations = [
            (other if rank == odd else case).add_to(simulation, rank) for rank in range(size)
        ]
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for rank, operation in enumerate(operations):
            error = outcome(simulation, operation)
            assert isinstance(error, MismatchError), f"seed {seed}, rank {rank}: {error!r}"
            assert error.ranks == (odd,), f"seed {seed}, rank {rank}: {error}"
            assert "broadcast" in str(error)
            assert "all_reduce" in str(error)


def test_roots_that_disagree_are_found_on_every_rank() -> None:
    for seed in seeds(40):
        size = 3 + seed % 5
        odd = seed % size
        simulation = _core.Simulation(size, seed, "swarm")
        operations = []
        for rank in range(size):
            root = 1 if rank == odd else 0
            case = Case(Collective.BROADCAST, "binomial", size, root, [100])
            case.prepare()
            operations.append(case.add_to(simulation, rank))
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for rank, operation in enumerate(operations):
            error = outcome(simulation, operation)
            assert isinstance(error, MismatchError), f"seed {seed}, rank {rank}: {error!r}"
            assert error.ranks == (odd,), f"seed {seed}, rank {rank}: {error}"


def test_a_rank_that_comes_too_late_is_named_by_all() -> None:
    for seed in seeds(30):
        size = 2 + seed % 6
        late = seed % size
        case = all_reduce(size, 100)
        simulation = _core.Simulation(size, seed, "swarm")
        operations = [
            case.add_to(simulation, rank, timeout_s=0.5, at_s=3.0 if rank == late else 0.0)
            for rank in range(size)
        ]
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for rank, operation in enumerate(operations):
            error = outcome(simulation, operation)
            assert isinstance(error, TimeoutError), f"seed {seed}, rank {rank}: {error!r}"
            assert error.ranks == (late,), f"seed {seed}, rank {rank}: {error}"


def test_a_rank_that_leaves_is_named_by_those_who_wait_for_it() -> None:
    for seed in seeds(20):
        size = 2 + seed % 4
        case = all_reduce(size, 100)
        simulation = _core.Simulation(size, seed, "swarm")
        leaver = seed % size
        operations = [case.add_to(simulation, rank) for rank in range(size) if rank != leaver]
        simulation.close_when_done(leaver)
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for operation in operations:
            error = outcome(simulation, operation)
            assert isinstance(error, PeerLostError), f"seed {seed}: {error!r}"
            assert error.rank == leaver, f"seed {seed}: {error}"
            assert "closed" in str(error)


def test_messages_with_tags_find_their_receives_in_any_order() -> None:
    for seed in seeds(40):
        size = 2 + seed % 3
        random = np.random.default_rng(seed)
        simulation = _core.Simulation(size, seed, "swarm")
        expected = []
        operations = []
        for source in range(size):
            for dest in range(size):
                tags = [int(tag) for tag in random.permutation(5)]
                for tag in tags:
                    length = int(random.integers(0, 40_000)) if tag else 0
                    data = (np.arange(length) * 3 + source * 100 + dest * 10 + tag).astype(
                        np.float32
                    )
                    space = np.zeros(length, np.float32)
                    operations.append(
                        simulation.add_message(source, True, _core.view(data), dest, tag)
                    )
                    operations.append(
                        simulation.add_message(
                            dest, False, _core.view(space), source, tag, at_s=tag * 1e-6
                        )
                    )
                    expected.append((data, space))
        assert simulation.run(HORIZON_S), f"seed {seed}: hang"
        for operation in operations:
            simulation.check(operation)
        for data, space in expected:
            assert np.array_equal(data, space), f"seed {seed}"


def test_a_message_of_another_length_is_a_mismatch_for_its_receiver_only() -> None:
    simulation = _core.Simulation(2, 1, "plain")
    data, space = np.ones(10, np.float32), np.zeros(9, np.float32)
    sent = simulation.add_message(0, True, _core.view(data), 1, 5)
    received = simulation.add_message(1, False, _core.view(space), 0, 5)
    assert simulation.run(HORIZON_S)
    assert outcome(simulation, sent) is None
    error = outcome(simulation, received)
    assert isinstance(error, MismatchError)
    assert "40 bytes" in str(error)
    assert "36 bytes" in str(error)
    assert not space.any()


def test_equal_seeds_replay_the_same_events() -> None:
    traces = set()
    for _ in range(2):
        for seed in seeds(10):
            case = random_case(seed, (3, 6))
            simulation = _core.Simulation(case.size, seed, "swarm")
            for rank in range(case.size):
                case.add_to(simulation, rank)
            assert simulation.run(HORIZON_S)
            traces.add((seed, simulation.trace()))
    assert len(traces) == 10


def test_later_operations_of_a_failed_communicator_repeat_the_reason() -> None:
    case = all_reduce(3, 10)
    again = all_reduce(3, 10)
    simulation = _core.Simulation(3, 5, "plain")
    first = [case.add_to(simulation, rank) for rank in (0, 1)]
    later = [again.add_to(simulation, rank, at_s=1.0) for rank in (0, 1)]
    simulation.kill(2)
    assert simulation.run(HORIZON_S)
    for operation in first + later:
        error = outcome(simulation, operation)
        assert isinstance(error, PeerLostError)
        assert not isinstance(error, ClosedError)
        assert error.rank == 2
    assert "the communicator has failed" in str(outcome(simulation, later[0]))
