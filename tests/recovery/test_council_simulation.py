"""Ranks of a simulated job shrink while ranks die, stop and come back and messages go astray.

A virtual clock drives the state machines that real ranks use (recovery/council.py). A seed decides
about delays, losses and faults. Joining the next communicator is modelled with the property that
the real store has: no member succeeds before all have come, and the death of the first member
lets some succeed and others fail.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
from collections.abc import Callable, Collection

import pytest

from pycoll.bootstrap.recovery.council import REPEAT_S, Council, Roll, Succession, is_quorum

SEEDS = 1000
PATIENCE_S = 4.0
LIMIT_S = 12.0
#: A call makes at most this many communicators; see ``shrinking.ATTEMPTS``.
ATTEMPTS = 6


class Rank:
    """A simulated rank. ``state``: idle, deciding, joining, member, left-out or gave-up."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.succession = Succession(number, tuple(range(size)))
        self.alive = True
        self.running = True
        self.kept: list[Callable[[], None]] = []  # events that wait until the rank runs again
        self.state = "idle"
        self.entered = 0.0
        self.ended = 0.0
        self.attempts = 0
        self.was_stopped = False


class World:
    """The ranks, the network and the clock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.size = self.random.randint(2, 8)
        self.ranks = [Rank(number, self.size) for number in range(self.size)]
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.loss = self.random.choice((0.0, 0.0, 0.1, 0.3))
        self.slow = self.random.choice((0.001, 0.02, 0.3))
        #: A network that is cut: ranks on one side, from when to when. Messages across are lost.
        self.cut: tuple[set[int], float, float] = (set(), 0.0, 0.0)
        self.boundaries = 0  # messages sent so far
        self.faults: dict[int, Callable[[], None]] = {}
        #: By number of the decision: the rolls that ranks learned, and the ranks that joined.
        self.learned: dict[int, set[Roll]] = {}
        self.joined: dict[int, set[int]] = {}
        self.verdicts: dict[int, str] = {}
        self.broken: set[int] = set()  # communicators from which a member's connections are lost

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.counter), action))

    def on(self, rank: Rank, delay: float, action: Callable[[], None]) -> None:
        """Run ``action`` on a rank, once it runs."""

        def run() -> None:
            if rank.alive and rank.running:
                action()
            elif rank.alive:
                rank.kept.append(action)

        self.at(delay, run)

    # Faults

    def kill(self, rank: Rank) -> None:
        rank.alive = False
        for other in self.ranks:
            if rank.number in other.succession.base:
                self.lose_connection(other, other.succession.number)

    def lose_connection(self, rank: Rank, number: int) -> None:
        """Have a member of that communicator find a peer lost, and shrink."""

        def find() -> None:
            if rank.state == "member" and rank.succession.number == number:
                self.enter(rank)

        self.on(rank, self.random.random() * 0.5, find)

    def stop(self, rank: Rank, seconds: float) -> None:
        if not rank.alive or not rank.running:
            return
        rank.running, rank.was_stopped = False, True

        def resume() -> None:
            rank.running = True
            kept, rank.kept = rank.kept, []
            for action in kept:
                self.on(rank, 0.0, action)

        self.at(seconds, resume)

    # A call of shrink()

    def enter(self, rank: Rank) -> None:
        if rank.state in ("idle", "member") and rank.alive:
            rank.entered, rank.attempts = self.now, 0
            self.decide(rank)

    def decide(self, rank: Rank) -> None:
        rank.state = "deciding"
        rank.attempts += 1
        left = max(0.0, rank.entered + LIMIT_S - self.now)
        offer = f"{rank.number}/{rank.succession.number}"
        rank.succession.call(offer, PATIENCE_S, self.now + left)
        self.turn(rank)

    def turn(self, rank: Rank) -> None:
        """Tick the council, and once more after REPEAT_S while the call lasts."""
        council = rank.succession.council
        if rank.state in ("deciding", "joining"):
            if council is not None:
                council.tick(self.now)
            self.settle(rank)
            self.on(rank, REPEAT_S, lambda: self.turn(rank))

    def settle(self, rank: Rank) -> None:
        for to, message in rank.succession.messages():
            self.send(rank, self.ranks[to], json.dumps(message))
        council = rank.succession.council
        if rank.state != "deciding" or council is None:
            return
        if council.roll is not None:
            self.learned.setdefault(rank.succession.number, set()).add(council.roll)
            if rank.succession.succeed():
                rank.state = "joining"
                self.arrive(rank, rank.succession.number)
            else:
                rank.state, rank.ended = "left-out", self.now
        elif council.failed:
            rank.state, rank.ended = "gave-up", self.now

    def send(self, sender: Rank, to: Rank, text: str) -> None:
        self.boundaries += 1
        fault = self.faults.pop(self.boundaries, None)
        if fault is not None:
            fault()
        side, begin, end = self.cut
        if begin <= self.now < end and (sender.number in side) != (to.number in side):
            return
        if not to.alive:
            self.on(sender, 0.001, lambda: self.lose(sender, to.number))
            return
        copies = 0 if self.random.random() < self.loss else self.random.choice((1, 1, 1, 2))
        for _ in range(copies):
            delay = self.random.expovariate(1 / self.slow)
            self.on(to, delay, lambda: self.receive(to, sender.number, text))

    def lose(self, rank: Rank, gone: int) -> None:
        rank.succession.lose(self.now, gone)
        self.settle(rank)

    def receive(self, rank: Rank, sender: int, text: str) -> None:
        # A rank reads its messages only while it shrinks; the system keeps them until then.
        if rank.state in ("deciding", "joining"):
            rank.succession.hear(self.now, sender, json.loads(text))
            self.settle(rank)

    # Joining

    def arrive(self, rank: Rank, number: int) -> None:
        self.joined.setdefault(number, set()).add(rank.number)
        self.on(rank, PATIENCE_S / 2, lambda: self.fail(rank, number))  # its deadline
        members = rank.succession.base
        if self.joined[number] != set(members) or number in self.verdicts:
            for other in members:
                if not self.ranks[other].alive:
                    self.on(rank, 0.05, lambda: self.fail(rank, number))
            return
        if not all(self.ranks[one].alive for one in members):
            self.verdicts[number] = "lost"
            for one in members:
                self.on(self.ranks[one], 0.05, lambda o=one: self.fail(self.ranks[o], number))
            return
        self.verdicts[number] = "joined"
        for one in members:
            self.boundaries += 1
            fault = self.faults.pop(self.boundaries, None)
            if fault is not None:
                fault()
            if not self.ranks[members[0]].alive:  # it serves the store
                self.on(self.ranks[one], 0.05, lambda o=one: self.fail(self.ranks[o], number))
            else:
                self.on(self.ranks[one], 0.01, lambda o=one: self.join(self.ranks[o], number))

    def join(self, rank: Rank, number: int) -> None:
        if rank.state == "joining" and rank.succession.number == number:
            rank.state, rank.ended = "member", self.now
            whole = all(self.ranks[one].alive for one in rank.succession.base)
            if number in self.broken or not whole:
                self.lose_connection(rank, number)

    def fail(self, rank: Rank, number: int) -> None:
        if rank.state != "joining" or rank.succession.number != number:
            return
        # Its connections to members that joined end, so that their next operation raises.
        self.broken.add(number)
        for one in rank.succession.base:
            self.lose_connection(self.ranks[one], number)
        if rank.attempts >= ATTEMPTS or self.now >= rank.entered + LIMIT_S:
            rank.state, rank.ended = "gave-up", self.now
        else:
            self.decide(rank)

    def run(self) -> None:
        while self.events:
            self.now, _, action = heapq.heappop(self.events)
            assert self.now < 300, "the ranks do not come to an end"
            action()


def simulate(seed: int) -> World:
    world = World(seed)
    rng = world.random
    for rank in world.ranks:
        if rng.random() < 0.25:
            world.kill(rank)
        else:
            late = rng.choice((0.0, 0.01, 0.5, 3.0)) * rng.random()
            world.on(rank, late, lambda rank=rank: world.enter(rank))
    if rng.random() < 0.3:
        side = set(rng.sample(range(world.size), rng.randint(1, world.size - 1)))
        world.cut = (side, rng.random(), rng.choice((1.0, 5.0, 100.0)))
    for _ in range(rng.choice((0, 1, 2, 3))):
        victim = rng.choice(world.ranks)
        boundary = rng.randint(1, 12 * world.size)
        if rng.random() < 0.5:
            world.faults[boundary] = lambda victim=victim: world.kill(victim)
        else:
            seconds = rng.choice((0.2, 2.0, 5.0, 20.0))
            world.faults[boundary] = lambda v=victim, s=seconds: world.stop(v, s)
    world.run()
    return world


def check(world: World) -> None:
    """Assert what the protocol promises about the end of a simulated job."""
    for number, rolls in world.learned.items():
        assert len(rolls) == 1, f"decision {number} has the rolls {rolls}"
    for rank in world.ranks:
        if not rank.alive:
            continue
        assert rank.state in ("member", "left-out", "gave-up"), f"{rank.number} is {rank.state}"
        # A call ends by its limit; a stop may lie between the limit and the end of the call.
        assert rank.was_stopped or rank.ended - rank.entered <= LIMIT_S + PATIENCE_S + 1
    # Members of the same communicator have the same view; no two groups live side by side.
    members = [rank for rank in world.ranks if rank.alive and rank.state == "member"]
    views = {rank.succession.base for rank in members}
    whole = {view for view in views if all(world.ranks[one].alive for one in view)}
    assert len(whole) <= 1, f"groups side by side: {whole}"
    for first, second in itertools.combinations(views, 2):
        assert set(first) & set(second), f"disjoint groups: {first} and {second}"


@pytest.mark.parametrize("block", range(10))
def test_all_that_go_on_agree(block: int) -> None:
    shift = int(os.environ.get("TEST_SEED", "0"))
    for seed in range(SEEDS // 10):
        number = shift + block * (SEEDS // 10) + seed
        try:
            check(simulate(number))
        except BaseException:
            print(f"simulated job with seed {number}")
            raise


def calm(size: int, dead: set[int], stopped: Collection[int] = ()) -> World:
    """A job without lost messages, in which the ranks ``dead`` have died before the call."""
    world = World(1)
    world.size, world.loss, world.slow, world.faults = size, 0.0, 0.001, {}
    world.ranks = [Rank(number, size) for number in range(size)]
    for rank in world.ranks:
        if rank.number in dead:
            world.kill(rank)
        else:
            world.on(rank, 0.0, lambda rank=rank: world.enter(rank))
        if rank.number in stopped:
            world.stop(rank, 30.0)
    world.run()
    check(world)
    return world


@pytest.mark.parametrize("dead", [set(), {0}, {3}, {0, 1}, {1, 2, 3}, {0, 1, 2}])
def test_only_the_dead_are_missing_and_no_time_is_lost(dead: set[int]) -> None:
    world = calm(4, dead)
    survivors = tuple(sorted({0, 1, 2, 3} - dead))
    for number in survivors:
        assert world.ranks[number].state == "member"
        assert world.ranks[number].succession.base == survivors
        assert world.ranks[number].ended < 0.5


@pytest.mark.parametrize(("size", "stopped"), [(3, {0}), (3, {2}), (4, {2, 3}), (5, {0, 1})])
def test_a_stopped_rank_is_left_out_and_learns_it(size: int, stopped: set[int]) -> None:
    world = calm(size, set(), stopped)
    for rank in world.ranks:
        expected = {"gave-up", "left-out"} if rank.number in stopped else {"member"}
        assert rank.state in expected
    assert len({r.succession.base for r in world.ranks if r.state == "member"}) == 1


@pytest.mark.parametrize(("size", "stopped"), [(2, {0}), (4, {0, 1}), (5, {1, 2, 3})])
def test_too_few_ranks_do_not_go_on_without_those_that_run(size: int, stopped: set[int]) -> None:
    world = calm(size, set(), stopped)
    for rank in world.ranks:
        if rank.number not in stopped:
            assert rank.state == "gave-up"


def test_two_quorums_share_a_rank() -> None:
    for size in range(1, 7):
        base = tuple(range(size))
        groups = [set(g) for n in range(size + 1) for g in itertools.combinations(base, n)]
        quorums = [group for group in groups if is_quorum(group, (), base)]
        assert all(one & other for one in quorums for other in quorums)
    assert is_quorum({1}, {0}, (0, 1))
    assert not is_quorum({1}, set(), (0, 1))
    assert is_quorum({0}, set(), (0, 1))


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "prepare", "ballot": 3},
        {"kind": "decided", "roll": [[], ""]},
        {"kind": "promise", "ballot": ["a", 0]},
    ],
)
def test_malformed_messages_are_refused(message: dict[str, object]) -> None:
    council = Council(0, (0, 1), "", 1.0, 2.0)
    with pytest.raises((ValueError, TypeError, KeyError)):
        council.hear(0.0, 1, message)
    with pytest.raises(ValueError, match="a message of rank 7"):
        council.hear(0.0, 7, message)
    assert council.roll is None


def is_third(some: Collection[int], gone: Collection[int], base: tuple[int, ...]) -> bool:
    return 3 * len(some) > len(base) or is_quorum(some, gone, base)


def forget(self: Council, now: float) -> None:
    """Propose as if no rank had accepted a roll before."""
    self._promises = {rank: (offer, None) for rank, (offer, _) in self._promises.items()}
    propose(self, now)


propose = Council._propose


@pytest.mark.parametrize("fault", ["a third decides", "accepted rolls are forgotten"])
def test_the_simulation_finds_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "a third decides":
        monkeypatch.setattr("pycoll.bootstrap.recovery.council.is_quorum", is_third)
    else:
        monkeypatch.setattr(Council, "_propose", forget)
    with pytest.raises(AssertionError):
        for seed in range(SEEDS):
            check(simulate(seed))
