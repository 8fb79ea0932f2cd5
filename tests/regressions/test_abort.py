"""A rank that could not go on had no way to end the job: the others waited for their deadlines."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ProcessWorld, world_in_threads

import pycoll


def aborting(comm: pycoll.Communicator, where: str) -> Any:
    """Rank 1 aborts; the others are in a collective, in a part, in a recv, or compute."""
    part = comm.split(0)
    assert part is not None
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.3)
        print("said before", flush=False)
        comm.abort("the input is empty", code=7)
    begin = time.monotonic()
    try:
        if where == "idle":
            time.sleep(1)
            begin = time.monotonic()
        if where == "recv":
            comm.recv(bytearray(8), 1)
        (part if where == "part" else comm).barrier()
    except pycoll.PeerLostError as error:
        return error.rank, str(error), time.monotonic() - begin
    return None


@pytest.mark.parametrize("transports", ["shm", "tcp"])
@pytest.mark.parametrize("where", ["collective", "part", "recv", "idle"])
def test_all_others_raise_by_name_within_two_seconds(transports: str, where: str) -> None:
    world = ProcessWorld(3, aborting, where, transports=transports)
    found = world.outcomes()
    assert world.processes[1].returncode == 7
    assert "status 7" in str(found[1]) and "said before" in str(found[1])
    assert "pycoll: rank 1 of world called abort(7) the input is empty" in str(found[1])
    for rank in (0, 2):
        culprit, text, seconds = found[rank]
        assert culprit == 1 and "it called abort(7): the input is empty" in text
        assert seconds < 2.3  # 2 s are promised, from the abort 0.3 s later on


def test_the_launcher_ends_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import pycoll\n"
        "comm = pycoll.init()\n"
        "comm.barrier()\n"
        "if comm.rank == 1:\n"
        "    pycoll.abort(9)\n"
        "import time\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "2", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 9, done.stderr
    assert "called abort(9)" in done.stderr


@pytest.mark.parametrize("code", [0, 256, -1, "1", True, None])
def test_codes_that_say_success_or_nothing_are_refused(code: Any) -> None:
    comm = world_in_threads(1).communicators[0]
    with pytest.raises(pycoll.InvalidArgumentError, match=r"code is .*from 1 to 255"):
        comm.abort(code=code)


@pytest.mark.parametrize("code", [0, 256, True, None, 1.5])
def test_what_is_no_reason_counts_as_a_code(code: Any) -> None:
    comm = world_in_threads(1).communicators[0]
    with pytest.raises(pycoll.InvalidArgumentError, match=r"code is .*from 1 to 255"):
        comm.abort(code, "why")
