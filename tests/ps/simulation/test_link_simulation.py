"""Servers that do not reach each other, or are stopped, on a simulated network: nothing is lost."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
from simulated_servers import SILENCE_S, Program, World
from test_store_simulation import masks

from pycoll.ps.consistency import ASP
from pycoll.ps.messages import Kind

#: STORE_SEEDS=1000 runs as many seeds of each test.
SEEDS = int(os.environ.get("STORE_SEEDS", "100"))


def pushed(world: World) -> dict[int, int]:
    """By key the value with all pushes."""
    return {key: (1 << bits) - 1 for key, bits in world.history.bits.items()}


def check_values(world: World, seed: int) -> None:
    """Assert that each server that takes part holds each push once."""
    wanted = pushed(world)
    for rank in world.live_servers:
        for replica in world.servers[rank].replicas.values():
            # A server does not become a member before it has all.
            for (key, _), part in replica.shard.parts.items() if replica.chain else ():
                assert part.value == wanted[key], (seed, rank, key)


def sever(world: World, one: int, other: int, both: bool) -> None:
    world.cut(one, other)
    if both:
        world.cut(other, one)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_broken_connection_of_servers_that_do_not_manage_costs_one_of_them(replicas: int) -> None:
    parted = 0
    for seed in range(SEEDS):
        world = masks(seed, ASP, 3 + seed % 3, replicas)
        one, other = world.random.sample(range(4, 6 + seed % 3), 2)
        boundary = world.random.randint(1, 120)
        both = seed % 2 == 0
        world.faults[boundary] = functools.partial(sever, world, one, other, both)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.ended, world.failed)
        world.history.check()
        check_values(world, seed)
        if world.faults:
            continue
        parted += 1
        stopped = [rank for rank, server in world.servers.items() if server.has_stopped]
        assert len(stopped) == 1 and stopped[0] in (one, other), (seed, one, other, stopped)
        assert "go on without it" in world.servers[stopped[0]].voter.stop_reason
        view = world.view
        assert view.servers == tuple(rank for rank in world.servers if rank not in stopped), seed
        assert view.severed == () and all({*chain} <= {*view.servers} for chain in view.chains)
    assert parted > SEEDS // 2, parted


def test_any_connection_may_break_in_any_direction_and_a_server_may_die() -> None:
    """All workers end: a call has a result, or fails. Values of servers that go on are whole."""
    failures = 0
    for seed in range(SEEDS):
        world = masks(seed, ASP, 3 + seed % 3, 1 + seed % 2)
        draw, ranks = world.random, sorted(world.servers)
        for boundary in draw.sample(range(1, 150), 1 + seed % 3):
            one, other = draw.sample(ranks, 2)
            both = draw.random() < 0.5
            world.faults[boundary] = functools.partial(sever, world, one, other, both)
        if seed % 4 == 3:
            world.faults[151] = functools.partial(world.kill, draw.choice(ranks))
        failures += not is_whole_in_the_end(world, seed)
    assert failures < SEEDS // 4, failures


def is_whole_in_the_end(world: World, seed: int) -> bool:
    """Run a world; assert that all calls have a result or fail. Return whether none has failed."""
    world.run()
    while failed := world.failed.keys() & world.alive:
        # The others may wait for a key that it shall make, until it has gone.
        world.kill(min(failed))
        world.run(2 * world.now + 1000)
    assert world.ended == {0, 1, 2}, (seed, world.ended, world.failed)
    for requests in world.failed.values():
        assert all("gone" in one.failure or "lost" in one.failure for one in requests), seed
    if not world.failed:
        check_values(world, seed)
    return not world.failed


def test_a_manager_whose_orders_do_not_arrive_learns_of_that_from_others() -> None:
    """Server 5 does not hear the manager, which may not know that; server 4 cannot tell it."""
    parted = 0
    for seed in range(SEEDS):
        world = masks(seed, ASP, 4 + seed % 2, 1)
        first, second = world.random.sample(range(20, 60), 2)
        world.faults[first] = functools.partial(world.cut, 3, 5)
        world.faults[second] = functools.partial(sever, world, 3, 4, True)
        is_whole_in_the_end(world, seed)
        parted += 5 not in world.servers[3].voter.view.servers
    assert parted > SEEDS // 10, parted


def test_without_replicas_a_broken_connection_costs_nothing() -> None:
    for seed in range(SEEDS):
        world = masks(seed, ASP, 4, 0)
        one, other = world.random.sample((4, 5, 6), 2)
        boundary = world.random.randint(1, 60)
        world.faults[boundary] = functools.partial(sever, world, one, other, seed % 2 == 0)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.failed)
        world.history.check()
        assert world.view.chains == ((3,), (4,), (5,), (6,)), seed
        assert not any(server.has_stopped for server in world.servers.values())
        if not world.faults:
            assert world.view.severed == ((min(one, other), max(one, other)),), seed


def stopped_world(seed: int, servers: int) -> World:
    """A world in which a server is stopped for a while, and in which news reach worker 1 late."""
    world = masks(seed, ASP, servers, 1 + seed % 2 if servers > 2 else 1)
    victim = world.random.choice(sorted(world.servers))
    seconds = world.random.uniform(0.2, 4) * SILENCE_S
    world.lag = {(other, 1): 50.0 for other in world.servers if other != victim}
    world.faults[world.random.randint(1, 100)] = functools.partial(world.stop, victim, seconds)
    world.run()
    return world


def test_a_server_that_is_stopped_for_long_is_left_out_and_answers_no_more() -> None:
    left_out = 0
    for seed in range(SEEDS):
        world = stopped_world(seed, 3 + seed % 2)
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.ended, world.failed)
        world.history.check()
        check_values(world, seed)
        stopped = [one for one in world.servers.values() if one.has_stopped]
        for one in stopped:
            assert "go on without it" in one.voter.stop_reason, (seed, one.voter.stop_reason)
            assert one.me not in world.view.servers, seed
        left_out += len(stopped)
    assert left_out > SEEDS // 4, left_out


def test_two_servers_of_which_one_is_stopped() -> None:
    """The first one goes on without the second one, which cannot go on without the first one."""
    for seed in range(SEEDS // 2):
        world = stopped_world(seed, 2)
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.ended, world.failed)
        world.history.check()
        assert not world.servers[3].has_stopped, seed


@pytest.mark.parametrize("fenced", [True, False])
def test_a_worker_that_knows_an_old_view_reads_no_old_value(fenced: bool) -> None:
    """Server 3 answers reads of shard 0. It is stopped, and the others go on and acknowledge a
    push. Worker 1 does not know that yet. Without the fence some seeds read a value without it."""
    old = 0
    for seed in range(20):
        world = World(seed, ASP, workers=2, servers=3, replicas=1)
        world.fenced = fenced
        seen: list[Any] = []

        def first(world: World = world) -> Program:
            yield world.load(0, [0], 0)
            world.stop(3, 2 * SILENCE_S)
            world.lag = {(2, 1): 1e9, (4, 1): 1e9}
            yield [world.request(0, Kind.PUSH, 0, payload=1)]
            assert world.clients[0].view.number > 1
            # Server 3 was never told of this one.
            yield [world.request(0, Kind.PUSH, 0, payload=2)]

        def second(world: World = world, seen: list[Any] = seen) -> Program:
            yield 1.9 * SILENCE_S
            assert (world.ended, world.clients[1].view.number) == ({0}, 1), world.now
            pull = world.request(1, Kind.PULL, 0)
            yield [pull]
            assert pull.answer is not None
            seen.append(pull.answer.payload)

        world.slow = 0.001
        world.start(0, first())
        world.start(1, second())
        world.run(1e12)
        assert world.ended == {0, 1} and world.failed == {}, (seed, world.failed)
        old += seen != [3]
    assert (old == 0) == fenced, old


def test_a_stopped_server_does_not_go_on_when_those_that_went_on_have_ended() -> None:
    world = masks(1, ASP, 3, 1)
    world.run()
    server = world.servers[3]
    out: list[Any] = server.out
    server.pause()
    for rank in (4, 5):
        server.lose(rank)
    assert server.has_stopped and "of servers [3, 4, 5] only []" in server.voter.stop_reason
    assert {to for to, _ in out} >= {0, 1, 2}
