"""Libraries under comparison as running jobs, and how samples of them are taken in turns.

Every library runs as a job of its own that stays up; for each case the jobs take turns, so that
they meet the same noise. A job is stopped (SIGSTOP) while it is not its turn: what libraries do
when idle, such as progress threads that look for news, is no part of another one's time. It runs as
many operations unmeasured as measured, since the scheduler wakes stopped ranks on any core, also
two on one, and takes milliseconds to part them. In a round
each job gives one *batch*, back-to-back operations whose mean counts, and some operations timed
singly. The time of either is that of the slowest rank. Medians and ratios come from batches (a
clock read costs as much as a small operation), the 99th percentile from single operations.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
WORKER = str(ROOT / "bench" / "peer_worker.py")
LIBRARIES = ("pycoll", "openmpi", "mpich", "gloo")
MPIS = ("openmpi", "mpich")
#: The command `pycoll run` of this Python, which may have no script of that name beside it.
RUN_PYCOLL = (
    sys.executable,
    "-c",
    "import sys; sys.path.pop(0); from pycoll.cli import main; main()",
    "run",
)
#: Longest wait for a job to start, for an answer to one order, and for its end.
_START_S, _ANSWER_S, _END_S = 90, 120, 10
#: A batch lasts about this long, unless it has too many operations.
_BATCH_S, _BATCH_MAX = 10e-3, 5000
#: So many of that length say how many operations that is.
_LONG_BATCHES = 2
_SINGLES_MAX = 100
_ROUNDS_MIN = 3


def binaries_of(name: str) -> Path:
    """The folder of the library's programs; pycoll is the one that this Python has."""
    return Path(sys.executable).parent if name == "pycoll" else ROOT / f".peers/{name}" / "bin"


@dataclass(frozen=True)
class Start:
    """A process to start: its command line, and what is added to the environment."""

    line: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


#: What starts a library: its name, the number of ranks, the controller's path.
Starts = Callable[[str, int, str], Sequence[Start]]


def starts_here(name: str, ranks: int, path: str) -> list[Start]:
    """All ranks on this host."""
    binaries = binaries_of(name)
    python = str(binaries / "python")
    worker = [python, WORKER, name, path]
    if name == "pycoll":
        return [Start([*RUN_PYCOLL, "-n", str(ranks), "--", *worker])]
    if name == "gloo":
        line = [python, "-m", "torch.distributed.run", "--standalone"]
        return [Start([*line, "--nproc-per-node", str(ranks), WORKER, name, path])]
    launcher = [str(binaries / "mpiexec"), "-n", str(ranks)]
    if name == "openmpi":
        launcher += ["--oversubscribe", "--allow-run-as-root"]
    return [Start([*launcher, *worker])]


class Job:
    """A library's processes, whose ranks are stopped between orders, and a connection to each.

    On a machine that is ``slowness`` times slower than usual all may take so much longer.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        folder: str,
        starts: Starts = starts_here,
        slowness: float = 1,
    ) -> None:
        self.name = name
        self._slowness = slowness
        path = os.path.join(folder, f"{name}-{ranks}")
        quiet = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore::FutureWarning",
            "PATH": f"{binaries_of(name)}:{os.environ['PATH']}",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        }
        self.ranks: list[socket.socket] = []
        self.readers: list[TextIO] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pids: list[int] = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            try:
                for start in starts(name, ranks, path):
                    environment = {**quiet, **start.environment}
                    self.processes.append(
                        subprocess.Popen(start.line, env=environment, stdout=subprocess.DEVNULL)
                    )
                self._accept(listener, ranks)
                self.readers = [rank.makefile("r") for rank in self.ranks]
                self.pids = [json.loads(reader.readline())["pid"] for reader in self.readers]
                self._tell(signal.SIGSTOP)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: socket.socket, ranks: int) -> None:
        listener.settimeout(1)
        limit = time.monotonic() + _START_S * self._slowness
        while len(self.ranks) < ranks:
            try:
                rank = listener.accept()[0]
            except TimeoutError:
                for process in self.processes:
                    if process.poll() is not None:
                        raise OSError(f"ended with status {process.returncode}") from None
                if time.monotonic() > limit:
                    raise OSError(f"not ready after {_START_S * self._slowness} s") from None
                continue
            rank.settimeout(_ANSWER_S * self._slowness)
            self.ranks.append(rank)

    def order(self, **words: Any) -> list[Any]:
        """Every rank's answer. OSError naming the library if one gives none in time."""
        line = (json.dumps(words) + "\n").encode()
        try:
            self._tell(signal.SIGCONT)
            for rank in self.ranks:
                rank.sendall(line)
            answers = [json.loads(reader.readline()) for reader in self.readers]
            self._tell(signal.SIGSTOP)
            return answers
        except (OSError, ValueError) as error:
            raise OSError(f"{self.name} gave no answer to {words}: {error}") from error

    def _tell(self, what: signal.Signals) -> None:
        """Send the signal to every rank; launchers go on, since some look after their ranks."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def close(self) -> None:
        """End its processes: their ranks find the connection closed, unless they still start."""
        self._tell(signal.SIGCONT)
        for end in (*self.readers, *self.ranks):
            end.close()
        if not self.pids:
            for process in self.processes:
                process.terminate()
        limit = time.monotonic() + _END_S
        for process in self.processes:
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start_jobs(
    ranks: int,
    folder: str,
    names: Sequence[str] = LIBRARIES,
    starts: Starts = starts_here,
    slowness: float = 1,
) -> list[Job]:
    """The jobs of all libraries that are there; says on stderr which are not."""
    jobs = []
    for name in names:
        if not (binaries_of(name) / "python").exists():
            print(f"# {name}: not installed, left out (bench/setup_peers.sh)", file=sys.stderr)
            continue
        try:
            jobs.append(Job(name, ranks, folder, starts, slowness))
        except (OSError, ValueError) as error:
            if name == "pycoll":
                raise SystemExit(f"pycoll did not start: {error}") from error
            print(f"# {name}: did not start ({error}), left out", file=sys.stderr)
    return jobs


@dataclass(frozen=True)
class Entrant:
    """One column of a comparison: a job, and the words that go with each of its orders."""

    name: str
    job: Job
    words: tuple[tuple[str, Any], ...] = ()

    def order(self, **words: Any) -> list[Any]:
        """The job's answers."""
        return self.job.order(**dict(self.words), **words)


@dataclass
class Times:
    """Seconds per operation: the mean of each round's batch, and operations on their own."""

    batches: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Over rounds."""
        return statistics.median(self.batches)

    @property
    def p99(self) -> float:
        """Over single operations."""
        ordered = sorted(self.singles)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


@dataclass(frozen=True)
class Effort:
    """How long a case is measured: at most so many rounds, and so long unless rounds are few."""

    rounds: int = 15
    budget_s: float = 8.0
    #: Whether checks and the choice of batches count, too.
    from_begin: bool = False


def compare(
    entrants: Sequence[Entrant],
    collective: str,
    nbytes: int,
    effort: Effort,
    between: Callable[[], None] | None = None,
) -> dict[str, Times]:
    """Check every entrant, then measure all in turns; ``between`` runs once in each round too."""
    begin = time.monotonic()
    case = {"collective": collective, "bytes": nbytes}
    batches = {}
    for entrant in entrants:
        if not all(entrant.order(what="check", **case)):
            raise SystemExit(f"{entrant.name}: a wrong {collective} of {nbytes} bytes")
        batches[entrant.name] = _batch(entrant, case)
    times = {entrant.name: Times() for entrant in entrants}
    if not effort.from_begin:
        begin = time.monotonic()
    for done in range(effort.rounds):
        if done >= _ROUNDS_MIN and time.monotonic() - begin > effort.budget_s:
            break
        for entrant in entrants:
            _sample(entrant, case, batches[entrant.name], times[entrant.name])
        if between is not None:
            between()
    return times


def _batch(entrant: Entrant, case: dict[str, Any]) -> int:
    """How many operations take about _BATCH_S, when they run back to back. By the quicker of two
    batches that took so long: the first ones find neither pages nor caches, and what goes by one
    operation that was slow measures no others."""
    batch, found = 1, []
    while len(found) < _LONG_BATCHES:
        once = max(entrant.order(what="time", batch=batch, warm=batch, **case))
        if batch == _BATCH_MAX or batch * once >= _BATCH_S:
            found.append(once)
        else:
            batch = min(_BATCH_MAX, 2 * batch)
    return max(1, min(_BATCH_MAX, int(_BATCH_S / max(min(found), 1e-7))))


def _sample(entrant: Entrant, case: dict[str, Any], batch: int, times: Times) -> None:
    mean = max(entrant.order(what="time", batch=batch, warm=batch, **case))
    times.batches.append(mean)
    if batch == 1:
        times.singles.append(mean)
        return
    ranks = entrant.order(what="each", batch=min(batch, _SINGLES_MAX), warm=batch, **case)
    times.singles += [max(line) for line in zip(*ranks, strict=True)]


def ratio(times: dict[str, Times], peer: str, own: str = "pycoll") -> float | None:
    """Median over rounds of the peer's time divided by ours; None without one of them."""
    if peer not in times or own not in times:
        return None
    pairs = zip(times[peer].batches, times[own].batches, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def mpi_ratio(times: dict[str, Times], own: str = "pycoll") -> float | None:
    """The ratio to the MPI that is fastest in this case; None without any."""
    ratios = [ratio(times, name, own) for name in MPIS]
    return min((one for one in ratios if one is not None), default=None)
