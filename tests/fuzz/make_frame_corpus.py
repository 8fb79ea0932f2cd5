"""Writes the seed corpus of the frame fuzzer: small streams of frames, one file each.

A second writer of WIRE.md beside the library's own. Run it again after a change of the format:

    python tests/fuzz/make_frame_corpus.py tests/fuzz/corpus/frame
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterable
from pathlib import Path

DATA, CREDIT, NOTICE, GOODBYE = 1, 2, 3, 4
REPAIR, RELEASE, SEND = 1, 8, 16  # the choices of fuzz_frame.cpp
PIECES_OF_32_KIB = 6 << 5
MASK = (1 << 64) - 1


def check_of(header: bytes) -> int:
    """The header check of WIRE.md; bytes 36 to 39 count as zero."""
    value = 0xCBF29CE484222325
    for word in struct.unpack("<6Q", header[:36] + bytes(4) + header[40:]):
        value = ((value ^ word) * 0x9E3779B97F4A7C15) & MASK
        value ^= value >> 32
    return value & 0xFFFFFFFF


def frame(
    number: int,
    kind: int,
    payload: bytes = b"",
    *,
    channel: int = 0,
    place: int = 0,
    segment: tuple[int, int, int] = (0, 0, 0),
    released: Iterable[int] = (0,) * 8,
) -> bytes:
    """One frame; `place` is the segment's number in its channel, `segment` sequence, agreement
    and tag."""
    sequence, agreement, tag = segment
    head = b"pcf\x04" + struct.pack("<BBHII", kind, channel, place, number, len(payload))
    head += struct.pack("<QQII", sequence, agreement, tag, 0) + bytes(released)
    return head[:36] + struct.pack("<I", check_of(head)) + head[40:] + payload


def notice(sequence: int, failure: int, detail: bytes) -> bytes:
    """A Notice of transport.h."""
    descriptor = struct.pack("<QQIBBBB", 1000, 77, 0, 0, 11, 0, 0)
    return struct.pack("<Q", sequence) + descriptor + struct.pack("<Ii88s", failure, 2, detail)


def streams() -> dict[str, bytes]:
    """File name -> choices and stream."""
    segments = [
        frame(i, DATA, bytes(range(40 + i)), channel=i % 3, place=i // 3, segment=(i + 1, 99, i))
        for i in range(9)
    ]
    large = frame(0, DATA, bytes(range(256)) * 20, segment=(1, 2, 3))
    # The fuzzer counts these by itself.
    plain = [
        frame(i, DATA, bytes(range(40 + i)), channel=i % 3, segment=(i + 1, 99, i))
        for i in range(9)
    ]
    early = [frame(i, DATA, bytes([i]), place=i ^ 1, segment=(i + 1, 99, i)) for i in range(8)]
    goodbye = frame(1, GOODBYE)
    acknowledged = [frame(i, CREDIT, released=(i,) * 8) for i in range(4)]
    told = [
        frame(0, NOTICE, notice(4, 0, b"")),
        frame(1, NOTICE, notice(5, 3, b"process 4711 was killed")),
        frame(2, NOTICE, notice(6, 0, b"too late")),
        frame(3, GOODBYE),
    ]
    beyond = [frame(i, DATA, b"x", place=i, segment=(1, 1, 0)) for i in range(33)]
    return {
        "segments": bytes([RELEASE]) + b"".join(segments),
        "segments_repaired": bytes([REPAIR | RELEASE]) + b"".join(plain),
        "out_of_order": bytes([RELEASE]) + b"".join(early),
        "large_then_goodbye": bytes([RELEASE | PIECES_OF_32_KIB]) + large + goodbye,
        "credits": bytes([REPAIR | SEND]) + b"".join(acknowledged),
        "notices": bytes([REPAIR]) + b"".join(told),
        "beyond_credit": bytes([0]) + b"".join(beyond),
        "cut_payload": bytes([RELEASE]) + large[:3000],
        "wrong_socket": bytes([REPAIR | 2]) + frame(0, CREDIT, released=(0, 1) * 4),
        # In pieces of 8 bytes, and more of them than the socket holds.
        "behind_goodbye": bytes([REPAIR | 3 << 1]) + frame(0, GOODBYE) + bytes(4000),
        "not_pycoll": bytes([0]) + b"GET / HTTP/1.1\r\n\r\n" * 4,
    }


def main() -> None:
    """Writes all files to the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, stream in streams().items():
        (folder / name).write_bytes(stream)


if __name__ == "__main__":
    main()
