"""The invariants of a store at run time: no false alarm, and each one broken on purpose."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from harness import TIMEOUT_S, each, succeeded
from simulated_servers import Program, Records, World
from test_store_simulation import exchanging, kill_at, stepping

import pycoll
from pycoll import ps
from pycoll.ps.client_machine import ClientMachine
from pycoll.ps.consistency import ASP, BSP, SSP, Backup, Consistency
from pycoll.ps.invariants.store_checks import CheckedClient, CheckedShard
from pycoll.ps.messages import REPEATED, Kind, Message
from pycoll.ps.shard import Effect, Part, Shard
from pycoll.ps.views import View, first_view

#: STORE_SEEDS=1000 runs as many seeds of each test.
SEEDS = int(os.environ.get("STORE_SEEDS", "100"))


class CheckedWorld(World):
    """A world whose servers and workers check."""

    shard_type = CheckedShard

    def make_client(self, rank: int, view: View, first: int = 0) -> ClientMachine:
        return CheckedClient(rank, view, self.consistency, first)


class CheckedServers(World):
    """A world whose servers check, and no worker."""

    shard_type = CheckedShard


class CheckedWorkers(CheckedWorld):
    """A world whose workers check, and no server."""

    shard_type = Shard


def run(world: World, program: Callable[[World, int], Program]) -> str:
    """Run the program on all workers; return why a request failed, or an empty text."""
    for rank in world.clients:
        world.start(rank, program(world, rank))
    world.run()
    failed = [one.failure for requests in world.failed.values() for one in requests]
    return next((one for one in failed if one), "")


def steps(world: World, rank: int) -> Program:
    return stepping(world, rank, 5, [])


def rounds(world: World, rank: int) -> Program:
    return exchanging(world, rank, 4, [], [])


@pytest.mark.parametrize("consistency", [ASP, BSP(), BSP(elastic=True), SSP(1), SSP(3)])
def test_whole_stores_give_no_alarm(consistency: Consistency) -> None:
    for seed in range(SEEDS):
        world = CheckedWorld(seed, consistency, servers=3, replicas=seed % 3)
        if seed % 3:
            kill_at(world, world.random.randint(1, 150), world.random.choice((3, 4, 5)))
        if seed % 4 == 3 and consistency.survives_workers:
            kill_at(world, world.random.randint(40, 150), 1)
        assert run(world, steps) == "", seed
        assert world.ended >= {0, 2}, seed


@pytest.mark.parametrize("consistency", [BSP(), BSP(elastic=True), Backup(0.5), Backup(0.75)])
def test_whole_rounds_give_no_alarm(consistency: Consistency) -> None:
    for seed in range(SEEDS):
        world = CheckedWorld(seed, consistency, 4, 2, seed % 2, Records())
        if seed % 2:
            kill_at(world, world.random.randint(1, 200), world.random.choice((4, 5)))
        assert run(world, rounds) == "", seed
        assert world.ended == {0, 1, 2, 3}, seed


def told(world_type: type[World], program: Any, *terms: Any) -> str:
    """The first violation that any seed shows."""
    found = (run(world_type(seed, *terms), program) for seed in range(SEEDS))
    return next((one for one in found if one), "")


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (CheckedServers, "reads at clock"),
        (CheckedWorkers, "SSP(1) allows none below"),
    ],
)
def test_a_pull_that_does_not_wait_breaks_staleness(
    world: type[World], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shard, "may_proceed", lambda self, worker, part: True)
    why = told(world, steps, SSP(1), 3, 2)
    assert "invariant 'staleness' of the store is violated" in why and text in why, why


def backwards(world: World, rank: int) -> Program:
    if rank == 0:
        yield world.load(rank, (0,), 0)
        yield world.clock(rank, 3)
        yield world.clock(rank, 2)


def test_a_clock_that_falls_is_refused_by_servers_and_by_the_worker() -> None:
    why = told(CheckedServers, backwards, ASP)
    assert "invariant 'clocks' of the store is violated: the clock of rank 0 went from 3 to" in why
    with pytest.raises(pycoll.PycollError, match=r"'clocks'.*this worker's clock goes from 3 to 2"):
        run(CheckedWorkers(0, ASP), backwards)


def test_a_version_that_falls_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Shard._advance

    def falling(self: Shard, part: Part) -> None:
        advance(self, part)
        if part.version == 3:
            part.version = 1

    monkeypatch.setattr(Shard, "_advance", falling)
    for world in (CheckedServers, CheckedWorkers):
        why = told(world, steps, SSP(3), 3, 1)
        assert "invariant 'clocks' of the store is violated: the version of" in why, why


def pushing(world: World, rank: int) -> Program:
    if rank == 0:
        yield world.load(rank, (0,), 0)
        for number in range(4):
            yield [world.request(rank, Kind.PUSH, 0, payload=1 << number)]


def twice(world: World) -> None:
    """Let every message to servers arrive twice."""
    deliver = world.send

    def send(source: int, to: int, message: Message) -> None:
        deliver(source, to, message)
        if to in world.servers:
            deliver(source, to, message)

    world.send = send  # type: ignore[method-assign]


def test_an_update_that_is_applied_twice_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    world = CheckedWorld(0, ASP)
    twice(world)
    assert run(world, pushing) == "", "a message that comes twice is no violation"
    apply = Shard.apply

    def forgetful(self: Shard, update: Message) -> Effect:
        self.applied[update.worker] = update.seq - 1
        return apply(self, update)

    monkeypatch.setattr(Shard, "apply", forgetful)
    world = CheckedServers(0, ASP)
    twice(world)
    why = run(world, pushing)
    assert "invariant 'sequence' of the store is violated: update 1 of rank 0 was applied a" in why


def test_an_update_that_is_missing_or_strange_is_told() -> None:
    world = CheckedServers(0, ASP)
    send = world.send

    def losing(source: int, to: int, message: Message) -> None:
        if message.kind is not Kind.PUSH or message.seq != 3:
            send(source, to, message)

    def both(one: World, rank: int) -> Program:
        if rank == 0:
            yield one.load(rank, (0,), 0)
            yield [one.request(rank, Kind.PUSH, 0, payload=1 << number) for number in range(4)]

    world.send = losing  # type: ignore[method-assign]
    shard = world.servers[3].replicas[0].shard
    run(world, both)
    assert "update 4 of rank 0 came after update 2" in shard._values.violation
    client = CheckedClient(0, first_view([1], 0), ASP)
    request = client.add(Message(Kind.PUSH))
    client.handle(1, Message(Kind.DONE, seq=1, flags=REPEATED))
    assert "update 1 was sent once, and a server had applied it before" in request.failure


class Dividing:
    """An arithmetic that divides by another number of workers."""

    def __init__(self, inner: Any, workers: int) -> None:
        self.inner, self.workers = inner, workers

    def apply(self, rule: int, value: Any, pushes: Any, workers: int) -> Any:
        return self.inner.apply(rule, value, pushes, self.workers)


def test_a_wrong_divisor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Shard._advance

    def by_all(self: Shard, part: Part) -> None:
        whole = self.arithmetic
        self.arithmetic = Dividing(whole, len(self.live))  # type: ignore[assignment]
        advance(self, part)
        self.arithmetic = whole

    monkeypatch.setattr(Shard, "_advance", by_all)
    why = told(CheckedServers, rounds, Backup(0.75), 4, 1, 0, Records())
    assert "invariant 'divisor' of the store is violated: pushes and divisors of rounds" in why


def test_a_round_that_ends_with_too_few_workers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(self: Shard, part: Part | None) -> int:
        return max(self.clock_of(worker, part) for worker in self.live)

    monkeypatch.setattr(Shard, "_ended_rounds", first)
    why = told(CheckedServers, rounds, Backup(0.75), 4, 1, 0, Records())
    assert "1 of 4 workers had come to the end of rounds 0 to 0" in why
    assert "Backup(0.75) needs 3" in why


def run_store(work: Any, workers: int, **terms: Any) -> list[Any]:
    comms = pycoll.local_world(workers + 1, timeout_s=TIMEOUT_S)

    def rank(comm: pycoll.Communicator) -> Any:
        if comm.rank == workers:
            return ps.serve_store(comm, [workers], **terms)
        with ps.connect(comm) as store:
            return work(store)

    with ThreadPoolExecutor(len(comms)) as pool:
        outcomes = each(pool, rank, comms)
    for comm in comms:
        comm.close()
    return succeeded(outcomes[:workers])


def early(store: ps.Store, done: threading.Barrier) -> str:
    """The error of a pull that does not wait for the second worker, or an empty text."""
    store.init("w", np.zeros(2))
    try:
        for _ in range(3 if store.rank == 0 else 0):
            store.push("w", np.ones(2))
            store.clock()
            store.pull("w")
    except pycoll.PycollError as error:
        return str(error)
    finally:
        # A worker that leaves counts no more.
        done.wait()
    return ""


def test_the_setting_makes_calls_tell_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shard, "may_proceed", lambda self, worker, part: True)
    done = threading.Barrier(2, timeout=TIMEOUT_S)
    work = functools.partial(early, done=done)
    assert run_store(work, 2, consistency=ps.SSP(1)) == ["", ""], "it is off without the setting"
    monkeypatch.setenv("PYCOLL_STORE_CHECKS", "1")
    first, second = run_store(work, 2, consistency=ps.SSP(1))
    assert "of 'w': invariant 'staleness' of the store is violated: rank 0 reads at" in first
    assert second == ""


def test_a_store_that_checks_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYCOLL_STORE_CHECKS", "1")

    def work(store: ps.Store) -> float:
        store.init("m", np.zeros(2), update="mean")
        table = store.table("t", dim=2)
        for step in range(5):
            assert store.push_pull("m", np.full(2, 1.0 + store.rank))[0] == 1.5
            table.push([step, 7], np.ones((2, 2), np.float32))
            store.clock()
        return float(table.pull([7])[0, 0])

    assert run_store(work, 2, consistency="bsp") == [10.0, 10.0]
