"""A parameter server in simulation: the machines of ``pycoll.ps`` on a seeded network and clock.

A seed decides about delays; messages of a pair keep their order, as on a real connection, and pairs
overtake each other. A process can be killed ahead of any message: some of what it sent still
arrives, and then its peers find the connection lost.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from pycoll.ps.client_machine import WINDOW, ClientMachine, Request
from pycoll.ps.consistency import Consistency
from pycoll.ps.membership.newcomers import Newcomer, agreed_start
from pycoll.ps.messages import CREATES, NO_WAIT, Kind, Message
from pycoll.ps.replica import Replica
from pycoll.ps.server_machine import ServerMachine
from pycoll.ps.shard import Shard
from pycoll.ps.views import View, first_view, is_done

#: Seconds after which a newcomer that lacks a connection gives up.
GIVES_UP_S = 5.0
#: Seconds after which a server that is silent counts as gone.
SILENCE_S = 5.0

#: Requests of which no more than WINDOW of a shard are on their way.
WINDOWED = frozenset((Kind.PUSH, Kind.LOAD, Kind.RESTORE))

#: A program of a worker: it yields the requests for which it waits, or seconds for which it sleeps.
Program = Generator["Sequence[Request] | float", None, None]


class Masks:
    """Values are whole numbers, and a push adds its own bit."""

    def load(self, rule: int, payload: int) -> int:
        return payload

    def refusal(self, rule: int, value: int, payload: int) -> str:
        return ""

    def apply(self, rule: int, value: int, pushes: Sequence[int], workers: int) -> int:
        return value + sum(pushes)

    def steps(self, value: int) -> bool:
        return False

    def set_optimizer(self, rule: int, value: int, form: bytes) -> int:
        return value

    def read(self, rule: int, value: int, query: Any) -> int:
        return value

    def nbytes(self, value: int) -> int:
        return 8

    def pieces(self, value: int) -> Sequence[int]:
        return (value,)

    def join(self, rule: int, pieces: Sequence[int]) -> int:
        return pieces[0]

    def restore(self, rule: int, value: int, place: int, payload: int) -> int:
        return payload


class Records(Masks):
    """A value is the list of what was applied: the pushes together, and the count of workers."""

    def apply(self, rule: int, value: Any, pushes: Sequence[Any], workers: int) -> Any:
        return (*value, (tuple(pushes), workers))


def may_send(queue: Any) -> bool:
    """Whether a worker may send the first request of a shard that waits."""
    return queue.in_window < WINDOW or queue.waiting[0][3].message.kind not in WINDOWED


def wrongly_held(replica: Replica) -> list[Message]:
    """The requests that a server holds though their worker may go on."""
    shard = replica.shard
    if not replica.is_last or not replica._is_current:
        held = []
    else:
        held = [one for one, _ in replica._held if may_answer(shard, one)]
    later = replica._deferred if replica.is_first else ()
    return held + [one for one in later if may_apply(shard, one)]


def may_apply(shard: Shard, update: Message) -> bool:
    """Whether an update need not wait for the end of a cut. One of a dead worker never matters."""
    if update.kind is Kind.JOIN:
        return not shard.is_cutting
    return update.worker in shard.live and not shard.is_ahead(update.worker)


def may_answer(shard: Shard, request: Message) -> bool:
    """Whether a request need not wait, by the state of the shard alone."""
    if shard.applied.get(request.worker, 0) < request.after:
        return False
    if request.kind is Kind.CUT:
        return shard.cut >= request.round or shard.lost is not None
    if request.kind is Kind.LOOKUP:
        is_known = bytes(request.payload).decode() in shard.texts
        makes = request.flags & CREATES and shard.is_first(request.worker)
        return bool(is_known or makes or request.flags & NO_WAIT)
    if request.kind in (Kind.PULL, Kind.PUSH, Kind.CLOCK):
        is_of_part = request.kind is not Kind.CLOCK
        part = shard.parts.get((request.key, request.part)) if is_of_part else None
        is_unknown = is_of_part and part is None
        return (
            is_unknown or shard.lost is not None or Shard.may_proceed(shard, request.worker, part)
        )
    return True


class World:
    """Workers 0 to W - 1, servers W to W + S - 1."""

    shard_type: type[Shard] = Shard

    def __init__(
        self,
        seed: int,
        consistency: Consistency,
        workers: int = 3,
        servers: int = 1,
        replicas: int = 0,
        arithmetic: Any = None,
        shards: int = 0,
    ) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.counter = itertools.count()
        self.slow = self.random.choice((0.001, 0.01, 0.1))
        self.consistency = consistency
        ranks = range(workers, workers + servers)
        view = first_view(ranks, replicas, shards=shards)
        made = Masks() if arithmetic is None else arithmetic

        def make(_: int) -> Shard:
            return self.shard_type(consistency, range(workers), made)

        self.make = make
        self.servers = {rank: ServerMachine(rank, range(workers), view, make) for rank in ranks}
        self.clients = {rank: self.make_client(rank, view) for rank in range(workers)}
        self.alive = {*self.servers, *self.clients}
        self.flying: dict[tuple[int, int], deque[Message]] = {}
        self.divided: set[tuple[int, int]] = set()
        #: By stopped process and by peer: the calls that the process receives when it goes on.
        self.stopped: dict[int, dict[int, deque[Callable[[Any], None]]]] = {}
        #: By pair: the time of the newest message that has arrived.
        self.heard: dict[tuple[int, int], float] = {}
        #: Whether a process that was stopped asks the others if they still count it.
        self.fenced = True
        #: Newcomers that were told of the end of a process for which they waited.
        self.told_of_ends = 0
        #: By server the newest request to the view manager about it.
        self.manager_requests: dict[int, Kind] = {}
        self.arrival: dict[tuple[int, int], float] = {}
        #: By pair: the factor by which its messages are slower than those of other pairs.
        self.lag: dict[tuple[int, int], float] = {}
        self.boundaries = 0
        #: Faults, by the number of the message before which they happen.
        self.faults: dict[int, Callable[[], None]] = {}
        self.programs: dict[int, Program] = {}
        self.waiting: dict[int, Sequence[Request]] = {}
        self.ended: set[int] = set()
        self.failed: dict[int, list[Request]] = {}
        self._know_newcomers()
        self._watch_clocks()

    def _know_newcomers(self) -> None:
        #: By meeting of a newcomer: the server that it has met, and its program (None for a
        #: server).
        self.meetings: dict[str, tuple[int, Callable[[int], Program] | None]] = {}
        #: By rank of a new worker the clock at which it began.
        self.starts: dict[int, int] = {}
        #: By rank the serial number of its newest process; other processes have 0.
        self.serials: dict[int, int] = {}
        #: By newcomer and peer the serial number of the process to which the connection is.
        self.links: dict[tuple[int, int], int] = {}

    def _watch_clocks(self) -> None:
        #: By worker: the newest clock that it has sent, and the requests with it, one for each
        #: shard.
        self.clocked: dict[int, tuple[int, Sequence[Request]]] = {}
        #: By worker the clocks that the shards have answered, at the newest check.
        self.told: dict[int, list[int]] = {}
        #: Called with a process after each of its steps.
        self.watch: Callable[[int], None] = lambda _: None
        #: The most clocks by which a worker that goes on has been ahead of the slowest one.
        self.most_ahead = 0

    def make_client(self, rank: int, view: View, first: int = 0) -> ClientMachine:
        return ClientMachine(rank, view, first)

    # Time and messages

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.counter), action))

    def run(self, limit: float = 1000.0) -> None:
        while self.events and self.now < limit:
            self.now, _, action = heapq.heappop(self.events)
            action()

    @property
    def live_servers(self) -> list[int]:
        """The servers that take part in the store."""
        servers = self.servers.items()
        return [one for one, server in servers if one in self.alive and not server.has_stopped]

    @property
    def manager(self) -> int:
        """The server that manages, or will."""
        return self.live_servers[0]

    @property
    def view(self) -> View:
        """The newest view that a server knows."""
        return max(self.servers[one].view for one in self.live_servers)

    def send(self, source: int, to: int, message: Message) -> None:
        self.boundaries += 1
        fault = self.faults.pop(self.boundaries, None)
        if fault is not None:
            fault()
        pair = (source, to)
        is_cut = pair in self.divided or not self.is_linked(source, to)
        if not {source, to} <= self.alive or is_cut:
            return
        delay = self.random.expovariate(1 / self.slow) * self.lag.get(pair, 1.0)
        self.arrival[pair] = max(self.arrival.get(pair, 0.0), self.now + delay)
        self.flying.setdefault(pair, deque()).append(message)
        self.at(self.arrival[pair] - self.now, lambda: self.deliver(pair))

    def deliver(self, pair: tuple[int, int]) -> None:
        source, to = pair
        if self.flying.get(pair) and to in self.alive:
            message = self.flying[pair].popleft()
            self.heard[pair] = self.now
            self.act(to, lambda machine: machine.handle(source, message), source)

    def act(self, peer: int, action: Callable[[Any], None], source: int = -1) -> None:
        """Run a machine, and send what it gives. ``source``: the peer that causes it."""
        if peer in self.stopped:
            self.stopped[peer].setdefault(source, deque()).append(action)
            return
        machine: Any = self.servers.get(peer) or self.clients[peer]
        action(machine)
        out, machine.out[:] = list(machine.out), []
        for to, message in out:
            self.send(peer, to, message)
        if peer in self.alive:
            self.look_for_newcomers(peer, machine)
        if peer in self.clients:
            self.go_on(peer)
        if peer in self.alive:
            self.check_waits(peer)
        self.watch(peer)

    def check_waits(self, peer: int) -> None:
        """Assert that nothing waits on a process that may go on, so no wake-up is lost."""
        if peer in self.clients:
            lanes = self.clients[peer]._queues
            waiting = [one.waiting[0][3] for one in lanes if one.waiting and may_send(one)]
        else:
            server = self.servers[peer]
            replicas = () if server.has_stopped else server.replicas.values()
            waiting = [request for one in replicas for request in wrongly_held(one)]
        assert waiting == [], f"a wake-up is lost: {waiting} may go on, and wait on {peer}"

    def kill(self, rank: int) -> None:
        """End a process. Of what it sent to a peer, the first so many messages arrive."""
        if rank not in self.alive:
            return
        self.alive.discard(rank)
        for (source, to), queue in self.flying.items():
            if source == rank:
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
            elif to == rank:
                queue.clear()
        for peer in [*self.servers, *(self.clients if rank in self.servers else ())]:
            ahead = self.arrival.get((rank, peer), 0.0) - self.now
            self.at(
                max(0.0, ahead) + self.random.random() * self.slow,
                functools.partial(self.lose, peer, rank, serial=self.serials.get(rank, 0)),
            )

    def divide(self, server: int, other: int) -> None:
        """Let two servers not reach each other any more, without a sign of why."""
        for pair in ((server, other), (other, server)):
            self.divided.add(pair)
            self.flying.pop(pair, None)
            delay = self.random.random() * 10 * self.slow
            self.at(delay, functools.partial(self.lose, *pair, False))

    def cut(self, source: int, to: int) -> None:
        """Let messages of a server reach another one no more. The other one finds it silent; the
        seed decides whether the first one learns that its messages are lost."""
        self.divided.add((source, to))
        self.flying.pop((source, to), None)
        self.at(self.random.random() * 10 * self.slow, lambda: self.lose(to, source, False))
        if self.random.random() < 0.5:
            self.at(self.random.random() * 20 * self.slow, lambda: self.lose(source, to, False))

    def stop(self, rank: int, seconds: float) -> None:
        """Stop a server for some seconds, as SIGSTOP and SIGCONT do."""
        if rank in self.alive and rank not in self.stopped:
            self.stopped[rank] = {}
            self.at(seconds, functools.partial(self.go_on_again, rank, seconds))
            for peer in self.servers if seconds > SILENCE_S / 2 else ():
                if peer != rank:
                    look = functools.partial(self.listen, peer, rank, self.now, self.now + seconds)
                    self.at(SILENCE_S, look)

    def listen(self, peer: int, silent: int, since: float, until: float) -> None:
        """Let a server look whether another one, which is stopped, has been silent for too long."""
        heard = max(since, self.heard.get((silent, peer), 0.0))
        if peer not in self.alive or peer in self.stopped or silent not in self.alive:
            return
        if self.now - heard >= SILENCE_S:
            self.act(peer, lambda machine: machine.drop_silent([silent]))
        if self.now < until or (heard <= since and self.now < until + SILENCE_S):
            look = functools.partial(self.listen, peer, silent, since, until)
            self.at(SILENCE_S / 8, look)

    def go_on_again(self, rank: int, seconds: float) -> None:
        """Let a process go on: what has come meanwhile is heard, in the order of each peer."""
        found = self.stopped.pop(rank)
        if rank not in self.alive:
            return
        if self.fenced and seconds > SILENCE_S / 2:
            self.act(rank, lambda machine: machine.pause())
        while found:
            source = self.random.choice(sorted(found))
            self.act(rank, found[source].popleft())
            if not found[source]:
                del found[source]

    def add_server(self) -> int:
        """Start one more server, which tells the view manager of itself."""
        rank = max(self.servers) + 1
        self.servers[rank] = ServerMachine(rank, self.clients, self.view, self.make)
        self.alive.add(rank)
        self.ask_manager(rank, Kind.ADD, rank)
        return rank

    def ask_manager(self, peer: int, kind: Kind, server: int) -> None:
        """Ask the view manager, by way of a server, to drain or add a server; ask again if the
        manager was gone, unless another request has come."""
        message = Message(kind, key=server)
        if peer in self.alive:
            self.manager_requests[server] = kind
            self.act(peer, lambda machine: machine.handle(peer, message))
            self.at(50.0, functools.partial(self.ask_manager_again, peer, kind, server))

    def ask_manager_again(self, peer: int, kind: Kind, server: int) -> None:
        is_over = self.manager_requests[server] is not kind or not self.live_servers
        if not is_over and not is_done(kind, server, self.view):
            self.ask_manager(peer, kind, server)

    def lose(self, peer: int, gone: int, has_ended: bool = True, serial: int = 0) -> None:
        """Let a process find its connection to process ``serial`` of a rank lost."""
        newest, own = self.serials.get(gone, 0), self.serials.get(peer, 0)
        is_replaced = newest > serial and self.links.get((gone, peer)) == newest
        pair = (peer, gone) if own > serial else (gone, peer)
        if is_replaced or self.links.get(pair, 0) != max(own, serial):
            return
        if peer in self.servers and peer in self.alive:
            self.act(peer, lambda machine: machine.lose(gone, has_ended), gone)
        elif peer in self.alive:
            self.act(peer, lambda machine: machine.lose(gone), gone)

    # Newcomers

    def invite(self, program: Callable[[int], Program] | None = None, rank: int = -1) -> None:
        """Let a new process meet a server: a worker with a program of its rank, or a server.

        ``rank``: that of the worker that comes back.
        """
        meeting = f"meeting {next(self.counter)}"
        whole = [one for one in self.servers if one in self.alive and self.has_joined(one)]
        host = self.random.choice(whole)
        if self.servers[host].is_admitting:
            # A server receives one newcomer after another.
            self.at(self.slow, functools.partial(self.invite, program, rank))
            return
        self.meetings[meeting] = host, program
        newcomer = Newcomer(0, rank, program is None, meeting)
        self.act(host, lambda machine: machine.request_admission(newcomer))

    def has_joined(self, rank: int) -> bool:
        joining = self.view.joining
        return joining is None or joining.rank != rank

    def is_linked(self, one: int, other: int) -> bool:
        """Whether two processes are connected: the newer one has offered the place."""
        older, newer = sorted((one, other), key=lambda rank: self.serials.get(rank, 0))
        return older == newer or self.links.get((newer, older), 0) == self.serials.get(newer, 0)

    def look_for_newcomers(self, peer: int, machine: Any) -> None:
        joining = machine.view.joining
        if joining is not None and self.meetings.get(joining.meeting, (None,))[0] == peer:
            self.begin(joining, self.meetings.pop(joining.meeting)[1], machine)
        found, machine.newcomers[:] = list(machine.newcomers), []
        for newcomer in found:
            self.at(self.random.random() * self.slow, functools.partial(self.link, peer, newcomer))
        for newcomer, ended in machine.ended if peer in self.servers else ():
            visit = functools.partial(self.visit, newcomer, ended)
            self.at(self.random.random() * self.slow, visit)
        if peer in self.servers:
            machine.ended.clear()

    def visit(self, newcomer: Newcomer, ended: int) -> None:
        """Let a newcomer learn of the end of a process, and give up if it waits for that one."""
        rank, serial = newcomer.rank, newcomer.serial
        if rank in self.alive and self.serials.get(rank) == serial:
            machine: Any = self.servers.get(rank) or self.clients[rank]
            if ended in machine.expected:
                self.told_of_ends += 1
                self.kill(rank)

    def begin(
        self, newcomer: Newcomer, program: Callable[[int], Program] | None, host: ServerMachine
    ) -> None:
        """Begin the process of a newcomer, with what the server that it has met tells it."""
        rank = newcomer.rank
        self.serials[rank] = newcomer.serial
        self.alive.add(rank)
        if program is None:
            made = ServerMachine(rank, host.workers, host.view, self.make)
            made.gone = set(host.gone)
            made.expect(newcomer.serial)
            self.servers[rank] = made
        else:
            client = self.make_client(rank, host.view, newcomer.first)
            client.expect(newcomer, [host.me, *host.voter.running])
            self.clients[rank] = client
            self.ended.discard(rank)
            self.clocked.pop(rank, None)
            self.start(rank, program(rank))
        self.at(GIVES_UP_S, functools.partial(self.give_up, newcomer))

    def give_up(self, newcomer: Newcomer) -> None:
        machine: Any = self.servers.get(newcomer.rank) or self.clients[newcomer.rank]
        if self.serials[newcomer.rank] == newcomer.serial and machine.expected:
            self.kill(newcomer.rank)

    def link(self, peer: int, newcomer: Newcomer) -> None:
        """Connect a process with a newcomer, once that one has begun."""
        rank, serial = newcomer.rank, newcomer.serial
        if peer not in self.alive:
            return
        if newcomer.meeting in self.meetings and self.meetings[newcomer.meeting][0] in self.alive:
            self.at(self.slow, functools.partial(self.link, peer, newcomer))
        elif rank in self.alive and self.serials.get(rank) == serial:
            self.links[rank, peer] = serial
            self.act(peer, lambda machine: machine.note_connected(newcomer))
        else:
            self.act(peer, lambda machine: machine.note_unreachable(newcomer))

    def counted(self, rank: int) -> Program:
        """The beginning of a new worker's program: it is connected, and counted by all shards."""
        client = self.clients[rank]
        while client.expected:
            yield 0.1
        joins = [self.request(rank, Kind.JOIN, shard=one) for one in range(len(client.view.chains))]
        yield joins
        clock, _, told = agreed_start([one.answer for one in joins if one.answer is not None])
        self.starts[rank] = clock
        for message in told:
            client.add(message)

    # Programs

    def start(self, rank: int, program: Program) -> None:
        self.programs[rank] = program
        self.waiting[rank] = ()
        self.at(0.0, lambda: self.act(rank, lambda _: None))

    def go_on(self, rank: int) -> None:
        """Run a worker's program until it waits."""
        client = self.clients[rank]
        while rank in self.alive and rank in self.programs and rank not in self.ended:
            if not all(request.ended for request in self.waiting[rank]):
                return
            failed = [one for one in self.waiting[rank] if one.failure]
            if failed:
                self.failed[rank] = failed
                self.ended.add(rank)
                return
            try:
                wanted = next(self.programs[rank])
            except StopIteration:
                self.ended.add(rank)
                return
            if isinstance(wanted, float):
                self.waiting[rank] = (Request(Message(Kind.STATS), None),)
                self.at(wanted, functools.partial(self.wake, rank, self.serials.get(rank, 0)))
            else:
                self.waiting[rank] = wanted
            out, client.out[:] = list(client.out), []
            for to, message in out:
                self.send(rank, to, message)

    def wake(self, rank: int, serial: int) -> None:
        """Let the program of process ``serial`` of a worker go on."""
        if self.serials.get(rank, 0) == serial:
            self.waiting[rank] = ()
            self.go_on(rank)

    def load(self, rank: int, keys: Iterable[int], value: Any) -> Sequence[Request]:
        """Begin the parts of these keys; key k lies in shard k modulo the number of shards."""
        client = self.clients[rank]
        shards = len(client.view.chains)
        return [
            client.add(Message(Kind.LOAD, shard=key % shards, key=key, payload=value))
            for key in keys
        ]

    def request(self, rank: int, kind: Kind, key: int = 0, **fields: Any) -> Request:
        client = self.clients[rank]
        shard = fields.pop("shard", key % len(client.view.chains))
        return client.add(Message(kind, shard=shard, key=key, **fields))

    def clock(self, rank: int, clock: int) -> Sequence[Request]:
        """Tell all shards that the worker has ended so many rounds."""
        requests = [
            self.request(rank, Kind.CLOCK, shard=shard, round=clock)
            for shard in range(len(self.clients[rank].view.chains))
        ]
        self.clocked[rank] = clock, requests
        return requests

    def told_clock(self, rank: int, shard: int) -> int:
        """The newest clock of the worker that the shard has answered, so the worker goes on."""
        clock, requests = self.clocked.get(rank, (0, ()))
        is_told = bool(requests) and requests[shard].answer is not None
        return clock if is_told else max(0, clock - 1)

    def check_staleness(self, peer: int) -> None:
        """Assert the staleness bound on the servers whose state a step of ``peer`` may change.

        No worker that goes on is more than ``staleness`` clocks ahead of the slowest one. No worker
        has sent a clock beyond the next one.
        """
        staleness = self.consistency.staleness
        assert staleness is not None
        view = self.view
        servers = [one for one in self.live_servers if peer in (one, *self.clients)]
        if peer in self.clients:
            told = [self.told_clock(peer, shard) for shard in range(len(view.chains))]
            if told == self.told.get(peer):
                return
            self.told[peer] = told
        for rank in servers:
            for number, replica in self.servers[rank].replicas.items():
                # A server that is being filled may lack clocks.
                if rank not in view.chains[number] or not replica._is_current:
                    continue
                clocks = {one: replica.shard.clocks[one] for one in replica.shard.live}
                slowest = min(clocks.values(), default=0)
                for worker, clock in clocks.items():
                    where = (self.now, rank, number, clocks)
                    ahead = self.told_clock(worker, number) - slowest
                    assert ahead <= staleness, where
                    assert clock - slowest <= staleness + 1, where
                    self.most_ahead = max(self.most_ahead, ahead)
