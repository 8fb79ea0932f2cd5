"""``pycoll tune`` by a job on several hosts: one table for all, and the right one later."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from harness import ROOT

from pycoll import local_world
from pycoll.bootstrap.discovery.identity import (
    Identity,
    transport_across,
    transport_inside,
)
from pycoll.bootstrap.discovery.rails import Port
from pycoll.config import Config
from pycoll.cost import tuning_file
from pycoll.cost.model import LINKS, SEGMENT_BYTES, Link, Terms, spilled_bytes
from pycoll.cost.tuning_file import BUILT_IN, Medium, Network, Tuning
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.topology import even_domains, single_host, topology_of
from pycoll.tools.cli import main
from pycoll.tools.tune.fit import Observation, fit
from pycoll.tools.tune.host_links import (
    HostsOptions,
    _agree_on,
    _measured_ends,
    phases_of,
    with_whole_link,
)
from pycoll.tools.tune.machine_links import COLLECTIVES, Case, distinct_algorithms

sys.path.insert(0, str(ROOT / "bench"))
from host_jobs import places_of
from hosts import DEVICE, ONE_GIGABIT, Hosts, obstacle

FAR = LINKS["tcp"]._replace(alpha=25e-6, beta=8e-9)
NEAR = LINKS["shm"]._replace(alpha=0.5e-6)


def network(*hosts: str, transport: str = "tcp", made: str = "2026-01-01") -> Network:
    return Network(hosts, transport, Medium(FAR, 16384), Medium(NEAR), made)


# What is measured


def test_phases_tell_one_rank_from_all_of_a_host() -> None:
    alone, together, inside = phases_of(topology_of("aabb"))
    assert alone.colors == (0, None, 0, None) and alone.concurrent == 1
    assert together.colors == (0, 1, 0, 1) and together.concurrent == 2
    assert inside.colors == (0, 0, 1, 1) and inside.concurrent == 0
    # Uneven: as many side by side as every host has.
    assert phases_of(topology_of("aaabb"))[1].colors == (0, 1, None, 0, 1)
    assert len(phases_of(topology_of("abc"))) == 1
    assert [one.concurrent for one in phases_of(topology_of("aabb"), oversubscription=2)] == [1, 2]


def test_sizes_end_with_the_longest_and_side_by_side_are_long_only() -> None:
    alone, together, _ = phases_of(topology_of("aabb"))
    for options in (HostsOptions(), HostsOptions(quick=True)):
        assert options.sizes(alone)[-1] == options.sizes(together)[-1] == options.end_bytes
        assert options.sizes(alone)[0] < 512 and options.sizes(together)[0] >= 1 << 18


def observed(
    known: Link,
    concurrent: int,
    segments: tuple[int, ...],
    sizes: Sequence[int] = tuple(32 * 8**power for power in range(8)),
) -> list[Observation]:
    """What tune would see of that link between 4 hosts, if the model were true."""
    found = []
    for word in COLLECTIVES:
        for name in distinct_algorithms(word, 4):
            for nbytes in sizes:
                for segment_bytes in segments:
                    case = Case(word, name, 4, nbytes, segment_bytes, concurrent)
                    one = case.observation(0.0)
                    found.append(replace(one, seconds=known.seconds(one.terms, nbytes)))
    return found


def test_what_one_rank_and_what_a_host_carries_are_told_apart() -> None:
    """A link of 12.5 GB/s of which one rank fills a quarter."""
    known = Link(
        alpha=15e-6, beta=1 / 12.5e9, gamma=1 / 20e9, overhead=1e-6, flow=1 / 3e9, cache_bytes=1
    )

    alone = fit(observed(known, 1, (SEGMENT_BYTES, SEGMENT_BYTES // 4)), LINKS["tcp"]).link
    found = with_whole_link(alone, observed(known, 8, (SEGMENT_BYTES,)))
    for name in ("alpha", "beta", "flow"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.05), name


@pytest.mark.parametrize("bytes_take", [4e-9, 7e-9, 12e-9])
def test_times_of_one_size_say_nothing_of_longer_messages(bytes_take: float) -> None:
    """A short measurement of ranks side by side has messages of one size and of one segment's."""
    one = Link(alpha=11e-6, beta=3e-10, gamma=1e-12, overhead=7e-6, spill=7e-9, cache_bytes=1 << 17)
    all_ranks = one._replace(beta=bytes_take, spill=0.0)
    found = with_whole_link(one, observed(all_ranks, 2, (SEGMENT_BYTES,), (1 << 19,)))
    assert (found.alpha, found.overhead) == (one.alpha, one.overhead)
    for nbytes in (1 << 19, 1 << 22):
        assert rate(found, nbytes) == pytest.approx(bytes_take, rel=0.1), found


def rate(link: Link, nbytes: int) -> float:
    """s/byte of a whole host's link."""
    byte = Terms(waits=0, segments=0, moved=1, combined=0)
    in_bursts = link.beta + link.spill * spilled_bytes(byte, nbytes, link.cache_bytes)
    return max(in_bursts, link.sustained)


@pytest.mark.parametrize("concurrent", [1, 2])
def test_what_is_carried_in_the_long_run_is_told_apart_from_bursts(concurrent: int) -> None:
    """A cable of 1 Gb/s whose bucket passes on bursts at 2 GB/s."""
    known = Link(
        alpha=15e-6, beta=1 / 2e9, gamma=1 / 20e9, overhead=1e-6, cache_bytes=1, sustained=8e-9
    )
    segments = (SEGMENT_BYTES, SEGMENT_BYTES // 4)
    found = fit(observed(known, concurrent, segments), LINKS["tcp"])
    assert found.link.sustained == pytest.approx(8e-9, rel=0.01)
    assert found.link.alpha == pytest.approx(15e-6, rel=0.1)
    assert max(map(abs, found.errors)) < 0.1


def test_a_link_that_carries_all_at_one_rate_has_no_other() -> None:
    known = Link(alpha=15e-6, beta=8e-9, gamma=1 / 20e9, overhead=1e-6, cache_bytes=1)
    found = fit(observed(known, 1, (SEGMENT_BYTES, SEGMENT_BYTES // 4)), LINKS["tcp"])
    assert found.link.sustained == 0
    assert found.link.beta == pytest.approx(8e-9, rel=0.02)


# Which table counts


def test_the_network_of_just_these_hosts_counts_else_the_nearest() -> None:
    values = Tuning(networks=(network("c", "d"), network("a", "b", "c", "d"), network("a", "b")))
    assert values.network_of({"a", "b"}, "tcp") == network("a", "b")
    assert values.network_of({"a", "c"}, "tcp") == network("a", "b", "c", "d")
    assert values.network_of({"c", "d", "e", "f"}, "tcp") == network("c", "d")
    assert values.network_of({"x", "y"}, "tcp") == network("c", "d"), "the latest of the smallest"
    assert values.network_of((), None) == network("c", "d")
    assert values.network_of({"a", "b"}, "verbs") is None
    assert Tuning().network_of({"a"}, "tcp") is None


def test_parameters_of_several_hosts_come_from_their_network() -> None:
    values = Tuning(origin="file", networks=(network("a", "b"),))
    found = values.parameters("shm", True, {"a", "b"}, "tcp")
    assert (found.inside, found.across, found.segment_bytes) == (NEAR, FAR, 16384)
    assert found.origin == "file; tcp between a, b (2 hosts), 2026-01-01"
    assert values.parameters("tcp", True, {"a", "b"}, "tcp").inside == LINKS["tcp"]
    one_host = values.parameters("shm")
    assert one_host.inside == LINKS["shm"] and one_host.segment_bytes == SEGMENT_BYTES
    by_verbs = values.parameters("verbs", True, {"a", "b"}, "verbs")
    assert by_verbs.inside == by_verbs.across == LINKS["verbs"]
    # While tune measures them, their segments are those of all media.
    media = {name: Medium(LINKS[name], 16384) for name in BUILT_IN.media}
    assert Tuning(media).parameters("verbs", True, {"a"}, "verbs").segment_bytes == 16384


def test_links_between_domains_belong_to_their_host(tmp_path: Path) -> None:
    values = Tuning(networks=(network("a", transport="shm"), network("a", "b")))
    found = values.parameters("shm", hosts={"a"}, transport="tcp")
    assert (found.inside, found.between, found.segment_bytes) == (NEAR, FAR, SEGMENT_BYTES)
    assert found.of_domains.across == FAR
    assert "shared memory between domains of a, 2026-01-01" in found.origin
    assert values.parameters("shm").between == FAR
    assert values.parameters("shm", hosts={"b"}).between is None
    assert values.parameters("tcp", hosts={"a"}).between is None
    assert values.parameters("shm", True, {"a"}).across == FAR  # that of tcp, between a and b
    path = tmp_path / "tuning.json"
    tuning_file.store(values, path, "2026-01-01")
    assert tuning_file.load(path).networks == values.networks


def test_domains_take_the_place_of_hosts_where_each_rank_has_a_core() -> None:
    host = even_domains(single_host(4), 2)
    assert [phase.colors for phase in phases_of(host.by_domain)] == [
        (0, None, 0, None),
        (0, 1, 0, 1),
        (0, 0, 1, 1),
    ]
    assert _measured_ends(host, 1.0) == "2 domains of this host"
    assert _measured_ends(topology_of("ab"), 2.0) == "2 hosts"
    for topology, ranks_per_core in ((host, 2.0), (single_host(4), 1.0)):
        with pytest.raises(InvalidArgumentError, match="bind each rank to a core of its own"):
            _measured_ends(topology, ranks_per_core)


def test_a_new_network_takes_the_old_ones_place_and_few_are_kept() -> None:
    values = Tuning()
    for number in range(12):
        values = values.with_network(network("a", f"b{number}"))
    assert [one.hosts[1] for one in values.networks] == [f"b{n}" for n in range(11, 3, -1)]
    newer = network("a", "b7", made="later")
    values = values.with_network(newer)
    assert values.networks[0] == newer
    assert sum(one.hosts == newer.hosts for one in values.networks) == 1
    many = network(*(f"h{n}" for n in range(2000)))
    assert len(values.with_network(many).networks) == 8
    assert Tuning(networks=(many,)).with_network(many).networks == (many,)
    assert values.with_network(many).with_network(network(*(f"i{n}" for n in range(99)))).networks


def test_networks_are_stored_told_and_read_back(tmp_path: Path) -> None:
    verbs = network("a", "b", transport="verbs")._replace(inside=None)
    values = Tuning(networks=(verbs, network("a", "b")))
    path = tmp_path / "tuning.json"
    tuning_file.store(values, path, "2026-01-01")
    found = tuning_file.load(path)
    assert found.networks == values.networks
    assert tuning_file.from_text(found.to_text()) == found


def changed(**changes: Any) -> dict[str, Any]:
    told = tuning_file.network_as_json(network("a", "b")) | changes
    return {name: value for name, value in told.items() if value != "away"}


@pytest.mark.parametrize(
    ("networks", "why"),
    [
        ({}, "networks must be a list of at most 8"),
        ([changed()] * 9, "networks must be a list of at most 8"),
        ([changed(made="away")], "a network must have across, hosts, inside, made, transport"),
        ([changed(hosts=[])], "network.hosts is []: expected names"),
        ([changed(hosts="ab")], "network.hosts is 'ab'"),
        ([changed(transport="sim")], "network.transport is 'sim': expected tcp, verbs or shm"),
        ([changed(across=None)], "network.across must have alpha"),
        ([changed(inside={})], "network.inside must have alpha"),
    ],
)
def test_a_network_that_is_not_right_is_refused(tmp_path: Path, networks: Any, why: str) -> None:
    path = tmp_path / "tuning.json"
    tuning_file.store(BUILT_IN, path, "2026-01-01")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"networks": networks}))
    with pytest.raises(InvalidArgumentError, match=re.escape(why)):
        tuning_file.find(Config(tuning=str(path)))


def test_hosts_talk_over_verbs_only_if_all_ranks_are_on_one_network() -> None:
    def on(networks: str, *transports: str) -> Identity:
        ports = tuple(Port("a", 1, 0, "", network) for network in networks.split(", ") if network)
        return Identity.mine(Config(), verbs=ports)._replace(transports=transports)

    ib = on("ib 1", "shm", "verbs", "tcp")
    assert transport_across([ib, ib]) == "verbs"
    assert transport_across([ib, on("ib 2", "shm", "verbs", "tcp")]) == "tcp"
    both = on("ib 2, ib 1", "verbs", "tcp")
    assert transport_across([ib, both]) == "verbs"
    assert transport_across([ib, both, on("ib 2", "verbs", "tcp")]) == "tcp"
    assert transport_across([ib, on("", "shm", "tcp")]) == "tcp"
    assert transport_across([on("", "tcp")] * 2) == "tcp"
    # Those of one host too, where some do without shared memory.
    assert transport_inside([ib, ib]) == "shm"
    assert transport_inside([ib, both]) == "verbs"
    assert transport_inside([ib, on("", "tcp")]) == "tcp"


# What cannot be done


def test_a_refusal_on_one_rank_is_that_of_all() -> None:
    told: dict[int, str] = {}

    def refuse(comm: Any) -> None:
        def act() -> int:
            if comm.rank == 1:
                raise InvalidArgumentError("its disk is full")
            return 7

        try:
            _agree_on(comm, act)
        except InvalidArgumentError as error:
            told[comm.rank] = str(error)

    world = local_world(3)
    threads = [threading.Thread(target=refuse, args=(comm,)) for comm in world]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for comm in world:
        comm.close()
    assert len(set(told.values())) == 1 and len(told) == 3
    assert re.fullmatch(r"host \S+: its disk is full", told[0])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "all ranks of this job are on one host: run pycoll tune outside of a job"),
        (("--transport", "tcp"), "--transport is for one machine"),
    ],
)
def test_a_job_that_cannot_tune_is_told_why(
    words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_RANK", "0")
    monkeypatch.setenv("PYCOLL_SIZE", "1")
    done = CliRunner().invoke(main, ["tune", *words])
    assert done.exit_code == 1
    assert why in done.output


# All of it, on two hosts

JOB = """
import json, os, pycoll
from pycoll.comm.operations import internals_of
pycoll.init()
comm = pycoll.world()
links = internals_of(comm).compiler.plans.parameters
names = [comm.choice("all_reduce", n) for n in (8, 1 << 14, 1 << 20)]
text = comm.explain("all_reduce", 1 << 20)
os.write(1, json.dumps([names, repr(links), text]).encode() + b"\\n")
pycoll.finalize()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    why = obstacle()
    if why:
        pytest.skip(f"needs root and network namespaces: {why}")
    with Hosts(2, ONE_GIGABIT) as made:
        yield made


def job(hosts: Hosts, folder: Path, *line: str) -> list[str]:
    """What the four ranks print; each host has a cache of its own."""
    places = places_of("pycoll", hosts.addresses[0], DEVICE, 4)
    started = []
    for rank in range(4):
        environment = {n: v for n, v in os.environ.items() if n != "PYCOLL_TUNING"}
        environment |= places(rank, rank % 2) | {"XDG_CACHE_HOME": str(folder / f"host{rank // 2}")}
        started.append(
            subprocess.Popen(
                hosts.on(rank // 2, [sys.executable, *line]),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [one.communicate(timeout=200) for one in started]
    assert [one.returncode for one in started] == [0] * 4, ended
    return [out for out, _ in ended]


def test_all_ranks_get_the_table_that_they_measured(hosts: Hosts, tmp_path: Path) -> None:
    first, *others = job(hosts, tmp_path, "-m", "pycoll", "tune", "--quick")
    assert others == [""] * 3
    assert "measuring links between 2 hosts with 4 ranks" in first
    assert "stored on every host" in first and "tcp between host0, host1" in first
    assert re.search(r"^  tcp +.*[\d.]+ \w+ latency", first, re.M), first
    name = f"{tuning_file.fingerprint()}.json"
    files = [tuning_file.load(tmp_path / f"host{n}" / "pycoll" / name) for n in (0, 1)]
    (found,) = files[0].networks
    assert files[1].networks == (found,)
    assert found.hosts == ("host0", "host1") and found.transport == "tcp"
    # The cable carries 0.125 GB/s each way. 512 KiB is the shortest that all ranks sent at once. A
    # busy machine sends more slowly than the cable allows.
    for nbytes in (1 << 19, 1 << 22):
        assert 4e-9 < rate(found.across.link, nbytes) < 200e-9, found
    told = [json.loads(line) for line in job(hosts, tmp_path, "-c", JOB)]
    assert len({repr(one[:2]) for one in told}) == 1, told
    text = told[0][2]
    assert f"{name} of" in text and "tcp between host0, host1 (2 hosts)" in text
    assert "across hosts: " in text and "others" in text
