"""Elastic jobs over real ssh: hosts that vanish, that come, and whose slots change."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ssh_hosts
from elastic_worlds import Worlds
from ssh_hosts import SshHosts

#: The promises: a host that vanishes is noticed, and what no host may have left after an end. The
#: machine may be busy, so times get more; tests/bootstrap and tests/launch check the limits.
NOTICED_S, GONE_S, SLACK_S = 5.0, 10.0, 10.0
AGENT = "pycoll.launch.host_agent"
#: Each step adds up ones of all ranks and commits. So the weight tells which steps it holds.
TRAINING = """
import sys, time
from pathlib import Path
import torch
import pycoll.torch as hvd

hvd.init()
torch.set_num_threads(1)
model = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)


@hvd.elastic.run
def train(state):
    print(f"{hvd.rank()} of {hvd.size()} begins with {state.commits} commits", flush=True)
    first = state.commits
    while hvd.size() == 6 or state.commits < first + 5:
        optimizer.zero_grad()
        model(torch.ones(1, 1).double()).sum().backward()
        optimizer.step()
        state.sizes = [*state.sizes, hvd.size()]
        state.commit()
        if state.commits == 5 and hvd.rank() == 0:
            Path(sys.argv[1], "reached").touch()
        time.sleep(0.05)


state = hvd.elastic.TorchState(model, optimizer, sizes=[])
train(state)
assert model.weight.item() == -0.5 * sum(state.sizes)
print(f"{hvd.rank()} of {hvd.size()} ends: {state.sizes}", flush=True)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    why = ssh_hosts.obstacle()
    if why:
        pytest.skip(f"needs root, network namespaces and sshd: {why}")
    with ssh_hosts.made(3, tmp_path_factory.mktemp("elastic")) as made:
        yield made


class Job(Worlds):
    """An elastic job of elastic_rank.py, started on the first host."""

    def __init__(self, hosts: SshHosts, folder: Path, *words: str) -> None:
        super().__init__(folder)
        self.hosts = hosts
        self.log = folder / "log"
        line = [sys.executable, "-m", "pycoll", "run", *words, *self.command]
        self.process = hosts.start(line)

    def await_size(self, size: int, after: int = 0, limit_s: float = 40) -> list[int]:
        """The first world of ``size`` ranks after the first ``after`` ones."""

        def done(worlds: list[list[int]]) -> bool:
            return size in map(len, worlds[after:])

        found = self.wait(done, self.look, limit_s)
        return next(world for world in found[after:] if len(world) == size)

    def look(self) -> None:
        assert self.process.poll() is None, self.process.communicate()

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=60)
        return self.process.returncode, err

    def stop(self) -> None:
        """End what is left, and check that no host has a process of the job."""
        self.process.kill()
        self.process.communicate()
        until = time.monotonic() + GONE_S
        while left := self.hosts.processes(str(self.folder)) + self.hosts.processes(AGENT):
            assert time.monotonic() < until, left
            time.sleep(0.1)


Start = Callable[..., Job]


@pytest.fixture
def start(world: SshHosts, tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def made(*words: str) -> Job:
        jobs.append(Job(world, tmp_path, *words))
        return jobs[-1]

    yield made
    for job in jobs:
        job.stop()


def space_of(world: SshHosts, pid: int) -> int:
    """The host on which a process runs."""
    for number in range(len(world.names)):
        line = ["ip", "netns", "pids", world.world.space(number)]
        listed = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        if str(pid) in listed.split():
            return number
    raise AssertionError(f"no host runs process {pid}")


def test_training_goes_on_from_the_last_commit(world: SshHosts, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="no torch: pip install -r tests/requirements.txt")
    program = tmp_path / "program.py"
    program.write_text(TRAINING)
    hosts = ("-H", "host0:2,host1:2,host2:2", "--min-np", "2")
    line = [sys.executable, "-m", "pycoll", "run", *hosts, str(program), str(tmp_path)]
    process = world.start(line)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "reached").exists():
            assert process.poll() is None and time.monotonic() < until, process.communicate()
            time.sleep(0.05)
        world.world.set_link(2, False)
        said, err = process.communicate(timeout=120)
    finally:
        world.world.set_link(2, True)
        process.kill()
        process.communicate()
    assert process.returncode == 0, err
    begun = re.findall(r"(\d) of (\d) begins with (\d+) commits", said)
    assert sorted(begun[:6]) == [(str(rank), "6", "0") for rank in range(6)], said
    (commits,) = {int(commits) for _, _, commits in begun[6:]}
    assert sorted(rank for rank, _, _ in begun[6:]) == ["0", "1", "2", "3"] and commits >= 5, said
    ends = re.findall(r"(\d) of 4 ends: \[(.*)\]", said)
    sizes = ", ".join(["6"] * commits + ["4"] * 5)
    assert sorted(ends) == [(str(rank), sizes) for rank in range(4)], said


def test_a_host_vanishes_and_training_goes_on(world: SshHosts, start: Start) -> None:
    job = start("-H", "host0:2,host1:2,host2:2", "--min-np", "2")
    first = job.await_size(6)
    assert [space_of(world, pid) for pid in first] == [0, 0, 1, 1, 2, 2]
    world.world.set_link(2, False)
    began = time.monotonic()
    try:
        second = job.await_size(4, after=1)
        assert second == first[:4]
        assert time.monotonic() - began < NOTICED_S + SLACK_S
        until = began + GONE_S
        # The host that nobody reaches ends its own ranks too.
        while any(Path(f"/proc/{pid}").exists() for pid in first[4:]):
            assert time.monotonic() < until
            time.sleep(0.1)
        job.tell("4 end")
        status, err = job.end()
    finally:
        world.world.set_link(2, True)
    assert status == 0, err
    assert re.search(r"pycoll run: node 2 \(host2:\d+\) is gone: .* or its host or the", err), err


def test_spare_slots_replace_a_lost_host(world: SshHosts, start: Start) -> None:
    job = start("-H", "host0:1,host1:1,host2:2", "-n", "2", "--min-np", "1")
    first = job.await_size(2)
    assert [space_of(world, pid) for pid in first] == [0, 1]
    (agent,) = [pid for pid in world.processes(AGENT) if space_of(world, pid) == 1]
    os.kill(agent, 9)
    second = job.await_size(2, after=1)
    assert second[0] == first[0] and space_of(world, second[1]) == 2
    job.tell("2 end")
    status, err = job.end()
    assert status == 0, err
    assert re.search(r"pycoll run: node 1 \(host1:\d+\) is gone: its pycoll run was killed", err)


def test_node_0_vanishes(world: SshHosts, start: Start) -> None:
    job = start("-H", "host1:1,host2:2", "--min-np", "1")
    job.await_size(3)
    (agent,) = [pid for pid in world.processes(AGENT) if space_of(world, pid) == 1]
    began = time.monotonic()
    os.kill(agent, 9)
    status, err = job.end()
    assert time.monotonic() - began < GONE_S
    assert status == 1
    assert re.search(r"pycoll run: node 0, which served the store at host host1.*is gone", err), err


LOST = r"pycoll run: node 0, which served the store at .*, is gone: its pycoll run was killed, or"


@pytest.mark.parametrize("options", [("--min-np", "1"), ("--tolerate", "2")])
def test_the_host_of_node_0_vanishes(
    world: SshHosts, start: Start, options: tuple[str, ...]
) -> None:
    """The fixture checks that no host has a process of the job left."""
    job = start("-H", "host1:1,host2:2", *options)
    job.await_size(3)
    world.world.set_link(1, False)
    began = time.monotonic()
    try:
        status, err = job.end()
        seconds = time.monotonic() - began
        job.stop()
    finally:
        world.world.set_link(1, True)
    assert status == 1 and re.search(LOST, err) and "host host1" in err, err
    assert seconds < GONE_S + SLACK_S


@pytest.mark.parametrize("options", [("--min-np", "2"), ("--tolerate", "1")])
def test_agents_end_where_the_host_of_node_0_vanishes(
    world: SshHosts, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Each host has an agent that somebody has typed there. That of node 0 ends too, since more
    ranks are lost for it than may be."""
    job = Worlds(tmp_path)
    places = [1, 0, 2]  # the host of each node
    agents = [
        world.start(
            [
                *(sys.executable, "-m", "pycoll", "run", "--nnodes", "3", "--node-rank", str(node)),
                *("--address", f"{world.world.addresses[1]}:5000", "-n", "1", *options),
                *job.command,
            ],
            host,
            PYCOLL_SECRET="a secret of the tests",
        )
        for node, host in enumerate(places)
    ]
    try:
        job.wait(lambda worlds: 3 in map(len, worlds), lambda: None, 40)
        world.world.set_link(1, False)
        began = time.monotonic()
        try:
            ended = [agent.communicate(timeout=60) for agent in agents]
            seconds = time.monotonic() - began
            left = world.processes(str(tmp_path))
        finally:
            world.world.set_link(1, True)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [1, 1, 1], ended
    for _, err in ended[1:]:
        assert re.search(LOST, err) and f"{world.world.addresses[1]}:5000" in err, err
    assert seconds < GONE_S + SLACK_S and left == []


def test_hosts_of_a_script_come_and_go(world: SshHosts, start: Start, tmp_path: Path) -> None:
    slots = tmp_path / "slots"
    slots.write_text("host1:2\n")
    words = ("-n", "2", "--min-np", "1", "--max-np", "4")
    job = start(*words, "--host-discovery-script", f"cat {slots}")
    first = job.await_size(2)
    assert [space_of(world, pid) for pid in first] == [1, 1]
    job.write("slots", "host1:2\nhost2:2\n")
    second = job.await_size(4, after=1)
    assert second[:2] == first
    assert [space_of(world, pid) for pid in second[2:]] == [2, 2]
    job.write("slots", "host1:1\n")
    third = job.await_size(1, after=2)
    assert third == first[:1]
    job.write("slots", "host1:1\nhost2:1\nnowhere:1\n")
    job.await_size(2, after=3)
    job.tell("2 end")
    status, err = job.end()
    assert status == 0, err
    assert "host nowhere: ssh ended with status 255" in err, err
    assert "it is not used until the script has left it out" in err
