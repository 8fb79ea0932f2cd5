"""pycoll run with fewer and more ranks: processes that are killed, and slots that come back."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from elastic_worlds import Worlds
from launching import ROOT

from pycoll.bootstrap.discovery.network import abstract_name
from pycoll.errors import InvalidArgumentError
from pycoll.launch.elastic_jobs import ElasticOptions
from pycoll.launch.host_script import read_hosts
from pycoll.launch.launcher import launch
from pycoll.launch.rank_crew import LaunchOptions

START = (
    "import sys; from pycoll.tools.cli import main; main()",
    "run",
)


class Running(Worlds):
    """An elastic job of elastic_rank.py."""

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        super().__init__(folder)
        line = [sys.executable, "-c", *START, *words, *self.command]
        self.process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def slots(self, text: str) -> None:
        self.write("slots", text)

    def await_worlds(self, count: int) -> list[list[int]]:
        def check() -> None:
            assert self.process.poll() is None, self.end()

        return self.wait(lambda worlds: len(worlds) >= count, check, 40)

    def end(self) -> tuple[int, str]:
        """Its status, and what the launcher said, on one line."""
        _, said = self.process.communicate(timeout=40)
        return self.process.returncode, " ".join(said.split())


@contextlib.contextmanager
def running(folder: Path, *words: str) -> Iterator[Running]:
    job = Running(folder, words)
    try:
        yield job
    finally:
        job.process.kill()
        job.process.wait()


def test_survivors_go_on_in_smaller_worlds_until_they_are_too_few(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "3", "--min-np", "2") as job:
        (first,) = job.await_worlds(1)
        job.tell("3 kill 0")
        second = job.await_worlds(2)[1]
        assert second == first[1:], "ranks keep their order"
        job.tell("2 kill 1")
        status, said = job.end()
    assert status == 137
    assert re.search(r"rank 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", said), said
    assert re.search(r"rank 2 \(pid \d+\) was killed by signal 9 \(SIGKILL\)", said), said
    assert "TransportError: a rank failed, and 1 are left, fewer than --min-np 2" in said, said
    assert "then rank 1 failed too" in said, said


def test_ranks_come_and_go_with_slots(tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("localhost:2\n")
    script = f"cat {tmp_path / 'slots'}"
    words = ("-n", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", script)
    with running(tmp_path, *words) as job:
        (first,) = job.await_worlds(1)
        job.tell("2 kill 0")
        second = job.await_worlds(2)[1]
        assert second == first[1:]
        job.tell("")
        job.slots("localhost:1\n")
        time.sleep(4)
        job.slots("localhost:4\n")
        third = job.await_worlds(3)[2]
        assert len(third) == 3 and third[0] == second[0], "whoever has a state is rank 0"
        job.slots("localhost:2\n")
        fourth = job.await_worlds(4)[3]
        assert fourth == third[:2]
        job.tell("2 end")
        status, said = job.end()
    assert status == 0, said
    assert re.fullmatch(
        r"pycoll run: rank 0 on host localhost \(pid \d+\) was killed by signal 9 \(SIGKILL\)", said
    ), said


def test_too_few_slots_are_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "slots").write_text("localhost:2\n")
    script = f"cat {tmp_path / 'slots'}"
    words = ("-n", "2", "--host-discovery-script", script, "--elastic-timeout", "1")
    with running(tmp_path, *words) as job:
        job.await_worlds(1)
        job.tell("2 kill 1")
        status, said = job.end()
    assert status == 137
    assert "for 1 s no more than 1 ranks could run, and --min-np is 2" in said, said


def test_nothing_is_started_where_there_are_no_slots() -> None:
    line = [sys.executable, "-c", *START, "-n", "1", "--elastic-timeout", "0.5"]
    for script, told in (
        ("false", "ended with status 1"),
        ("echo localhost:many", "'many' is no number of slots"),
        ("/no/such/script", "cannot be run: No such file"),
    ):
        words = [*line, "--host-discovery-script", script, "true"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        said = " ".join(done.stderr.split())
        assert done.returncode == 1 and told in said, said
        assert "for 0.5 s no more than 0 ranks could run, and --min-np is 1" in said, said


def test_lines_of_discovery_scripts() -> None:
    assert read_hosts("") == {}
    text = "localhost  # here\n\n 127.0.0.1:3 \n[fd00::1]:2\nidle:0\nother slots=4\n"
    assert read_hosts(text) == {"localhost": 1, "127.0.0.1": 3, "fd00::1": 2, "other": 4}
    for text, told in (
        ("localhost:x", "line 1: 'x' is no number of slots, 0 or more"),
        ("localhost:1\nlocalhost:-1", "line 2: '-1' is no number"),
        ("a:2\nb:2\na:1", "line 3: host a is named twice"),
    ):
        with pytest.raises(InvalidArgumentError, match=told):
            read_hosts(text)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (ElasticOptions(3), "min_np=3: expected 1 to 2"),
        (ElasticOptions(0), "min_np=0: expected 1 to 2"),
        (ElasticOptions(1, 1), "max_np=1: expected at least 2"),
        (ElasticOptions(patience_s=0), "elastic_timeout=0: expected seconds"),
    ],
)
def test_wishes_that_cannot_be_met_are_told(options: ElasticOptions, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        launch(LaunchOptions(2, ["true"], elastic=options))


def test_programs_that_join_no_world_end_as_ever() -> None:
    options = ElasticOptions(1)
    assert launch(LaunchOptions(2, ["true"], elastic=options)) == 0
    assert launch(LaunchOptions(1, ["false"], elastic=options, quiet=True)) == 1


def test_strangers_at_the_elastic_rendezvous_harm_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "-n", "2", "--min-np", "1") as job:
        (first,) = job.await_worlds(1)
        environment = Path(f"/proc/{first[0]}/environ").read_bytes().decode().split("\0")
        name = next(w.partition("=")[2] for w in environment if w.startswith("PYCOLL_ELASTIC="))
        for nonsense in (b"", b"\n", b'{"worker": "x"}\n', b"[1]\n", b"x" * (1 << 20) + b"x\n"):
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(BrokenPipeError):
                sock.connect(abstract_name(name))
                sock.sendall(nonsense)
        job.tell("2 kill 1")
        assert job.await_worlds(2)[1] == first[:1]
        job.tell("1 end")
        assert job.end()[0] == 0
