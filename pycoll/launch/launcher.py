"""``pycoll run``: starts N ranks of one command on this machine, watches them and ends them.

The launcher serves the store where the ranks meet, so no rank is special while joining. Each rank
has its own process group: the terminal's Ctrl-C reaches only the launcher, which passes it on once.
A guard process kills the ranks' process groups if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pycoll.bootstrap.connect import as_error
from pycoll.bootstrap.discovery.network import listen_tcp
from pycoll.bootstrap.discovery.torch_variables import TorchPlaces, inherited
from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.config import RANKS_MAX, Config
from pycoll.errors import InvalidArgumentError, TransportError
from pycoll.launch.elastic_jobs import ElasticLaunch, ElasticOptions
from pycoll.launch.rank_output import RankOutput
from pycoll.launch.rank_process import Piped, RankProcess, resolve_command
from pycoll.launch.signals import signals_caught

#: Seconds that the other ranks have to notice and report the failure of a rank themselves.
GRACE_S = 2.5
#: Seconds that the ranks have to end after Ctrl-C or another signal was passed on.
SIGNAL_GRACE_S = 5.0
#: Seconds between SIGTERM and SIGKILL.
KILL_S = 2.5
#: Seconds between two checks of the ranks where the kernel has no pidfd.
_POLL_S = 0.05
#: The guard reads process groups from its input. The word "end" ends it; at end-of-file it kills
#: the groups.
_GUARD = """
groups=
while read -r word; do
  [ "$word" = end ] && exit 0
  groups="$groups -$word"
done
[ -n "$groups" ] && kill -s KILL -- $groups
"""


@dataclass(frozen=True)
class LaunchOptions:
    """The options of one launch.

    ``ranks`` is their number and ``command`` the command line of each rank. ``prefix`` puts
    "[rank] " in front of each line of output. ``timeout_s`` becomes PYCOLL_TIMEOUT_S.
    ``environment`` is added to that of every rank. ``quiet`` suppresses reports about failed ranks.
    ``started`` is called once all ranks run; it may start threads. ``restarts`` is the number of
    failed ranks that are started again, with the same number and environment, instead of ending the
    launch; it is for programs whose other ranks then join again. ``elastic`` lets the launch go on
    with fewer and with more ranks; see elastic_jobs.py.
    """

    ranks: int
    command: Sequence[str]
    prefix: bool = False
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    started: Callable[[], object] | None = None
    restarts: int = 0
    elastic: ElasticOptions | None = None


def launch(options: LaunchOptions) -> int:
    """Run the command on all ranks and wait; returns the exit status.

    The status is 0 if every rank ended with 0, else that of the rank that failed first, 128 +
    number for a signal. No process of the launch is left running. Raises InvalidArgumentError for
    options that cannot work, and TransportError if the system lacks descriptors, processes or
    memory for so many ranks. Signals are passed on only when called from the main thread.
    """
    command = resolve_command(options.command)
    if not 1 <= options.ranks <= RANKS_MAX:
        raise InvalidArgumentError(f"ranks={options.ranks}: expected 1 to {RANKS_MAX}")
    if options.restarts < 0:
        raise InvalidArgumentError(f"restarts={options.restarts}: expected 0 or more")
    environment = inherited(os.environ) | dict(options.environment)
    if options.timeout_s is not None:
        environment["PYCOLL_TIMEOUT_S"] = f"{options.timeout_s:g}"
    Config.read(environment)
    try:
        if options.elastic is not None:
            return _launch_elastic(options, options.elastic, command, environment)
        return _launch_fixed(options, command, environment)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        text = f"{options.ranks} ranks cannot be run here: {as_error(error)}"
        raise TransportError(text, operation="run") from error


def _launch_fixed(
    options: LaunchOptions, command: Sequence[str], environment: dict[str, str]
) -> int:
    """Run a launch whose ranks form one world."""
    try:
        listener = listen_tcp("127.0.0.1")
    except OSError:
        listener = listen_tcp("::1")
    host, port = listener.getsockname()[:2]
    secret, job_id = secrets.token_hex(32), f"run-{secrets.token_hex(8)}"
    environment |= {
        "PYCOLL_SIZE": str(options.ranks),
        "PYCOLL_LOCAL_SIZE": str(options.ranks),
        "PYCOLL_ADDRESS": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "PYCOLL_SECRET": secret,
        "PYCOLL_JOB_ID": job_id,
        "PYCOLL_STORE": "launcher",
    }
    store = StoreServer(listener, options.ranks, secret.encode(), job_id, "pycoll run")
    try:
        with _Crew(options, command, environment) as crew:
            # The store's thread starts after the ranks, so that no thread of pycoll runs at a fork.
            store.start()
            if options.started is not None:
                options.started()
            status = crew.watch()
        if not options.quiet:
            crew.report()
        return status
    finally:
        store.close()


def _launch_elastic(
    options: LaunchOptions,
    elastic: ElasticOptions,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    """Run a launch whose ranks form one world after the other."""
    elastic.check(options.ranks)
    secret, job_id = secrets.token_hex(32), f"run-{secrets.token_hex(8)}"
    # Tells an optimizer that is made in a world of one rank that later worlds may be larger.
    own = {"PYCOLL_SECRET": secret, "PYCOLL_JOB_ID": job_id, "HOROVOD_ELASTIC": "1"}
    with _Crew(options, command, {**environment, **own}) as crew:
        if options.started is not None:
            options.started()
        status = crew.watch()
    if not options.quiet:
        crew.report()
    return status


class _Crew:
    """All ranks of one launch. A context manager: on exit it has ended all of them."""

    def __init__(
        self, options: LaunchOptions, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self._options = options
        self._command = list(command)
        self._environment = environment
        self._restarts = options.restarts
        self._ranks: list[RankProcess] = []
        self._first: RankProcess | None = None
        self._lost: list[RankProcess] = []
        self._leaving: list[tuple[float, RankProcess]] = []
        self._signals: list[int] = []
        self._passed_on = 0
        self._due: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._output = RankOutput(self._selector)
        self._undo = contextlib.ExitStack()
        self._guard: subprocess.Popen[bytes] | None = None
        self._elastic: ElasticLaunch | None = None
        self._torch = TorchPlaces(options.ranks, environment)

    def __enter__(self) -> _Crew:
        self._undo.callback(self._selector.close)
        self._undo.callback(self._torch.close)
        self._undo.enter_context(signals_caught(self._selector, self._signals))
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._guard.stdin is not None
            ranks = self._options.ranks
            if self._options.elastic is not None:
                own = (self._selector, self._environment, self._say)
                self._elastic = ElasticLaunch(self._options.elastic, ranks, *own)
                self._undo.callback(self._elastic.close)
                ranks = self._elastic.wanted([])
            for number in range(ranks):
                self._ranks.append(self._started(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        for rank in self._ranks:
            # A rank that has ended is still a zombie here, so no other group has its number.
            rank.send_signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.release()
        if self._guard is not None and self._guard.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.stdin.write(b"end\n")
                self._guard.stdin.close()
            self._guard.wait()
        self._output.drain()
        self._undo.close()

    def _started(self, number: int) -> RankProcess:
        assert self._guard is not None and self._guard.stdin is not None
        prefix = self._options.prefix
        place = {"PYCOLL_RANK": str(number), "PYCOLL_LOCAL_RANK": str(number)}
        if self._elastic is None:
            place |= self._torch.next_of(number)
        else:
            place = {"PYCOLL_ROSTER": self._elastic.name, "PYCOLL_MEMBER": str(number)}
        environment = {**self._environment, **place}
        piped = Piped.for_rank(number, self._options.ranks, prefix)
        if Piped.STDOUT in piped and (prefix or os.isatty(1)):
            # Python buffers its output until the end where that is a pipe.
            environment.setdefault("PYTHONUNBUFFERED", "1")
        guard = self._guard.stdin.fileno()
        rank = RankProcess(number, self._command, environment, piped, guard)
        if rank.pidfd >= 0:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: None)
        width = len(str(self._options.ranks - 1))
        for pipe, target in ((rank.process.stdout, 1), (rank.process.stderr, 2)):
            if pipe is not None:
                self._output.add(pipe, target, f"[{number:>{width}}] " if prefix else "")
        return rank

    def watch(self) -> int:
        """Wait for all ranks, passing on signals and ending the rest when one fails."""
        while self._is_going():
            self._adapt()
            for key, _ in self._selector.select(self._patience()):
                action: Callable[[], object] = key.data
                action()
            self._output.show()
            self._pass_on()
            self._collect()
            self._escalate()
        if self._passed_on:
            return 128 + self._passed_on
        if self._first is None or self._first.status is None:
            return 1 if self._elastic is not None and self._elastic.failure else 0
        status = self._first.status
        return 128 - status if status < 0 else status

    def _is_going(self) -> bool:
        if any(rank.status is None for rank in self._ranks):
            return True
        # No rank was started yet, since there are too few slots.
        waits = self._elastic is not None and not self._ranks and not self._elastic.failure
        return waits and self._is_adapting()

    def _patience(self) -> float | None:
        blind = any(rank.pidfd < 0 and rank.status is None for rank in self._ranks)
        waits = self._output.waits()
        waits += [max(0.0, self._due[0][0] - time.monotonic())] if self._due else []
        if self._elastic is not None and self._is_adapting():
            waits += self._elastic.waits()
        waits += [max(0.0, due - time.monotonic()) for due, _ in self._leaving]
        return min([*waits, _POLL_S] if blind else waits, default=None)

    def _pass_on(self) -> None:
        if self._output.broken and not self._passed_on:
            self._signals.append(self._output.broken)
        while self._signals:
            signum = self._signals.pop(0)
            now = time.monotonic()
            again = self._passed_on != 0
            self._passed_on = self._passed_on or signum
            if again:
                self._due = [(now, signal.SIGKILL)]
                continue
            passed = signal.SIGTERM if signum == signal.SIGPIPE else signum
            for rank in self._ranks:
                if rank.status is None:
                    rank.send_signal(passed)
            soft = now + SIGNAL_GRACE_S
            self._due = [(soft, signal.SIGTERM), (soft + KILL_S, signal.SIGKILL)]

    def _collect(self) -> None:
        ended = [rank for rank in self._ranks if rank.status is None and rank.has_ended()]
        # If several ranks ended together, one that was killed is the cause of the other failures.
        ended.sort(key=lambda rank: (rank.status or 0) >= 0)
        for rank in ended:
            # End all processes that the rank has started.
            rank.send_signal(signal.SIGKILL)
            if rank.pidfd >= 0:
                self._selector.unregister(rank.pidfd)
            if self._elastic is not None:
                self._elastic.ended(rank.number, rank.status == 0)
            if rank.status == 0 or rank.stopped or self._first is not None or self._passed_on:
                continue
            if self._restarts > 0:
                self._replace(rank)
                continue
            if self._elastic is not None and self._elastic.lost(self._living()):
                self._lost.append(rank)
                self._say(f"rank {rank.number} (pid {rank.process.pid}) {rank.describe()}")
                continue
            self._fail(rank)

    def _fail(self, rank: RankProcess) -> None:
        """Make this rank's failure that of the launch; the others get ``GRACE_S`` to end."""
        self._first = rank
        soft = time.monotonic() + GRACE_S
        self._due = [(soft, signal.SIGTERM), (soft + KILL_S, signal.SIGKILL)]

    def _is_adapting(self) -> bool:
        return self._first is None and not self._passed_on

    def _living(self) -> list[int]:
        return [r.number for r in self._ranks if r.status is None and not r.stopped]

    def _adapt(self) -> None:
        """Start and end ranks of an elastic launch, and let them form a world."""
        elastic = self._elastic
        if elastic is None or not self._is_adapting():
            return
        for _ in range(elastic.wanted(self._living())):
            ended = (r.number for r in self._ranks if r.status is not None)
            number = next(ended, len(self._ranks))
            rank = self._started(number)
            if number < len(self._ranks):
                self._ranks[number].release()
                self._ranks[number] = rank
            else:
                self._ranks.append(rank)
        for number in elastic.advance(self._living()):
            self._ranks[number].stopped = True
            self._ranks[number].send_signal(signal.SIGTERM)
            self._leaving.append((time.monotonic() + KILL_S, self._ranks[number]))
        if elastic.failure:
            self._say(elastic.failure)
            if self._ranks:
                self._fail([self._ranks[0], *self._lost][-1])

    def _replace(self, rank: RankProcess) -> None:
        """Start a failed rank again. The others notice its end and join with the new process."""
        self._restarts -= 1
        self._ranks[rank.number] = self._started(rank.number)
        if not self._options.quiet:
            pid = rank.process.pid
            self._say(f"rank {rank.number} (pid {pid}) {rank.describe()}, and was started again")
        rank.release()

    def _escalate(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, signum = self._due.pop(0)
            for rank in self._ranks:
                if rank.status is None:
                    rank.stopped = True
                    rank.send_signal(signum)
        while self._leaving and self._leaving[0][0] <= time.monotonic():
            self._leaving.pop(0)[1].kill()

    def report(self) -> None:
        """Report on stderr which rank failed, how, and how the others ended."""
        if self._passed_on:
            name = signal.Signals(self._passed_on).name
            self._say(f"stopped by {name}, which was passed on to all ranks")
            return
        first = self._first
        if first is None:
            return
        self._say(f"rank {first.number} (pid {first.process.pid}) {first.describe()}")
        others = [rank for rank in self._ranks if rank not in (first, *self._lost)]
        stopped = [rank.number for rank in others if rank.stopped]
        followed = [rank.number for rank in others if rank.status != 0 and not rank.stopped]
        if followed:
            self._say(f"then {list_ranks(followed)} failed too")
        if stopped:
            self._say(f"{list_ranks(stopped)} still ran and had to be stopped")

    @staticmethod
    def _say(text: str) -> None:
        width = max(40, shutil.get_terminal_size().columns)
        lines = textwrap.wrap("pycoll run: " + text, width, subsequent_indent="  ")
        print("\n".join(lines), file=sys.stderr, flush=True)
