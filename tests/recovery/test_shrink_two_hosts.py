"""Two network namespaces are two hosts; ranks die, and the cable between the hosts is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from harness import ROOT
from two_namespaces import two_namespaces

SECRET = "correct horse battery staple"
SCRIPT = """
import os, signal, sys, time
import numpy as np
import pycoll

comm = pycoll.init(timeout_s=20)
comm.barrier()
what, stamp = sys.argv[1:]
if what == "kill" and comm.rank == 1:
    open(stamp, "w").write(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
if what == "cut" and comm.rank == 0:
    os.system("ip link set cable down")
begin = time.monotonic()
try:
    while True:
        comm.all_reduce(np.ones(100))
except (pycoll.PeerLostError, pycoll.TimeoutError):
    lost = time.monotonic()
try:
    smaller = comm.shrink(6)
except pycoll.LeftOutError as error:
    print(comm.rank, "left out:", error)
    raise SystemExit(3)
total = smaller.all_reduce(np.full(3, smaller.rank + 1)).tolist()
if what == "kill":
    begin = float(open(stamp).read())
seconds = time.monotonic() - begin
print(comm.rank, smaller.rank, smaller.size, total)
print(f"{seconds:.3f} s, of which {time.monotonic() - lost:.3f} s in shrink()", file=sys.stderr)
time.sleep(1)
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two hosts joined by a cable."""
    with two_namespaces("10.78.0") as names:
        yield names


def run(hosts: list[str], placed: tuple[int, ...], what: str, stamp: str) -> list[tuple[int, str]]:
    """Status and output of each rank; ``placed`` says on which host each one runs."""
    processes = []
    for rank, host in enumerate(placed):
        environment = os.environ | {
            "PYCOLL_RANK": str(rank),
            "PYCOLL_SIZE": str(len(placed)),
            "PYCOLL_ADDRESS": "10.78.0.1:4711",
            "PYCOLL_SECRET": SECRET,
            "PYCOLL_TUNING": "off",
            "PYTHONPATH": str(ROOT),
        }
        words = ["ip", "netns", "exec", hosts[host], sys.executable, "-c", SCRIPT, what, stamp]
        processes.append(
            subprocess.Popen(
                words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    found = []
    for process in processes:
        output, error = process.communicate(timeout=100)
        print(error.strip())
        found.append((process.returncode, output.strip()))
    return found


def test_a_rank_on_another_host_dies(hosts: list[str], tmp_path: object) -> None:
    found = run(hosts, (0, 1, 0, 1), "kill", f"{tmp_path}/stamp")
    assert found[1][0] == -9
    assert [found[rank] for rank in (0, 2, 3)] == [
        (0, f"{old} {new} 3 [6, 6, 6]") for new, old in enumerate((0, 2, 3))
    ]


def test_of_two_halves_the_one_with_the_lowest_rank_goes_on(
    hosts: list[str], tmp_path: object
) -> None:
    found = run(hosts, (0, 0, 1, 1), "cut", f"{tmp_path}/stamp")
    assert found[:2] == [(0, "0 0 2 [3, 3, 3]"), (0, "1 1 2 [3, 3, 3]")]
    for rank in (2, 3):
        assert found[rank][0] == 3
        assert "too few ranks" in found[rank][1]
        assert "no answer of ranks 0 and 1" in found[rank][1]
