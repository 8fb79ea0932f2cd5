"""Two hosts with two cables between them: both carry, and a lost one is called by its name."""

from __future__ import annotations

import json
import os
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

SCRIPT = """
import json, os, sys
import numpy as np
import pycoll

def tell(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())

pycoll.init()
comm = pycoll.world()
way, algorithm, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
wrong = 0
try:
    for turn in range(4 if way == "count" else 10**9):
        x = np.arange(count, dtype=np.float32) % 1001 + comm.rank + turn
        comm.all_reduce(x, out=x, algorithm=algorithm)
        wrong += int(np.count_nonzero(x != np.arange(count) % 1001 * 2 + 1 + 2 * turn))
        if way == "cut" and turn == 2:
            tell(ready=comm.rank)
            count = 1024
except pycoll.PycollError as error:
    tell(kind=type(error).__name__, text=str(error))
tell(wrong=wrong)
"""


@pytest.fixture(scope="module")
def world() -> Iterator[hosts.Hosts]:
    why = hosts.obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    with hosts.Hosts(2) as made:
        spaces = [made.space(number) for number in range(2)]
        subprocess.run(
            ["ip", "link", "add", "second", "netns", spaces[0], "type", "veth", "peer", "name",
             "second", "netns", spaces[1]], check=True,
        )  # fmt: skip
        for number, space in enumerate(spaces, 1):
            for words in (
                ("addr", "add", f"10.79.0.{number}/24", "dev", "second"),
                ("link", "set", "second", "up"),
            ):
                subprocess.run(["ip", "-n", space, *words], check=True)
        yield made


def sent(world: hosts.Hosts, device: str) -> int:
    shown = subprocess.run(
        ["ip", "-n", world.space(0), "-s", "-j", "link", "show", "dev", device],
        check=True,
        capture_output=True,
    )
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])


def start(world: hosts.Hosts, *words: str, **variables: str) -> list[subprocess.Popen[str]]:
    port = 4800 + time.monotonic_ns() % 1000
    joined = {"PYCOLL_SIZE": "2", "PYCOLL_SECRET": SECRET} | variables
    joined["PYCOLL_ADDRESS"] = f"{world.addresses[0]}:{port}"
    return [
        subprocess.Popen(
            world.on(rank, [sys.executable, "-c", SCRIPT, *words]),
            env=os.environ | joined | {"PYCOLL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def told(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=60)
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.parametrize(("algorithm", "sockets"), [("ring", 2), ("direct", 4)])
def test_a_plan_of_one_lane_fills_both_cables(
    world: hosts.Hosts, algorithm: str, sockets: int
) -> None:
    before = {device: sent(world, device) for device in (hosts.DEVICE, "second")}
    ranks = start(world, "count", algorithm, str(1 << 20), PYCOLL_TCP_SOCKETS=str(sockets))
    assert [told(rank) for rank in ranks] == [[{"wrong": 0}]] * 2
    bytes_of = {device: sent(world, device) - was for device, was in before.items()}
    # Four calls over 4 MiB: half of the array goes out twice, or all of it once.
    assert sum(bytes_of.values()) > 4 * (4 << 20), bytes_of
    share = bytes_of["second"] / sum(bytes_of.values())
    assert 0.4 < share < 0.6, bytes_of


@pytest.mark.parametrize(("lost", "kept"), [("10.79.0.", "10.78.0."), ("10.78.0.", "10.79.0.")])
def test_a_lost_cable_is_named(world: hosts.Hosts, lost: str, kept: str) -> None:
    device = "second" if lost == "10.79.0." else hosts.DEVICE
    ranks = start(world, "cut", "ring", str(1 << 18))
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert "ready" in json.loads(rank.stdout.readline())
        subprocess.run(["ip", "-n", world.space(1), "link", "set", device, "down"], check=True)
        facts = [told(rank)[0] for rank in ranks]
        assert [fact["kind"] for fact in facts] == ["PeerLostError"] * 2, facts
        # Who is first gives up the link, which the other one sees on the cable that is left.
        named = [fact["text"] for fact in facts if "lost another rail" not in fact["text"]]
        assert named, facts
        for text in named:
            assert lost in text and "(here " + lost in text and kept not in text, facts
    finally:
        for rank in ranks:
            rank.kill()
        subprocess.run(["ip", "-n", world.space(1), "link", "set", device, "up"], check=True)
