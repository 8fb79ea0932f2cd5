"""``pycoll.run``: results, failures of ranks, wrong arguments and signals; here and on hosts."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import numpy
import pytest
from launching import ROOT, alive, await_end

import pycoll
from pycoll.launch import function_runs, host_agent, host_starts

HERE = pytest.mark.parametrize("hosts", [None, "localhost:2"])


class OddError(Exception):
    """An exception that can be pickled, and not be unpickled."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__("x")
        self.a = a


class LockedError(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class ChangedError(Exception):
    """An exception that becomes a text when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("a text",)


def _place(word: str, *, suffix: str = "") -> tuple[int, int, str]:
    comm = pycoll.init()
    total = int(comm.all_reduce(1))
    pycoll.finalize()
    return comm.rank, total, word + suffix


def _fails_on_one() -> None:
    if os.environ["PYCOLL_RANK"] == "1":
        raise ValueError("so it is")
    time.sleep(30)


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises(kind: str) -> None:
    if os.environ["PYCOLL_RANK"] == "1":
        raise (
            OddError(1, 2)
            if kind == "odd"
            else LockedError()
            if kind == "locked"
            else ChangedError("changed")
        )


def _returns(kind: str) -> Any:
    if os.environ["PYCOLL_RANK"] == "1":
        return OddError(1, 2) if kind == "odd" else LockedError()
    return None


def _sleeps() -> None:
    os.write(1, b"%d\n" % os.getpid())
    time.sleep(60)


def _raises_at_sigint() -> None:
    try:
        _sleeps()
    except KeyboardInterrupt:
        raise ValueError("a rank that was interrupted") from None


def _ignores_sigint() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _sleeps()


def _fails_before_ctrl_c() -> None:
    """Fail on rank 1, while rank 0 goes on until the launcher interrupts or ends it."""
    if os.environ["PYCOLL_RANK"] == "0":
        _sleeps()
    os.write(1, b"%d\n" % os.getpid())
    raise ValueError("before Ctrl-C")


@pytest.fixture(autouse=True)
def _module_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks import functions from this module, and pycoll from this tree."""
    paths = f"{ROOT}{os.pathsep}{Path(__file__).parent}{os.pathsep}{ROOT / 'tests/support'}"
    monkeypatch.setenv("PYTHONPATH", paths)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@HERE
def test_results_come_in_order(hosts: str | None) -> None:
    found = pycoll.run(_place, ("a",), {"suffix": "b"}, np=2, hosts=hosts)
    assert found == [(0, 2, "ab"), (1, 2, "ab")]


# Failures of ranks


@HERE
def test_a_function_that_raises_carries_its_traceback(hosts: str | None) -> None:
    with pytest.raises(pycoll.RankFailedError, match="the function failed on rank 1") as caught:
        pycoll.run(_fails_on_one, np=2, hosts=hosts)
    assert caught.value.rank == 1
    assert "in _fails_on_one" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_dies_in_a_function_is_named() -> None:
    with pytest.raises(pycoll.RankFailedError, match=r"rank 0 .*killed by signal 9") as caught:
        pycoll.run(_dies, np=1)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("odd", "OddError: x"),
        ("locked", "LockedError: locked"),
        ("changed", "ChangedError: changed"),
    ],
)
@HERE
def test_an_exception_that_does_not_travel_leaves_its_traceback(
    hosts: str | None, kind: str, line: str
) -> None:
    with pytest.raises(pycoll.RankFailedError, match="the function failed on rank 1") as caught:
        pycoll.run(_raises, (kind,), np=2, hosts=hosts)
    error = caught.value
    assert (error.rank, error.ranks, error.__cause__) == (1, (1,), None)
    assert "in _raises" in str(error) and line in str(error)


@HERE
def test_a_result_that_cannot_be_unpickled_names_its_rank(hosts: str | None) -> None:
    text = r"the result of rank 1 cannot be unpickled \(TypeError: .*missing 1 required"
    with pytest.raises(pycoll.RankFailedError, match=text) as caught:
        pycoll.run(_returns, ("odd",), np=2, hosts=hosts)
    assert (caught.value.rank, caught.value.ranks) == (1, (1,))
    assert isinstance(caught.value.__cause__, TypeError)


@HERE
def test_a_result_that_cannot_be_pickled_names_its_rank(hosts: str | None) -> None:
    text = r"the result of rank 1 cannot be pickled:\n(?s:.*)cannot pickle '_thread.lock' object"
    with pytest.raises(pycoll.RankFailedError, match=text) as caught:
        pycoll.run(_returns, ("locked",), np=2, hosts=hosts)
    assert (caught.value.rank, caught.value.ranks) == (1, (1,))
    assert isinstance(caught.value.__cause__, TypeError)


# Arguments


def _starts(*unused: object, **options: object) -> NoReturn:
    pytest.fail("something was started")


@HERE
@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"np": "2"}, "np is '2': expected a whole number from 1 to "),
        ({"np": 2.5}, "np is 2.5: expected a whole number from 1 to "),
        ({"np": True}, "np is True: expected a whole number from 1 to "),
        ({"np": 0}, "np is 0: expected a whole number from 1 to "),
        ({"np": 1 << 40}, "np is 1099511627776: expected a whole number from 1 to "),
        ({"start_timeout": "x"}, "start_timeout is 'x': expected seconds, a finite number above 0"),
        ({"start_timeout": True}, "start_timeout is True: expected seconds"),
        ({"start_timeout": 0}, "start_timeout is 0: expected seconds"),
        ({"start_timeout": float("nan")}, "start_timeout is nan: expected seconds"),
        ({"start_timeout": 10**400}, "expected seconds, a finite number above 0"),
        ({"args": 5}, "args is 5: expected a tuple or list of the function's arguments"),
        ({"args": "ab"}, "args is 'ab': expected a tuple or list"),
        ({"kwargs": 5}, "kwargs is 5: expected a dict"),
        ({"kwargs": {1: 2}}, "kwargs is {1: 2}: expected a dict from names of arguments"),
        ({"ssh_port": "22"}, "ssh_port is '22': expected a whole number from 1 to 65535"),
        ({"ssh_port": 65536}, "ssh_port is 65536: expected a whole number from 1 to 65535"),
        ({"ssh_identity_file": 3}, "ssh_identity_file is 3: expected the name of a file"),
        ({"ssh_identity_file": b"a"}, "ssh_identity_file is b'a': expected the name of a file"),
        ({"network_interfaces": 5}, "network_interfaces is 5: expected names"),
        ({"network_interfaces": None}, "network_interfaces is None: expected names"),
        ({"network_interfaces": b"lo"}, "network_interfaces is b'lo': expected names"),
        ({"network_interfaces": ["lo", 5]}, "network_interfaces is ['lo', 5]: expected names"),
        ({"network_interfaces": "lo,"}, "network_interfaces is 'lo,': expected names"),
    ],
)
def test_arguments_of_a_wrong_type_or_value(
    monkeypatch: pytest.MonkeyPatch, hosts: str | None, words: dict[str, Any], text: str
) -> None:
    for name in ("launch", "launch_on_hosts"):
        monkeypatch.setattr(function_runs, name, _starts)
    with pytest.raises(pycoll.InvalidArgumentError, match=re.escape(text)):
        pycoll.run(divmod, **{"args": (7, 2), "hosts": hosts} | words)


@pytest.mark.parametrize("hosts", [["localhost:1"], 5, b"localhost:1", ("a", 2)])
def test_hosts_are_one_text(hosts: Any) -> None:
    text = re.escape(f'hosts is {hosts!r}: expected a text, "host:slots,host:slots"')
    with pytest.raises(pycoll.InvalidArgumentError, match=text):
        pycoll.run(divmod, (7, 2), hosts=hosts)


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ()), ((), ()), ("lo", ("lo",)), ("eth0, eth1", ("eth0", "eth1")), (["lo"], ("lo",))],
)
def test_arguments_of_hosts_arrive(
    monkeypatch: pytest.MonkeyPatch, given: Any, expected: tuple[str, ...]
) -> None:
    seen: list[host_starts.HostsOptions] = []

    def note(options: host_starts.HostsOptions, work: object, results: Any) -> None:
        seen.append(options)
        results(0, pickle.dumps(("", pickle.dumps(3))))

    monkeypatch.setattr(function_runs, "launch_on_hosts", note)
    number, seconds, key = numpy.int64(1), numpy.float32(2.5), Path("key")
    found = pycoll.run(
        divmod,
        [7, 2],
        np=number,  # type: ignore[arg-type]
        hosts="a:4",
        ssh_port=22,
        ssh_identity_file=key,
        start_timeout=seconds,  # type: ignore[arg-type]
        network_interfaces=given,
    )
    assert found == [3]
    (options,) = seen
    assert [(host.name, host.slots) for host in options.hosts] == [("a", 1)]
    assert (options.ssh_port, options.identity, options.interfaces) == (22, "key", expected)
    assert type(options.start_timeout_s) is float and options.start_timeout_s == 2.5


def test_an_interface_of_a_text_is_used() -> None:
    found = pycoll.run(
        os.getenv, ("PYCOLL_INTERFACES",), hosts="localhost", network_interfaces="lo"
    )
    assert found == ["lo"]


def test_functions_that_cannot_be_sent() -> None:
    with pytest.raises(pycoll.InvalidArgumentError, match="cannot be pickled"):
        pycoll.run(socket.socket().send)
    with pytest.raises(pycoll.InvalidArgumentError, match="function is a str"):
        pycoll.run("print")  # type: ignore[arg-type]


# Signals


def _interrupted(
    function: str,
    hosts: str | None,
    signals: int = 1,
    signum: int = signal.SIGINT,
    pause_s: float = 0.0,
) -> list[str]:
    """Signal a program whose two ranks call a function; returns what it has caught."""
    code = (
        "import pycoll, test_function_runs as functions\n"
        f"try: pycoll.run(functions.{function}, np=2, hosts={hosts!r})\n"
        "except pycoll.RankFailedError as error: print('failed', error.rank, error)\n"
        "except KeyboardInterrupt as error: print('interrupted', error)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        time.sleep(pause_s)
        for number in range(signals):
            time.sleep(0.5 if number else 0.0)
            process.send_signal(signum)
        line = process.stdout.readline()
        # All ranks have ended before the program goes on.
        left = [pid for pid in pids if alive(pid)]
        process.communicate(timeout=30)
        await_end(pids)
    finally:
        process.kill()
        process.wait()
    assert left == []
    return line.split(maxsplit=1)


@pytest.mark.parametrize("function", ["_sleeps", "_raises_at_sigint"])
@HERE
def test_ctrl_c_is_no_failure_of_a_rank(hosts: str | None, function: str) -> None:
    word, text = _interrupted(function, hosts)
    assert word == "interrupted" and "stopped by SIGINT" in text


@HERE
def test_a_second_ctrl_c_is_none_either(hosts: str | None) -> None:
    word, _ = _interrupted("_ignores_sigint", hosts, 2)
    assert word == "interrupted"


@HERE
def test_another_signal_is_a_failure(hosts: str | None) -> None:
    word, text = _interrupted("_sleeps", hosts, signum=signal.SIGTERM)
    assert word == "failed" and text.startswith("None stopped by SIGTERM")


@HERE
def test_ctrl_c_behind_a_failure_counts(hosts: str | None) -> None:
    word, _ = _interrupted("_fails_before_ctrl_c", hosts, pause_s=1.0)
    assert word == "interrupted"


def test_a_result_that_a_killed_rank_has_not_finished_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(host_agent, "write_note", lambda mark, note: sent.append((mark, note)))
    for name in ("result.0", "result.1.part", "call"):
        (tmp_path / name).write_bytes(b"abc")
    host_agent._send_results("mark", str(tmp_path))
    assert sent == [("mark", {"result": 0, "data": "YWJj"})]
