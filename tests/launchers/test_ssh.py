"""pycoll run -H over real ssh: hosts are network namespaces, each with an sshd of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ssh_hosts
from ssh_hosts import ROOT, SshHosts

from pycoll.bootstrap.rendezvous.frames import SILENCE_S

#: The promise for a failure on one host, on all others; and for what no host may have left.
FAILURE_S, GONE_S = 10.0, 10.0
#: What every process of these jobs has on its command line.
RANK, AGENT = "agent_test_rank", "pycoll.launch.host_agent"
SLEEP = f"import os, time; '{RANK}'; os.write(1, b'%s %d\\n' % (os.environ['RANK'].encode(), "
SLEEP += "os.getpid())); time.sleep(100)"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    why = ssh_hosts.obstacle()
    if why:
        pytest.skip(f"needs root, network namespaces and sshd: {why}")
    with ssh_hosts.made(3, tmp_path_factory.mktemp("ssh")) as made:
        yield made


@pytest.fixture(autouse=True)
def _nothing_is_left(world: SshHosts) -> Iterator[None]:
    yield
    until = time.monotonic() + GONE_S
    while world.processes(RANK) or world.processes(AGENT):
        assert time.monotonic() < until, (world.processes(RANK), world.processes(AGENT))
        time.sleep(0.1)


def start(world: SshHosts, *words: str, **environ: str) -> subprocess.Popen[str]:
    return world.start([sys.executable, "-m", "pycoll", "run", *words], **environ)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


def run(world: SshHosts, *words: str, **environ: str) -> tuple[int, str, str]:
    return end(start(world, *words, **environ))


def code(text: str) -> list[str]:
    return [sys.executable, "-c", f"'{RANK}'; {text}"]


SUM = code("import pycoll; comm = pycoll.init(); print(comm.rank, comm.all_reduce(comm.rank + 1))")


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("host0:2,host1:1,host2:2", "host0 host0 host1 host2 host2"),
        ("10.78.0.2:1,10.78.0.3:2", "10.78.0.2 10.78.0.3 10.78.0.3"),
        ("[fd78::2]:2,[fd78::3]:1", "fd78::2 fd78::2 fd78::3"),
        ("localhost:2,host2:1", "localhost localhost host2"),
        ("host0:1,[fd78::2]:1,10.78.0.3:1", "host0 fd78::2 10.78.0.3"),
        ("host1:1,localhost:1", "host1 localhost"),
    ],
)
def test_ranks_of_all_hosts_join(world: SshHosts, hosts: str, names: str) -> None:
    status, out, err = run(world, "-H", hosts, "--prefix", *SUM)
    assert (status, err) == (0, "")
    total = sum(range(len(names.split()) + 1))
    expected = [f"[{rank} {name}] {rank} {total}" for rank, name in enumerate(names.split())]
    assert sorted(out.splitlines()) == expected


def test_the_rest_goes_on_where_the_rank_of_a_host_is_killed(world: SshHosts) -> None:
    program = code(
        "import os, pycoll, signal\n"
        "comm = pycoll.init()\n"
        "if comm.rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    comm.all_reduce(1)\n"
        "except pycoll.PeerLostError:\n"
        "    print('of', comm.shrink().all_reduce(1), flush=True)\n"
    )
    hosts = ("-H", "host0:2,host1:1,host2:1")
    status, out, err = run(world, *hosts, "--tolerate", "1", *program)
    assert (status, out) == (0, "of 3\n" * 3), err
    assert "rank 2 on host host1 (pid" in err and "and the others go on" in err
    status, out, err = run(world, *hosts, *program)
    assert status == 137 and "rank 2 on host host1" in err


@pytest.mark.parametrize(
    ("hosts", "ranks"), [("host0:2,host1:2,host2:2", "3"), ("host0:2,host1:2", "2")]
)
def test_servers_run_on_the_last_hosts(world: SshHosts, hosts: str, ranks: str) -> None:
    slots = 2 * len(hosts.split(","))
    served = code(
        "import pycoll; comm = pycoll.init()\n"
        "print(comm.size, comm.all_reduce(1, algorithm='ps'), pycoll.servers())"
    )
    servers = slots - int(ranks)
    words = ("-H", hosts, "-n", ranks, "--servers", str(servers))
    status, out, err = run(world, *words, *served)
    assert (status, err) == (0, "")
    places = tuple(range(int(ranks), slots))
    assert out == f"{ranks} {ranks} {places}\n" * int(ranks)


def test_a_file_of_hosts_and_fewer_ranks_than_slots(world: SshHosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host1 slots=2  # the first\nhost2:4\n")
    status, out, err = run(world, "--hostfile", str(tmp_path / "hosts"), "-n", "3", *SUM)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == ["0 6", "1 6", "2 6"]


def test_folder_and_variables_are_carried_and_the_secret_is_not_shown(
    world: SshHosts, tmp_path: Path
) -> None:
    show = (
        "import glob, os; names = ('PYCOLL_TCP_SOCKETS', 'MINE', 'NOT_MINE'); "
        "secret = os.environ['PYCOLL_SECRET'].encode(); "
        "lines = [open(one, 'rb').read() for one in glob.glob('/proc/[0-9]*/cmdline') "
        "if os.path.exists(one)]; "
        "print(os.getcwd(), *(os.environ.get(one, '-') for one in names), "
        "len(secret), any(secret in line for line in lines))"
    )
    process = world.start(
        [sys.executable, "-m", "pycoll", "run", "-H", "host1,host2", "-x", "MINE", *code(show)],
        cwd=tmp_path,
        PYCOLL_TCP_SOCKETS="3",
        MINE="a b",
        NOT_MINE="c",
    )
    status, out, err = end(process)
    assert (status, err) == (0, "")
    assert out.splitlines() == [f"{tmp_path} 3 a b - 64 False"] * 2


def test_output_of_hosts_stays_whole(world: SshHosts) -> None:
    text = "import os\nfor n in range(300): os.write(1, b'x' * 50); os.write(1, b'y' * 50 + b'\\n')"
    status, out, err = run(world, "-H", "host0:2,host1:2", *code(f"exec({text!r})"))
    assert (status, err) == (0, "")
    assert out.splitlines() == ["x" * 50 + "y" * 50] * 1200


def test_a_reader_that_pauses_does_not_end_the_job(world: SshHosts) -> None:
    """The launcher cannot write for longer than an agent bears silence."""
    text = "import os\nfor n in range(20_000): os.write(1, b'x' * 99 + b'\\n')"
    process = start(world, "-H", "host1,host2", *code(f"exec({text!r})"))
    assert process.stdout is not None and process.stdout.readline() == "x" * 99 + "\n"
    time.sleep(SILENCE_S + 3)
    status, out, err = end(process)
    assert (status, err) == (0, "")
    # A reader that has begun a line in its buffer keeps it.
    assert len(out) >= 100 * (40_000 - 1 - 200)


def test_output_goes_to_files(world: SshHosts, tmp_path: Path) -> None:
    words = ("-H", "host1,host2", "--output-filename", str(tmp_path / "logs"))
    assert run(world, *words, *code("print(1)")) == (0, "", "")
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank.0", "rank.1"]
    assert (tmp_path / "logs" / "rank.1" / "stdout").read_text() == "1\n"


def test_the_doctor_over_ssh(world: SshHosts) -> None:
    """Before hosts vanish, which takes their IPv6 addresses."""
    process = world.start(
        [sys.executable, "-m", "pycoll", "doctor", "--json", "-H", "host0,host1,host2"]
    )
    status, out, err = end(process)
    report = json.loads(out)
    assert (status, err) == (0, ""), report["findings"]
    assert [one["label"] for one in report["hosts"]] == world.names
    ways = {(one["source"], one["target"]) for one in report["links"] if one["rate"] > 0}
    assert len(ways) == 6


def test_verbose_says_how_hosts_are_reached(world: SshHosts) -> None:
    _, _, err = run(world, "-H", "localhost,host1", "--verbose", "true")
    assert re.search(r"pycoll run: host localhost: \S+ -m pycoll\.launch\.host_agent\n", err)
    assert "pycoll run: host host1: ssh -T -o BatchMode=yes" in err
    assert "pycoll run: host host1: the agent starts 1 ranks" in err


@contextlib.contextmanager
def leading_nowhere(world: SshHosts, *hosts: int) -> Iterator[None]:
    """These hosts believe to be in one network, of the interface aaa, that no cable connects."""

    def ip(host: int, *words: str) -> None:
        line = ["ip", "-n", world.world.space(host), *words]
        subprocess.run(line, check=True, capture_output=True)

    for host in hosts:
        ip(host, "link", "add", "aaa", "type", "veth", "peer", "name", "end")
        ip(host, "addr", "add", f"10.66.0.{host + 1}/24", "dev", "aaa")
        ip(host, "link", "set", "aaa", "up")
        ip(host, "link", "set", "end", "up")
    try:
        yield
    finally:
        for host in hosts:
            ip(host, "link", "del", "aaa")


def test_an_interface_that_goes_nowhere(world: SshHosts) -> None:
    with leading_nowhere(world, 1, 2):
        began = time.monotonic()
        for words in ((), ("--network-interfaces", "eth0")):
            status, out, err = run(world, "-H", "host1,host2", *words, *SUM)
            assert (status, sorted(out.splitlines()), err) == (0, ["0 3", "1 3"], "")
        assert time.monotonic() - began < 40
        status, _, err = run(
            world, "-H", "host1,host2", "--network-interfaces", "aaa", "--start-timeout", "4", *SUM
        )
        assert status == 1 and "10.66.0.2" in err, err


#: Rank 0 starts the new ranks by ssh, which reads the ticket from its input.
GROWS = f"""'{RANK}'
import os, subprocess, sys
import numpy as np
import pycoll

started = []

def invite(tickets):
    for host, ticket in zip(("host0", "host2"), tickets, strict=True):
        paths = os.environ["PYTHONPATH"]
        line = f"read PYCOLL_TICKET; export PYCOLL_TICKET; export PYTHONPATH={{paths}}; "
        line += f"exec {{sys.executable}} grows.py"
        ssh = ["ssh", "-o", "BatchMode=yes", host, f"cd {{os.getcwd()}}; {{line}}"]
        started.append(subprocess.Popen(ssh, stdin=subprocess.PIPE))
        started[-1].stdin.write(ticket.encode() + b"\\n")
        started[-1].stdin.close()

def show(comm):
    total = comm.all_reduce(np.full(1 << 18, comm.rank + 1.0))
    assert (total == comm.size * (comm.size + 1) / 2).all()
    print(comm.rank, comm.size, comm.hosts, flush=True)

comm = pycoll.init()
if comm.size == 2:
    show(comm)
    comm = comm.grow(2, invite, 40.0)
show(comm)
comm.barrier()
assert all(process.wait(30) == 0 for process in started)
"""


def test_a_world_grows_by_ranks_on_other_hosts(world: SshHosts) -> None:
    """One on a host that had none, the other where rank 1 is."""
    (world.folder / "grows.py").write_text(GROWS)
    with leading_nowhere(world, 0, 1, 2):
        status, out, err = run(world, "-H", "host1,host2", "grows.py")
    assert (status, err) == (0, "")
    small = [f"{rank} 2 ((0,), (1,))" for rank in range(2)]
    assert sorted(out.splitlines()) == sorted(
        [*small, *(f"{rank} 4 ((0,), (1, 3), (2,))" for rank in range(4))]
    )


# Failures


def _sleeping(world: SshHosts, *options: str) -> tuple[subprocess.Popen[str], dict[int, int]]:
    """A job of two ranks on each of three hosts, and its processes by rank."""
    hosts = ("-H", "host0:2,host1:2,host2:2", *options)
    process = start(world, *hosts, sys.executable, "-c", SLEEP)
    assert process.stdout is not None
    lines = [process.stdout.readline().split() for _ in range(6)]
    assert all(lines), end(process)
    return process, {int(rank): int(pid) for rank, pid in lines}


def _agent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_rank_that_is_killed_is_named(world: SshHosts) -> None:
    process, pids = _sleeping(world)
    began = time.monotonic()
    os.kill(pids[3], signal.SIGKILL)
    status, _, err = end(process)
    assert status == 128 + signal.SIGKILL
    told = f"pycoll run: rank 3 on host host1 (pid {pids[3]}) was killed by signal 9 (SIGKILL)\n"
    assert err == told
    assert time.monotonic() - began < FAILURE_S


@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_is_killed_is_named(world: SshHosts, node: int) -> None:
    process, pids = _sleeping(world)
    began = time.monotonic()
    os.kill(_agent_of(pids[2 * node]), signal.SIGKILL)
    status, _, err = end(process)
    assert status == 1
    assert re.search(rf"pycoll run: node {node}.* is gone: its pycoll run was killed", err), err
    assert time.monotonic() - began < FAILURE_S + 2


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_hosts(world: SshHosts, signum: int) -> None:
    process, _ = _sleeping(world)
    began = time.monotonic()
    _launcher(process).send_signal(signum)
    status, _, err = end(process)
    assert status == 128 + signum
    name = signal.Signals(signum).name
    assert f"pycoll run: stopped by {name}\n" in err, err
    assert time.monotonic() - began < FAILURE_S


class _Launcher:
    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)


def _launcher(process: subprocess.Popen[str]) -> _Launcher:
    """The process itself: ip, unshare and sh have replaced each other by exec."""
    return _Launcher(process.pid)


def test_a_launcher_that_is_killed_leaves_nothing(world: SshHosts) -> None:
    process, _ = _sleeping(world)
    _launcher(process).send_signal(signal.SIGKILL)
    end(process)  # the fixture looks for what is left


def test_a_host_that_vanishes_is_named(world: SshHosts) -> None:
    process, _ = _sleeping(world)
    began = time.monotonic()
    world.world.set_link(2, False)
    try:
        status, _, err = end(process)
        seconds = time.monotonic() - began
        assert status == 1
        assert re.search(r"pycoll run: node 2 \(host2:\d+\) is gone: .* or its host or", err), err
        until = time.monotonic() + GONE_S
        # The host that nobody reaches has ended its own ranks too.
        while world.processes(RANK):
            assert time.monotonic() < until, world.processes(RANK)
            time.sleep(0.1)
    finally:
        world.world.set_link(2, True)
        _await_host(world, 2)
    assert seconds < FAILURE_S + 4


def test_the_rest_goes_on_where_a_host_vanishes(world: SshHosts) -> None:
    """Rank 1 is killed too: the ranks of all hosts count."""
    program = (
        "import os, pycoll, signal, time\n"
        "comm = pycoll.init(timeout_s=60)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    try:\n"
        "        comm.barrier()\n"
        "        time.sleep(0.01)\n"
        "    except pycoll.PeerLostError:\n"
        "        comm = comm.shrink()\n"
        "        if comm.size == 3: break\n"
        "        if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('of', comm.all_reduce(1), flush=True)\n"
    )
    hosts = ("-H", "host0:2,host1:2,host2:2", "--tolerate", "3")
    process = start(world, *hosts, *code(program))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(6)] == ["ready\n"] * 6
    world.world.set_link(2, False)
    try:
        status, out, err = end(process)
        assert (status, out) == (0, "of 3\n" * 3), err
    finally:
        world.world.set_link(2, True)
        _await_host(world, 2)
    told = r"node 2 \(host2:\d+\) is gone: .*; the others go on without ranks 4 and 5"
    assert re.search(told, " ".join(err.split())), err
    assert "rank 1 (host host0), ranks 4 and 5 (with host host2)" in " ".join(err.split()), err


@pytest.mark.parametrize("options", [(), ("--tolerate", "2")])
def test_a_host_that_vanishes_while_ranks_join_is_told_to_them(
    world: SshHosts, options: tuple[str, ...]
) -> None:
    """Its ranks never call init(), and the others would wait for 300 s."""
    program = (
        "import os, pycoll, time\n"
        "print('ready', flush=True)\n"
        "if os.environ['GROUP_RANK'] == '2': time.sleep(100)\n"
        "try:\n"
        "    pycoll.init(init_timeout_s=300)\n"
        "except pycoll.PeerLostError as error:\n"
        "    print(error.ranks, error, flush=True)\n"
    )
    process = start(world, "-H", "host0:2,host1:2,host2:2", *options, *code(program))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(6)] == ["ready\n"] * 6
    world.world.set_link(2, False)
    try:
        status, out, err = end(process)
    finally:
        world.world.set_link(2, True)
        _await_host(world, 2)
    assert status == int(not options), err
    told = r"\(4, 5\) node 2 \(host2:\d+\) is gone: .* has failed; ranks 4 and 5 cannot join"
    lines = out.splitlines()
    assert len(lines) == 4 and all(re.fullmatch(told, line) for line in lines), out


@pytest.mark.parametrize(("node", "options"), [(2, ()), (0, ("--tolerate", "2"))])
def test_an_agent_that_is_stopped_is_named(
    world: SshHosts, node: int, options: tuple[str, ...]
) -> None:
    """The launcher does not wait long for it, and it ends its ranks when it goes on.

    Where a host may be lost, node 0 decides, and the others end without it.
    """
    process, pids = _sleeping(world, *options)
    stopped = _agent_of(pids[2 * node])
    began = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    try:
        status, _, err = end(process)
    finally:
        # The end of its connection may have ended it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    assert status == 1
    assert re.search(rf"node {node} \([^)]*host{node}[^)]*\) stands still: its pycoll run", err), (
        err
    )
    assert time.monotonic() - began < SILENCE_S + 20


@pytest.mark.parametrize("hosts", [("host1", "host2"), ("host0", "host1", "host2")])
def test_a_launcher_s_host_that_vanishes_leaves_nothing(
    world: SshHosts, hosts: tuple[str, ...]
) -> None:
    """The ranks ignore what can be ignored. Without ranks on the launcher's host, only the silence
    of the launcher tells the others of its end."""
    stubborn = "import signal; signal.signal(1, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)"
    process = start(world, "-H", ",".join(hosts), sys.executable, "-c", f"{stubborn}; {SLEEP}")
    assert process.stdout is not None
    begun = [process.stdout.readline().split()[0] for _ in hosts]
    assert sorted(begun) == [str(rank) for rank in range(len(hosts))]
    began = time.monotonic()
    world.world.set_link(0, False)
    try:
        while world.processes(RANK):
            assert time.monotonic() - began < GONE_S + 4, world.processes(RANK)
            time.sleep(0.1)
        status, _, err = end(process)
        assert status == 1
        if "host0" in hosts:
            assert re.search(r"node [12] \(host[12]:\d+\) is gone: .* or its host or", err), err
        else:
            assert "host host1: its agent or the connection to it ended with status 255" in err
    finally:
        world.world.set_link(0, True)
        _await_host(world, 1)


def _await_host(world: SshHosts, host: int) -> None:
    """Wait until ssh reaches a host again."""
    until = time.monotonic() + 20
    while True:
        process = world.start(["ssh", "-o", "ConnectTimeout=2", f"host{host}", "true"])
        if end(process)[0] == 0:
            return
        assert time.monotonic() < until


# Bad input


def test_hosts_that_are_not_there(world: SshHosts) -> None:
    began = time.monotonic()
    status, out, err = run(world, "-H", "host0,nowhere,10.78.0.99", "--start-timeout", "5", "true")
    assert status == 1 and out == ""
    assert "host nowhere: ssh ended with status 255" in err and "check the host's name" in err
    assert time.monotonic() - began < 15


def test_a_host_without_an_answer(world: SshHosts) -> None:
    began = time.monotonic()
    status, _, err = run(world, "-H", "host0,10.78.0.99", "--start-timeout", "3", "true")
    assert status == 1 and re.search(r"host 10\.78\.0\.99: (ssh ended|no answer within 3 s)", err)
    assert time.monotonic() - began < 15


def test_a_port_where_no_sshd_listens(world: SshHosts) -> None:
    status, _, err = run(world, "-H", "host1,host2", "-p", "2222", "true")
    assert status == 1
    for name in ("host1", "host2"):
        assert re.search(rf"host {name}: .*Connection refused; does sshd run there", err), err


def test_a_host_that_would_ask_for_a_password(world: SshHosts) -> None:
    began = time.monotonic()
    status, _, err = run(
        world, "-H", "host1", "true", SSH_TEST_OPTIONS="-o PubkeyAuthentication=no"
    )
    assert status == 1
    assert re.search(r"host host1: .*Permission denied .*; ssh would ask for a password", err), err
    assert time.monotonic() - began < 10


def test_a_key_that_ssh_gets_by_option(world: SshHosts) -> None:
    without = {"SSH_TEST_OPTIONS": f"-o IdentityFile={world.folder}/none"}
    (world.folder / "ssh_config").write_text(
        (world.folder / "ssh_config").read_text().replace("IdentityFile", "#IdentityFile")
    )
    try:
        status, _, _ = run(world, "-H", "host1", "true", **without)
        assert status == 1
        words = ("-H", "host1", "-i", str(world.folder / "key"), "-p", "22", "true")
        assert run(world, *words, **without) == (0, "", "")
    finally:
        (world.folder / "ssh_config").write_text(
            (world.folder / "ssh_config").read_text().replace("#IdentityFile", "IdentityFile")
        )


def test_a_host_whose_key_is_unknown(world: SshHosts) -> None:
    status, _, err = run(
        world, "-H", "host1", "true", SSH_TEST_OPTIONS="-o UserKnownHostsFile=/dev/null"
    )
    assert status == 1 and "connect once by hand (ssh host1)" in err


def test_one_host_under_two_names(world: SshHosts) -> None:
    status, _, err = run(world, "-H", "host1,host2,10.78.0.2", "true")
    assert status == 1 and "hosts host1 and 10.78.0.2 are one machine" in err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("pycoll.__version__ = '9.8.7'", r"host host1 has pycoll 9\.8\.7 and host host0 has pycol"),
        (
            "import platform; platform.python_version_tuple = lambda: ('3', '99', '0')",
            r"host host1 has Python 3\.99 and host host0 has Python 3\.",
        ),
    ],
)
def test_another_version_on_one_host(
    world: SshHosts, tmp_path: Path, change: str, text: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import socket\nif socket.gethostname() == 'host1':\n    import pycoll; {change}\n"
    )
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    status, _, err = run(world, "-H", "host0,host1", "true", PYTHONPATH=paths)
    assert status == 1 and re.search(text, err), err


def test_a_script_that_is_on_one_host_only(world: SshHosts) -> None:
    """Of the hosts, only host0 sees the folder's files."""
    script = world.hidden / "train.py"
    script.write_text("print(1)\n")
    status, _, err = run(world, "-H", "host0,host1", str(script))
    assert status == 1
    assert f"host host1: command: there is no file '{script}'" in err


# Functions


def test_results_of_a_function(world: SshHosts) -> None:
    program = (
        f"'{RANK}'\nimport pycoll\n"
        "def place(word):\n"
        "    import pycoll, socket\n"
        "    comm = pycoll.init()\n"
        "    return comm.rank, int(comm.all_reduce(1)), socket.gethostname(), word * 200_000\n"
        "found = pycoll.run(place, ('x',), hosts='host1:2,host2:1')\n"
        "print([(*one[:3], len(one[3])) for one in found])\n"
        "try: pycoll.run(lambda: 1 / 0, hosts='host1,host2')\n"
        "except pycoll.RankFailedError as error:\n"
        "    print(type(error.__cause__).__name__, 'ZeroDivisionError' in str(error))\n"
    )
    pytest.importorskip(
        "cloudpickle", reason="no cloudpickle: pip install -r tests/requirements.txt"
    )
    status, out, err = end(world.start([sys.executable, "-c", program]))
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "[(0, 3, 'host1', 200000), (1, 3, 'host1', 200000), (2, 3, 'host2', 200000)]",
        "ZeroDivisionError True",
    ]
