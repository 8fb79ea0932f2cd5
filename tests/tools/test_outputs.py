"""Commands say where they cannot write before they begin their work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pycoll.errors import InvalidArgumentError
from pycoll.tools.cli import main
from pycoll.tools.outputs import check_output


def test_a_file_that_is_there_keeps_its_content(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    check_output(old, "--json")
    check_output(new, "--json")
    assert old.read_text() == "kept"
    assert not new.exists()


@pytest.mark.parametrize("name", ["folder", "missing/file", "file/below", "pipe"])
def test_what_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    import os

    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")  # nobody reads it
    with pytest.raises(InvalidArgumentError, match=r"--output: .* is no file that can be written"):
        check_output(tmp_path / name, "--output")


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "all_reduce", "--json"],
        ["tune", "--output"],
        ["timeline", "t.json", "-o"],
        ["bench", "all_reduce", "--plot"],
    ],
)
def test_commands_look_first(
    tmp_path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: object) -> int:
        raise AssertionError("the work has begun")

    monkeypatch.setattr("pycoll.tools.bench.command.launch_bench", begin)
    monkeypatch.setattr("pycoll.tools.tune.machine_links.Tuner", begin)
    monkeypatch.setattr("pycoll.tools.timelines.merge", begin)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.png").mkdir()
    done = CliRunner().invoke(main, [*words, str(tmp_path / "x.png")])
    assert done.exit_code == 1
    assert "is no file that can be written (Is a directory)" in done.output


def test_a_timeline_without_policies_is_merged_though_no_step_can_be_drawn(tmp_path: Path) -> None:
    events = [{"name": "NEGOTIATE", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0}]
    (tmp_path / "t.json").write_text(json.dumps(events))
    words = ["timeline", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "the timeline has no steps with a policy" in done.output
    assert "t.merged.json: 3 events of 1 rank(s)" in done.output
    assert "NEGOTIATE" in (tmp_path / "t.merged.json").read_text()
    assert not (tmp_path / "t.png").exists()
