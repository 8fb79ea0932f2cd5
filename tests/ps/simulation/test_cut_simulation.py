"""Checkpoints of stores on a simulated network: the cut holds what each worker began before it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from simulated_servers import Program, Records, World
from test_invariants import CheckedWorld
from test_store_simulation import KEYS, SEEDS, History, kill_at, made_keys

from pycoll.ps.consistency import ASP, BSP, SSP, Backup
from pycoll.ps.messages import DROPPED, REPEATED, Kind


class Cut:
    """What workers began before their cuts, and the values that the first one fetched.

    ``earlier``: the cut before, None for the first one.
    """

    def __init__(self, earlier: Cut | None = None) -> None:
        self.number = 1
        self.history = History()
        #: By worker and key the bits of its pushes; ``before`` holds those ahead of its cut.
        self.bits = {rank: dict.fromkeys(KEYS, 0) for rank in range(3)}
        if earlier is not None:
            self.number += earlier.number
            self.history, self.bits = earlier.history, earlier.bits
        self.before: dict[int, dict[int, int]] = {}
        self.kept: dict[int, Any] = {}

    def push(self, world: World, rank: int, key: int) -> Any:
        request = self.history.push(world, rank, key)
        self.bits[rank][key] |= self.history.pushes[-1][1]
        return request

    def begin(self, world: World, rank: int) -> list[Any]:
        self.before[rank] = dict(self.bits[rank])
        shards = range(len(world.clients[rank].view.chains))
        return [world.request(rank, Kind.CUT, shard=shard, round=self.number) for shard in shards]

    def fetch(self, world: World, rank: int) -> Program:
        for shard in range(len(world.clients[rank].view.chains)):
            where: dict[str, Any] = {"shard": shard, "round": self.number}
            text = world.request(rank, Kind.FETCH, 0, **where)
            yield [text]
            parts = json.loads(text.answer.payload)["parts"]
            for number, part in enumerate(parts, 1):
                piece = world.request(rank, Kind.FETCH, number, **where)
                yield [piece]
                self.kept[part["key"]] = piece.answer.payload
            yield [world.request(rank, Kind.RELEASE, shard=shard)]


def cutting(world: World, cut: Cut, rank: int, calls: int) -> Program:
    """Push and pull at random, several at a time, and take a cut at a random place."""
    draw, ready = world.random, {"shard": 0, "payload": b"ready"}
    if rank == 0:
        yield world.load(rank, KEYS, 0)
        yield [world.request(rank, Kind.WRITE, shard=0, payload=b"ready\0yes")]
    else:
        yield [world.request(rank, Kind.LOOKUP, **ready)]
    place = draw.randrange(calls)
    running: list[Any] = []
    for number in range(calls):
        if number == place:
            running += cut.begin(world, rank)
            if rank == 0:
                yield running
                running = []
                yield from cut.fetch(world, rank)
        key = draw.choice(KEYS)
        begin = cut.push if draw.random() < 0.7 else cut.history.pull
        running.append(begin(world, rank, key))
        if draw.random() < 0.4:
            yield running
            running = []
    yield running
    yield [cut.history.pull(world, rank, key) for key in KEYS]


def run_cut(
    seed: int, replicas: int, *kills: int, boundary: int = 0, victim: int = 0
) -> tuple[World, Cut]:
    """Run a cut. ``kills``: processes that die at a random message. ``victim``: one that dies ahead
    of message ``boundary``, unless that is 0."""
    world = World(seed, ASP, workers=3, servers=1 + seed % 2 + 2 * replicas, replicas=replicas)
    cut = Cut()
    for rank in range(3):
        world.start(rank, cutting(world, cut, rank, 8))
    for rank in kills:
        kill_at(world, world.random.randint(1, 200), rank)
    if boundary:
        kill_at(world, boundary, victim)
    world.run()
    return world, cut


def values_of(world: World) -> dict[int, Any]:
    replicas = [one for server in world.servers.values() for one in server.replicas.values()]
    return {key: part.value for one in replicas for (key, _), part in one.shard.parts.items()}


def test_a_cut_holds_all_that_began_before_it_and_no_more() -> None:
    for seed in range(SEEDS):
        world, cut = run_cut(seed, 0)
        assert world.ended == {0, 1, 2} and world.failed == {}, seed
        for key in KEYS:
            assert cut.kept[key] == sum(one[key] for one in cut.before.values()), (seed, key)
        cut.history.check()
        assert values_of(world) == {
            key: sum(one[key] for one in cut.bits.values()) for key in KEYS
        }, "what waited for the cut is applied after it"


def check_cut(world: World, cut: Cut, where: Any) -> None:
    assert world.ended == {0, 1, 2} and world.failed == {}, (where, world.failed)
    for key in KEYS:
        assert cut.kept[key] == sum(one[key] for one in cut.before.values()), (where, key)
    cut.history.check()


def test_cuts_hold_when_a_server_dies_at_any_message() -> None:
    """At one message in every seed, and at each message in the first one."""
    for seed in range(SEEDS):
        check_cut(*run_cut(seed, 1, 3 + seed % 3), seed)
    for boundary in range(1, run_cut(0, 1)[0].boundaries + 1):
        for rank in (3, 4, 5):
            check_cut(*run_cut(0, 1, boundary=boundary, victim=rank), (boundary, rank))


def test_cuts_are_closed_under_the_order_of_a_worker_that_dies() -> None:
    cuts = 0
    for seed in range(SEEDS // 5):
        world, cut = run_cut(seed, 0, 1)
        assert world.ended >= {0, 2} and world.failed == {}, seed
        for key, kept in cut.kept.items():
            for rank in {0, 2} & cut.before.keys():
                assert kept & cut.bits[rank][key] == cut.before[rank][key], (seed, key)
        mine = [one for one in cut.history.pushes if cut.bits[1][one[0]] & one[1]]
        for first, second in itertools.product(mine, mine):
            was_first = first[4] is not None and first[4] < second[3]
            if was_first and cut.kept.get(second[0], 0) & second[1]:
                assert cut.kept[first[0]] & first[1], (seed, first, second)
        cuts += bool(cut.kept)
    assert cuts > SEEDS // 10


def making_and_cutting(world: World, cut: Cut, rank: int, writers: dict[int, int]) -> Program:
    """Make the keys, or learn that another worker has; push, take a cut, and perhaps write it."""
    yield from made_keys(world, rank)
    requests = [cut.push(world, rank, key) for key in KEYS] + cut.begin(world, rank)
    yield requests
    writers[rank] = requests[len(KEYS)].answer.key
    if writers[rank] == rank:
        yield from cut.fetch(world, rank)


def test_the_next_worker_writes_the_cut_when_the_first_one_dies_at_any_message() -> None:
    others = 0
    for boundary in range(1, 140):
        world = World(boundary, ASP, workers=3, servers=3, replicas=1)
        cut, writers = Cut(), {}
        for rank in range(3):
            world.start(rank, making_and_cutting(world, cut, rank, writers))
        kill_at(world, boundary, 0)
        kill_at(world, boundary + boundary % 5, 3 + boundary % 3)
        world.run()
        assert world.ended >= {1, 2} and world.failed == {}, (boundary, world.failed)
        assert len(set(writers.values())) == 1, (boundary, writers)
        if writers[1] in world.ended:
            others += writers[1] == 1
            for rank in (1, 2):
                kept = {key: cut.kept[key] & cut.bits[rank][key] for key in KEYS}
                assert kept == cut.before[rank], (boundary, rank)
    assert others > 20, others


@pytest.mark.parametrize("dies", [False, True])
def test_a_cut_in_an_open_round_and_one_without_a_worker_are_refused(dies: bool) -> None:
    world = World(5, BSP(), workers=2, servers=2, arithmetic=Records())
    found: dict[int, Any] = {}

    def rank_of(rank: int) -> Program:
        if rank == 0:
            yield world.load(rank, KEYS, ())
        yield 5.0
        # Only rank 0 has pushed in this round.
        if rank == 0:
            yield [world.request(rank, Kind.PUSH, 0, payload=(0, rank, 0))]
        elif dies:
            world.kill(rank)
            return
        cuts = [world.request(rank, Kind.CUT, shard=shard, round=1) for shard in (0, 1)]
        found[rank] = cuts
        yield cuts

    for rank in (0, 1):
        world.start(rank, rank_of(rank))
    world.run()
    if dies:
        assert all(one.lost == (1,) for one in found[0]) and 1 not in found
        return
    for rank in (0, 1):
        assert "of a round that has not ended: all workers call clock()" in found[rank][0].failure
        assert found[rank][1].failure == "", "shard 1 has no open round"


def test_the_slowest_worker_of_a_cut_is_named() -> None:
    world = World(6, ASP, workers=3, servers=1)
    begun: list[Any] = []

    def rank_of(rank: int) -> Program:
        if rank == 0:
            yield world.load(rank, KEYS, 0)
        if rank != 1:
            begun.append(world.request(rank, Kind.CUT, shard=0, round=1))
            yield [begun[-1]]

    for rank in range(3):
        world.start(rank, rank_of(rank))
    world.run(50.0)
    assert [one.slowest for one in begun] == [(1, 0)] * 2
    assert not any(one.ended for one in begun)


def test_a_second_cut_waits_for_its_own_workers() -> None:
    for seed in range(SEEDS // 10):
        world = World(seed, ASP, workers=3, servers=2)
        states: list[list[int]] = [[], []]

        def rank_of(rank: int, world: World = world, states: Any = states) -> Program:
            if rank == 0:
                yield world.load(rank, KEYS, 0)
            yield 5.0
            for turn in (0, 1):
                bit = 1 << (2 * rank + turn)
                requests = [world.request(rank, Kind.PUSH, key, payload=bit) for key in KEYS]
                requests += [
                    world.request(rank, Kind.CUT, shard=shard, round=turn + 1) for shard in (0, 1)
                ]
                if rank == 0:
                    yield requests
                    piece = world.request(0, Kind.FETCH, 1, shard=1, round=turn + 1)
                    yield [piece]
                    states[turn].append(piece.answer.payload)
                elif turn == 1 or world.random.random() < 0.5:
                    yield requests

        for rank in range(3):
            world.start(rank, rank_of(rank))
        world.run()
        assert world.failed == {} and states == [[0b010101], [0b111111]], (seed, states)


# Cuts between clocks


def clocking(world: World, cuts: list[Cut], rank: int, steps: int) -> Program:
    """Push, pull and clock, several at a time, and take a cut after each so many clocks."""
    draw = world.random
    yield from made_keys(world, rank)
    clock, history = 0, cuts[0].history
    for cut in cuts:
        running: list[Any] = []
        for _ in range(steps):
            keys = draw.choices(KEYS, k=2)
            running += [cut.push(world, rank, keys[0]), history.pull(world, rank, keys[1])]
            clock += 1
            running += world.clock(rank, clock)
            if draw.random() < 0.7:
                yield running
                running = []
        running += [cut.push(world, rank, draw.choice(KEYS)), *cut.begin(world, rank)]
        # Pushes that follow wait for the cut, and are not in it.
        running.append(cut.push(world, rank, draw.choice(KEYS)))
        yield running
        if rank == 0:
            yield from cut.fetch(world, rank)
    yield [history.pull(world, rank, key) for key in KEYS]


def run_clocked(seed: int, replicas: int, *kills: int) -> tuple[World, list[Cut]]:
    """Run three cuts with SSP(1). ``kills``: processes that die at a random message."""
    world = CheckedWorld(seed, SSP(1), 3, 1 + seed % 2 + 2 * replicas, replicas)
    cuts = [Cut()]
    while len(cuts) < 3:
        cuts.append(Cut(cuts[-1]))
    for rank in range(3):
        world.start(rank, clocking(world, cuts, rank, 3))
    for rank in kills:
        kill_at(world, world.random.randint(1, 300), rank)
    world.run()
    return world, cuts


@pytest.mark.parametrize("replicas", [0, 1])
def test_cuts_with_staleness_hold_what_began_before_them(replicas: int) -> None:
    """Workers that are up to a clock apart come to each cut, also while a server dies."""
    for seed in range(SEEDS // 4):
        kills = (3 + seed % 3,) if replicas else ()
        world, cuts = run_clocked(seed, replicas, *kills)
        for cut in cuts:
            check_cut(world, cut, (seed, cut.number))


class Rounds(Cut):
    """Rounds of workers with Backup. ``entered``: by worker and key the pushes that were not late.

    ``repeated``: pushes that a server had before another one died, which may have been late.
    """

    def __init__(self) -> None:
        super().__init__()
        self.entered: dict[tuple[int, int], set[Any]] = {}
        self.repeated: set[Any] = set()
        self.starts: dict[int, int] = {}


def backing(world: World, rounds: Rounds, rank: int, steps: int) -> Program:
    """End so many rounds, late or not, as a store counts them; take a cut, and push once more."""
    draw = world.random
    yield from made_keys(world, rank, ())
    clock = 0
    for step in range(steps + 1):
        if step == steps:
            cuts = rounds.begin(world, rank)
            yield cuts
            clock = rounds.starts[rank] = max(clock, *(one.answer.round for one in cuts))
            if cuts[0].answer.key == rank:
                yield from rounds.fetch(world, rank)
        if draw.random() < 0.3:
            yield draw.uniform(0.0, 40.0) * world.slow
        pushes = {
            key: world.request(rank, Kind.PUSH, key, payload=(clock, rank, step), round=clock)
            for key in KEYS
        }
        yield list(pushes.values())
        for key, push in pushes.items():
            if push.answer.flags & DROPPED:
                assert step < steps, "all go on in the same round after a cut"
                clock = max(clock, push.answer.round)
            elif push.answer.flags & REPEATED:
                rounds.repeated.add((key, push.message.payload))
            elif step < steps:
                rounds.entered.setdefault((rank, key), set()).add(push.message.payload)
        if step < steps:
            clock += 1
            clocks = world.clock(rank, clock)
            yield clocks
            clock = max(clock, *(one.answer.round for one in clocks))


@pytest.mark.parametrize("victims", [(), (3,), (1,), (2, 4)])
def test_a_worker_that_is_late_comes_to_a_cut_with_backup(victims: tuple[int, ...]) -> None:
    """It ends its rounds while the others wait for its cut. Servers and workers die meanwhile."""
    alone = 0
    for seed in range(SEEDS // 4):
        replicas = int(any(one >= 3 for one in victims))
        world = CheckedWorld(seed, Backup(0.6), 3, 2, replicas, Records())
        rounds = Rounds()
        for rank in range(3):
            world.start(rank, backing(world, rounds, rank, 4))
        for rank in victims:
            kill_at(world, world.random.randint(30, 250), rank)
        world.run()
        left = world.clients.keys() & world.alive
        assert world.ended >= left and world.failed == {}, (seed, world.failed)
        assert len({rounds.starts[rank] for rank in left}) == 1, (seed, rounds.starts)
        for key, value in rounds.kept.items():
            found = [push for pushes, _ in value for push in pushes]
            assert len(found) == len(set(found)), (seed, key)
            assert all(step < 4 for _, _, step in found), (seed, key)
            for rank in left:
                mine = {one for one in found if one[1] == rank}
                mine = {one for one in mine if (key, one) not in rounds.repeated}
                assert mine == rounds.entered.get((rank, key), set()), (seed, key, rank)
            alone += sum(workers == 1 for _, workers in value)
    assert alone > 0, "no worker was late at a cut: the seeds show nothing"
