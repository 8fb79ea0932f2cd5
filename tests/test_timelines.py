"""Timelines of several ranks become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pycoll.cli import main
from pycoll.errors import InvalidArgumentError
from pycoll.timelines import CLOCK, merged, read, siblings


def event(rank: int, ts: float, name: str, ph: str = "B", **more: Any) -> dict[str, Any]:
    return {"pid": rank, "ts": ts, "name": name, "ph": ph, "tid": 1, **more}


def write(path: Path, rank: int, zero_us: float, host: str, *times: float) -> Path:
    """A rank's file, its clock's zero being so late on the day."""
    clock = event(rank, times[0], CLOCK, "M", args={"host": host, "unix_us": zero_us + times[0]})
    events = [clock, *(event(rank, ts, f"e{ts:g}") for ts in times)]
    path.write_text(json.dumps(events))
    return path


def test_ranks_of_one_host_keep_their_clock_and_others_are_compared_by_the_day(
    tmp_path: Path,
) -> None:
    # The second rank's time of day is a little off, which its own host's clock corrects.
    paths = [
        write(tmp_path / "t.json", 0, 1000.0, "a", 5, 7),
        write(tmp_path / "t.1.json", 1, 1003.0, "a", 6),
        write(tmp_path / "t.2.json", 2, 2000.0, "b", 4, 8),
    ]
    events = merged(paths)
    heads = [one["args"].get("name") for one in events if one["name"] == "process_name"]
    assert heads == ["rank 0 on a", "rank 1 on a", "rank 2 on b"]
    shown = [(one["pid"], one["name"], one["ts"]) for one in events if one["ph"] == "B"]
    assert shown == [
        (0, "e5", 0),
        (1, "e6", 1),
        (0, "e7", 2),
        (2, "e4", 999),
        (2, "e8", 1003),
    ]


def test_files_beside_the_first_are_found(tmp_path: Path) -> None:
    for name in ("t.json", "t.1.json", "t.2.json", "t.4.json", "u.1.json"):
        (tmp_path / name).write_text("[]")
    assert [path.name for path in siblings(tmp_path / "t.json")] == [
        *("t.json", "t.1.json", "t.2.json")
    ]


def test_a_file_that_was_not_completed_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    lines = [json.dumps(event(0, ts, "x")) + ",\n" for ts in range(3)]
    path.write_text("[\n" + "".join(lines) + '{"pid": 0, "ts"')
    assert [one["ts"] for one in read(path)] == [0, 1, 2]


def test_what_is_no_timeline_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.json", 3, 0.0, "a", 1)
    for text, told in (("hello", "has no events"), ("{}", "no timeline"), ('[{"ts": 1}]', "pid")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InvalidArgumentError, match=rf"bad\.json .*{told}"):
            merged([good, tmp_path / "bad.json"])
    with pytest.raises(InvalidArgumentError, match=r"none\.json cannot be read"):
        read(tmp_path / "none.json")
    again = write(tmp_path / "again.json", 3, 0.0, "a", 1)
    with pytest.raises(InvalidArgumentError, match=r"good\.json and .*again\.json are both of ra"):
        merged([good, again])


def test_the_command(tmp_path: Path) -> None:
    write(tmp_path / "t.json", 0, 0.0, "a", 5, 7)
    write(tmp_path / "t.1.json", 1, 0.0, "a", 1_000_005)
    done = CliRunner().invoke(main, ["timeline", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    assert done.output.endswith("t.merged.json: 7 events of 2 rank(s), 1.000 s\n")
    assert len(json.loads((tmp_path / "t.merged.json").read_text())) == 7
    other = tmp_path / "one.json"
    words = ["timeline", str(tmp_path / "t.json"), str(tmp_path / "t.1.json"), "-o", str(other)]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert other.read_text() == (tmp_path / "t.merged.json").read_text()
    failed = CliRunner().invoke(main, ["timeline", str(tmp_path / "none.json")])
    assert failed.exit_code == 1 and "none.json cannot be read" in failed.output
