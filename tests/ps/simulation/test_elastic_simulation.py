"""Elastic rounds on a simulated network: workers that are gone are in none of the open rounds."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from simulated_servers import Program, Records
from test_invariants import CheckedWorld
from test_newcomer_simulation import come_back, fault, states
from test_store_simulation import KEYS, kill_at, made_keys

from pycoll.ps.consistency import BSP
from pycoll.ps.messages import ENDS_ROUND, PULLS, Kind

ELASTIC = BSP(elastic=True)
STEPS = 5
#: STORE_SEEDS=1000 runs as many seeds of each test.
SEEDS = int(os.environ.get("STORE_SEEDS", "100"))


class Rounds:
    """A world whose workers push (step, rank, process) to each key in each step.

    ``seen``: what was read, as (key, version, value). ``ended``: by process the steps whose end the
    servers have acknowledged. ``by_key``: each push ends the round of its key alone.
    """

    def __init__(self, seed: int, replicas: int, by_key: bool = False, servers: int = 2) -> None:
        self.world = CheckedWorld(seed, ELASTIC, 3, servers, replicas, Records())
        self.by_key = by_key
        self.seen: list[tuple[int, int, Any]] = []
        self.ended: dict[tuple[int, int], int] = {}
        for rank in range(3):
            self.world.start(rank, self.early(rank))

    def early(self, rank: int) -> Program:
        yield from made_keys(self.world, rank, ())
        yield from self.steps(rank, 0)

    def late(self, rank: int) -> Program:
        yield from self.world.counted(rank)
        # A worker may join before the keys are made, and calls init like the others.
        yield from made_keys(self.world, rank, ())
        yield from self.steps(rank, self.world.starts[rank])

    def steps(self, rank: int, first: int) -> Program:
        world = self.world
        process = world.serials.get(rank, 0)
        flags = ENDS_ROUND | PULLS if self.by_key else 0
        for step in range(first, STEPS):
            pulls = [] if self.by_key else [world.request(rank, Kind.PULL, key) for key in KEYS]
            yield pulls
            tag = (step, rank, process)
            pushes = [
                world.request(rank, Kind.PUSH, key, payload=tag, round=step, flags=flags)
                for key in KEYS
            ]
            yield pushes
            for one in pushes if self.by_key else pulls:
                assert one.answer is not None
                self.seen.append((one.message.key, one.answer.round, one.answer.payload))
            if not self.by_key:
                yield world.clock(rank, step + 1)
            self.ended[rank, process] = step + 1

    def run(self) -> None:
        self.world.run()
        assert self.world.failed == {}, self.world.failed

    def values(self) -> dict[int, list[Any]]:
        """By shard the values of its keys, of which all servers of the chain have the same."""
        found = states(self.world)
        assert set(found) == set(range(len(self.world.view.chains)))
        for number, held in found.items():
            assert all(one == held[0] for one in held), (number, held)
        return {number: list(held[0][1].values()) for number, held in found.items()}

    def check(self, stay: set[int]) -> None:
        """Assert what every round promises. ``stay``: the workers that are in all rounds."""
        for number, values in self.values().items():
            spans = [self.check_value(value, stay) for value in values]
            assert self.by_key or all(one == spans[0] for one in spans), (number, spans)
        final = self.final()
        for key, version, value in self.seen:
            assert tuple(value) == tuple(final[key][:version]), (key, version, value)

    def final(self) -> dict[int, Any]:
        shards = self.world.servers.items()
        found = [one for rank, one in shards if rank in self.world.alive]
        return {
            key: part.value
            for server in found
            for replica in server.replicas.values()
            for (key, _), part in replica.shard.parts.items()
        }

    def check_value(self, value: Any, stay: set[int]) -> dict[tuple[int, int], list[int]]:
        """Return by process the rounds of a key that have its push."""
        assert len(value) == STEPS, value
        spans: dict[tuple[int, int], list[int]] = {}
        for step, (pushes, workers) in enumerate(value):
            ranks = [rank for _, rank, _ in pushes]
            assert ranks == sorted(set(ranks)) and stay <= set(ranks), (step, pushes)
            assert workers == len(ranks) and {tag[0] for tag in pushes} == {step}, (step, pushes)
            for _, rank, process in pushes:
                spans.setdefault((rank, process), []).append(step)
        for (rank, process), found in spans.items():
            first = self.world.starts[rank] if process else 0
            assert found == list(range(first, first + len(found))), (rank, process, found)
            # A round that has ended keeps its pushes.
            assert found[-1] + 1 >= self.ended.get((rank, process), 0), (rank, process, found)
        return spans


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("replicas", [0, 1])
def test_a_worker_killed_ahead_of_any_message_is_in_no_open_round(
    replicas: int, by_key: bool
) -> None:
    whole = Rounds(7, replicas, by_key)
    whole.run()
    whole.check({0, 1, 2})
    boundaries, partial = whole.world.boundaries, 0
    assert boundaries > 100
    for boundary in range(1, boundaries + 1):
        victim = boundary % 3
        found = Rounds(7, replicas, by_key)
        kill_at(found.world, boundary, victim)
        found.run()
        stay = {0, 1, 2} - {victim}
        assert found.world.ended >= stay, (boundary, found.world.ended)
        found.check(stay)
        for server in found.world.servers.values():
            for replica in server.replicas.values():
                shard = replica.shard
                assert victim in replica.stats()["gone"], boundary
                assert not any(part.pending for part in shard.parts.values()), boundary
        partial += 0 < found.ended.get((victim, 0), 0) < STEPS
    assert partial > boundaries // 2, partial


def test_a_worker_and_a_server_killed_ahead_of_any_message_decide_the_same() -> None:
    """The server that takes over ends the round with the same workers."""
    whole = Rounds(7, 1)
    whole.run()
    for boundary in range(1, whole.world.boundaries + 1):
        server, victim = 3 + boundary % 2, boundary % 3
        for delay in (0, 1 + boundary % 7):
            found = Rounds(7, 1)
            kill_at(found.world, boundary, victim)
            if delay:
                kill_at(found.world, boundary + delay, server)
            else:
                found.world.faults[boundary] = functools.partial(both, found, victim, server)
            found.run()
            stay = {0, 1, 2} - {victim}
            assert found.world.ended >= stay, (boundary, server, found.world.ended)
            found.check(stay)


def both(rounds: Rounds, *ranks: int) -> None:
    for rank in ranks:
        rounds.world.kill(rank)


@pytest.mark.parametrize("by_key", [False, True])
def test_workers_and_servers_killed_in_every_seed_leave_exact_rounds(by_key: bool) -> None:
    partial = 0
    for seed in range(3 * SEEDS):
        found = Rounds(seed, 1 + seed % 2, by_key, 3)
        victims = found.world.random.sample((0, 1, 2), 1 + seed % 2)
        for rank in victims:
            fault(found.world, functools.partial(found.world.kill, rank))
        for rank in found.world.random.sample((3, 4, 5), seed % (2 + seed % 2)):
            fault(found.world, functools.partial(found.world.kill, rank))
        found.run()
        stay = {0, 1, 2} - set(victims)
        assert found.world.ended >= stay, (seed, found.world.ended)
        # A fault behind the last message does not happen.
        found.check(stay)
        partial += sum(0 < found.ended.get((one, 0), 0) < STEPS for one in victims)
    assert partial > SEEDS, partial


def test_workers_come_back_at_the_begin_of_a_round() -> None:
    back = 0
    for seed in range(2 * SEEDS):
        found = Rounds(seed, seed % 2)
        world = found.world
        fault(world, functools.partial(world.kill, 2), 120)
        world.at(world.random.uniform(0.2, 2.0), functools.partial(come_back, world, found.late))
        if seed % 3 == 2:
            fault(world, functools.partial(world.invite, found.late), 120)
        if seed % 4 == 3:
            fault(world, functools.partial(world.kill, world.random.choice((3, 4))))
        found.run()
        assert world.ended >= {0, 1}, (seed, world.ended)
        found.check({0, 1})
        # From its first round on, a process that joined is in the rounds of all keys.
        for rank, process in world.serials.items():
            if rank in world.ended and (first := world.starts.get(rank, STEPS)) < STEPS:
                for values in found.values().values():
                    spans = [found.check_value(value, {0, 1}) for value in values]
                    wanted = list(range(first, STEPS))
                    assert all(one[rank, process] == wanted for one in spans), (seed, rank)
                back += rank == 2
    assert back > SEEDS // 4, back


def test_a_worker_is_refused_while_keys_have_no_common_round() -> None:
    found = Rounds(3, 0, by_key=True)
    world = found.world
    fault(world, functools.partial(world.kill, 2), 60)
    world.at(50.0, functools.partial(come_back, world, found.late))
    world.run()
    (failures,) = world.failed.values()
    text = "the store is BSP(elastic=True), and push_pull() ended rounds of some keys alone"
    assert all(text in one.failure for one in failures if one.failure), failures
    assert world.ended >= {0, 1}
