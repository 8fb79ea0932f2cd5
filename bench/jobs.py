"""Runs the libraries under comparison as jobs, and interleaves the samples of their times.

Every library runs as its own job, which keeps running. For each case the jobs take samples in
rotation, so that the same noise affects all of them. A job is stopped (SIGSTOP) while another one
measures, so that the progress threads of an idle library do not disturb the measured one.

After it continues, a job first runs as many operations unmeasured as measured: the scheduler may
wake two stopped ranks on one core and needs some time to separate them. In each round a job gives
one *batch*, back-to-back operations whose mean counts, and some operations timed singly. Each time
is that of the slowest rank. Medians and ratios come from batches, since reading the clock takes
about as long as a small operation. The 99th percentile comes from single operations.
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
#: The command `pycoll run` of this Python, which may have no installed script of that name.
RUN_PYCOLL = (
    sys.executable,
    "-c",
    "import sys; sys.path.pop(0); from pycoll.tools.cli import main; main()",
    "run",
)
#: Most seconds for the start of a job, for an answer to one order, and for the job's end.
_START_S, _ANSWER_S, _END_S = 90, 120, 10
#: Seconds of a batch, and most operations of a batch.
_BATCH_S, _BATCH_MAX = 10e-3, 5000
#: Number of batches of that length after which the number of operations is chosen.
_LONG_BATCHES = 2
_SINGLES_MAX = 100
_ROUNDS_MIN = 3


def binaries_of(name: str) -> Path:
    """Return the folder of the library's programs; for pycoll that of this Python."""
    return Path(sys.executable).parent if name == "pycoll" else ROOT / f".peers/{name}" / "bin"


@dataclass(frozen=True)
class Start:
    """A process to start: its command line, and variables to add to its environment."""

    line: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


#: Makes the starts of a library from its name, the number of ranks and the controller's path.
Starts = Callable[[str, int, str], Sequence[Start]]


def starts_here(name: str, ranks: int, path: str) -> list[Start]:
    """Return the starts of a library with all ranks on this host."""
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

    ``slowness`` multiplies all limits, for a machine that is slower than usual by this factor.
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
        """Return every rank's answer. Raises OSError that names the library if an answer is
        late."""
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
        """Send the signal to every rank. Launchers keep running, since some watch their ranks."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def close(self) -> None:
        """End the processes. Running ranks find the connection closed; ones that still start are
        terminated."""
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
    """Start the jobs of all installed libraries; names the missing ones on stderr."""
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
    """One column of a comparison: a job, and keyword arguments that are added to its orders."""

    name: str
    job: Job
    words: tuple[tuple[str, Any], ...] = ()

    def order(self, **words: Any) -> list[Any]:
        """Send an order and return the job's answers."""
        return self.job.order(**dict(self.words), **words)


@dataclass
class Times:
    """Seconds per operation: the mean of each round's batch, and times of single operations."""

    batches: list[float] = field(default_factory=list)
    singles: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median over rounds."""
        return statistics.median(self.batches)

    @property
    def p99(self) -> float:
        """Return the 99th percentile over single operations."""
        ordered = sorted(self.singles)
        return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


@dataclass(frozen=True)
class Effort:
    """The limits of one case's measurement: rounds, and seconds once the least rounds are done."""

    rounds: int = 15
    budget_s: float = 8.0
    #: Whether the seconds include the checks and the choice of batches.
    from_begin: bool = False


def compare(
    entrants: Sequence[Entrant],
    collective: str,
    nbytes: int,
    effort: Effort,
    between: Callable[[], None] | None = None,
) -> dict[str, Times]:
    """Check every entrant, then measure all in rotation. ``between`` also runs once per round."""
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
    """Return how many back-to-back operations take about _BATCH_S.

    The faster of two batches of that length decides: the first operations touch new pages and cold
    caches, and one slow operation must not decide for all.
    """
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
    """Return the median over rounds of the peer's time divided by that of ``own``; None if one is
    missing."""
    if peer not in times or own not in times:
        return None
    pairs = zip(times[peer].batches, times[own].batches, strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def mpi_ratio(times: dict[str, Times], own: str = "pycoll") -> float | None:
    """Return the ratio to the MPI that is fastest in this case; None without any MPI."""
    ratios = [ratio(times, name, own) for name in MPIS]
    return min((one for one in ratios if one is not None), default=None)
