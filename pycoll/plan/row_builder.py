"""The first half of lowering: turns the transfers of one rank into rows with abstract values.

Every transfer has a label (step, place), where place is its position among the transfers of its
step and channel. Rows run in order of labels; among equal labels sends come first. A row therefore
waits only for rows with lower labels or for sends with its own label. The ranks together cannot
deadlock, for any channel depth.

The row that makes a value also sends it, if the order of segments in the channel allows that:
receive-reduce-send is one row. The send then runs before its label. Such an early send must not
wait for a slot that the receiver releases only at the label of this row or later. A channel has
`DEPTH` slots, so the segment `DEPTH` sends before it must have a lower label than this row.

Lanes of the schedule that exchange values on this rank are joined into one lane of its plan.
`lowering` assigns memory locations to the values afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.plan.plan_format import DEPTH, Buffer, Channel
from pycoll.schedule.collectives import SHARING, Collective
from pycoll.schedule.language import (
    FAN_MAX,
    LANES_MAX,
    TOKEN,
    Schedule,
    ScheduleError,
    Transfer,
    fold_rows,
)

#: A step or row number after all others.
FOREVER = 1 << 62

#: (step, place among the transfers of the step on its channel)
Label = tuple[int, int]
#: (place among the transfers of the step on the channel, channel, transfer)
Segment = tuple[int, Channel, Transfer]


class StoredValue:
    """A value of this rank: an unchanged input chunk (``row`` is -1) or the result of a row."""

    __slots__ = (
        "carried",
        "chunk",
        "codes_read",
        "combined",
        "encoder",
        "has_codes",
        "home",
        "last_read",
        "output",
        "rounded",
        "row",
        "sender",
        "sent",
        "slot",
    )

    def __init__(self, chunk: int, row: int) -> None:
        self.chunk = chunk  # the chunk in which it was made; decides its size and home
        self.row = row
        self.sent = False
        self.combined = False  # it is combined further, on this rank or on one that receives it
        self.carried = False  # an intermediate result, read only by the next row of its fold
        self.last_read = -1  # the last row that reads it from memory; -1: none
        self.sender = (-1, -1)  # (step, row): the last row that only sends it
        self.output = -1  # the output chunk whose final value it is; -1: none
        self.home = Buffer.NONE
        self.slot = 0
        self.rounded = False  # it equals its decoded codes
        self.has_codes = False  # its row makes or receives its codes
        self.codes_read = False  # a later row sends its codes, so memory holds these
        self.encoder = -1  # the row that encodes it; -1: none


class RowBuilder:
    """A row whose values have no memory location yet. Channels are (peer, number, direction)."""

    __slots__ = (
        "carry",
        "chunk",
        "copies_out",
        "encodes",
        "label",
        "lane",
        "own",
        "position",
        "reaches_outputs",
        "recv",
        "result",
        "send",
    )

    def __init__(self, chunk: int, lane: int, label: Label, own: StoredValue | None = None) -> None:
        self.chunk = chunk
        self.lane = lane
        self.label = label
        self.own = own
        self.carry: StoredValue | None = None
        self.position = 0
        self.recv: list[Channel] = []
        self.send: list[Channel] = []
        self.result: StoredValue | None = None
        self.copies_out = -1  # the output chunk to which the row copies its operand; -1: none
        # Whether every receiver stores the sent segments in its output without combining them.
        self.reaches_outputs = True
        self.encodes = False


class Arrival(NamedTuple):
    """The segments that one row receives in a step.

    ``target`` is the chunk that gets them, and ``place`` the latest of their places. ``position``
    is the position of the chunk's own value among them, or -1 if it is not an operand. If
    ``carries`` is set, the first operand is the result of the previous row of the fold.
    """

    target: int
    place: int
    position: int
    carries: bool
    segments: list[Segment]


def _arrivals(target: int, segments: list[Segment], has_own: bool) -> Iterator[Arrival]:
    """The rows that receive the segments (or tokens) of one step for one chunk.

    ``has_own``: whether the rank has a value of the chunk, with which it combines the segments.
    """
    if len(segments) == 1 or target == TOKEN:
        for at in range(0, len(segments), FAN_MAX):
            some = segments[at : at + FAN_MAX]
            first = some[0][2]
            latest = max([place for place, _, _ in some])
            combines = first.reduce and has_own
            yield Arrival(target, latest, int(first.before) if combines else -1, False, some)
        return
    segment_of = {id(segment[2]): segment for segment in segments}
    latest = 0
    for number, row in enumerate(fold_rows([t for _, _, t in segments], has_own)):
        some = [segment_of[id(t)] for t in row.arriving]
        latest = max(latest, *(place for place, _, _ in some))
        yield Arrival(target, latest, row.own, number > 0, some)


class RowBuilding:
    """Walks the transfers of one rank in order and builds its rows."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        self.inputs = schedule.inputs_of(rank)
        self.outputs = schedule.outputs_of(rank)
        self.data_chunks = schedule.data_chunks
        self.rows: list[RowBuilder] = []
        self.current: dict[int, StoredValue] = {}
        self.made: set[int] = set()  # chunks that have changed at least once
        self.sends: dict[Channel, list[tuple[int, Label]]] = {}  # (row, label) of each segment
        self.joined = list(range(LANES_MAX))  # union-find over the schedule's lanes
        #: Whether several ranks end with the same value, and codes travel.
        self.shares_codes = schedule.coded is not None and schedule.collective in SHARING
        self.token_lane = -1  # one lane has all tokens, since a token covers all earlier ones

    def run(self) -> None:
        """Builds all rows; raises ScheduleError for transfers that rows cannot express."""
        rank = self.rank
        group: list[Transfer] = []
        for t in self.schedule.transfers:
            if rank not in (t.source, t.destination):
                continue
            if group and t.step != group[0].step:
                self._step(group)
                group = []
            group.append(t)
        if group:
            self._step(group)
        self._finish()

    def lane_of(self, lane: int) -> int:
        """The plan's lane (its lowest member) that contains the schedule's lane ``lane``."""
        joined = self.joined
        while joined[lane] != lane:
            lane = joined[lane]
        return lane

    def _join(self, one: int, other: int) -> None:
        if one != other:
            low, high = sorted((self.lane_of(one), self.lane_of(other)))
            self.joined[high] = low

    def _value(self, chunk: int) -> StoredValue:
        value = self.current.get(chunk)
        if value is None:
            if chunk >= self.data_chunks or chunk // self.schedule.parts not in self.inputs:
                raise ScheduleError(f"rank {self.rank} holds nothing in chunk {chunk}")
            value = self.current[chunk] = StoredValue(chunk, -1)
        return value

    def _add_row(self, chunk: int, lane: int, label: Label, own: StoredValue | None = None) -> int:
        index = len(self.rows)
        self.rows.append(RowBuilder(chunk, lane, label, own))
        if own is not None:
            own.last_read = index
            if own.row >= 0:
                self._join(lane, self.rows[own.row].lane)
        return index

    def _step(self, group: list[Transfer]) -> None:
        """Adds the rows of one step, sorted by label, sends first.

        All rows of the step read the values from before the step.
        """
        rank = self.rank
        counts: dict[Channel, int] = {}
        arriving: dict[int, list[Segment]] = {}
        changed: dict[int, StoredValue] = {}
        # (place, is an arrival, unique number, event); the number keeps sort from comparing events.
        events: list[tuple[int, bool, int, Segment | Arrival]] = []
        for t in group:
            if t.source == rank == t.destination:
                changed[t.target] = self._value_to_move(t)
                continue
            inwards = t.source != rank
            channel = Channel(t.source if inwards else t.destination, t.lane, 0 if inwards else 1)
            place = counts.get(channel, 0)
            counts[channel] = place + 1
            if inwards:
                arriving.setdefault(t.target, []).append((place, channel, t))
            else:
                events.append((place, False, len(events), (place, channel, t)))
        for target, segments in arriving.items():
            has_own = rank < self.schedule.workers or target in self.current
            for arrival in _arrivals(target, segments, has_own):
                events.append((arrival.place, True, len(events), arrival))
        events.sort()
        taken: dict[Channel, int] = {}
        folded: dict[int, StoredValue] = {}
        for place, _, _, event in events:
            label = (group[0].step, place)
            if isinstance(event, Arrival):
                self._receive(event, label, folded, taken)
            else:
                self._send(event, label)
        self.current.update(changed)
        self.current.update(folded)
        self.made.update(changed, folded)

    def _value_to_move(self, t: Transfer) -> StoredValue:
        if t.reduce:
            raise ScheduleError(
                f"step {t.step}: rank {self.rank} combines its chunks {t.chunk} and "
                f"{t.target}; a row has one local operand, so one of them must arrive"
            )
        return self._value(t.chunk)

    def _send(self, segment: Segment, label: Label) -> None:
        _, channel, t = segment
        if t.chunk == TOKEN:
            self._join_tokens(t.lane)
            maker = len(self.rows) - 1
            if not (maker >= 0 and self.rows[maker].chunk == TOKEN):
                maker = -1
            if maker < 0 or self.rows[maker].lane != t.lane or not self._may_send(maker, channel):
                maker = self._add_row(TOKEN, t.lane, label)
        else:
            value = self._value(t.chunk)
            if self.shares_codes and not (t.reduce or t.partial):
                value = self._round_value(value, t.lane, label)
            value.sent = True
            value.combined |= t.reduce or t.partial
            maker = value.row
            if maker < 0 or not self._may_send(maker, channel):
                step, maker = value.sender
                if step != t.step or not self._may_send(maker, channel):
                    maker = self._add_row(value.chunk, t.lane, label, value)
                    value.sender = (t.step, maker)
        builder = self.rows[maker]
        builder.send.append(channel)
        builder.reaches_outputs = builder.reaches_outputs and self._reaches_output(t)
        if t.chunk != TOKEN and self.schedule.is_coded(self.rank, t.destination):
            self._send_codes(value, maker, t)
        self._join(self.rows[maker].lane, t.lane)
        self.sends.setdefault(channel, []).append((maker, label))

    def _round_value(self, value: StoredValue, lane: int, label: Label) -> StoredValue:
        """The complete value as its codes decode to it; the row that makes the value encodes it."""
        if value.rounded:
            return value
        if value.row < 0:
            made = StoredValue(value.chunk, self._add_row(value.chunk, lane, label, value))
            self.rows[made.row].result = self.current[value.chunk] = made
        else:
            made = value
        if made.combined or made.encoder >= 0:
            raise ScheduleError(
                f"rank {self.rank} combines chunk {value.chunk} again after it has encoded it"
            )
        made.rounded = made.has_codes = self.rows[made.row].encodes = True
        made.encoder = made.row
        return made

    def _send_codes(self, value: StoredValue, maker: int, t: Transfer) -> None:
        """Lets row ``maker`` send the codes of the value."""
        if value.rounded:
            if not value.has_codes:
                raise ScheduleError(
                    f"step {t.step}: rank {self.rank} sends the codes of chunk {t.chunk}, which it "
                    "has decoded from others; encoded anew, it would be rounded again"
                )
            value.codes_read |= maker != value.row
        elif value.encoder not in (-1, maker):
            raise ScheduleError(f"step {t.step}: rank {self.rank} encodes chunk {t.chunk} twice")
        else:
            value.encoder = maker
            self.rows[maker].encodes = True

    def _join_tokens(self, lane: int) -> None:
        if self.token_lane < 0:
            self.token_lane = lane
        self._join(self.token_lane, lane)

    def _reaches_output(self, t: Transfer) -> bool:
        """Whether the receiver of the transfer stores it in its output without combining it."""
        if t.reduce or not 0 <= t.target < self.data_chunks:
            return False
        return t.target // self.schedule.parts in self.schedule.outputs_of(t.destination)

    def _may_send(self, maker: int, channel: Channel) -> bool:
        """Whether row ``maker`` can send the next segment of the channel without a deadlock."""
        builder = self.rows[maker]
        if len(builder.send) == FAN_MAX:
            return False
        sends = self.sends.get(channel, ())
        if sends and sends[-1][0] >= maker:
            return False
        return len(sends) < DEPTH or sends[-DEPTH][1] < builder.label

    def _receive(
        self,
        arrival: Arrival,
        label: Label,
        folded: dict[int, StoredValue],
        taken: dict[Channel, int],
    ) -> None:
        target = arrival.target
        own = None
        if arrival.position >= 0:
            own = self._value(target)
            own.combined = True
            if own.rounded:
                raise ScheduleError(
                    f"rank {self.rank} combines chunk {target}, which has been rounded"
                )
        index = self._add_row(target, arrival.segments[0][2].lane, label, own)
        builder = self.rows[index]
        builder.position = max(arrival.position, 0)
        if arrival.carries:
            builder.carry = folded[target]
            builder.carry.carried = builder.carry.combined = True
            builder.carry.last_read = index
        for place, channel, t in arrival.segments:
            if taken.get(channel, 0) != place:
                raise ScheduleError(
                    f"step {t.step}: rank {self.rank} needs chunk {t.chunk} from rank {t.source} "
                    f"before a transfer listed ahead of it on lane {t.lane}; use another step"
                )
            taken[channel] = place + 1
            builder.recv.append(channel)
            self._join(builder.lane, t.lane)
        if target == TOKEN:
            self._join_tokens(builder.lane)
        else:
            builder.result = folded[target] = StoredValue(target, index)
            first = arrival.segments[0][2]
            if self.shares_codes and not (first.reduce or first.partial):
                builder.result.rounded = True
                builder.result.has_codes = self.schedule.is_coded(first.source, self.rank)

    def _finish(self) -> None:
        """Records the value of every output chunk.

        An input chunk is copied to the output by the row that sends it, or by a row at the end.
        """
        if self.schedule.collective is Collective.EXSCAN and self.rank == 0:
            return  # exscan leaves the output of rank 0 undefined, so no row writes it
        parts = self.schedule.parts
        for block in self.outputs:
            for chunk in range(block * parts, (block + 1) * parts):
                value = self._value(chunk)
                if self.shares_codes:
                    value = self._round_value(value, self._any_lane(), (FOREVER, 0))
                value.output = chunk
                if value.row >= 0:
                    continue
                sender = value.sender[1]
                if sender < 0 or chunk in self.made or value.chunk != chunk:
                    sender = self._add_row(chunk, self._any_lane(), (FOREVER, 0), value)
                self.rows[sender].copies_out = chunk

    def _any_lane(self) -> int:
        return self.rows[0].lane if self.rows else 0
