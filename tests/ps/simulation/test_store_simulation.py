"""Stores on a simulated network: linearizable keys, staleness, backup workers, and lost servers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from simulated_servers import Program, Records, World

from pycoll.ps.client_machine import WINDOW
from pycoll.ps.consistency import ASP, BSP, SSP, Backup, Consistency
from pycoll.ps.messages import CREATES, ENDS_ROUND, PULLS, Kind
from pycoll.ps.replica import Replica

SEEDS = 1000
#: Seeds in which a server is killed at each message, and those in which a worker dies with it.
KILL_SEEDS = 5
PAIR_SEEDS = 3
KEYS = (0, 1, 2)


class Call(NamedTuple):
    """A push or a pull of a key: the push's bit, the pull's value, and when it began and ended."""

    key: int
    bit: int
    value: int
    begin: int
    end: int | None


class History:
    """The calls of all workers, in the order of the events of a run.

    A push adds the number 1 in its own digit of ``width`` bits.
    """

    def __init__(self, width: int = 1) -> None:
        self.clock = 0
        self.width = width
        self.pushes: list[list[Any]] = []
        self.pulls: list[list[Any]] = []
        self.bits = dict.fromkeys(KEYS, 0)

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def push(self, world: World, rank: int, key: int, flags: int = 0, round: int = 0) -> Any:
        bit = 1 << self.width * self.bits[key]
        self.bits[key] += 1
        call = [key, bit, 0, self.tick(), None]
        self.pushes.append(call)
        if flags & PULLS:
            self.pulls.append(call)
        request = world.request(rank, Kind.PUSH, key, payload=bit, flags=flags, round=round)
        request.on_end = lambda one: self._end(call, one)
        return request

    def push_pull(self, world: World, rank: int, key: int) -> Any:
        return self.push(world, rank, key, PULLS)

    def pull(self, world: World, rank: int, key: int) -> Any:
        call = [key, 0, 0, self.tick(), None]
        request = world.request(rank, Kind.PULL, key)
        self.pulls.append(call)
        request.on_end = lambda one: self._end(call, one)
        return request

    def _end(self, call: list[Any], request: Any) -> None:
        if request.answer is not None:
            call[4] = self.tick()
            call[2] = request.answer.payload

    def check_ends(self) -> None:
        """Assert that the last pull of each key has each acknowledged push once, and none twice."""
        for key in KEYS:
            pushed = sum(bit for one, bit, _, _, end in self.pushes if one == key and end)
            ended = (pull for pull in self.pulls if pull[0] == key and pull[4] is not None)
            last = max(ended, key=lambda pull: pull[4])[2]
            # The digit of a push that was applied twice has another bit, which no push has.
            known = sum(bit for one, bit, *_ in self.pushes if one == key)
            assert last & pushed == pushed, (key, "an acknowledged push is lost")
            assert last & ~known == 0, (key, "a push is applied twice")

    def check(self) -> None:
        """Assert that each key is linearizable: its pulls are sets of pushes, in one order."""
        for key in KEYS:
            pushes = [Call(*one) for one in self.pushes if one[0] == key]
            assert all(one.value & one.bit for one in pushes if one.value), "its push lacks"
            pulls = [Call(*one) for one in self.pulls if one[0] == key and one[4] is not None]
            pulls.sort(key=lambda pull: (pull.value.bit_count(), pull.end))
            for pull in pulls:
                must = sum(one.bit for one in pushes if one.end and one.end < pull.begin)
                may = sum(one.bit for one in pushes if one.begin < pull.end)
                assert pull.value & must == must, (key, bin(pull.value), bin(must))
                assert pull.value & ~may == 0, (key, bin(pull.value), bin(may))
            for first, second in itertools.pairwise(pulls):
                assert first.value & second.value == first.value, (key, first, second)
                assert not second.end < first.begin, (key, first, second)


def made_keys(world: World, rank: int, value: Any = 0) -> Program:
    """Make the keys, if this worker is the first one that takes part; else wait for them."""
    ready = world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready", flags=CREATES)
    yield [ready]
    if ready.answer.kind is Kind.DONE:
        yield world.load(rank, KEYS, value)
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]


def random_calls(world: World, history: History, rank: int, calls: int) -> Program:
    """Push and pull keys at random, several at a time; at the end pull all keys."""
    draw = world.random
    yield from made_keys(world, rank)
    running: list[Any] = []
    for _ in range(calls):
        key = draw.choice(KEYS)
        begin = draw.choices((history.push, history.pull, history.push_pull), (4, 3, 3))[0]
        running.append(begin(world, rank, key))
        if draw.random() < 0.5:
            yield running
            running = []
    yield running
    yield [history.pull(world, rank, key) for key in KEYS]


def masks(seed: int, consistency: Consistency, servers: int, replicas: int) -> World:
    world = World(seed, consistency, workers=3, servers=servers, replicas=replicas)
    world.history = History()
    for rank in range(3):
        world.start(rank, random_calls(world, world.history, rank, 6))
    return world


def test_keys_are_linearizable_in_every_seed() -> None:
    for seed in range(SEEDS):
        world = masks(seed, ASP, 1 + seed % 2, 0)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, seed
        world.history.check()


def test_the_check_of_histories_finds_faults() -> None:
    history = History()
    history.pushes = [[0, 1, 0, 1, 2], [0, 2, 0, 3, 6]]
    history.pulls = [[0, 0, 1, 4, 5]]
    history.check()
    for fault in ([0, 0, 0, 4, 5], [0, 0, 4, 4, 5], [0, 0, 2, 7, 8]):
        history.pulls = [fault]
        with pytest.raises(AssertionError):
            history.check()
    history.pulls = [[0, 0, 3, 4, 5], [0, 0, 1, 7, 8]]
    with pytest.raises(AssertionError):
        history.check()


def kill_at(world: World, boundary: int, rank: int) -> None:
    world.faults[boundary] = lambda: world.kill(rank)


def survives(seed: int, replicas: int, kills: Callable[[World], None]) -> World:
    world = masks(seed, ASP, 3, replicas)
    kills(world)
    world.run()
    assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.ended, world.failed)
    world.history.check()
    states: dict[int, list[Any]] = {}
    for rank, server in world.servers.items():
        if rank in world.alive:
            for number, replica in server.replicas.items():
                values = {name: part.value for name, part in replica.shard.parts.items()}
                states.setdefault(number, []).append((replica.lsn, values, replica.shard.applied))
    assert set(states) == {0, 1, 2}
    wanted = min(1 + replicas, len(world.live_servers))
    assert [len(chain) for chain in world.view.chains] == [wanted] * 3, seed
    for number, found in states.items():
        assert all(one == found[0] for one in found), (seed, number, found)
    return world


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_server_killed_ahead_of_any_message_loses_no_push(replicas: int) -> None:
    for seed in range(KILL_SEEDS):
        boundaries = survives(seed, replicas, lambda _: None).boundaries
        assert boundaries > 50, seed
        for boundary in range(1, boundaries + 1):
            for rank in (3, 4, 5):
                survives(seed, replicas, lambda world: kill_at(world, boundary, rank))  # noqa: B023


def test_servers_killed_in_every_seed_lose_no_push() -> None:
    for seed in range(SEEDS):

        def kills(world: World) -> None:
            draw = world.random
            for rank in draw.sample((3, 4, 5), world.view.length - 1):
                kill_at(world, draw.randint(1, 250), rank)

        survives(seed, 1 + seed % 2, kills)


def test_a_manager_and_its_successor_killed_ahead_of_any_message_lose_no_push() -> None:
    for seed in range(KILL_SEEDS):
        boundaries = survives(seed, 2, lambda _: None).boundaries
        for boundary in range(1, boundaries + 1):

            def kills(world: World, boundary: int = boundary, seed: int = seed) -> None:
                kill_at(world, boundary, 3)
                # The successor dies while it takes over, or soon after that.
                kill_at(world, boundary + 1 + (seed + boundary) % 23, 4)

            survives(seed, 2, kills)


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_first_worker_killed_together_with_a_server_loses_no_push(replicas: int) -> None:
    for seed in range(PAIR_SEEDS):
        boundaries = survives(seed, replicas, lambda _: None).boundaries
        for boundary in range(1, boundaries + 1):
            for rank in (3, 4, 5):
                where = (seed, boundary, rank)
                world = masks(seed, ASP, 3, replicas)
                world.faults[boundary] = functools.partial(kill_all, world, 0, rank)
                world.run()
                assert world.ended >= {1, 2} and world.failed == {}, (where, world.failed)
                world.history.check()
                assert all(len(chain) == 2 for chain in world.view.chains), where


def kill_all(world: World, *ranks: int) -> None:
    for rank in ranks:
        world.kill(rank)


@pytest.mark.parametrize("count", [2, 3])
def test_one_part_of_a_divided_store_goes_on(count: int) -> None:
    """Servers that do not reach each other both run on: the part with most of them decides, and of
    two halves the one with the manager. No acknowledged push is lost."""
    divided = 0
    for seed in range(SEEDS // 10):
        world = masks(seed, ASP, count, 1)
        cut_off = world.random.choice(range(3, 3 + count)) if count > 2 else 4
        others = [one for one in world.servers if one != cut_off]
        boundary = world.random.randint(1, 150)
        world.faults[boundary] = functools.partial(divide_from, world, cut_off, others)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, (seed, world.failed)
        pushed = {key: (1 << bits) - 1 for key, bits in world.history.bits.items()}
        for rank in world.live_servers:
            for replica in world.servers[rank].replicas.values():
                parts = replica.shard.parts.items()
                assert all(part.value == pushed[key] for (key, _), part in parts), (seed, rank)
        if not world.faults:
            assert world.live_servers == others, seed
            assert all({*chain} <= {*others} for chain in world.view.chains), seed
            divided += 1
    assert divided > SEEDS // 20, divided


def divide_from(world: World, server: int, others: Sequence[int]) -> None:
    for other in others:
        world.divide(server, other)


def test_keys_elsewhere_can_be_used_after_a_server_is_lost_for_good() -> None:
    world = World(11, ASP, workers=1, servers=2)
    kept: list[Any] = []

    def use() -> Program:
        yield world.load(0, KEYS, 0)
        world.kill(1)
        yield 5.0
        lost = world.request(0, Kind.PUSH, 0, payload=1)
        assert (lost.failure, lost.lost) == ("all its servers are gone", (1,))
        yield [world.request(0, Kind.PUSH, 1, payload=1)]
        kept.append(world.request(0, Kind.PULL, 1))
        yield kept

    world.start(0, use())
    world.run()
    assert world.ended == {0} and world.failed == {}
    assert kept[0].answer.payload == 1


def test_a_drained_server_holds_nothing_and_no_push_is_lost() -> None:
    for seed in range(SEEDS // 4):
        world = masks(seed, ASP, 3, seed % 2)
        victim = world.random.choice((3, 4, 5))
        # The drained server and a worker learn late that others answer in its place.
        world.lag = {(other, 1): 20.0 for other in (3, 4, 5) if other != victim}
        world.lag[world.manager, victim] = 20.0
        # Ahead of the end of every seed's run.
        when = world.random.randint(1, 60)
        world.faults[when] = functools.partial(world.ask_manager, victim, Kind.DRAIN, victim)
        if seed % 4 == 1:
            kill_at(world, world.random.randint(1, 150), 3 + (victim - 2) % 3)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, seed
        world.history.check()
        view = world.view
        assert all(chain and victim not in chain for chain in view.chains), (seed, view)
        assert world.servers[victim].replicas == {}
        live = [one for rank, one in world.servers.items() if rank in world.alive]
        assert {server.view.number for server in live} == {view.number}


def test_a_drained_server_that_is_added_again_takes_its_share() -> None:
    for seed in range(SEEDS // 4):
        world = masks(seed, ASP, 3, 1)
        victim = world.random.choice((3, 4, 5))
        drain, add = (
            functools.partial(world.ask_manager, victim, kind, victim)
            for kind in (Kind.DRAIN, Kind.ADD)
        )
        when = world.random.randint(1, 30)
        world.faults[when] = drain
        if seed % 2:
            # In the midst of the drain, and of requests.
            world.faults[when + world.random.randint(1, 30)] = add
        else:
            world.at(500.0, add)
        if seed % 8 > 5:
            kill_at(world, world.random.randint(1, 150), 3 + (victim - 2) % 3)
        world.run()
        assert world.ended == {0, 1, 2} and world.failed == {}, seed
        world.history.check()
        live = world.servers.keys() & world.alive
        chains = world.view.chains
        assert all(len(chain) == 2 and {*chain} <= live for chain in chains), (seed, chains)
        assert world.view.filling == (-1, -1, -1), seed
        shares = [sum(one in chain for chain in chains) for one in live]
        assert seed % 2 or max(shares) - min(shares) <= 1, (seed, shares)
        for rank in live:
            held = {shard for shard, chain in enumerate(chains) if rank in chain}
            assert set(world.servers[rank].replicas) == held, (seed, rank)


def through_hours(world: World, history: History, until: float, rank: int) -> Program:
    """Make the keys, or wait for them, and push until that time."""
    if rank == 0:
        yield world.load(rank, KEYS, 0)
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
    yield from pushing_on(world, history, until, rank, 0)


def back_for_hours(world: World, history: History, until: float, rank: int) -> Program:
    """The program of a worker that comes back."""
    yield from world.counted(rank)
    yield from pushing_on(world, history, until, rank, world.starts[rank])


def pushing_on(world: World, history: History, until: float, rank: int, clock: int) -> Program:
    draw = world.random
    while world.now < until:
        key = draw.choice(KEYS)
        yield [history.push(world, rank, one, round=clock) for one in (key, draw.choice(KEYS))]
        if draw.random() < 0.02:
            yield [history.pull(world, rank, key)]
        clock += 1
        if world.consistency.staleness is not None:
            yield world.clock(rank, clock)
        yield draw.uniform(5.0, 40.0)
    # No other worker may wait for one that has ended.
    while clock < max((told for told, _ in world.clocked.values()), default=0):
        clock += 1
        yield world.clock(rank, clock)
    yield [history.pull(world, rank, key) for key in KEYS]


@pytest.mark.parametrize("consistency", [ASP, SSP(2)], ids=str)
def test_ten_hours_with_a_fault_in_every_minute_lose_no_push(consistency: Consistency) -> None:
    """Servers and workers die ahead of any message; others come in their place."""
    hours = 10 * 3600.0
    world = World(3, consistency, workers=3, servers=3, replicas=1)
    history = History(2)
    killed = {True: 0, False: 0}
    for rank in range(3):
        world.start(rank, through_hours(world, history, hours, rank))
    again = functools.partial(back_for_hours, world, history, hours)
    if consistency.staleness is not None:
        world.watch = world.check_staleness

    def replace() -> None:
        for rank in world.clients.keys() - world.alive:
            world.invite(again, rank)
        if len(world.live_servers) < 3:
            world.invite()

    def fault() -> None:
        servers = [rank for rank in world.live_servers if rank in world.view.servers]
        # Of a shard with one server, that one must not die.
        victims = servers if all(len(chain) == 2 for chain in world.view.chains) else []
        workers = [rank for rank in world.clients if rank in world.alive]
        victims = victims + (workers if len(workers) > 1 else [])
        world.boundaries, world.faults = 0, {}
        if victims:
            victim = world.random.choice(victims)
            killed[victim in world.servers] += 1
            # Ahead of one of the next messages, so that it meets requests under way.
            kill_at(world, world.random.randint(1, 40), victim)
        if world.now < hours - 120.0:
            world.at(30.0, replace)
            world.at(60.0, fault)

    world.at(60.0, fault)
    world.run(2 * hours)
    assert world.ended >= world.clients.keys() & world.alive and world.failed == {}
    assert min(killed.values()) > 150 and sum(killed.values()) > 500, killed
    assert max(world.serials.values()) > 300, "those that died came back"
    assert sum(history.bits.values()) > 5000
    history.check_ends()


# Staleness


class Seen(NamedTuple):
    """What a worker read at a clock, and the workers that were alive then."""

    rank: int
    step: int
    key: int
    mask: int
    alive: tuple[int, ...]


def stepping(world: World, rank: int, steps: int, seen: list[Seen]) -> Program:
    """Pull, push a bit of the step and the worker, and clock."""
    if rank == 0:
        yield world.load(rank, KEYS, 0)
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
    for step in range(steps):
        key = world.random.choice(KEYS)
        pull = world.request(rank, Kind.PULL, key)
        yield [pull]
        alive = tuple(one for one in world.clients if one in world.alive)
        seen.append(Seen(rank, step, key, pull.answer.payload, alive))
        bit = 1 << (step * len(world.clients) + rank)
        yield [world.request(rank, Kind.PUSH, one, payload=bit, round=step) for one in KEYS]
        yield world.clock(rank, step + 1)


def check_reads(seen: Sequence[Seen], workers: int, staleness: int) -> None:
    """Assert that a read at clock c has all pushes of clocks below c - staleness, by all workers
    that are alive, and none of a worker that is more than ``staleness`` clocks ahead."""
    for one in seen:
        for rank in one.alive:
            for step in range(one.step - staleness):
                assert one.mask >> (step * workers + rank) & 1, (rank, one)
        # The slowest clock is at most this one, and no step beyond the bound has begun.
        ahead = one.mask >> ((one.step + staleness + 1) * workers)
        assert ahead == 0, (one, ahead)


def stale_world(seed: int, staleness: int, servers: int, replicas: int) -> World:
    """A world of workers that step, whose clocks are checked after each step of a process."""
    world = World(seed, SSP(staleness), servers=servers, replicas=replicas)
    world.seen = []
    for rank in world.clients:
        world.start(rank, stepping(world, rank, 5, world.seen))
    world.watch = world.check_staleness
    return world


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_in_every_seed(staleness: int) -> None:
    held = 0
    for seed in range(SEEDS):
        world = stale_world(seed, staleness, 2, 0)
        world.run()
        assert world.ended == set(world.clients), "a worker was not woken"
        assert len(world.seen) == 15
        check_reads(world.seen, 3, staleness)
        held += world.most_ahead == staleness
    assert held > SEEDS // 20, held


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_is_bounded_in_every_seed_when_servers_die(staleness: int) -> None:
    killed = 0
    for seed in range(SEEDS // 2):
        replicas = 1 + seed % 2
        world = stale_world(seed, staleness, 3, replicas)
        for rank in world.random.sample((3, 4, 5), replicas):
            kill_at(world, world.random.randint(1, 250), rank)
        world.run()
        assert world.ended == set(world.clients) and world.failed == {}, seed
        assert len(world.seen) == 15
        check_reads(world.seen, 3, staleness)
        killed += len(world.live_servers) < 3
    assert killed > SEEDS // 4, killed


def test_without_staleness_nobody_waits() -> None:
    world = World(1, ASP)
    seen: list[Seen] = []
    for rank in world.clients:
        world.start(rank, stepping(world, rank, 5, seen))
    world.run()
    replica = world.servers[3].replicas[0]
    assert (replica.held_most, len(seen)) == (2, 15), "only the two that look up wait"


@pytest.mark.parametrize("replicas", [0, 1])
def test_workers_that_die_leave_the_minimum(replicas: int) -> None:
    early = 0
    for seed in range(SEEDS // 4):
        world = stale_world(seed, 1, 2, replicas)
        victim = 1 + seed % 2
        kill_at(world, world.random.randint(20, 150), victim)
        if replicas and seed % 4 == 3:
            kill_at(world, world.random.randint(20, 150), 3 + seed % 8 // 4)
        world.run()
        survivors = world.clients.keys() & world.alive
        assert world.ended >= survivors, (seed, world.ended)
        assert world.failed == {}
        check_reads(world.seen, 3, 1)
        steps = {rank: [one.step for one in world.seen if one.rank == rank] for rank in range(3)}
        assert all(steps[rank] == list(range(5)) for rank in survivors), (seed, steps)
        if victim not in survivors:
            assert steps[victim] == list(range(len(steps[victim]))), (seed, steps)
            shards = [one.shard for rank in world.live_servers for one in replicas_of(world, rank)]
            assert all(shard.live == sorted(survivors) for shard in shards), seed
            assert all(shard.version == 5 for shard in shards), seed
            # With this worker in the minimum, the others would not have taken all their steps.
            early += max(shard.clocks[victim] for shard in shards) < 3
    assert early > SEEDS // 40, early


def replicas_of(world: World, rank: int) -> list[Any]:
    return list(world.servers[rank].replicas.values())


def test_bulk_synchronous_stores_name_the_worker_that_died() -> None:
    failures = 0
    for seed in range(SEEDS // 10):
        world = World(seed, BSP(), servers=2)
        seen: list[Any] = []
        for rank in world.clients:
            world.start(rank, stepping(world, rank, 5, seen))
        kill_at(world, world.random.randint(20, 150), 2)
        world.run()
        assert world.ended >= {0, 1}, seed
        for requests in world.failed.values():
            failures += 1
            assert all(one.lost == (2,) for one in requests), seed
    assert failures > 50


# Rounds that are folded


def exchanging(
    world: World, rank: int, steps: int, results: list[Any], pushes: list[Any]
) -> Program:
    """Push a part and pull it, by one request or two, until each key has so many rounds."""
    if rank == 0:
        yield world.load(rank, KEYS, ())
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
    rounds = dict.fromkeys(KEYS, 0)
    for step in itertools.count():
        pulls: list[Any] = []
        behind = [key for key in KEYS if rounds[key] < steps]
        if not behind:
            return
        for key in world.random.sample(behind, len(behind)):
            tag = (rounds[key], rank, step)
            flags = ENDS_ROUND | PULLS if world.random.random() < 0.5 else ENDS_ROUND
            push = world.request(rank, Kind.PUSH, key, payload=tag, round=rounds[key], flags=flags)
            pushes.append(push)
            pulls.append((key, push if flags & PULLS else world.request(rank, Kind.PULL, key)))
        yield [pull for _, pull in pulls]
        for key, pull in pulls:
            rounds[key] = max(rounds[key] + 1, pull.answer.round)
            results.append((rank, step, key, pull.answer.round, pull.answer.payload))


def run_rounds(seed: int, consistency: Consistency, workers: int, replicas: int = 0) -> list[Any]:
    world = World(seed, consistency, workers, 2, replicas, Records())
    results: list[Any] = []
    pushes: list[Any] = []
    for rank in world.clients:
        world.start(rank, exchanging(world, rank, 3, results, pushes))
    if replicas:
        kill_at(world, world.random.randint(1, 200), world.random.choice(list(world.servers)))
    world.run()
    assert world.ended == set(world.clients) and world.failed == {}, seed
    for rank, server in world.servers.items():
        for replica in server.replicas.values():
            if rank in world.alive:
                check_late(replica, pushes, seed)
            parts = replica.shard.parts.values()
            # A dropped push is counted, and not kept.
            kept = sum(len(by) for part in parts for by in part.pending.values())
            folded = sum(workers for part in parts for _, workers in part.value)
            counts = replica.shard.counts
            assert replicas or counts.pushes == folded + counts.dropped + kept, seed
            assert all(turn >= part.version for part in parts for turn in part.pending), seed
    return results


def check_late(replica: Replica, pushes: list[Any], seed: int) -> None:
    """Check that answers say "dropped" of just those pushes that a shard has not got."""
    held = set()
    for (key, _), part in replica.shard.parts.items():
        kept = (tags for by in part.pending.values() for tags in by.values())
        for tags in (*kept, *(tags for tags, _ in part.value)):
            held.update((key, tag) for tag in tags)
    for push in pushes:
        message = push.message
        if push.answer is not None and message.shard == replica.number:
            assert push.dropped != ((message.key, message.payload) in held), (seed, push.answer)


@pytest.mark.parametrize(("consistency", "replicas"), [(BSP(), 0), (SSP(0), 0), (Backup(1.0), 1)])
def test_rounds_are_folded_in_rank_order(consistency: Consistency, replicas: int) -> None:
    for seed in range(SEEDS // 8):
        for _, step, key, version, value in run_rounds(seed, consistency, 3, replicas):
            assert version == step + 1
            expected = [
                (tuple((turn, rank, turn) for rank in range(3)), 3) for turn in range(step + 1)
            ]
            assert list(value) == expected, (seed, key)


def test_workers_that_push_and_pull_many_keys_in_other_orders_do_not_wait_for_each_other() -> None:
    keys = range(3 * WINDOW)

    def exchange(world: World, rank: int) -> Program:
        if rank == 0:
            yield world.load(rank, keys, 0)
            yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
        else:
            yield [world.request(rank, Kind.LOOKUP, shard=0, payload=b"ready")]
        order = keys if rank == 0 else reversed(keys)
        flags = ENDS_ROUND | PULLS
        yield [world.request(rank, Kind.PUSH, key, payload=1, flags=flags) for key in order]

    for seed in range(20):
        world = World(seed, BSP(), workers=2)
        for rank in world.clients:
            world.start(rank, exchange(world, rank))
        world.run()
        assert world.ended == {0, 1} and world.failed == {}, seed


@pytest.mark.parametrize("replicas", [0, 1])
def test_backup_workers_end_rounds_and_late_pushes_enter_none(replicas: int) -> None:
    late = 0
    for seed in range(SEEDS):
        for _, _, _, version, value in run_rounds(seed, Backup(0.75), 4, replicas):
            used = [turn for pushes, _ in value for turn in {one[0] for one in pushes}]
            assert used == sorted(set(used)) and len(value) == len(used) <= version, seed
            for pushes, workers in value:
                ranks = [rank for _, rank, _ in pushes]
                assert ranks == sorted(set(ranks)) and workers == len(ranks) == 3, seed
                late += any(turn != step for turn, _, step in pushes)
    assert late > 0, "no worker was ever late: the seeds show nothing"
