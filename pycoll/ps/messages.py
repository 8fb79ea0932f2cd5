"""The messages between workers and servers, and their form on the wire.

A message is a fixed header and a payload. The header is a packed struct, and ``unpack`` rejects
malformed ones. The payload is an array, a text, or nothing.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

#: The longest part of an array, in bytes; a payload is never longer.
PART_BYTES_MAX = 4 << 20
#: The longest text in a message, in bytes.
TEXT_BYTES_MAX = 1 << 20


class Kind(IntEnum):
    """The kinds of messages."""

    # Updates: a worker sends them to the first server of a chain, and the chain applies them.
    LOAD = 1
    PUSH = 2
    CLOCK = 3
    WRITE = 4
    LEAVE = 5
    OPTIMIZE = 6
    CUT = 7
    # Reads: a worker sends them to the last server of a chain.
    PULL = 8
    LOOKUP = 9
    STATS = 10
    FETCH = 11
    # Updates of checkpoints: the saved state of a part, and the end of a checkpoint.
    RESTORE = 12
    RELEASE = 13
    # Answers of the last server to a worker.
    DONE = 16
    VALUE = 17
    TEXT = 18
    HELD = 19
    FAILED = 20
    # Between neighbours of a chain.
    SYNC = 24
    SYNCED = 25
    COMMIT = 26
    PIECE = 27
    # Views: messages between the manager and the other servers.
    VIEW = 32
    ACCEPTED = 33
    FILLED = 34
    # A worker leaves the store.
    BYE = 35
    # The sender has stopped; with the flag EXCLUDED, the receiver has to stop.
    UNMANAGED = 36
    PROPOSE = 37
    VIEW_QUERY = 38
    VIEW_REPLY = 39
    # Requests to the manager to drain or add server ``key``.
    DRAIN = 40
    ADD = 41
    # Newcomers. JOIN: the update from which on a shard counts a new worker. ADMIT: a server asks
    # the manager to admit a process. CONNECTED: a peer has connected with the newcomer. JOINED: all
    # peers have. JOIN_FAILED: the newcomer is gone, or a peer cannot reach it.
    JOIN = 46
    ADMIT = 47
    CONNECTED = 48
    JOINED = 49
    JOIN_FAILED = 50
    # A worker requests a ticket.
    TICKET = 51
    # Between servers. SEVERED: server ``worker`` has lost its connection with server ``key``.
    # CONFIRM: a server that may have been stopped asks whether it is still a member. CONFIRMED: the
    # sender counts it as a member.
    SEVERED = 52
    HEARTBEAT = 53
    CONFIRM = 54
    CONFIRMED = 55


UPDATES = frozenset(
    (
        *(Kind.LOAD, Kind.PUSH, Kind.CLOCK, Kind.WRITE, Kind.LEAVE, Kind.OPTIMIZE),
        *(Kind.CUT, Kind.RESTORE, Kind.RELEASE, Kind.JOIN),
    )
)
#: A worker sends no request across one of these: earlier ones go before it, later ones after it.
FENCES = frozenset((Kind.CLOCK, Kind.OPTIMIZE, Kind.CUT))
READS = frozenset((Kind.PULL, Kind.LOOKUP, Kind.STATS, Kind.FETCH))
#: Messages that the ``Voter`` of a server handles.
VIEWS = frozenset(
    (
        *(Kind.VIEW, Kind.ACCEPTED, Kind.FILLED, Kind.UNMANAGED, Kind.PROPOSE),
        *(Kind.VIEW_QUERY, Kind.VIEW_REPLY, Kind.DRAIN, Kind.ADD),
        *(Kind.ADMIT, Kind.JOINED, Kind.JOIN_FAILED, Kind.SEVERED),
    )
)
#: The answers to updates and reads; ``after`` is 1 in those to reads, and else 0.
ANSWERS = frozenset((Kind.DONE, Kind.VALUE, Kind.TEXT, Kind.HELD, Kind.FAILED))

#: Flag of a PUSH: it is the worker's last push of this part in this round.
ENDS_ROUND = 1
#: Flag of a PUSH: the answer is that of a PULL right after it.
PULLS = 8
#: Flag of an OPTIMIZE: it applies to all keys, and to those made later. Flag of a RESTORE: the
#: payload is the clocks of the shard, and no part.
ALL = 1
#: Flag of a WRITE: the payload is the name of ``key``, for the shard's figures.
NAMES = 1
#: Flags of a LOOKUP. NO_WAIT: the server answers at once, with an empty text if there is none.
#: CREATES: the server answers the first worker at once with a DONE: this worker writes the text.
NO_WAIT, CREATES = 1, 2
#: Flag of an answer: the push came too late for its round, and was not applied.
DROPPED = 2
#: Flag of an answer: the shard had applied the update before.
REPEATED = 4
#: Flag of an UNMANAGED: the sender's view excludes the receiver.
EXCLUDED = 1
#: Flag of a DONE: an optimizer stepped by the push, so the worker cannot compute the value.
STEPPED = 16
#: Flag of any message: the payload follows as a message of its own.
SEPARATE = 128

_HEAD = struct.Struct("<HBBHHIIIIQQQQI")
HEAD_BYTES = _HEAD.size
_MAGIC = 0x5053
_KINDS = {int(kind): kind for kind in Kind}


class Message(NamedTuple):
    """A message.

    ``shard``: the number of the shard. ``view``: the number of the view in which the sender sent
    it. ``key`` and ``part`` name a part of an array. ``worker``: the rank of the worker whose
    request this is, or answers. ``seq``: the number of the worker's update of this shard, counted
    from 1; for reads, a number that the answer repeats. ``after``: for a read, the newest update of
    the same worker that the answer must contain. ``round`` depends on the kind: the round of a
    push, the clock of a CLOCK, the number of a CUT, or the number of the array in a RESTORE. In an
    answer it is a version; in that to a CUT, the newest version of the shard. ``lsn``: the place in
    the order of the shard's updates, from 1; 0 before the first server has numbered it. ``rule``:
    how a LOAD's part combines pushes.
    """

    kind: Kind
    shard: int = 0
    view: int = 0
    key: int = 0
    part: int = 0
    worker: int = 0
    seq: int = 0
    after: int = 0
    round: int = 0
    lsn: int = 0
    flags: int = 0
    rule: int = 0
    payload: Any = None

    def with_payload(self, payload: Any) -> Message:
        """Return the message with another payload."""
        return Message(*self[:-1], payload)


def pack_into(head: Any, message: Message, nbytes: int, is_separate: bool, taken: int) -> None:
    """Write the header to the begin of ``head``.

    ``nbytes``: the length of the payload. ``is_separate``: whether the payload follows
    as a message of its own.
    ``taken``: the number of segments that the sender has received, modulo 2**32.
    """
    flags = message.flags | (SEPARATE if is_separate else 0)
    _HEAD.pack_into(
        head,
        0,
        _MAGIC,
        message.kind,
        flags,
        message.shard,
        message.rule,
        message.view,
        message.key,
        message.part,
        message.worker,
        message.seq,
        message.after,
        message.round,
        message.lsn << 24 | nbytes,
        taken,
    )


def unpack(head: Any) -> tuple[Message, int, bool, int]:
    """Return the message without its payload, the payload's bytes, whether it comes apart, and the
    number ``taken``.

    Raises ValueError for bytes that ``pack_into`` did not write.
    """
    if len(head) < HEAD_BYTES:
        raise ValueError(f"a header of {len(head)} bytes: expected {HEAD_BYTES}")
    # ``middle``: the fields from view to round, which a message has in the same order.
    magic, kind, flags, shard, rule, *middle, last, taken = _HEAD.unpack_from(head)
    nbytes = last & 0xFFFFFF
    if magic != _MAGIC or kind not in _KINDS:
        raise ValueError(f"a header that begins with {magic:#x} and kind {kind}")
    if nbytes > PART_BYTES_MAX:
        raise ValueError(f"a payload of {nbytes} bytes: expected at most {PART_BYTES_MAX}")
    values = (_KINDS[kind], shard, *middle, last >> 24, flags & ~SEPARATE, rule, None)
    message = Message._make(values)
    return message, nbytes, bool(flags & SEPARATE), taken
