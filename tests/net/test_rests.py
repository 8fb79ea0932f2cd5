"""What a socket has to send is not held back behind what others have queued at the interface.

The kernel keeps the short rest of a long write until the packets before it have left the queue of
the interface. On a slow cable that is long enough to see: with a segment for each of two ranks in
the queue, the first one would be complete only when the second one is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "bench"))
import hosts

SCRIPT = """
import time
import numpy as np
import pycoll

comm = pycoll.init()
mine = np.zeros(65536, np.uint8)
comm.barrier()
for round in range(17):
    comm.barrier()
    began = time.monotonic()
    if comm.rank == 0:
        time.sleep(0.1)  # the token bucket fills
        began = time.monotonic()
        # The first one takes the tokens, so that the others queue.
        requests = [comm.isend(mine, peer, tag=round) for peer in (3, 1, 2)]
        for request in requests:
            request.wait()
        ended = began
    else:
        comm.recv(mine, 0, tag=round)
        ended = time.monotonic()
    times = comm.gather(np.array([began, ended]))
    if comm.rank == 0:
        times = times.reshape(4, 2)
        print(*(times[1:, 1] - times[0, 0]), flush=True)
"""


def _send_segments_at_once(world: hosts.Hosts, rank: int) -> None:
    """Lets a connection's first write go into the queue whole.

    A congestion window of ten packets divides a segment into several round trips, and segments of
    two ranks then mix in the queue whatever the sender does.
    """

    def on(*command: str) -> str:
        done = subprocess.run(world.on(rank, command), check=True, capture_output=True, text=True)
        return done.stdout

    on("sysctl", "-qw", "net.ipv4.tcp_slow_start_after_idle=0")
    for route in on("ip", "-4", "route", "show").splitlines():
        on("ip", "route", "change", *route.split(), "initcwnd", "100")


def test_a_segment_is_complete_before_the_next_one_of_another_peer() -> None:
    why = hosts.obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    # A segment takes 26 ms.
    with hosts.Hosts(4, hosts.Shape("20mbit", "80kb", "200ms")) as world:
        for rank in range(4):
            _send_segments_at_once(world, rank)
        ranks = [
            subprocess.Popen(
                world.on(rank, [sys.executable, "-c", SCRIPT]),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "PYCOLL_RANK": str(rank),
                    "PYCOLL_SIZE": "4",
                    "PYCOLL_ADDRESS": f"{world.addresses[0]}:4711",
                    "PYCOLL_SECRET": "between hosts of one machine",
                    "PYCOLL_TUNING": "off",
                },
                cwd=Path.home(),
            )
            for rank in range(4)
        ]
        said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    rounds = [[float(word) for word in line.split()] for line in said[0][0].splitlines()]
    assert len(rounds) == 17
    # Other work on the machine makes some rounds longer, and it cannot make any shorter.
    quartile = statistics.quantiles((first / second for first, second, _ in rounds[1:]), n=4)[0]
    assert quartile < 0.7, f"1 where rests are held back, else about 0.45: {rounds}"
