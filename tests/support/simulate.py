"""Runs schedules and plans with integers, in random order, to check the proof.

It is written from the documents alone (the docstring of schedule/language.py, FORMAT.md). It shares
only the reader of plan bytes with the proof. Contributions are random residues, so a wrong set of
contributions gives a wrong sum. A result that is final is multiplied by `FINAL_FACTOR` in place of
the division that `avg` does. Memory that a row may hand over or expose is read as late as allowed;
direct writes are made as early. Ranks begin in random order; a rank begins before its first row,
and announces its write windows then.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import lru_cache, reduce
from itertools import groupby

from pycoll.plan.plan_format import unpack
from pycoll.schedule.collectives import Collective
from pycoll.schedule.language import TOKEN, Schedule

PRIME = (1 << 61) - 1
FINAL_FACTOR = 1_000_003
DIVIDED = (Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER)
IN_PLACE = (
    Collective.ALL_REDUCE,
    Collective.REDUCE,
    Collective.BROADCAST,
    Collective.SCAN,
    Collective.EXSCAN,
)
TOKEN_ROW = 0xFFFFFFFF
Operation = Callable[[int, int], int]


class WrongRunError(Exception):
    """The run deadlocked, read memory that holds no value, or ended with wrong values."""


def add(a: int, b: int) -> int:
    return (a + b) % PRIME


def in_order(a: int, b: int) -> int:
    """Neither commutative nor associative, so it tells every order of a fold from every other."""
    return (3 * a + 5 * b + a * b % PRIME * 7 + 11) % PRIME


def contribution(rank: int, chunk: int, tile: int = 0) -> int:
    return random.Random(f"{rank} {chunk} {tile}").randrange(PRIME)


def has_input(schedule: Schedule, rank: int, block: int) -> bool:
    kind, size, root = schedule.collective, schedule.size, schedule.root
    if rank >= size - schedule.servers:
        return False
    if kind in (Collective.ALL_GATHER, Collective.GATHER):
        return block == rank
    if kind in (Collective.BROADCAST, Collective.SCATTER):
        return rank == root
    return kind is not Collective.ALL_TO_ALL or block // size == rank


def sources(schedule: Schedule, rank: int, block: int) -> list[int]:
    """The ranks whose contributions belong in a block of the rank's output; none: anything may."""
    kind, size, root = schedule.collective, schedule.size, schedule.root
    everyone = list(range(size - schedule.servers))
    if rank not in everyone:
        return []
    if kind in (Collective.REDUCE, Collective.GATHER) and rank != root:
        return []
    if kind in (Collective.REDUCE_SCATTER, Collective.SCATTER) and rank != block:
        return []
    if kind is Collective.ALL_TO_ALL:
        return [block // size] if block % size == rank else []
    if kind is Collective.SCAN:
        return everyone[: rank + 1]
    if kind is Collective.EXSCAN:
        return everyone[:rank]
    if kind in (Collective.BROADCAST, Collective.SCATTER):
        return [root]
    if kind in (Collective.ALL_GATHER, Collective.GATHER):
        return [block]
    return everyone


def expected(schedule: Schedule, tile: int = 0, factor: int = 1) -> dict[tuple[int, int], int]:
    """(rank, chunk) -> the sum that must be in the output."""
    wanted = {}
    for rank in range(schedule.size):
        for chunk in range(schedule.data_chunks):
            if ranks := sources(schedule, rank, chunk // schedule.parts):
                total = sum(contribution(r, chunk, tile) for r in ranks)
                wanted[rank, chunk] = total * factor % PRIME
    return wanted


def run_schedule(schedule: Schedule, op: Operation) -> list[dict[int, int]]:
    """Rank -> chunk -> value at the end, by the definition of a step."""
    held: list[dict[int, int]] = [{} for _ in range(schedule.size)]
    for rank in range(schedule.size):
        for chunk in range(schedule.data_chunks):
            if has_input(schedule, rank, chunk // schedule.parts):
                held[rank][chunk] = contribution(rank, chunk)
    for _, group in groupby(schedule.transfers, key=lambda t: t.step):
        before = [dict(chunks) for chunks in held]
        written: dict[tuple[int, int], list[tuple[bool, bool, int]]] = {}
        for t in group:
            if t.chunk == TOKEN:
                continue
            if t.chunk not in before[t.source]:
                raise WrongRunError(f"rank {t.source} reads chunk {t.chunk}")
            value = before[t.source][t.chunk]
            written.setdefault((t.destination, t.target), []).append((t.reduce, t.before, value))
        for (rank, chunk), values in written.items():
            if not values[0][0]:
                held[rank][chunk] = values[-1][2]
                continue
            own = [before[rank][chunk]] if chunk in before[rank] else []
            if not own and rank < schedule.size - schedule.servers:
                raise WrongRunError(f"rank {rank} combines into chunk {chunk}")
            held[rank][chunk] = fold(own, values, op)
    return held


def fold(own: list[int], values: list[tuple[bool, bool, int]], op: Operation) -> int:
    """From the left: what stands in front, the chunk's own value, what stands behind."""
    front = [value for _, before, value in values if before]
    behind = [value for _, before, value in values if not before]
    return reduce(op, [*front, *own, *behind])


def schedule_is_right(schedule: Schedule) -> bool:
    """Whether a run gives the right sums."""
    try:
        held = run_schedule(schedule, add)
    except WrongRunError:
        return False
    return all(
        held[rank].get(chunk) == value for (rank, chunk), value in expected(schedule).items()
    )


@lru_cache(maxsize=4)
def receivers_of(plans: tuple[bytes, ...]) -> dict[tuple[int, int, int], list]:
    """(sender, receiver, number) -> the rows that receive there, in their order."""
    found: dict[tuple[int, int, int], list] = {}
    for rank, plan in enumerate(map(unpack, plans)):
        for row in plan.rows:
            for end in row.recv:
                peer, number, _ = plan.channels[end]
                found.setdefault((peer, rank, number), []).append(row)
    return found


class World:
    """All ranks' plans, their memory and channels; lanes are stepped in random order."""

    def __init__(
        self,
        plans: list[bytes],
        rng: random.Random,
        op: Operation = add,
        factor: int = FINAL_FACTOR,
        tiles: int = 2,
        depth: int = 2,
        in_place: bool = False,
        lazy: bool = True,
    ) -> None:
        self.plans = [unpack(image) for image in plans]
        first = self.plans[0]
        self.schedule = Schedule(
            first.collective, first.size, first.parts, (), first.root, servers=first.servers
        )
        self.rng, self.op, self.factor, self.tiles, self.depth = rng, op, factor, tiles, depth
        self.lazy = lazy
        self.writes_directly = rng.random() < 0.5
        shared = in_place and first.collective in IN_PLACE
        self.inputs: list[dict[tuple[int, int], int]] = []
        self.outputs: list[dict[tuple[int, int], int]] = []
        for rank in range(first.size):
            memory = {
                (chunk, tile): contribution(rank, chunk, tile)
                for chunk in range(self.schedule.data_chunks)
                for tile in range(tiles)
                if has_input(self.schedule, rank, chunk // first.parts)
            }
            self.inputs.append(memory)
            self.outputs.append(memory if shared else {})
        self.scratch: list[dict[int, int]] = [{} for _ in self.plans]
        self.channels: dict[tuple[int, int, int], deque[list]] = {}
        #: Of each channel: the rows that receive from it, and how many segments it had per tile.
        self.receivers = receivers_of(tuple(plans))
        self.sent: dict[tuple[int, int, int, int], int] = {}
        #: The ranks that have begun, and those that receive no data.
        self.begun: set[int] = set()
        self.only_send = {
            rank
            for rank, plan in enumerate(self.plans)
            if not any(row.recv and row.chunk != TOKEN_ROW for row in plan.rows)
        }
        self.lanes = [
            [rank, [row for row in plan.rows if row.lane == lane], 0, 0, 1 << rank]
            for rank, plan in enumerate(self.plans)
            for lane in range(plan.lane_count)
        ]

    def run(self) -> None:
        """To the end; raises WrongRunError on deadlock."""
        waiting = [lane for lane in self.lanes if lane[1]]
        self.rng.shuffle(waiting)
        steady = self.rng.random() < 0.5  # some lanes always before others: great skew
        while waiting:
            if not steady:
                self.rng.shuffle(waiting)
            for lane in waiting:
                if self.step(lane):
                    if lane[3] == self.tiles:
                        waiting.remove(lane)
                    break
            else:
                raise WrongRunError("deadlock")
        if any(self.channels.values()):
            raise WrongRunError("segments are left over")

    def queue(self, rank: int, end: int) -> deque[list]:
        peer, number, sends = self.plans[rank].channels[end]
        key = (rank, peer, number) if sends else (peer, rank, number)
        return self.channels.setdefault(key, deque())

    def step(self, lane: list) -> bool:
        rank, rows, index, tile, _ = lane
        if rank not in self.begun:
            self.begun.add(rank)
            return True
        row = rows[index]
        token = row.chunk == TOKEN_ROW
        if not token or tile == self.tiles - 1:
            recv = [self.queue(rank, end) for end in row.recv]
            send = [self.queue(rank, end) for end in row.send]
            if not all(recv) or any(len(queue) >= self.depth for queue in send):
                return False
            waits = row.flags & 16 and self.is_to_write(row, tile)
            if waits and not all(self.has_answered(rank, end) for end in row.send):
                return False
            self.execute(lane, row, [queue.popleft() for queue in recv], send, token)
        lane[2] = (index + 1) % len(rows)
        lane[3] = tile + (index + 1 == len(rows))
        return True

    @staticmethod
    def is_to_write(row, tile: int) -> bool:
        """Whether the row's sender, not its receivers, copies the segment of the tile."""
        return row.copies == 1 or (row.copies == 2 and tile % 2 == 1 and not row.target)

    def has_answered(self, rank: int, end: int) -> bool:
        """Whether the receiver has announced its write window, or that it opens none."""
        peer, number, _ = self.plans[rank].channels[end]
        rows = self.receivers.get((rank, peer, number), [])
        return peer in self.begun and any(row.flags & 32 for row in rows)

    def execute(self, lane: list, row, arrived: list[list], send: list[deque], token: bool) -> None:
        rank, tile = lane[0], lane[3]
        for segment in arrived:
            lane[4] |= segment[3]
            if segment[0] != row.chunk:
                raise WrongRunError("a segment of another chunk")
        memory, key, value = None, None, 0
        if not token:
            operands = [self.arrival(rank, row, tile, segment) for segment in arrived]
            if row.source:
                memory, key = self.place(rank, row.source, row.source_slot, tile)
                if key not in memory:
                    raise WrongRunError("reads memory that holds no value")
                operands.insert(row.source_position, memory[key])
            if row.carry >= 0:
                if row.carry not in self.scratch[rank]:
                    raise WrongRunError("its carry holds no value")
                operands.insert(0, self.scratch[rank][row.carry])
            value = operands[0]
            for operand in operands[1:]:
                value = self.op(value, operand)
            if row.flags & 1:
                value = value * self.factor % PRIME
        exposed = bool(row.flags & 4)
        late = self.lazy and memory is not None and not row.recv and row.source != 3
        if exposed and row.recv:
            memory, key = self.place(rank, row.target, row.target_slot, tile)
            late = self.lazy
        if row.target and not (arrived and arrived[0][6]):
            self.store(rank, row, tile, value)
        early = not token and rank in self.only_send and self.is_to_write(row, tile)
        for end, queue in zip(row.send, send, strict=True):
            if early and self.plans[rank].channels[end].peer not in self.begun:
                raise WrongRunError("exposes a segment that it should write")
            written = self.write_directly(rank, end, row.chunk, tile, value)
            source = (memory, key) if late else None
            queue.append([row.chunk, value, source, lane[4], rank, exposed, written])

    def arrival(self, rank: int, row, tile: int, segment: list) -> int:
        if not segment[6]:
            return self.load(segment)
        if (row.target_slot, tile) not in self.outputs[rank]:
            raise WrongRunError("a direct write went elsewhere")
        return self.outputs[rank][row.target_slot, tile]

    def write_directly(self, rank: int, end: int, chunk: int, tile: int, value: int) -> bool:
        """Writes to the receiver's output at once, if its row allows that."""
        if not self.writes_directly:
            return False
        peer, number, _ = self.plans[rank].channels[end]
        rows = self.receivers.get((rank, peer, number), [])
        use = self.sent.get((rank, peer, number, tile), 0)
        self.sent[rank, peer, number, tile] = use + 1
        if use >= len(rows) or not rows[use].flags & 8:
            return False
        self.outputs[peer][chunk, tile] = value
        return True

    def store(self, rank: int, row, tile: int, value: int) -> None:
        if row.flags & 2:
            for queue in self.channels.values():
                for segment in queue:
                    if segment[4] == rank and not segment[5]:
                        segment[1], segment[2] = self.load(segment), None
        if row.target == 2 and row.target_slot != row.chunk:
            raise WrongRunError("writes a chunk of another size")
        memory, key = self.place(rank, row.target, row.target_slot, tile)
        memory[key] = value

    @staticmethod
    def load(segment: list) -> int:
        return segment[2][0][segment[2][1]] if segment[2] is not None else segment[1]

    def place(self, rank: int, buffer: int, slot: int, tile: int) -> tuple[dict, object]:
        if buffer == 3:
            return self.scratch[rank], slot
        return (self.inputs if buffer == 1 else self.outputs)[rank], (slot, tile)

    def check(self, everyone_heard: bool) -> None:
        """The sums are right in every tile, and everyone heard where this is promised."""
        size, kind = self.schedule.size, self.schedule.collective
        workers = size - self.schedule.servers
        factor = self.factor if kind in DIVIDED and workers > 1 else 1
        for tile in range(self.tiles):
            for (rank, chunk), value in expected(self.schedule, tile, factor).items():
                if self.outputs[rank].get((chunk, tile)) != value:
                    raise WrongRunError(f"rank {rank}, chunk {chunk}, tile {tile} is wrong")
        if everyone_heard or kind is Collective.BARRIER:
            heard = [1 << rank for rank in range(size)]
            for lane in self.lanes:
                heard[lane[0]] |= lane[4]
            needed = [size if rank < workers else workers for rank in range(size)]
            everyone = [(1 << count) - 1 for count in needed]
            if any(mask & all_of != all_of for mask, all_of in zip(heard, everyone, strict=True)):
                raise WrongRunError("a rank leaves early")


def plans_are_right(plans: list[bytes], seed: int, runs: int, everyone_heard: bool = False) -> bool:
    """Whether random runs, in place and not, give the right sums."""
    for run in range(runs):
        rng = random.Random(seed * 1000 + run)
        world = World(plans, rng, in_place=bool(run % 2), lazy=run % 3 != 2, depth=2 + run % 2)
        try:
            world.run()
            world.check(everyone_heard)
        except WrongRunError:
            return False
    return True
