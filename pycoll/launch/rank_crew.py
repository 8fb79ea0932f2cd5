"""The ranks of one launcher: starts them, watches them, passes on signals and ends them.

Each rank has its own process group: the terminal's Ctrl-C reaches only the launcher, which passes
it on once. A guard process kills the ranks' process groups if the launcher itself is killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pycoll.bootstrap.discovery.torch_variables import Share, TorchPlaces
from pycoll.bootstrap.rendezvous.frames import SILENCE_S, list_ranks
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.launch.elastic_jobs import ElasticOptions
from pycoll.launch.host_notes import read_control
from pycoll.launch.node_meeting import NodeLink, NodeOptions, Verdict
from pycoll.launch.rank_output import RankOutput
from pycoll.launch.rank_process import Piped, RankProcess, Streams, own_python
from pycoll.launch.signals import ignore_terminal_stop, signals_caught

#: Seconds that the other ranks have to notice and report the failure of a rank themselves.
GRACE_S = 2.5
#: Seconds that the ranks have to end after Ctrl-C or another signal was passed on.
SIGNAL_GRACE_S = 5.0
#: Seconds between SIGTERM and SIGKILL.
KILL_S = 2.5
#: Seconds that a launcher waits for the verdict of the other nodes after its own ranks have ended.
VERDICT_S = 5.0
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
    launch; it is for programs whose other ranks then join again. ``tolerate`` is the number of
    ranks of the job that may be lost without ending it; it is for programs that shrink. A node that
    is lost takes its ranks along. ``elastic`` lets the
    launch go on with fewer and with more ranks; see elastic_jobs.py. ``node`` makes this launcher
    one of several; ``ranks`` is then the number of this one. ``output_folder`` gets the output of
    each rank in files. ``control`` is a descriptor from which the launcher reads the lines of
    another one (host_notes.py): signals, as if it had got them itself, a pulse, and numbers of
    slots. Its end or silence ends the launch, and ranks do not read stdin. ``servers`` is the
    number of further ranks, which run pycoll's own loop instead of the command, and end with the
    others. ``ended`` is called with the job's failure, if there is one; ``heard`` each time that
    something comes from ``control``.
    """

    ranks: int
    command: Sequence[str]
    prefix: bool = False
    timeout_s: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    quiet: bool = False
    started: Callable[[], object] | None = None
    restarts: int = 0
    tolerate: int = 0
    elastic: ElasticOptions | None = None
    node: NodeOptions | None = None
    output_folder: str | None = None
    control: int | None = None
    ended: Callable[[Verdict], object] | None = None
    heard: Callable[[], object] | None = None
    servers: int = 0

    @property
    def total(self) -> int:
        """The number of processes: ranks that run the command, and servers."""
        return self.ranks + self.servers


class Crew:
    """The ranks of one launcher. A context manager: on exit it has ended all of them.

    ``link`` connects it to the launchers of other nodes, and ``store`` is where the ranks join, if
    this launcher serves it. The number of a rank is its place in ``_ranks``; on a node that is not
    the first one, its rank in the job is larger. A subclass for elastic jobs replaces the methods
    ``_begin``, ``_place_of``, ``_label``, ``_adapt``, ``_note_end``, ``_tell``, ``_is_going``,
    ``_waits`` and ``_set_slots``.
    """

    def __init__(
        self,
        options: LaunchOptions,
        command: Sequence[str],
        environment: Mapping[str, str],
        torch: TorchPlaces,
        link: NodeLink | None = None,
        store: StoreServer | None = None,
    ) -> None:
        self._options = options
        self._command = list(command)
        self._environment = environment
        self._restarts = options.restarts
        self._ranks: list[RankProcess] = []
        self._first: RankProcess | None = None
        self._lost: list[RankProcess] = []
        self._signals: list[int] = []
        self._passed_on = 0
        self._control_lost = False
        #: (time on the monotonic clock, signal for the ranks that still run), earliest first.
        self._due: list[tuple[float, int]] = []
        self._selector = selectors.DefaultSelector()
        self._output = RankOutput(self._selector)
        self._undo = contextlib.ExitStack()
        self._guard: subprocess.Popen[bytes] | None = None
        self._torch = torch
        self._link = link
        self._store = store
        self._share = Share.whole(options.total) if link is None else link.share
        self._verdict_by: float | None = None
        #: The host in reports; empty for a job of one host.
        self._host = "" if link is None else link.host
        #: The bytes of ``control`` behind its last whole line.
        self._said = bytearray()
        #: When silence of ``control`` ends the job; None without it and after its end.
        self._silent_at: float | None = None

    def __enter__(self) -> Crew:
        self._undo.callback(self._selector.close)
        self._undo.callback(self._torch.close)
        self._undo.enter_context(signals_caught(self._selector, self._signals))
        if self._link is not None:
            self._selector.register(self._link, selectors.EVENT_READ, self._hear)
            self._undo.enter_context(ignore_terminal_stop())
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
            self._begin()
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

    def _begin(self) -> None:
        """Start the first ranks."""
        for number in range(self._options.total):
            self._ranks.append(self._start_rank(number))

    def _label(self, number: int) -> int:
        """Return the number that reports give the rank, its rank in the job."""
        return self._share.first + number

    def _place_of(self, number: int) -> dict[str, str]:
        """Return the variables of the next process of a rank."""
        place = {"PYCOLL_RANK": str(self._label(number)), "PYCOLL_LOCAL_RANK": str(number)}
        if self._serves(number):
            return {**place, "PYCOLL_ROLE": "server"}
        return place | self._torch.next_of(number)

    def _start_rank(self, number: int) -> RankProcess:
        assert self._guard is not None and self._guard.stdin is not None
        prefix = self._options.prefix
        environment = {**self._environment, **self._place_of(number)}
        streams = self._streams_of(number)
        piped = streams.piped
        if Piped.STDOUT in piped and (prefix or os.isatty(1)):
            # Python buffers its output until the end where that is a pipe.
            environment.setdefault("PYTHONUNBUFFERED", "1")
        guard = self._guard.stdin.fileno()
        command = self._command
        if self._serves(number):
            command = own_python("from pycoll.ps.__main__ import main\nsys.exit(main())")
        rank = RankProcess(number, command, environment, streams, guard)
        if rank.pidfd >= 0:
            self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: None)
        width = len(str(self._share.size - 1))
        host = f" {self._host}" if self._host else ""
        for pipe, target in ((rank.process.stdout, 1), (rank.process.stderr, 2)):
            if pipe is not None:
                shown = f"[{self._label(number):>{width}}{host}] " if prefix else ""
                self._output.add(pipe, target, shown)
        return rank

    def _serves(self, number: int) -> bool:
        return number >= self._options.ranks and self._options.servers > 0

    def _streams_of(self, number: int) -> Streams:
        options, controlled = self._options, self._options.control is not None
        rank = self._label(number)
        if options.output_folder is not None:
            width = len(str(self._share.size - 1))
            folder = os.path.join(options.output_folder, f"rank.{rank:0{width}}")
            return Streams(reads=rank == 0 and not controlled, folder=folder)
        # The launcher that controls this one reads its output and looks for whole lines there.
        piped = Piped.BOTH if controlled else Piped.for_rank(rank, options.ranks, options.prefix)
        return Streams(piped, reads=rank == 0 and not controlled)

    def watch(self) -> int:
        """Wait for all ranks, passing on signals and ending the rest when one fails."""
        self._adapt()
        while self._is_going():
            for key, _ in self._selector.select(self._patience()):
                action: Callable[[], object] = key.data
                action()
            self._output.show()
            self._check_silence()
            self._pass_on()
            self._collect()
            self._escalate()
            self._adapt()
        if self._passed_on:
            return 128 + self._passed_on
        if self._verdict is not None:
            return self._verdict.status
        return 0 if self._first is None else exit_status(self._first.status)

    def _adapt(self) -> None:
        """Do the steps that are due before the next wait."""

    def _is_going(self) -> bool:
        if any(rank.status is None for rank in self._ranks):
            return True
        if self._link is not None and not self._link.over:
            if self._first is None and not self._passed_on:
                lost = [self._name_of(rank) for rank in self._lost]
                self._link.report_end(lost, all(rank.status != 0 for rank in self._ranks))
            elif self._verdict_by is None:
                self._verdict_by = time.monotonic() + VERDICT_S
            return not self._link.over and not self._is_verdict_late()
        return False

    def _patience(self) -> float | None:
        """Return the seconds until the next deadline or check; None if there is none."""
        blind = any(rank.pidfd < 0 and rank.status is None for rank in self._ranks)
        waits = self._output.waits()
        link_silent_at = None if self._link is None else self._link.silent_at
        for due in (self._verdict_by, self._silent_at, link_silent_at):
            waits += [] if due is None else [max(0.0, due - time.monotonic())]
        waits += [max(0.0, self._due[0][0] - time.monotonic())] if self._due else []
        waits += self._waits()
        return min([*waits, _POLL_S] if blind else waits, default=None)

    def _waits(self) -> list[float]:
        """Return times in seconds after which ``_adapt`` has to be called again."""
        return []

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
        self._note_news()

    def _note_news(self) -> None:
        """Show what has happened on other nodes, and heed the end of the job."""
        assert self._link is not None
        while self._link.news:
            news = self._link.news.popleft()
            self._say_for_all(news.shown)
            self._tell_joining(news.text, news.ranks)
        if self._link.over:
            self._selector.unregister(self._link)
            self._heed_verdict()

    def _say_for_all(self, text: str) -> None:
        """Print a report that all nodes have. If the nodes are quiet, one launcher shows the output
        of all of them, so only node 0 prints it."""
        if not self._options.quiet or (self._link is not None and self._share.node == 0):
            say(text)

    def _heed_verdict(self) -> None:
        """End the ranks because the job has failed, unless they are ending already."""
        if self._verdict is None or self._first is not None or self._passed_on:
            return
        if self._verdict.signum:
            self._signals.append(self._verdict.signum)
        else:
            self._tell_joining(self._verdict.text, self._ranks_of_verdict())
            self._end_softly()

    def _ranks_of_verdict(self) -> list[int]:
        """Return the ranks that are lost with the failure that ends the job on all nodes."""
        assert self._verdict is not None
        gone = [] if self._link is None else self._link.gone
        return gone or ([self._verdict.rank] if self._verdict.rank >= 0 else [])

    def _tell_joining(self, text: str, lost: Sequence[int]) -> None:
        """Make all ranks that join, now or later, raise PeerLostError for the ranks ``lost``."""
        if self._store is not None:
            who = f"; {list_ranks(list(lost))} cannot join" if lost else ""
            self._store.lose(lost, text + who)

    def _obey(self, control: int) -> None:
        """Take the lines that the controlling launcher sends."""
        piece = os.read(control, 4096)
        self._silent_at = time.monotonic() + SILENCE_S
        self._said += piece
        *lines, rest = bytes(self._said).split(b"\n")
        self._said[:] = rest
        for line in lines:
            signum, slots = read_control(line)
            if slots is not None:
                self._set_slots(slots)
            elif signum in signal.valid_signals():
                self._signals.append(signum)
        if not piece:
            self._lose_control(control)
        elif self._options.heard is not None:
            self._options.heard()

    def _set_slots(self, slots: int) -> None:
        """Take this host's number of slots; the ranks of a fixed job stay as they are."""

    def _check_silence(self) -> None:
        if self._link is not None and not self._link.over:
            self._link.check_silence()
            self._note_news()
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
        """End the ranks with SIGTERM, and kill them ``KILL_S`` later.

        The launcher's host may have vanished ``SILENCE_S`` ago, so a longer grace would exceed the
        10 s in which nothing is left. After another signal of the launcher, its end kills at once.
        """
        self._silent_at = None
        self._selector.unregister(control)
        if self._passed_on not in (0, signal.SIGHUP):
            self._signals.append(signal.SIGHUP)
            return
        if not self._passed_on:
            # Another node may have lost the launcher too, and may have reported that to this node
            # before.
            self._passed_on, self._control_lost = signal.SIGHUP, True
            self._tell(self._stop_of(signal.SIGHUP))
        now = time.monotonic()
        kill_at = min([now + KILL_S, *(at for at, signum in self._due if signum == signal.SIGKILL)])
        self._due = [(now, signal.SIGTERM), (kill_at, signal.SIGKILL)]

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
            self._dismiss_servers()
            failed = rank.status != 0 and not rank.stopped and self._is_adapting()
            if failed and self._restarts > 0:
                self._replace(rank)
            else:
                self._note_end(rank, failed)

    def _note_end(self, rank: RankProcess, failed: bool) -> None:
        """Act on the end of a rank that is not started again."""
        if failed and self._is_tolerated(rank):
            self._lost.append(rank)
            if self._link is None:
                say(f"{self._failure_of(rank)}, and the others go on")
                self._tell_joining(self._failure_of(rank), [self._label(rank.number)])
            else:
                # All nodes together decide, and all report it.
                self._link.lose(self._verdict_on(rank))
        elif failed:
            self._fail(rank)

    def _is_tolerated(self, rank: RankProcess) -> bool:
        """Return whether the launch goes on without this rank: some other one has to be left, here
        or on another node. The nodes together may find later that too many are lost."""
        left = any(one.status in (None, 0) for one in self._ranks if one is not rank)
        left = left or self._share.size > len(self._ranks)
        return left and len(self._lost) < self._options.tolerate

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
        self._tell_joining(self._failure_of(rank), [self._label(rank.number)])
        self._end_softly()

    def _end_softly(self) -> None:
        soft = time.monotonic() + GRACE_S
        self._due = [(soft, signal.SIGTERM), (soft + KILL_S, signal.SIGKILL)]

    def _stop_of(self, signum: int) -> Verdict:
        where = f" on host {self._host}" if self._host else ""
        if self._control_lost:
            text = (
                f"host {self._host} has lost the launcher: the connection to it ended, or was "
                f"silent for {SILENCE_S:g} s"
            )
            return Verdict(text, 128 + signum, signum)
        name = signal.Signals(signum).name
        text = f"stopped by {name}{where}, which was passed on to all ranks"
        return Verdict(text, 128 + signum, signum)

    def _verdict_on(self, rank: RankProcess) -> Verdict:
        return Verdict(
            self._failure_of(rank), exit_status(rank.status), rank=self._label(rank.number)
        )

    def _failure_of(self, rank: RankProcess) -> str:
        where = f" on host {self._host}" if self._host else ""
        pid = rank.process.pid
        if self._serves(rank.number):
            server, number = rank.number - self._options.ranks, self._label(rank.number)
            return f"server {server} (rank {number}, pid {pid}) {rank.describe()}"
        return f"rank {self._label(rank.number)}{where} (pid {pid}) {rank.describe()}"

    def _name_of(self, rank: RankProcess) -> str:
        where = f" (host {self._host})" if self._host else ""
        return f"rank {self._label(rank.number)}{where}"

    def _is_adapting(self) -> bool:
        return self._first is None and not self._passed_on and self._verdict is None

    def _replace(self, rank: RankProcess) -> None:
        """Start a failed rank again. The others notice its end and join with the new process."""
        self._restarts -= 1
        self._ranks[rank.number] = self._start_rank(rank.number)
        if not self._options.quiet:
            say(f"{self._failure_of(rank)}, and was started again")
        rank.release()

    def _escalate(self) -> None:
        while self._due and self._due[0][0] <= time.monotonic():
            _, signum = self._due.pop(0)
            for rank in self._ranks:
                if rank.status is None:
                    rank.stopped = True
                    rank.send_signal(signum)

    def report(self) -> None:
        """Report which rank failed, how, and how the others ended: on stderr, unless the launch is
        quiet, and to ``LaunchOptions.ended``. Of a job that has ended well, report the lost ranks.
        """
        first, reason = self._first, self._reason()
        if reason is None:
            own = [self._name_of(rank) for rank in self._lost]
            lost = own if self._link is None else self._link.lost
            if lost and self._options.tolerate:
                self._say_for_all(f"the job has ended without {', '.join(lost)}")
            return
        if self._options.ended is not None:
            self._options.ended(reason)
        if self._options.quiet:
            return
        say(reason.text)
        if self._passed_on:
            return
        others = [rank for rank in self._ranks if rank not in (first, *self._lost)]
        numbers = {rank: self._label(rank.number) for rank in others}
        stopped = [numbers[rank] for rank in others if rank.stopped]
        followed = [numbers[rank] for rank in others if rank.status != 0 and not rank.stopped]
        if followed:
            say(f"then {list_ranks(followed)} failed too")
        if stopped:
            say(f"{list_ranks(stopped)} still ran and had to be stopped")

    def _reason(self) -> Verdict | None:
        """Return why the job has failed, as all nodes report it; None if it has not."""
        if self._verdict is not None:
            return self._verdict
        if self._passed_on:
            return self._stop_of(self._passed_on)
        return None if self._first is None else self._verdict_on(self._first)


def say(text: str) -> None:
    """Print a report of this launcher on stderr, in lines of the terminal's width."""
    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap("pycoll run: " + text, width, subsequent_indent="  ")
    print("\n".join(lines), file=sys.stderr, flush=True)


def exit_status(status: int | None) -> int:
    """Return a process's status as a shell has it: 128 + number for a signal."""
    status = status or 0
    return 128 - status if status < 0 else status
