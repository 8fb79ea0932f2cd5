"""Jobs on hosts from one command, as far as one machine shows them; tests/launchers has real hosts.

Stand-ins for ssh say what ssh would say.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, await_end, python

import pycoll
from pycoll.launch.host_list import HostSlots, parse_hosts, place_ranks, read_hostfile
from pycoll.launch.host_notes import NoteFilter, new_mark
from pycoll.launch.host_starts import HostsOptions, forwarded_variables


def start(*words: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pycoll", "run", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "500", "OMP_NUM_THREADS": "1", **environ},
    )


def run(*words: str, **environ: str) -> tuple[int, str, str]:
    process = start(*words, **environ)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err


# The list of hosts


def test_hosts_in_both_forms(tmp_path: Path) -> None:
    expected = [HostSlots("a", 2), HostSlots("me@b", 3), HostSlots("fd00::1", 4), HostSlots("c", 1)]
    assert parse_hosts("a:2, me@b:3,[fd00::1]:4,c") == expected
    path = tmp_path / "hosts"
    path.write_text("# mine\na:2\n\nme@b slots=3 # fast\n  fd00::1 slots = 4\nc\n")
    with pytest.raises(pycoll.InvalidArgumentError, match=r"line 5: write an IPv6 .*\[fd00::1\]"):
        read_hostfile(str(path))
    path.write_text(path.read_text().replace("fd00::1", "[fd00::1]"))
    assert read_hostfile(str(path)) == expected
    path.write_text("a slots=2 max_slots=4\nb max-slots=3 slots = 1\n")
    assert read_hostfile(str(path)) == [HostSlots("a", 2), HostSlots("b", 1)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is no name of a host"),
        ("a:x", "'x' is no number of slots, 1 or more"),
        ("a:0", "'0' is no number of slots"),
        ("a:1,b:2,a:1", "host a is named twice: name it once, with all its slots"),
        ("fd00::1:2", r"write an IPv6 address in brackets"),
        ("-oProxyCommand=x:1", "'-oProxyCommand=x' is no name of a host"),
    ],
)
def test_lists_that_are_refused(text: str, why: str) -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match=why):
        parse_hosts(text)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    for text, why in (
        ("# none\n", "it names no host"),
        ("a:1\nb cores=2\n", "line 2: 'b cores=2' is no host: expected host:slots or host slots=n"),
        ("a max_slots=2\n", "line 1: 'a max_slots=2' is no host"),
        ("a slots=1 2\n", "line 1: 'a slots=1 2' is no host"),
        ("a slots=many\n", "line 1: 'many' is no number of slots"),
        ("a:1\nb:1\na slots=2\n", "host a is named twice: name it once, with all its slots"),
    ):
        path.write_text(text)
        with pytest.raises(pycoll.InvalidArgumentError, match=re.escape(why)):
            read_hostfile(str(path))
    with pytest.raises(pycoll.InvalidArgumentError, match="No such file"):
        read_hostfile(str(tmp_path / "none"))


def test_slots_are_filled_in_order() -> None:
    hosts = parse_hosts("a:2,b:2,c:2")
    assert place_ranks(hosts, None) == hosts
    assert place_ranks(hosts, 3) == [HostSlots("a", 2), HostSlots("b", 1)]
    with pytest.raises(pycoll.InvalidArgumentError, match=r"7 ranks do not fit.* 6 slots \(a:2"):
        place_ranks(hosts, 7)


def test_servers_take_the_slots_behind_the_ranks() -> None:
    hosts = parse_hosts("a:2,b:3,c:2")

    def placed(ranks: int | None, servers: int) -> list[tuple[int, int]]:
        return [(host.slots, host.servers) for host in place_ranks(hosts, ranks, servers)]

    assert placed(2, 1) == [(2, 0), (1, 1)]
    assert placed(3, 4) == [(2, 0), (3, 2), (2, 2)]
    assert placed(None, 3) == [(2, 0), (3, 1), (2, 2)]
    assert placed(1, 1) == [(2, 1)]
    for ranks, servers in ((5, 3), (None, 7)):
        with pytest.raises(pycoll.InvalidArgumentError, match=rf"and servers={servers} do not fit"):
            place_ranks(hosts, ranks, servers)


def test_chosen_variables_are_carried() -> None:
    environ = {
        **{"PATH": "/bin", "HOME": "/root", "PYTHONHASHSEED": "1", "OMP_PROC_BIND": "true"},
        **{"PYCOLL_TCP_SOCKETS": "3", "PYCOLL_SECRET": "x" * 20, "PYCOLL_RANK": "1", "MINE": "m"},
    }
    options = HostsOptions([], variables=["MINE", "OTHER=o=p"], interfaces=["eth0", "eth1"])
    assert forwarded_variables(environ, options) == {
        **{"PATH": "/bin", "PYTHONHASHSEED": "1", "OMP_PROC_BIND": "true"},
        **{"PYCOLL_TCP_SOCKETS": "3", "MINE": "m", "OTHER": "o=p"},
        "PYCOLL_INTERFACES": "eth0,eth1",
    }
    with pytest.raises(pycoll.InvalidArgumentError, match="-x NONE: the variable is not set here"):
        forwarded_variables(environ, HostsOptions([], variables=["NONE"]))


# Notes between output


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_notes_are_taken_out_of_output(step: int) -> None:
    mark, found = new_mark(), list[object]()
    notes = [{"a": 1}, {"data": "x" * 300}]
    parts = [f"begin\n{mark}{json.dumps(notes[0])}\n", f"\x1epycoll half{mark}"]
    data = "".join([*parts, json.dumps(notes[1]), "\nrest\x1e"]).encode()
    taken = NoteFilter(mark, found.append)
    shown = io.BytesIO()
    for at in range(0, len(data), step):
        shown.write(taken.rest(data[at : at + step]))
    shown.write(taken.end())
    assert found == notes
    assert shown.getvalue() == b"begin\n\x1epycoll halfrest\x1e"


# Jobs on localhost, which needs no ssh


def test_a_job_on_localhost() -> None:
    code = "import os; print(*(os.environ[one] for one in ('RANK', 'WORLD_SIZE', 'MINE')))"
    status, out, err = run("-H", "localhost:2", "--prefix", "-x", "MINE=yes", *python(code))
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{rank} localhost] {rank} 2 yes" for rank in "01"]


def test_a_rank_that_fails_on_localhost() -> None:
    status, _, err = run("-H", "localhost:2", *python("import os, sys; sys.exit(6)"))
    assert status == 6
    assert re.fullmatch(
        r"pycoll run: rank [01] on host localhost \(pid \d+\) failed with exit status 6\n", err
    )


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(signum: int) -> None:
    code = "import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
    process = start("-H", "localhost:2", *python(code))
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(signum)
    process.communicate(timeout=20)
    await_end(pids)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)


def test_a_tolerated_rank_and_servers_on_localhost() -> None:
    program = (
        "import os, pycoll, signal\n"
        "comm = pycoll.init()\n"
        "assert comm.all_reduce(1, algorithm='ps') == 3 and pycoll.servers() == (3,)\n"
        "if comm.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n"
        "    comm.all_reduce(1)\n"
        "except pycoll.PeerLostError:\n"
        "    print('of', comm.shrink().all_reduce(1), flush=True)\n"
    )
    words = ("-H", "localhost:4", "-n", "3", "--servers", "1", "--tolerate", "2")
    status, out, err = run(*words, *python(program))
    assert status == 0, err
    assert out.splitlines() == ["of 2"] * 2
    assert "rank 1 on host localhost (pid" in err and "and the others go on" in err


# Hosts that cannot be used, with a stand-in for ssh


def _ssh(folder: Path, script: str) -> str:
    path = folder / "ssh"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            "echo 'me@far: Permission denied (publickey,password).' >&2; exit 255",
            r"host far: ssh ended with status 255: me@far: Permission denied .*; ssh would ask for "
            r"a password, and pycoll answers no questions: use a key .*ssh-copy-id far",
        ),
        (
            "echo 'ssh: Could not resolve hostname far: Name or service not known' >&2; exit 255",
            r"host far: ssh ended .* not known; check the host's name",
        ),
        (
            "echo 'ssh: connect to host far port 22: Connection refused' >&2; exit 255",
            r"host far: .* Connection refused; does sshd run there, at this port \(-p PORT\)\?",
        ),
        (
            "echo 'Host key verification failed.' >&2; exit 255",
            r"host far: .*; connect once by hand \(ssh far\)",
        ),
        (
            "echo 'sh: 1: /x/python: not found' >&2; exit 127",
            r"host far: .* not found; install the same Python there, at the same path: /",
        ),
        (
            'echo "python: No module named pycoll" >&2; exit 1',
            r"host far: .*; install the same pycoll there, for /",
        ),
        ("exit 3", "host far: ssh ended with status 3: it said nothing"),
        ("sleep 60", "host far: no answer within 2 s"),
    ],
)
def test_a_host_where_no_agent_starts(tmp_path: Path, script: str, text: str) -> None:
    began = time.monotonic()
    path = _ssh(tmp_path, script)
    status, out, err = run("-H", "localhost,far", "--start-timeout", "2", "true", PATH=path)
    assert status == 1 and out == ""
    assert re.search(text, err), err
    assert time.monotonic() - began < 15


def test_what_ssh_is_told(tmp_path: Path) -> None:
    """Options and the host; neither the secret nor the command of the ranks."""
    (tmp_path / "key").write_text("")
    path = _ssh(tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/line; exit 255')
    words = ("-p", "2222", "-i", str(tmp_path / "key"), "--start-timeout", "7.5")
    run("-H", "me@far:2", *words, "echo", "a secret word", PATH=path, PYTHONPATH="/some where")
    words = (tmp_path / "line").read_text().splitlines()
    told = " ".join(words)
    for text in ("-T", "-o BatchMode=yes", "-o ConnectTimeout=8", "-p 2222", f"-i {tmp_path}/key"):
        assert text in told
    assert words[-3:-1] == ["--", "me@far"]
    assert words[-1] == (
        f"env 'PYTHONPATH=/some where' {sys.executable} -m pycoll.launch.host_agent"
    )


def test_hosts_in_several_options() -> None:
    status, _, err = run("-H", "localhost:2", "-H", "localhost:1", "true")
    assert status == 1 and "host localhost is named twice" in err, err


def test_one_machine_under_two_names(tmp_path: Path) -> None:
    path = _ssh(tmp_path, 'for word in "$@"; do last=$word; done; exec sh -c "$last"')
    status, _, err = run("-H", "localhost:1,other:1", "true", PATH=path, PYTHONPATH=str(ROOT))
    assert status == 1
    assert "hosts localhost and other are one machine: name it once, with all its slots" in err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("pycoll.__version__ = '9.8.7'", r"host other has pycoll 9\.8\.7 and host .* has pycoll 0"),
        (
            "import platform; platform.python_version_tuple = lambda: ('3', '99', '0')",
            r"host other has Python 3\.99 and host .* has Python 3\.",
        ),
    ],
)
def test_another_version_there(tmp_path: Path, change: str, text: str) -> None:
    there = (
        f"{sys.executable} -c \"import sys; sys.path.insert(0, '{ROOT}'); import pycoll; {change}; "
        'from pycoll.launch.host_agent import main; sys.exit(main())"'
    )
    path = _ssh(tmp_path, f"exec {there}")
    status, _, err = run("-H", "other:1", "true", PATH=path)
    assert status == 1 and re.search(text, err), err


def test_a_script_that_is_missing() -> None:
    status, _, err = run("-H", "localhost", "nowhere.py")
    assert status == 1
    assert "host localhost: command: there is no file 'nowhere.py'" in err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-H", "a", "--hostfile", "b"), "-H and --hostfile both name the hosts: give one"),
        (("-H", "a:2", "-n", "3"), "3 ranks do not fit: the hosts have 2 slots (a:2)"),
        (("-H", "a:1,b:1,a:2"), "host a is named twice: name it once, with all its slots"),
        (("-H", "a:2", "--min-np", "3"), "min_np=3: expected 1 to 2, the number of ranks"),
        (("-H", "a:2", "-n", "2", "--max-np", "1"), "max_np=1: expected at least 2"),
        (("-n", "1", "--host-discovery-script", " "), "the host discovery script is empty"),
        (("--host-discovery-script", "true"), "Missing option '-n': how many ranks"),
        (("-p", "22", "-n", "1"), "-p is for hosts: give -H or --hostfile too"),
        (("-H", "a:4", "--servers", "1", "--restarts", "1"), "servers end with the job that they"),
        (
            ("-H", "a:4", "--tolerate", "1", "--min-np", "2"),
            "tolerate=1: expected 0 or more, and 0",
        ),
        (("-H", "a", "-i", "/none"), "ssh_identity_file='/none': there is no such file"),
        (("-H", "a", "--start-timeout", "0"), "start_timeout=0.0: expected seconds"),
        (("-H", "a", "-x", "NOT_SET"), "-x NOT_SET: the variable is not set here"),
        (
            ("-H", "a", "--nnodes", "2", "--node-rank", "0", "--address", "b:1"),
            "--nnodes and hosts (-H, --hostfile) are two ways: give one",
        ),
        (("-H", "localhost", "--network-interfaces", "none0"), "PYCOLL_INTERFACES names 'none0'"),
    ],
)
def test_options_that_cannot_work(words: tuple[str, ...], text: str) -> None:
    status, _, err = run(*words, "true", PYCOLL_SECRET="x" * 20)
    assert status != 0 and text in err, err


def test_an_elastic_job_on_localhost() -> None:
    code = "import os; print(sorted(one for one in os.environ if one.startswith('PYCOLL_')))"
    status, out, err = run("-H", "localhost:2", "-n", "1", "--max-np", "2", *python(code))
    assert (status, err) == (0, "")
    assert {"PYCOLL_ELASTIC", "PYCOLL_ELASTIC_WORKER"} < set(ast.literal_eval(out.splitlines()[0]))
