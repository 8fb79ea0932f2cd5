"""The checks of pycoll doctor on made-up surveys, and the doctor of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import Interface
from pycoll.bootstrap.rendezvous.exchange import MemoryExchange
from pycoll.tools.doctor.checks import CHECKS, ERROR, NOTE, WARNING, findings_of
from pycoll.tools.doctor.host_facts import (
    UNLIMITED,
    HostFacts,
    collect_facts,
    decode_facts,
)
from pycoll.tools.doctor.probes import (
    NO_NETWORK,
    NO_ROUTE,
    REFUSED,
    SILENT,
    STRANGER,
    STUCK,
    Link,
    decode_link,
)
from pycoll.tools.doctor.survey import Survey, survey_of, take_part
from pycoll.tools.doctor.survey_report import as_json, as_text, is_wrong

ROOT = Path(__file__).resolve().parents[2]
NETWORKS = [
    Interface("lo", "127.0.0.1", "127.0.0.0/8"),
    Interface("eth0", "10.0.0.1", "10.0.0.0/24", 10000),
]
WELL = HostFacts(
    label="one",
    name="one",
    machine="m1",
    pycoll="1.2.3",
    python="3.11.7",
    libraries={"numpy": "2.4.6", "torch": ""},
    ranks=2,
    cpus=[0, 1, 2, 3],
    quota=0.0,
    files=4096,
    files_hard=4096,
    memlock=UNLIMITED,
    shm=1 << 33,
    memfd="",
    ptrace=0,
    rdma=[],
    networks=NETWORKS,
    routes_ipv6=False,
    addresses=["10.0.0.1"],
    unresolved="",
    problems=[],
    port=5000,
    token="00" * 16,
)
OTHER = replace(
    WELL,
    label="two",
    name="two",
    machine="m2",
    networks=[NETWORKS[0], Interface("eth0", "10.0.0.2", "10.0.0.0/24", 10000)],
    addresses=["10.0.0.2"],
    token="01" * 16,
)
WAYS = [
    Link(0, 1, "10.0.0.2", "eth0", "eth0", round_trip_s=5e-5, rate=1e9),
    Link(1, 0, "10.0.0.1", "eth0", "eth0", round_trip_s=5e-5, rate=1e9),
]


def told(survey: Survey) -> list[tuple[str, str, str, str]]:
    return [(one.severity, one.host, one.check, one.what) for one in findings_of(survey)]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    survey = Survey([WELL, OTHER], WAYS)
    assert told(survey) == []
    assert as_text(survey).endswith("\n\nnothing is wrong")
    assert json.loads(as_json(survey))["wrong"] is False


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"pycoll": "1.2.4"}, (ERROR, "versions", "pycoll 1.2.4 here, 1.2.3 on one")),
        ({"python": "3.12.1"}, (ERROR, "versions", "Python 3.12.1 here, 3.11.7 on one")),
        ({"python": "3.11.9"}, (NOTE, "versions", "Python 3.11.9 here, 3.11.7 on one")),
        (
            {"libraries": {"numpy": "", "torch": ""}},
            (WARNING, "versions", "numpy is missing here, 2.4.6 on one"),
        ),
        (
            {"addresses": ["127.0.1.1"]},
            (WARNING, "names", "its own name two resolves to 127.0.1.1, which only it can reach"),
        ),
        (
            {"addresses": [], "unresolved": "Name or service not known"},
            (WARNING, "names", "its own name two does not resolve (Name or service not known)"),
        ),
        ({"problems": ["PYCOLL_X: no"]}, (ERROR, "settings", "PYCOLL_X: no")),
        (
            {"memfd": "Operation not permitted"},
            (
                ERROR,
                "memory",
                "shared memory cannot be made: memfd_create or mmap failed (Operation not "
                "permitted)",
            ),
        ),
        (
            {"rdma": ["mlx5_0"], "memlock": 8 << 20},
            (WARNING, "memory", "only 8 MiB of memory may be locked, and RDMA locks arrays"),
        ),
        ({"shm": 64 << 20}, (NOTE, "memory", "/dev/shm has 64 MiB")),
        (
            {"ptrace": 1},
            (
                NOTE,
                "memory",
                "yama's ptrace_scope is 1: processes do not read each other's memory",
            ),
        ),
        ({"files": 256}, (WARNING, "files", "a process may open 256 files; 1024 are advisable")),
        (
            {"ranks": 2000},
            (WARNING, "cores", "2000 ranks share 4 cores"),
        ),
        (
            {"quota": 1.5},
            (WARNING, "cores", "2 ranks share 1.5 cores (a quota allows 1.5 of 4 cores at a time)"),
        ),
        ({"quota": 2.5}, (NOTE, "cores", "a quota allows 2.5 of 4 cores at a time")),
        (
            {"networks": [*OTHER.networks, Interface("eth0", "fd00::2", "fd00::/64")]},
            (NOTE, "ipv6", "it has the IPv6 address fd00::2, and no IPv6 default route"),
        ),
    ],
)
def test_what_is_wrong_on_one_host(change: dict[str, Any], found: tuple[str, str, str]) -> None:
    survey = Survey([WELL, replace(OTHER, **change)], WAYS)
    severity, check, what = found
    assert (severity, "two", check, what) in told(survey)
    if change != {"ranks": 2000}:
        assert len(told(survey)) == 1, "one fault, one finding"
    assert all(one.to_do for one in findings_of(survey))
    assert is_wrong(findings_of(survey)) is (severity != NOTE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"failure": SILENT}, "does not reach two: nothing answers (10.0.0.2 on eth0 from eth0)"),
        ({"failure": SILENT, "elsewhere": True}, "a firewall drops TCP to port 5000"),
        ({"failure": NO_ROUTE, "elsewhere": True}, "a firewall drops TCP to port 5000"),
        ({"failure": NO_ROUTE}, "no machine answers for this address"),
        ({"failure": REFUSED}, "TCP to port 5000 is refused"),
        ({"failure": NO_NETWORK}, "this host has no route there"),
        ({"failure": STUCK}, "connections open, but data does not arrive"),
        ({"failure": STRANGER}, "another machine answers at this address"),
        ({"failure": "Odd"}, "does not reach two: Odd"),
    ],
)
def test_a_closed_way(change: dict[str, Any], words: str) -> None:
    closed = replace(WAYS[0], **change)
    ((severity, host, check, what),) = told(Survey([WELL, OTHER], [closed, WAYS[1]]))
    assert (severity, host, check) == (ERROR, "one", "reach")
    assert words in what
    # With another way that is open, it is no more than a warning.
    second = replace(closed, address="10.9.0.2", device="eth1", via="eth1")
    ((severity, _, _, what),) = told(Survey([WELL, OTHER], [*WAYS, second]))
    assert severity == WARNING and "does not reach two by 10.9.0.2 on eth1" in what


def test_hosts_without_a_common_network() -> None:
    alone = replace(OTHER, networks=NETWORKS[:1])
    ((severity, host, _, what),) = told(Survey([WELL, alone], WAYS[1:]))
    assert (severity, host) == (ERROR, "one")
    assert what == "no way to two: its addresses are 127.0.0.1"


def test_clocks_and_ipv6_routes() -> None:
    ahead = [replace(WAYS[0], clock_s=3.0), replace(WAYS[1], clock_s=-3.0)]
    assert told(Survey([WELL, OTHER], ahead)) == [
        (WARNING, "two", "clocks", "its clock is 3.0 s ahead of that of one")
    ]
    lost = Link(0, 1, "fd00::2", "eth0", "", failure=NO_NETWORK)
    assert told(Survey([WELL, OTHER], [*WAYS, lost])) == [
        (WARNING, "one", "ipv6", "no IPv6 route to fd00::2 of two")
    ]


def test_hosts_that_left() -> None:
    survey = Survey([WELL], [], {"two": "host two: no answer within 5 s"}, [("one", "alias")])
    twice = (NOTE, "alias", "machines", "one and alias are one machine, in one network namespace")
    assert told(survey) == [(ERROR, "two", "hosts", "no answer within 5 s"), twice]
    assert told(replace(survey, listed=True))[1] == (ERROR, *twice[1:])


def test_every_check_has_a_name_and_a_summary() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(check.summary for check in CHECKS)


# What hosts send


def test_facts_and_links_survive_the_way() -> None:
    assert decode_facts(WELL.encode()) == WELL
    survey = survey_of([WELL.encode(), OTHER.encode()], [b"[]", b""])
    assert list(survey.hosts) == [WELL, OTHER]
    again = survey_of([WELL.encode(), replace(WELL, label="alias").encode()])
    assert again.doubles == [("one", "alias")] and len(again.hosts) == 1
    # Ranks of a job that share a host, each with a core of its own.
    ranks = [replace(WELL, ranks=1, cpus=[at], token=f"{at:032x}") for at in (2, 0)]
    (host,) = survey_of([one.encode() for one in ranks]).hosts
    assert (host.ranks, host.cores, host.token) == (2, 2, ranks[0].token)
    assert survey_of([one.encode() for one in ranks]).doubles == []
    same = replace(OTHER, label="one")
    assert [one.label for one in survey_of([WELL.encode(), same.encode()]).hosts] == [
        "one",
        "one #2",
    ]


@pytest.mark.parametrize(
    "blob",
    [b"x", b"{}", b"[]", WELL.encode().replace(b"5000", b'"many"'), b'{"label": "' + b"a" * 9999],
)
def test_unreadable_facts_are_a_finding(blob: bytes) -> None:
    survey = survey_of([WELL.encode(), blob])
    ((severity, host, check, what),) = told(survey)
    assert (severity, host, check) == (ERROR, "host 1", "hosts")
    assert "its facts are unreadable" in what
    with pytest.raises(ValueError, match="are its members"):
        decode_link({"source": 0})


def test_a_resolver_that_answers_with_loopback() -> None:
    facts = collect_facts("here", resolver=lambda name: ["127.0.1.1"])
    assert facts.addresses == ["127.0.1.1"]

    def fail(name: str) -> list[str]:
        raise OSError(-2, "Name or service not known")

    assert collect_facts("here", resolver=fail).unresolved == "Name or service not known"


def test_settings_that_cannot_be_read_are_told() -> None:
    facts = collect_facts("here", environ={"PYCOLL_INTERFACES": "nowhere0"})
    (problem,) = facts.problems
    assert "PYCOLL_INTERFACES names 'nowhere0', which has no address" in problem


# Surveys of this machine


def test_doctors_of_one_machine_count_as_one() -> None:
    exchanges = MemoryExchange.make(2, Deadline(30))
    surveys: list[Survey | None] = [None, None]

    def take(number: int) -> None:
        def gather(blob: bytes) -> Sequence[bytes]:
            return exchanges[number].all_gather(blob)

        surveys[number] = take_part(gather, f"label{number}")

    threads = [threading.Thread(target=take, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert surveys[0] is not None and surveys[0] == surveys[1]
    assert [one.label for one in surveys[0].hosts] == ["label0"]
    assert list(surveys[0].doubles) == [("label0", "label1")]


def run(*words: str, **changes: str) -> tuple[int, str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("PYCOLL_")}
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        env={**clean, **changes},
    )
    return done.returncode, done.stdout, done.stderr


def test_the_doctor_of_this_machine() -> None:
    status, out, err = run("doctor", "--json")
    report = json.loads(out)
    assert (status, err) == (int(report["wrong"]), "")
    (host,) = report["hosts"]
    assert host["cores"] >= 1 and any(one["name"] == "lo" for one in host["networks"])


def test_a_wrong_setting_is_a_finding() -> None:
    status, out, _ = run("doctor", PYCOLL_INTERFACES="nowhere0")
    assert status == 1
    assert "PYCOLL_INTERFACES names 'nowhere0'" in " ".join(out.split())


def test_the_doctor_inside_a_job() -> None:
    """Both ranks are on one machine; rank 0 prints once."""
    status, out, err = run("run", "-n", "2", sys.executable, "-m", "pycoll", "doctor", "--json")
    report = json.loads(out)
    assert len(report["hosts"]) == 1, err
    assert [one["check"] for one in report["findings"] if one["check"] == "machines"] == []
    assert status == int(report["wrong"])


def test_options_that_contradict() -> None:
    status, _, err = run("doctor", "-H", "localhost", "--nnodes", "2", "--node-rank", "0",
                         "--address", "localhost:5000")  # fmt: skip
    assert status == 2 and "two ways: give one" in err
