"""Joining as real processes: their death is seen, Ctrl-C ends the wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import free_port
from joining import (
    SECRET,
)

pytestmark = pytest.mark.usefixtures("nothing_is_left")


RANK_SCRIPT = """
import os, sys, time
sys.path[:0] = {paths!r}
from joining import World
from pycoll.bootstrap import join
from pycoll.config import Config
world = World()
joined = join(Config.read(), factories=world.factories)
print(joined.rank, flush=True)
transport = world.made[0]
segment, doorbell, liveness, pid = transport.peers[1 - joined.rank]
assert os.pread(segment, 4, 0) == (1 - joined.rank).to_bytes(4, "little")
if joined.rank == 1:
    time.sleep(60)
assert os.read(0, 1) == b"k"
os.kill(pid, 9)
os.set_blocking(liveness, True)
print("end of file" if os.read(liveness, 1) == b"" else "bytes", flush=True)
"""


def one_line(process: subprocess.Popen[str]) -> str:
    """What `process` printed first; its death ends the wait."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_the_death_of_a_process_ends_its_liveness_socket() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    paths = [os.path.join(root, "tests", "support"), root]
    environment = {
        **os.environ,
        "PYCOLL_SIZE": "2",
        "PYCOLL_ADDRESS": f"127.0.0.1:{free_port()}",
        "PYCOLL_SECRET": SECRET,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_SCRIPT.format(paths=paths)],
            env={**environment, "PYCOLL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ready = [one_line(process) for process in processes]  # rank 1 too, before rank 0 kills it
        killer, _ = processes[0].communicate("k", timeout=30)
        processes[1].wait(timeout=30)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert ready == ["0\n", "1\n"]
    assert killer == "end of file\n"
    assert processes[1].returncode == -signal.SIGKILL


WAITING = """
import sys
sys.path.insert(0, {root!r})
from pycoll.bootstrap import join
from pycoll.config import Config
print("waiting", flush=True)
join(Config.read())
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_stops_a_rank_that_waits_to_join(rank: int) -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(root=root)],
        env={
            **os.environ,
            "PYCOLL_RANK": str(rank),
            "PYCOLL_SIZE": "2",
            "PYCOLL_ADDRESS": f"127.0.0.1:{free_port()}",
            "PYCOLL_SECRET": SECRET,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.3)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert time.monotonic() - started < 10
    assert err.rstrip().endswith("KeyboardInterrupt")
