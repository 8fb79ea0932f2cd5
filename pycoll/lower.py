"""From a schedule to one rank's plan: rows that receive, combine, keep and send in one go.

A chunk's value stays where it is until it changes: an unmodified one in the input, a changed one in
the output where the output has that chunk, any other in a scratch slot, and one that is only
passed on nowhere. `draft` makes the rows, this module gives the values their homes and writes the
bytes. Everything is linear in the number of the rank's transfers.
"""

from __future__ import annotations

from pycoll import plan_format
from pycoll.collective import FROM_ROOT, ROOTED, TO_ROOT, Collective
from pycoll.draft import FOREVER, Draft, Drafting
from pycoll.plan_format import (
    FINAL,
    FLUSH,
    LAND,
    LEND,
    NO_CARRY,
    TOKEN_ROW,
    Buffer,
    Channel,
    Plan,
    Row,
)
from pycoll.schedule import LANES_MAX, TOKEN, Schedule, ScheduleError, Transfer

#: Collectives whose result for ``avg`` is divided; a row that completes a value is flagged final.
DIVIDING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER})
#: Those of them whose result has a part of every rank in each of its chunks.
COMPLETING = frozenset({Collective.ALL_REDUCE, Collective.REDUCE})
#: Collectives that run in place: input chunk c and output chunk c may be the same memory.
IN_PLACE = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.BROADCAST,
        Collective.REDUCE,
        Collective.SCAN,
        Collective.EXSCAN,
    }
)


def lower(schedule: Schedule, rank: int) -> bytes:
    """The plan of ``rank``; ``schedule`` is whole or that rank's part.

    Raises ScheduleError for what rows cannot say: a local combination, and segments of one channel
    and step that folds take in another order than they are listed.
    """
    if schedule.only not in (None, rank):
        raise ScheduleError(f"only rank {schedule.only}'s part is given, not rank {rank}'s")
    if not 0 <= rank < schedule.size:
        raise ScheduleError(f"rank {rank} is not below size {schedule.size}")
    drafting = Drafting(schedule, rank)
    drafting.run()
    return plan_format.pack(_Placing(drafting).plan())


def lower_all(schedule: Schedule) -> list[bytes]:
    """The plans of all ranks."""
    mine: list[list[Transfer]] = [[] for _ in range(schedule.size)]
    for t in schedule.transfers:
        mine[t.source].append(t)
        if t.destination != t.source:
            mine[t.destination].append(t)
    return [
        lower(schedule._replace(transfers=tuple(transfers), only=rank), rank)
        for rank, transfers in enumerate(mine)
    ]


def acknowledged(schedule: Schedule) -> Schedule:
    """The schedule, with tokens where a rank could leave before it has heard from all.

    Outputs of all_reduce, reduce_scatter, all_gather and all_to_all depend on every rank, and so
    does leaving a barrier; these are returned as they are. Otherwise tokens run by dissemination:
    in step k rank r tells rank r + 2^k, so after ceil(log2 size) steps everyone has heard from
    everyone. Where data comes from one rank all hear of that, and where data goes to one rank it
    hears of all: the first token of the one, and those to the other, are left out. Of two ranks
    that leaves one token, which goes ahead, since it tells only that its sender is there: then each
    sends before it waits. Works on one rank's part too, and lowers to the same bytes.
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
    """Gives every value a home and writes the rows."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafting = drafting
        self.schedule = drafting.schedule
        self.rows = drafting.rows
        self.in_place = drafting.schedule.collective in IN_PLACE
        self.scratch_slots = 0
        self.handed: dict[int, dict[int, int]] = {}
        self.writers: dict[int, list[Draft]] = {}
        self.reads: dict[int, int] = {}
        self.input_reads: dict[int, int] = {}

    def plan(self) -> Plan:
        drafting, schedule = self.drafting, self.schedule
        self._choose_homes()
        lanes = self._lanes()
        numbers = [0] * LANES_MAX
        for number, lane in enumerate(lanes):
            for other in range(LANES_MAX):
                if drafting.lane_of(other) == lane:
                    numbers[other] = number
        by_lane: list[list[tuple[int, Draft]]] = [[] for _ in lanes]
        for index, draft in enumerate(self.rows):
            by_lane[numbers[draft.lane]].append((index, draft))
        self._assign_slots(by_lane)
        self.handed = self._handed_over(by_lane)
        self._find_uses()
        channels: dict[Channel, int] = {}
        rows = []
        for lane, drafts in enumerate(by_lane):
            for index, draft in drafts:
                rows.append(self._row(draft, lane, index, channels))
        return Plan(
            schedule.collective,
            schedule.size,
            drafting.rank,
            schedule.root,
            schedule.parts,
            len(schedule.temporaries),
            self.scratch_slots,
            max(1, len(lanes)),
            tuple(channels),
            tuple(rows),
        )

    def _lanes(self) -> list[int]:
        """The plan's lanes: first those that begin by sending. Engines begin with the first ones,
        and peers wait for nothing so long as for what is sent behind work of another lane."""
        first: dict[int, Draft] = {}
        for draft in self.rows:
            first.setdefault(self.drafting.lane_of(draft.lane), draft)
        return sorted(first, key=lambda lane: (bool(first[lane].recv), lane))

    def _choose_homes(self) -> None:
        """The output is a home only while nothing else in that place is still read."""
        busy: dict[int, int] = {}  # output chunk -> the last row that needs what lies there
        if self.in_place:
            for draft in self.rows:
                if draft.own is not None and draft.own.row < 0:
                    busy[draft.own.chunk] = draft.own.last_read
        copies = []
        for index, draft in enumerate(self.rows):
            value = draft.result
            if draft.own is not None and draft.own.row < 0:
                draft.own.home, draft.own.slot = Buffer.INPUT, draft.own.chunk
            if value is None or (value.last_read < 0 and value.output < 0):
                continue
            if value.carried:
                value.home = Buffer.SCRATCH
                continue
            place = value.output if value.output >= 0 else value.chunk
            mine = place < self.drafting.data_chunks and (
                place // self.schedule.parts in self.drafting.outputs
            )
            if mine and busy.get(place, -1) <= index:
                value.home, value.slot = Buffer.OUTPUT, place
                busy[place] = FOREVER if value.output >= 0 else value.last_read
            else:
                value.home = Buffer.SCRATCH
                if value.output >= 0:
                    copies.append(value)
        for value in copies:
            draft = Draft(value.output, self.rows[value.row].lane, (FOREVER, 0), value)
            draft.copies_out = value.output
            value.last_read = len(self.rows)
            self.rows.append(draft)

    def _assign_slots(self, by_lane: list[list[tuple[int, Draft]]]) -> None:
        """Slots by liveness; a lane has its own, since lanes are in different tiles at one time."""
        for drafts in by_lane:
            free: list[int] = []
            for index, draft in drafts:
                value = draft.result
                for read in (draft.own, draft.carry):
                    if read is not None and read.home is Buffer.SCRATCH and read.last_read == index:
                        free.append(read.slot)
                if value is None or value.home is not Buffer.SCRATCH:
                    continue
                if not free:
                    free.append(self.scratch_slots)
                    self.scratch_slots += 1
                value.slot = free.pop()

    def _handed_over(self, by_lane: list[list[tuple[int, Draft]]]) -> dict[int, dict[int, int]]:
        """Output chunk -> lane -> the first row there whose sends may still read that memory."""
        handed: dict[int, dict[int, int]] = {}
        for lane, drafts in enumerate(by_lane):
            for index, draft in drafts:
                own = draft.own
                if own is None or draft.recv or not draft.send:
                    continue
                if own.home is Buffer.OUTPUT or (own.home is Buffer.INPUT and self.in_place):
                    handed.setdefault(own.slot, {}).setdefault(lane, index)
        return handed

    def _row(
        self,
        draft: Draft,
        lane: int,
        index: int,
        channels: dict[Channel, int],
    ) -> Row:
        own, value = draft.own, draft.result
        target, target_slot = Buffer.NONE, 0
        if draft.copies_out >= 0:
            target, target_slot = Buffer.OUTPUT, draft.copies_out
        elif value is not None and value.home:
            target, target_slot = value.home, value.slot
        flags = 0
        if target is Buffer.OUTPUT and self._needs_flush(draft, lane, index, target_slot):
            flags |= FLUSH
        if self._is_final(draft):
            flags |= FINAL
        if draft.send and self._may_lend(draft):
            flags |= LEND
        if target is Buffer.OUTPUT and self._may_land(draft, target_slot):
            flags |= LAND
        return Row(
            TOKEN_ROW if draft.chunk == TOKEN else self.schedule.sized_by(draft.chunk),
            lane,
            flags,
            own.home if own is not None else Buffer.NONE,
            draft.position,
            own.slot if own is not None else 0,
            target,
            target_slot,
            tuple([channels.setdefault(channel, len(channels)) for channel in draft.recv]),
            tuple([channels.setdefault(channel, len(channels)) for channel in draft.send]),
            draft.carry.slot if draft.carry is not None else NO_CARRY,
        )

    def _find_uses(self) -> None:
        """Who writes each output chunk, and how many rows read each value and input chunk."""
        for draft in self.rows:
            value = draft.result
            if draft.copies_out >= 0:
                self.writers.setdefault(draft.copies_out, []).append(draft)
            elif value is not None and value.home is Buffer.OUTPUT:
                self.writers.setdefault(value.slot, []).append(draft)
            for read in (draft.own, draft.carry):
                if read is not None:
                    self.reads[id(read)] = self.reads.get(id(read), 0) + 1
                    if read.row < 0:
                        self.input_reads[read.chunk] = self.input_reads.get(read.chunk, 0) + 1

    def _may_lend(self, draft: Draft) -> bool:
        """Whether receivers may read what the row sends where it lies, as late as they like.

        They may where nothing is written afterwards, or only what they had to read it for.
        """
        value = draft.result
        if draft.recv:
            return value is not None and value.home is Buffer.OUTPUT and value.output >= 0
        own = draft.own
        if own is None or own.home not in (Buffer.INPUT, Buffer.OUTPUT):
            return False
        if own.home is Buffer.OUTPUT:
            return own.output >= 0
        writers = [] if not self.in_place else self.writers.get(own.slot, [])
        others = [one for one in writers if one.recv or one.own is not own]
        return not others or self._returns(draft, others)

    def _returns(self, draft: Draft, writers: list[Draft]) -> bool:
        """Whether all that is written where the row's value lies is made of that value.

        The result of all_reduce is. If the rank's contribution left in one segment of this row, and
        in no other way, whoever made the result had read that segment first.
        """
        complete = self.schedule.collective is Collective.ALL_REDUCE and all(
            one.result is not None and one.result.output >= 0 for one in writers
        )
        return complete and len(draft.send) == 1 and self.reads[id(draft.own)] == 1

    def _may_land(self, draft: Draft, chunk: int) -> bool:
        """Whether the sender of what the row copies to the output may write it there itself.

        It may where nothing else is written, and what was read there in place, the rank's own
        contribution, was read by one row alone: the result, of which that contribution is a part,
        was made behind that row.
        """
        if len(draft.recv) != 1 or draft.own is not None or draft.carry is not None:
            return False
        if self.writers[chunk] != [draft]:
            return False
        reads = self.input_reads.get(chunk, 0) if self.in_place else 0
        return reads == 0 or (reads == 1 and self.schedule.collective in COMPLETING)

    def _needs_flush(self, draft: Draft, lane: int, index: int, chunk: int) -> bool:
        own = draft.own
        stays = own is not None and own.home is Buffer.INPUT and own.slot == chunk
        if self.in_place and stays and not draft.recv:
            return False  # in place it writes nothing, else nobody sent from the output before
        first = self.handed.get(chunk, {})
        return any(other != lane or at < index for other, at in first.items())

    def _is_final(self, draft: Draft) -> bool:
        """Combined here and, by what the rank's own transfers tell, nowhere afterwards.

        The proof shows it complete.
        """
        value = draft.result
        operands = len(draft.recv) + (draft.own is not None) + (draft.carry is not None)
        if self.schedule.collective not in DIVIDING or value is None or operands < 2:
            return False
        return not value.combined and (value.sent or value.output >= 0)
