"""Helpers for the tests of ``pycoll run``: start launchers, and see which processes live."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
#: The beginning of the code of a rank that needs its number.
RANK = "import os; r = int(os.environ['PYCOLL_RANK']); "
RUN = """
import json, sys
sys.path.insert(0, {root!r})
from pycoll.launch.launcher import launch
from pycoll.launch.rank_crew import LaunchOptions
options = json.loads(sys.argv[1])
sys.exit(launch(LaunchOptions(**options)))
"""
#: A rank that joins and prints its place and its peers.
JOIN = """
import os
import sys
sys.path[:0] = [{here!r}, {root!r}]
from joining import World
from pycoll.bootstrap import join
from pycoll.config import Config
{prepare}
with World() as world:
    for _ in range(2):
        joined = join(Config.read(), factories=world.factories{arguments})
    world.made[-1].check()
    line = f"{{joined.rank}} {{joined.size}} {{joined.source}} {{sorted(world.made[-1].peers)}}\\n"
    os.write(1, line.encode())
"""


def arguments_of(ranks: int, command: Sequence[str], **options: object) -> list[str]:
    """The command line of a launcher."""
    arguments = json.dumps({"ranks": ranks, "command": list(command), **options})
    return [sys.executable, "-c", RUN.format(root=str(ROOT)), arguments]


def start(ranks: int, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
    """A launcher in a separate process, as the command line starts it."""
    return subprocess.Popen(
        arguments_of(ranks, command, **options),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "60"},
    )


def run(ranks: int, command: Sequence[str], **options: object) -> tuple[int, str, str]:
    process = start(ranks, command, **options)
    try:
        out, err = process.communicate(timeout=60)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process.returncode, out, err


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def await_end(pids: Sequence[int]) -> None:
    until = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < until, f"still alive: {[p for p in pids if alive(p)]}"
        time.sleep(0.02)


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    assert process.stdout is not None
    return [int(process.stdout.readline()) for _ in range(count)]


@contextlib.contextmanager
def terminal(ranks: int, command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A launcher in the foreground of a terminal, and the terminal's other end."""
    ours, its = os.openpty()
    process = subprocess.Popen(
        arguments_of(ranks, command),
        stdin=its,
        stdout=its,
        stderr=its,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
    )
    os.close(its)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, text: str) -> str:
    news = select.poll()  # select() knows descriptors up to 1023 only
    news.register(terminal, select.POLLIN)
    seen = ""
    while text not in seen:
        assert news.poll(30_000), f"no {text!r} after {seen!r}"
        seen += os.read(terminal, 4096).decode()
    return seen


def join_script(folder: Path, prepare: str = "", arguments: str = "") -> str:
    path = folder / "join.py"
    path.write_text(
        JOIN.format(here=str(HERE), root=str(ROOT), prepare=prepare, arguments=arguments)
    )
    return str(path)


def program(name: str) -> str:
    """Next to this Python, or on PATH; skipped with the reason if there is none."""
    neighbour = Path(sys.executable).parent / name
    found = str(neighbour) if neighbour.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install -r tests/requirements.txt has it")
    return found


def expect_joined(command: Sequence[str], size: int, source: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if source in line)
    peers = [[p for p in range(size) if p != r] for r in range(size)]
    assert lines == [f"{r} {size} {source} {peers[r]}" for r in range(size)], done.stdout
