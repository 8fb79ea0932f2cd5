"""What ``pycoll run`` tells torch.distributed of a rank's place, and what it leaves alone."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import ROOT, python, run

from pycoll.bootstrap.discovery.torch_variables import Meeting, unset_in

NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
SHOW = f"import os; print(*(os.environ.get(one, '-') for one in {NAMES!r}), flush=True)"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def told(text: str) -> list[list[str]]:
    return sorted(line.split() for line in text.splitlines())


def command_line(*words: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pycoll", "run", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environ or {})},
        timeout=60,
        check=False,
    )


def test_every_rank_is_told_its_place() -> None:
    status, out, err = run(3, python(SHOW))
    assert (status, err) == (0, "")
    (port,) = {line[-1] for line in told(out)}
    assert told(out) == [[rank, "3", rank, "3", "0", "127.0.0.1", port] for rank in "012"]


def test_what_the_user_has_set_stays() -> None:
    status, out, _ = run(2, python(SHOW), environment={"MASTER_PORT": "5", "MASTER_ADDR": "here"})
    assert status == 0
    assert told(out) == [[rank, "2", rank, "2", "0", "here", "5"] for rank in "01"]
    # A place is told by one alone.
    status, out, _ = run(2, python(SHOW), environment={"LOCAL_RANK": "7"})
    assert [line[:4] for line in told(out)] == [["-", "-", "7", "-"]] * 2


def test_a_launcher_inside_a_launcher_tells_its_own() -> None:
    inner = [sys.executable, "-m", "pycoll", "run", "-np", "2", sys.executable, "-c", SHOW]
    status, out, err = run(1, inner)
    assert (status, err) == (0, "")
    assert [line[:4] for line in told(out)] == [["0", "2", "0", "2"], ["1", "2", "1", "2"]]


def test_a_meeting_is_kept_for_those_who_listen_there() -> None:
    meeting = Meeting()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", meeting.port))
        with socket.socket(socket.AF_INET6) as store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("::", meeting.port))
            store.listen()
            with socket.create_connection(("127.0.0.1", meeting.port), timeout=10):
                store.accept()[0].close()
    finally:
        meeting.close()


def test_ranks_that_were_started_again_meet_elsewhere(tmp_path: Path) -> None:
    code = SHOW + (
        f"; import sys; mark = {str(tmp_path)!r} + '/' + os.environ['RANK']\n"
        "if not os.path.exists(mark): open(mark, 'w'); sys.exit(3)\n"
    )
    status, out, _ = run(2, python(code), restarts=2)
    assert status == 0, out
    ports = {
        rank: [line[-1] for line in map(str.split, out.splitlines()) if line[0] == rank]
        for rank in "01"
    }
    assert ports["0"] == ports["1"] and len(set(ports["0"])) == 2, out


def test_the_place_follows_membership(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, pycoll\n"
        "comm = pycoll.init()\n"
        f"{SHOW}\n"
        "comm.barrier()\n"
        "if comm.rank: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try: comm.barrier()\n"
        "except pycoll.PeerLostError: pycoll.finalize()\n"
        "pycoll.init()\n"
        f"{SHOW}\n"
    )
    done = command_line("-n", "2", "--min-np", "1", str(program))
    assert done.returncode == 0, done.stderr
    *before, after = (line.split() for line in done.stdout.splitlines())
    (port,) = {line[-1] for line in before}
    assert sorted(before) == [[rank, "2", rank, "2", "0", "127.0.0.1", port] for rank in "01"]
    assert after[:6] == ["0", "1", "0", "1", "0", "127.0.0.1"] and after[6] != port, done.stdout
    done = command_line("-n", "2", "--min-np", "1", str(program), environ={"MASTER_PORT": "5"})
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {"5"}, done


def test_names_are_somebody_else_s_or_ours() -> None:
    jax = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    assert unset_in({}) == {*NAMES, *jax}
    assert unset_in({"RANK": "0"}) == {"MASTER_ADDR", "MASTER_PORT", *jax}
    assert unset_in({"MASTER_PORT": ""}) == {*NAMES, *jax} - {"MASTER_PORT"}
    assert unset_in({"JAX_PROCESS_ID": "0"}) == set(NAMES)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-n", "2", "--restart", "2", "x.py"), r"No such option.* '?--restarts'?"),
        (("-n", "2", "--restart=2", "x.py"), r"No such option.* '?--restarts'?"),
        (("-np", "2", "--zzz", "x.py"), r"No such option:? '?--zzz'?"),
        (("-np", "0", "true"), "0 is not in the range"),
    ],
)
def test_mistaken_options_are_told(words: Sequence[str], text: str) -> None:
    done = command_line(*words)
    assert done.returncode == 2 and re.search(text, done.stderr), done.stderr


@pytest.mark.parametrize("descriptors", [12, 16])
def test_too_few_descriptors_are_one_line(descriptors: int) -> None:
    # With fewer cores than ranks the launcher would also say how it sets OMP_NUM_THREADS.
    set_limits = f"ulimit -n {descriptors}; export OMP_NUM_THREADS=1"
    words = f"{set_limits}; exec {sys.executable} -m pycoll run -n 4 true"
    done = subprocess.run(
        ["/bin/sh", "-c", words], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT
    )
    text = "Error: 4 ranks cannot be run here: Too many open files (raise the limit, ulimit -n)"
    assert (done.returncode, done.stderr.strip()) == (1, text)
