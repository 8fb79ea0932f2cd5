"""srun over two nodes, with Slurm's own daemons, by PMIx and by PMI."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mpi_hosts
import pytest
import slurm_hosts
from mpi_hosts import PROGRAM, WITH_MPICH, WITH_OPEN_MPI, expect
from slurm_hosts import Slurm

if slurm_hosts.obstacle():
    pytest.skip(slurm_hosts.obstacle(), allow_module_level=True)

#: Two nodes with two ranks each.
FOUR = ("-N", "2", "-n", "4")
EXAMPLES = Path(__file__).parents[2] / "examples" / "slurm"
Cluster = tuple[Slurm, mpi_hosts.hosts.Hosts]
#: What Slurm says in the rare case that it reads only a part of the address that MPICH gives it by
#: PMI-2. MPICH then aborts or hangs in MPI_Init, which is ahead of anything of pycoll.
MISREAD = "mpi/pmi2: value not properly terminated in client request"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose administrator chose pmix."""
    with (
        mpi_hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as (world, _),
        Slurm(world, tmp_path_factory.mktemp("slurm"), default="pmix") as slurm,
    ):
        yield slurm, world


@pytest.mark.parametrize("options", [(), ("--mpi=pmix",), ("--mpi=pmi2",)])
def test_ranks_find_each_other(options: tuple[str, ...], cluster: Cluster) -> None:
    slurm, world = cluster
    expect(slurm.srun(*FOUR, *options, sys.executable, PROGRAM, "jejej"), world.names)


def test_without_an_exchange_the_error_says_what_to_type(cluster: Cluster) -> None:
    slurm, _ = cluster
    done = slurm.srun(*FOUR, "--mpi=none", sys.executable, PROGRAM, "j")
    assert done.returncode != 0
    assert "srun started rank 3 of 4, not all of them on this host" in done.stderr
    assert "or start with srun --mpi=pmix or --mpi=pmi2" in done.stderr


def test_one_node_needs_no_exchange(cluster: Cluster) -> None:
    slurm, world = cluster
    done = slurm.srun("-N", "1", "-n", "2", "--mpi=none", sys.executable, PROGRAM, "j")
    assert done.returncode == 0, done.stderr
    lines = [f"{rank} of 2 on {world.names[0]}, ((0, 1),)" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == lines


@pytest.mark.parametrize("steps", ["mj", "mfj"])
def test_mpich_before_the_first_world(steps: str, cluster: Cluster) -> None:
    """Slurm's PMI takes one init; an MPI that begins later than the world would send a second."""
    slurm, world = cluster
    expect(srun_with_mpich(slurm, sys.executable, PROGRAM, steps), world.names)


def srun_with_mpich(slurm: Slurm, *command: str) -> subprocess.CompletedProcess[str]:
    """Run four ranks; a run whose addresses Slurm misread counts as none, twice at most."""
    for _ in range(3):
        try:
            done = slurm.srun(*FOUR, "--mpi=pmi2", *command, **WITH_MPICH)
        except subprocess.TimeoutExpired as error:
            if MISREAD not in (error.stderr or b"").decode():
                raise
        else:
            if MISREAD not in done.stderr:
                return done
    raise AssertionError(f"three times: {MISREAD}")


def test_open_mpi_before_the_first_world(cluster: Cluster) -> None:
    if not (mpi_hosts.LIBRARY / "libmpi.so.40").exists():
        pytest.skip(
            f"no libmpi.so.40 in {mpi_hosts.LIBRARY}: pip install -r tests/requirements.txt"
        )
    slurm, world = cluster
    line = (*FOUR, "--mpi=pmix", sys.executable, PROGRAM, "mj")
    expect(slurm.srun(*line, **WITH_OPEN_MPI), world.names)


def test_a_rank_that_fails_ends_the_step(cluster: Cluster) -> None:
    slurm, _ = cluster
    steps = f"[ $SLURM_PROCID = 3 ] && steps=x || steps=j; exec {sys.executable} {PROGRAM} $steps"
    done = slurm.srun(*FOUR, "--kill-on-bad-exit", "sh", "-c", steps, PYCOLL_INIT_TIMEOUT_S="40")
    assert done.returncode != 0
    assert "init waited 40 s" not in done.stderr, "not at the deadline"


def test_sbatch_needs_nothing_either(cluster: Cluster, tmp_path: Path) -> None:
    slurm, world = cluster
    output = tmp_path / "output"
    wrapped = f"srun {sys.executable} {PROGRAM} j"
    done = slurm.run("sbatch", "--wait", *FOUR, "-o", str(output), "--wrap", wrapped)
    text = output.read_text() if output.exists() else done.stderr
    assert done.returncode == 0, text
    assert sorted(text.splitlines()) == mpi_hosts.expected(world.names)


@pytest.mark.parametrize("name", ["agents", "ranks"])
def test_batch_jobs_of_the_examples(name: str, cluster: Cluster, tmp_path: Path) -> None:
    """Two ranks on each node, so that the lines are those of the other tests."""
    slurm, world = cluster
    output, script = tmp_path / "output", EXAMPLES / f"{name}.sbatch"
    places = () if name == "agents" else ("--ntasks-per-node=2",)
    command = tmp_path / "pycoll"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pycoll "$@"\n')
    command.chmod(0o755)
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = ("sbatch", "--wait", "-o", str(output), *places, str(script), PROGRAM, "j")
    done = slurm.run(*line, PATH=path, RANKS="2")
    text = output.read_text() if output.exists() else done.stderr
    assert done.returncode == 0, text
    assert sorted(text.splitlines()) == mpi_hosts.expected(world.names)
