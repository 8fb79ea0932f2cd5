"""Timelines of several ranks become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pycoll.errors import InvalidArgumentError
from pycoll.gradients.step_record import CLOCK, STEP
from pycoll.tools.cli import main
from pycoll.tools.overlaps import choose_step, lines_of, steps_of
from pycoll.tools.timelines import merge, read, siblings


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
    events = merge(paths)
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


def test_files_next_to_the_first_are_found(tmp_path: Path) -> None:
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
            merge([good, tmp_path / "bad.json"])
    with pytest.raises(InvalidArgumentError, match=r"none\.json cannot be read"):
        read(tmp_path / "none.json")
    again = write(tmp_path / "again.json", 3, 0.0, "a", 1)
    with pytest.raises(InvalidArgumentError, match=r"good\.json and .*again\.json are both of ra"):
        merge([good, again])


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


# Steps with a policy


def span(kind: str, step: int, begin: float, end: float, **args: Any) -> dict[str, Any]:
    about = {"is": kind, "step": step, **args}
    return event(0, begin, kind, "X", cat=STEP, dur=end - begin, args=about)


def step_of(number: int, zero: float, wait_us: float) -> list[dict[str, Any]]:
    """Two messages of 100 us; the program stands still for the last ``wait_us`` of the second."""
    end = zero + 300
    return [
        span("backward", number, zero, end - wait_us, policy="fixed"),
        event(0, zero + 10, "READY", "i", cat=STEP, args={"is": "ready", "step": number}),
        span("wire", number, zero + 20, zero + 120),
        span("wire", number, zero + 200, end),
        span("wait", number, end - wait_us, end),
    ]


def test_the_share_of_the_wire_s_time_in_which_nobody_stood_still() -> None:
    events = [*step_of(0, 0, 100), *step_of(1, 1000, 50), *step_of(2, 2000, 150)]
    steps = steps_of(events)
    # The third wait began when nothing was under way.
    assert [one.hidden for one in steps] == [0.5, 0.75, 0.5]
    assert [one.exposed_us for one in steps] == [100, 50, 100]
    assert steps[1].end_us == 1300 and steps[1].ready == (1010,)
    assert lines_of(steps) == ["rank 0: 3 steps by fixed, 50% of the time on the wire hidden"]
    assert [one.number for one in choose_step(steps, None)] == [2]
    assert [one.number for one in choose_step(steps, 1)] == [1]
    with pytest.raises(InvalidArgumentError, match="step is 7: the timeline has steps 0 to 2"):
        choose_step(steps, 7)
    with pytest.raises(InvalidArgumentError, match="no steps with a policy"):
        choose_step(steps_of([event(0, 1, "x")]), None)
    (silent,) = steps_of([span("backward", 0, 0, 5, policy="bsp")])
    assert silent.hidden == 1 and silent.end_us == 5


def test_the_picture_of_a_step(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install -r tests/requirements.txt")
    path = tmp_path / "t.json"
    path.write_text(json.dumps([*step_of(0, 0, 100), *step_of(1, 1000, 50)]))
    words = ["timeline", str(path), "--plot"]
    done = CliRunner().invoke(main, [*words, str(tmp_path / "t.svg"), "--step", "1"])
    assert done.exit_code == 0, done.output
    assert "75% of communication hidden" in (tmp_path / "t.svg").read_text()
    assert "t.svg" in done.output and "rank 0: 2 steps by fixed" in done.output
    failed = CliRunner().invoke(main, [*words, str(tmp_path / "t.doc")])
    assert failed.exit_code == 1 and "must end in one of .png" in failed.output
