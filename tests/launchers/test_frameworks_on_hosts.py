"""torchrun and jax.distributed on two hosts made of network namespaces, as their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import mpi_hosts
import pytest
from engine_programs import ROOT, environment, needs

needs("torch")

World = mpi_hosts.hosts.Hosts
PAGES = ROOT / "docs" / "guides"
SECRET = "a secret of the tests"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
#: The two ways in which the agents of torchrun meet.
MEETINGS = {
    "c10d": ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host0:29400"),
    "static": ("--master-addr", "host0", "--master-port", "29400", "--node-rank", "{host}"),
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
def world() -> Iterator[World]:
    if why := mpi_hosts.hosts.obstacle():
        pytest.skip(f"two hosts: {why}")
    with World(2) as made:
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


@pytest.mark.parametrize("meeting", MEETINGS)
def test_processes_of_torchrun_are_ranks(meeting: str, world: World, tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(BOTH)
    lines = [
        [*TORCHRUN, *(word.format(host=host) for word in MEETINGS[meeting]), "both.py"]
        for host in range(2)
    ]
    said = on_both(world, tmp_path, lines)
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
        "    print(comm.rank, 'lost', *error.ranks, flush=True)\n"
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


def _program(page: str) -> str:
    """The first program of a page."""
    found = re.search(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)
    assert found is not None
    return found[1]


def test_the_program_of_the_page_about_torchrun(world: World, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(_program("torchrun.md"))
    lines = [[*TORCHRUN, *MEETINGS["c10d"], "hello.py"]] * 2
    said = sorted("".join(on_both(world, tmp_path, lines)).splitlines())
    assert said == [f"rank {rank} of 4: the sum is 10" for rank in range(4)]


def test_jax_finds_its_ranks_on_both_hosts(world: World, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    (tmp_path / "hello.py").write_text(_program("jax-distributed.md"))
    lines = [
        [
            *(sys.executable, "-m", "pycoll", "run", "--nnodes", "2", "--node-rank", str(host)),
            *("--address", "host0:5000", "-n", "1", "hello.py"),
        ]
        for host in range(2)
    ]
    said = "".join(on_both(world, tmp_path, lines)).splitlines()
    assert sorted(line for line in said if line.startswith("process")) == [
        f"process {rank} of 2: 2 devices, the sum is 3.0" for rank in range(2)
    ]
