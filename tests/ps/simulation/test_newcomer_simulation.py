"""New servers and workers of stores on a simulated network: nothing is lost, and clocks agree."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
from simulated_servers import Program, Records, World
from test_invariants import CheckedWorld
from test_store_simulation import KEYS, History, masks, random_calls

from pycoll.ps.consistency import ASP, BSP, SSP, Backup, Consistency
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.messages import Kind
from pycoll.ps.views import View

#: STORE_SEEDS=1000 runs as many seeds of each test.
SEEDS = int(os.environ.get("STORE_SEEDS", "50"))


def fault(world: World, action: Callable[[], None], last: int = 250) -> None:
    """Have something happen ahead of a message of which no other fault happens ahead."""
    free = [one for one in range(1, last) if one not in world.faults]
    world.faults[world.random.choice(free)] = action


def states(world: World) -> dict[int, list[Any]]:
    """By shard what its servers hold."""
    found: dict[int, list[Any]] = {}
    for rank, server in world.servers.items():
        for number, replica in server.replicas.items() if rank in world.alive else ():
            shard = replica.shard
            values = {name: part.value for name, part in shard.parts.items()}
            found.setdefault(number, []).append((replica.lsn, values, shard.applied, shard.live))
    return found


def check_states(world: World) -> None:
    view = world.view
    assert view.joining is None, "nobody is let in any more"
    for number, found in states(world).items():
        assert all(one == found[0] for one in found), (number, found)
    for number, chain in enumerate(view.chains):
        assert len(found := states(world)[number]) == len(chain), (number, chain, found)


def test_servers_join_while_others_die_and_no_push_is_lost() -> None:
    members = 0
    for seed in range(SEEDS):
        world = masks(seed, ASP, 3, 1 + seed % 2)
        for _ in range(1 + seed % 3):
            fault(world, world.invite)
        for rank in world.random.sample((3, 4, 5), seed % world.view.length):
            fault(world, functools.partial(world.kill, rank))
        if seed % 7 == 6:
            fault(world, functools.partial(kill_newest, world))
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.ended, world.failed)
        world.history.check()
        check_states(world)
        live = world.alive & world.servers.keys()
        chains = world.view.chains
        assert all(len(chain) == min(world.view.length, len(live)) for chain in chains), seed
        members += len({one for chain in chains for one in chain if one > 5})
    assert members > SEEDS // 2, members


@pytest.mark.parametrize("replicas", [0, 1])
def test_servers_that_join_take_their_share_of_many_shards(replicas: int) -> None:
    for seed in range(SEEDS):
        world = World(seed, ASP, 3, 2, replicas, shards=8)
        world.history = History()
        for rank in range(3):
            world.start(rank, random_calls(world, world.history, rank, 6))
        for _ in range(1 + seed % 2):
            fault(world, world.invite, 100)
        if replicas and seed % 4 == 3:
            fault(world, functools.partial(world.kill, 3), 150)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.failed)
        world.history.check()
        check_states(world)
        chains, live = world.view.chains, world.alive & world.servers.keys()
        length = min(1 + replicas, len(live))
        assert len(chains) == 8 and all(len(chain) == length for chain in chains), (seed, chains)
        shares = [sum(one in chain for chain in chains) for one in sorted(live)]
        # A death gives places to whichever server has the fewest, and takes none from others.
        assert len(live) < 3 or max(shares) - min(shares) <= 1 + 2 * (seed % 4 == 3), (seed, shares)


def kill_newest(world: World) -> None:
    """Kill the process that joins, or else the last one that has joined."""
    newest = max(world.serials, key=world.serials.__getitem__, default=5)
    world.kill(newest)


def coming(world: World, history: History, calls: int, rank: int) -> Program:
    yield from world.counted(rank)
    yield from random_calls(world, history, rank, calls)


def test_workers_come_and_come_back_and_no_push_is_lost() -> None:
    back = 0
    for seed in range(SEEDS):
        world = masks(seed, ASP, 3, 1)
        program = functools.partial(coming, world, world.history, 4)
        fault(world, functools.partial(world.invite, program))
        fault(world, functools.partial(world.kill, 2), 100)
        again = functools.partial(world.invite, program, 2)
        world.at(20.0, again)
        if seed % 2:
            fault(world, functools.partial(world.kill, world.random.choice((3, 4, 5))))
        if seed % 3 == 2:
            fault(world, world.invite)
        if seed % 5 == 4:
            world.at(25.0, functools.partial(world.kill, 2))
            world.at(40.0, again)
        world.run()
        assert world.ended >= {0, 1} and world.failed == {}, (seed, world.ended, world.failed)
        world.history.check()
        check_states(world)
        for found in states(world).values():
            live = found[0][3]
            assert {0, 1} <= set(live) <= {0, 1, 2, *range(6, 12)}, (seed, live)
        back += 2 in world.ended and 2 in world.alive
    assert back > SEEDS // 2, back


def late(world: World, steps: int, seen: list[Any], rank: int) -> Program:
    """A worker that comes later: it takes the steps that are left."""
    yield from world.counted(rank)
    yield from steps_from(world, rank, world.starts[rank], steps, seen)


def steps_from(world: World, rank: int, first: int, steps: int, seen: list[Any]) -> Program:
    """Pull, push the step and the worker, and clock."""
    for step in range(first, steps):
        pull = world.request(rank, Kind.PULL, world.random.choice(KEYS))
        yield [pull]
        assert pull.answer is not None
        live = [one for one in world.alive if one in world.clients and one not in world.ended]
        seen.append((rank, step, pull.answer.round, pull.answer.payload, live))
        tag = (step, rank, world.serials.get(rank, 0))
        yield [world.request(rank, Kind.PUSH, one, payload=tag, round=step) for one in KEYS]
        yield world.clock(rank, step + 1)


def early(world: World, rank: int, steps: int, seen: list[Any]) -> Program:
    if rank == 0:
        yield world.load(rank, KEYS, ())
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
    yield from steps_from(world, rank, 0, steps, seen)


def begun(seed: int, consistency: Consistency, steps: int, seen: list[Any]) -> World:
    world = CheckedWorld(seed, consistency, 3, 2, seed % 2, Records())
    for rank in world.clients:
        world.start(rank, early(world, rank, steps, seen))
    return world


def come_and_gone(seed: int, consistency: Consistency, steps: int, seen: list[Any]) -> World:
    """A world that has run: a worker was new in it, and worker 2 was killed and came back."""
    world = begun(seed, consistency, steps, seen)
    program = functools.partial(late, world, steps, seen)
    fault(world, functools.partial(world.invite, program))
    fault(world, functools.partial(world.kill, 2), 150)
    world.at(world.random.uniform(0.5, 4.0), functools.partial(come_back, world, program))
    world.run()
    assert world.ended >= {0, 1} and world.failed == {}, (seed, world.failed)
    return world


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_with_workers_that_come_and_come_back(staleness: int) -> None:
    starts: list[int] = []
    for seed in range(SEEDS):
        seen: list[Any] = []
        world = come_and_gone(seed, SSP(staleness), 12, seen)
        assert all(version >= step - staleness for _, step, version, _, _ in seen), seed
        check_states(world)
        starts += world.starts.values()
    assert sum(0 < one < 12 for one in starts) > SEEDS // 4, starts


def come_back(world: World, program: Callable[[int], Program]) -> None:
    if 2 not in world.alive:
        world.invite(program, 2)


def test_a_round_has_a_new_worker_in_all_shards_or_in_none() -> None:
    mixed = 0
    for seed in range(SEEDS):
        seen: list[Any] = []
        world = begun(seed, BSP(), 8, seen)
        program = functools.partial(late, world, 8, seen)
        fault(world, functools.partial(world.invite, program))
        if seed % 2:
            fault(world, functools.partial(world.kill, world.random.choice((3, 4))))
        world.run()
        assert world.ended >= {0, 1, 2} and world.failed == {}, (seed, world.failed)
        start = {rank: clock for rank, clock in world.starts.items() if rank in world.ended}
        for found in states(world).values():
            for value in found[0][1].values():
                assert len(value) == 8, (seed, value)
                for step, (pushes, workers) in enumerate(value):
                    ranks = [0, 1, 2, *(one for one, clock in start.items() if clock <= step)]
                    assert [tag[:2] for tag in pushes] == [(step, one) for one in ranks], seed
                    assert workers == len(ranks), seed
        mixed += any(0 < clock < 8 for clock in start.values())
    assert mixed > SEEDS // 4, mixed


def test_a_lost_worker_does_not_come_back_to_a_bulk_synchronous_store() -> None:
    world = begun(5, BSP(), 30, [])
    program = functools.partial(late, world, 30, [])
    world.at(1.0, functools.partial(world.kill, 2))
    world.at(20.0, functools.partial(world.invite, program, 2))
    world.run()
    failures = [one.failure for one in world.failed[2]]
    assert any("rank 2 is gone, and bsp needs all: open a new store" in one for one in failures)


def test_backup_counts_the_pushes_of_new_workers_and_none_twice() -> None:
    for seed in range(SEEDS):
        seen: list[Any] = []
        world = come_and_gone(seed, Backup(0.6), 12, seen)
        for found in states(world).values():
            for value in found[0][1].values():
                for pushes, workers in value:
                    ranks = [tag[1] for tag in pushes]
                    assert ranks == sorted(set(ranks)) and workers == len(ranks), (seed, pushes)
                    assert len({tag[0] for tag in pushes}) == 1, (seed, pushes)


def test_one_newcomer_joins_at_a_time_and_the_others_follow() -> None:
    world = masks(1, ASP, 3, 1)
    for _ in range(4):
        world.at(0.5, world.invite)
    world.run()
    assert sorted(world.serials.items()) == [(6, 1), (7, 2), (8, 3), (9, 4)]
    assert world.view.servers == (3, 4, 5, 6, 7, 8, 9)
    assert world.view.joins == 4


def test_a_server_that_asks_twice_lets_a_process_in_once() -> None:
    world = World(1, ASP, 2, 2)
    newcomer = Newcomer(0, -1, True, "here")
    for _ in range(2):
        world.act(2, lambda machine: machine.request_admission(newcomer))
    world.run(4.0)
    assert world.view.joins == 1


def test_views_with_newcomers_are_read_back_and_nonsense_is_refused() -> None:
    view = View(3, ((4, 5), (5,)), (-1, 4), (4, 5), (), 2, 7, 2, Newcomer(2, 6, True, "{}"))
    assert View.from_bytes(view.to_bytes()) == view
    assert view.joining is not None and view.joining.first == 2 << 32
    for wrong in ("{}", '{"serial": -1, "rank": 0, "serves": true, "meeting": ""}'):
        with pytest.raises(ValueError, match=r"."):
            Newcomer.from_bytes(wrong.encode())


def test_a_newcomer_hears_at_once_of_the_end_of_a_process_for_which_it_waits() -> None:
    told = 0
    for seed in range(4 * SEEDS):
        world = masks(seed, ASP, 3, 1)
        fault(world, functools.partial(join_and_die, world, seed % 2 == 0), 120)
        world.run()
        assert world.ended >= {0, 1}, (seed, world.ended)
        assert world.view.joining is None, seed
        told += world.told_of_ends
    assert told > SEEDS // 4, told


def join_and_die(world: World, is_worker: bool) -> None:
    """Let a server join, and a worker or the last server die while it connects."""
    world.invite()
    victim = 2 if is_worker else 5
    delay = world.random.random() * 8 * world.slow
    world.at(delay, functools.partial(world.kill, victim))
