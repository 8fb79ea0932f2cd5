"""Jobs on several hosts from one command: starts an agent on each host, over ssh or here.

The launcher writes its orders to the stdin of each agent and shows what the agents print. An agent
whose stdin ends, since the launcher has ended or the connection is lost, ends its ranks. The nodes
meet and watch each other as those of ``--nnodes`` do (node_meeting.py); the launcher takes no part.
"""

from __future__ import annotations

import base64
import contextlib
import math
import os
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from pycoll.bootstrap.discovery.versions import versions
from pycoll.bootstrap.rendezvous.frames import PULSE_S, SILENCE_S
from pycoll.config import PREFIX, Config, with_new_names
from pycoll.errors import InvalidArgumentError, TransportError
from pycoll.launch.elastic_jobs import ElasticOptions
from pycoll.launch.host_list import HostSlots
from pycoll.launch.host_notes import NoteFilter, control_line, new_mark, write_order
from pycoll.launch.node_meeting import START_S, Verdict, compare_versions
from pycoll.launch.rank_crew import KILL_S, SIGNAL_GRACE_S
from pycoll.launch.rank_output import RankOutput
from pycoll.launch.signals import ignore_terminal_stop, signals_caught

#: Seconds from the first agent that fails to start until the launcher gives up the others.
_MORE_FAILURES_S = 1.0
_AGENT = "pycoll.launch.host_agent"
#: Seconds that agents have to end after the first of them has ended. An agent that is cut off from
#: the others needs 5 of them until it notices, and 5 until its ranks have ended.
_LAST_S = 12.0
#: Most bytes of an agent's stderr that are kept for an error text.
_WORDS_MAX = 4096
#: Variables that hosts share, in addition to PYCOLL_*; ``HostsOptions.variables`` adds others.
_CARRIED = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "LANG", "LC_ALL", "TZ")
_CARRIED_PREFIXES = (
    *("PYTHON", "OMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "CUDA_", "NCCL_", "GLOO_", "TORCH"),
    *("JAX_", "XLA_", "HOROVOD_", "HF_", "TRANSFORMERS_", "CONDA_"),
)
#: Variables of one process or of one job, which the agents set.
_PLACES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "ADDRESS", "SECRET", "JOB_ID", "STORE")
_OWN = {f"{PREFIX}{name}" for name in (*_PLACES, "ELASTIC", "ELASTIC_WORKER", "HOST_ID")}
_HINTS = (
    (
        "Permission denied",
        "ssh would ask for a password, and pycoll answers no questions: use a key that works "
        "without one (ssh-copy-id {host}, an ssh agent, or -i FILE)",
    ),
    ("Host key verification", "connect once by hand (ssh {host}), so that ssh knows its key"),
    ("Could not resolve", "check the host's name"),
    ("Connection refused", "does sshd run there, at this port (-p PORT)?"),
    ("timed out", "is the host up, and does a firewall let ssh through?"),
    ("No route to host", "is the host up, and in a network that this host reaches?"),
    ("No module named", "install the same pycoll there, for {python}"),
)


@dataclass(frozen=True)
class HostsOptions:
    """The hosts of a job and how to reach them.

    ``hosts``: names with the number of ranks on each. ``ssh_port`` and ``identity`` are the port
    and the key file of ssh. All agents have to answer and to meet within ``start_timeout_s``.
    ``interfaces`` are the network interfaces that nodes and ranks use. ``variables``: "NAME" or
    "NAME=VALUE", which all ranks get in addition to those that are always carried. ``verbose``: say
    on stderr how each host is reached. ``discovery`` is the command line of a script that names the
    hosts of an elastic job, instead of ``hosts``.
    """

    hosts: Sequence[HostSlots]
    ssh_port: int | None = None
    identity: str | None = None
    start_timeout_s: float = START_S
    interfaces: Sequence[str] = ()
    variables: Sequence[str] = ()
    verbose: bool = False
    discovery: str | None = None


@dataclass(frozen=True)
class Work:
    """The ranks run ``command``; it calls the pickled function ``call`` if there is one.
    The other fields are those of LaunchOptions on each host; elastic_hosts.py runs elastic jobs."""

    command: Sequence[str]
    prefix: bool = False
    restarts: int = 0
    tolerate: int = 0
    output_folder: str | None = None
    call: bytes | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    elastic: ElasticOptions | None = None


class HostAgent:
    """The agent of one host, as its launcher sees it."""

    def __init__(self, host: HostSlots, process: subprocess.Popen[bytes]) -> None:
        self.host = host
        self.process = process
        #: Its answer to the first order.
        self.facts: dict[str, Any] | None = None
        self.words = bytearray()
        #: Whether its ranks run, so that it expects a pulse.
        self.started = False
        self.ended = False
        #: When its last note came, on the monotonic clock. Node 0 answers each pulse with one.
        self.heard = 0.0
        #: Why the job has failed, in the words of this agent.
        self.verdict: Verdict | None = None
        self._lock = threading.Lock()

    def order(self, data: dict[str, Any]) -> None:
        """Send an order, and wait until the agent reads it or ends. Its status shows whether it has
        ended. Any thread may call it."""
        stdin = self.process.stdin
        with self._lock, contextlib.suppress(BrokenPipeError):
            if stdin is not None and not stdin.closed:
                write_order(stdin.fileno(), data)

    def send(self, signum: int = 0, slots: int | None = None) -> None:
        """Send the agent a signal, a number of slots or, with neither, a pulse. Any thread may call
        it."""
        stdin = self.process.stdin
        with self._lock, contextlib.suppress(BrokenPipeError):
            if stdin is not None and not stdin.closed:
                os.write(stdin.fileno(), control_line(signum, slots))

    def let_go(self) -> None:
        """Close its stdin, after which it ends its ranks and itself."""
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def failure(self) -> str:
        """Return why it has ended without an answer."""
        text = self.words.decode(errors="replace").strip()
        return failure_of(self.host, self.process.returncode, text)


def failure_of(host: HostSlots, status: int, text: str) -> str:
    """Return why an agent on ``host`` ended with ``status``, from what it or ssh said on stderr,
    and what to do."""
    lines = [line for line in text.splitlines() if line.strip()]
    said = "; ".join(lines[-3:]) if lines else "it said nothing"
    hints = [hint for word, hint in _HINTS if word in text]
    if status in (126, 127):
        hints = ["install the same Python there, at the same path: {python}"]
    hint = hints[0].format(host=host.name, python=sys.executable) if hints else ""
    way = "its agent" if host.is_here else "ssh"
    text = f"host {host.name}: {way} ended with status {status}: {said}"
    return f"{text}; {hint}" if hint else text


def launch_on_hosts(
    options: HostsOptions, work: Work, results: Callable[[int, bytes], object] | None = None
) -> Verdict | None:
    """Run a job on several hosts and wait; returns its failure, or None if all ranks ended well.

    The ``signum`` of the failure is the first signal that this process has passed on, else 0.
    ``results(rank, data)`` is called with what ranks that call a function have left. Raises
    InvalidArgumentError or TransportError, with each host and its reason, if an agent does not
    start. No process of the job is left running on any host that can still be reached.
    """
    with HostsJob(options, work, results) as job:
        if not job.await_answers():
            return job.stop_early()
        job.go_all()
        return job.watch()


_Job = TypeVar("_Job", bound="HostsJob")


class HostsJob:
    """The agents of one job. A context manager: on exit none of them runs. Raises
    InvalidArgumentError for options that cannot work."""

    def __init__(
        self,
        options: HostsOptions,
        work: Work,
        results: Callable[[int, bytes], object] | None = None,
    ) -> None:
        limit = options.start_timeout_s
        if not 0 < limit < float("inf"):
            raise InvalidArgumentError(
                f"start_timeout={limit}: expected seconds, a finite number above 0"
            )
        self._options, self._work, self._results = options, work, results
        self._secret = secrets.token_hex(32)
        self._environment = {**forwarded_variables(os.environ, options), **work.environment}
        self._machines: dict[str, str] = {}
        self._mark = new_mark()
        self._agents: list[HostAgent] = []
        self._verdicts: list[Verdict] = []
        self.signals: list[int] = []
        self._passed_on = 0
        self._over = threading.Event()
        #: Seconds that the agents have to end on exit.
        self._exit_s = SIGNAL_GRACE_S + KILL_S + 1.0
        self._due: list[tuple[float, Callable[[HostAgent], object]]] = []
        self._selector = selectors.DefaultSelector()
        self._output = RankOutput(self._selector)
        self._undo = contextlib.ExitStack()
        self._began = time.monotonic()

    def __enter__(self: _Job) -> _Job:
        self._undo.callback(self._selector.close)
        self._undo.enter_context(signals_caught(self._selector, self.signals))
        self._undo.enter_context(ignore_terminal_stop())
        try:
            for number, host in enumerate(self._options.hosts):
                self._start(host, number == 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *unused: object) -> None:
        self._over.set()
        for agent in self._agents:
            if agent.facts is None:
                # No rank of it runs. ssh may still try to connect, and a thread write to it.
                _kill(agent)
            agent.let_go()
        until = time.monotonic() + self._exit_s
        for agent in self._agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(max(0.0, until - time.monotonic()))
            _kill(agent)
            agent.process.wait()
        self._output.drain()
        for agent in self._agents:
            for pipe in (agent.process.stdout, agent.process.stderr):
                if pipe is not None:
                    pipe.close()
        self._undo.close()

    def _start(self, host: HostSlots, listens: bool) -> HostAgent:
        """Start the agent of a host; with ``listens`` it may become node 0."""
        line = agent_line(host, self._options, _AGENT)
        if self._options.verbose:
            say_plainly(f"host {host.name}: {shlex.join(line)}")
        process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The terminal's Ctrl-C reaches the launcher only.
            start_new_session=True,
        )
        agent = HostAgent(host, process)
        self._agents.append(agent)
        assert process.stdout is not None and process.stderr is not None
        notes = NoteFilter(self._mark, lambda note: self._take(agent, note))
        self._output.add(process.stdout, 1, notes=notes)
        os.set_blocking(process.stderr.fileno(), False)
        self._selector.register(
            process.stderr, selectors.EVENT_READ, lambda: self._read_words(agent)
        )
        work = self._work
        order = {
            "mark": self._mark,
            "host": host.name,
            "listens": listens,
            "slots": host.slots,
            "servers": host.servers,
            "secret": self._secret.encode().hex(),
            "command": list(work.command),
            "folder": os.getcwd(),
            "environment": self._environment,
            "prefix": work.prefix,
            "restarts": work.restarts,
            "tolerate": work.tolerate,
            "output_folder": work.output_folder,
            "start_timeout_s": self._options.start_timeout_s,
            "call": None if work.call is None else base64.b64encode(work.call).decode(),
            "elastic": None if work.elastic is None else asdict(work.elastic),
        }
        # A long order does not fit the pipe of an ssh that has not connected yet.
        threading.Thread(target=agent.order, args=(order,), daemon=True).start()
        return agent

    def _read_words(self, agent: HostAgent) -> None:
        """Keep what ssh or a starting agent says on stderr, for an error text."""
        stderr = agent.process.stderr
        assert stderr is not None
        try:
            piece = os.read(stderr.fileno(), 65536)
        except BlockingIOError:
            return
        if not piece:
            self._selector.unregister(stderr)
        if self._options.verbose and piece:
            os.write(2, piece)
        agent.words += piece
        del agent.words[:-_WORDS_MAX]

    def _take(self, agent: HostAgent, note: Any) -> None:
        agent.heard = time.monotonic()
        if "verdict" in note:
            agent.verdict = Verdict(**note["verdict"])
            self._verdicts.append(agent.verdict)
        elif "result" in note:
            if self._results is not None:
                self._results(note["result"], base64.b64decode(note["data"]))
        elif "started" in note:
            agent.started = True
        elif agent.facts is None:
            agent.facts = note

    def _step(self, until: float) -> None:
        """Wait for events until ``until``, on the monotonic clock, and note ended agents."""
        waits = [*self._output.waits(), 0.1, max(0.0, until - time.monotonic())]
        for key, _ in self._selector.select(min(waits)):
            action: Callable[[], object] = key.data
            action()
        self._output.show()
        for agent in self._agents:
            agent.ended = agent.process.poll() is not None

    def await_answers(self) -> bool:
        """Wait until all agents have answered; returns False if a signal has come meanwhile. Raises
        the errors of ``launch_on_hosts``."""
        limit = self._options.start_timeout_s
        until = self._began + limit
        while not all(agent.facts is not None for agent in self._agents):
            if self.signals:
                return False
            self._step(until)
            if any(agent.ended and agent.facts is None for agent in self._agents):
                until = min(until, time.monotonic() + _MORE_FAILURES_S)
            elif all(agent.facts is not None for agent in self._agents):
                break
            if time.monotonic() >= until:
                break
        failures = [
            agent.failure()
            if agent.ended
            else f"host {agent.host.name}: no answer within {limit:g} s (--start-timeout sets it)"
            for agent in self._agents
            if agent.facts is None and (agent.ended or time.monotonic() >= self._began + limit)
        ]
        if failures:
            raise TransportError("\n".join(failures), operation="run")
        for agent in self._agents:
            self._compare(agent)
        return True

    def stop_early(self) -> Verdict:
        """Return the verdict on a job that a signal has ended before its ranks ran."""
        signum = self.signals[0]
        name = signal.Signals(signum).name
        return Verdict(f"stopped by {name} before the ranks ran", 128 + signum, signum)

    def _compare(self, agent: HostAgent) -> None:
        """Raise InvalidArgumentError if an agent cannot take part in the job."""
        name, facts = agent.host.name, agent.facts or {}
        compare_versions(versions(), socket.gethostname(), facts, name)
        if facts["refusal"]:
            raise InvalidArgumentError(f"host {name}: {facts['refusal']}")
        other = self._machines.setdefault(facts["machine"], name)
        if other != name:
            raise InvalidArgumentError(
                f"hosts {other} and {name} are one machine: name it once, with all its slots"
            )

    def go_all(self) -> None:
        """Let the agents meet and start their ranks; that of the first host becomes node 0."""
        for node, agent in enumerate(self._agents):
            self._go(agent, node, self._agents[0], len(self._agents))

    def _go(self, agent: HostAgent, node: int, first: HostAgent, nodes: int) -> None:
        """Let an agent join the job of ``nodes`` nodes. Its stderr is shown from now on."""
        if self._options.verbose:
            say_plainly(f"host {agent.host.name}: the agent starts {agent.host.slots} ranks")
        stderr = agent.process.stderr
        assert stderr is not None
        if stderr in self._selector.get_map():
            self._selector.unregister(stderr)
            self._output.add(stderr, 2)
        places = (first.facts or {})["places"]
        who = {"node": node, "nodes": nodes, "first": first.host.name}
        agent.order({**who, "places": places})

    def watch(self) -> Verdict | None:
        """Wait until all agents have ended; returns the job's failure."""
        last: float | None = None
        self._begin_pulse()
        while not all(agent.ended for agent in self._agents):
            self._watch_once()
            if not self._is_ending():
                last = None
            elif last is None:
                last = time.monotonic() + _LAST_S
            if last is not None and time.monotonic() >= last:
                # The time of the remaining agents is over: they are stopped or unreachable.
                self._exit_s = KILL_S
                break
        failure = self._conclude(self._agents[0] if self._work.tolerate else None)
        # Agents that had to be killed report no signal, and other agents report a failure that came
        # before the signal. A signal that only one agent got does not count.
        return None if failure is None else failure._replace(signum=self._passed_on)

    def _is_ending(self) -> bool:
        """Return whether the job has ended on some host, so that it ends on the others soon."""
        if self._work.tolerate:
            # A host may be lost, and node 0 knows whether the others go on.
            return self._is_node_0_ending(self._agents[0])
        ended = [agent for agent in self._agents if agent.ended]
        return any(agent.process.returncode or self._verdicts for agent in ended)

    def _is_node_0_ending(self, first: HostAgent) -> bool:
        """Return whether the job has ended for node 0, or for others while node 0 stands still."""
        if first.ended or first.verdict is not None:
            return True
        silent = first.started and time.monotonic() - first.heard > SILENCE_S
        return silent and bool(self._verdicts)

    def _begin_pulse(self) -> None:
        # Runs in a separate thread, since writing output may block the main thread.
        threading.Thread(target=self._keep_pulse, daemon=True).start()

    def _watch_once(self) -> None:
        """Wait for events, a second at most, and pass signals on."""
        self._step(time.monotonic() + 1.0)
        self._pass_on()
        while self._due and self._due[0][0] <= time.monotonic():
            _, act = self._due.pop(0)
            for agent in self._agents:
                act(agent)

    def _conclude(self, first: HostAgent | None = None) -> Verdict | None:
        """Return the job's failure after its agents have ended. ``first`` is the agent of node 0 in
        a job that goes on without other hosts: the failure is the one that node 0 has, or that the
        others have if node 0 is gone."""
        self._output.drain()
        if first is not None and first.ended and first.process.returncode == 0:
            return None
        if first is not None and first.verdict is not None:
            return first.verdict
        if self._verdicts:
            # All nodes report one failure, but for one that was cut off from the others.
            texts = list(dict.fromkeys([one.text for one in self._verdicts]))
            if self._passed_on and self._verdicts[0].signum == self._passed_on:
                texts = [f"stopped by {signal.Signals(self._passed_on).name}"]
            return self._verdicts[0]._replace(text="\n".join(texts[:4]))
        lost = [
            f"host {agent.host.name}: its agent or the connection to it ended with status "
            f"{agent.process.returncode}"
            for agent in self._agents
            if agent.process.returncode != 0
        ]
        return Verdict("\n".join(lost), 1) if lost else None

    def _keep_pulse(self) -> None:
        while not self._over.wait(PULSE_S):
            for agent in self._agents:
                if agent.started:
                    agent.send()

    def _pass_on(self) -> None:
        if self._output.broken and not self._passed_on:
            self.signals.append(signal.SIGTERM)
        while self.signals:
            signum = self.signals.pop(0)
            now = time.monotonic()
            if self._passed_on:
                self._due = [(now, HostAgent.let_go), (now + KILL_S, _kill)]
                continue
            self._passed_on = signum
            for agent in self._agents:
                agent.send(signum)
            hard = now + SIGNAL_GRACE_S + KILL_S + 1.0
            self._due = [(hard, HostAgent.let_go), (hard + KILL_S, _kill)]


def forwarded_variables(environ: Mapping[str, str], options: HostsOptions) -> dict[str, str]:
    """Return the variables that the agents and ranks of all hosts get. Raises InvalidArgumentError
    for a name in ``options.variables`` that is not set."""
    found = {
        name: text
        for name, text in with_new_names(environ).items()
        if name in _CARRIED or name.startswith((PREFIX, *_CARRIED_PREFIXES))
    }
    for word in options.variables:
        name, equals, text = word.partition("=")
        if not equals and name not in environ:
            raise InvalidArgumentError(
                f"-x {word}: the variable is not set here; set it, or give -x {word}=VALUE"
            )
        found[name] = text if equals else environ[name]
    if options.interfaces:
        found["PYCOLL_INTERFACES"] = ",".join(options.interfaces)
    found = {name: text for name, text in found.items() if name not in _OWN}
    Config.read(found)
    return found


def agent_line(host: HostSlots, options: HostsOptions, module: str) -> list[str]:
    """Return the command line that starts an agent, a module of pycoll, on a host. It holds no
    secret and no user's command. Raises InvalidArgumentError."""
    agent = [sys.executable, "-m", module]
    if host.is_here:
        return agent
    if shutil.which("ssh") is None:
        raise InvalidArgumentError(
            f"host {host.name}: no command ssh (openssh-client) to reach it with"
        )
    if os.environ.get("PYTHONPATH"):
        agent = ["env", f"PYTHONPATH={os.environ['PYTHONPATH']}", *agent]
    wait_s = max(1, math.ceil(options.start_timeout_s))
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": str(wait_s),
        "ServerAliveInterval": "2",
        "ServerAliveCountMax": "2",
    }
    line = ["ssh", "-T"]
    for name, value in settings.items():
        line += ["-o", f"{name}={value}"]
    if options.ssh_port is not None:
        line += ["-p", str(options.ssh_port)]
    if options.identity is not None:
        if not os.path.isfile(options.identity):
            raise InvalidArgumentError(
                f"ssh_identity_file={options.identity!r}: there is no such file"
            )
        line += ["-i", options.identity]
    return [*line, "--", host.name, shlex.join(agent)]


def _kill(agent: HostAgent) -> None:
    if agent.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.process.pid, signal.SIGKILL)


def say_plainly(text: str) -> None:
    """Print a report on stderr, in one line."""
    print(f"pycoll run: {text}", file=sys.stderr, flush=True)
