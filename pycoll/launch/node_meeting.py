"""The meeting of the launchers ("agents") of several hosts, and the connection that stays after it.

Each host of a job has one ``pycoll run``, its node. Node 0 serves a store, where all nodes first
exchange their facts. Each node checks the facts of all, so all of them refuse the same things with
the same text. Then the connections stay open until the job ends: the store tells every node the
first failure, and notices a node whose process, host or network is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import parse_address
from pycoll.bootstrap.discovery.torch_variables import Share
from pycoll.bootstrap.discovery.versions import difference, versions
from pycoll.bootstrap.rendezvous.frames import NODES, PULSE_S, SILENCE_S, list_ranks
from pycoll.bootstrap.rendezvous.store import Loss, StoreExchange, join_store, serve_store
from pycoll.bootstrap.rendezvous.store_connection import StoreAddress
from pycoll.config import RANKS_MAX, SECRET_LENGTH_MIN
from pycoll.errors import InvalidArgumentError, PeerLostError, PycollError
from pycoll.untrusted import json_object, read_file, read_json

#: Seconds, the default of --start-timeout.
START_S = 60.0
#: Most nodes of one job.
NODES_MAX = RANKS_MAX
#: Most seconds between the ends of the first and of the last node's ranks: 20 days. The
#: milliseconds fit 31 bits.
_JOB_S = 20 * 24 * 3600.0
_SECRET_BYTES_MAX = 4096
#: The program of nodes that only serve.
_SERVES = "-m pycoll.ps"
#: Statuses of a process end at 255.
_STATUS_MAX = 255

_FACTS = {
    **{"slots": int, "servers": int, "pycoll": str, "python": str, "host": str, "refusal": str},
    **{"nonce": str, "store_port": int, "torch_ports": list, "tolerate": int, "program": str},
}
#: The last message of a node: whether none of its ranks has ended well, and its lost ranks as text.
_END = {"failed": bool, "lost": list}
_VERDICT = ("text", "status", "signum", "rank")


@dataclass(frozen=True)
class NodeOptions:
    """The place of this launcher in a job of several.

    ``nodes`` is the number of launchers and ``node`` this one's. All of them meet at ``address``,
    "host:port", where node 0 listens, within ``start_timeout_s``. ``host`` is this host's name in
    reports. An agent that another launcher has started has ``listener`` on node 0, and on other
    nodes ``targets``, the socket addresses of node 0; ``address`` is then a text for errors.
    """

    nodes: int
    node: int
    secret: bytes
    address: str
    start_timeout_s: float = START_S
    host: str = ""
    listener: socket.socket | None = None
    targets: Sequence[tuple[int, Any]] = ()

    @property
    def is_started(self) -> bool:
        """Whether another launcher has started this one."""
        return self.listener is not None or bool(self.targets)

    def check(self) -> None:
        """Raise InvalidArgumentError for values that cannot work."""
        if not 1 <= self.nodes <= NODES_MAX:
            raise InvalidArgumentError(f"nnodes={self.nodes}: expected 1 to {NODES_MAX}")
        # A host may join a job that another launcher has started, at any time.
        if not self.is_started and not 0 <= self.node < self.nodes:
            raise InvalidArgumentError(
                f"node_rank={self.node} is out of range: nnodes={self.nodes} allows 0 to "
                f"{self.nodes - 1}"
            )
        if not 0 < self.start_timeout_s < float("inf"):
            raise InvalidArgumentError(
                f"start_timeout={self.start_timeout_s}: expected seconds, a finite number above 0"
            )
        if len(self.secret) < SECRET_LENGTH_MIN:
            raise InvalidArgumentError(
                f"the secret has {len(self.secret)} characters: expected at least "
                f"{SECRET_LENGTH_MIN}; python -c 'import secrets; print(secrets.token_hex(32))' "
                "prints a good one"
            )
        if not self.is_started:
            parse_address(self.address)


def read_secret(path: str | None, variable: bytes | None) -> bytes:
    """Return the secret from the file ``path``, without white space at its ends, or else
    ``variable``, the value of PYCOLL_SECRET. Raises InvalidArgumentError."""
    if path is None:
        if variable is None:
            raise InvalidArgumentError(
                "a job on several hosts needs a secret, alike on all of them: --secret-file FILE "
                "or PYCOLL_SECRET, never a word of the command line; python -c 'import secrets; "
                "print(secrets.token_hex(32))' prints a good one"
            )
        return variable
    try:
        secret = read_file(path, _SECRET_BYTES_MAX).strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(f"secret_file={path!r}: {why}") from None
    if len(secret) < SECRET_LENGTH_MIN:
        raise InvalidArgumentError(
            f"secret_file={path!r} has {len(secret)} characters: expected at least "
            f"{SECRET_LENGTH_MIN}"
        )
    return secret


def compare_versions(here: Any, host: str, there: Any, other: str) -> None:
    """Raise InvalidArgumentError, with both versions, if two hosts differ."""
    found = difference(here, there)
    if found is not None:
        label, mine, theirs = found
        raise InvalidArgumentError(
            f"host {other} has {label} {theirs} and host {host} has {label} {mine}: install the "
            "same one on both"
        )


def compare_programs(programs: Sequence[tuple[int, str]]) -> None:
    """Raise InvalidArgumentError if two nodes run different programs; "" and servers are none.

    They are probably of two jobs with one secret and one address. Jobs with different values of
    PYCOLL_JOB_ID cannot meet, so with a value the nodes of a job may run what they like.
    """
    named = [one for one in programs if one[1] not in ("", _SERVES)]
    for node, program in named[1:]:
        if program != named[0][1] and not os.environ.get("PYCOLL_JOB_ID"):
            raise InvalidArgumentError(
                f"node {named[0][0]} runs {named[0][1]} and node {node} runs {program}: if these "
                "are two jobs, give each its own port or its own PYCOLL_JOB_ID; if they are one, "
                "set the same PYCOLL_JOB_ID on all nodes"
            )


class Verdict(NamedTuple):
    """The first failure of a job: its text, and the exit status of all nodes.

    ``signum``: the signal, if a signal to one node ends the job, else 0. ``rank``: the rank that
    failed, else -1.
    """

    text: str
    status: int
    signum: int = 0
    rank: int = -1


class NodeShare(NamedTuple):
    """The share of this node in a job: the number of its ranks.

    The last ``servers`` of them serve. ``tolerate`` is the number of ranks of all nodes that may be
    lost. ``program`` names what the ranks run (``program_of``); it is empty if all of them serve.
    """

    slots: int
    servers: int = 0
    tolerate: int = 0
    program: str = ""


class News(NamedTuple):
    """A loss on another node with which the job goes on: ``text`` says what has happened, ``shown``
    is the report with what follows from it, and ``ranks`` are lost."""

    text: str
    shown: str
    ranks: list[int]


class NodeLink:
    """This node's connection to the store of all nodes. One thread uses it, and one that the link
    starts sends the pulse, since writing output may block the first.

    ``share`` are this node's ranks, servers included, and ``workers`` those that run the command.
    ``over``: nothing more will come. ``verdict``: the failure that ends the job, None while there
    is none; ``gone``: the ranks of the node that is lost with it. ``news``: losses that the owner
    has not shown yet. ``lost``: the lost ranks of all nodes, as text; known once a job has ended
    well.
    """

    def __init__(
        self, exchange: StoreExchange, options: NodeOptions, facts: Sequence[dict[str, Any]]
    ) -> None:
        self.over = False
        self.verdict: Verdict | None = None
        self.gone: list[int] = []
        self.news: deque[News] = deque()
        self.lost: list[str] = []
        self._exchange, self._facts = exchange, facts
        self._posted = False
        self._closed = threading.Event()
        threading.Thread(target=self._keep_pulse, daemon=True).start()
        self.share = _share_of(facts, options.node)
        node = options.node
        workers = [one["slots"] - one["servers"] for one in facts]
        self.workers = Share(sum(workers[:node]), workers[node], sum(workers), node)
        self.host = facts[node]["host"]
        self.job_id = f"run-{facts[0]['nonce']}"
        seed = "".join(one["nonce"] for one in facts).encode()
        #: The ranks' secret. It differs in every job, also if the user's secret stays.
        self.rank_secret = hmac.digest(options.secret, b"pycoll ranks\0" + seed, "sha256").hex()
        server = exchange.server_host
        port = facts[0]["store_port"]
        self.store_address = f"[{server}]:{port}" if ":" in server else f"{server}:{port}"
        torch_host = server if options.is_started else parse_address(options.address)[0]
        self.torch_place = (torch_host, facts[0]["torch_ports"])

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``read`` has something to do."""
        return self._exchange.fileno()

    def read(self) -> None:
        """Take what the store has sent."""
        try:
            more = self._exchange.watch.skip_pulses()
            while self._exchange.watch.news:
                self._take_news(self._exchange.watch.news.popleft())
            if more and self._posted:
                self._conclude(self._exchange.collect())
            elif more:
                self._exchange.check()
        except PycollError as error:
            if isinstance(error, PeerLostError) and error.rank is not None:
                self.gone = _ranks_of(_share_of(self._facts, error.rank))
            self._judge(_verdict_of(str(error)))

    def _take_news(self, loss: Loss) -> None:
        if loss.gone:
            ranks = _ranks_of(_share_of(self._facts, loss.member))
            shown = f"{loss.text}; the others go on without {list_ranks(ranks)}"
            self.news.append(News(loss.text, shown, ranks))
        else:
            one = _verdict_of(loss.text)
            self.news.append(News(one.text, f"{one.text}, and the others go on", [one.rank]))

    def _conclude(self, blobs: Sequence[bytes]) -> None:
        """Take the last messages of all nodes."""
        self.over = True
        try:
            ends = [json_object(read_json(blob), _END) for blob in blobs]
        except ValueError as error:
            self._judge(Verdict(f"a node ended with an unreadable message: {error}", 1))
            return
        self.lost = [str(text) for end in ends for text in end["lost"]]
        if all(end["failed"] for end in ends):
            self._judge(Verdict("all ranks have failed", 1))

    @property
    def silent_at(self) -> float | None:
        """When silence of the store ends the job, on the monotonic clock; None if nothing ends."""
        heard = self._exchange.watch.heard
        return heard + SILENCE_S if heard and not self.over else None

    def check_silence(self) -> None:
        """End the job if node 0 has stood still, and sent back no pulse, for ``SILENCE_S``."""
        due = self.silent_at
        if due is None or time.monotonic() < due:
            return
        # This node may have stood still itself, and pulses have come meanwhile.
        self.read()
        due = self.silent_at
        if due is not None and time.monotonic() >= due:
            name = self._facts[0]["host"]
            self._judge(Verdict(f"node 0 (host {name}) {NODES.stopped}", 1))

    def _keep_pulse(self) -> None:
        while True:
            self._exchange.watch.pulse()
            if self._closed.wait(PULSE_S):
                return

    def fail(self, verdict: Verdict) -> None:
        """Tell all nodes that the job has failed. The store's answer, which ``read`` takes, is the
        job's first failure, perhaps another one."""
        try:
            self._exchange.alarm(json.dumps(verdict._asdict()))
        except PycollError as error:
            self._judge(_verdict_of(str(error)))

    def tolerate(self, limit: int) -> None:
        """Have the job go on until all nodes together have lost more than ``limit`` ranks; a node
        that is lost takes its ranks along."""
        mine = f"{list_ranks(_ranks_of(self.share))} (with host {self.host})"
        self._exchange.watch.share(self.share.ranks, min(limit, RANKS_MAX), _end_of([mine], True))

    def lose(self, verdict: Verdict) -> None:
        """Tell all nodes of a lost rank. ``verdict`` ends the job if that is one too many."""
        if self.over:
            return
        try:
            self._exchange.watch.lose(json.dumps(verdict._asdict()))
        except PycollError as error:
            self._judge(_verdict_of(str(error)))

    def report_end(self, lost: Sequence[str] = (), all_failed: bool = False) -> None:
        """Tell all nodes that this node's ranks have ended, well or tolerated. ``over`` becomes
        true once all nodes have said so. ``lost`` names the tolerated ones. ``all_failed``: no rank
        of this node has ended well; the job has failed if all nodes say that."""
        if self._posted or self.over:
            return
        try:
            self._exchange.post(_end_of(lost, all_failed))
            self._posted = True
        except PycollError as error:
            self._judge(_verdict_of(str(error)))

    def close(self) -> None:
        """Leave; node 0 then closes the store."""
        self._closed.set()
        self._exchange.close()

    def _judge(self, verdict: Verdict) -> None:
        self.over = True
        self.verdict = self.verdict or verdict


def _end_of(lost: Sequence[str], failed: bool) -> bytes:
    return json.dumps({"failed": failed, "lost": list(lost)}).encode()


def _share_of(facts: Sequence[dict[str, Any]], node: int) -> Share:
    slots = [one["slots"] for one in facts]
    return Share(sum(slots[:node]), slots[node], sum(slots), node)


def _ranks_of(share: Share) -> list[int]:
    return list(range(share.first, share.first + share.ranks))


def _verdict_of(text: str) -> Verdict:
    """Return the verdict that a node has sent, with the line that the store has put behind it;
    another text becomes one of status 1."""
    sent, _, more = text.partition("\n")
    with contextlib.suppress(ValueError):
        verdict = to_verdict(read_json(sent))
        return verdict._replace(text=verdict.text + more)
    return Verdict(text, 1)


def to_verdict(value: Any) -> Verdict:
    """Return the verdict that ``Verdict._asdict`` has made into JSON. Raises ValueError."""
    found = json_object(value, dict.fromkeys(_VERDICT, int) | {"text": str})
    if not (0 < found["status"] <= _STATUS_MAX and 0 <= found["signum"] < 65):
        raise ValueError(f"a verdict of status {found['status']} and signal {found['signum']}")
    return Verdict(**found)


#: Opens what node 0 offers to all ranks, and returns the store's port and torch's ports.
Offer = Callable[[], tuple[int, Sequence[int]]]


def meet_nodes(
    options: NodeOptions, share: NodeShare, check: Callable[[], object], offer: Offer
) -> NodeLink:
    """Meet all nodes and exchange facts; returns the connection to them.

    ``check`` raises InvalidArgumentError if the ranks of ``share`` cannot be started here; all
    nodes then raise that error, with this host's name. Raises pycoll's errors, within
    ``start_timeout_s`` and a few seconds.
    """
    options.check()
    refusal = ""
    try:
        check()
    except InvalidArgumentError as error:
        refusal = str(error)
    exchange = enter_meeting(options, Deadline(options.start_timeout_s))
    try:
        ports: tuple[int, Sequence[int]] = (0, ())
        try:
            ports = offer() if options.node == 0 else ports
        except PycollError as error:
            refusal = refusal or str(error)
        facts = {
            **versions(),
            **share._asdict(),
            "host": options.host or socket.gethostname(),
            "refusal": refusal,
            "nonce": os.urandom(16).hex(),
            "store_port": ports[0],
            "torch_ports": list(ports[1]),
        }
        link = NodeLink(exchange, options, _agree_on_facts(exchange, facts))
        if share.tolerate:
            link.tolerate(share.tolerate)
    except BaseException:
        # The store of node 0 first sends what it has; nobody waits for this node afterwards.
        exchange.close()
        raise
    exchange.prolong(Deadline(_JOB_S))
    return link


def enter_meeting(options: NodeOptions, deadline: Deadline) -> StoreExchange:
    """Return the exchange between the nodes, before any facts are known; node 0 serves its store.
    Raises pycoll's errors."""
    place = (options.secret, os.environ.get("PYCOLL_JOB_ID", ""))
    if options.listener is not None:
        return serve_store(
            options.listener, options.address, *place, options.nodes, deadline, NODES
        )
    if options.targets:
        store = StoreAddress(options.address, options.targets, party=NODES)
        return StoreExchange(store, *place, options.node, options.nodes, deadline)
    return join_store(options.address, *place, options.node, options.nodes, deadline, party=NODES)


def _agree_on_facts(exchange: StoreExchange, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Exchange the facts and check those of all nodes. Every node finds the same fault."""
    blobs = exchange.all_gather(json.dumps(mine).encode())
    found: list[dict[str, Any]] = []
    for node, blob in enumerate(blobs):
        try:
            facts = read_json(blob)
            host = str(facts["host"])
            if found:
                # First, since another version may have other facts.
                compare_versions(found[0], found[0]["host"], facts, host)
            found.append(json_object(facts, _FACTS))
        except InvalidArgumentError:
            raise
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidArgumentError(
                f"node {node} sent unreadable facts ({error}): install the same pycoll everywhere"
            ) from None
    for node, facts in enumerate(found):
        if facts["refusal"]:
            raise InvalidArgumentError(f"host {facts['host']} (node {node}): {facts['refusal']}")
        if facts["tolerate"] != found[0]["tolerate"]:
            raise InvalidArgumentError(
                f"node 0 has --tolerate {found[0]['tolerate']} and node {node} --tolerate "
                f"{facts['tolerate']}: it counts the ranks of all nodes, so give all the same"
            )
    compare_programs([(node, facts["program"]) for node, facts in enumerate(found)])
    serving = -1
    for node, facts in enumerate(found):
        if facts["slots"] > facts["servers"] and serving >= 0:
            raise InvalidArgumentError(
                f"node {node} starts ranks behind the servers of node {serving}, and servers are "
                "the last ranks: give --servers to the last node only"
            )
        serving = node if facts["servers"] else serving
    size = sum(facts["slots"] for facts in found)
    if size > RANKS_MAX:
        raise InvalidArgumentError(f"the nodes start {size} ranks: at most {RANKS_MAX} can join")
    return found
