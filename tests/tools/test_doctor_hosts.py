"""pycoll doctor over hosts made of network namespaces, with what users' networks do wrong."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import free_port

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import hosts  # noqa: E402

SECRET = "a secret of the tests"
#: A doctor starts, probes for 5 s where nothing answers, and the machine is loaded.
BOUND_S = 40.0
DOCTOR = (sys.executable, "-m", "pycoll", "doctor")
OTHER_VERSION = (
    "import pycoll; pycoll.__version__ = '9.8.7'; "
    "from pycoll.tools.doctor.probe_agent import main; raise SystemExit(main())"
)
#: SO_ATTACH_FILTER with the one instruction "keep 0 bytes".
DROPS = """
import ctypes, struct
from pycoll.tools.doctor import responder
from pycoll.tools.doctor.probe_agent import main
real = responder.listen_in_range
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
def listen(*words):
    listener = real(*words)
    listener.setsockopt(1, 26, struct.pack("HL", 1, ctypes.addressof(code)))
    return listener
responder.listen_in_range = listen
raise SystemExit(main())
"""


@contextlib.contextmanager
def made(count: int, folder: Path, **words: Any) -> Iterator[hosts.Hosts]:
    """Hosts that the command ``ssh`` in ``folder`` reaches by their names."""
    why = hosts.obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    with hosts.Hosts(count, **words) as world:
        lines = [" ".join(map(_quoted, world.on(at, ["sh", "-c"]))) for at in range(count)]
        cases = [
            f'{name}) exec {line} "$line";;' for name, line in zip(world.names, lines, strict=True)
        ]
        script = 'for word in "$@"; do host=$line; line=$word; done'
        ssh = folder / "ssh"
        refuse = "*) echo 'Could not resolve hostname' >&2; exit 255;;"
        text = ["#!/bin/sh", script, 'case "$host" in', *cases, refuse, "esac", ""]
        ssh.write_text("\n".join(text))
        ssh.chmod(0o755)
        yield world


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def environment(folder: Path, **changes: str) -> Mapping[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYCOLL_")}
    path = f"{folder}{os.pathsep}{clean['PATH']}"
    return {**clean, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "300", **changes}


def ask(
    world: hosts.Hosts, folder: Path, words: Sequence[str], **changes: str
) -> tuple[int, dict[str, Any]]:
    """Run the doctor on the first host; returns its status and what it says as JSON."""
    began = time.monotonic()
    done = subprocess.run(
        world.on(0, [*DOCTOR, "--json", "--start-timeout", "60", *words]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(folder, **changes),
    )
    assert time.monotonic() - began < BOUND_S
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def said(report: Mapping[str, Any], check: str) -> list[tuple[str, str, str]]:
    """Severity, host and text of each finding of a check."""
    found = [one for one in report["findings"] if one["check"] == check]
    assert all(one["to_do"] for one in found)
    return [(one["severity"], one["host"], one["what"]) for one in found]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def world(folder: Path) -> Iterator[hosts.Hosts]:
    with made(2, folder) as found:
        yield found


def test_hosts_with_which_nothing_is_wrong(world: hosts.Hosts, folder: Path) -> None:
    status, report = ask(world, folder, ["-H", "host0,host1"])
    assert (status, report["wrong"]) == (0, False), report["findings"]
    ways = {(one["source"], one["target"], one["via"], one["device"]) for one in report["links"]}
    assert ways == {("host0", "host1", "eth0", "eth0"), ("host1", "host0", "eth0", "eth0")}
    for link in report["links"]:
        assert link["failure"] == ""
        assert 0 < link["round_trip_s"] < 1 and link["rate"] > 1e6
        assert abs(link["clock_s"]) < 0.4, "both have the clock of this machine"
    assert "token" not in report["hosts"][0]


def test_a_report_for_people(world: hosts.Hosts, folder: Path) -> None:
    done = subprocess.run(
        world.on(0, [*DOCTOR, "-H", "host0,host1"]),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=environment(folder),
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:3] == ["host", "pycoll", "Python"]
    (way,) = [line.split() for line in lines if line.startswith("host0  host1")]
    assert way[2:5] == ["10.78.0.2", "eth0", "eth0"] and way[6] == "us"
    assert lines[-1] == "nothing is wrong"


def test_an_interface_that_goes_nowhere(world: hosts.Hosts, folder: Path) -> None:
    """Both hosts believe to be in one network there, but no cable connects them."""
    for at in range(2):
        space = world.space(at)
        ip("-n", space, "link", "add", "aaa", "type", "veth", "peer", "name", "end")
        ip("-n", space, "addr", "add", f"10.66.0.{at + 1}/24", "dev", "aaa")
        ip("-n", space, "link", "set", "aaa", "up")
        ip("-n", space, "link", "set", "end", "up")
    try:
        status, report = ask(world, folder, ["-H", "host0,host1"])
        alone = ask(world, folder, ["-H", "host0,host1", "--network-interfaces", "aaa"])
    finally:
        for at in range(2):
            ip("-n", world.space(at), "link", "del", "aaa")
    assert status == 1
    assert said(report, "reach") == [
        (
            "warning",
            f"host{at}",
            f"does not reach host{1 - at} by 10.66.0.{2 - at} on aaa from aaa: no machine answers "
            "for this address",
        )
        for at in range(2)
    ]
    assert "PYCOLL_INTERFACES=eth0" in report["findings"][0]["to_do"]
    assert alone[0] == 1
    assert said(alone[1], "reach")[0] == (
        "error",
        "host0",
        "does not reach host1: no machine answers for this address (10.66.0.2 on aaa from aaa)",
    )


def there(folder: Path, target: Path, code: str) -> None:
    """Make a command ``ssh`` in ``target`` that runs ``code`` as the doctor of host1."""
    line = f"exec {sys.executable} -c {_quoted(code)}"
    ssh = target / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {folder / 'ssh'} host1 {_quoted(line)}\n")
    ssh.chmod(0o755)


def test_a_port_that_a_firewall_drops(world: hosts.Hosts, folder: Path, tmp_path: Path) -> None:
    """The kernel of host1 drops every packet to the doctor's port, by a filter of no bytes."""
    there(folder, tmp_path, DROPS)
    status, report = ask(world, tmp_path, ["-H", "host0,host1"])
    (one,) = [host for host in report["hosts"] if host["label"] == "host1"]
    assert status == 1
    assert said(report, "reach") == [
        (
            "error",
            "host0",
            f"does not reach host1: a firewall drops TCP to port {one['port']}, and lets other "
            "ports through (10.78.0.2 on eth0 from eth0)",
        )
    ]
    assert [link["failure"] for link in report["links"]] == ["no answer", ""]


def test_a_host_behind_a_route_that_swallows_packets(tmp_path: Path) -> None:
    with made(2, tmp_path) as world:
        ip("-n", world.space(1), "route", "add", "blackhole", f"{world.addresses[0]}/32")
        status, report = ask(world, tmp_path, ["-H", "host0,host1"])
        assert status == 1
        found = said(report, "reach")
        assert ("error", "host0", "does not reach host1: nothing answers (10.78.0.2 on eth0 from "
                "eth0)") in found  # fmt: skip
        assert [host for _, host, _ in found] == ["host0", "host1"]


def test_a_name_that_means_the_host_itself(tmp_path: Path) -> None:
    with made(2, tmp_path, misnamed=True) as world:
        status, report = ask(world, tmp_path, ["-H", "host0,host1"])
        assert status == 1
        assert said(report, "names") == [
            (
                "warning",
                f"host{at}",
                f"its own name host{at} resolves to 127.0.1.1, which only it can reach",
            )
            for at in range(2)
        ]
        assert '"10.78.0.1 host0"' in report["findings"][0]["to_do"]


def test_an_ipv6_address_without_a_route(tmp_path: Path) -> None:
    with made(2, tmp_path) as world:
        for at, network in enumerate(("fd77", "fd78")):
            space = world.space(at)
            ip("-n", space, "addr", "add", f"{network}::1/64", "dev", "eth0", "nodad")
        status, report = ask(world, tmp_path, ["-H", "host0,host1"])
        assert status == 1
        assert said(report, "reach") == []
        assert said(report, "ipv6") == [
            ("warning", "host0", "no IPv6 route to fd78::1 of host1"),
            ("warning", "host1", "no IPv6 route to fd77::1 of host0"),
        ]


def test_another_version_on_one_host(world: hosts.Hosts, folder: Path, tmp_path: Path) -> None:
    there(folder, tmp_path, OTHER_VERSION)
    status, report = ask(world, tmp_path, ["-H", "host0,host1"])
    assert status == 1
    (found,) = said(report, "versions")
    assert found[:2] == ("error", "host1") and found[2].startswith("pycoll 9.8.7 here, 0")
    assert all(link["failure"] == "" for link in report["links"]), "the probes went on"


def test_hosts_that_are_not_there_do_not_end_the_survey(world: hosts.Hosts, folder: Path) -> None:
    status, report = ask(world, folder, ["-H", "host0,nowhere,host1"])
    assert status == 1
    (found,) = said(report, "hosts")
    assert found[:2] == ("error", "nowhere"), report["findings"]
    assert "Could not resolve hostname; check the host's name" in found[2]
    assert len(report["hosts"]) == 2 and len(report["links"]) == 2


# Nodes that meet at an address


def nodes(
    world: hosts.Hosts, folder: Path, port: int, *words: str
) -> list[tuple[int, dict[str, Any]]]:
    """Run a doctor on each host, which meet at the first one."""
    address = f"{world.addresses[0]}:{port}"
    running = [
        subprocess.Popen(
            world.on(
                at,
                [
                    *(*DOCTOR, "--json", "--nnodes", "2", "--node-rank", str(at)),
                    *("--address", address, *words),
                ],
            ),
            env=environment(folder, PYCOLL_SECRET=SECRET),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for at in range(2)
    ]
    found = []
    for process in running:
        out, err = process.communicate(timeout=120)
        assert out, err
        found.append((process.returncode, json.loads(out)))
    return found


def test_doctors_meet_as_nodes_do(world: hosts.Hosts, folder: Path) -> None:
    first, second = nodes(world, folder, free_port())
    assert first == second, "every node knows the whole report"
    assert first[0] == 0
    assert {one["label"] for one in first[1]["hosts"]} == {"host0", "host1"}
    assert all(one["rate"] > 0 for one in first[1]["links"])


def test_nodes_that_do_not_meet_tell_what_they_know(tmp_path: Path) -> None:
    with made(2, tmp_path) as world:
        ip("-n", world.space(0), "route", "add", "blackhole", f"{world.addresses[1]}/32")
        began = time.monotonic()
        first, second = nodes(world, tmp_path, 47300, "--start-timeout", "5")
        assert time.monotonic() - began < BOUND_S
        assert (first[0], second[0]) == (1, 1)
        ((severity, host, what),) = said(second[1], "hosts")
        assert (severity, host) == ("error", "node 1 (host1)")
        assert "could not reach node 0 at address='10.78.0.1:47300' within 5 s" in what
        ((_, _, what),) = said(first[1], "hosts")
        assert "node 1 of 2: node 1 never arrived" in what
        assert [one["label"] for one in second[1]["hosts"]] == ["host1"]
