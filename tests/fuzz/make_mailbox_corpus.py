"""Writes the seed corpus of the mailbox fuzzer: segments of messages, one file each.

Run it again after a change of SegmentHeader:

    python tests/fuzz/make_mailbox_corpus.py tests/fuzz/corpus/mailbox
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

POST, SEQUENCE, BYTES = 1, 2, 4  # the choices of fuzz_mailbox.cpp
LENGTH = 13  # bytes of a posted receive, times bits 3 to 7
MOST = (1 << 64) - 1


def segment(
    payload: bytes,
    total: int,
    *,
    tag: int = 7,
    sequence: int = 1,
    claims: int | None = None,
    choices: int = SEQUENCE,
    posted: int = 0,
) -> bytes:
    """One record. ``total`` is what the message announces, ``claims`` what the segment does;
    ``posted``: a receive of that many times LENGTH bytes."""
    if posted:
        choices |= POST | posted << 3
    claimed = len(payload) if claims is None else claims
    return struct.pack("<QQIIB", sequence, total, claimed, tag, choices) + payload


def messages() -> dict[str, bytes]:
    """File name -> records."""
    whole = segment(bytes(13), 13, posted=1)
    found = {
        "whole": whole,
        "two": whole + segment(bytes(26), 26, posted=2),
        "empty": segment(b"", 0, posted=0),
        "in_pieces": segment(bytes(5), 13, posted=1) + segment(bytes(8), 13),
        "unasked": segment(bytes(13), 13) + segment(bytes(13), 13, posted=1),
        "late_receive": segment(bytes(5), 13) + segment(bytes(8), 13, posted=1),
        "shorter_receive": segment(bytes(26), 26, posted=1),
        "longer_receive": segment(bytes(13), 13, posted=31),
        "other_sequence": segment(bytes(13), 13, sequence=MOST, choices=0),
        "more_than_announced": segment(bytes(13), 5, posted=1),
        "more_at_the_end": segment(bytes(5), 13, posted=1) + segment(bytes(13), 13),
        "other_total": segment(bytes(5), 13, posted=1) + segment(bytes(5), MOST),
        "other_tag": segment(bytes(5), 13, posted=1) + segment(bytes(8), 13, tag=8),
        "nothing_more": segment(bytes(5), 13, posted=1) + segment(b"", 13),
    }
    for total in (1 << 31, 1 << 32, 1 << 63, MOST - 12, MOST - 4, MOST):
        found[f"announces_{total}"] = segment(bytes(13), total, posted=1) + segment(
            bytes(13), total
        )
        found[f"unasked_{total}"] = segment(bytes(13), total) + segment(bytes(13), total, posted=1)
    for claims in (0, 65536, 65537, 1 << 31, (1 << 32) - 1):
        found[f"claims_{claims}"] = segment(bytes(13), MOST, claims=claims, posted=1)
    return found


def main() -> None:
    """Writes all files to the folder named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in messages().items():
        (folder / name).write_bytes(records)


if __name__ == "__main__":
    main()
