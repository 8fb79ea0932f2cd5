"""The first half of lowering: one rank's transfers become rows whose operands are values.

Every transfer has a label (step, place), its place among those of its step and channel, and rows
run in order of labels, of one label sends first. So a row waits only for rows of lower labels, or
for sends of its own: all ranks together cannot deadlock, however shallow channels are.

A value is also sent by the row that makes it, ahead of its label, if the order of segments in the
channel allows: so receive-reduce-send is one row. It then needs room beside all segments of the
channel that the receiver takes no earlier than this row's label, so at most `DEPTH` may be such.

Lanes of the schedule that exchange values on this rank are joined: they will be one lane of its
plan. Where values live is decided afterwards, in `lower`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pycoll.collective import Collective
from pycoll.plan_format import DEPTH, Buffer, Channel
from pycoll.schedule import (
    FAN_MAX,
    LANES_MAX,
    TOKEN,
    Schedule,
    ScheduleError,
    Transfer,
    fold_rows,
    input_blocks,
    output_blocks,
)

#: Stands for a step or row after all others.
FOREVER = 1 << 62

#: (step, place among the transfers of the step on its channel)
Label = tuple[int, int]
#: A transfer in its channel, and its place among those of the step there.
Segment = tuple[int, Channel, Transfer]


class Held:
    """Something a rank holds: an input chunk as it came (``row`` is -1) or the result of a row."""

    __slots__ = (
        "carried",
        "chunk",
        "combined",
        "home",
        "last_read",
        "output",
        "row",
        "sender",
        "sent",
        "slot",
    )

    def __init__(self, chunk: int, row: int) -> None:
        self.chunk = chunk  # it was made in; decides size and home
        self.row = row
        self.sent = False
        self.combined = False  # here or where it was sent to
        self.carried = False  # only to the next row of its fold
        self.last_read = -1  # the last row that reads it from memory; -1: none does
        self.sender = (-1, -1)  # (step, row): the last row that only sends it
        self.output = -1  # the output chunk that it is in the end
        self.home = Buffer.NONE
        self.slot = 0


class Draft:
    """A row before its values have homes. Channels are (peer, lane, direction)."""

    __slots__ = (
        "carry",
        "chunk",
        "copies_out",
        "label",
        "lane",
        "own",
        "position",
        "recv",
        "result",
        "send",
    )

    def __init__(self, chunk: int, lane: int, label: Label, own: Held | None = None) -> None:
        self.chunk = chunk
        self.lane = lane
        self.label = label
        self.own = own
        self.carry: Held | None = None
        self.position = 0
        self.recv: list[Channel] = []
        self.send: list[Channel] = []
        self.result: Held | None = None
        self.copies_out = -1  # the output chunk that the operand is copied to


class Arrival(NamedTuple):
    """What one row of a step receives.

    ``position`` is that of the chunk's own value among it, -1 if that is no operand; a row that
    ``carries`` begins with what the row before has come to.
    """

    target: int
    place: int
    position: int
    carries: bool
    segments: list[Segment]


def _arrivals(target: int, landing: list[Segment]) -> Iterator[Arrival]:
    """The rows that take what lands in one chunk (or what tokens arrive) in a step."""
    if len(landing) == 1 or target == TOKEN:
        for at in range(0, len(landing), FAN_MAX):
            some = landing[at : at + FAN_MAX]
            first = some[0][2]
            latest = max([place for place, _, _ in some])
            yield Arrival(target, latest, int(first.before) if first.reduce else -1, False, some)
        return
    segment_of = {id(segment[2]): segment for segment in landing}
    latest = 0
    for number, row in enumerate(fold_rows([t for _, _, t in landing])):
        some = [segment_of[id(t)] for t in row.arriving]
        latest = max(latest, *(place for place, _, _ in some))
        yield Arrival(target, latest, row.own, number > 0, some)


class Drafting:
    """Walks one rank's transfers in order and drafts its rows."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule = schedule
        self.rank = rank
        kind, size, root = schedule.collective, schedule.size, schedule.root
        self.inputs = input_blocks(kind, size, root, rank)
        self.outputs = output_blocks(kind, size, root, rank)
        self.data_chunks = schedule.data_chunks
        self.rows: list[Draft] = []
        self.current: dict[int, Held] = {}
        self.made: set[int] = set()  # chunks that ever changed
        self.sends: dict[Channel, list[tuple[int, Label]]] = {}  # (row, label) of each segment
        self.joined = list(range(LANES_MAX))  # union-find over the schedule's lanes
        self.token_lane = -1  # tokens tell of all before them, so one lane has them all

    def run(self) -> None:
        """Drafts all rows; raises ScheduleError for what rows cannot say."""
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
        """The plan's lane (its lowest number) that the schedule's lane belongs to."""
        joined = self.joined
        while joined[lane] != lane:
            lane = joined[lane]
        return lane

    def _join(self, one: int, other: int) -> None:
        if one != other:
            low, high = sorted((self.lane_of(one), self.lane_of(other)))
            self.joined[high] = low

    def _value(self, chunk: int) -> Held:
        value = self.current.get(chunk)
        if value is None:
            if chunk >= self.data_chunks or chunk // self.schedule.parts not in self.inputs:
                raise ScheduleError(f"rank {self.rank} holds nothing in chunk {chunk}")
            value = self.current[chunk] = Held(chunk, -1)
        return value

    def _draft(self, chunk: int, lane: int, label: Label, own: Held | None = None) -> int:
        index = len(self.rows)
        self.rows.append(Draft(chunk, lane, label, own))
        if own is not None:
            own.last_read = index
            if own.row >= 0:
                self._join(lane, self.rows[own.row].lane)
        return index

    def _step(self, group: list[Transfer]) -> None:
        """Rows of a step by label, sends first; all of them see what was there before the step."""
        rank = self.rank
        counts: dict[Channel, int] = {}
        arriving: dict[int, list[Segment]] = {}
        changed: dict[int, Held] = {}
        events: list[tuple[int, bool, int, Segment | Arrival]] = []  # the number tells all apart
        for t in group:
            if t.source == rank == t.destination:
                changed[t.target] = self._moved(t)
                continue
            inwards = t.source != rank
            channel = Channel(t.source if inwards else t.destination, t.lane, 0 if inwards else 1)
            place = counts.get(channel, 0)
            counts[channel] = place + 1
            if inwards:
                arriving.setdefault(t.target, []).append((place, channel, t))
            else:
                events.append((place, False, len(events), (place, channel, t)))
        for target, landing in arriving.items():
            for arrival in _arrivals(target, landing):
                events.append((arrival.place, True, len(events), arrival))
        events.sort()
        taken: dict[Channel, int] = {}
        folded: dict[int, Held] = {}
        for place, _, _, event in events:
            label = (group[0].step, place)
            if isinstance(event, Arrival):
                self._receive(event, label, folded, taken)
            else:
                self._send(event, label)
        self.current.update(changed)
        self.current.update(folded)
        self.made.update(changed, folded)

    def _moved(self, t: Transfer) -> Held:
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
                maker = self._draft(TOKEN, t.lane, label)
        else:
            value = self._value(t.chunk)
            value.sent = True
            value.combined |= t.reduce or t.partial
            maker = value.row
            if maker < 0 or not self._may_send(maker, channel):
                step, maker = value.sender
                if step != t.step or not self._may_send(maker, channel):
                    maker = self._draft(value.chunk, t.lane, label, value)
                    value.sender = (t.step, maker)
        self.rows[maker].send.append(channel)
        self._join(self.rows[maker].lane, t.lane)
        self.sends.setdefault(channel, []).append((maker, label))

    def _join_tokens(self, lane: int) -> None:
        if self.token_lane < 0:
            self.token_lane = lane
        self._join(self.token_lane, lane)

    def _may_send(self, maker: int, channel: Channel) -> bool:
        """Whether row ``maker`` can send on the channel as its next segment, without a deadlock."""
        draft = self.rows[maker]
        if len(draft.send) == FAN_MAX:
            return False
        sends = self.sends.get(channel, ())
        if sends and sends[-1][0] >= maker:
            return False
        return len(sends) < DEPTH or sends[-DEPTH][1] < draft.label

    def _receive(
        self,
        arrival: Arrival,
        label: Label,
        folded: dict[int, Held],
        taken: dict[Channel, int],
    ) -> None:
        target = arrival.target
        own = None
        if arrival.position >= 0:
            own = self._value(target)
            own.combined = True
        index = self._draft(target, arrival.segments[0][2].lane, label, own)
        draft = self.rows[index]
        draft.position = max(arrival.position, 0)
        if arrival.carries:
            draft.carry = folded[target]
            draft.carry.carried = draft.carry.combined = True
            draft.carry.last_read = index
        for place, channel, t in arrival.segments:
            if taken.get(channel, 0) != place:
                raise ScheduleError(
                    f"step {t.step}: rank {self.rank} needs chunk {t.chunk} from rank {t.source} "
                    f"before what is listed ahead of it on lane {t.lane}; use another step"
                )
            taken[channel] = place + 1
            draft.recv.append(channel)
            self._join(draft.lane, t.lane)
        if target == TOKEN:
            self._join_tokens(draft.lane)
        else:
            draft.result = folded[target] = Held(target, index)

    def _finish(self) -> None:
        """Says where outputs come from; an input chunk is copied when it is sent, or at the end."""
        if self.schedule.collective is Collective.EXSCAN and self.rank == 0:
            return  # nothing is promised, so the output is left as it is
        parts = self.schedule.parts
        for block in self.outputs:
            for chunk in range(block * parts, (block + 1) * parts):
                value = self._value(chunk)
                value.output = chunk
                if value.row >= 0:
                    continue
                sender = value.sender[1]
                if sender < 0 or chunk in self.made or value.chunk != chunk:
                    sender = self._draft(chunk, self._any_lane(), (FOREVER, 0), value)
                self.rows[sender].copies_out = chunk

    def _any_lane(self) -> int:
        return self.rows[0].lane if self.rows else 0
