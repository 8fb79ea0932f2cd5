"""Frames between a rank and the store: length, kind, payload. See WIRE.md, "Store".

The code calls a rank that is connected to a store a member.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

from pycoll.errors import (
    InvalidArgumentError,
    PeerLostError,
    PycollError,
    TimeoutError,
    TransportError,
)
from pycoll.untrusted import json_object, read_json

HEAD = struct.Struct("<IB3x")
#: Head of a GATHER payload: the round, milliseconds left, the rank's whole limit in milliseconds.
GATHER_HEAD = struct.Struct("<III")
#: Head of a SHARE payload: the member's ranks, and how many of all members may be lost. A blob
#: follows, which the store takes for the member's in later rounds once the member is lost.
SHARE_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
#: Nodes send a pulse every ``PULSE_S`` seconds, and so does a launcher to agents that it controls.
#: Silence of ``SILENCE_S`` means that the other end stands still, which ends no connection.
PULSE_S, SILENCE_S = 1.0, 7.0
#: Longest frame; larger ones are refused. A blob of one rank is a few kilobytes.
FRAME_BYTES_MAX = 64 * 1024 * 1024
#: Most bytes of all ranks' blobs of a round together. One RESULT frame holds all of them with their
#: lengths.
BLOBS_BYTES_MAX = FRAME_BYTES_MAX // 2


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1  # member -> store: size and name of the member, as JSON
    GATHER = 2  # member -> store: the member's blob of round n, and how long it waits
    RESULT = 3  # store -> member: all blobs of round n
    FAIL = 4  # store -> member: the meeting failed, as JSON; the last frame
    LEAVE = 5  # member -> store: the member needs nothing more
    ALARM = 6  # member -> store: the member failed, as text; the store tells all members
    ORDER = 7  # between launchers of an elastic job, which have no store: JSON
    PULSE = 8  # member -> store, which sends it back: the process at this end runs
    SHARE = 9  # member -> store: the ranks of the member, and how many of all ranks may be lost
    LOST = 10  # member -> store: one of the member's ranks is lost, as text
    NEWS = 11  # store -> member: a rank or a whole member is lost, and the others go on; JSON


class Party(NamedTuple):
    """The members of a store, in the words of error texts.

    ``member`` is one of them and ``waiter`` the subject that waits for all. ``size`` and ``limit``
    name the settings of their number and of the wait, ``number`` that of a member's own number.
    ``lost`` says what has happened to a member whose connection ends. ``watched``: both ends of a
    connection notice that the other end's host has vanished, ``PULSE_S`` and ``HOST_LOST_S`` later
    at most. ``stopped`` says what has happened to a member that has sent a pulse and then none for
    ``SILENCE_S``. ``tolerance`` names the setting by which members stand for ranks of which some
    may be lost; empty: none may.
    """

    member: str = "rank"
    waiter: str = "init"
    size: str = "size"
    limit: str = "PYCOLL_INIT_TIMEOUT_S"
    number: str = "number"
    lost: str = "ended while the ranks were joining"
    watched: bool = False
    stopped: str = "does not run"
    tolerance: str = ""


RANKS = Party()
#: The agents of ``pycoll run`` on several hosts.
NODES = Party(
    member="node",
    waiter="pycoll run",
    size="--nnodes",
    limit="--start-timeout",
    number="--node-rank",
    lost="is gone: its pycoll run was killed, or its host or the network to it has failed",
    watched=True,
    stopped="stands still: its pycoll run was stopped (SIGSTOP, a debugger), or its host hangs",
    tolerance="--tolerate",
)


#: The longest payload that the store accepts, by the kind of a frame from a member.
PAYLOAD_BYTES_MAX: dict[int, int] = {
    Kind.HELLO: 4096,
    Kind.GATHER: FRAME_BYTES_MAX,
    Kind.LEAVE: 0,
    Kind.ALARM: 64 * 1024,
    Kind.ORDER: 64 * 1024,
    Kind.PULSE: 0,
    Kind.SHARE: 64 * 1024,
    Kind.LOST: 64 * 1024,
}
#: Longest name in a HELLO frame, in characters.
_NAME_LENGTH_MAX = 512


_ERRORS: dict[str, type[PycollError]] = {
    "argument": InvalidArgumentError,
    "timeout": TimeoutError,
    "lost": PeerLostError,
    "transport": TransportError,
}


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """Encode one frame."""
    return HEAD.pack(len(payload), kind) + payload


def cut_frame(incoming: bytearray, most: Callable[[int], int]) -> tuple[int, bytes] | None:
    """Remove the first frame from ``incoming`` and return its kind and payload; None as long as it
    is incomplete. ``most``: the longest payload of a kind, in bytes. Raises ValueError for a longer
    one, as soon as its head has come."""
    if len(incoming) < HEAD.size:
        return None
    length, kind = HEAD.unpack_from(incoming)
    if length > most(kind):
        raise ValueError(f"{length} bytes in a frame of kind {kind}, at most {most(kind)}")
    end = HEAD.size + length
    if len(incoming) < end:
        return None
    payload = bytes(incoming[HEAD.size : end])
    del incoming[:end]
    return kind, payload


def pack_blobs(blobs: list[bytes]) -> bytes:
    """Encode blobs, each after its length."""
    return b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)


def unpack_blobs(data: bytes, count: int) -> list[bytes]:
    """Decode the result of ``pack_blobs``. Raises ValueError unless ``data`` holds exactly
    ``count`` blobs."""
    blobs, at = [], 0
    for _ in range(count):
        if at + _LENGTH.size > len(data):
            raise ValueError("truncated blobs")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError("truncated blob")
        blobs.append(data[at : at + length])
        at += length
    if at != len(data):
        raise ValueError("bytes behind the last blob")
    return blobs


def fail_frame(error: str, text: str, ranks: list[int]) -> bytes:
    """Encode a FAIL frame. ``error`` is "argument", "timeout", "lost" or "transport"."""
    body: dict[str, Any] = {"error": error, "text": text, "ranks": ranks}
    return frame(Kind.FAIL, json.dumps(body).encode())


def read_hello(payload: bytes) -> tuple[int, str]:
    """Decode the size and the name of a HELLO frame. Raises ValueError."""
    hello = json_object(read_json(payload), {"size": int, "name": str})
    name = hello["name"]
    if len(name) > _NAME_LENGTH_MAX or not name.isprintable():
        raise ValueError(f"a name of {len(name)} characters, or with some that cannot be printed")
    return hello["size"], name


def to_error(payload: bytes) -> PycollError:
    """Make the exception that a FAIL frame describes. Raises ValueError for an invalid payload."""
    body = json_object(read_json(payload), {"error": str, "text": str, "ranks": list})
    ranks = body["ranks"]
    if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
        raise ValueError("its ranks are no whole numbers")
    kind = _ERRORS.get(body["error"], PycollError)
    rank = ranks[0] if len(ranks) == 1 else None
    return kind(body["text"], rank=rank, ranks=ranks, operation="init")


def list_ranks(ranks: list[int], noun: str = "rank") -> str:
    """Format a list of ranks: "rank 3", "ranks 1, 2 and 5"; at most 16 of them are listed."""
    shown = [str(rank) for rank in ranks[:16]]
    if len(ranks) == 1:
        return f"{noun} {shown[0]}"
    if len(ranks) > len(shown):
        return f"{noun}s {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"{noun}s {', '.join(shown[:-1])} and {shown[-1]}"
