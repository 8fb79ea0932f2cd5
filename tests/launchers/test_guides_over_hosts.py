"""The commands of the guides print what the guides show, over real sshd and Slurm's daemons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import mpi_hosts
import pytest
import slurm_hosts
import ssh_hosts
from guide_blocks import Scene, play
from guide_scenes import SCENES
from mpi_hosts import BIN
from slurm_hosts import Slurm
from ssh_hosts import SshHosts

#: Both MPIs of the tests' environment have a command of this name; Open MPI's own is this one.
OPEN_MPI = BIN / "ompirun_wrapper"
ROOT_MAY = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
ROOT_MAY += ("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM")


def of(*places: str) -> pytest.MarkDecorator:
    """The scenes of these places as parameters of a test."""
    return pytest.mark.parametrize("scene", [o for o in SCENES if o.place in places], ids=str)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    """Three hosts with sshd."""
    if why := ssh_hosts.obstacle():
        pytest.skip(f"needs root, network namespaces and sshd: {why}")
    with ssh_hosts.made(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@of("ssh")
def test_over_ssh(scene: Scene, world: SshHosts, tmp_path: Path) -> None:
    play(scene, tmp_path, world.world.on, [world.folder / "bin"])


@of("mpi")
def test_over_ssh_by_an_mpi(scene: Scene, world: SshHosts, tmp_path: Path) -> None:
    """mpirun is Open MPI's and mpiexec MPICH's, and each starts the other host by its own ssh."""
    own = tmp_path / "mpi"
    own.mkdir()
    for name, target in {"mpirun": OPEN_MPI, "mpiexec": BIN / "mpiexec.hydra"}.items():
        if not target.exists():
            pytest.skip(f"no {target.name}: pip install -r tests/requirements.txt has it")
        # MPICH's looks for its other programs next to itself.
        (own / name).write_text(f'#!/bin/sh\nexec {target} "$@"\n')
        (own / name).chmod(0o755)
    more = dict.fromkeys(ROOT_MAY, "1") if os.geteuid() == 0 else {}
    prefix = {"OPAL_PREFIX": str(BIN.parent), "PRTE_PREFIX": str(BIN.parent)}
    play(scene, tmp_path, world.world.on, [world.folder / "bin", own], **more, **prefix)


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Slurm, mpi_hosts.hosts.Hosts]]:
    if slurm_hosts.obstacle():
        pytest.skip(slurm_hosts.obstacle())
    with (
        mpi_hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as (world, _),
        Slurm(world, tmp_path_factory.mktemp("slurm"), default="pmix") as slurm,
    ):
        yield slurm, world


@of("slurm")
def test_by_slurm(
    scene: Scene, cluster: tuple[Slurm, mpi_hosts.hosts.Hosts], tmp_path: Path
) -> None:
    slurm, world = cluster
    own = {name: text for name, text in slurm.environment.items() if name.startswith("SLURM_")}
    play(scene, tmp_path, world.on, **own)


@pytest.fixture(scope="module")
def pair() -> Iterator[mpi_hosts.hosts.Hosts]:
    if why := mpi_hosts.hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {why}")
    with mpi_hosts.hosts.Hosts(2) as made:
        yield made


@of("frameworks")
def test_by_frameworks(scene: Scene, pair: mpi_hosts.hosts.Hosts, tmp_path: Path) -> None:
    """torchrun and jax.distributed."""
    package = "jax" if "jax" in scene.page else "torch"
    pytest.importorskip(package, reason=f"no {package}: pip install -r tests/requirements.txt")
    play(scene, tmp_path, pair.on, JAX_PLATFORMS="cpu")
