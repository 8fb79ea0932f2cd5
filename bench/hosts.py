"""Emulated hosts: network namespaces of one machine, joined by virtual cables of any rate.

Two hosts are joined by one cable, more hosts by a bridge in its own namespace. Each host has its
own name (host0, host1, ...), one interface `eth0`, and resolves the others' names. The module needs
root and the commands ip, tc and unshare.

A guard process ends all processes on the hosts and removes the hosts when the program that made
them ends, also if that is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DEVICE = "eth0"
_NETWORK = "10.78.0."
_TOOLS = ("ip", "tc", "unshare")
#: Removes the namespaces that its arguments name once its input ends. It first ends their
#: processes: a process that outlives its namespace's name would keep the cables.
_GUARD = """
read -r line
for name in "$@"; do
  for process in $(ip netns pids "$name" 2>/dev/null); do kill -9 "$process"; done
  ip netns del "$name" 2>/dev/null
  rm -rf "/etc/netns/$name"
done
rmdir /etc/netns 2>/dev/null
true
"""
#: Most seconds until the kernel reports that the cables are connected.
_LINK_S = 5.0
#: Bytes of a packet before its first byte of a stream: Ethernet, IPv4 and TCP with timestamps.
PACKET_HEADER_BYTES = 14 + 20 + 32


@dataclass(frozen=True)
class Shape:
    """A token bucket at both ends of every cable, with the parameters of tc."""

    rate: str
    burst: str
    latency: str = "5ms"
    bytes_per_s: float = 0.0


TEN_GIGABIT = Shape("10gbit", "4mb", bytes_per_s=10e9 / 8)
#: The bucket holds few packets, so that the rate limits short messages too.
ONE_GIGABIT = Shape("1gbit", "128kb", bytes_per_s=1e9 / 8)


def obstacle() -> str:
    """Return the reason why hosts cannot be made here, or an empty text."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no command {missing[0]} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    name = f"pycoll-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


class Hosts:
    """``count`` hosts, which exist within this context manager.

    ``misnamed``: each host resolves its own name to 127.0.1.1, as on Debian.
    """

    def __init__(self, count: int, shape: Shape | None = None, *, misnamed: bool = False) -> None:
        self._prefix = f"pycoll-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
        self._shape = shape
        self._misnamed = misnamed
        self._guard: subprocess.Popen[bytes] | None = None
        self.names = [f"host{number}" for number in range(count)]
        self.addresses = [f"{_NETWORK}{number + 1}" for number in range(count)]

    def __enter__(self) -> Hosts:
        spaces = [*map(self.space, range(len(self.names))), self._switch]
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", *spaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()

    def space(self, host: int) -> str:
        """Return the name of the host's namespace."""
        return f"{self._prefix}-{host}"

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-switch"

    def on(self, host: int, line: Sequence[str]) -> list[str]:
        """Return the command line that runs ``line`` on the host."""
        named = 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"'
        space = ("ip", "netns", "exec", self.space(host))
        return [*space, "unshare", "--uts", "sh", "-c", named, self.names[host], *line]

    def write_agent(self, path: Path) -> None:
        """Write a replacement of ssh for launchers: called as NAME COMMAND..., it runs the command
        on the host of that name."""
        cases = [
            f'{name}|{address}) exec {" ".join(map(_quoted, self.on(number, ["sh", "-c"])))} "$*";;'
            for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True))
        ]
        lines = ["#!/bin/sh", "host=$1; shift", 'case "$host" in', *cases, "esac", "exit 1", ""]
        path.write_text("\n".join(lines))
        path.chmod(0o755)

    def sent(self, host: int) -> int:
        """Return the bytes of TCP streams that have left the host, retransmitted ones included."""
        shown = _run("ip", "-n", self.space(host), "-s", "-j", "link", "show", "dev", DEVICE)
        counters = json.loads(shown)[0]["stats64"]["tx"]
        return int(counters["bytes"]) - PACKET_HEADER_BYTES * int(counters["packets"])

    def set_link(self, host: int, up: bool) -> None:
        """Pull the host's cable, or plug it in again. No process gets a notification."""
        state = "up" if up else "down"
        _run("ip", "-n", self.space(host), "link", "set", DEVICE, state)

    def _make(self) -> None:
        for number in range(len(self.names)):
            self._add_space(self.space(number))
            self._write_names(number)
        if len(self.names) == 2:
            self._cable(self.space(0), DEVICE, self.space(1), DEVICE)
        else:
            self._add_space(self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for number in range(len(self.names)):
                port = f"port{number}"
                self._cable(self.space(number), DEVICE, self._switch, port)
                _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        for number, address in enumerate(self.addresses):
            space = self.space(number)
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", space, "link", "set", DEVICE, "up")
        self._await_links()

    def _await_links(self) -> None:
        """Wait until the kernel reports the cables as connected, which it does with a delay. Some
        libraries check the interface only once."""
        ends = time.monotonic() + _LINK_S
        for number in range(len(self.names)):
            line = ("ip", "-n", self.space(number), "-j", "link", "show", "dev", DEVICE)
            while json.loads(_run(*line))[0]["operstate"] != "UP" and time.monotonic() < ends:
                time.sleep(0.05)

    @staticmethod
    def _add_space(name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _cable(self, one: str, one_device: str, other: str, other_device: str) -> None:
        ends = ("peer", "name", other_device, "netns", other)
        _run("ip", "link", "add", one_device, "netns", one, "type", "veth", *ends)
        if self._shape is None:
            return
        bucket = ("rate", self._shape.rate, "burst", self._shape.burst)
        for space, device in ((one, one_device), (other, other_device)):
            line = ("tc", "-n", space, "qdisc", "add", "dev", device, "root", "tbf", *bucket)
            _run(*line, "latency", self._shape.latency)

    def _write_names(self, host: int) -> None:
        lines = ["127.0.0.1 localhost"]
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            here = number == host and self._misnamed
            lines.append(f"{'127.0.1.1' if here else address} {name}")
        folder = Path("/etc/netns") / self.space(host)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(lines) + "\n")


class Wire:
    """The rate of iperf3 over the cable of two hosts, in both directions at once, with cubic as
    congestion control, which pycoll uses too."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self.samples: list[float] = []

    def sample(self) -> None:
        """Add a sample of one second, unless iperf3 is missing or fails."""
        if shutil.which("iperf3") is None:
            return
        server = subprocess.Popen(
            self._hosts.on(1, ["iperf3", "-s", "-1"]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            rate = self._ask()
            if rate is not None:
                self.samples.append(rate)
        finally:
            server.kill()
            server.wait()

    def _ask(self) -> float | None:
        line = ["iperf3", "-c", self._hosts.addresses[1], "-J", "-t", "1", "--bidir", "-C", "cubic"]
        for _ in range(20):  # until the server listens
            done = subprocess.run(
                self._hosts.on(0, line), capture_output=True, text=True, check=False, timeout=30
            )
            end = json.loads(done.stdout or "{}").get("end", {})
            if "sum_received_bidir_reverse" in end:
                ways = (end["sum_received"], end["sum_received_bidir_reverse"])
                return float(sum(way["bits_per_second"] for way in ways) / 16)
            time.sleep(0.05)
        return None

    @property
    def median(self) -> float | None:
        """Return bytes per second in each direction; None if iperf3 gave no result."""
        return statistics.median(self.samples) if self.samples else None


def _run(*line: str) -> str:
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(line)}: {done.stderr.strip()}")
    return done.stdout


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
