"""The soak of tests/soak.py: in two minutes all that fits, up to 100,000 operations."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import soak
from harness import ProcessWorld, succeeded

OPERATIONS = 50_000
SECONDS = 45.0


@pytest.mark.parametrize(("transports", "ranks"), [("shm", 2), ("tcp", 3)])
def test_soak(transports: str, ranks: int, capsys: Any) -> None:
    """A seed of its own for every run, which it tells; TEST_SEED repeats one."""
    seed = int(os.environ.get("TEST_SEED", "0")) or time.time_ns() % (1 << 32)
    world = ProcessWorld(ranks, soak.soak, seed, OPERATIONS, SECONDS, transports=transports)
    found = succeeded(world.outcomes())
    assert len({done.operations for done in found}) == 1
    with capsys.disabled():
        print(f"\nsoak: {ranks} ranks over {transports}, seed {seed}: {soak.text(found[0])}")
    assert found[0].operations > 500


def test_soak_by_hand() -> None:
    """`make soak` runs the file as a program, without the paths that pytest adds."""
    command = [sys.executable, "soak.py", "--operations", "2000", "--seconds", "60"]
    done = subprocess.run(
        command,
        cwd=Path(soak.__file__).parent,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all exact") == 2, done.stdout
