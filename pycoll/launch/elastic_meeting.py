"""The connections between the launchers of an elastic job, which may end and begin at any time.

Node 0 serves them; the launcher of each other host keeps one to it. Frames are those of the store
(bootstrap/rendezvous/frames.py): HELLO, then ORDER frames with JSON in both directions, and FAIL
for a host that is refused. The first message of a host is its facts, and the first order a welcome.
Both ends then send a PULSE each second. The kernel of a stopped launcher keeps its connections
open, so only missing pulses show the stop.

A message of a host is about one of its ranks, ``rank``. The rank ``asks`` for a place, with its
process and a ``torch_port``; it is ``silent`` again; it was ``restarted``; or it has ``ended``,
with a status, a ``text`` and whether it was ``stopped``. Other messages hold the host's ``slots``,
or a verdict, ``failed``. An order has ranks to ``start`` or to ``stop``, or a world to ``form``
with the ``places`` of the host. ``ask_anew`` tells ranks to ask again, ``refuse`` has a reason to
refuse all ranks, and ``over`` ends the job, with a verdict or None.
"""

from __future__ import annotations

import abc
import contextlib
import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pycoll.bootstrap.admission import Admission, describe_origin
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import (
    listen_at,
    listen_in_range,
    parse_address,
    watch_host,
)
from pycoll.bootstrap.discovery.versions import versions
from pycoll.bootstrap.handshake import Claim, Purpose, Verdict, receive_exactly, scope_of
from pycoll.bootstrap.rendezvous.frames import (
    HEAD,
    NODES,
    PULSE_S,
    SILENCE_S,
    Kind,
    cut_frame,
    fail_frame,
    frame,
    list_ranks,
    read_hello,
    to_error,
)
from pycoll.bootstrap.rendezvous.store_server import StoreServer
from pycoll.errors import InvalidArgumentError, PycollError, TransportError
from pycoll.launch.elastic_jobs import ElasticJob, ElasticOptions, JobHost
from pycoll.launch.node_meeting import (
    NodeOptions,
    compare_programs,
    compare_versions,
    enter_meeting,
)
from pycoll.launch.node_meeting import Verdict as JobVerdict
from pycoll.untrusted import json_object, read_json

#: Longest frame of a launcher: a world of RANKS_MAX ranks has less than a tenth of it.
_ORDER_BYTES_MAX = 1 << 20
_FACTS = {
    **{"pycoll": str, "python": str, "host": str, "slots": int, "program": str, "refusal": str}
}


class HostShare(NamedTuple):
    """The share of this host in the job: its slots, and what their ranks run (``program_of``).
    ``refusal`` says why the command cannot run here; it is empty if it can."""

    slots: int
    program: str = ""
    refusal: str = ""


class _Line:
    """One end of a connection between two launchers, in its owner's selector.

    ``take(kind, payload)`` gets each frame but pulses; a ValueError from it ends the connection.
    ``lost(why)`` is called once, if the connection ends before ``close``. One thread uses it, and
    another one may call ``pulse``.
    """

    def __init__(
        self,
        sock: socket.socket,
        selector: selectors.BaseSelector,
        take: Callable[[int, bytes], object],
        lost: Callable[[str], object],
    ) -> None:
        sock.setblocking(False)
        watch_host(sock)
        self._sock, self._selector, self._take, self._lost = sock, selector, take, lost
        self._incoming, self._outgoing = bytearray(), bytearray()
        self._open = True
        #: Guards the socket's sending end, ``_outgoing`` and ``_open``.
        self._sending = threading.Lock()
        #: When bytes came last, on the monotonic clock; None before ``begin_pulse``.
        self._heard: float | None = None
        selector.register(sock, selectors.EVENT_READ, self._ready)

    def send(self, order: dict[str, Any]) -> None:
        """Send an order or a message; the rest of it follows when the connection takes it."""
        self.send_frame(frame(Kind.ORDER, json.dumps(order).encode()))

    def send_frame(self, data: bytes) -> None:
        """Send a whole frame."""
        if self._open:
            with self._sending:
                self._outgoing += data
            self._flush()

    def begin_pulse(self) -> None:
        """From now on both ends send pulses, and silence of ``SILENCE_S`` is a loss."""
        self._heard = time.monotonic()

    def pulse(self) -> None:
        """Tell the other launcher that this process runs."""
        with self._sending:
            if not self._open or self._heard is None:
                return
            if not self._outgoing:
                self._outgoing += frame(Kind.PULSE)
            self._drain()

    @property
    def silent_at(self) -> float | None:
        """When silence ends the connection, on the monotonic clock; None if it does not."""
        return None if self._heard is None or not self._open else self._heard + SILENCE_S

    def check_silence(self) -> None:
        """End the connection if nothing has come for ``SILENCE_S``."""
        if self.silent_at is not None and time.monotonic() >= self.silent_at:
            # ``lost`` may still send.
            self._lost(NODES.stopped)
            self.close()

    def close(self) -> None:
        """End the connection."""
        if self._open:
            self._selector.unregister(self._sock)
            with self._sending:
                self._open = False
                self._sock.close()

    def _ready(self, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush()
        if not mask & selectors.EVENT_READ or not self._open:
            return
        try:
            piece = self._sock.recv(256 * 1024)
        except BlockingIOError:
            return
        except OSError:
            self._end(NODES.lost)
            return
        if self._heard is not None:
            self._heard = time.monotonic()
        self._incoming += piece
        try:
            while self._open and self._next_frame():
                pass
        except ValueError as error:
            self._end(f"sent unreadable data: {error}")
        if not piece:
            self._end(NODES.lost)

    def _next_frame(self) -> bool:
        found = cut_frame(self._incoming, lambda kind: _ORDER_BYTES_MAX)
        if found is not None and found[0] != Kind.PULSE:
            self._take(*found)
        return found is not None

    def _flush(self) -> None:
        with self._sending:
            self._drain()
            rest = bool(self._outgoing)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rest else 0)
        self._selector.modify(self._sock, events, self._ready)

    def _drain(self) -> None:
        with contextlib.suppress(OSError):
            # The read that follows detects and reports a loss.
            while self._outgoing:
                del self._outgoing[: self._sock.send(self._outgoing)]

    def _end(self, why: str) -> None:
        if self._open:
            self.close()
            self._lost(why)


class ElasticSeat(abc.ABC):
    """A launcher's place in an elastic job, of one host or of several. One thread uses it, and one
    that it starts sends the pulses, since writing output may block the first.

    ``orders`` are those that its launcher has to follow, oldest first. ``node`` is the host's
    number; ``host`` its name in reports, empty in a job of one host.
    """

    def __init__(self, node: int, host: str) -> None:
        self.node, self.host = node, host
        self.orders: deque[dict[str, Any]] = deque()
        self.job_id = ""
        self.rank_secret = ""
        # Its callbacks take the mask of events, unlike those of the launcher's selector.
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, _Line] = {}
        self._closed = threading.Event()

    def _begin_pulses(self) -> None:
        threading.Thread(target=self._keep_pulses, daemon=True).start()

    def _keep_pulses(self) -> None:
        while not self._closed.wait(PULSE_S):
            for line in tuple(self._lines.values()):
                line.pulse()

    def _check_silence(self) -> None:
        due = [line.silent_at for line in self._lines.values() if line.silent_at is not None]
        if due and time.monotonic() >= min(due):
            # This launcher may have been stopped itself; pulses that came meanwhile are read first.
            self.read()
            for line in tuple(self._lines.values()):
                line.check_silence()

    def _name_job(self, secret: bytes, nonce: str) -> None:
        self.job_id = f"run-{nonce}"
        # Nodes do not send it: their connections are authenticated and not encrypted.
        seed = b"pycoll ranks\0" + nonce.encode()
        self.rank_secret = hmac.digest(secret, seed, "sha256").hex()

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``read`` has something to do."""
        return self._selector.fileno()

    def read(self) -> None:
        """Take what the other launchers have sent."""
        for key, mask in self._selector.select(0):
            # A callback may have closed another ready connection of this batch.
            if self._selector.get_map().get(key.fd) is key:
                key.data(mask)

    @abc.abstractmethod
    def send(self, message: dict[str, Any]) -> None:
        """Pass a message of this host to node 0."""

    def advance(self) -> None:
        """Do the steps that are due."""
        self._check_silence()

    def waits(self) -> list[float]:
        """Return times in seconds after which ``advance`` has to be called again."""
        now = time.monotonic()
        due = [line.silent_at for line in self._lines.values()]
        return [max(0.0, one - now) for one in due if one is not None]

    @abc.abstractmethod
    def has_others(self) -> bool:
        """Return whether launchers of other hosts depend on this one."""

    @abc.abstractmethod
    def reach(self, host: str) -> str:
        """Return the address of a host as seen from this one; empty stands for node 0."""

    def close(self) -> None:
        """Close all connections."""
        self._closed.set()
        for line in self._lines.values():
            line.close()
        self._selector.close()


class ElasticServer(ElasticSeat):
    """The seat of node 0, which decides for all hosts. ``nodes`` None: a job of one host.

    ``ports`` limits the ports where the stores of the worlds listen. Raises TransportError if the
    address of the nodes cannot be bound.
    """

    def __init__(
        self,
        options: ElasticOptions,
        share: HostShare,
        nodes: NodeOptions | None,
        ports: tuple[int, int] | None,
        say: Callable[[str], object],
    ) -> None:
        host = "" if nodes is None else nodes.host or socket.gethostname()
        super().__init__(0, host)
        self._nodes, self._ports, self._say = nodes, ports, say
        self._name_job(os.urandom(32) if nodes is None else nodes.secret, os.urandom(16).hex())
        self._store: StoreServer | None = None
        self._admission: Admission | None = None
        self._by = Deadline(0.0 if nodes is None else nodes.start_timeout_s)
        self.program = share.program
        self._refusal = f"host {host} (node 0): {share.refusal}" if share.refusal else ""
        count = 1 if nodes is None else nodes.nodes
        self._job = ElasticJob(options, count, self.job_id, self._serve, self._lose_ranks, say)
        self._here = JobHost(0, host, share.slots, "", self.orders.append)
        #: Where the ranks of this host reach the stores, and where these listen; None: everywhere.
        self._own_host = "127.0.0.1"
        self._bound: str | None = self._own_host
        if nodes is not None:
            self._listen(nodes)
        self._job.add(self._here)

    def _listen(self, nodes: NodeOptions) -> None:
        listener = nodes.listener or listen_at(*parse_address(nodes.address), "node 0")
        bound = listener.getsockname()[0]
        loopback = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
        self._bound = None if bound in ("0.0.0.0", "::") else bound
        self._own_host = self._bound or loopback
        scope = scope_of(os.environ.get("PYCOLL_JOB_ID", ""), "store")
        self._admission = Admission(self._selector, nodes.secret, scope, self._decide, self._admit)
        self._admission.listen(listener, Purpose.STORE)
        self._begin_pulses()

    def send(self, message: dict[str, Any]) -> None:
        """Take a message of this host."""
        self._job.take(self._here, message)

    def advance(self) -> None:
        """Do the steps that are due."""
        super().advance()
        if self._admission is not None:
            self._admission.expire()
        missing = self._job.missing()
        if missing and self._by.passed():
            self._job.fail(JobVerdict(self._absent(missing), 1))
        elif not missing and self._refusal:
            self._job.fail(JobVerdict(self._refusal, 1))
        self._job.advance()

    def waits(self) -> list[float]:
        """Return times in seconds after which ``advance`` has to be called again."""
        found = [*super().waits(), *self._job.waits()]
        if self._job.missing() and not self._job.over:
            found.append(min(self._by.remaining(), 0.5))
        return found

    def has_others(self) -> bool:
        """Return whether launchers of other hosts are connected."""
        return bool(self._lines)

    def reach(self, host: str) -> str:
        """Return the address of a host as seen from this one; empty stands for node 0."""
        return host or self._own_host

    def close(self) -> None:
        """Close all connections and the store."""
        if self._admission is not None:
            self._admission.close()
        if self._store is not None:
            self._store.close()
        super().close()

    def _serve(self, size: int, job_id: str) -> int:
        """Open the store of a new world and return its port. The store of the previous world is
        closed."""
        if self._store is not None:
            self._store.close()
            self._store = None
        try:
            listener = listen_in_range(self._bound, self._ports)
        except TransportError:
            if self._nodes is not None:
                raise
            self._bound = self._own_host = "::1"
            listener = listen_in_range(self._bound, self._ports)
        key = self.rank_secret.encode()
        self._store = StoreServer(listener, size, key, job_id, "pycoll run")
        self._store.start()
        return int(listener.getsockname()[1])

    def _lose_ranks(self, ranks: Sequence[int], text: str) -> None:
        """Tell those that join the last world that ``ranks`` will not come."""
        if self._store is not None:
            self._store.lose(ranks, text)

    def _absent(self, missing: list[int]) -> str:
        assert self._nodes is not None
        text = (
            f"pycoll run waited {self._by.seconds:.3g} s for {list_ranks(missing, 'node')} of "
            f"{self._nodes.nodes}: {list_ranks(missing, 'node')} never arrived at "
            f"{self._nodes.address}"
        )
        if self._admission is not None and self._admission.refusals:
            text += "; turned away: " + "; ".join(self._admission.refusals)
        return f"{text} (--start-timeout sets the limit)"

    def _decide(self, claim: Claim) -> Verdict:
        return Verdict.ADMITTED if claim.rank > 0 else Verdict.DUPLICATE

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        _Guest(self, claim.rank, sock)


class _Guest:
    """A host that has connected to node 0: its facts first, its messages then."""

    def __init__(self, server: ElasticServer, node: int, sock: socket.socket) -> None:
        self._server, self._node = server, node
        self._name = describe_origin(sock.getpeername())
        self._reach = str(sock.getpeername()[0]).removeprefix("::ffff:")
        self._greeted = False
        self._host: JobHost | None = None
        self._line = _Line(sock, server._selector, self._take, self._lose)
        self._key = id(self)
        server._lines[self._key] = self._line

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == Kind.HELLO and not self._greeted:
            self._greet(*read_hello(payload))
        elif kind == Kind.LEAVE and not payload:
            self._lose(NODES.lost)
        elif kind != Kind.ORDER or not self._greeted:
            self._refuse(
                "it was started for a job with a fixed number of ranks, and this one is "
                "elastic: give all nodes the same --min-np and --max-np"
            )
        elif self._host is None:
            self._enter(read_json(payload))
        else:
            message = read_json(payload)
            if not isinstance(message, dict):
                raise ValueError("a message that is no object")
            self._server._job.take(self._host, message)

    def _greet(self, size: int, name: str) -> None:
        self._name, self._greeted = name, True
        nodes = self._server._nodes
        assert nodes is not None
        if size != nodes.nodes:
            self._refuse(
                f"the nodes disagree about the size: node {self._node} ({name}) says {size}, "
                f"{nodes.address} expects {nodes.nodes}; give all processes the same --nnodes"
            )

    def _enter(self, told: Any) -> None:
        """Let a launcher into the job, or refuse it, by its facts. Raises ValueError for unreadable
        facts of a launcher with equal versions."""
        job, here = self._server._job, versions()
        try:
            if isinstance(told, dict):
                compare_versions(here, self._server.host, told, str(told.get("host")))
            facts = json_object(told, _FACTS)
            if not facts["refusal"]:
                mine = self._server.program
                compare_programs([(0, mine), (self._node, facts["program"])])
        except InvalidArgumentError as error:
            self._refuse(str(error))
            return
        if facts["refusal"]:
            self._refuse(f"host {facts['host']} (node {self._node}): {facts['refusal']}")
        elif job.over:
            self._line.send({"over": None if job.verdict is None else job.verdict._asdict()})
        elif self._node in job.hosts:
            self._refuse(
                f"two processes claim node {self._node}: {job.hosts[self._node].name} and "
                f"{self._name}; give each process its own --node-rank"
            )
        elif facts["slots"] < 0:
            raise ValueError(f"{facts['slots']} slots")
        else:
            name = f"{facts['host']}"
            self._line.send({"welcome": self._server.job_id.removeprefix("run-")})
            self._line.begin_pulse()
            self._host = JobHost(self._node, name, facts["slots"], self._reach, self._line.send)
            job.add(self._host)

    def _refuse(self, text: str) -> None:
        """Refuse this host; before the job has begun, that ends it on all hosts."""
        job = self._server._job
        if job.missing():
            job.fail(JobVerdict(text, 1))
        else:
            self._server._say(f"{NODES.member} {self._node} ({self._name}) was refused: {text}")
        self._line.send_frame(fail_frame("argument", text, [self._node]))
        self._lose(NODES.lost)

    def _lose(self, why: str) -> None:
        host, self._host = self._host, None
        text = f"{NODES.member} {self._node} ({self._name}) {why}"
        if host is not None and why == NODES.stopped:
            # If the launcher of that host goes on, it reads this and ends its ranks.
            self._line.send({"over": JobVerdict(text, 1)._asdict()})
        self._line.close()
        self._server._lines.pop(self._key, None)
        if host is not None and self._server._job.hosts.get(host.node) is host:
            self._server._job.lose(host, text)


class ElasticLink(ElasticSeat):
    """The seat of another node, connected to node 0."""

    def __init__(
        self, sock: socket.socket, server_host: str, options: NodeOptions, nonce: str
    ) -> None:
        super().__init__(options.node, options.host or socket.gethostname())
        self._name_job(options.secret, nonce)
        self._server_host = server_host
        self._address = options.address
        self._is_over = False
        self._line = _Line(sock, self._selector, self._take, self._lose)
        self._line.begin_pulse()
        self._lines[0] = self._line
        self._begin_pulses()

    def send(self, message: dict[str, Any]) -> None:
        """Pass a message of this host to node 0."""
        self._line.send(message)

    def has_others(self) -> bool:
        """Return False: the other launchers depend on node 0 only."""
        return False

    def reach(self, host: str) -> str:
        """Return the address of a host as seen from this one; empty stands for node 0."""
        return host or self._server_host

    def _take(self, kind: int, payload: bytes) -> None:
        if kind != Kind.ORDER:
            raise ValueError(f"a frame of kind {kind}")
        order = read_json(payload)
        if not isinstance(order, dict):
            raise ValueError("an order that is no object")
        self._is_over = self._is_over or "over" in order
        self.orders.append(order)

    def _lose(self, why: str) -> None:
        if not self._is_over:
            text = f"{NODES.member} 0, which served the store at {self._address}, {why}"
            self.orders.append({"over": JobVerdict(text, 1)._asdict()})


def join_job(options: NodeOptions, share: HostShare) -> ElasticLink:
    """Connect this host to node 0 and wait for its welcome. Raises pycoll's errors, within
    ``start_timeout_s`` and a few seconds; node 0's reason if it refuses this host."""
    options.check()
    deadline = Deadline(options.start_timeout_s)
    exchange = enter_meeting(options, deadline)
    server_host = exchange.server_host
    sock = exchange.detach()
    facts = {
        **versions(),
        "host": options.host or socket.gethostname(),
        **share._asdict(),
    }
    try:
        sock.sendall(frame(Kind.ORDER, json.dumps(facts).encode()))
        length, kind = HEAD.unpack(receive_exactly(sock, HEAD.size, deadline))
        if length > _ORDER_BYTES_MAX:
            raise ValueError(f"{length} bytes in a frame of kind {kind}")
        payload = receive_exactly(sock, length, deadline)
        error = to_error(payload) if kind == Kind.FAIL else None
        order = {} if error is not None else read_json(payload)
    except (OSError, EOFError, ValueError) as fault:
        sock.close()
        raise TransportError(
            f"node 0 at {options.address} gave node {options.node} no welcome: {fault}",
            operation="init",
        ) from None
    if error is None and "over" in order:
        # The job has failed before this host came.
        error = PycollError((order["over"] or {}).get("text", "the job is over"), operation="init")
    if error is not None:
        sock.close()
        raise error
    return ElasticLink(sock, server_host, options, order["welcome"])
