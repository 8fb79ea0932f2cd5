"""What ranks of ``pycoll run`` say: lines stay whole, and together."""

from __future__ import annotations

import os
import re
import signal

from launching import RANK, python, run, start

from pycoll.rank_output import LINE_BYTES_MAX, LinePrefixer


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


def test_lines_are_cut_only_when_they_are_enormous() -> None:
    prefixer = LinePrefixer(b"[0] ")
    assert prefixer.take(b"a") == b""
    assert prefixer.take(b"b\r\nc\rd\n\ne") == b"[0] ab\r\n[0] c\rd\n[0] \n"
    assert prefixer.finish() == b"[0] e\n"
    assert prefixer.finish() == b""
    long = b"z" * LINE_BYTES_MAX
    assert prefixer.take(long) == b"[0] " + long + b"\n"


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
    status, out, err = run(4, python(code))
    assert (status, out) == (0, "")
    lines = err.splitlines()
    for rank in (1, 2, 3):
        said = [f"line {i} of {str(rank) * 50}" for i in range(40)]
        begin = lines.index(said[0])
        assert lines[begin : begin + 40] == said, err


def test_the_beginning_of_a_line_is_shown_while_the_rank_waits() -> None:
    code = RANK + "import time; r == 1 and os.write(2, b'50 %\\r'); time.sleep(60)"
    process = start(2, python(code))
    assert process.stderr is not None
    assert os.read(process.stderr.fileno(), 100) == b"50 %\r"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
