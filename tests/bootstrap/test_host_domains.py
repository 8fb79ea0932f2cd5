"""Domains inside a host: read from a fabricated sysfs, told at join, and followed by plans."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

import pycoll
from pycoll.bootstrap.discovery import identity
from pycoll.bootstrap.discovery.domains import Domains, find_domains
from pycoll.bootstrap.discovery.identity import Identity, domains_of
from pycoll.comm.operations import internals_of
from pycoll.config import Config
from pycoll.cores import core_text, usable_cores


def machine(folder: Path, caches: list[str], nodes: list[str]) -> str:
    """A sysfs with these last-level caches and memory domains, as lists of cores."""
    for number, cores in enumerate(caches):
        for core in numbers(cores):
            describe(folder, core, 0, "1", "Instruction", str(core))
            describe(folder, core, 1, "1", "Data", str(core))
            describe(folder, core, 2, "2", "Unified", str(core))
            describe(folder, core, 10, "3", "Unified", cores)
        assert numbers(cores), number
    for number, cores in enumerate(nodes):
        node = folder / "node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cores}\n")
    return str(folder)


def describe(folder: Path, core: int, index: int, level: str, kind: str, cores: str) -> None:
    cache = folder / "cpu" / f"cpu{core}" / "cache" / f"index{index}"
    cache.mkdir(parents=True)
    for name, text in (("level", level), ("type", kind), ("shared_cpu_list", cores)):
        (cache / name).write_text(f"{text}\n")


def numbers(text: str) -> set[int]:
    return identity.core_numbers(text)


def test_a_rank_in_one_cache_and_one_node_knows_both(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-3,16-19", "4-7,20-23"], ["0-7,16-23", "8-15"])
    assert find_domains("5", system) == Domains("4-7,20-23", "0-7,16-23")
    assert find_domains("0,17-18", system) == Domains("0-3,16-19", "0-7,16-23")


def test_a_rank_on_several_domains_belongs_to_none(tmp_path: Path) -> None:
    system = machine(tmp_path, ["0-3", "4-7"], ["0-7", ""])
    assert find_domains("3-4", system) == Domains("", "0-7")
    assert find_domains("3-9", system) == Domains()
    assert str(find_domains("3-9", system)).startswith("unknown")
    assert str(find_domains("3", system)) == "cache of cores 0-3, memory of cores 0-7"


@pytest.mark.parametrize("text", ["", "x", "3-", "7-4", "-1"])
def test_damaged_files_count_as_no_domain(tmp_path: Path, text: str) -> None:
    system = machine(tmp_path, ["0-3"], ["0-3"])
    (tmp_path / "node" / "node0" / "cpulist").write_text(text)
    (tmp_path / "cpu" / "cpu0" / "cache" / "index10" / "shared_cpu_list").write_text(text)
    assert find_domains("0", system) == Domains()
    assert find_domains("0", str(tmp_path / "nowhere")) == Domains()


def test_this_machine_is_read_without_an_error() -> None:
    found = find_domains(usable_cores())
    for text in filter(None, found):
        assert numbers(usable_cores()) <= numbers(text)


def test_domains_travel_with_the_identity() -> None:
    mine = Identity.mine(Config.read())._replace(cache="0-3", memory="")
    again = Identity.from_bytes(mine.to_bytes())
    assert again == mine
    assert domains_of([again, again._replace(memory="0-7")]) == [["0-3", "0-3"], [None, "0-7"]]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads, each on a core of its own: three cores to a cache."""

    def core() -> str:
        return threading.current_thread().name.rpartition("-")[2]

    def domains(cores: str) -> Domains:
        first = int(cores) // 3 * 3
        return Domains(core_text(range(first, first + 3)), "0-63")

    monkeypatch.setattr(identity, "usable_cores", core)
    monkeypatch.setattr(identity, "find_domains", domains)


@pytest.mark.usefixtures("bound")
def test_plans_follow_the_domains_and_ranks_keep_their_places() -> None:
    comms = pycoll.local_world(8)
    try:
        first = comms[0]
        assert internals_of(first).compiler.topology.inner == ((0, 0, 0, 1, 1, 1, 2, 2),)
        assert [comm.local_rank for comm in comms] == list(range(8))
        assert {(comm.local_size, comm.cross_rank, comm.cross_size) for comm in comms} == {
            (8, 0, 1)
        }
        assert comms[0].hosts == (tuple(range(8)),)
        text = first.explain("all_reduce", 1 << 24)
        assert "8 ranks on 1 host in 3 domains" in text
        assert "across domains: " in text
        for name in ("hierarchical", "hierarchical:direct+direct", None):
            arrays = [np.arange(3001, dtype=np.float32) * (rank + 1) for rank in range(8)]
            works = [
                comm.all_reduce(x, algorithm=name, async_op=True)
                for comm, x in zip(comms, arrays, strict=True)
            ]
            for work in works:
                assert (work.wait() == np.arange(3001) * 36).all()
        plans = internals_of(first).compiler.plans
        assert any(key.name == "hierarchical" for key in plans._plans)
        assert plans.followed.hosts == ((0, 1, 2), (3, 4, 5), (6, 7))
    finally:
        for comm in comms:
            comm.close()


@pytest.mark.usefixtures("bound")
def test_a_part_in_one_domain_has_no_levels() -> None:
    comms = pycoll.local_world(3)
    try:
        compiler = internals_of(comms[0]).compiler
        assert compiler.topology.inner == ()
        assert compiler.plans.followed is compiler.topology
    finally:
        for comm in comms:
            comm.close()
