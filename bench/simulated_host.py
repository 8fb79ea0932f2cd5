"""Simulates the plans of a collective, row by row, on a host whose cores lie in domains.

Every rank has a core. A core runs the ready rows of its lanes in turn, as the executor does
(csrc/plan/FORMAT.md): a row waits for its segments and for free slots, then reads every operand,
fills slots, and passes its segments on. The clock is virtual, so the result depends on the plans,
the bytes and the costs of the host only.

A core pays for segments, for bytes that it reads or writes, and for bytes that it combines. The
price of a byte, and the time until a segment is seen, depend on the distance of the two cores.
Bytes between groups also occupy the links of both groups, and bytes that are read from a rank
occupy the port of its memory. A link or port serves one piece after the other, in the order of the
requests. A piece is at most one segment, so cores that use a link at once get equal shares.

Arrays are in memory that all ranks reach. Whether a segment is read in place, written directly or
copied through a slot follows from the flags of both rows, as in the executor.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pycoll.cost.model import REACHED_BYTES, SEGMENT_BYTES, UNCOPIED_BYTES, Link
from pycoll.plan.plan_format import (
    DIRECT_WRITE,
    FINAL,
    NO_CARRY,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Plan,
    Row,
)
from pycoll.schedule.copies import CopyStrategy
from pycoll.schedule.language import block_count

#: Segments that a channel of shared memory holds.
CHANNEL_DEPTH = 4
#: Cores that can read the memory of one rank at the same time at full speed.
PORT_READERS = 2
#: The ways of a segment.
_SLOT, _READ, _WRITTEN = range(3)


class Distance(NamedTuple):
    """The costs between two cores.

    ``latency``: s until a segment is seen. ``in_place``: s/byte of a core that copies between its
    own memory and that of the other. ``slot``: s/byte of a core that reads a slot of the other.
    """

    latency: float
    in_place: float
    slot: float


class Host(NamedTuple):
    """A host with a core for each rank.

    ``groups``: a label per rank for each kind of domain, the smallest domains first. ``distances``:
    the costs inside a domain of each kind, and last those between the largest domains. ``links``:
    the s/byte, each way, of the link of a domain of each kind; its ranks share it. ``core``: the
    costs of a core by itself: call, overhead, beta and gamma. ``memory``: the s/byte of the memory
    of one of the largest domains; 0: caches hold all arrays.
    """

    groups: tuple[tuple[int, ...], ...]
    distances: tuple[Distance, ...]
    links: tuple[float, ...]
    core: Link
    memory: float = 0.0


def simulate(
    host: Host,
    plans: Sequence[Plan],
    nbytes: int,
    limit: float = inf,
    segment_bytes: int = SEGMENT_BYTES,
) -> float:
    """Return the seconds until every rank has ended a message of ``nbytes``; all begin at once.

    The result is infinite if that takes more than ``limit`` seconds.
    """
    return _Run(host, plans, nbytes, segment_bytes).seconds(limit)


class _Resource:
    """A link or a port: it serves one piece after the other."""

    __slots__ = ("byte_s", "free_at")

    def __init__(self, byte_s: float) -> None:
        self.byte_s = byte_s
        self.free_at = 0.0


#: A piece of work: seconds of the core, bytes, and the resources that the bytes occupy.
_Piece = tuple[float, float, tuple[_Resource, ...]]


class _Channel:
    """The segments between two ranks on one channel.

    ``path`` are the resources of bytes from the source to the destination, ``cold`` those of bytes
    that are in the source's memory instead of its cache.
    """

    __slots__ = ("arriving", "cold", "costs", "destination", "freed", "held", "path", "source")

    def __init__(self, source: int, destination: int, places: _Places) -> None:
        self.source, self.destination = source, destination
        self.costs = places.host.distances[places.distance(source, destination)]
        self.path = places.path(source, destination)
        self.cold = places.cold(source, destination, self.path)
        #: (seconds at which it is seen, way, whether it is cold) of each segment.
        self.arriving: deque[tuple[float, int, bool]] = deque()
        #: Seconds at which the source sees that a slot is free again.
        self.freed: deque[float] = deque()
        self.held = 0

    def free_at(self, now: float) -> float:
        """Return the time at which the source has a free slot; infinite if it is not known."""
        freed = self.freed
        while freed and freed[0] <= now:
            freed.popleft()
            self.held -= 1
        if self.held < CHANNEL_DEPTH:
            return now
        return freed[0] if freed else inf


class _Places:
    """The links, ports and memories of a host."""

    def __init__(self, host: Host, size: int) -> None:
        self.host = host
        slowest = host.distances[0].in_place
        self.ports = [_Resource(slowest / PORT_READERS) for _ in range(size)]
        #: By kind of domain: (outwards, inwards) of each domain.
        self.links = [
            [(_Resource(byte_s), _Resource(byte_s)) for _ in range(max(labels) + 1)]
            for labels, byte_s in zip(host.groups, host.links, strict=True)
        ]
        count = max(host.groups[-1]) + 1 if host.groups else 1
        self.memories = [_Resource(host.memory) for _ in range(count)]

    def distance(self, one: int, other: int) -> int:
        """Return the number of kinds of domains of which the two ranks share none."""
        for kind, labels in enumerate(self.host.groups):
            if labels[one] == labels[other]:
                return kind
        return len(self.host.groups)

    def path(self, source: int, destination: int) -> tuple[_Resource, ...]:
        found = [self.ports[source]]
        for kind in range(self.distance(source, destination)):
            labels = self.host.groups[kind]
            found.append(self.links[kind][labels[source]][0])
            found.append(self.links[kind][labels[destination]][1])
        return tuple(found)

    def cold(
        self, owner: int, reader: int, path: tuple[_Resource, ...] = ()
    ) -> tuple[_Resource, ...]:
        """Return the path of bytes from the memory of ``owner`` to the cache of ``reader``."""
        if not self.host.memory:
            return path
        found = [*path, self.memory_of(owner)]
        if self.host.groups:
            found.append(self.links[0][self.host.groups[0][reader]][1])
        return tuple(dict.fromkeys(found))

    def written(self, owner: int) -> tuple[_Resource, ...]:
        """Return the path of bytes that a cache reads, changes, and writes back later."""
        if not self.host.memory:
            return ()
        memory = self.memory_of(owner)
        links = self.links[0][self.host.groups[0][owner]] if self.host.groups else ()
        return (memory, memory, *links)

    def memory_of(self, rank: int) -> _Resource:
        return self.memories[self.host.groups[-1][rank] if self.host.groups else 0]


class _Step:
    """A row with its channels. ``writes``: for each send, whether its receiver opens a window."""

    __slots__ = ("complete", "index", "operands", "recv", "row", "send", "token", "writes")

    def __init__(
        self, row: Row, recv: list[_Channel], send: list[_Channel], writes: list[bool]
    ) -> None:
        self.row, self.recv, self.send, self.writes = row, recv, send, writes
        self.token = row.chunk == TOKEN_ROW
        self.operands = row.operands
        self.complete = row.operands == 1 or bool(row.flags & FINAL)


class _Lane:
    """The rows of a lane, or its leading rows, or the rows behind these (csrc/plan/FORMAT.md)."""

    __slots__ = ("lead", "next", "steps", "tile")

    def __init__(self, steps: list[_Step], lead: _Lane | None = None) -> None:
        self.steps, self.lead = steps, lead
        self.next = self.tile = 0


class _Rank:
    """The state of a rank: its lanes, the row that its core runs, and the pieces left of it."""

    def __init__(self, number: int, lanes: list[_Lane]) -> None:
        self.number, self.lanes = number, lanes
        self.turn = 0
        self.running: _Lane | None = None
        self.pieces: list[_Piece] = []
        self.ways: list[int] = []
        self.idle = True
        self.ended_at = 0.0
        self.drained_at = 0.0


class _Run:
    """One operation."""

    def __init__(self, host: Host, plans: Sequence[Plan], nbytes: int, segment_bytes: int) -> None:
        first = plans[0]
        self.core = host.core
        self.places = _Places(host, first.size)
        chunks = block_count(first.collective, first.size) * first.parts
        self.chunk_bytes = nbytes / chunks if chunks else 0.0
        self.segment_bytes = segment_bytes
        self.tiles = max(1, -int(-self.chunk_bytes // segment_bytes))
        self.shared = nbytes >= REACHED_BYTES
        self.ranks = self._ranks(plans)
        self.events: list[tuple[float, int, int, bool]] = []
        self.order = 0

    def _ranks(self, plans: Sequence[Plan]) -> list[_Rank]:
        channels: dict[tuple[int, int, int], _Channel] = {}
        windows = _windows(plans)
        ranks = []
        for plan in plans:
            uses: dict[tuple[int, int, int], int] = {}
            ends = []
            for peer, number, sends in plan.channels:
                key = (plan.rank, peer, number) if sends else (peer, plan.rank, number)
                if key not in channels:
                    channels[key] = _Channel(key[0], key[1], self.places)
                ends.append(key)
            lanes: list[list[_Step]] = [[] for _ in range(plan.lane_count)]
            for row in plan.rows:
                writes = []
                for end in row.send:
                    use = uses[ends[end]] = uses.get(ends[end], -1) + 1
                    writes.append(windows[ends[end]][use])
                recv = [channels[ends[end]] for end in row.recv]
                send = [channels[ends[end]] for end in row.send]
                lanes[row.lane].append(_Step(row, recv, send, writes))
            halves = [lane for rows in lanes for lane in self._lanes(rows)]
            ranks.append(_Rank(plan.rank, halves))
        return ranks

    def _lanes(self, steps: list[_Step]) -> list[_Lane]:
        leads = _leads(steps) if self.tiles > 1 else 0
        if not leads:
            return [_Lane(steps)]
        lead = _Lane(steps[:leads])
        return [lead, _Lane(steps[leads:], lead)]

    def seconds(self, limit: float) -> float:
        """Run to the end."""
        for number in range(len(self.ranks)):
            self._at(self.core.call, number, False)
        events = self.events
        while events:
            now, _, number, continues = heapq.heappop(events)
            if now > limit:
                return inf
            rank = self.ranks[number]
            if continues or rank.idle:
                self._go_on(rank, now)
        unfinished = [
            rank for rank in self.ranks if any(lane.tile < self.tiles for lane in rank.lanes)
        ]
        if unfinished:
            raise RuntimeError(f"{len(unfinished)} of {len(self.ranks)} ranks wait for ever")
        return max(max(rank.ended_at, rank.drained_at) for rank in self.ranks)

    def _at(self, time: float, number: int, continues: bool) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, number, continues))

    def _go_on(self, rank: _Rank, now: float) -> None:
        number = rank.number
        if rank.running is not None:
            if rank.pieces:
                return self._at(self._moved(rank.pieces.pop(), now), number, True)
            self._commit(rank, rank.running, now)
        woken = inf
        count = len(rank.lanes)
        for offset in range(count):
            lane = rank.lanes[(rank.turn + offset) % count]
            ready = self._ready_at(lane, now)
            if ready <= now:
                rank.turn = (rank.turn + offset + 1) % count
                rank.idle = False
                begun = self._begin(rank, lane, now)
                return self._at(begun, number, True)
            woken = min(woken, ready)
        rank.idle = True
        if woken < inf:
            self._at(woken, number, False)

    def _ready_at(self, lane: _Lane, now: float) -> float:
        """Return the time at which the next row can run; infinite if it is not known."""
        if lane.tile == self.tiles:
            return inf
        lead = lane.lead
        if lead is not None and lead.tile <= lane.tile:
            return inf
        step = lane.steps[lane.next]
        if step.token and lane.tile < self.tiles - 1:
            return now
        ready = now
        for channel in step.recv:
            if not channel.arriving:
                return inf
            ready = max(ready, channel.arriving[0][0])
        for channel in step.send:
            ready = max(ready, channel.free_at(now))
        return ready

    def _begin(self, rank: _Rank, lane: _Lane, now: float) -> float:
        """Collect the pieces of the row; return the time at which its segments are handled."""
        step = lane.steps[lane.next]
        rank.running = lane
        rank.pieces, rank.ways = [], []
        if step.token:
            if lane.tile < self.tiles - 1:
                return now
        else:
            self._collect(rank, step, lane.tile)
        return now + (len(step.recv) + len(step.send)) * self.core.overhead / 2

    def _collect(self, rank: _Rank, step: _Step, tile: int) -> None:
        row, core, places = step.row, self.core, self.places
        length = min(self.segment_bytes, self.chunk_bytes - tile * self.segment_bytes)
        number = rank.number
        pieces = rank.pieces
        for channel in step.recv:
            _, way, cold = channel.arriving[0]
            if way != _WRITTEN:
                costs = channel.costs
                each = costs.in_place if way == _READ else costs.slot
                pieces.append((each * length, length, channel.cold if cold else channel.path))
        if places.host.memory and row.source == Buffer.INPUT and step.recv:
            pieces.append((0.0, length, places.cold(number, number)))
        combines = step.operands - 1
        if combines:
            pieces.append((combines * core.gamma * length, length, ()))
        long = self.shared and length >= UNCOPIED_BYTES
        if row.target and row.source and not step.recv and row.carry == NO_CARRY:
            pieces.append(((self._alone if long else core.beta) * length, length, ()))
        if row.target == Buffer.OUTPUT:
            pieces.append((0.0, length, places.written(number)))
        rank.ways = [self._way(step, i, tile, long) for i in range(len(step.send))]
        for channel, way in zip(step.send, rank.ways, strict=True):
            if way == _WRITTEN:
                back = channel.path[1:]
                pieces.append((channel.costs.in_place * length, length, back))
        if _SLOT in rank.ways:
            pieces.append((core.beta / 2 * length, length, ()))

    @property
    def _alone(self) -> float:
        """The s/byte of a core that copies its own memory."""
        return self.places.host.distances[0].in_place

    def _way(self, step: _Step, i: int, tile: int, long: bool) -> int:
        """Return the way of send number ``i``; see csrc/executor/rows/sender.cpp."""
        row = step.row
        if not long:
            return _SLOT
        exposable = bool(row.flags & ZERO_COPY)
        if exposable and row.copies is not CopyStrategy.SENDER:
            kept = row.target != Buffer.NONE
            if row.copies is CopyStrategy.RECEIVER or kept or tile % 2 == 0:
                return _READ
        multicast = not step.recv and len(step.send) > 1
        if step.writes[i] and step.complete and not multicast:
            return _WRITTEN
        return _READ if exposable else _SLOT

    @staticmethod
    def _moved(piece: _Piece, now: float) -> float:
        """Return the time at which the piece has moved."""
        seconds, length, resources = piece
        end = now + seconds
        for one in resources:
            one.free_at = max(one.free_at, now) + length * one.byte_s
            end = max(end, one.free_at)
        return end

    def _commit(self, rank: _Rank, lane: _Lane, now: float) -> None:
        """Pass the segments of the row on, and free those that it received."""
        step = lane.steps[lane.next]
        rank.running = None
        rank.ended_at = now
        if not step.token or lane.tile == self.tiles - 1:
            cold = step.row.source == Buffer.INPUT and not step.recv
            ways = rank.ways or [_SLOT] * len(step.send)
            for channel, way in zip(step.send, ways, strict=True):
                seen = now + channel.costs.latency
                channel.held += 1
                channel.arriving.append((seen, way, cold))
                if self.ranks[channel.destination].idle:
                    self._at(seen, channel.destination, False)
            for channel in step.recv:
                _, way, _ = channel.arriving.popleft()
                seen = now + channel.costs.latency
                channel.freed.append(seen)
                source = self.ranks[channel.source]
                if way == _READ:
                    source.drained_at = max(source.drained_at, seen)
                if source.idle:
                    self._at(seen, channel.source, False)
        lane.next += 1
        if lane.next == len(lane.steps):
            lane.next = 0
            lane.tile += 1


def _windows(plans: Sequence[Plan]) -> dict[tuple[int, int, int], list[bool]]:
    """Return, for each use of each channel in a tile, whether the receiver's row opens a window."""
    found: dict[tuple[int, int, int], list[bool]] = {}
    for plan in plans:
        for row in plan.rows:
            for end in row.recv:
                peer, number, _ = plan.channels[end]
                opens = bool(row.flags & DIRECT_WRITE)
                found.setdefault((peer, plan.rank, number), []).append(opens)
    return found


def _leads(steps: list[_Step]) -> int:
    """Return the number of leading rows that may run tiles ahead."""
    count = 0
    for step in steps:
        row = step.row
        only_sends = not step.recv and row.carry == NO_CARRY and row.target == Buffer.NONE
        if step.token or not only_sends or row.source != Buffer.INPUT:
            break
        count += 1
    while count:
        later = {channel for step in steps[count:] for channel in step.send}
        shorter = next(
            (i for i, step in enumerate(steps[:count]) if later.intersection(step.send)), count
        )
        if shorter == count:
            break
        count = shorter
    return count if count < len(steps) else 0
