"""Worlds for tests: ranks that are threads of this process, or processes of their own.

Worlds of threads are kept and used again, since joining takes longer than most tests; one that a
test broke is replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import pycoll

T = TypeVar("T")

#: Longer than any operation of a healthy test, shorter than anybody's patience.
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
        """What ``function`` gave or raised on each rank."""
        return each(self._pool, function, self.communicators)

    def run(self, function: Callable[[pycoll.Communicator], T]) -> list[T]:
        """What ``function`` gave on each rank; RanksFailedError if any raised."""
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
    """Call ``talk`` with each tag in a thread of its own. Fails if one of them does."""
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
    """A world that works; shared with other tests, so do not close or break it knowingly."""
    key = (size, transports, hosts)
    found = _worlds.get(key)
    if found is None or not found.is_usable():
        if found is not None:
            found.close()
        found = _worlds[key] = ThreadWorld(size, transports, hosts)
    return found


def fresh_world(size: int, transports: str = "shm") -> ThreadWorld:
    """A world of one's own; the caller closes it."""
    return ThreadWorld(size, transports, None)


@atexit.register
def _close_worlds() -> None:
    for world in _worlds.values():
        world.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RankProcess:
    """A process that a template forked. It is no child of this process, so the template tells its
    end."""

    def __init__(self, template: Template, pid: int) -> None:
        self._template, self.pid = template, pid

    @property
    def returncode(self) -> int | None:
        """The exit code; minus the signal that killed it; None while it runs."""
        return self._template.ended.get(self.pid)

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
            if self._template.hear(end - time.monotonic()) is None:
                raise subprocess.TimeoutExpired("a rank", timeout)
        return code


class Template:
    """A process of worker.py that has imported what ranks need, and forks them."""

    def __init__(self, seed: int) -> None:
        self.ended: dict[int, int | None] = {}
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {n: v for n, v in os.environ.items() if not n.startswith("PYCOLL_")}
        paths = [str(ROOT), str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONHASHSEED": str(seed),
            "OMP_NUM_THREADS": "1",
        }
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "worker", str(theirs.fileno()), "harness", "pytest"],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )

    def fork(self, *task: Any) -> RankProcess:
        """A rank that runs the fields of a worker.RankTask."""
        self._control.send(pickle.dumps(task))
        while True:
            heard = self.hear(HANG_S)
            assert heard is not None, "the template of ranks does not answer"
            number, code = heard
            if code is None:
                return RankProcess(self, number)

    def hear(self, timeout: float) -> tuple[int, int | None] | None:
        """The next process of which the template tells; None if it tells of none in time."""
        self._control.settimeout(max(timeout, 1e-3))
        try:
            message = self._control.recv(1 << 10)
        except TimeoutError:
            return None
        assert message, "the template of ranks has ended"
        number, code = pickle.loads(message)
        self.ended[number] = code
        return number, code


@functools.cache
def template(seed: int) -> Template:
    """The template whose ranks have this seed of hashes; it ends with this process."""
    return Template(seed)


class ProcessWorld:
    """``size`` processes that call ``module:function`` with a communicator and ``args``.

    The function lives in a module of the tests and takes what pickle can carry. ``tuning`` is
    PYCOLL_TUNING of each rank; without it all use the built-in values. ``hosts`` is PYCOLL_HOST_ID
    of each rank, as if they were on hosts of their own. ``settings`` are more of the environment.
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
        paths = [str(Path(sys.modules[function.__module__].__file__ or "").parent)]
        base["PYTHONPATH"] = os.pathsep.join([str(ROOT), base.get("PYTHONPATH", "")])
        base["OMP_NUM_THREADS"] = "1"
        common = {
            "PYCOLL_SIZE": str(size),
            "PYCOLL_ADDRESS": f"127.0.0.1:{free_port()}",
            "PYCOLL_SECRET": secrets.token_hex(16),
            "PYCOLL_TRANSPORTS": transports,
            "PYCOLL_TIMEOUT_S": str(timeout_s),
            **settings,
        }
        self._paths = [Path(self._folder.name) / f"{rank}.pickle" for rank in range(size)]
        call = pickle.dumps((function.__module__, function.__name__, args))
        self.processes = [
            # Neighbours iterate over sets of texts in other orders.
            template(1 + rank % 2).fork(
                call,
                paths,
                {
                    **base,
                    **common,
                    "PYCOLL_RANK": str(rank),
                    "PYCOLL_TUNING": tuning[rank] if tuning else "off",
                    **({"PYCOLL_HOST_ID": hosts[rank]} if hosts else {}),
                },
                str(path.with_suffix(".output")),
                str(path),
            )
            for rank, path in enumerate(self._paths)
        ]

    def outcomes(self, hang_s: float = HANG_S) -> list[Any]:
        """What each rank gave or raised; an AssertionError with its output if it died."""
        found: list[Any] = []
        for process, path in zip(self.processes, self._paths, strict=True):
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
    """What ``function(comm, *args)`` gave on each rank; RanksFailedError if any raised."""
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


@contextlib.contextmanager
def rates_measured_once(measured: dict[tuple[Any, ...], Any]) -> Generator[None]:
    """Let the first scheduler that asks measure what messages cost; later ones with as many ranks
    take its figures, which are kept in ``measured``."""
    from pycoll.gradients import scheduler

    measure = scheduler.measure

    def remembered(comm: Any, *terms: Any) -> Any:
        # Every rank takes part in a measurement before any of them has its result.
        key = (comm.size, comm.servers, *terms)
        if key not in measured:
            measured[key] = measure(comm, *terms)
        return measured[key]

    scheduler.measure = remembered
    yield
    scheduler.measure = measure
