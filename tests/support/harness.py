"""Worlds for tests: their ranks are threads of this process, or separate processes.

Worlds of threads are kept and used again, since joining takes longer than most tests; one that a
test broke is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from worker import RankTask

import pycoll

T = TypeVar("T")

#: Seconds: longer than any operation of a test that passes.
TIMEOUT_S = float(os.environ.get("TEST_TIMEOUT_S", "30"))
HANG_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


class RanksFailedError(AssertionError):
    """Some ranks raised; the text lists all."""


class ThreadWorld:
    """``size`` communicators, each with a thread that calls it."""

    def __init__(self, size: int, transports: str, hosts: tuple[int, ...] | None) -> None:
        self.communicators = pycoll.local_world(
            size,
            transports=transports,
            hosts=None if hosts is None else list(hosts),
            timeout_s=TIMEOUT_S,
        )
        self.size = size
        self._pool = ThreadPoolExecutor(size)

    def outcomes(self, function: Callable[[pycoll.Communicator], T]) -> list[T | BaseException]:
        """The result or the exception of ``function`` on each rank."""
        return each(self._pool, function, self.communicators)

    def run(self, function: Callable[[pycoll.Communicator], T]) -> list[T]:
        """The result of ``function`` on each rank; RanksFailedError if any raised."""
        return succeeded(self.outcomes(function))

    def is_usable(self) -> bool:
        return all(comm.failure is None for comm in self.communicators)

    def close(self) -> None:
        for comm in self.communicators:
            comm.close()
        self._pool.shutdown()


def python(code: str, **environ: str) -> str:
    """The output of a fresh interpreter without settings of ours."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYCOLL_")}
    clean["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**clean, **environ},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def each(
    pool: ThreadPoolExecutor, function: Callable[[Any], T], items: Sequence[Any]
) -> list[T | BaseException]:
    """Results and errors of ``function`` on all items at once; never hangs."""
    futures = [pool.submit(function, item) for item in items]
    _, late = wait(futures, HANG_S)
    if late:
        ranks = [rank for rank, future in enumerate(futures) if future in late]
        raise RanksFailedError(f"ranks {ranks} did not come back within {HANG_S} s")
    return [future.exception() or future.result() for future in futures]


def succeeded(outcomes: Sequence[Any]) -> list[Any]:
    failed = {rank: one for rank, one in enumerate(outcomes) if isinstance(one, BaseException)}
    if failed:
        first = next(iter(failed.values()))
        raise RanksFailedError(
            "; ".join(f"rank {rank}: {error!r}" for rank, error in failed.items())
        ) from first
    return list(outcomes)


def talk_in_threads(talk: Callable[[int], object], tags: Sequence[int]) -> None:
    """Call ``talk`` with each tag, each in a separate thread. Fails if one of them does."""
    failures: list[BaseException] = []

    def run(tag: int) -> None:
        try:
            talk(tag)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(tag,)) for tag in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures


_worlds: dict[tuple[Any, ...], ThreadWorld] = {}


def world_in_threads(
    size: int, transports: str = "shm", hosts: tuple[int, ...] | None = None
) -> ThreadWorld:
    """A world that works. Other tests use it too, so a test must neither close nor break it."""
    key = (size, transports, hosts)
    found = _worlds.get(key)
    if found is None or not found.is_usable():
        if found is not None:
            found.close()
        found = _worlds[key] = ThreadWorld(size, transports, hosts)
    return found


def fresh_world(size: int, transports: str = "shm") -> ThreadWorld:
    """A world for one test; the caller closes it."""
    return ThreadWorld(size, transports, None)


@atexit.register
def _close_worlds() -> None:
    for world in _worlds.values():
        world.close()


#: Below the ports that the system gives to connections, which could take one in the meantime.
_PORTS = range(10_000, 29_000)
_next_port = itertools.count(os.getpid() * 101)


def free_port() -> int:
    """A port at which no process listens, and that no other process of the tests gets soon."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


class RankProcess:
    """A process that a ``RankServer`` forked. The server, its parent, reports its end."""

    def __init__(self, server: RankServer, pid: int) -> None:
        self._server, self.pid = server, pid

    @property
    def returncode(self) -> int | None:
        """As of ``subprocess.Popen``; None until ``wait`` has returned."""
        return self._server.ended.get(self.pid)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """The exit code; subprocess.TimeoutExpired if there is none after these seconds."""
        end = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if not self._server.hear(max(0.0, end - time.monotonic())):
                raise subprocess.TimeoutExpired("a rank", timeout)
        return code


class RankServer:
    """A process of worker.py that has imported what ranks need, and forks them."""

    def __init__(self) -> None:
        #: Exit codes of processes by their numbers.
        self.ended: dict[int, int] = {}
        self._control, theirs = multiprocessing.Pipe()
        paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={
                    **{name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")},
                    "PYTHONPATH": os.pathsep.join(paths),
                    "OMP_NUM_THREADS": "1",  # NumPy starts no threads, which a fork would lose
                },
                # The ranks' sys.stdout is made here. It gathers lines, as if it led to a pipe.
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )

    def fork(self, task: RankTask) -> RankProcess:
        """A process that runs ``task``."""
        self._control.send(task)
        while True:
            assert self._control.poll(HANG_S), "the server of ranks does not answer"
            pid, code = self._control.recv()
            if code is None:
                self.ended.pop(pid, None)
                return RankProcess(self, pid)
            self.ended[pid] = code

    def hear(self, timeout: float) -> bool:
        """Note that a process has ended; whether one did so in time."""
        if not self._control.poll(timeout):
            return False
        pid, code = self._control.recv()
        self.ended[pid] = code
        return True


@functools.cache
def rank_server(number: int) -> RankServer:
    """The server with this number, shared by all worlds. It ends with this process."""
    return RankServer()


class ProcessWorld:
    """``size`` processes that call ``module:function`` with a communicator and ``args``.

    The function lives in a module of the tests and takes what pickle can carry. ``tuning`` is
    PYCOLL_TUNING of each rank; without it all use the built-in values. ``hosts`` is PYCOLL_HOST_ID
    of each rank, as if they were on hosts of their own. ``settings`` are more of the environment.

    The processes are forks of two servers: the start of an interpreter and its imports cost more
    processor time than most tests. Neighbours come from different servers, so their hashes of texts
    differ, and so does the order in which they walk through sets.
    """

    def __init__(
        self,
        size: int,
        function: Callable[..., Any],
        *args: Any,
        transports: str = "shm",
        timeout_s: float = TIMEOUT_S,
        tuning: Sequence[str] = (),
        hosts: Sequence[str] = (),
        **settings: str,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        base = {name: v for name, v in os.environ.items() if not name.startswith("PYCOLL_")}
        paths = [
            str(ROOT),
            str(Path(__file__).parent),
            str(Path(sys.modules[function.__module__].__file__ or "").parent),
        ]
        base["PYTHONPATH"] = os.pathsep.join([*paths, base.get("PYTHONPATH", "")])
        base["OMP_NUM_THREADS"] = "1"
        common = {
            "PYCOLL_SIZE": str(size),
            "PYCOLL_ADDRESS": f"127.0.0.1:{free_port()}",
            "PYCOLL_SECRET": secrets.token_hex(16),
            "PYCOLL_TRANSPORTS": transports,
            "PYCOLL_TIMEOUT_S": str(timeout_s),
            **settings,
        }
        self.paths = [Path(self._folder.name) / f"{rank}.pickle" for rank in range(size)]
        call = pickle.dumps((function.__module__, function.__name__, args))
        self.processes = [
            rank_server(rank % 2).fork(
                RankTask(
                    call=call,
                    paths=paths,
                    folder=os.getcwd(),
                    environment={
                        **base,
                        **common,
                        "PYCOLL_RANK": str(rank),
                        "PYCOLL_TUNING": tuning[rank] if tuning else "off",
                        **({"PYCOLL_HOST_ID": hosts[rank]} if hosts else {}),
                    },
                    output=str(path.with_suffix(".output")),
                    result=str(path),
                )
            )
            for rank, path in enumerate(self.paths)
        ]

    def outcomes(self, hang_s: float = HANG_S) -> list[Any]:
        """The result or exception of each rank; an AssertionError with its output if it died."""
        found: list[Any] = []
        for process, path in zip(self.processes, self.paths, strict=True):
            try:
                process.wait(hang_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(hang_s)
            if path.exists():
                found.append(pickle.loads(path.read_bytes()))
            else:
                output = path.with_suffix(".output")
                said = output.read_text() if output.exists() else ""
                found.append(AssertionError(f"status {process.returncode}: {said}"))
        self._folder.cleanup()
        return found


def world_in_processes(
    size: int, function: Callable[..., Any], *args: Any, transports: str = "shm", **settings: str
) -> list[Any]:
    """The result of ``function(comm, *args)`` on each rank; RanksFailedError if any raised."""
    world = ProcessWorld(size, function, *args, transports=transports, **settings)
    return succeeded(world.outcomes())


class Counting:
    """A communicator, and which of its exchanges have been called."""

    def __init__(self, comm: pycoll.Communicator) -> None:
        self.comm, self.calls = comm, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name in ("all_reduce", "all_gather"):
            self.calls.append(name)
        return getattr(self.comm, name)
