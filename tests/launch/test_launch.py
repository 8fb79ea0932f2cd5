"""pycoll run: starts, watches and ends ranks; and the launchers of others."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from harness import free_port
from joining import footprint
from launching import (
    RANK,
    alive,
    await_end,
    expect_joined,
    join_script,
    program,
    python,
    read_pids,
    read_until,
    run,
    start,
    terminal,
)

from pycoll.errors import InvalidArgumentError
from pycoll.launch.launcher import launch
from pycoll.launch.rank_crew import LaunchOptions
from pycoll.launch.rank_process import resolve_command

SAY_AND_SLEEP = python("import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)")


def test_all_ranks_run_and_get_their_variables(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "rank = os.environ['PYCOLL_RANK']\n"
        f"with open({str(tmp_path)!r} + '/' + rank, 'w') as f:\n"
        "    json.dump([sys.argv[1:], sys.executable, dict(os.environ)], f)\n"
    )
    environment = {"SOMETHING": "else", "PYCOLL_TCP_SOCKETS": "3"}
    status, out, err = run(
        3, [str(script), "-x", "--", "y z"], environment=environment, timeout_s=7.5
    )
    assert (status, out, err) == (0, "", "")
    shared = set()
    for rank in range(3):
        arguments, executable, env = json.loads((tmp_path / str(rank)).read_text())
        assert arguments == ["-x", "--", "y z"]
        assert executable == sys.executable
        assert (env["PYCOLL_RANK"], env["PYCOLL_SIZE"]) == (str(rank), "3")
        assert (env["PYCOLL_LOCAL_RANK"], env["PYCOLL_LOCAL_SIZE"]) == (str(rank), "3")
        assert (env["PYCOLL_TIMEOUT_S"], env["PYCOLL_TCP_SOCKETS"]) == ("7.5", "3")
        assert (env["SOMETHING"], env["PYCOLL_STORE"]) == ("else", "launcher")
        assert env.get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
        assert re.fullmatch(r"[0-9a-f]{64}", env["PYCOLL_SECRET"])
        shared.add((env["PYCOLL_SECRET"], env["PYCOLL_ADDRESS"], env["PYCOLL_JOB_ID"]))
    assert len(shared) == 1


def test_the_secret_is_on_no_command_line() -> None:
    process = start(1, python(RANK + "print(os.environ['PYCOLL_SECRET'], flush=True); input()"))
    assert process.stdout is not None
    secret = process.stdout.readline().strip()
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes())
    process.communicate("\n", timeout=30)
    assert len(secret) == 64
    assert not any(secret.encode() in line for line in lines)


def test_ranks_share_the_launcher_s_session_and_lead_groups() -> None:
    code = RANK + (
        "line = f'{os.getsid(0)} {os.getpgid(0)} {os.getpid()}\\n'\n"
        "os.write(1, line.encode()); input() if r == 0 else 0"
    )
    process = start(3, python(code))
    assert process.stdout is not None
    lines = [[int(word) for word in process.stdout.readline().split()] for _ in range(3)]
    session = os.getsid(process.pid)
    process.communicate("\n", timeout=30)
    assert process.returncode == 0
    assert [line[0] for line in lines] == [session] * 3
    assert all(group == pid for _, group, pid in lines)
    assert len({group for _, group, _ in lines}) == 3


def test_rank_0_reads_the_terminal_that_only_the_launcher_obeys() -> None:
    code = RANK + (
        "import signal, time\n"
        "try: os.open('/dev/tty', os.O_RDWR)\n"
        "except OSError as error: os.write(1, b'errno %d\\n' % error.errno)\n"
        "if r == 0: os.write(1, f'read {input()} {os.isatty(0)}\\n'.encode())\n"
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *a: seen.append(1))\n"
        "os.write(1, b'ready %d\\n' % r)\n"
        "until = time.monotonic() + 30\n"
        "while not seen and time.monotonic() < until: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "os.write(1, b'seen %d\\n' % len(seen))\n"
    )
    with terminal(1, python(code)) as (process, ours):
        os.write(ours, b"hello\n")
        # Of a process without a controlling terminal: ENXIO.
        shown = read_until(ours, "ready 0")
        assert f"errno {errno.ENXIO}" in shown
        assert "read hello True" in shown
        os.write(ours, b"\x03")
        read_until(ours, "seen 1")
        assert process.wait(30) == 130


def test_any_program_can_be_run_and_only_rank_0_reads_our_input() -> None:
    process = start(2, ["sh", "-c", "read line; echo $PYCOLL_RANK:$line"])
    out, _ = process.communicate("hello\n", timeout=30)
    assert process.returncode == 0
    assert sorted(out.split()) == ["0:hello", "1:"]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_failing_rank_is_named_and_its_status_returned(failing: int) -> None:
    code = RANK + f"import time; time.sleep(60 * (r != {failing})); os._exit(7)"
    started = time.monotonic()
    status, _, err = run(3, python(code))
    assert status == 7
    assert re.search(rf"rank {failing} \(pid \d+\) failed with exit\s+status 7", err)
    others = [r for r in range(3) if r != failing]
    assert f"ranks {others[0]} and {others[1]} still ran and had to" in err
    assert 2 < time.monotonic() - started < 10
    assert all(len(line) <= 60 for line in err.splitlines())


def test_a_killed_rank_gives_128_and_the_signal() -> None:
    code = RANK + "import time; os.kill(os.getpid(), 9) if r == 1 else time.sleep(60)"
    status, _, err = run(2, python(code))
    assert status == 137
    assert re.search(r"rank 1 \(pid \d+\) was killed by signal 9\s+\(SIGKILL\)", err)


def test_the_others_have_time_to_say_so_themselves(tmp_path: Path) -> None:
    code = RANK + (
        f"import pathlib, time; ending = pathlib.Path({str(tmp_path / 'ending')!r})\n"
        "while r and not ending.exists(): time.sleep(0.01)\n"
        "time.sleep(0.3 if r else 0); os.write(1, b'noticed %d\\n' % r)\n"
        "ending.touch(); os._exit(3 + r)"
    )
    status, out, err = run(3, python(code))
    assert status == 3
    assert "noticed 1" in out
    assert "noticed 2" in out
    assert "then ranks 1 and 2 failed too" in err
    assert "had to be stopped" not in err


def test_a_rank_that_ignores_term_is_killed() -> None:
    code = RANK + (
        "import signal, time; signal.signal(15, signal.SIG_IGN); "
        "os.write(1, b'%d\\n' % os.getpid()); "
        "time.sleep(60) if r else (time.sleep(0.5), os._exit(1))"
    )
    process = start(2, python(code))
    pids = read_pids(process, 2)
    process.communicate(timeout=30)
    assert process.returncode == 1
    await_end(pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_each_rank_once(signum: signal.Signals) -> None:
    code = (
        "import os, signal, sys, time\n"
        "seen = []\n"
        f"signal.signal({int(signum)}, lambda *a: seen.append(1))\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"
        "until = time.monotonic() + 30\n"
        "while not seen and time.monotonic() < until: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "os.write(1, b'seen %d\\n' % len(seen))\n"
    )
    process = start(3, python(code))
    pids = read_pids(process, 3)
    process.send_signal(signum)
    out, err = process.communicate(timeout=30)
    assert out.splitlines() == ["seen 1"] * 3
    assert process.returncode == 128 + signum
    assert signum.name in err
    await_end(pids)


def test_a_second_ctrl_c_kills_at_once() -> None:
    code = "import signal, os, time; signal.signal(2, signal.SIG_IGN); "
    process = start(2, python(code + "os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"))
    pids = read_pids(process, 2)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - started < 3.5, "SIGKILL alone would come 5 s after the first signal"
    assert process.returncode == 130
    await_end(pids)


def test_nothing_outlives_a_killed_launcher() -> None:
    # Not even what the ranks themselves have started.
    script = "sleep 60 & echo $!; echo $$; wait"
    process = start(3, ["sh", "-c", script])
    pids = read_pids(process, 6)
    assert all(alive(pid) for pid in pids)
    process.kill()
    await_end(pids)
    process.communicate(timeout=30)


def test_what_a_rank_left_running_ends_with_it() -> None:
    process = start(2, ["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"])
    pids = read_pids(process, 2)
    process.communicate(timeout=30)
    assert process.returncode == 0
    await_end(pids)


def test_quiet_says_nothing() -> None:
    assert run(2, ["sh", "-c", "exit 4"], quiet=True) == (4, "", "")


@pytest.mark.parametrize(("restarts", "status"), [(1, 3), (2, 0)])
def test_ranks_that_fail_are_started_again(tmp_path: Path, restarts: int, status: int) -> None:
    # Each rank fails the first time.
    script = f'mkdir "{tmp_path}/$PYCOLL_RANK" 2>&- && exit 3; sleep 0.5'
    ended, _, said = run(2, ["sh", "-c", script], restarts=restarts)
    assert ended == status and said.count("was started again") == restarts, said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (LaunchOptions(1, []), "command is empty"),
        (LaunchOptions(1, ["no-such-program-here"]), "'no-such-program-here' is no program"),
        (LaunchOptions(1, ["missing.py"]), "there is no file 'missing.py'"),
        (LaunchOptions(0, ["true"]), "ranks=0: expected 1 to"),
        (LaunchOptions(1, ["true"], restarts=-1), "restarts=-1: expected 0 or more"),
        (LaunchOptions(1, ["true"], timeout_s=-1), "PYCOLL_TIMEOUT_S='-1'"),
        (LaunchOptions(1, ["true"], environment={"PYCOLL_RNK": "1"}), "did you mean PYCOLL_RANK"),
    ],
)
def test_options_that_cannot_work_are_refused(options: LaunchOptions, text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        launch(options)
    assert text in str(caught.value)


def test_a_module_runs_with_this_python() -> None:
    assert resolve_command(["-m", "timeit"]) == [sys.executable, "-m", "timeit"]


def test_launch_leaves_handlers_and_descriptors_as_they_were() -> None:
    gc.collect()
    before = [signal.getsignal(s) for s in (2, 15, 1)], footprint()
    assert launch(LaunchOptions(2, ["true"])) == 0
    gc.collect()
    assert ([signal.getsignal(s) for s in (2, 15, 1)], footprint()) == before


def test_ranks_of_pycoll_run_join(tmp_path: Path) -> None:
    status, out, err = run(4, [join_script(tmp_path)])
    assert (status, err) == (0, "")
    assert len(out.splitlines()) == 4
    assert "0 4 pycoll run [1, 2, 3]" in out


def test_ranks_of_mpich_join(tmp_path: Path) -> None:
    mpiexec = program("mpiexec.hydra")
    expect_joined([mpiexec, "-n", "3", sys.executable, join_script(tmp_path)], 3, "MPICH")
    # A shell between launcher and rank changes nothing.
    line = f"{sys.executable} {join_script(tmp_path)}; true"
    expect_joined([mpiexec, "-n", "2", "sh", "-c", line], 2, "MPICH")


def test_ranks_of_open_mpi_join(tmp_path: Path) -> None:
    command = [program("prterun"), "--personality", "ompi", "--map-by", ":OVERSUBSCRIBE"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    expect_joined([*command, "-n", "3", sys.executable, join_script(tmp_path)], 3, "Open MPI")


def test_ranks_of_torchrun_join(tmp_path: Path) -> None:
    command = [program("torchrun"), "--nproc-per-node", "2", "--master-port", str(free_port())]
    expect_joined([*command, join_script(tmp_path)], 2, "torchrun")


def test_ranks_of_an_mpi4py_communicator_join(tmp_path: Path) -> None:
    mpiexec = program("mpiexec.hydra")
    script = join_script(tmp_path, "from mpi4py import MPI", ", comm=MPI.COMM_WORLD")
    expect_joined([mpiexec, "-n", "3", sys.executable, script], 3, "mpi4py")
