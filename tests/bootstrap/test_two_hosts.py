"""Two network namespaces stand for two hosts, with addresses that mislead."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from joining import SECRET
from two_namespaces import ip, two_namespaces

HERE = Path(__file__).parents[1] / "support"
ROOT = HERE.parent.parent
SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}, {str(ROOT)!r}]
from joining import World
from pycoll.bootstrap import join
from pycoll.config import Config
with World() as world:
    joined = join(Config.read(), factories=world.factories)
    world.check()
    if "RAILS" in os.environ:
        tcp = [t for t in joined.transports if hasattr(t, "addresses")]
        sockets = [s for t in tcp for peer in t.addresses for s in t.peers[peer]]
        nets = [s.getpeername()[0].removeprefix("::ffff:").rpartition(".")[0] for s in sockets]
        os.write(1, f"{{joined.rank}} {{' '.join(nets)}}\\n".encode())
        raise SystemExit
    ways = [f"{{type(t).__name__}}{{sorted(t.peers)}}" for t in joined.transports]
    os.write(1, f"{{joined.rank}} {{joined.hosts}} {{' '.join(ways)}}\\n".encode())
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    """Two hosts joined by a cable; ranks 0 and 1 go to the first, 2 and 3 to the second."""
    with two_namespaces("10.77.0") as names:
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"fd77::{number}/64", "dev", "cable", "nodad")
            # Both believe to be in one network here, but no cable connects them.
            ip("-n", name, "link", "add", "aaa", "type", "veth", "peer", "name", "end")
            ip("-n", name, "addr", "add", f"10.66.0.{number}/24", "dev", "aaa")
            # Like a container bridge: the same address on every host.
            ip("-n", name, "addr", "add", "172.17.0.1/16", "dev", "aaa")
            for device in ("aaa", "end"):
                ip("-n", name, "link", "set", device, "up")
        yield names


def run(hosts: list[str], address: str, **variables: str) -> tuple[list[str], list[str], float]:
    """Sorted outputs, error texts and seconds of four ranks."""
    started = time.monotonic()
    processes = []
    for rank in range(4):
        environment = os.environ | {
            "PYCOLL_RANK": str(rank),
            "PYCOLL_SIZE": "4",
            "PYCOLL_ADDRESS": address,
            "PYCOLL_SECRET": SECRET,
            "PYCOLL_INIT_TIMEOUT_S": "20",
        }
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", hosts[rank // 2], sys.executable, "-c", SCRIPT],
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [process.communicate(timeout=60) for process in processes]
    outputs = sorted(out for out, _ in ended)
    return outputs, [err for _, err in ended], time.monotonic() - started


@pytest.mark.parametrize("address", ["10.77.0.1:4711", "[fd77::1]:4712"])
def test_ranks_of_two_hosts_find_the_cable(hosts: list[str], address: str) -> None:
    outputs, texts, seconds = run(hosts, address)
    assert outputs == [
        "0 [0, 0, 1, 1] FakeShm[1] FakeTcp[2, 3]\n",
        "1 [0, 0, 1, 1] FakeShm[0] FakeTcp[2, 3]\n",
        "2 [0, 0, 1, 1] FakeShm[3] FakeTcp[0, 1]\n",
        "3 [0, 0, 1, 1] FakeShm[2] FakeTcp[0, 1]\n",
    ], texts
    # The dead network and the living one are probed together, which costs some milliseconds a peer.
    assert seconds < 10


def test_a_dead_network_alone_is_reported_with_each_address(hosts: list[str]) -> None:
    outputs, texts, seconds = run(
        hosts, "10.77.0.1:4713", PYCOLL_INTERFACES="aaa", PYCOLL_INIT_TIMEOUT_S="6"
    )
    assert outputs == [""] * 4
    assert seconds < 15
    for text in texts:
        assert "TransportError: rank 2 (" in text
        assert "cannot reach rank 0 (" in text
        # Ranks of one host reach each other, those of the other host do not.
        assert text.rstrip().endswith("\n 0   + - -\n 1 +   - -\n 2 - -   +\n 3 - - +"), text
    assert any("10.66.0.1:" in text for text in texts), texts


def test_loopback_alone_leads_nowhere(hosts: list[str]) -> None:
    outputs, texts, seconds = run(hosts, "10.77.0.1:4714", PYCOLL_INTERFACES="lo")
    assert outputs == [""] * 4
    assert seconds < 10, "told at once, not at the deadline"
    for text in texts:
        assert "over tcp: it offers 127.0.0.1:" in text
        assert "which leads nowhere from another host" in text


def test_two_cables_are_used_together(hosts: list[str]) -> None:
    for number, name in enumerate(hosts, 1):
        if number == 1:
            ip("link", "add", "second", "netns", name, "type", "veth", "peer", "name", "second",
               "netns", hosts[1])  # fmt: skip
        ip("-n", name, "addr", "add", f"10.88.0.{number}/24", "dev", "second")
        ip("-n", name, "link", "set", "second", "up")
    try:
        outputs, texts, _ = run(hosts, "10.77.0.1:4715", RAILS="1", PYCOLL_TCP_SOCKETS="4")
        for rank, line in enumerate(outputs):
            number, *networks = line.split()
            assert int(number) == rank, texts
            # Two peers on the other host, with four sockets each, in turns over both cables.
            assert len(networks) == 8, texts
            assert networks[:4] in (["10.77.0", "10.88.0"] * 2, ["10.88.0", "10.77.0"] * 2)
        outputs, texts, _ = run(hosts, "10.77.0.1:4716", RAILS="1", PYCOLL_INTERFACES="second,aaa")
        assert {net for line in outputs for net in line.split()[1:]} == {"10.88.0"}, texts
    finally:
        ip("-n", hosts[0], "link", "del", "second")
