"""pycoll run --nnodes: launchers of several hosts, here on loopback, that start one job."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from harness import free_port
from launching import ROOT, await_end, python

from pycoll.bootstrap.discovery.network import HOST_LOST_S
from pycoll.bootstrap.rendezvous.frames import PULSE_S, SILENCE_S
from pycoll.launch.rank_crew import GRACE_S, KILL_S
from pycoll.launch.rank_process import program_of

SECRET = "a secret of the tests"
#: The promise for one node's failure, on all others.
FAILURE_S = 10.0
SLEEP = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
#: A rank that is in an operation whenever a peer ends.
MEETS = "import os, time, pycoll; comm = pycoll.init(); os.write(1, b'%d\\n' % os.getpid())\n"
MEETS += "while True: comm.barrier(); time.sleep(0.01)"
VERSION = (
    "import sys, platform, pycoll; {change}; "
    "from pycoll.tools.cli import main; sys.argv[0] = 'pycoll'; main()"
)


class Agents:
    """Launchers of one job, each in a process of its own."""

    def __init__(self, nodes: int, host: str = "127.0.0.1", timeout_s: float = 20) -> None:
        self.nodes = nodes
        self.address = f"{host}:{free_port()}"
        self.timeout_s = timeout_s
        self.processes: list[subprocess.Popen[str]] = []

    def start(
        self,
        node: int,
        command: Sequence[str],
        ranks: int = 1,
        *options: str,
        secret: str | None = SECRET,
        cwd: Path = ROOT,
        launcher: Sequence[str] = (sys.executable, "-m", "pycoll"),
        address: str | None = None,
        nodes: int | None = None,
        job_id: str | None = None,
    ) -> subprocess.Popen[str]:
        environ = {name: one for name, one in os.environ.items() if name != "PYCOLL_SECRET"}
        environ |= {"COLUMNS": "500", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if secret is not None:
            environ["PYCOLL_SECRET"] = secret
        if job_id is not None:
            environ["PYCOLL_JOB_ID"] = job_id
        line = [
            *(*launcher, "run", "--nnodes", str(nodes or self.nodes), "--node-rank", str(node)),
            *("--address", address or self.address, "--start-timeout", f"{self.timeout_s:g}"),
            *("-n", str(ranks), *options, *command),
        ]
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=environ,
        )
        self.processes.append(process)
        return process

    def end(self) -> list[tuple[int, str, str]]:
        """Status, output and errors of all."""
        found = []
        try:
            for process in self.processes:
                out, err = process.communicate(timeout=60)
                found.append((process.returncode, out, err))
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        return found

    def pids(self, counts: Sequence[int]) -> list[list[int]]:
        """The process numbers that the ranks have printed."""
        return [
            [int(process.stdout.readline()) for _ in range(count)]  # type: ignore[union-attr]
            for process, count in zip(self.processes, counts, strict=True)
        ]


NAMES = (
    *("PYCOLL_RANK", "PYCOLL_SIZE", "PYCOLL_LOCAL_RANK", "PYCOLL_LOCAL_SIZE", "PYCOLL_STORE"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"),
)
SHOW = (
    f"import os; print(*(os.environ.get(one, '-') for one in {NAMES!r}), "
    "os.environ['PYCOLL_SECRET'], os.environ['PYCOLL_JOB_ID'], os.environ['MASTER_PORT'], "
    "os.environ['PYCOLL_ADDRESS'])"
)


def test_ranks_are_numbered_by_node() -> None:
    agents = Agents(3)
    for node, ranks in ((2, 1), (0, 2), (1, 3)):
        agents.start(node, python(SHOW), ranks)
    found = agents.end()
    assert [(status, err) for status, _, err in found] == [(0, "")] * 3
    lines = [line.split() for _, out, _ in found for line in out.splitlines()]
    lines.sort(key=lambda line: int(line[0]))
    places = [(0, 2, 0), (1, 2, 0), (0, 3, 1), (1, 3, 1), (2, 3, 1), (0, 1, 2)]
    assert [line[:11] for line in lines] == [
        f"{rank} 6 {local} {count} launcher {rank} 6 {local} {count} {node} 127.0.0.1".split()
        for rank, (local, count, node) in enumerate(places)
    ]
    (rest,) = {tuple(line[11:]) for line in lines}
    assert re.fullmatch("[0-9a-f]{64}", rest[0]) and rest[0] != SECRET


def _joins(host: str) -> None:
    code = "import pycoll; comm = pycoll.init(); print(comm.all_reduce(comm.rank + 1))"
    agents = Agents(2, host)
    agents.start(0, python(code), 2)
    agents.start(1, python(code), 1, "--prefix")
    (first, second) = agents.end()
    assert first == (0, "6\n6\n", "")
    assert second == (0, f"[2 {socket.gethostname()}] 6\n", "")


def test_ranks_of_several_nodes_join() -> None:
    _joins("127.0.0.1")


def test_ranks_of_several_nodes_join_over_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"needs IPv6 on the loopback interface (sysctl net.ipv6.conf.lo): {error}")
    _joins("[::1]")


def test_the_secret_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    agents = Agents(2)
    agents.start(0, python("print(1)"), 1, "--secret-file", str(tmp_path / "secret"), secret=None)
    agents.start(1, python("print(1)"))
    assert agents.end() == [(0, "1\n", "")] * 2


def test_output_goes_to_files(tmp_path: Path) -> None:
    agents = Agents(2)
    code = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    for node in range(2):
        agents.start(node, python(code), 1, "--output-filename", str(tmp_path / "logs"))
    assert agents.end() == [(0, "", "")] * 2
    for rank in "01":
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_text() == f"out {rank}\n"
        assert (folder / "stderr").read_text() == "err\n"


# Failures


def _after(agents: Agents, act: object) -> tuple[list[tuple[int, str, str]], float]:
    """Let the ranks of two nodes run, act, and return what the nodes give, and after how long."""
    agents.start(0, python(SLEEP), 2)
    agents.start(1, python(SLEEP), 1)
    pids = agents.pids([2, 1])
    began = time.monotonic()
    assert callable(act)
    act(agents.processes, pids)
    found = agents.end()
    await_end([pid for one in pids for pid in one])
    return found, time.monotonic() - began


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_that_is_killed_ends_the_job_everywhere(node: int) -> None:
    killed = []

    def kill(processes: object, pids: list[list[int]]) -> None:
        killed.append(pids[node][0])
        os.kill(killed[0], signal.SIGKILL)

    found, seconds = _after(Agents(2), kill)
    host = socket.gethostname()
    for status, _, err in found:
        assert status == 128 + signal.SIGKILL
        assert re.search(
            rf"pycoll run: rank [012] on host {host} \(pid {killed[0]}\) was killed by signal 9 "
            r"\(SIGKILL\)\n",
            err,
        ), err
    assert seconds < FAILURE_S


def test_a_rank_that_fails_gives_its_status_to_all() -> None:
    agents = Agents(2)
    agents.start(0, python("import time; time.sleep(60)"))
    agents.start(1, python("import sys; sys.exit(7)"))
    for status, _, err in agents.end():
        assert status == 7
        assert re.search(r"rank 1 on host .* failed with exit status 7\n", err), err


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_killed_ends_the_job_everywhere(node: int) -> None:
    def kill(processes: list[subprocess.Popen[str]], pids: object) -> None:
        processes[node].kill()

    found, seconds = _after(Agents(2), kill)
    assert found[node][0] == -signal.SIGKILL
    status, _, err = found[1 - node]
    assert status == 1
    assert re.search(rf"pycoll run: node {node}.* is gone: its pycoll run was killed", err), err
    assert seconds < FAILURE_S


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_stopped_ends_the_job_elsewhere(node: int) -> None:
    """Its kernel still answers, so only its missing pulse tells. Nothing ends its ranks meanwhile,
    but those that are in an operation with ranks of the other node lose these. It ends when it goes
    on."""
    agents = Agents(2)
    agents.start(0, python(MEETS), 2)
    agents.start(1, python(MEETS), 1)
    pids = agents.pids([2, 1])
    began = time.monotonic()
    agents.processes[node].send_signal(signal.SIGSTOP)
    try:
        _, err = agents.processes[1 - node].communicate(timeout=60)
        seconds = time.monotonic() - began
        await_end([pid for one in pids for pid in one])
    finally:
        agents.processes[node].send_signal(signal.SIGCONT)
    found = agents.end()
    assert found[1 - node][0] == 1
    assert re.search(rf"pycoll run: node {node} \(.*\) stands still: its pycoll run was", err), err
    assert seconds < SILENCE_S + FAILURE_S
    assert found[node][0] != 0, "it goes on and finds that the job is over"


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_agent_ends_the_job_everywhere(node: int) -> None:
    def interrupt(processes: list[subprocess.Popen[str]], pids: object) -> None:
        processes[node].send_signal(signal.SIGINT)

    found, seconds = _after(Agents(2), interrupt)
    for status, _, err in found:
        assert status == 128 + signal.SIGINT
        assert "pycoll run: stopped by SIGINT on host" in err
    assert seconds < FAILURE_S


def test_nodes_that_are_done_wait_for_the_others() -> None:
    agents = Agents(2)
    agents.start(0, python("print(1)"))
    agents.start(1, python("import time, sys; time.sleep(1.5); sys.exit(4)"))
    found = agents.end()
    assert [status for status, _, _ in found] == [4, 4]
    assert "rank 1 on host" in found[0][2]


def test_a_failed_rank_starts_again_where_it_was(tmp_path: Path) -> None:
    """The other node's ranks join with the new process through the same store."""
    code = (
        "import os, sys, pycoll; comm = pycoll.init(); comm.barrier()\n"
        f"mark = {str(tmp_path / 'mark')!r}\n"
        "if comm.rank == 1 and not os.path.exists(mark): open(mark, 'w'); os._exit(9)\n"
        "try: comm.barrier()\n"
        "except pycoll.PeerLostError:\n"
        "    pycoll.finalize(); comm = pycoll.init(); comm.barrier(); comm.barrier()\n"
        "print(comm.all_reduce(1))\n"
    )
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python(code), 1, "--restarts", "1")
    found = agents.end()
    assert [(status, out) for status, out, _ in found] == [(0, "2\n")] * 2, found
    assert "rank 1 on host" in found[1][2] and "was started again" in found[1][2]


def test_what_is_left_of_a_lost_host_s_job_ends_within_10_s() -> None:
    """The limits add up: until the loss is noticed, and until ranks that do not end are killed."""
    assert PULSE_S + HOST_LOST_S + GRACE_S + KILL_S <= FAILURE_S
    # Of the launcher of pycoll run -H, only the silence tells.
    assert SILENCE_S + KILL_S <= FAILURE_S


# Bad input: each ends in bounded time, with the host or node and the reason


#: Jobs with a fixed number of ranks, and elastic ones, which meet in another way.
BOTH = pytest.mark.parametrize("options", [(), ("--min-np", "1")], ids=["fixed", "elastic"])


def _refused(agents: Agents) -> list[str]:
    began = time.monotonic()
    found = agents.end()
    assert time.monotonic() - began < agents.timeout_s + 10
    assert [out for _, out, _ in found] == [""] * len(found)
    assert all(status for status, _, _ in found), found
    return [err for _, _, err in found]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("pycoll.__version__ = '9.8.7'", r"has pycoll 9\.8\.7 and host .* has pycoll 0\."),
        (
            "platform.python_version_tuple = lambda: ('3', '99', '0')",
            r"has Python 3\.99 and host .* has Python 3\.",
        ),
    ],
)
@BOTH
def test_versions_must_be_the_same(change: str, text: str, options: tuple[str, ...]) -> None:
    agents = Agents(2)
    agents.start(0, python("print(1)"), 1, *options)
    other = [sys.executable, "-c", VERSION.format(change=change)]
    agents.start(1, python("print(1)"), 1, *options, launcher=other)
    for err in _refused(agents):
        assert re.search(text, err), err


@BOTH
def test_two_jobs_with_one_secret_do_not_mix(options: tuple[str, ...], tmp_path: Path) -> None:
    """Their programs differ, unless the user has named the job."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("print('ran')")
    for job in (None, "mine"):
        agents = Agents(2)
        for node, name in enumerate(("one.py", "two.py")):
            agents.start(node, [str(tmp_path / name)], 1, *options, job_id=job)
        if job is None:
            for err in _refused(agents):
                assert "node 0 runs one.py and node 1 runs two.py: if these are two jobs" in err
                assert "set the same PYCOLL_JOB_ID on all nodes" in err
        else:
            found = agents.end()
            assert [status for status, _, _ in found] == [0, 0], found
            assert any(out == "ran\n" for _, out, _ in found), found


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/a/train.py", "--lr", "1"], "train.py"),
        (["python", "-u", "/a/train.py", "x"], "train.py"),
        (["/usr/bin/python3.11", "-u", "-c", "print(1)"], "python3.11"),
        (["python", "-m", "pkg.train", "x"], "-m pkg.train"),
        (["-m", "pkg.train"], "-m pkg.train"),
        (["/bin/sh", "job.sh"], "sh"),
        (["python"], "python"),
    ],
)
def test_names_of_what_commands_run(command: list[str], name: str) -> None:
    assert program_of(command) == name


def test_a_secret_is_needed(tmp_path: Path) -> None:
    agents = Agents(2)
    agents.start(0, python("print(1)"), secret=None)
    (tmp_path / "short").write_text("short\n")
    agents.start(1, python("print(1)"), 1, "--secret-file", str(tmp_path / "short"))
    agents.start(1, python("print(1)"), 1, "--secret-file", str(tmp_path / "none"))
    missing, short, none = _refused(agents)
    assert "needs a secret, alike on all of them: --secret-file FILE or PYCOLL_SECRET" in missing
    assert "has 5 characters: expected at least 16" in short
    assert "No such file" in none


@BOTH
def test_secrets_must_be_the_same(options: tuple[str, ...]) -> None:
    agents = Agents(2, timeout_s=2.5)
    agents.start(0, python("print(1)"), 1, *options)
    agents.start(1, python("print(1)"), 1, *options, secret="another secret of the tests")
    first, second = _refused(agents)
    assert "pycoll run waited 2.5 s for node 1 of 2" in first
    assert "turned away: 127.0.0.1:" in first and "BAD_PROOF" in first
    assert "node 1 was not admitted" in second and "the secrets differ" in second


def test_a_node_that_never_comes_is_named() -> None:
    agents = Agents(3, timeout_s=2)
    agents.start(0, python("print(1)"))
    agents.start(2, python("print(1)"))
    for err in _refused(agents):
        assert "pycoll run waited 2 s for node 1 of 3: node 1 never arrived" in err
        assert "--start-timeout sets the limit" in err


@BOTH
def test_no_node_serves_the_address(options: tuple[str, ...]) -> None:
    agents = Agents(2, timeout_s=1.5)
    agents.start(1, python("print(1)"), 1, *options)
    (err,) = _refused(agents)
    assert f"node 1 could not reach node 0 at address='{agents.address}' within 1.5 s" in err
    assert "Connection refused" in err


@pytest.mark.parametrize("twice", [0, 1])
def test_a_node_rank_may_be_given_once(twice: int) -> None:
    agents = Agents(3, timeout_s=5)
    for node in (0, 1, twice):
        agents.start(node, python("print(1)"))
    for err in _refused(agents):
        assert f"two processes claim node {twice}" in err, err
        assert "--node-rank" in err


def test_a_node_rank_may_be_given_once_in_an_elastic_job() -> None:
    agents = Agents(3, timeout_s=5)
    for node in (0, 1, 1):
        agents.start(node, python("print(1)"), 1, "--min-np", "1")
    for err in _refused(agents):
        assert "two processes claim node 1" in err and "--node-rank" in err, err


def test_nodes_must_agree_on_their_number() -> None:
    agents = Agents(2, timeout_s=5)
    agents.start(0, python("print(1)"))
    agents.start(1, python("print(1)"), nodes=3)
    for err in _refused(agents):
        assert "the nodes disagree about the size: node 1" in err and "--nnodes" in err


@BOTH
def test_two_jobs_cannot_share_a_port(options: tuple[str, ...]) -> None:
    agents = Agents(2, timeout_s=4)
    agents.start(0, python("print(1)"), 1, *options)
    agents.start(0, python("print(1)"), 1, *options, secret="the secret of another job")
    texts = _refused(agents)
    assert any("the port is in use; choose another" in err for err in texts), texts


@BOTH
def test_families_must_fit(options: tuple[str, ...]) -> None:
    agents = Agents(2, timeout_s=1.5)
    agents.start(0, python("print(1)"), 1, *options)
    there = "[::1]:" + agents.address.split(":")[1]
    agents.start(1, python("print(1)"), 1, *options, address=there)
    first, second = _refused(agents)
    assert "node 1 never arrived" in first
    assert re.search(r"node 1 could not reach node 0 at address='\[::1\]:\d+' within", second)


@BOTH
def test_a_script_must_be_on_every_host(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    agents = Agents(2)
    agents.start(0, ["train.py"], 1, *options, cwd=tmp_path)
    agents.start(1, ["train.py"], 1, *options)
    for err in _refused(agents):
        assert re.search(r"host .* \(node 1\): command: there is no file 'train.py'", err), err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--nnodes", "2", "--node-rank", "0"), "--nnodes needs --address too"),
        (("--nnodes", "2", "--address", "a:1"), "--nnodes needs --node-rank too"),
        (("--node-rank", "0"), "--node-rank is for a job of several nodes: give --nnodes too"),
        (("--nnodes", "2", "--node-rank", "2", "--address", "a:1"), "nnodes=2 allows 0 to 1"),
        (("--nnodes", "2", "--node-rank", "0", "--address", "a"), 'expected "host:port"'),
        (
            ("--nnodes", "2", "--node-rank", "1", "--address", "nowhere.invalid:5"),
            "'nowhere.invalid' does not resolve",
        ),
        (
            (
                *("--nnodes", "2", "--node-rank", "0", "--address", "a:1"),
                *("--host-discovery-script", "true"),
            ),
            "--host-discovery-script names the hosts: leave out -H, --hostfile and --nnodes",
        ),
        (
            (
                *("--nnodes", "2", "--node-rank", "1", "--address", "a:1"),
                *("--min-np", "1", "--elastic-timeout", "0"),
            ),
            "elastic_timeout=0.0: expected seconds",
        ),
    ],
)
def test_options_that_cannot_work(options: tuple[str, ...], text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pycoll", "run", "-n", "1", *options, "true"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYCOLL_SECRET": SECRET, "COLUMNS": "500"},
        timeout=60,
        check=False,
    )
    assert done.returncode != 0 and text in done.stderr, done.stderr


# Ranks that may fail, and servers

#: Rank 1 is killed, and the others shrink.
SURVIVE = (
    "import os, pycoll, signal\n"
    "comm = pycoll.init()\n"
    "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    "try:\n"
    "    comm.all_reduce(1)\n"
    "except pycoll.PeerLostError:\n"
    "    print('of', comm.shrink().all_reduce(1), flush=True)\n"
)


def test_the_only_rank_of_a_node_may_fail_where_that_is_tolerated() -> None:
    agents = Agents(3)
    for node in range(3):
        agents.start(node, python(SURVIVE), 1, "--tolerate", "1")
    found = agents.end()
    assert [status for status, _, _ in found] == [0, 0, 0], found
    assert [out for _, out, _ in found] == ["of 2\n", "", "of 2\n"]
    assert "rank 1 on host" in found[1][2] and "and the others go on" in found[1][2]


def test_a_job_of_which_no_rank_is_left_fails() -> None:
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python("raise SystemExit(3)"), 1, "--tolerate", "2")
    for status, _, err in agents.end():
        assert status == 1 and "pycoll run: all ranks have failed" in err, err


#: Ranks go on until one of them is lost, and then say how many are left.
GO_ON = (
    "import os, pycoll\n"
    "comm = pycoll.init()\n"
    "comm.barrier()\n"
    "os.write(1, b'%d\\n' % os.getpid())\n"
    "try:\n"
    "    while True: comm.barrier()\n"
    "except pycoll.PeerLostError:\n"
    "    print('of', comm.shrink().all_reduce(1), flush=True)\n"
)


def test_a_host_may_be_lost_with_its_ranks_where_so_many_are_tolerated() -> None:
    agents = Agents(2)
    for node, ranks in enumerate((3, 2)):
        agents.start(node, python(GO_ON), ranks, "--tolerate", "2")
    _, lost = agents.pids([3, 2])
    agents.processes[1].kill()
    (status, out, err), _ = agents.end()
    assert (status, out) == (0, "of 3\n" * 3), err
    assert re.search(r"node 1 \(\S+\) is gone: .*; the others go on without ranks 3 and 4\n", err)
    assert re.search(r"the job has ended without ranks 3 and 4 \(with host \S+\)\n$", err), err
    await_end(lost)


#: The ranks of the second host never join; the others report the error of init(). They have loaded
#: what they need, and SIGTERM does not end them while a busy machine delays them.
COME = (
    "import os, pycoll, signal, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "pycoll.local_world(1)[0].close()\n"
    "os.write(1, b'%d\\n' % os.getpid())\n"
    "if os.environ['GROUP_RANK'] == '1': time.sleep(60)\n"
    "try:\n"
    "    pycoll.init(init_timeout_s=300)\n"
    "except pycoll.PeerLostError as error:\n"
    "    print(error.ranks, error, flush=True)\n"
)


@pytest.mark.parametrize("tolerated", ["0", "2"])
def test_a_host_that_is_lost_while_ranks_join_is_told_to_them(tolerated: str) -> None:
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python(COME), 2, "--tolerate", tolerated)
    _, lost = agents.pids([2, 2])
    agents.processes[1].kill()
    (status, out, err), _ = agents.end()
    assert status == int(tolerated == "0"), err
    told = r"\(2, 3\) node 1 \(\S+\) is gone: .*; ranks 2 and 3 cannot join"
    lines = out.splitlines()
    assert len(lines) == 2 and all(re.fullmatch(told, line) for line in lines), out
    await_end(lost)


def test_a_rank_that_fails_before_it_joins_is_told_to_the_others() -> None:
    code = "import os\nif os.environ['RANK'] == '3': raise SystemExit(5)\n" + COME
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python(code.replace("== '1'", "== ''")), 2, "--tolerate", "1")
    found = agents.end()
    assert [status for status, _, _ in found] == [0, 0], found
    lines = [line for _, out, _ in found for line in out.splitlines() if " " in line]
    told = r"\(3,\) rank 3 on host \S+ \(pid \d+\) failed with exit status 5; rank 3 cannot join"
    assert len(lines) == 3 and all(re.fullmatch(told, line) for line in lines), found


def test_lost_ranks_of_all_hosts_count_together() -> None:
    """Each host loses one rank, and the second one ends the job with the reason."""
    code = (
        "import os, time\n"
        "rank = int(os.environ['RANK'])\n"
        "time.sleep(0.1 + rank) if rank in (0, 2) else time.sleep(60)\n"
        "raise SystemExit(5 + rank)\n"
    )
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python(code), 2, "--tolerate", "1")
    found = agents.end()
    for status, _, err in found:
        assert status == 7, err
        told = r"rank 0 on host \S+ \(pid \d+\) failed with exit status 5, and the others go on\n"
        assert re.search(told, err), err
        told = r"rank 2 on host \S+ \(pid \d+\) failed with exit status 7; 2 ranks are lost by now"
        assert re.search(told + ", and --tolerate 1 counts those of all nodes", err), err


def test_a_host_with_too_many_ranks_ends_the_job() -> None:
    agents = Agents(2)
    for node in range(2):
        agents.start(node, python(SLEEP), 2, "--tolerate", "1")
    pids = agents.pids([2, 2])
    agents.processes[1].kill()
    (status, _, err), _ = agents.end()
    assert status == 1
    told = "2 ranks are lost by now, and --tolerate 1 counts those of all nodes"
    assert f"its host or the network to it has failed; {told}" in err, err
    await_end([pid for one in pids for pid in one])


def test_nodes_must_agree_on_the_tolerated_ranks() -> None:
    agents = Agents(2)
    agents.start(0, python("print(1)"), 1, "--tolerate", "1")
    agents.start(1, python("print(1)"), 1)
    for err in _refused(agents):
        assert "node 0 has --tolerate 1 and node 1 --tolerate 0: it counts the ranks of all" in err


SERVED = "import pycoll; print(pycoll.init().all_reduce(1, algorithm='ps'), pycoll.servers())"


def test_the_last_node_may_have_servers_too() -> None:
    agents = Agents(2)
    agents.start(0, python(SERVED), 1)
    agents.start(1, python(SERVED), 1, "--servers", "2")
    assert agents.end() == [(0, "2 (2, 3)\n", "")] * 2


def test_a_node_may_have_servers_only() -> None:
    agents = Agents(2)
    agents.start(0, python(SERVED), 2)
    code = (
        "from pycoll.launch.launcher import launch, LaunchOptions; "
        "from pycoll.launch.node_meeting import NodeOptions; "
        f"node = NodeOptions(2, 1, {SECRET.encode()!r}, {agents.address!r}); "
        "raise SystemExit(launch(LaunchOptions(0, ['true'], servers=2, node=node)))"
    )
    served = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    agents.processes.append(served)
    assert agents.end() == [(0, "2 (2, 3)\n2 (2, 3)\n", ""), (0, "", "")]


def test_servers_are_the_last_ranks() -> None:
    agents = Agents(2)
    agents.start(0, python(SERVED), 1, "--servers", "1")
    agents.start(1, python(SERVED), 1)
    for status, _, err in agents.end():
        assert status == 1 and "node 1 starts ranks behind the servers of node 0" in err, err
