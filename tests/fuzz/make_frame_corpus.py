"""Writes the seed corpus of the frame fuzzer: small streams of frames, one file each.

A second writer of WIRE.md next to the library's own. Run it again after a change of the format:

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
    head = b"pcf\x07" + struct.pack("<BBHII", kind, channel, place, number, len(payload))
    head += struct.pack("<QQII", sequence, agreement, tag, 0) + bytes(released)
    return head[:36] + struct.pack("<I", check_of(head)) + head[40:] + payload


def notice(sequence: int, failure: int, detail: bytes) -> bytes:
    """A Notice of transport.h."""
    descriptor = struct.pack("<QQIBBBB", 1000, 77, 0, 0, 11, 0, 0)
    state = struct.pack("<IiQIII", failure, 2, sequence - 1, 2, 1500, 2)
    waits = struct.pack("<27I", 3, 4, *(0,) * 25)
    dispute = struct.pack("<Q4I10I", sequence, 3, 1, 0, 1, 7, 8, 9, *(0,) * 7)
    refusals = struct.pack("<6Q144s", 3, 3, *(0,) * 4, b"x is None")
    head = struct.pack("<Q", sequence) + descriptor + state
    return head + struct.pack("88s", detail) + waits + dispute + refusals


def announced(kind: int, length: int, *, place: int = 0, number: int = 0) -> bytes:
    """A frame's header that announces ``length`` bytes, which do not follow."""
    head = frame(
        number, kind, place=place, segment=(MASK, MASK, 0xFFFFFFFF) if kind == DATA else (0, 0, 0)
    )
    head = head[:12] + struct.pack("<I", length) + head[16:]
    return head[:36] + struct.pack("<I", check_of(head)) + head[40:]


def edges() -> dict[str, bytes]:
    """Lengths, numbers and counters at the edges of their types, whose sums wrap."""
    lengths = (65535, 65536, 65537, 1 << 31, (1 << 32) - 48, (1 << 32) - 1)
    good = frame(0, DATA, b"good", segment=(1, 2, 3))
    found = {
        f"announces_{length}": bytes([RELEASE]) + good + announced(DATA, length, place=1, number=1)
        for length in lengths
    }
    for length in (0, 511, 513, (1 << 32) - 1):
        found[f"notice_of_{length}"] = bytes([0]) + announced(NOTICE, length)
    for kind, name in ((CREDIT, "credit"), (GOODBYE, "goodbye")):
        found[f"{name}_with_bytes"] = bytes([0]) + announced(kind, (1 << 32) - 1)
    # A place is judged modulo 2^16: the first ones lie beyond the credits, the last ones behind.
    for place in (32, 0x7FFF, 0x8000, 0xFFE0, 0xFFFF):
        found[f"place_{place}"] = bytes([RELEASE]) + frame(0, DATA, b"x", place=place)
    counts = (1, 32, 33, 127, 128, 255)
    for count in counts:
        told = frame(0, CREDIT, released=(count,) * 8)
        found[f"releases_{count}"] = bytes([REPAIR | SEND]) + told + frame(0, CREDIT)
    backwards = [frame(i, CREDIT, released=(count,) * 8) for i, count in enumerate((2, 1, 255))]
    found["releases_backwards"] = bytes([REPAIR | SEND]) + b"".join(backwards)
    numbers = (1, (1 << 31) - 1, (1 << 32) - 1)
    for number in numbers:
        found[f"number_{number}"] = bytes([0]) + frame(number, DATA, b"x")
    # Three long segments make the reader expect a fourth like them; it announces more.
    large = [frame(i, DATA, bytes(5000), place=i, segment=(1, 1, 0)) for i in range(4)]
    longer = announced(DATA, (1 << 32) - 1, place=4, number=4)
    found["unlike_the_expected"] = bytes([RELEASE | PIECES_OF_32_KIB]) + b"".join(large) + longer
    return found


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
    return edges() | {
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
