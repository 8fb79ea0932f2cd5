"""Elastic jobs of several launchers, here on loopback: hosts that are lost, and hosts that come."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_worlds import Worlds
from harness import free_port
from launching import ROOT, await_end

from pycoll.bootstrap.rendezvous.frames import SILENCE_S
from pycoll.launch.elastic_jobs import ElasticJob, ElasticOptions, JobHost

#: The promise for the loss of node 0, on all others.
FAILURE_S = 10.0


class Nodes(Worlds):
    """Launchers of one elastic job, each in a process of its own."""

    def __init__(self, folder: Path, nodes: int, *words: str) -> None:
        super().__init__(folder)
        self.nodes, self.words = nodes, words
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, node: int, ranks: int, *words: str) -> None:
        place = ("--nnodes", str(self.nodes), "--node-rank", str(node), "--address", self.address)
        options = ("-n", str(ranks), "--start-timeout", "20", *self.words, *words)
        own = {"PYCOLL_SECRET": "a secret of the tests", "PYTHONPATH": str(ROOT)}
        self.processes[node] = subprocess.Popen(
            [sys.executable, "-m", "pycoll", "run", *place, *options, *self.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "COLUMNS": "500", "OMP_NUM_THREADS": "1", **own},
        )

    def await_size(self, size: int, after: int = 0) -> list[int]:
        """The first world of ``size`` ranks after the first ``after`` ones."""

        def done(worlds: list[list[int]]) -> bool:
            return size in map(len, worlds[after:])

        found = self.wait(done, self.look, 40)
        return next(world for world in found[after:] if len(world) == size)

    def look(self) -> None:
        assert self.processes[0].poll() is None, self.processes[0].communicate()

    def end(self) -> dict[int, tuple[int, str]]:
        """Status and errors of all launchers that were not ended before."""
        found = {}
        for node, process in self.processes.items():
            _, err = process.communicate(timeout=40)
            found[node] = (process.returncode, err)
        return found

    def kill(self, node: int) -> None:
        """Kill a launcher; its guard ends its ranks."""
        process = self.processes.pop(node)
        process.kill()
        process.communicate()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path, 2, "--min-np", "2")
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.communicate()


def test_a_host_is_lost_and_another_takes_its_place(nodes: Nodes) -> None:
    nodes.start(1, 2)
    nodes.start(0, 2)
    first = nodes.await_size(4)
    nodes.kill(1)
    second = nodes.await_size(2, after=1)
    assert second == first[:2], "ranks keep their order"
    nodes.start(1, 3)
    third = nodes.await_size(4, after=2)
    assert third[:2] == second, "ranks with a state come first"
    nodes.tell("4 kill 3")
    await_end(third[3:])
    nodes.tell("")
    fourth = nodes.await_size(4, after=3)
    assert fourth[:3] == third[:3], "the spare slot replaces the rank"
    nodes.tell("4 end")
    found = nodes.end()
    assert {node: status for node, (status, _) in found.items()} == {0: 0, 1: 0}, found
    assert re.search(r"pycoll run: node 1 \(\S+:\d+\) is gone: its pycoll run was", found[0][1])
    assert re.search(r"rank 3 on host \S+ \(pid \d+\) was killed by signal 9", found[0][1]), found


def test_too_few_ranks_end_the_job_on_all_hosts(nodes: Nodes) -> None:
    nodes.start(0, 1)
    nodes.start(1, 2)
    first = nodes.await_size(3)
    nodes.tell("3 kill 2")
    nodes.await_size(2, after=1)
    nodes.tell("2 kill 0")
    found = nodes.end()
    assert {node: status for node, (status, _) in found.items()} == {0: 137, 1: 137}, found
    for _, err in found.values():
        assert re.search(r"pycoll run: rank 0 on host \S+ \(pid \d+\) was killed by signal 9", err)
    assert "a rank failed, and 1 are left, fewer than --min-np 2" in found[1][1]
    await_end(first)


def test_the_loss_of_node_0_ends_the_job_with_its_name(nodes: Nodes) -> None:
    nodes.start(0, 2)
    nodes.start(1, 2)
    first = nodes.await_size(4)
    began = time.monotonic()
    nodes.kill(0)
    ((status, err),) = nodes.end().values()
    assert time.monotonic() - began < FAILURE_S
    assert status == 1
    told = r"pycoll run: node 0, which served .* at 127.0.0.1:\d+, is gone: its pycoll run was"
    assert re.search(told, err), err
    await_end(first)


#: A rank that gets a place in a world and does not come to it.
PLACED = """
import os, sys, time
from pycoll.bootstrap.rendezvous import elastic_worker
name, worker = (os.environ[one] for one in ("PYCOLL_ELASTIC", "PYCOLL_ELASTIC_WORKER"))
elastic_worker.take_place(name, int(worker))
open(sys.argv[1], "w").close()
time.sleep(100)
"""


def test_a_host_that_is_lost_while_ranks_join_does_not_keep_them(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYCOLL_INIT_TIMEOUT_S", "300")
    monkeypatch.setenv("PYCOLL_JOB_ID", "two programs")
    nodes.start(0, 2)
    placed = nodes.folder / "placed"
    (nodes.folder / "placed.py").write_text(PLACED)
    monkeypatch.setattr(Nodes, "command", [str(nodes.folder / "placed.py"), str(placed)])
    nodes.start(1, 1)
    until = time.monotonic() + 40
    while not placed.exists():
        nodes.look()
        assert time.monotonic() < until
        time.sleep(0.02)
    assert nodes.all() == []
    nodes.kill(1)
    nodes.await_size(2)
    nodes.tell("2 end")
    found = nodes.end()
    assert found[0][0] == 0, found


def test_a_launcher_that_is_stopped_is_lost(nodes: Nodes) -> None:
    """Its kernel still answers, and its ranks still run; it ends them when it goes on."""
    nodes.start(1, 2)
    nodes.start(0, 2)
    first = nodes.await_size(4)
    began = time.monotonic()
    nodes.processes[1].send_signal(signal.SIGSTOP)
    try:
        second = nodes.await_size(2, after=1)
        assert second == first[:2]
        assert time.monotonic() - began < SILENCE_S + FAILURE_S
    finally:
        nodes.processes[1].send_signal(signal.SIGCONT)
    await_end(first[2:])
    nodes.tell("2 end")
    found = nodes.end()
    told = r"pycoll run: node 1 \(\S+:\d+\) stands still: its pycoll run was stopped"
    assert {node: status for node, (status, _) in found.items()} == {0: 0, 1: 1}, found
    assert all(re.search(told, err) for _, err in found.values()), found


def test_a_node_0_that_is_stopped_ends_the_job_elsewhere(nodes: Nodes) -> None:
    nodes.start(0, 2)
    nodes.start(1, 2)
    first = nodes.await_size(4)
    nodes.processes[0].send_signal(signal.SIGSTOP)
    try:
        _, err = nodes.processes[1].communicate(timeout=40)
        assert nodes.processes.pop(1).returncode == 1
        assert re.search(r"node 0, which served the store at \S+, stands still: its pycoll", err)
        await_end(first[2:])
    finally:
        nodes.processes[0].send_signal(signal.SIGCONT)
    nodes.await_size(2, after=1)
    nodes.tell("2 end")
    assert nodes.end()[0][0] == 0, "its own ranks are as many as --min-np wants"


def test_a_signal_to_one_launcher_ends_all(nodes: Nodes) -> None:
    nodes.start(0, 1)
    nodes.start(1, 2)
    first = nodes.await_size(3)
    nodes.processes[1].send_signal(signal.SIGTERM)
    found = nodes.end()
    assert {node: status for node, (status, _) in found.items()} == {0: 143, 1: 143}, found
    assert all("stopped by SIGTERM on host" in err for _, err in found.values()), found
    await_end(first)


def test_hosts_that_do_not_fit(nodes: Nodes) -> None:
    nodes.start(0, 1)
    nodes.nodes = 3
    nodes.start(1, 1)
    found = nodes.end()
    told = "node 1 .* says 3, .* expects 2; give all processes the same --nnodes"
    for status, err in found.values():
        assert status == 1 and re.search(told, err), err


def test_a_fixed_and_an_elastic_launcher(nodes: Nodes) -> None:
    nodes.start(0, 1)
    nodes.words = ()
    nodes.start(1, 1)
    for status, err in nodes.end().values():
        assert status == 1 and "give all nodes the same --min-np and --max-np" in err, err


def test_a_host_that_never_comes_is_named(nodes: Nodes) -> None:
    nodes.start(0, 1, "--start-timeout", "1")
    ((status, err),) = nodes.end().values()
    assert status == 1
    assert "pycoll run waited 1 s for node 1 of 2: node 1 never arrived at 127.0.0.1:" in err, err


class Fake:
    """A job without processes: hosts whose ranks ask at once."""

    def __init__(self, options: ElasticOptions, *slots: int) -> None:
        self.said: list[str] = []
        self.orders: list[dict[str, object]] = []
        self.lost: list[tuple[list[int], str]] = []
        self.job = ElasticJob(
            options,
            len(slots),
            "job",
            lambda size, job_id: 1,
            lambda ranks, text: self.lost.append((list(ranks), text)),
            self.said.append,
        )
        for node, count in enumerate(slots):
            self.add(node, count)

    def add(self, node: int, slots: int) -> None:
        self.job.add(JobHost(node, f"h{node}", slots, "", self.orders.append))

    def ask(self) -> list[int]:
        """All ranks ask; returns the ranks of the new world, by their numbers."""
        before = len(self.orders)
        for _ in range(3):
            self.job.advance()
            formed = [order["form"] for order in self.orders[before:] if "form" in order]
            if formed:
                break
            for host in self.job.hosts.values():
                for number in host.staying():
                    self.job.take(host, {"rank": number, "asks": number, "torch_port": 1})
        (world,) = {id(one): one for one in formed}.values()
        assert isinstance(world, dict)
        return [int(one.partition(":")[2]) for one in world["processes"]]

    def ended(self, number: int, **words: object) -> None:
        host = next(host for host in self.job.hosts.values() if number in host.living)
        end = {"rank": number, "ended": 0, "text": f"rank {number} left", "stopped": False}
        self.job.take(host, {**end, **words})


def test_the_world_hears_of_ranks_that_cannot_come() -> None:
    fake = Fake(ElasticOptions(1), 2, 2)
    assert fake.ask() == [0, 1, 2, 3]
    fake.ended(1, ended=3)
    fake.job.take(fake.job.hosts[1], {"rank": 3, "restarted": True})
    fake.job.lose(fake.job.hosts[1], "host h1 is gone")
    assert fake.lost == [
        ([1], "rank 1 left; rank 1 cannot join"),
        ([3], "a rank has failed and was started again; rank 3 cannot join"),
        ([2], "host h1 is gone; rank 2 cannot join"),
    ]
    assert fake.ask() == [0]
    fake.ended(0)
    assert len(fake.lost) == 3, "a rank that ends well has joined before"


def test_slots_that_move_to_another_host_keep_the_state() -> None:
    fake = Fake(ElasticOptions(2, grows=True), 2)
    assert fake.ask() == [0, 1]
    fake.add(1, 2)
    fake.job.take(fake.job.hosts[0], {"slots": 0})
    assert fake.ask() == [0, 2, 3], "one rank that has the state stays for a world"
    assert {"stop": [1]} in fake.orders
    fake.ended(1, stopped=True)
    assert fake.ask() == [2, 3]
    assert fake.job.hosts[0].stopping == {0}
    assert not fake.job.over


def test_ranks_of_a_host_stand_together() -> None:
    fake = Fake(ElasticOptions(1, 8), 2, 2)
    assert fake.ask() == [0, 1, 2, 3]
    fake.ended(0, ended=9)
    fake.job.take(fake.job.hosts[0], {"slots": 1})
    fake.job.take(fake.job.hosts[0], {"slots": 3})
    world = fake.ask()
    assert world == [1, 0, 4, 2, 3], "the host with a state first, and there the new ranks last"
    assert fake.said == ["rank 0 left"]


def test_a_host_without_slots_is_let_go() -> None:
    fake = Fake(ElasticOptions(1), 1, 1)
    assert fake.ask() == [0, 1]
    fake.job.take(fake.job.hosts[1], {"slots": 0})
    assert fake.ask() == [0]
    fake.ended(1, stopped=True)
    fake.job.advance()
    assert list(fake.job.hosts) == [0] and {"over": None} in fake.orders and not fake.job.over


def test_messages_that_make_no_sense() -> None:
    fake = Fake(ElasticOptions(1), 1)
    fake.ask()
    host = fake.job.hosts[0]
    for message in (
        *({"rank": 9, "silent": True}, {"rank": 0, "asks": "x", "torch_port": 1}, {}),
        *({"slots": -1}, {"failed": {"text": "x"}}, {"rank": 0, "ended": 0}),
    ):
        with pytest.raises(ValueError, match=r"rank 9|unknown message|."):
            fake.job.take(host, message)
    assert not fake.job.over
