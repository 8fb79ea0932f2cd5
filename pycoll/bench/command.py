"""``pycoll bench``: starts the ranks, follows the sweep, reports.

Rank 0 of the job it starts tells its results through a named pipe, so that whatever the ranks print
does not get between them. Inside a job that is already running (mpirun, torchrun, pycoll run) every
rank measures in place and rank 0 reports.
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

from pycoll.bench import report
from pycoll.bench.metrics import Measurement
from pycoll.bench.sweep import SweepOptions, hosts_of, sweep
from pycoll.outputs import check_output
from pycoll.pictures import check_picture

#: A rank imports the very package that this process has: "-m" would prefer one that happens to lie
#: in the current folder, such as the source tree without its native part.
_RANK = f"""import sys
sys.path = [{str(Path(__file__).resolve().parents[2])!r}, *(path for path in sys.path if path)]
from pycoll.bench.sweep import main
sys.exit(main(sys.argv[1:]))"""


@dataclass(frozen=True)
class Wishes:
    """What the command line says beside the sweep; without ``ranks`` the running job, else 2."""

    ranks: int | None = None
    transports: str | None = None
    json_path: Path | None = None
    plot_path: Path | None = None

    def validate(self) -> None:
        """InvalidArgumentError before anything is measured that could then not be written."""
        if self.json_path is not None:
            check_output(self.json_path, "--json")
        if self.plot_path is not None:
            check_picture(self.plot_path)


def run_bench(options: SweepOptions, wishes: Wishes) -> int:
    """Measure and report; the process's exit status (0: all results right).

    Raises InvalidArgumentError for what cannot be measured, before any rank is started.
    """
    from pycoll.bootstrap import discover

    wishes.validate()
    if wishes.ranks is None and discover.inside_job():
        return _inside(options, wishes)
    return _started(options, wishes, wishes.ranks or 2)


def progress_bar() -> Progress:
    """A bar that is shown only where someone watches, and leaves nothing behind."""
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
    """Prints rows as they come, below a progress bar when someone watches."""

    def __init__(self, options: SweepOptions, names: list[str], size: int) -> None:
        self.lines: list[Measurement] = []
        self._options = options
        self._several = len(names) > 1
        total = len(options.sizes(size)) * max(1, len(names))
        self._progress = progress_bar()
        self._task = self._progress.add_task("measuring", total=total)

    def start(self) -> None:
        """Show the bar; starts a thread that keeps it fresh."""
        self._progress.start()

    def stop(self) -> None:
        """Take the bar away."""
        self._progress.stop()

    def take(self, line: Measurement) -> None:
        """Show one measurement."""
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
        """Closing lines and files; the exit status: whether every checked result was right."""
        for text in report.trailer(self.lines):
            self._say(text)
        if wishes.json_path is not None:
            report.write_json(wishes.json_path, self.lines, asdict(self._options))
            self._say(f"# figures: {wishes.json_path}")
        if wishes.plot_path is not None:
            report.plot(wishes.plot_path, self.lines, self._options)
            self._say(f"# picture: {wishes.plot_path}")
        return 1 if any(line.wrong for line in self.lines) else 0


def _started(options: SweepOptions, wishes: Wishes, size: int) -> int:
    from pycoll.topology import single_host

    options.validate(size)
    follower = Follower(options, options.names(single_host(size)), size)
    words = {} if wishes.transports is None else {"PYCOLL_TRANSPORTS": wishes.transports}
    try:
        status = launch_sweep(options, size, words, follower.take, follower.start)
    finally:
        follower.stop()
    return status or follower.finish(wishes)


def launch_sweep(
    options: SweepOptions,
    ranks: int,
    environment: Mapping[str, str],
    take: Callable[[Measurement], None],
    started: Callable[[], None] = lambda: None,
) -> int:
    """Start ``ranks`` processes that sweep; the exit status.

    ``take`` gets each measurement when it is there, in a thread of its own; ``started`` is called
    when the ranks run. ``environment`` is added to that of the ranks.
    """
    from pycoll.launch import LaunchOptions, launch

    with tempfile.TemporaryDirectory(prefix="pycoll-bench-") as folder:
        path = os.path.join(folder, "results")
        os.mkfifo(path, 0o600)
        # Opened for both directions: neither side waits for the other, and a rank that dies early
        # does not leave the reader hanging.
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        stop = threading.Event()
        reader = threading.Thread(target=_read_lines, args=(pipe, stop, take))
        command = [sys.executable, "-c", _RANK, json.dumps(asdict(options)), path]

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


def _inside(options: SweepOptions, wishes: Wishes) -> int:
    import pycoll

    comm = pycoll.init(transports=wishes.transports)
    lines = sweep(comm, options)
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
