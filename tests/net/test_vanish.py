"""Hosts that vanish without a word, half-open connections, peers that stand still.

Three hosts with one rank each; something happens to the third, and both survivors must say so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joining import SECRET

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
import hosts

#: What is promised for a vanished host, and what a loaded machine may add.
BOUND_S, SLACK_S = 5.0, 4.0
SCRIPT = """
import json, os, sys, time
import numpy as np
import pycoll

def tell(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

pycoll.init()
comm = pycoll.world()
way = sys.argv[1]
x = np.ones(int(sys.argv[2]), np.float32)
comm.all_reduce(x, out=x)
tell(ready=comm.rank)
try:
    if way == "busy":
        while True:
            comm.all_reduce(x, out=x)
    if comm.rank == 2:
        time.sleep(60)
    comm.barrier()
except pycoll.PycollError as error:
    tell(kind=type(error).__name__, rank=error.rank, ranks=error.ranks, text=str(error))
"""


@pytest.fixture(scope="module")
def world() -> Iterator[hosts.Hosts]:
    why = hosts.obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    with hosts.Hosts(3) as made:
        yield made


class Ranks:
    """One rank on each host, running SCRIPT."""

    def __init__(self, world: hosts.Hosts, way: str, count: int, **variables: str) -> None:
        self.processes = []
        port = 4800 + time.monotonic_ns() % 1000
        for rank in range(3):
            environment = os.environ | {
                "PYCOLL_RANK": str(rank),
                "PYCOLL_SIZE": "3",
                "PYCOLL_ADDRESS": f"{world.addresses[0]}:{port}",
                "PYCOLL_SECRET": SECRET,
            }
            line = world.on(rank, [sys.executable, "-c", SCRIPT, way, str(count)])
            self.processes.append(
                subprocess.Popen(line, env=environment | variables, stdout=subprocess.PIPE)
            )

    def read(self, rank: int) -> dict[str, Any]:
        """The next thing that it tells."""
        pipe = self.processes[rank].stdout
        assert pipe is not None
        return dict(json.loads(pipe.readline()))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@contextlib.contextmanager
def ranks(world: hosts.Hosts, way: str, count: int, **variables: str) -> Iterator[Ranks]:
    running = Ranks(world, way, count, **variables)
    try:
        for rank in range(3):
            assert running.read(rank) == {"ready": rank}
        time.sleep(0.5)
        yield running
    finally:
        running.close()


@pytest.mark.parametrize(("way", "count"), [("idle", 1), ("busy", 1), ("busy", 1 << 20)])
def test_a_vanished_host_is_lost_to_all_in_bounded_time(
    world: hosts.Hosts, way: str, count: int
) -> None:
    with ranks(world, way, count) as running:
        begin = time.monotonic()
        world.set_link(2, False)
        try:
            told = [running.read(rank) for rank in (0, 1)]
            seconds = time.monotonic() - begin
        finally:
            world.set_link(2, True)
    for one in told:
        assert (one["kind"], one["rank"]) == ("PeerLostError", 2), one
    assert seconds < BOUND_S + SLACK_S, told


def test_a_host_that_comes_back_without_its_process_is_lost(world: hosts.Hosts) -> None:
    with ranks(world, "idle", 1) as running:
        world.set_link(2, False)
        running.processes[2].kill()  # the cable is out: nobody hears of it
        running.processes[2].wait()
        time.sleep(0.5)
        begin = time.monotonic()
        world.set_link(2, True)
        told = [running.read(rank) for rank in (0, 1)]
        assert time.monotonic() - begin < BOUND_S + SLACK_S
    for one in told:
        assert (one["kind"], one["rank"]) == ("PeerLostError", 2), one


@pytest.mark.parametrize(("way", "count"), [("idle", 1), ("busy", 1 << 20)])
def test_a_peer_that_stands_still_is_a_timeout_and_not_a_loss(
    world: hosts.Hosts, way: str, count: int
) -> None:
    with ranks(world, way, count, PYCOLL_TIMEOUT_S="8") as running:
        begin = time.monotonic()
        running.processes[2].send_signal(signal.SIGSTOP)
        told = [running.read(rank) for rank in (0, 1)]
        seconds = time.monotonic() - begin
        running.processes[2].send_signal(signal.SIGCONT)
    for one in told:
        assert one["kind"] == "TimeoutError", one
        assert one["ranks"] == [2], one
    # Its kernel answers for longer than a vanished host would be waited for.
    # The others have a second to answer.
    assert 7 < seconds < 9 + SLACK_S, told
