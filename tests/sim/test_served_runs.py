"""The real executor with ranks that serve: they pass no array, and every worker gets exact sums."""

from __future__ import annotations

import random

import pytest
from cases import FLOAT32, Case

from pycoll import _core
from pycoll.errors import MismatchError, PeerLostError, PycollError
from pycoll.schedule.collectives import Collective
from pycoll.schedule.topology import Topology

HORIZON_S = 60.0
NAMES = (
    "servers",
    "servers_mixed",
    "hierarchical:direct+servers",
    "hierarchical:direct+servers_mixed",
    "hierarchical:binomial+servers",
)
AVG = 4


def served_case(seed: int) -> Case:
    draw = random.Random(seed)
    workers, servers = draw.randint(1, 10), draw.randint(1, 5)
    size = workers + servers
    topology = Topology.even(size, draw.randint(1, size)).serving(servers)
    case = Case(
        Collective.ALL_REDUCE,
        draw.choice(NAMES),
        size,
        0,
        [draw.choice([0, 1, 5, 700, 6000])],
        segment_bytes=draw.choice([64, 256, 4096]),
        topology=topology,
    )
    case.prepare()
    return case


@pytest.mark.parametrize("block", range(6))
def test_every_worker_gets_the_sum_whatever_the_network_does(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        case = served_case(seed)
        simulation = _core.Simulation(case.size, seed, "swarm")
        operations = [case.add_to(simulation, rank) for rank in range(case.size)]
        where = f"seed {seed}: {case} over {simulation}"
        assert simulation.run(HORIZON_S), f"{where}: it hangs"
        for rank, operation in enumerate(operations):
            simulation.check(operation)
            assert case.wrong_at(rank) is None, f"{where}: {case.wrong_at(rank)}"


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_an_average_divides_by_the_number_of_workers(servers: int) -> None:
    size = 4 + servers
    topology = Topology.even(size, 1).serving(servers)
    case = Case(Collective.ALL_REDUCE, "servers", size, 0, [1000], FLOAT32, topology=topology)
    case.prepare()
    simulation = _core.Simulation(size, servers, "swarm")
    operations = [case.add_to(simulation, rank, op=AVG) for rank in range(size)]
    assert simulation.run(HORIZON_S)
    for rank, operation in enumerate(operations):
        simulation.check(operation)
        if rank < 4:
            assert (case.outputs[rank] == sum(case.inputs[:4]) / 4).all()


def error_of(simulation: object, operation: int) -> PycollError | None:
    try:
        simulation.check(operation)
    except PycollError as error:
        return error
    return None


def test_a_worker_with_another_length_makes_every_rank_raise() -> None:
    topology = Topology.even(5, 1).serving(2)
    case = Case(Collective.ALL_REDUCE, "servers", 5, 0, [300], topology=topology)
    case.prepare()
    other = Case(Collective.ALL_REDUCE, "servers", 5, 0, [200], topology=topology)
    other.prepare()
    simulation = _core.Simulation(5, 7, "swarm")
    operations = [(other if rank == 1 else case).add_to(simulation, rank) for rank in range(5)]
    assert simulation.run(HORIZON_S)
    for operation in operations:
        assert isinstance(error_of(simulation, operation), MismatchError)


def test_with_a_lost_rank_survivors_finish_right_or_name_it() -> None:
    lost = 0
    for seed in range(60):
        case = served_case(1000 + seed)
        simulation = _core.Simulation(case.size, seed, "faults", horizon_s=200e-6)
        operations = [case.add_to(simulation, rank) for rank in range(case.size)]
        assert simulation.run(HORIZON_S), f"seed {seed}: {case} hangs"
        for rank, operation in enumerate(operations):
            if simulation.dead(rank):
                continue
            error = error_of(simulation, operation)
            if error is None:
                assert case.wrong_at(rank) is None, f"seed {seed}: {case.wrong_at(rank)}"
            else:
                assert isinstance(error, PycollError)
                lost += isinstance(error, PeerLostError)
    assert lost > 0, "no fault struck"
