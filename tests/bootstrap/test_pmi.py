"""PMI-1: a server of this test that answers wrongly, and the real one of Hydra.

``tests/launchers`` has the same between hosts, and Slurm.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import expect_joined, join_script, program

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous import pmi
from pycoll.bootstrap.rendezvous.pmi import BLOB_MAX, PmiClient, PmiExchange, decode, encode

MAXES = "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=128"
ANSWERS = {
    "init": "cmd=response_to_init rc=0 pmi_version=1 pmi_subversion=1",
    "get_maxes": MAXES,
    "get_my_kvsname": "cmd=my_kvsname rc=0 kvsname=space_1",
    "put": "cmd=put_result rc=0",
    "barrier_in": "cmd=barrier_out rc=0",
    "finalize": "cmd=finalize_ack rc=0",
}
Server = Callable[..., int]


class Manager:
    """One rank's end of a process manager with PMI-1, in a thread. ``said`` are the requests.

    ``answers`` replaces answers by command; None means silence, and "" the end.
    """

    def __init__(self, **answers: str | None) -> None:
        self._mine, self.theirs = socket.socketpair()
        self._answers: dict[str, str | None] = {**ANSWERS, **answers}
        self._values: dict[str, str] = {}
        self.said: list[str] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.theirs.close()
        self._mine.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._mine.close()

    def _serve(self) -> None:
        for line in self._mine.makefile("r", newline="\n"):
            self.said.append(line.rstrip("\n"))
            words = dict(word.split("=", 1) for word in line.split())
            answer = self._answers.get(words["cmd"])
            if words["cmd"] == "put":
                self._values[words["key"]] = words["value"]
            if words["cmd"] == "get" and answer is None:
                value = self._values.get(words["key"])
                found = f"rc=0 value={value}" if value is not None else "rc=-1 msg=key_not_found"
                answer = f"cmd=get_result {found}"
            if answer == "":
                self._mine.shutdown(socket.SHUT_RDWR)
                return
            if answer is not None:
                self._mine.sendall(f"{answer}\n".encode())


@pytest.fixture
def managers() -> Iterator[Callable[..., Manager]]:
    made: list[Manager] = []

    def make(**answers: str | None) -> Manager:
        made.append(Manager(**answers))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def no_client_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pmi._Process, "client", None)
    monkeypatch.setattr(pmi.atexit, "register", lambda function: None)


def open_client(manager: Manager, seconds: float = 5.0) -> PmiClient:
    return PmiClient(manager.theirs.fileno(), Deadline(seconds))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 86, 87, 88, 1000, 50_000])
def test_blobs_survive_in_values_of_any_length(length: int) -> None:
    blob = os.urandom(length)
    for value_max in (64, 128, 1024):
        values = encode(blob, value_max)
        assert all(re.fullmatch(r"[\w.-]+", value) for value in values)
        assert max(map(len, values)) < value_max
        count, _, first = values[0].partition(".")
        assert int(count) == len(values)
        assert decode("".join([first, *values[1:]])) == blob


def test_a_blob_has_a_bound() -> None:
    values = encode(bytes(BLOB_MAX), 1024)
    assert pmi._checked_count(str(len(values)), 1024) == len(values)
    with pytest.raises(errors.InvalidArgumentError, match=f"publishes {BLOB_MAX + 1} bytes"):
        encode(bytes(BLOB_MAX + 1), 1024)


def test_one_rank_s_conversation(managers: Callable[..., Manager]) -> None:
    manager = managers()
    exchange = PmiExchange(0, 1, manager.theirs.fileno(), Deadline(5))
    flags = os.get_blocking(manager.theirs.fileno())
    assert exchange.blob_of_first(b"\0 blob\n=" * 40) == b"\0 blob\n=" * 40
    assert exchange._fetch() == b"\0 blob\n=" * 40
    exchange.close()
    # The next exchange of the process uses the same client and other keys.
    assert PmiExchange(0, 1, manager.theirs.fileno(), Deadline(5)).blob_of_first(b"x") == b"x"
    assert manager.said[:3] == [
        "cmd=init pmi_version=1 pmi_subversion=1",
        "cmd=get_maxes",
        "cmd=get_my_kvsname",
    ]
    keys = [line.split()[2] for line in manager.said if line.startswith("cmd=put")]
    assert len(keys) == len(set(keys)) == 5
    assert keys[0] == "key=pycoll-1-0" and keys[-1] == "key=pycoll-2-0"
    assert all(len(line) < 128 + 64 + 60 for line in manager.said)
    assert os.get_blocking(manager.theirs.fileno()) == flags
    client = pmi._Process.client
    assert client is not None
    client.finalize()
    assert manager.said[-1] == "cmd=finalize"


def test_a_begun_mpi_keeps_init_and_finalize_to_itself(
    managers: Callable[..., Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = managers()
    monkeypatch.setattr(pmi, "mpi_has_begun", lambda: True)
    client = open_client(manager)
    client.barrier(Deadline(5))
    client.finalize()
    assert manager.said == ["cmd=get_maxes", "cmd=get_my_kvsname", "cmd=barrier_in"]


def test_a_fork_does_not_speak_for_its_parent(managers: Callable[..., Manager]) -> None:
    manager = managers()
    PmiExchange(0, 1, manager.theirs.fileno(), Deadline(5))
    client = pmi._Process.client
    assert client is not None
    said = list(manager.said)
    client.pid += 1
    client.finalize()
    with pytest.raises(errors.InvalidArgumentError, match="a fork of the rank that owns PMI_FD="):
        PmiExchange(0, 1, manager.theirs.fileno(), Deadline(5))
    assert manager.said == said


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ({"init": "cmd=maxes rc=0"}, "answers init with 'cmd=maxes rc=0' instead of cmd=response_"),
        ({"init": "cmd=response_to_init rc=-1 msg=version"}, "refuses 'init pmi_version=1"),
        ({"init": ""}, "the launcher closed it before it answered init"),
        ({"init": "\n"}, "answers init with more than one line"),
        ({"init": "x" * (1 << 17)}, "answers init with more than one line"),
        ({"init": "\0\xff garbage"}, "answers init with "),
        ({"get_maxes": "cmd=maxes keylen_max=64"}, "vallen_max='' is no number"),
        ({"get_maxes": MAXES.replace("128", "-128")}, "vallen_max='-128' is no number"),
        ({"get_maxes": MAXES.replace("128", "9" * 30)}, "is no number"),
        ({"get_maxes": MAXES.replace("128", "63")}, "offers keys of 64 and values of 63 bytes"),
        ({"get_my_kvsname": "cmd=my_kvsname rc=0"}, "answers get_my_kvsname without a name"),
        ({"put": "cmd=put_result rc=1 msg=full"}, "refuses 'put kvsname=space_1 key="),
        ({"get": "cmd=get_result rc=0 value=2.%%%"}, "is not in base64"),
        ({"get": "cmd=get_result rc=0 value=x"}, "'x' is no number of pieces"),
        ({"get": "cmd=get_result rc=0 value=9999999.x"}, "9999999 pieces, expected 1 to"),
        ({"get": "cmd=get_result rc=0 value=0.x"}, "0 pieces, expected 1 to"),
        ({"get": "cmd=get_result rc=0"}, "'' is no number of pieces"),
        ({}, "key_not_found. All ranks must call init() at the same point"),
    ],
)
def test_wrong_answers_are_told(
    answers: dict[str, str], text: str, managers: Callable[..., Manager]
) -> None:
    manager = managers(**answers)
    deadline = Deadline(5)
    with pytest.raises(errors.TransportError) as caught:
        rank = 0 if "put" in answers else 1
        PmiExchange(rank, 2, manager.theirs.fileno(), deadline).blob_of_first(b"x" * 20)
    assert text in str(caught.value)
    assert deadline.remaining() > 3, "an answer is no reason to wait"
    assert (
        "PYCOLL_ADDRESS" in str(caught.value)
        or "init()" in str(caught.value)
        or ("install the same pycoll" in str(caught.value))
    )


@pytest.mark.parametrize(
    ("command", "text"),
    [("init", "for the launcher's answer to init"), ("barrier_in", "in the launcher's barrier")],
)
def test_silence_ends_at_the_deadline(
    command: str, text: str, managers: Callable[..., Manager]
) -> None:
    manager = managers(**{command: None})
    began = time.monotonic()
    with pytest.raises(errors.TimeoutError, match=text):
        PmiExchange(1, 2, manager.theirs.fileno(), Deadline(0.3)).blob_of_first(b"")
    assert 0.2 < time.monotonic() - began < 3
    client = pmi._Process.client
    if client is not None:
        # The late answer would be taken for that of another request.
        with pytest.raises(errors.TransportError, match="still has a barrier under way"):
            client.get("key", Deadline(5))
        client.finalize()
        assert manager.said[-1] == "cmd=barrier_in"


def test_a_number_that_is_no_socket_is_told(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w") as file:
        number = file.fileno()
        with pytest.raises(errors.TransportError, match=f"PMI_FD={number} is no open socket"):
            PmiClient(number, Deadline(5))
    with pytest.raises(errors.TransportError, match="a program between the launcher and Python"):
        PmiClient(number, Deadline(5))


# Hydra's server. The ranks believe that others are on another host.
OTHER_HOST = "MPI_LOCALNRANKS=1"


def hydra(count: int, *line: str) -> list[str]:
    return [program("mpiexec.hydra"), "-n", str(count), "env", OTHER_HOST, *line]


def test_ranks_join_over_hydra_s_exchange(tmp_path: Path) -> None:
    script = join_script(tmp_path, "os.environ['PYCOLL_INIT_TIMEOUT_S'] = '30'")
    expect_joined(hydra(3, sys.executable, script), 3, "MPICH")


WITH_MPI = """
import os, sys
sys.path[:0] = [{here!r}, {root!r}]
from joining import World
from pycoll.bootstrap import join
from pycoll.config import Config
for step in {order!r}:
    if step == "m":
        from mpi4py import MPI
        assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size == 2
    if step == "j":
        with World() as world:
            joined = join(Config.read(), factories=world.factories)
            peers = sorted(world.made[-1].peers)
            world.check()
    if step == "f":
        MPI.Finalize()
os.write(1, f"{{joined.rank}} {{joined.size}} {{joined.source}} {{peers}}\\n".encode())
"""


@pytest.mark.parametrize("order", ["jm", "mj", "jmjm", "mfj", "jmfj"])
def test_mpi_and_pycoll_share_hydra_s_socket(order: str, tmp_path: Path) -> None:
    here = Path(__file__).parents[1] / "support"
    script = tmp_path / "both.py"
    script.write_text(WITH_MPI.format(here=str(here), root=str(here.parent.parent), order=order))
    # Outputs of MPI that ends unhappily would come in addition.
    expect_joined(hydra(2, sys.executable, str(script)), 2, "MPICH")


def test_an_early_end_does_not_end_the_others(tmp_path: Path) -> None:
    """Rank 0 leaves at once with status 0; its finalize tells Hydra that it has not died."""
    script = join_script(tmp_path)
    line = f"{sys.executable} {script} && {{ [ $PMI_RANK = 0 ] || sleep 1; echo end; }}"
    command = hydra(2, "sh", "-c", line)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.count("end")) == (0, 2), done.stderr


def test_hydra_s_rank_that_never_joins_is_waited_for_until_the_deadline(tmp_path: Path) -> None:
    script = join_script(tmp_path)
    late = f"[ $PMI_RANK = 0 ] && sleep 4 || exec {sys.executable} {script}"
    command = hydra(2, "env", "PYCOLL_INIT_TIMEOUT_S=1", "sh", "-c", late)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "init waited 1 s in the launcher's barrier" in done.stderr


def test_a_program_between_launcher_and_rank_that_closes_descriptors_is_told(
    tmp_path: Path,
) -> None:
    between = f"import subprocess, sys; subprocess.run([sys.executable, {join_script(tmp_path)!r}])"
    command = hydra(2, sys.executable, "-c", between)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.count("is no open socket: a program between the launcher and Python") == 2
