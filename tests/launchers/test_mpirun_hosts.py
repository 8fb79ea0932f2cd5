"""mpirun and mpiexec over two hosts, with nothing set, with and without an MPI in the ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import mpi_hosts
import pytest
from mpi_hosts import PROGRAM, WITH_MPICH, WITH_OPEN_MPI, expect, ip, run

if mpi_hosts.hosts.obstacle():
    pytest.skip(mpi_hosts.hosts.obstacle(), allow_module_level=True)

World = mpi_hosts.hosts.Hosts
Launcher = Callable[[World, Path], list[str]]


def prterun(world: World, agent: Path) -> list[str]:
    return mpi_hosts.open_mpi(world, agent, "prte")


LAUNCHERS = {"mpiexec.hydra": mpi_hosts.hydra, "prterun": mpi_hosts.open_mpi}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Path]]:
    with mpi_hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def need(name: str) -> None:
    if not mpi_hosts.found(name):
        pytest.skip(f"no {name}: pip install -r tests/requirements.txt has it")


@pytest.mark.parametrize("launcher", [mpi_hosts.hydra, mpi_hosts.open_mpi, prterun])
def test_ranks_find_each_other(launcher: Launcher, places: tuple[World, Path]) -> None:
    need("mpiexec.hydra" if launcher is mpi_hosts.hydra else "prterun")
    world, agent = places
    expect(run(world, [*launcher(world, agent), sys.executable, PROGRAM, "jejej"]), world.names)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("mpiexec.hydra", "mj"),
        ("mpiexec.hydra", "jm"),
        ("mpiexec.hydra", "jemjem"),
        ("mpiexec.hydra", "mfj"),
        ("prterun", "mj"),
    ],
)
def test_an_mpi_in_the_process(name: str, steps: str, places: tuple[World, Path]) -> None:
    need(name)
    world, agent = places
    environ = WITH_MPICH if name == "mpiexec.hydra" else WITH_OPEN_MPI
    line = [*LAUNCHERS[name](world, agent), sys.executable, PROGRAM, steps]
    expect(run(world, line, **environ), world.names)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_data_goes_over_an_interface_with_ipv6_only(name: str, places: tuple[World, Path]) -> None:
    need(name)
    world, agent = places
    line = [*LAUNCHERS[name](world, agent), sys.executable, PROGRAM, "j"]
    expect(run(world, line, PYCOLL_INTERFACES=mpi_hosts.SIX), world.names)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_an_interface_that_leads_nowhere_is_told(name: str, places: tuple[World, Path]) -> None:
    need(name)
    world, agent = places
    line = [*LAUNCHERS[name](world, agent), sys.executable, PROGRAM, "j"]
    done = run(world, line, PYCOLL_INTERFACES="aaa", PYCOLL_INIT_TIMEOUT_S="6")
    assert done.returncode != 0
    assert "rank 2 could not reach rank 0 at its addresses (10.66.0.1:" in done.stderr
    assert "is the address right and open to this host?" in done.stderr


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_rank_that_fails_ends_the_job(name: str, places: tuple[World, Path]) -> None:
    need(name)
    world, agent = places
    rank = "PMI_RANK" if name == "mpiexec.hydra" else "PMIX_RANK"
    steps = f"[ ${rank} = 3 ] && steps=x || steps=j; exec {sys.executable} {PROGRAM} $steps"
    began = time.monotonic()
    line = [*LAUNCHERS[name](world, agent), "sh", "-c", steps]
    done = run(world, line, PYCOLL_INIT_TIMEOUT_S="10")
    assert done.returncode != 0
    assert time.monotonic() - began < 40
    if name == "mpiexec.hydra":
        # Hydra itself lets the others go on after a rank that never used PMI.
        assert "init waited 10 s in the launcher's barrier" in done.stderr
    else:
        assert "init waited" not in done.stderr, "prterun ends the job at once"


@pytest.mark.parametrize("name", LAUNCHERS)
@pytest.mark.parametrize(
    ("interfaces", "wrong"),
    [
        ("eth0", []),
        ("eth0,six,aaa", ["warning host0 on aaa", "warning host1 on aaa"]),
        ("aaa", ["error host0 on aaa", "error host1 on aaa"]),
    ],
)
def test_the_doctor_examines_the_hosts_of_the_job(
    name: str, interfaces: str, wrong: list[str], places: tuple[World, Path]
) -> None:
    """It also reports where a job cannot join; rank 0 prints once, and its status is the job's."""
    need(name)
    world, agent = places
    line = [*LAUNCHERS[name](world, agent), sys.executable, "-m", "pycoll", "doctor", "--json"]
    done = run(world, line, PYCOLL_INTERFACES=interfaces)
    report = json.loads(done.stdout.strip("\0"))
    assert [(one["label"], one["ranks"]) for one in report["hosts"]] == [
        (host, 2) for host in world.names
    ]
    cores = len(os.sched_getaffinity(0))
    # Open MPI binds each rank to a core of its own, where the host is small.
    assert all(min(cores, 2) <= one["cores"] <= cores for one in report["hosts"])
    found = [one for one in report["findings"] if one["severity"] != "note"]
    assert [f"{one['severity']} {one['host']} on aaa" for one in found] == wrong, found
    assert all("does not reach host" in one["what"] and "aaa" in one["what"] for one in found)
    assert done.returncode == int(report["wrong"]) == int(bool(wrong)), done.stderr
    ways = {(one["source"], one["via"], one["failure"] == "") for one in report["links"]}
    assert ways == {
        (host, device, device != "aaa") for host in world.names for device in interfaces.split(",")
    }


def test_hosts_with_ipv6_only(tmp_path: Path) -> None:
    """Hydra itself needs IPv4; Open MPI does not."""
    need("prterun")
    with mpi_hosts.hosts.Hosts(2) as world:
        agent = tmp_path / "agent"
        world.write_agent(agent)
        for number in range(2):
            space = world.space(number)
            ip("-n", space, "addr", "flush", "dev", mpi_hosts.hosts.DEVICE)
            ip("-n", space, "addr", "add", f"fd78::{number + 1}/64", "dev",
               mpi_hosts.hosts.DEVICE, "nodad")  # fmt: skip
            names = [f"fd78::{n + 1} {name}" for n, name in enumerate(world.names)]
            lines = ["127.0.0.1 localhost", "::1 localhost", *names, ""]
            Path(f"/etc/netns/{space}/hosts").write_text("\n".join(lines))
        line = [*mpi_hosts.open_mpi(world, agent), sys.executable, PROGRAM, "j"]
        expect(run(world, line), world.names)
