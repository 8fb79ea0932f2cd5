"""``pycoll run``: starts N ranks of one command on this machine, watches them and ends them.

The launcher serves the store where the ranks meet, so no rank is special while joining. With
``LaunchOptions.node`` it is one of several launchers, each on its host, and that of node 0 serves
the ranks of all (node_meeting.py). Each rank has its own process group: the terminal's Ctrl-C
reaches only the launcher, which passes it on once. A guard process kills the ranks' process groups
if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pycoll.bootstrap.connect import as_error
from pycoll.bootstrap.discovery.cores import core_count
from pycoll.bootstrap.discovery.network import listen_in_range, listen_tcp
from pycoll.bootstrap.discovery.torch_variables import (
    PORTS_PER_START,
    Meeting,
    Share,
    TorchPlaces,
    inherited,
)
from pycoll.bootstrap.rendezvous.frames import list_ranks
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.config import RANKS_MAX, Config
from pycoll.errors import InvalidArgumentError, TransportError
from pycoll.launch.elastic_jobs import ElasticLaunch, ElasticOptions
from pycoll.launch.node_meeting import NodeLink, NodeOptions, Verdict, meet_nodes
from pycoll.launch.rank_output import RankOutput
from pycoll.launch.rank_process import Piped, RankProcess, Streams, resolve_command
from pycoll.launch.signals import signals_caught

#: Seconds that the other ranks have to notice and report the failure of a rank themselves.
GRACE_S = 2.5
#: Seconds that the ranks have to end after Ctrl-C or another signal was passed on.
SIGNAL_GRACE_S = 5.0
#: Seconds between SIGTERM and SIGKILL.
KILL_S = 2.5
#: Seconds that a launcher waits for the verdict of the other nodes after its own ranks have ended.
VERDICT_S = 5.0
#: A launcher that controls another one sends it a byte 0 every ``PULSE_S`` seconds. Silence of
#: ``SILENCE_S`` means that its host has vanished, which ends no connection.
PULSE_S, SILENCE_S = 1.0, 7.0
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
    with fewer and with more ranks; see elastic_jobs.py. ``node`` makes this launcher one of
    several; ``ranks`` is then the number of this one. ``output_folder`` gets the output of each
    rank in files. ``control`` is a descriptor from which the launcher reads signal numbers, a byte
    each, as if it had got the signals, and the pulse of another launcher. Its end or silence counts
    as SIGHUP, and ranks do not read stdin. ``servers`` is the number of further ranks, which run
    pycoll's own loop instead of the command, and end with the others.
    ``ended`` is called with the job's failure, if there is one.
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
    node: NodeOptions | None = None
    output_folder: str | None = None
    control: int | None = None
    ended: Callable[[Verdict], object] | None = None
    servers: int = 0

    @property
    def total(self) -> int:
        """The number of processes: ranks that run the command, and servers."""
        return self.ranks + self.servers


def launch(options: LaunchOptions) -> int:
    """Run the command on all ranks and wait; returns the exit status.

    The status is 0 if every rank ended with 0, else that of the rank that failed first, 128 +
    number for a signal. No process of the launch is left running. Raises InvalidArgumentError for
    options that cannot work, and TransportError if the system lacks descriptors, processes or
    memory for so many ranks. Signals are passed on only when called from the main thread.
    """
    node = options.node
    command = list(options.command) if node is not None else resolve_command(options.command)
    if not 1 <= options.ranks <= RANKS_MAX:
        raise InvalidArgumentError(f"ranks={options.ranks}: expected 1 to {RANKS_MAX}")
    if options.restarts < 0:
        raise InvalidArgumentError(f"restarts={options.restarts}: expected 0 or more")
    _check_servers(options)
    environment = inherited(os.environ) | dict(options.environment)
    if options.timeout_s is not None:
        environment["PYCOLL_TIMEOUT_S"] = f"{options.timeout_s:g}"
    config = Config.read(environment)
    try:
        if node is not None:
            return _launch_node(options, node, environment, config)
        if options.elastic is not None:
            return _launch_elastic(options, options.elastic, command, environment)
        return _launch_fixed(options, command, environment)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            raise
        text = f"{options.ranks} ranks cannot be run here: {as_error(error)}"
        raise TransportError(text, operation="run") from error


def _check_servers(options: LaunchOptions) -> None:
    most = RANKS_MAX - options.ranks
    if not 0 <= options.servers <= most:
        raise InvalidArgumentError(
            f"servers={options.servers}: expected 0 to {most}, so that {options.ranks} ranks and "
            f"the servers are at most {RANKS_MAX}"
        )
    if not options.servers:
        return
    if options.node is not None:
        raise InvalidArgumentError(
            "servers start on one machine: on several, start ranks and let the last ones call "
            "pycoll.ps.serve(), or run python -m pycoll.ps there"
        )
    if options.elastic is not None or options.restarts:
        raise InvalidArgumentError(
            "servers end with the job that they serve: leave out --restarts, --min-np, --max-np "
            "and --host-discovery-script, or --servers"
        )


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
        "PYCOLL_SIZE": str(options.total),
        "PYCOLL_LOCAL_SIZE": str(options.total),
        "PYCOLL_ADDRESS": f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        "PYCOLL_SECRET": secret,
        "PYCOLL_JOB_ID": job_id,
        "PYCOLL_STORE": "launcher",
    }
    store = StoreServer(listener, options.total, secret.encode(), job_id, "pycoll run")
    torch = TorchPlaces(Share.whole(options.ranks), environment)
    try:
        with _Crew(options, command, environment, torch) as crew:
            # The store's thread starts after the ranks, so that no thread of pycoll runs at a fork.
            store.start()
            if options.started is not None:
                options.started()
            status = crew.watch()
        crew.report()
        return status
    finally:
        store.close()


def _launch_node(
    options: LaunchOptions, node: NodeOptions, environment: dict[str, str], config: Config
) -> int:
    """Run the ranks of one node of a job of several."""
    if options.elastic is not None:
        raise InvalidArgumentError(
            "elastic jobs run on one machine: leave out --min-np, --max-np and "
            "--host-discovery-script, or --nnodes and the hosts"
        )
    with contextlib.ExitStack() as undo:
        listeners: list[socket.socket] = []
        command: list[str] = []

        def offer() -> tuple[int, list[int]]:
            listeners.append(listen_in_range(None, config.port_range))
            undo.callback(listeners[0].close)
            meetings = [Meeting() for _ in range(PORTS_PER_START * (options.restarts + 1))]
            for meeting in meetings:
                undo.callback(meeting.close)
            return listeners[0].getsockname()[1], [meeting.port for meeting in meetings]

        def check() -> None:
            command.extend(resolve_command(options.command))

        link = meet_nodes(node, options.ranks, check, offer)
        undo.callback(link.close)
        share = link.share
        environment |= {
            "PYCOLL_SIZE": str(share.size),
            "PYCOLL_LOCAL_SIZE": str(share.ranks),
            "PYCOLL_ADDRESS": link.store_address,
            "PYCOLL_SECRET": link.rank_secret,
            "PYCOLL_JOB_ID": link.job_id,
            "PYCOLL_STORE": "launcher",
        }
        store = None
        if listeners:
            key = link.rank_secret.encode()
            store = StoreServer(listeners[0], share.size, key, link.job_id, "pycoll run")
            undo.callback(store.close)
        torch = TorchPlaces(share, environment, link.torch_place)
        with _Crew(options, command, environment, torch, link) as crew:
            if store is not None:
                store.start()
            if options.started is not None:
                options.started()
            status = crew.watch()
        crew.report()
        return status


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
    torch = TorchPlaces(Share.whole(options.ranks), environment)
    with _Crew(options, command, {**environment, **own}, torch) as crew:
        if options.started is not None:
            options.started()
        status = crew.watch()
    crew.report()
    return status


class _Crew:
    """The ranks of one launcher. A context manager: on exit it has ended all of them.

    ``link`` connects it to the launchers of other nodes. The number of a rank is its place in
    ``_ranks``; on a node that is not the first one, its rank in the job is larger.
    """

    def __init__(
        self,
        options: LaunchOptions,
        command: Sequence[str],
        environment: Mapping[str, str],
        torch: TorchPlaces,
        link: NodeLink | None = None,
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
        self._torch = torch
        self._link = link
        self._share = Share.whole(options.ranks) if link is None else link.share
        self._verdict_by: float | None = None
        #: When silence of ``control`` ends the job; None without it and after its end.
        self._silent_at: float | None = None

    def __enter__(self) -> _Crew:
        self._undo.callback(self._selector.close)
        self._undo.callback(self._torch.close)
        self._undo.enter_context(signals_caught(self._selector, self._signals))
        if self._link is not None:
            self._selector.register(self._link, selectors.EVENT_READ, self._hear)
        if self._options.control is not None:
            control = self._options.control
            self._silent_at = time.monotonic() + SILENCE_S
            self._selector.register(control, selectors.EVENT_READ, lambda: self._obey(control))
        try:
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._guard.stdin is not None
            ranks = self._options.total
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
        rank_number = self._share.first + number
        place = {"PYCOLL_RANK": str(rank_number), "PYCOLL_LOCAL_RANK": str(number)}
        command = self._command
        if self._serves(number):
            command = [sys.executable, "-m", "pycoll.ps"]
            place["PYCOLL_ROLE"] = "server"
        elif self._elastic is None:
            place |= self._torch.next_of(number)
        else:
            place = {"PYCOLL_ROSTER": self._elastic.name, "PYCOLL_MEMBER": str(number)}
        environment = {**self._environment, **place}
        streams = self._streams_of(number)
        piped = streams.piped
        if Piped.STDOUT in piped and (prefix or os.isatty(1)):
            # Python buffers its output until the end where that is a pipe.
            environment.setdefault("PYTHONUNBUFFERED", "1")
        guard = self._guard.stdin.fileno()
        rank = RankProcess(number, command, environment, streams, guard)
        if rank.pidfd >= 0:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: None)
        width = len(str(self._share.size + self._options.servers - 1))
        host = "" if self._link is None else f" {self._link.host}"
        for pipe, target in ((rank.process.stdout, 1), (rank.process.stderr, 2)):
            if pipe is not None:
                shown = f"[{rank_number:>{width}}{host}] " if prefix else ""
                self._output.add(pipe, target, shown)
        return rank

    def _serves(self, number: int) -> bool:
        return number >= self._options.ranks and self._options.servers > 0

    def _streams_of(self, number: int) -> Streams:
        options, controlled = self._options, self._options.control is not None
        rank = self._share.first + number
        if options.output_folder is not None:
            width = len(str(self._share.size - 1))
            folder = os.path.join(options.output_folder, f"rank.{rank:0{width}}")
            return Streams(reads=rank == 0 and not controlled, folder=folder)
        # The launcher that controls this one reads its output and looks for whole lines there.
        piped = Piped.BOTH if controlled else Piped.for_rank(rank, options.ranks, options.prefix)
        return Streams(piped, reads=rank == 0 and not controlled)

    def watch(self) -> int:
        """Wait for all ranks, passing on signals and ending the rest when one fails."""
        while self._is_going():
            self._adapt()
            for key, _ in self._selector.select(self._patience()):
                action: Callable[[], object] = key.data
                action()
            self._output.show()
            self._check_silence()
            self._pass_on()
            self._collect()
            self._escalate()
        if self._passed_on:
            return 128 + self._passed_on
        if self._verdict is not None:
            return self._verdict.status
        if self._first is None or self._first.status is None:
            return 1 if self._elastic is not None and self._elastic.failure else 0
        return _exit_status(self._first.status)

    def _is_going(self) -> bool:
        if any(rank.status is None for rank in self._ranks):
            return True
        if self._link is not None and not self._link.over:
            if self._first is None and not self._passed_on:
                self._link.done()
            elif self._verdict_by is None:
                self._verdict_by = time.monotonic() + VERDICT_S
            return not self._link.over and not self._is_verdict_late()
        # No rank was started yet, since there are too few slots.
        waits = self._elastic is not None and not self._ranks and not self._elastic.failure
        return waits and self._is_adapting()

    def _patience(self) -> float | None:
        blind = any(rank.pidfd < 0 and rank.status is None for rank in self._ranks)
        waits = self._output.waits()
        for due in (self._verdict_by, self._silent_at):
            waits += [] if due is None else [max(0.0, due - time.monotonic())]
        waits += [max(0.0, self._due[0][0] - time.monotonic())] if self._due else []
        if self._elastic is not None and self._is_adapting():
            waits += self._elastic.waits()
        waits += [max(0.0, due - time.monotonic()) for due, _ in self._leaving]
        return min([*waits, _POLL_S] if blind else waits, default=None)

    @property
    def _verdict(self) -> Verdict | None:
        """The failure that ends the job on all nodes, if it is known."""
        return None if self._link is None else self._link.verdict

    def _is_verdict_late(self) -> bool:
        return self._verdict_by is not None and time.monotonic() >= self._verdict_by

    def _hear(self) -> None:
        """Take news of the other nodes, and end the ranks if the job has failed there."""
        assert self._link is not None
        self._link.read()
        if not self._link.over:
            return
        self._selector.unregister(self._link)
        if self._verdict is None or self._first is not None or self._passed_on:
            return
        if self._verdict.signum:
            self._signals.append(self._verdict.signum)
        else:
            self._end_softly()

    def _obey(self, control: int) -> None:
        """Take the signals that the controlling launcher sends."""
        numbers = os.read(control, 64)
        self._silent_at = time.monotonic() + SILENCE_S
        self._signals += [number for number in numbers if number in signal.valid_signals()]
        if not numbers:
            self._lose_control(control)

    def _check_silence(self) -> None:
        control = self._options.control
        if control is None or self._silent_at is None or time.monotonic() < self._silent_at:
            return
        # Writing output may have blocked for long, and the pulse has come meanwhile.
        poller = select.poll()
        poller.register(control, select.POLLIN)
        if poller.poll(0):
            self._obey(control)
        else:
            self._lose_control(control)

    def _lose_control(self, control: int) -> None:
        self._silent_at = None
        self._selector.unregister(control)
        self._signals.append(signal.SIGHUP)

    def _tell(self, verdict: Verdict) -> None:
        """Tell the other nodes that the job has failed here."""
        if self._link is not None and not self._link.over:
            self._link.fail(verdict)

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
            self._tell(self._stop_of(signum))
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
            self._dismiss_servers()
            if rank.status == 0 or rank.stopped or self._first is not None or self._passed_on:
                continue
            if self._verdict is not None:
                continue
            if self._restarts > 0:
                self._replace(rank)
                continue
            if self._elastic is not None and self._elastic.lost(self._living()):
                self._lost.append(rank)
                self._say(self._failure_of(rank))
                continue
            self._fail(rank)

    def _dismiss_servers(self) -> None:
        """Stop servers that still run once all workers have ended well: they may not have joined.

        A server whose worker 0 has left its world ends by itself within the grace.
        """
        workers = self._ranks[: self._options.ranks]
        if not self._options.servers or self._due or any(one.status != 0 for one in workers):
            return
        self._end_softly()

    def _fail(self, rank: RankProcess) -> None:
        """Make this rank's failure that of the launch; the others get ``GRACE_S`` to end."""
        self._first = rank
        self._tell(self._verdict_on(rank))
        self._end_softly()

    def _end_softly(self) -> None:
        soft = time.monotonic() + GRACE_S
        self._due = [(soft, signal.SIGTERM), (soft + KILL_S, signal.SIGKILL)]

    def _stop_of(self, signum: int) -> Verdict:
        where = "" if self._link is None else f" on host {self._link.host}"
        name = signal.Signals(signum).name
        text = f"stopped by {name}{where}, which was passed on to all ranks"
        return Verdict(text, 128 + signum, signum)

    def _verdict_on(self, rank: RankProcess) -> Verdict:
        number = self._share.first + rank.number
        return Verdict(self._failure_of(rank), _exit_status(rank.status), rank=number)

    def _failure_of(self, rank: RankProcess) -> str:
        number, pid = self._share.first + rank.number, rank.process.pid
        if self._serves(rank.number):
            server = rank.number - self._options.ranks
            return f"server {server} (rank {number}, pid {pid}) {rank.describe()}"
        if self._link is None:
            return f"rank {number} (pid {pid}) {rank.describe()}"
        return f"rank {number} on host {self._link.host} (pid {pid}) {rank.describe()}"

    def _is_adapting(self) -> bool:
        return self._first is None and not self._passed_on and self._verdict is None

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
            self._say(f"{self._failure_of(rank)}, and was started again")
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
        """Report which rank failed, how, and how the others ended: on stderr, unless the launch is
        quiet, and to ``LaunchOptions.ended``."""
        first, reason = self._first, self._reason()
        if reason is None:
            return
        if self._options.ended is not None:
            self._options.ended(reason)
        if self._options.quiet:
            return
        self._say(reason.text)
        if self._passed_on:
            return
        others = [rank for rank in self._ranks if rank not in (first, *self._lost)]
        numbers = {rank: self._share.first + rank.number for rank in others}
        stopped = [numbers[rank] for rank in others if rank.stopped]
        followed = [numbers[rank] for rank in others if rank.status != 0 and not rank.stopped]
        if followed:
            self._say(f"then {list_ranks(followed)} failed too")
        if stopped:
            self._say(f"{list_ranks(stopped)} still ran and had to be stopped")

    def _reason(self) -> Verdict | None:
        """Return why the job has failed, as all nodes report it; None if it has not."""
        if self._verdict is not None:
            return self._verdict
        if self._passed_on:
            return self._stop_of(self._passed_on)
        return None if self._first is None else self._verdict_on(self._first)

    @staticmethod
    def _say(text: str) -> None:
        width = max(40, shutil.get_terminal_size().columns)
        lines = textwrap.wrap("pycoll run: " + text, width, subsequent_indent="  ")
        print("\n".join(lines), file=sys.stderr, flush=True)


def _exit_status(status: int | None) -> int:
    """Return a process's status as a shell has it: 128 + number for a signal."""
    status = status or 0
    return 128 - status if status < 0 else status


def threads_of_ranks(ranks: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return OMP_NUM_THREADS=1 if there are more ranks than cores and the user has not set the
    variable; torchrun does the same. A line on stderr says so."""
    cores = core_count()
    if ranks <= cores or "OMP_NUM_THREADS" in environ:
        return {}
    print(
        f"pycoll run: {ranks} ranks share {cores} cores: OMP_NUM_THREADS=1 for each, unless you "
        "set it",
        file=sys.stderr,
        flush=True,
    )
    return {"OMP_NUM_THREADS": "1"}
