"""Lowers a schedule to the plan of one rank: rows that receive, combine, store and send.

The row builder makes the rows of a rank; this module assigns a memory location to every value and
writes the bytes. A value keeps its location until it changes. An unchanged value stays in the
input. A changed value is stored in the output if the output has its chunk, else in a scratch slot.
A value that is only passed on is not stored. The run time is linear in the number of the rank's
transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.plan import plan_format
from pycoll.plan.plan_format import (
    ANNOUNCE_WINDOW,
    AWAIT_WINDOW,
    CODED_SOURCE,
    CODED_TARGET,
    DIRECT_WRITE,
    ENCODE,
    FINAL,
    FLUSH,
    NO_CARRY,
    TOKEN_ROW,
    ZERO_COPY,
    Buffer,
    Channel,
    Plan,
    Row,
)
from pycoll.plan.row_builder import FOREVER, RowBuilder, RowBuilding
from pycoll.schedule.collectives import FROM_ROOT, REDUCING, ROOTED, TO_ROOT, Collective
from pycoll.schedule.copies import USUAL, Copies, CopyStrategy
from pycoll.schedule.language import LANES_MAX, TOKEN, Schedule, ScheduleError, Transfer

#: Collectives that divide the result for ``avg``; the flag final marks rows that complete a value.
DIVIDING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER})
#: Dividing collectives whose result has a contribution of every rank in every chunk of the message.
COMPLETING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE})
#: Collectives that can run in place: input chunk c and output chunk c may be the same memory.
IN_PLACE = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.BROADCAST,
        Collective.REDUCE,
        Collective.SCAN,
        Collective.EXSCAN,
    }
)
#: Collectives in which some ranks only send unchanged data. Such a rank may wait for write windows,
#: so receivers announce theirs.
ANNOUNCING = ROOTED - REDUCING
#: A rank that splits copies has at most this many receivers; for more it would copy too much.
_SPLITTING_PEERS_MAX = 2


def lower(schedule: Schedule, rank: int, copies: Copies = USUAL) -> bytes:
    """Returns the plan of ``rank``.

    ``schedule``: the whole schedule, or only the transfers of ``rank``.

    ``copies``: the sides that copy unchanged data where peers reach each other's memory.

    Raises ScheduleError for a schedule that rows cannot express: a local combination, or a fold
    that takes segments of one channel and step in another order than they are listed.
    """
    if schedule.only not in (None, rank):
        raise ScheduleError(f"only rank {schedule.only}'s part is given, not rank {rank}'s")
    if not 0 <= rank < schedule.size:
        raise ScheduleError(f"rank {rank} is not below size {schedule.size}")
    building = RowBuilding(schedule, rank)
    building.run()
    return plan_format.pack(_Placing(building, copies).plan())


def lower_all(schedule: Schedule, copies: Copies = USUAL) -> list[bytes]:
    """The plans of all ranks."""
    return [lower(part, rank, copies) for rank, part in enumerate(_parts(schedule))]


def _parts(schedule: Schedule) -> list[Schedule]:
    """The schedules of all ranks, each with the transfers of one rank."""
    mine: list[list[Transfer]] = [[] for _ in range(schedule.size)]
    for t in schedule.transfers:
        mine[t.source].append(t)
        if t.destination != t.source:
            mine[t.destination].append(t)
    return [
        schedule._replace(transfers=tuple(transfers), only=rank)
        for rank, transfers in enumerate(mine)
    ]


class SendingRow(NamedTuple):
    """The row of the source that sends a transfer: its rank, its number there, and its strategy.

    ``row`` counts the rows of the rank in the order in which they are built.
    """

    rank: int
    row: int
    copies: CopyStrategy


def sending_rows(schedule: Schedule, copies: Copies) -> list[SendingRow | None]:
    """The row that sends each transfer of ``schedule``; None for a move inside a rank.

    The rows have the strategies that `lower_all` stores. Raises ScheduleError as `lower` does.
    """
    senders: dict[tuple[int, Channel], Iterator[SendingRow]] = {}
    for rank, part in enumerate(_parts(schedule)):
        building = RowBuilding(part, rank)
        building.run()
        placing = _Placing(building, copies)
        rows = [
            SendingRow(rank, i, placing.copy_strategy(one)) for i, one in enumerate(placing.rows)
        ]
        for channel, sends in building.sends.items():
            senders[rank, channel] = iter([rows[row] for row, _ in sends])
    return [
        None
        if t.source == t.destination
        else next(senders[t.source, Channel(t.destination, t.lane, 1)])
        for t in schedule.transfers
    ]


def add_acknowledgements(schedule: Schedule) -> Schedule:
    """Adds tokens where a rank could finish before it has heard from all ranks.

    Outputs of all_reduce, reduce_scatter, all_gather and all_to_all depend on every rank, and so
    does the end of a barrier. The function returns these schedules unchanged. Other schedules get a
    dissemination phase: in step k rank r sends a token to rank r + 2^k. So after ceil(log2 size)
    steps every rank has heard from every rank.

    The function omits tokens that repeat what the data shows. Every rank depends on the root in
    broadcast and scatter, so the root sends no first token. The root depends on every rank in
    reduce and gather, so it receives no tokens. With two ranks one token is left. It only signals
    that its sender has started, so it moves to step 0, and each rank sends before it waits.

    The function also accepts the part of one rank, and its result lowers to the same bytes.
    """
    kind, size, only = schedule.collective, schedule.size, schedule.only
    if kind not in ROOTED and kind not in (Collective.SCAN, Collective.EXSCAN):
        return schedule
    tokens = []
    step, distance = schedule.steps, 1
    while distance < size:
        sources = range(size) if only is None else sorted({(only - distance) % size, only})
        for source in sources:
            destination = (source + distance) % size
            known = (kind in FROM_ROOT and source == schedule.root and distance == 1) or (
                kind in TO_ROOT and destination == schedule.root
            )
            if not known:
                tokens.append(Transfer(step, TOKEN, source, destination))
        step, distance = step + 1, distance * 2
    if kind in ROOTED and size == 2:
        ahead = tuple(token._replace(step=0) for token in tokens)
        return schedule._replace(transfers=(*ahead, *schedule.transfers))
    return schedule._replace(transfers=(*schedule.transfers, *tokens))


class _Placing:
    """Assigns a location to every value and makes the rows of the plan."""

    def __init__(self, building: RowBuilding, copies: Copies) -> None:
        self.building = building
        self.copies = copies
        self.schedule = building.schedule
        self.rows = building.rows
        data = [builder for builder in self.rows if builder.chunk != TOKEN]
        self.is_idle = not any(builder.recv for builder in data)
        self.peers = {peer for builder in data for peer, _, _ in builder.send}
        self.in_place = building.schedule.collective in IN_PLACE
        self.scratch_slots = 0
        self.handed: dict[int, dict[int, int]] = {}
        self.writers: dict[int, list[RowBuilder]] = {}
        self.reads: dict[int, int] = {}
        self.input_reads: dict[int, int] = {}

    def plan(self) -> Plan:
        building, schedule = self.building, self.schedule
        self._choose_homes()
        lanes = self._lanes()
        numbers = [0] * LANES_MAX
        for number, lane in enumerate(lanes):
            for other in range(LANES_MAX):
                if building.lane_of(other) == lane:
                    numbers[other] = number
        by_lane: list[list[tuple[int, RowBuilder]]] = [[] for _ in lanes]
        for index, builder in enumerate(self.rows):
            by_lane[numbers[builder.lane]].append((index, builder))
        self._assign_slots(by_lane)
        self.handed = self._handed_over(by_lane)
        self._find_uses()
        channels: dict[Channel, int] = {}
        rows = []
        for lane, builders in enumerate(by_lane):
            for index, builder in builders:
                rows.append(self._row(builder, lane, index, channels))
        return Plan(
            schedule.collective,
            schedule.size,
            building.rank,
            schedule.root,
            schedule.parts,
            len(schedule.temporaries),
            self.scratch_slots,
            max(1, len(lanes)),
            tuple(channels),
            tuple(rows),
            schedule.servers,
        )

    def _lanes(self) -> list[int]:
        """The plan's lanes; lanes whose first row sends without receiving come first.

        An engine advances its lanes in this order. A lane that can send at once must not run behind
        the work of another lane, or its peer waits.
        """
        first: dict[int, RowBuilder] = {}
        for builder in self.rows:
            first.setdefault(self.building.lane_of(builder.lane), builder)
        return sorted(first, key=lambda lane: (bool(first[lane].recv), lane))

    def _choose_homes(self) -> None:
        """Chooses the buffer of every value.

        A value is stored in the output only if no later row still reads another value from that
        chunk.
        """
        busy: dict[int, int] = {}  # output chunk -> the last row that needs its present content
        if self.in_place:
            for builder in self.rows:
                if builder.own is not None and builder.own.row < 0:
                    busy[builder.own.chunk] = builder.own.last_read
        copies = []
        for index, builder in enumerate(self.rows):
            value = builder.result
            if builder.own is not None and builder.own.row < 0:
                builder.own.home, builder.own.slot = Buffer.INPUT, builder.own.chunk
            if value is None or (value.last_read < 0 and value.output < 0):
                continue
            if value.carried:
                value.home = Buffer.SCRATCH
                continue
            place = value.output if value.output >= 0 else value.chunk
            mine = (
                not value.codes_read
                and place < self.building.data_chunks
                and (place // self.schedule.parts in self.building.outputs)
            )
            if mine and busy.get(place, -1) <= index:
                value.home, value.slot = Buffer.OUTPUT, place
                busy[place] = FOREVER if value.output >= 0 else value.last_read
            else:
                value.home = Buffer.SCRATCH
                if value.output >= 0:
                    copies.append(value)
        for value in copies:
            builder = RowBuilder(value.output, self.rows[value.row].lane, (FOREVER, 0), value)
            builder.copies_out = value.output
            value.last_read = len(self.rows)
            self.rows.append(builder)

    def _assign_slots(self, by_lane: list[list[tuple[int, RowBuilder]]]) -> None:
        """Assigns scratch slots by liveness.

        Lanes do not share slots, because lanes can be in different tiles at the same time.
        """
        for builders in by_lane:
            free: list[int] = []
            for index, builder in builders:
                value = builder.result
                for read in (builder.own, builder.carry):
                    if read is not None and read.home is Buffer.SCRATCH and read.last_read == index:
                        free.append(read.slot)
                if value is None or value.home is not Buffer.SCRATCH:
                    continue
                if not free:
                    free.append(self.scratch_slots)
                    self.scratch_slots += 1
                value.slot = free.pop()

    def _handed_over(
        self, by_lane: list[list[tuple[int, RowBuilder]]]
    ) -> dict[int, dict[int, int]]:
        """Returns {output chunk: {lane: index of the lane's first row that sends this memory}}.

        Only rows that receive nothing count. Peers may read the memory after such a row has run.
        """
        handed: dict[int, dict[int, int]] = {}
        for lane, builders in enumerate(by_lane):
            for index, builder in builders:
                own = builder.own
                if own is None or builder.recv or not builder.send or any(self._codes(builder)):
                    continue
                if own.home is Buffer.OUTPUT or (own.home is Buffer.INPUT and self.in_place):
                    handed.setdefault(own.slot, {}).setdefault(lane, index)
        return handed

    def _row(
        self,
        builder: RowBuilder,
        lane: int,
        index: int,
        channels: dict[Channel, int],
    ) -> Row:
        own, value = builder.own, builder.result
        target, target_slot = Buffer.NONE, 0
        if builder.copies_out >= 0:
            target, target_slot = Buffer.OUTPUT, builder.copies_out
        elif value is not None and value.home:
            target, target_slot = value.home, value.slot
        flags = 0
        codes = self._codes(builder)
        if target is Buffer.OUTPUT and self._needs_flush(builder, lane, index, target_slot):
            flags |= FLUSH
        if self._is_final(builder):
            flags |= FINAL
        if not any(codes):
            if builder.send and self._may_expose(builder):
                flags |= ZERO_COPY
            if target is Buffer.OUTPUT and self._may_write_directly(builder, target_slot):
                flags |= DIRECT_WRITE
        copies = self.copy_strategy(builder)
        if self.is_idle and copies is not CopyStrategy.RECEIVER:
            flags |= AWAIT_WINDOW
        if builder.recv and builder.chunk != TOKEN and self.schedule.collective in ANNOUNCING:
            flags |= ANNOUNCE_WINDOW
        return Row(
            TOKEN_ROW if builder.chunk == TOKEN else self.schedule.sized_by(builder.chunk),
            lane,
            flags,
            own.home if own is not None else Buffer.NONE,
            builder.position,
            own.slot if own is not None else 0,
            target,
            target_slot,
            tuple([channels.setdefault(channel, len(channels)) for channel in builder.recv]),
            tuple([channels.setdefault(channel, len(channels)) for channel in builder.send]),
            builder.carry.slot if builder.carry is not None else NO_CARRY,
            copies,
            *codes,
        )

    def _codes(self, builder: RowBuilder) -> tuple[int, int, int]:
        """Three masks: the received segments that are codes, those sent, and the local memory."""
        schedule, rank = self.schedule, self.building.rank
        if schedule.coded is None or builder.chunk == TOKEN:
            return 0, 0, 0
        recv = sum(schedule.is_coded(end.peer, rank) << i for i, end in enumerate(builder.recv))
        send = sum(schedule.is_coded(rank, end.peer) << i for i, end in enumerate(builder.send))
        own, value = builder.own, builder.result
        local = ENCODE if builder.encodes else 0
        if own is not None and own.codes_read:
            local |= CODED_SOURCE
        if value is not None and value.codes_read:
            local |= CODED_TARGET
        if builder.encodes and not (value is not None and value.rounded):
            stays = builder.copies_out >= 0 or (value is not None and value.home is not Buffer.NONE)
            if stays or send + 1 != 1 << len(builder.send):
                raise ScheduleError(
                    f"rank {rank} keeps or sends chunk {builder.chunk} in full precision, and "
                    "encodes it in the same row"
                )
        return recv, send, local

    def copy_strategy(self, builder: RowBuilder) -> CopyStrategy:
        """The side that copies the segments that this row sends, where both sides could.

        Segments that this rank has just received or combined are in its caches, so it writes them.
        Segments that the receiver does not store in its output unchanged can only be read in place.
        Several receivers of one row read the same memory.
        """
        if builder.chunk == TOKEN or not builder.send or any(self._codes(builder)):
            return CopyStrategy.RECEIVER
        if builder.recv:
            return CopyStrategy.SENDER
        if not builder.reaches_outputs or len(builder.send) > 1:
            return CopyStrategy.RECEIVER
        if not self.is_idle:
            return self.copies.busy
        splits = self.copies.idle is CopyStrategy.SPLIT
        if splits and len(self.peers) > _SPLITTING_PEERS_MAX:
            return CopyStrategy.RECEIVER
        return self.copies.idle

    def _find_uses(self) -> None:
        """Records the rows that write each output chunk, and counts the reads of each value."""
        for builder in self.rows:
            value = builder.result
            if builder.copies_out >= 0:
                self.writers.setdefault(builder.copies_out, []).append(builder)
            elif value is not None and value.home is Buffer.OUTPUT:
                self.writers.setdefault(value.slot, []).append(builder)
            for read in (builder.own, builder.carry):
                if read is not None:
                    self.reads[id(read)] = self.reads.get(id(read), 0) + 1
                    if read.row < 0:
                        self.input_reads[read.chunk] = self.input_reads.get(read.chunk, 0) + 1

    def _may_expose(self, builder: RowBuilder) -> bool:
        """Whether receivers may read the sent data of this row in place, without a time limit.

        They may if no row writes this memory later. A row may also write a result that depends on
        this read.
        """
        value = builder.result
        if builder.recv:
            return value is not None and value.home is Buffer.OUTPUT and value.output >= 0
        own = builder.own
        if own is None or own.home not in (Buffer.INPUT, Buffer.OUTPUT):
            return False
        if own.home is Buffer.OUTPUT:
            return own.output >= 0
        writers = [] if not self.in_place else self.writers.get(own.slot, [])
        others = [one for one in writers if one.recv or one.own is not own]
        return not others or self._returns(builder, others)

    def _returns(self, builder: RowBuilder, writers: list[RowBuilder]) -> bool:
        """Whether every value that ``writers`` store at the row's source depends on the row's send.

        The result of an all_reduce depends on the contribution of this rank. The contribution may
        have left the rank in one segment of this row and in no other row. Then the rank that made
        the result had read that segment before.
        """
        complete = self.schedule.collective is Collective.ALL_REDUCE and all(
            one.result is not None and one.result.output >= 0 for one in writers
        )
        return complete and len(builder.send) == 1 and self.reads[id(builder.own)] == 1

    def _may_write_directly(self, builder: RowBuilder, chunk: int) -> bool:
        """Whether the sender of the segment may write it directly into the output.

        It may if no other row writes this output chunk. In place, at most one row may have read the
        rank's own contribution there. The result depends on that contribution, so it was made after
        that row had run.
        """
        if len(builder.recv) != 1 or builder.own is not None or builder.carry is not None:
            return False
        if self.writers[chunk] != [builder]:
            return False
        reads = self.input_reads.get(chunk, 0) if self.in_place else 0
        return reads == 0 or (reads == 1 and self.schedule.collective in COMPLETING)

    def _needs_flush(self, builder: RowBuilder, lane: int, index: int, chunk: int) -> bool:
        own = builder.own
        stays = own is not None and own.home is Buffer.INPUT and own.slot == chunk
        if self.in_place and stays and not builder.recv and not builder.encodes:
            return False  # in place the row writes nothing; else no row sent from this output yet
        first = self.handed.get(chunk, {})
        return any(other != lane or at < index for other, at in first.items())

    def _is_final(self, builder: RowBuilder) -> bool:
        """Whether this row makes a complete value, as far as the transfers of this rank show.

        The row combines the value, and no later row or rank combines it further. The plan verifier
        proves that the value is complete.
        """
        value = builder.result
        operands = len(builder.recv) + (builder.own is not None) + (builder.carry is not None)
        if self.schedule.collective not in DIVIDING or value is None or operands < 2:
            return False
        return not value.combined and (value.sent or value.output >= 0)
