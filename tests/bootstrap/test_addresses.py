"""Hosts with awkward addresses: a name that means 127.0.1.1 at home, IPv6 alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from joining import SECRET

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "bench"))
import hosts

SCRIPT = """
import os
import numpy as np
import pycoll
pycoll.init()
comm = pycoll.world()
x = comm.all_reduce(np.full(100000, comm.rank + 1.0))
os.write(1, f"{comm.rank} {x[0]:g} {x[-1]:g}\\n".encode())
"""


@pytest.fixture
def world() -> Iterator[hosts.Hosts]:
    why = hosts.obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    with hosts.Hosts(3, misnamed=True) as made:
        yield made


def run(world: hosts.Hosts, address: str, **variables: str) -> None:
    """A rank on each host; they must find each other and add up."""
    processes = []
    for rank in range(3):
        environment = os.environ | {
            "PYCOLL_RANK": str(rank),
            "PYCOLL_SIZE": "3",
            "PYCOLL_ADDRESS": address,
            "PYCOLL_SECRET": SECRET,
            "PYCOLL_INIT_TIMEOUT_S": "30",
        }
        processes.append(
            subprocess.Popen(
                world.on(rank, [sys.executable, "-c", SCRIPT]),
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=90) for process in processes]
    assert [out for out, _ in ended] == [f"{rank} 6 6\n" for rank in range(3)], ended


def test_a_name_that_means_127_0_1_1_at_home_is_no_obstacle(world: hosts.Hosts) -> None:
    shown = subprocess.run(world.on(0, ["cat", "/etc/hosts"]), capture_output=True, check=True)
    assert b"127.0.1.1 host0" in shown.stdout
    run(world, "host0:4801")


def test_ipv6_alone_is_enough(world: hosts.Hosts) -> None:
    for number in range(3):
        ip = ("ip", "-n", world.space(number), "addr")
        subprocess.run([*ip, "flush", "dev", hosts.DEVICE], check=True)
        address = (f"fd78::{number + 1}/64", "dev", hosts.DEVICE, "nodad")
        subprocess.run([*ip, "add", *address], check=True)
    run(world, "[fd78::1]:4802")
