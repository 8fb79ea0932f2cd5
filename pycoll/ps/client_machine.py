"""The worker's side as a state machine: it numbers requests, resends them, and matches answers.

It has no sockets, threads or clocks. Updates of a shard go to the first server of its chain in one
order; reads go to the last one. After a change of the view it resends unanswered requests.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Any

from pycoll.errors import InvalidArgumentError
from pycoll.ps.membership.newcomers import Newcomer
from pycoll.ps.messages import ANSWERS, DROPPED, FENCES, UPDATES, Kind, Message
from pycoll.ps.replica import WORKER_LOST
from pycoll.ps.views import View

#: The most unacknowledged pushes of one shard; later ones wait, by priority. A HELD push has left
#: the window: a server has applied it, and answers it after the end of its round.
WINDOW = 16
#: The failure of a request that needs a worker which is gone.
WORKER_IS_GONE = "a worker is gone"
_ORDERED = frozenset((Kind.PUSH, Kind.LOAD, Kind.RESTORE))


def check_priority(priority: Any) -> None:
    """Raise InvalidArgumentError for a priority that does not order requests."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidArgumentError(f"priority is {priority!r}: expected a whole number")


class Request:
    """A request of a worker. ``answer``: the received answer; ``failure``: why none will come.

    ``target``: memory for the answer's payload, which the owner fills. ``lost``: the worker or the
    servers whose loss is the failure. ``slowest``: the worker for which the request waits, and its
    clock.
    """

    __slots__ = (
        *("answer", "failure", "is_in_window", "lost", "message", "on_end"),
        *("receiving_from", "slowest", "target"),
    )

    def __init__(self, message: Message, target: Any) -> None:
        self.message = message
        self.target = target
        self.answer: Message | None = None
        self.failure = ""
        self.lost: tuple[int, ...] = ()
        self.slowest: tuple[int, int] | None = None
        #: Whether this push counts in the window of its shard.
        self.is_in_window = False
        #: The server whose answer the owner receives in ``target`` now.
        self.receiving_from: int | None = None
        #: The machine calls it when the request has ended.
        self.on_end: Callable[[Request], None] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is an answer or a failure."""
        return self.answer is not None or self.failure != ""

    @property
    def dropped(self) -> bool:
        """Whether a push came too late for its round."""
        return self.answer is not None and bool(self.answer.flags & DROPPED)


class _ShardQueue:
    """The requests of one shard. ``seq``: the number of the newest sent update."""

    def __init__(self, seq: int) -> None:
        self.seq = seq
        self.waiting: list[tuple[int, int, int, Request]] = []
        self.updates: dict[int, Request] = {}
        self.reads: dict[int, Request] = {}
        self.in_window = 0
        #: The number of fences so far. Requests of a lower epoch leave first.
        self.epoch = 0
        #: By key the effective priorities of its waiting requests. A new request gets at most their
        #: minimum, so requests of a key keep their order.
        self.lowest: dict[int, list[int]] = {}
        #: Whether ``_send_waiting`` runs. A request that fails meanwhile must not start it again.
        self.is_sending = False


class ClientMachine:
    """A worker. ``me``: its rank. ``out`` collects messages as (server, message).

    ``first``: the number below its first request. A later process of the same worker begins above
    all numbers of the earlier one.
    """

    def __init__(self, me: int, view: View, first: int = 0) -> None:
        self.me = me
        self.view = view
        self.out: list[tuple[int, Message]] = []
        self._queues = [_ShardQueue(first) for _ in view.chains]
        self._numbers = first
        #: By shard its newest servers, kept for error texts when the chain is empty.
        self._holders = list(view.chains)
        #: The servers whose connections are lost, or that have stopped.
        self.gone: set[int] = set()
        #: Joining servers. The owner connects with each, and then calls ``note_connected``.
        self.newcomers: list[Newcomer] = []
        self._joins = view.joins
        #: On a newcomer: its serial number, the servers that have connected with it, and those that
        #: have not yet.
        self._serial = 0
        self._connected: list[int] = []
        self.expected: set[int] = set()

    def add(
        self,
        message: Message,
        priority: int = 0,
        target: Any = None,
        on_end: Callable[[Request], None] | None = None,
    ) -> Request:
        """Begin a request. Higher priorities leave first, within the order of keys and fences."""
        request = Request(message, target)
        request.on_end = on_end
        queue = self._queues[message.shard]
        self._numbers += 1
        if not queue.waiting and not queue.is_sending and self._may_send(queue, request):
            # No other request waits, so the order of priorities does not matter.
            self._number_and_send(queue, request, self._numbers)
            return request
        if message.kind in FENCES:
            queue.epoch += 1
        key = message.key
        below = queue.lowest.setdefault(key, [])
        rank = min([priority, *below])
        below.append(rank)
        heapq.heappush(queue.waiting, (queue.epoch, -rank, self._numbers, request))
        if message.kind in FENCES:
            queue.epoch += 1
        self._send_waiting(queue)
        return request

    @staticmethod
    def _may_send(queue: _ShardQueue, request: Request) -> bool:
        return queue.in_window < WINDOW or request.message.kind not in _ORDERED

    def _number_and_send(self, queue: _ShardQueue, request: Request, number: int) -> None:
        """Number a request, and send it."""
        message = request.message
        view = self.view.number
        if message.kind in UPDATES:
            queue.seq += 1
            request.is_in_window = message.kind in _ORDERED
            queue.in_window += request.is_in_window
            request.message = message._replace(view=view, worker=self.me, seq=queue.seq)
            queue.updates[queue.seq] = request
        else:
            request.message = message._replace(
                view=view, worker=self.me, seq=number, after=queue.seq
            )
            queue.reads[number] = request
        self._send(message.shard, request)

    def _send_waiting(self, queue: _ShardQueue) -> None:
        if queue.is_sending:
            return
        queue.is_sending = True
        while queue.waiting and self._may_send(queue, queue.waiting[0][3]):
            _, rank, number, request = heapq.heappop(queue.waiting)
            below = queue.lowest[request.message.key]
            below.remove(-rank)
            if not below:
                del queue.lowest[request.message.key]
            self._number_and_send(queue, request, number)
        queue.is_sending = False

    def _send(self, shard: int, request: Request) -> None:
        chain = self.view.chains[shard]
        message = request.message
        to = (chain[0] if message.kind in UPDATES else chain[-1]) if chain else None
        if to is None:
            self._fail(request, "all its servers are gone", self._holders[shard])
        elif to not in self.gone:
            if message.view != self.view.number:
                request.message = message = message._replace(view=self.view.number)
            self.out.append((to, message))
        elif self.gone.issuperset(self.view.servers):
            # All servers are lost, so no newer view will come.
            self._fail(request, "all its servers are gone", chain)

    def handle(self, source: int, message: Message) -> None:
        """Handle a message of a server."""
        if message.kind is Kind.VIEW:
            self.adopt(View.from_bytes(bytes(message.payload)))
            return
        if message.kind is Kind.UNMANAGED:
            self.lose(source)
            return
        if message.kind is Kind.CONNECTED:
            self._connected.append(source)
            self._remove_expected(source)
            return
        request = self.find_request(message)
        if request is None:
            return
        if message.kind is Kind.HELD:
            request.slowest = (message.key, message.round)
            self._leave_window(self._queues[message.shard], request)
        elif message.kind is not Kind.FAILED:
            request.answer = message
            self._end(request)
        elif message.flags == WORKER_LOST:
            self._fail(request, WORKER_IS_GONE, (message.key,))
        else:
            text = b"" if message.payload is None else bytes(message.payload)
            self._fail(request, text.decode("utf-8", "replace") or "the server refused it")

    def find_request(self, message: Message) -> Request | None:
        """Return the unanswered request that a message answers, or None."""
        if message.shard >= len(self._queues):
            return None
        queue = self._queues[message.shard]
        if message.kind in ANSWERS:
            # The numbers of reads and updates overlap; ``after`` tells them apart.
            requests = queue.reads if message.after else queue.updates
            return requests.get(message.seq)
        return None

    def lose(self, server: int) -> None:
        """Note that the connection to a server is lost."""
        self.gone.add(server)
        self._remove_expected(server)
        if self.gone.issuperset(self.view.servers):
            self._resend()

    def resend_interrupted(self, server: int) -> None:
        """Resend the requests whose answers a lost server has sent in part."""
        for shard, queue in enumerate(self._queues):
            for request in [*queue.updates.values(), *queue.reads.values()]:
                if request.receiving_from == server:
                    request.receiving_from = None
                    self._send(shard, request)

    # Newcomers

    def note_connected(self, newcomer: Newcomer) -> None:
        """Note that this worker is connected with a server that joins."""
        self.out.append((newcomer.rank, Message(Kind.CONNECTED)))

    def note_unreachable(self, newcomer: Newcomer) -> None:
        """Note that this worker cannot reach a joining server."""
        self.lose(newcomer.rank)

    def expect(self, newcomer: Newcomer, servers: Iterable[int]) -> None:
        """On a newcomer: send JOINED to the servers when all of them have connected."""
        self._serial = newcomer.serial
        self.expected = set(servers)

    def _remove_expected(self, server: int) -> None:
        if server in self.expected:
            self.expected.discard(server)
            if not self.expected:
                joined = Message(Kind.JOINED, key=self._serial)
                self.out += [(one, joined) for one in self._connected if one not in self.gone]

    # Views

    def ask_manager(self, kind: Kind, server: int) -> None:
        """Ask the view manager to DRAIN or ADD a server. It may be gone, so callers repeat this."""
        for one in self.view.servers:
            if one not in self.gone:
                self.out.append((one, Message(kind, key=server)))
                return

    def adopt(self, view: View) -> None:
        """Adopt a newer view, and resend unanswered requests."""
        if view.number > self.view.number and len(view.chains) == len(self._queues):
            self.view = view
            for shard, chain in enumerate(view.chains):
                self._holders[shard] = chain or self._holders[shard]
            joining = view.joining
            if joining is not None and joining.serial > self._joins:
                self._joins = joining.serial
                if joining.serves:
                    self.newcomers.append(joining)
            self._resend()

    def _resend(self) -> None:
        """Resend all unanswered requests; fail those that no server can answer."""
        for shard, queue in enumerate(self._queues):
            for request in [*queue.updates.values(), *queue.reads.values()]:
                self._send(shard, request)
            self._send_waiting(queue)

    def _fail(self, request: Request, why: str, lost: tuple[int, ...] = ()) -> None:
        request.failure, request.lost = why, lost
        self._end(request)

    def _end(self, request: Request) -> None:
        message = request.message
        queue = self._queues[message.shard]
        if message.kind in UPDATES:
            queue.updates.pop(message.seq, None)
            self._leave_window(queue, request)
        else:
            queue.reads.pop(message.seq, None)
        if request.on_end is not None:
            request.on_end(request)

    def _leave_window(self, queue: _ShardQueue, request: Request) -> None:
        """Remove a push from the window, and send the next ones."""
        if request.is_in_window:
            request.is_in_window = False
            queue.in_window -= 1
            self._send_waiting(queue)

    def answering_server(self, request: Request) -> int | None:
        """Return the server that answers a request; None while there is none."""
        chain = self.view.chains[request.message.shard]
        return chain[-1] if chain and chain[-1] not in self.gone else None

    def slowest(self) -> tuple[int, int] | None:
        """Return the slowest worker that a HELD has named, and its clock; None if there is none."""
        slowest = [
            request.slowest
            for queue in self._queues
            for request in [*queue.updates.values(), *queue.reads.values()]
            if request.slowest is not None
        ]
        return min(slowest, key=lambda one: one[1], default=None)
