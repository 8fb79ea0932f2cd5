"""``pycoll bench``: starts the ranks, shows their measurements, writes the report.

Rank 0 of the started job sends its results through a named pipe, so the output of the ranks does
not mix with them. Inside a running job (mpirun, torchrun, pycoll run) every rank measures in its
own process and rank 0 reports.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pycoll.tools.bench import report
from pycoll.tools.bench.measuring import BenchOptions, hosts_of, measure_all
from pycoll.tools.bench.metrics import Measurement
from pycoll.tools.outputs import check_output
from pycoll.tools.pictures import check_picture

#: The program of a rank.
_RANK = "from pycoll.tools.bench.measuring import main\nsys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Wishes:
    """The options of the command that are not part of ``BenchOptions``.

    Without ``ranks`` it measures the running job, or else 2 ranks that it starts. ``transports`` is
    the value of PYCOLL_TRANSPORTS. ``json_path`` and ``plot_path`` are the files to write.
    """

    ranks: int | None = None
    transports: str | None = None
    json_path: Path | None = None
    plot_path: Path | None = None

    def validate(self) -> None:
        """Raise InvalidArgumentError if a result could not be written after the measurement."""
        if self.json_path is not None:
            check_output(self.json_path, "--json")
        if self.plot_path is not None:
            check_picture(self.plot_path)


def run_bench(options: BenchOptions, wishes: Wishes) -> int:
    """Measure and report; returns the exit status of the process (0: all results right).

    Raises InvalidArgumentError for options that cannot be measured, before any rank is started.
    """
    from pycoll.bootstrap.discovery import discover

    wishes.validate()
    if wishes.ranks is None and discover.inside_job():
        return _inside(options, wishes)
    return _run_jobs(options, wishes, wishes.ranks or 2)


def progress_bar() -> Progress:
    """Make a progress bar, which is shown only on a terminal and disappears at its end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not (sys.stderr.isatty() and sys.stdout.isatty()),
        redirect_stdout=True,
    )


class Follower:
    """Prints the row of each measurement as it comes; on a terminal it shows a progress bar."""

    def __init__(self, options: BenchOptions, names: list[str], size: int) -> None:
        self.lines: list[Measurement] = []
        self._options = options
        self._several = len(names) > 1
        total = len(options.sizes(size)) * max(1, len(names))
        self._progress = progress_bar()
        self._task = self._progress.add_task("measuring", total=total)

    def start(self) -> None:
        """Show the bar and start the thread that refreshes it."""
        self._progress.start()

    def stop(self) -> None:
        """Remove the bar and end its thread."""
        self._progress.stop()

    def take(self, line: Measurement) -> None:
        """Print one measurement."""
        if not self.lines:
            for text in report.header(line, self._options, self._several):
                self._say(text)
        self.lines.append(line)
        self._say(report.row(line, self._several))
        self._progress.advance(self._task)

    @staticmethod
    def _say(text: str) -> None:
        print(text, flush=True)

    def finish(self, wishes: Wishes) -> int:
        """Print the closing lines and write the files; returns 0 if every checked result was right,
        else 1."""
        for text in report.trailer(self.lines):
            self._say(text)
        if wishes.json_path is not None:
            report.write_json(wishes.json_path, self.lines, asdict(self._options))
            self._say(f"# figures: {wishes.json_path}")
        if wishes.plot_path is not None:
            report.plot(wishes.plot_path, self.lines, self._options)
            self._say(f"# picture: {wishes.plot_path}")
        return 1 if any(line.wrong for line in self.lines) else 0


def _run_jobs(options: BenchOptions, wishes: Wishes, size: int) -> int:
    from pycoll.schedule.topology import single_host

    options.validate(size)
    follower = Follower(options, options.names(single_host(size)), size)
    words = {} if wishes.transports is None else {"PYCOLL_TRANSPORTS": wishes.transports}
    try:
        status = launch_bench(options, size, words, follower.take, follower.start)
    finally:
        follower.stop()
    return status or follower.finish(wishes)


def launch_bench(
    options: BenchOptions,
    ranks: int,
    environment: Mapping[str, str],
    take: Callable[[Measurement], None],
    started: Callable[[], None] = lambda: None,
) -> int:
    """Start ``ranks`` processes that measure; returns the exit status.

    ``take`` is called with each measurement as it comes, on a separate thread. ``started`` is
    called when the ranks run. ``environment`` is added to that of the ranks.
    """
    from pycoll.launch.launcher import launch
    from pycoll.launch.rank_crew import LaunchOptions
    from pycoll.launch.rank_process import own_python

    with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as folder:
        path = os.path.join(folder, "results")
        os.mkfifo(path, 0o600)
        # Opened for reading and writing: neither side's open waits for the other, and the reader
        # does not hang if a rank dies early.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        stop = threading.Event()
        reader = threading.Thread(target=_read_lines, args=(pipe, stop, take))
        command = [*own_python(_RANK), json.dumps(asdict(options)), path]

        def watch() -> None:
            started()
            reader.start()

        try:
            return launch(
                LaunchOptions(ranks, command, environment=dict(environment), started=watch)
            )
        finally:
            stop.set()
            if reader.ident is not None:
                reader.join()
            os.close(pipe)


def _read_lines(pipe: int, stop: threading.Event, take: Callable[[Measurement], None]) -> None:
    pending = b""
    while True:
        last = stop.is_set()
        try:
            pending += os.read(pipe, 1 << 16)
        except BlockingIOError:
            if last:
                return
            stop.wait(0.02)
            continue
        *whole, pending = pending.split(b"\n")
        for line in whole:
            take(Measurement(**json.loads(line)))


def _inside(options: BenchOptions, wishes: Wishes) -> int:
    import pycoll

    comm = pycoll.init(transports=wishes.transports)
    lines = measure_all(comm, options)
    if comm.rank != 0:
        for _ in lines:
            pass
        pycoll.finalize()
        return 0
    follower = Follower(options, options.names(hosts_of(comm)), comm.size)
    follower.start()
    try:
        for line in lines:
            follower.take(line)
    finally:
        follower.stop()
    pycoll.finalize()
    return follower.finish(wishes)
