"""The seeds of the fuzzers had no lengths at the edges of their types, and those of frames had a
version that is refused before any length is looked at."""

from __future__ import annotations

import re
import runpy
import struct

import pytest
from harness import ROOT

from pycoll.bootstrap.rendezvous.frames import unpack_blobs

FUZZ = ROOT / "tests" / "fuzz"


def generated(name: str, function: str) -> dict[str, bytes]:
    found: dict[str, bytes] = runpy.run_path(str(FUZZ / f"make_{name}_corpus.py"))[function]()
    return found


@pytest.mark.parametrize(("name", "function"), [("frame", "streams"), ("mailbox", "messages")])
def test_the_corpus_is_what_its_generator_writes(name: str, function: str) -> None:
    folder = FUZZ / "corpus" / name
    for file, data in generated(name, function).items():
        assert (folder / file).read_bytes() == data, f"run make_{name}_corpus.py {folder}"


def test_seeds_have_the_version_that_the_transport_speaks() -> None:
    header = (ROOT / "csrc" / "transport" / "tcp" / "frame.h").read_text()
    version = re.search(r"kFrameVersion = (\d+);", header)
    assert version is not None
    for name, stream in generated("frame", "streams").items():
        if name != "not_pycoll":
            assert stream[1:5] == b"pcf" + bytes([int(version[1])]), name


def test_seeds_announce_the_edges() -> None:
    announced = {
        struct.unpack_from("<I", one, 13)[0] for one in generated("frame", "edges").values()
    }
    assert {0, 511, 513, 2**32 - 1} <= announced
    totals = {
        struct.unpack_from("<Q", one, 8)[0] for one in generated("mailbox", "messages").values()
    }
    assert {2**64 - 1, 2**63, 2**32} <= totals


@pytest.mark.parametrize("length", [1, 2**31, 2**32 - 4, 2**32 - 1])
def test_lengths_of_blobs_are_bounded_by_what_came(length: int) -> None:
    with pytest.raises(ValueError, match="truncated blob"):
        unpack_blobs(struct.pack("<I", length), 1)
    with pytest.raises(ValueError, match="truncated blob"):
        unpack_blobs(struct.pack("<I", 1) + b"x" + struct.pack("<I", length), 2)
