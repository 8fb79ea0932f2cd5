"""Flips each flag that concerns waits in one row of proved plans, and checks the proof's answer.

The flags are await_window, announce_window, flush, direct_write and zero_copy. A flush waits for
memory that was handed over, and not for memory that is exposed. Each test states the rule by which
a plan with one flipped flag is still correct. It compares every answer of the proof with this rule.
`Order` finds which rows come before others by paths in a graph, where the proof uses clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import TopologicalSorter
from typing import NamedTuple

from mutants import edited
from simulate import IN_PLACE

from pycoll.algorithms import SERVED, TABLE, Algorithm
from pycoll.plan.lowering import add_acknowledgements, lower_all
from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    DIRECT_WRITE,
    FLUSH,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Plan,
    Row,
    leading_count,
    unpack,
)
from pycoll.plan.verifier import verify_plans
from pycoll.schedule.collectives import REDUCING, ROOTED, Collective
from pycoll.schedule.copies import Copies, CopyStrategy
from pycoll.schedule.language import Schedule, ScheduleError
from pycoll.schedule.topology import Topology

RECEIVER, SENDER, SPLIT = CopyStrategy
TILES = 2
Named = tuple[str, list[bytes]]
#: Returns a part of the error that the proof must raise for a flag that is flipped in a row; "":
#: the proof must accept the plan.
Rule = Callable[["Order", int, int, Row], str]


class Event(NamedTuple):
    """A row that runs in a tile."""

    rank: int
    row: int
    tile: int


class Order:
    """The order of the rows of proved plans, found without the flags of waits."""

    def __init__(self, plans: list[bytes]) -> None:
        self.plans = [unpack(image) for image in plans]
        first = self.plans[0]
        self.operation = Schedule(
            first.collective, first.size, first.parts, (), first.root, servers=first.servers
        )
        #: The events that receive what an event sends, and those that send what it receives.
        self.receivers: dict[Event, list[Event]] = {}
        self.senders: dict[Event, list[Event]] = {}
        self.previous: dict[Event, list[Event]] = {}
        self._connect()
        #: By event: its number, and a mask of the numbers of the events before it and of itself.
        self.number: dict[Event, int] = {}
        self.past: dict[Event, int] = {}
        for event in TopologicalSorter(self.previous).static_order():
            self.number[event] = len(self.number)
            self.past[event] = 1 << self.number[event]
            for earlier in self.previous[event]:
                self.past[event] |= self.past[earlier]

    def _connect(self) -> None:
        sent: dict[tuple[int, int, int], list[Event]] = {}
        received: dict[tuple[int, int, int], list[Event]] = {}
        for rank, plan in enumerate(self.plans):
            for event in self._walk(rank, plan):
                row = plan.rows[event.row]
                self.receivers[event], self.senders[event] = [], []
                for end in row.send:
                    peer, number, _ = plan.channels[end]
                    sent.setdefault((rank, peer, number), []).append(event)
                for end in row.recv:
                    peer, number, _ = plan.channels[end]
                    received.setdefault((peer, rank, number), []).append(event)
        for channel, events in sent.items():
            for sender, receiver in zip(events, received[channel], strict=True):
                self.receivers[sender].append(receiver)
                self.senders[receiver].append(sender)
                self.previous[receiver].append(sender)

    def _walk(self, rank: int, plan: Plan) -> Iterable[Event]:
        """The events of a rank. Leading rows do not wait for the rows behind them."""
        for lane in range(plan.lane_count):
            rows = [index for index, row in enumerate(plan.rows) if row.lane == lane]
            leading = rows[: leading_count([plan.rows[index] for index in rows])]
            last: dict[bool, Event] = {}
            for tile in range(TILES):
                for index in rows:
                    if plan.rows[index].chunk == TOKEN_ROW and tile < TILES - 1:
                        continue
                    event, leads = Event(rank, index, tile), index in leading
                    self.previous[event] = [one for half, one in last.items() if half or not leads]
                    last[leads] = event
                    yield event

    def precedes(self, one: Event, other: Event) -> bool:
        """Whether ``one`` is ``other`` or comes before it in every run."""
        return bool(self.past[other] >> self.number[one] & 1)

    def row(self, event: Event) -> Row:
        return self.plans[event.rank].rows[event.row]

    def events(self, rank: int, index: int) -> list[Event]:
        """The row in all tiles."""
        return [e for e in (Event(rank, index, t) for t in range(TILES)) if e in self.number]

    def chunk_at(self, rank: int, buffer: int, slot: int) -> int:
        """The output chunk in this memory, in place where that is possible; -1: none."""
        plan, block = self.plans[rank], slot // self.operation.parts
        if buffer == Buffer.INPUT and plan.collective in IN_PLACE:
            both = block in self.operation.inputs_of(rank)
            return slot if both and block in self.operation.outputs_of(rank) else -1
        return slot if buffer == Buffer.OUTPUT else -1

    def read_by(self, event: Event) -> int:
        row = self.row(event)
        return self.chunk_at(event.rank, row.source, row.source_slot)

    def written_by(self, event: Event) -> int:
        """The output chunk that the event changes. A copy in place changes nothing."""
        row = self.row(event)
        place = self.chunk_at(event.rank, row.target, row.target_slot)
        return -1 if not row.recv and self.read_by(event) == place else place

    def sent_from(self, event: Event) -> int:
        """The output chunk that the event's receivers, or the medium, read after it has run."""
        row = self.row(event)
        if not row.send or (row.recv and not row.flags & ZERO_COPY):
            return -1
        place = (row.target, row.target_slot) if row.recv else (row.source, row.source_slot)
        return self.chunk_at(event.rank, *place)

    def others_of(self, event: Event) -> list[Event]:
        """The other events of its rank and tile."""
        rows = range(len(self.plans[event.rank].rows))
        return [e for i in rows if (e := event._replace(row=i)) in self.number and e != event]

    def last_sends(self, event: Event, chunk: int) -> list[Event]:
        """The earlier events that send from the chunk, with no write of the chunk in between."""
        earlier = [one for one in self.others_of(event) if self.precedes(one, event)]
        writers = [one for one in earlier if self.written_by(one) == chunk]
        return [
            one
            for one in earlier
            if self.sent_from(one) == chunk
            and not any(writer != one and self.precedes(one, writer) for writer in writers)
        ]

    def next_writes(self, event: Event, chunk: int) -> list[Event]:
        """The first events after this one that write the chunk."""
        later = [
            one
            for one in self.others_of(event)
            if self.precedes(event, one) and self.written_by(one) == chunk
        ]
        return [one for one in later if not any(e != one and self.precedes(e, one) for e in later)]


def lowered(algorithm: Algorithm, size: int, copies: Copies) -> list[bytes]:
    topology = Topology.even(size, min(size, 2)) if algorithm.needs_topology else None
    if algorithm.serves and topology is not None:
        topology = topology.serving(1)
    root = size // 2 if algorithm.collective in ROOTED else 0
    schedule = algorithm.build(size, root=root, topology=topology)
    return lower_all(add_acknowledgements(schedule), copies)


def name_of(algorithm: Algorithm, size: int) -> str:
    return f"{algorithm.name} {algorithm.collective.name.lower()} of {size}"


def algorithms(collectives: Iterable[Collective]) -> list[Algorithm]:
    tables = [table[kind] for kind in sorted(collectives) for table in (TABLE, SERVED)]
    return [algorithm for entries in tables for algorithm in entries.values()]


@cache
def reducing() -> list[Named]:
    """Plans of all algorithms that reduce, as they are lowered for every message."""
    return [
        (name_of(algorithm, size), lowered(algorithm, size, Copies()))
        for algorithm in algorithms(REDUCING)
        for size in (2, 3, 4)
    ]


@cache
def moving() -> list[Named]:
    """Plans of all algorithms that move data, with the copies that messages may choose."""
    return [
        (f"{name_of(algorithm, size)}, {copies}", lowered(algorithm, size, copies))
        for algorithm in algorithms(set(Collective) - REDUCING - {Collective.BARRIER})
        for copies in (Copies(), Copies(SENDER), Copies(SPLIT, RECEIVER))
        for size in (2, 3, 4)
    ]


@cache
def waiting() -> list[Named]:
    """Reducing plans in which ranks that only send also copy, and so wait for receivers."""
    found = []
    for name, plans in reducing():
        whole, waits = plans, False
        for rank, image in enumerate(plans):
            idle = receives_nothing(unpack(image))
            for index, row in enumerate(unpack(image).rows):
                if row.chunk == TOKEN_ROW:
                    continue
                if row.recv:
                    whole = edited(whole, rank, index, flags=row.flags | ANNOUNCE_WINDOW)
                elif idle and row.send:
                    flags, waits = row.flags | AWAIT_WINDOW, True
                    whole = edited(whole, rank, index, flags=flags, copies=SENDER)
        if waits:
            found.append((f"{name}, with waits", whole))
    return found


def receives_nothing(plan: Plan) -> bool:
    return not any(row.recv and row.chunk != TOKEN_ROW for row in plan.rows)


def check(plans: list[bytes], text: str, name: str) -> None:
    """The proof must accept the plans if ``text`` is empty, else refuse them with ``text``."""
    try:
        verify_plans(plans, tiles=TILES)
        said = ""
    except ScheduleError as error:
        said = str(error)
    assert text in said if text else not said, f"{name}: {said!r} instead of {text!r}"


def flip_each(flag: int, cases: Iterable[Named], rule: Rule) -> Counter[tuple[bool, str]]:
    """Flips the flag in each row alone; counts (whether it was on, what the proof says)."""
    seen: Counter[tuple[bool, str]] = Counter()
    for name, plans in cases:
        order = Order(plans)
        for rank, plan in enumerate(order.plans):
            for index, row in enumerate(plan.rows):
                text = "a token row moves data"
                if row.chunk != TOKEN_ROW:
                    text = rule(order, rank, index, row)
                damaged = edited(plans, rank, index, flags=row.flags ^ flag)
                check(damaged, text, f"{name}, rank {rank}, row {index}")
                seen[bool(row.flags & flag), text] += 1
    return seen


def test_the_undamaged_plans_are_proved() -> None:
    for name, plans in (*reducing(), *moving(), *waiting()):
        check(plans, "", name)


def test_plans_that_reduce_need_no_windows() -> None:
    """Receivers make all copies, except copies of data that a rank has just received."""
    for _, plans in reducing():
        for plan in map(unpack, plans):
            assert not any(row.flags & (AWAIT_WINDOW | ANNOUNCE_WINDOW) for row in plan.rows)


def test_a_wait_for_a_window_is_never_harmless() -> None:
    """A row waits exactly if its rank receives no data and makes the row's copies."""
    dropped = "must wait for write windows, since its rank only sends"
    malformed = "is flagged await-window but receives, or leaves all copies to its receivers"
    busy = "must not wait for write windows, since its rank receives data"

    def rule(order: Order, rank: int, index: int, row: Row) -> str:
        if row.flags & AWAIT_WINDOW:
            return dropped
        return malformed if row.recv or row.copies is RECEIVER else busy

    seen = flip_each(AWAIT_WINDOW, (*reducing(), *moving(), *waiting()), rule)
    assert seen[True, dropped] > 100 and seen[False, malformed] > 300 and seen[False, busy] > 100


def test_a_rank_that_only_sends_and_is_to_write_must_wait() -> None:
    """Without its wait, SENDER is refused. Ranks that receive data need no wait for it."""
    tried = 0
    for name, plans in reducing():
        for rank, plan in enumerate(map(unpack, plans)):
            text = "must wait for write windows" if receives_nothing(plan) else ""
            for index, row in enumerate(plan.rows):
                if row.send and row.chunk != TOKEN_ROW and (text or not index):
                    damaged = edited(plans, rank, index, copies=SENDER)
                    check(damaged, text, f"{name}, rank {rank}, row {index}")
                    tried += bool(text)
    assert tried > 30


def test_an_announcement_is_needed_exactly_where_a_sender_waits() -> None:
    """A receiver announces when it begins, so every row that receives may announce."""
    dropped = "announces no write window, but its sender waits for that"
    malformed = "is flagged announce-window but receives nothing"

    def rule(order: Order, rank: int, index: int, row: Row) -> str:
        if not row.flags & ANNOUNCE_WINDOW:
            return "" if row.recv else malformed
        senders = [sender for event in order.events(rank, index) for sender in order.senders[event]]
        return dropped if any(order.row(one).flags & AWAIT_WINDOW for one in senders) else ""

    seen = flip_each(ANNOUNCE_WINDOW, (*reducing(), *waiting(), *moving()), rule)
    assert seen[True, dropped] > 50 and seen[True, ""] > 50
    assert seen[False, malformed] > 100 and seen[False, ""] > 100


def test_a_flush_is_needed_exactly_where_memory_may_still_be_sent() -> None:
    """A flush waits for the medium and for no row, so every row may have one.

    A flush may be dropped if all receivers of the memory that the row writes have run before.
    """
    dropped = "while it is being sent by"

    def rule(order: Order, rank: int, index: int, row: Row) -> str:
        return dropped if row.flags & FLUSH and is_sent(order, rank, index) else ""

    def is_sent(order: Order, rank: int, index: int) -> bool:
        return any(
            not order.precedes(receiver, event)
            for event in order.events(rank, index)
            if (chunk := order.written_by(event)) >= 0
            for sender in order.last_sends(event, chunk)
            for receiver in order.receivers[sender]
        )

    seen = flip_each(FLUSH, reducing(), rule)
    assert seen[True, dropped] > 20 and seen[True, ""] > 50 and seen[False, ""] > 200


def test_a_direct_write_is_allowed_exactly_where_its_sender_knows_that_memory_is_unused() -> None:
    """Without the flag the receiver copies the segment itself, so the flag may always be dropped.

    With the flag, the sender's row must come after the receiver's rows that use the memory. It must
    also come after all rows that read segments sent from there.
    """
    malformed = "is flagged direct-write but does more than copy one segment to the output"
    added = "lets its sender write"

    def rule(order: Order, rank: int, index: int, row: Row) -> str:
        if row.flags & DIRECT_WRITE:
            return ""
        if len(row.recv) != 1 or row.operands != 1 or row.target != Buffer.OUTPUT:
            return malformed
        return added if any(is_used(order, event) for event in order.events(rank, index)) else ""

    def is_used(order: Order, event: Event) -> bool:
        chunk, (sender,) = order.written_by(event), order.senders[event]
        users = [
            one
            for one in order.others_of(event)
            if order.precedes(one, event) and chunk in (order.read_by(one), order.written_by(one))
        ]
        sent = order.last_sends(event, chunk)
        users += [receiver for one in sent for receiver in order.receivers[one]]
        return not all(order.precedes(one, sender) for one in users)

    seen = flip_each(DIRECT_WRITE, reducing(), rule)
    assert seen[True, ""] > 50 and seen[False, malformed] > 200
    assert seen[False, added] > 3 and seen[False, ""] > 3


def test_memory_is_exposed_exactly_where_rows_order_what_writes_there_next() -> None:
    """Segments that are not exposed are copied or handed over, so the flag may be dropped.

    No flush waits for a reader of exposed memory. So all readers must come before the next row that
    writes there.
    """
    malformed = "is flagged zero-copy but sends no input or output in place"
    added = "while it is being sent by"

    def rule(order: Order, rank: int, index: int, row: Row) -> str:
        if row.flags & ZERO_COPY:
            return ""
        place = row.target if row.recv else row.source
        stays = (Buffer.OUTPUT,) if row.recv else (Buffer.INPUT, Buffer.OUTPUT)
        if not row.send or place not in stays:
            return malformed
        return added if any(is_written(order, event) for event in order.events(rank, index)) else ""

    def is_written(order: Order, event: Event) -> bool:
        chunk = order.written_by(event) if order.row(event).recv else order.read_by(event)
        return chunk >= 0 and not all(
            order.precedes(reader, write)
            for write in order.next_writes(event, chunk)
            for reader in order.receivers[event]
        )

    seen = flip_each(ZERO_COPY, reducing(), rule)
    assert seen[True, ""] > 50 and seen[False, malformed] > 100 and seen[False, added] > 20
