"""Frames between a member and the store: length, kind, payload. See WIRE.md, "Store"."""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any

from pycoll.errors import (
    InvalidArgumentError,
    PeerLostError,
    PycollError,
    TimeoutError,
    TransportError,
)

HEAD = struct.Struct("<IB3x")
#: Round, milliseconds left, milliseconds that the rank gave itself in all.
GATHER_HEAD = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
#: Larger frames are refused; a blob of one rank is a few kilobytes.
FRAME_BYTES_MAX = 64 * 1024 * 1024


class Kind(IntEnum):
    """What a frame says."""

    HELLO = 1  # member -> store: who I am, as JSON
    GATHER = 2  # member -> store: my blob of round n, and how long I wait
    RESULT = 3  # store -> member: all blobs of round n
    FAIL = 4  # store -> member: the meeting failed, as JSON; the last frame
    LEAVE = 5  # member -> store: I need nothing more
    ALARM = 6  # member -> store: I failed, as text; the store tells all


_ERRORS: dict[str, type[PycollError]] = {
    "argument": InvalidArgumentError,
    "timeout": TimeoutError,
    "lost": PeerLostError,
    "transport": TransportError,
}


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """One frame as it goes over the wire."""
    return HEAD.pack(len(payload), kind) + payload


def pack_blobs(blobs: list[bytes]) -> bytes:
    """Blobs, each behind its length."""
    return b"".join(_LENGTH.pack(len(blob)) + blob for blob in blobs)


def unpack_blobs(data: bytes, count: int) -> list[bytes]:
    """The inverse; ValueError unless ``data`` holds exactly ``count`` blobs."""
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
    """``error`` is "argument", "timeout", "lost" or "transport"."""
    body: dict[str, Any] = {"error": error, "text": text, "ranks": ranks}
    return frame(Kind.FAIL, json.dumps(body).encode())


def to_error(payload: bytes) -> PycollError:
    """The exception that a FAIL frame stands for."""
    body = json.loads(payload)
    ranks = [int(rank) for rank in body["ranks"]]
    kind = _ERRORS.get(body["error"], PycollError)
    return kind(
        str(body["text"]), rank=ranks[0] if len(ranks) == 1 else None, ranks=ranks, operation="init"
    )


def list_ranks(ranks: list[int]) -> str:
    """ "rank 3", "ranks 1, 2 and 5"; long lists are cut."""
    shown = [str(rank) for rank in ranks[:16]]
    if len(ranks) == 1:
        return "rank " + shown[0]
    if len(ranks) > len(shown):
        return f"ranks {', '.join(shown)} and {len(ranks) - len(shown)} more"
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
