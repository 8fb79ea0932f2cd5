"""The programs of the guide about staying alive print what the guide says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from harness import ROOT

GUIDE = (ROOT / "docs" / "guides" / "staying-alive.md").read_text()


def run(folder: Path, number: int, *options: str) -> tuple[int, list[str], str]:
    program = folder / "program.py"
    program.write_text(re.findall(r"```python\n(.*?)```", GUIDE, re.S)[number])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", *options, str(program)],
        env=environment | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


def test_the_survivors_go_on(tmp_path: Path) -> None:
    status, said, errors = run(tmp_path, 0, "-n", "4", "--tolerate", "1")
    shown = [line for line in GUIDE.splitlines() if line.startswith("rank ")]
    assert said == shown[:3], errors
    assert status == 0
    assert "was killed by signal 9 (SIGKILL), and the others go on" in errors
    assert errors.endswith("pycoll run: the job has ended without rank 2\n")


def test_without_tolerance_the_launcher_fails(tmp_path: Path) -> None:
    status, _, errors = run(tmp_path, 0, "-n", "4")
    assert status == 137
    assert "others go on" not in errors


def test_a_new_rank_comes(tmp_path: Path) -> None:
    status, said, errors = run(tmp_path, 1, "-n", "2")
    assert said[:2] == ["rank 0 of 3", "rank 1 of 3"], errors
    assert status == 0
