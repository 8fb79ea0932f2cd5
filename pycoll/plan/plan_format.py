"""Packs and unpacks the bytes of a plan; csrc/plan/FORMAT.md is the specification.

`unpack` checks everything that can be checked on a single plan: bounds, zero padding, the checksum,
and that each channel belongs to one lane. A plan that was unpacked is therefore well formed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, NoReturn

from pycoll.schedule.collectives import SERVABLE, Collective
from pycoll.schedule.copies import CopyStrategy
from pycoll.schedule.language import (
    FAN_MAX,
    LANES_MAX,
    OPERANDS_MAX,
    ScheduleError,
    block_count,
)

MAGIC = b"PCPL"
VERSION = 3
#: The chunk of a token row, which moves no bytes.
TOKEN_ROW = 0xFFFFFFFF
NO_CHANNEL = 0xFFFF
#: The carry slot of a row without a carry.
NO_CARRY = -1
#: The highest scratch slot that a carry can have.
CARRY_MAX = 254

#: The least number of segments that a channel holds; plans are lowered and proved for this depth.
#: Depth 1 would deadlock a ring of rows that receive and send, because each row keeps its received
#: segment until its send channel has a free slot. Transports have a depth of four or more.
DEPTH = 2

#: The row completes a value: the engine divides here for ``avg``.
FINAL = 1
#: Before it writes, the row waits until memory that was handed over for sending is drained.
FLUSH = 2
#: Peers may read the sent data in place (zero-copy read).
ZERO_COPY = 4
#: The sender of the received segment may write it to the target itself (direct write).
DIRECT_WRITE = 8
#: The row sends only after its receivers have said whether they open a write window.
AWAIT_WINDOW = 16
#: When the operation begins, the receiver tells the senders of the row whether it opens a window.
ANNOUNCE_WINDOW = 32
#: The scratch slot of the local operand holds codes.
CODED_SOURCE = 1
#: The scratch slot of the result gets codes.
CODED_TARGET = 2
#: The row encodes its result, once for the target and all sends.
ENCODE = 4
_CODED = CODED_SOURCE | CODED_TARGET | ENCODE
_FLAGS = FINAL | FLUSH | ZERO_COPY | DIRECT_WRITE | AWAIT_WINDOW | ANNOUNCE_WINDOW

HEADER = struct.Struct("<4sHBB10I12sI")
CHANNEL = struct.Struct("<IHBB")
ROW = struct.Struct("<I8BII16H4B8s")
assert (HEADER.size, CHANNEL.size, ROW.size) == (64, 8, 64)


class Buffer(IntEnum):
    """The buffer of a row's local operand or result."""

    NONE = 0
    INPUT = 1
    OUTPUT = 2
    SCRATCH = 3


class Channel(NamedTuple):
    """One end of a channel; ``direction`` is 0 to receive, 1 to send."""

    peer: int
    number: int
    direction: int


class Row(NamedTuple):
    """One row; ``recv`` and ``send`` are indices into the channel table.

    ``coded_recv``, ``coded_send``: bit i is set if entry i of ``recv`` or ``send`` holds codes.
    """

    chunk: int
    lane: int
    flags: int
    source: int
    source_position: int
    source_slot: int
    target: int
    target_slot: int
    recv: tuple[int, ...]
    send: tuple[int, ...]
    carry: int = NO_CARRY
    copies: CopyStrategy = CopyStrategy.RECEIVER
    coded_recv: int = 0
    coded_send: int = 0
    coded_local: int = 0

    @property
    def is_coded(self) -> bool:
        """Whether the row reads, makes or passes on codes."""
        return bool(self.coded_recv or self.coded_send or self.coded_local)

    @property
    def passes_codes(self) -> bool:
        """Whether the only operand of the row is codes, which it passes on unchanged."""
        coded = self.coded_recv if self.recv else self.coded_local & CODED_SOURCE
        return self.operands == 1 and bool(coded)

    @property
    def operands(self) -> int:
        """The number of values that the row combines; a row with one operand copies it."""
        return len(self.recv) + bool(self.source) + (self.carry != NO_CARRY)


class Plan(NamedTuple):
    """The rows of one rank, with the channels that they use."""

    collective: Collective
    size: int
    rank: int
    root: int
    parts: int
    temporary_count: int
    scratch_slots: int
    lane_count: int
    channels: tuple[Channel, ...]
    rows: tuple[Row, ...]
    servers: int = 0


def pack(plan: Plan) -> bytes:
    """The bytes of the plan; only the width of fields is checked."""
    body = [CHANNEL.pack(*channel, 0) for channel in plan.channels]
    body.extend(_pack_row(row) for row in plan.rows)
    rest = b"".join(body)
    checksum = zlib.crc32(rest, zlib.crc32(_pack_header(plan, 0)))
    return _pack_header(plan, checksum) + rest


def _pack_header(plan: Plan, checksum: int) -> bytes:
    return HEADER.pack(
        MAGIC,
        VERSION,
        plan.collective,
        plan.lane_count,
        plan.size,
        plan.rank,
        plan.root,
        block_count(plan.collective, plan.size),
        plan.parts,
        plan.temporary_count,
        plan.scratch_slots,
        len(plan.channels),
        len(plan.rows),
        plan.servers,
        b"",
        checksum,
    )


_FILL = tuple((NO_CHANNEL,) * (FAN_MAX - n) for n in range(FAN_MAX + 1))


def _pack_row(row: Row) -> bytes:
    chunk, lane, flags, source, position, source_slot, target, target_slot = row[:8]
    recv, send, carry, *local = row[8:]
    if carry > CARRY_MAX:
        raise ScheduleError(
            f"the carry of a fold is in scratch slot {carry}; the highest allowed is {CARRY_MAX}"
        )
    return ROW.pack(
        chunk,
        lane,
        len(recv),
        len(send),
        flags,
        source,
        position,
        target,
        carry + 1,
        source_slot,
        target_slot,
        *recv,
        *_FILL[len(recv)],
        *send,
        *_FILL[len(send)],
        *local,
        b"",
    )


def unpack(image: bytes) -> Plan:
    """The plan that ``image`` encodes.

    Raises ScheduleError that names the first field out of bounds.
    """
    if len(image) < HEADER.size:
        raise ScheduleError(f"a plan has at least {HEADER.size} bytes, not {len(image)}")
    fields = HEADER.unpack_from(image)
    magic, version, collective, lane_count, size, rank, root, blocks, parts = fields[:9]
    temporaries, scratch, channel_count, row_count, servers, reserved, checksum = fields[9:]
    rows_at = HEADER.size + CHANNEL.size * channel_count
    _require(magic == MAGIC, f"magic {magic!r}")
    _require(
        version == VERSION,
        f"version {version}; this release reads version {VERSION}: lower the schedule again",
    )
    _require(
        len(image) == rows_at + ROW.size * row_count,
        f"{len(image)} bytes for {channel_count} channels and {row_count} rows",
    )
    _require(zlib.crc32(image[:60] + bytes(4) + image[64:]) == checksum, "checksum is wrong")
    _require(collective <= Collective.BARRIER, f"collective {collective}")
    _require(reserved == bytes(12), "reserved bytes are not zero")
    _require(size >= 1 and rank < size and root < size, f"size {size}, rank {rank}, root {root}")
    served = collective in SERVABLE and root < size - servers
    _require(not servers or served, f"servers {servers} of {size} ranks, root {root}")
    _require(blocks == block_count(Collective(collective), size), f"block_count {blocks}")
    _require(parts >= 1, f"parts {parts}")
    _require(1 <= lane_count <= LANES_MAX, f"lane_count {lane_count}")
    _require(channel_count < NO_CHANNEL, f"channel_count {channel_count}")
    channels: list[Channel] = []
    for peer, number, direction, zero in CHANNEL.iter_unpack(image[HEADER.size : rows_at]):
        _require(
            peer < size and peer != rank and number < LANES_MAX and direction <= 1 and zero == 0,
            f"channel {len(channels)}: peer {peer}, number {number}, direction {direction}",
        )
        channels.append(Channel(peer, number, direction))
    _require(len(set(channels)) == len(channels), "two channels are equal")
    rows = tuple(_read_row(words, i) for i, words in enumerate(ROW.iter_unpack(image[rows_at:])))
    plan = Plan(
        Collective(collective),
        size,
        rank,
        root,
        parts,
        temporaries,
        scratch,
        lane_count,
        tuple(channels),
        rows,
        servers,
    )
    _check_rows(plan, blocks * parts)
    return plan


def _read_row(words: tuple[Any, ...], index: int) -> Row:
    chunk, lane, recv_count, send_count, flags, source, position, target, carry = words[:9]
    source_slot, target_slot = words[9:11]
    if recv_count > FAN_MAX or send_count > FAN_MAX:
        _malformed(f"row {index}: recv_count {recv_count}, send_count {send_count}")
    recv, send, copies, coded, reserved = (
        words[11:19],
        words[19:27],
        words[27],
        words[28:31],
        words[31],
    )
    if reserved != bytes(8):
        _malformed(f"row {index}: reserved bytes are not zero")
    unused = (*recv[recv_count:], *send[send_count:])
    if unused.count(NO_CHANNEL) != len(unused):
        _malformed(f"row {index}: an unused channel is {unused}")
    if copies > max(CopyStrategy):
        _malformed(f"row {index}: copies {copies}")
    return Row(
        chunk,
        lane,
        flags,
        source,
        position,
        source_slot,
        target,
        target_slot,
        tuple(recv[:recv_count]),
        tuple(send[:send_count]),
        carry - 1,
        CopyStrategy(copies),
        *coded,
    )


def _check_rows(plan: Plan, data_chunks: int) -> None:
    lane_of: dict[int, int] = {}
    lane = 0
    for index, row in enumerate(plan.rows):
        if not lane <= row.lane < plan.lane_count:
            _malformed(f"row {index}: lane {row.lane} after lane {lane}")
        lane = row.lane
        if row.flags > _FLAGS:
            _malformed(f"row {index}: flags {row.flags}")
        for direction, ends in ((0, row.recv), (1, row.send)):
            for end in ends:
                if end >= len(plan.channels) or plan.channels[end].direction != direction:
                    _malformed(
                        f"row {index}: channel {end} is not one to {('receive', 'send')[direction]}"
                    )
                if lane_of.setdefault(end, lane) != lane:
                    _malformed(f"row {index}: channel {end} has two lanes")
            if len(set(ends)) != len(ends):
                _malformed(f"row {index}: a channel occurs twice")
        wrong = _wrong_place(plan, row, data_chunks)
        if wrong:
            _malformed(f"row {index}: {wrong}")


def place_text(buffer: int, slot: int) -> str:
    """The text for a buffer and a slot, for example "output 3"."""
    return f"{Buffer(buffer).name.lower()} {slot}"


def exposed_place(row: Row) -> tuple[int, int] | None:
    """Buffer and slot from which receivers may read the sent data in place.

    The result is None if the data is neither in the input nor in the output.
    """
    if row.recv:
        return (row.target, row.target_slot) if row.target == Buffer.OUTPUT else None
    stable = row.source in (Buffer.INPUT, Buffer.OUTPUT)
    return (row.source, row.source_slot) if stable else None


def leading_count(rows: Sequence[Row]) -> int:
    """The number of leading rows of a lane, which engines may run tiles ahead of the other rows.

    Leading rows only send the input, on channels that no other row of the lane uses. The result is
    0 if no row follows them, or if a later row sends on one of their channels.
    """
    count = 0
    while count < len(rows) and _only_sends_input(rows[count]):
        count += 1
    own = {channel for row in rows[:count] for channel in row.send}
    shared = any(not own.isdisjoint(row.send) for row in rows[count:])
    return 0 if shared or count == len(rows) else count


def _only_sends_input(row: Row) -> bool:
    alone = not row.recv and row.carry == NO_CARRY and not row.target
    return alone and row.source == Buffer.INPUT and bool(row.send)


def _is_copy_to_output(row: Row) -> bool:
    """Whether the row only copies one received segment to the output."""
    return row.operands == len(row.recv) == 1 and row.target == Buffer.OUTPUT


def _wrong_place(plan: Plan, row: Row, data_chunks: int) -> str:
    """Names the first error in the row's places and operands; empty if there is none."""
    if row.chunk == TOKEN_ROW:
        moves = row.source or row.target or row.flags or row.source_position or row.is_coded
        if moves or row.carry != NO_CARRY:
            return "a token row moves data"
        return "" if row.recv or row.send else "does nothing"
    if row.copies and not (row.send and row.chunk != TOKEN_ROW):
        return f"copies {row.copies} but sends no data"
    if row.flags & AWAIT_WINDOW and (row.recv or row.copies == CopyStrategy.RECEIVER):
        return "is flagged await-window but receives, or leaves all copies to its receivers"
    if row.flags & ANNOUNCE_WINDOW and not row.recv:
        return "is flagged announce-window but receives nothing"
    if row.flags & ZERO_COPY and not (row.send and exposed_place(row)):
        return "is flagged zero-copy but sends no input or output in place"
    if row.flags & DIRECT_WRITE and not _is_copy_to_output(row):
        return "is flagged direct-write but does more than copy one segment to the output"
    if row.chunk >= data_chunks:
        return f"chunk {row.chunk} of {data_chunks}"
    if row.is_coded and (wrong := _wrong_codes(row)):
        return wrong
    scratch = plan.scratch_slots
    for buffer, slot, name in (
        (row.source, row.source_slot, "source"),
        (row.target, row.target_slot, "target"),
    ):
        bound = 1 if not buffer else scratch if buffer == Buffer.SCRATCH else data_chunks
        if buffer > Buffer.SCRATCH or slot >= bound:
            return f"{name} {buffer}, slot {slot}"
    if row.target == Buffer.INPUT:
        return "writes the input"
    if row.source_position > (len(row.recv) if row.source else 0):
        return f"source_position {row.source_position}"
    if row.carry >= scratch:
        return f"carry {row.carry}"
    if row.carry != NO_CARRY and not row.recv:
        return "has a carry but receives nothing"
    if not 1 <= row.operands <= OPERANDS_MAX:
        return f"has {row.operands} operands"
    return "" if row.target or row.send or row.recv else "does nothing"


def _wrong_codes(row: Row) -> str:
    """Names the first error in the codes of a row; empty if there is none."""
    local = row.coded_local
    if local > _CODED or row.coded_recv >> len(row.recv) or row.coded_send >> len(row.send):
        return f"codes {row.coded_recv}, {row.coded_send}, {local}"
    for bit, buffer in ((CODED_SOURCE, row.source), (CODED_TARGET, row.target)):
        if local & bit and buffer != Buffer.SCRATCH:
            return f"keeps codes in buffer {buffer}, which is no scratch"
    makes, encodes = bool(row.coded_send or local & CODED_TARGET), bool(local & ENCODE)
    if encodes and (row.passes_codes or not (row.target or row.send)):
        return "encodes codes, or a result that is neither stored nor sent"
    if makes and not (encodes or row.passes_codes):
        return "does not encode its result, but stores or sends it as codes"
    if row.flags & (ZERO_COPY | DIRECT_WRITE | AWAIT_WINDOW) or row.copies:
        return "has codes, which are neither read nor written in place"
    return ""


def _require(holds: bool, what: str) -> None:
    if not holds:
        _malformed(what)


def _malformed(what: str) -> NoReturn:
    raise ScheduleError(f"malformed plan: {what}")
