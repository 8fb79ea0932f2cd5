"""Tuning files and timelines were opened and read whatever they were, so that a FIFO hung the
reader, a device filled its memory, and deep JSON ended it with a RecursionError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pycoll import InvalidArgumentError
from pycoll.cost import tuning_file
from pycoll.gradients import step_record
from pycoll.tools import overlaps, timelines
from pycoll.untrusted import read_file

DEEP = "[" * 100_000


def odd_files(folder: Path) -> dict[str, Path]:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    deep = folder / "deep.json"
    deep.write_text(DEEP)
    link = folder / "link.json"
    link.symlink_to("/dev/zero")
    long = folder / "long.json"
    with long.open("wb") as file:
        file.truncate(timelines.FILE_BYTES_MAX + 1)  # takes no space on the disk
    return {
        "a FIFO": fifo,
        "a character device": Path("/dev/zero"),
        "character device, and no regular file": link,
        "a directory": folder,
        "nested too deep": deep,
        "more than": long,
    }


def test_tuning_files_are_regular_and_short(tmp_path: Path) -> None:
    for told, path in odd_files(tmp_path).items():
        with pytest.raises(InvalidArgumentError, match=f"tuning file .*{told}"):
            tuning_file.load(path)


def test_timelines_are_regular_and_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = odd_files(tmp_path)
    monkeypatch.setattr(timelines, "FILE_BYTES_MAX", 1 << 20)
    for told, path in files.items():
        with pytest.raises(InvalidArgumentError, match=f"{path} .*{told}"):
            timelines.read(path)


def test_the_command_says_so_in_one_line(tmp_path: Path) -> None:
    """A process of its own, which neither hangs nor shows a traceback."""
    files = odd_files(tmp_path)
    files.pop("more than")
    for told, path in files.items():
        done = subprocess.run(
            [sys.executable, "-m", "pycoll", "timeline", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0 and told in done.stderr
        assert "Traceback" not in done.stderr


def test_a_file_that_grows_is_cut_off_at_the_bound(tmp_path: Path) -> None:
    """/proc tells the size 0 of what it makes while it is read."""
    assert read_file("/proc/self/status", 1 << 20).startswith(b"Name:")
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_file("/proc/self/status", 10)
    exact = tmp_path / "exact"
    exact.write_bytes(b"x" * 10)
    assert read_file(exact, 10) == b"x" * 10


EVENTS = [
    {"pid": 1e999, "ts": 0},
    {"pid": 0, "ts": float("nan")},
    {"pid": 0, "ts": 10**400},
    {"pid": True, "ts": True, "name": step_record.CLOCK},
    {"pid": -1, "ts": 0},
    {"pid": 0, "ts": 0, "name": step_record.CLOCK},
    {"pid": 0, "ts": 0, "name": step_record.CLOCK, "args": {"host": 1, "unix_us": "x"}},
]


@pytest.mark.parametrize("place", range(len(EVENTS)))
def test_numbers_of_timelines_are_checked(tmp_path: Path, place: int) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([EVENTS[place]]))
    with pytest.raises(InvalidArgumentError, match=str(path)):
        timelines.merge([path])


@pytest.mark.parametrize("args", [{"is": "backward", "step": 1e999}, {"is": []}, "is", {"is": 0}])
def test_steps_of_timelines_are_checked(args: object) -> None:
    event = {"pid": 0, "ts": 0, "cat": step_record.STEP, "args": args}
    with pytest.raises(InvalidArgumentError, match="broken event"):
        overlaps.steps_of([event])
