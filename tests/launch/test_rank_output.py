"""What ranks of ``pycoll run`` say: lines stay whole, and together."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from launching import RANK, python, run, start

from pycoll.launch.rank_output import LINE_BYTES_MAX, RankLines


def test_prefixed_lines_are_whole_and_in_each_rank_s_order() -> None:
    code = RANK + (
        "import sys\n"
        "for i in range(300):\n"
        "    for piece in ('line ', str(i), ' of ', str(r) * 50, '\\n'):\n"
        "        sys.stdout.write(piece); sys.stdout.flush()\n"
        "print('to stderr', r, file=sys.stderr)\n"
        "sys.stdout.write('no newline'); sys.stdout.flush()\n"
    )
    status, out, err = run(3, python(code), prefix=True)
    assert status == 0
    lines: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for line in out.splitlines():
        found = re.fullmatch(r"\[([012])\] (.*)", line)
        assert found, line
        lines[int(found[1])].append(found[2])
    for rank, seen in lines.items():
        expected = [f"line {i} of {str(rank) * 50}" for i in range(300)]
        assert seen == [*expected, "no newline"]
    assert sorted(err.splitlines()) == [f"[{r}] to stderr {r}" for r in range(3)]


def test_prefixes_are_as_wide_as_the_largest_rank() -> None:
    status, out, _ = run(11, ["sh", "-c", "echo x"], prefix=True)
    assert status == 0
    assert sorted(out.splitlines()) == sorted(f"[{r:>2}] x" for r in range(11))


def test_a_reader_that_leaves_ends_the_job() -> None:
    process = start(2, ["sh", "-c", "while echo x; do sleep 0.01; done"], prefix=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    _, err = process.communicate(timeout=30) if process.stdout is None else (None, "")
    assert process.wait(30) == 128 + signal.SIGPIPE
    assert err == ""
    for stream in (process.stdin, process.stderr):
        if stream is not None:
            stream.close()


def shown(lines: RankLines, piece: bytes) -> bytes:
    lines.take(piece)
    return lines.whole()


def test_lines_are_cut_only_when_they_are_enormous() -> None:
    lines = RankLines(b"[0] ")
    assert shown(lines, b"a") == b""
    assert shown(lines, b"b\r\nc\rd\n\ne") == b"[0] ab\r\n[0] c\rd\n[0] \n"
    lines.end()
    assert lines.whole() == b"[0] e\n"
    lines.end()
    assert lines.whole() == b""
    long = b"z" * LINE_BYTES_MAX
    assert shown(lines, long) == b"[0] " + long + b"\n"


def test_a_line_whose_beginning_was_shown_goes_on_behind_it() -> None:
    lines = RankLines(b"[0] ")
    lines.take(b"name? ")
    assert lines.part() == b"[0] name? "
    assert shown(lines, b"x\ny") == b"x\n"
    assert lines.part() == b"[0] y"
    lines.interrupt()
    assert shown(lines, b"z\n") == b"[0] z\n"
    lines.take(b"50 %\r")
    assert lines.part() == b"[0] 50 %\r"
    lines.take(b"60 %\r")
    assert lines.part() == b"[0] 60 %\r"


@pytest.mark.parametrize("stream", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
def test_lines_of_ranks_that_write_at_once_are_whole(stream: int, prefix: bool) -> None:
    """Written in many small pieces by all ranks, the first one included, to one pipe."""
    code = RANK + (
        "import time\n"
        "for i in range(200):\n"
        f"    for piece in ('rank ', str(r), ' line ', str(i), ' ', str(r) * 60, '\\n'):\n"
        f"        os.write({stream}, piece.encode())\n"
        "    if i % 20 == 0: time.sleep(0.002)\n"
    )
    status, *both = run(4, python(code), prefix=prefix)
    lines = both[stream - 1].splitlines()
    assert (status, both[2 - stream]) == (0, "")
    begin = "[{}] " if prefix else ""
    for rank in range(4):
        own = [line for line in lines if f"rank {rank} " in line]
        expected = begin.format(rank) + f"rank {rank} line {{}} " + str(rank) * 60
        assert own == [expected.format(i) for i in range(200)]
    assert len(lines) == 800


def test_a_stalled_line_gives_way_to_others(tmp_path: Path) -> None:
    """A prompt is shown while its rank waits, and another rank's line does not run into it."""
    asked, told = tmp_path / "asked", tmp_path / "told"
    code = RANK + (
        "import pathlib, time\n"
        f"asked, told = pathlib.Path({str(asked)!r}), pathlib.Path({str(told)!r})\n"
        "def wait(mark, seconds):\n"
        "    while not mark.exists(): time.sleep(0.01)\n"
        "    time.sleep(seconds); mark.unlink()\n"
        "if r == 0: os.write(1, b'name? '); asked.touch(); wait(told, 2); os.write(1, b'end\\n')\n"
        "else: wait(asked, 0.5); os.write(1, b'line\\n'); told.touch()\n"
    )
    assert run(2, python(code)) == (0, "name? \nline\nend\n", "")
    assert run(2, python(code), prefix=True) == (0, "[0] name? \n[1] line\n[0] end\n", "")


def test_what_ranks_say_at_once_is_not_mixed() -> None:
    # As tracebacks are written: by all ranks at the same time, in many small pieces. The first rank
    # has the launcher's own stderr.
    code = RANK + (
        "import sys, time\n"
        "for i in range(40 if r else 0):\n"
        "    for piece in ('line ', str(i), ' of ', str(r) * 50, '\\n'):\n"
        "        os.write(2, piece.encode())\n"
        "    time.sleep(0.001)\n"
    )
    said = {rank: [f"line {i} of {str(rank) * 50}" for i in range(40)] for rank in (1, 2, 3)}
    heard = []
    for _ in range(5):
        status, out, err = run(4, python(code))
        lines = err.splitlines()
        assert (status, out) == (0, "")
        assert sorted(lines) == sorted(line for block in said.values() for line in block)
        begins = {rank: lines.index(said[rank][0]) for rank in said}
        if all(lines[begins[rank] :][:40] == said[rank] for rank in said):
            return
        # A rank that gets no core for a while ends its block: others may speak then.
        heard.append(err)
    raise AssertionError("\n\n".join(heard))


def test_the_beginning_of_a_line_is_shown_while_the_rank_waits() -> None:
    code = RANK + "import time; r == 1 and os.write(2, b'50 %\\r'); time.sleep(60)"
    process = start(2, python(code))
    assert process.stderr is not None
    assert os.read(process.stderr.fileno(), 100) == b"50 %\r"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
