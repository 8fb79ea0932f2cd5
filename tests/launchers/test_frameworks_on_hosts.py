"""torchrun on two hosts made of network namespaces: both ways to meet, and a rank that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mpi_hosts
import pytest
from engine_programs import environment, needs

needs("torch")

World = mpi_hosts.hosts.Hosts
SECRET = "a secret of the tests"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
#: The two ways in which the agents of torchrun meet, one of them also over IPv6.
MEETINGS = {
    "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400"),
    "static": ("--master-addr", "host0", "--master-port", "29400", "--node-rank", "{host}"),
    "ipv6": ("--master-addr", "fd99::1", "--master-port", "29400", "--node-rank", "{host}"),
}
#: Both of torch's names for a world of the same processes.
BOTH = """
import sys
import pycoll, torch, torch.distributed as dist
comm = pycoll.init()
dist.init_process_group("pycoll")
x = torch.full((3,), float(dist.get_rank() + 1))
dist.all_reduce(x)
assert comm.rank == dist.get_rank() and dist.get_backend() == "pycoll"
sys.stdout.write(f"{comm.rank} of {comm.size} on {comm.cross_size} hosts: "
                 f"{comm.all_reduce(comm.rank + 1)} {x.tolist()}\\n")
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Both hosts also have an interface that leads nowhere, and a cable with IPv6 only."""
    if why := mpi_hosts.hosts.obstacle():
        pytest.skip(f"needs root and network namespaces: {why}")
    with mpi_hosts.two_hosts(tmp_path_factory.mktemp("hosts")) as (made, _):
        yield made


def on_both(world: World, folder: Path, lines: Sequence[Sequence[str]], **more: str) -> list[str]:
    """Run a command on each host; returns what they print. All must end well."""
    own = environment(PYCOLL_SECRET=SECRET, JAX_PLATFORMS="cpu", **more)
    own = {name: text for name, text in own.items() if "proxy" not in name.lower()}
    running = [
        subprocess.Popen(
            world.on(host, [*line]),
            cwd=folder,
            env={**own, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host, line in enumerate(lines)
    ]
    try:
        ended = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0, 0], ended
    return [out for out, _ in ended]


@pytest.mark.parametrize("meeting", ["c10d", "ipv6"])
def test_processes_of_torchrun_are_ranks(meeting: str, world: World, tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    lines = [
        [*TORCHRUN, *(word.format(host=host) for word in MEETINGS[meeting]), "both.py"]
        for host in range(2)
    ]
    only = {"PYCOLL_INTERFACES": mpi_hosts.SIX} if meeting == "ipv6" else {}
    said = on_both(world, tmp_path, lines, **only)
    assert [len(one.splitlines()) for one in said] == [2, 2]
    assert sorted("".join(said).splitlines()) == [
        f"{rank} of 4 on 2 hosts: 10 [10.0, 10.0, 10.0]" for rank in range(4)
    ]


def test_the_other_host_hears_of_a_rank_of_torchrun_that_is_killed(
    world: World, tmp_path: Path
) -> None:
    """torchrun ends the other rank of the same host, so either of them may be named."""
    (tmp_path / "dies.py").write_text(
        "import os, signal, pycoll\n"
        "comm = pycoll.init()\n"
        "if comm.rank == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: comm.barrier()\n"
        "except pycoll.PeerLostError as error:\n"
        # torchrun starts Python without buffers: one write keeps the lines of two ranks whole.
        "    os.write(1, f\"{comm.rank} lost {' '.join(map(str, error.ranks))}\\n\".encode())\n"
        "    raise\n"
    )
    running = [
        subprocess.Popen(
            world.on(host, [*TORCHRUN, *words, "dies.py"]),
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for host in range(2)
        for words in [[word.format(host=host) for word in MEETINGS["static"]]]
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert all(process.returncode != 0 for process in running)
    told = [line.split() for line in sorted(said[0].splitlines())]
    assert [words[:2] for words in told] == [["0", "lost"], ["1", "lost"]], said
    assert all({"2", "3"}.issuperset(words[2:]) and words[2:] for words in told), said
