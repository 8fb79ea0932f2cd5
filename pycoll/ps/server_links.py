"""A connection between two processes of a store: a communicator of two ranks of its own.

So each pair has a transport, admission, deadlines and signs of loss, and a process that dies ends
its own connections only. Short payloads travel with their header; longer ones follow it as a
message of their own, and are received where they belong.
"""

from __future__ import annotations

import hmac
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pycoll import _core
from pycoll.bootstrap.connect import connect
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.joining import Joined
from pycoll.bootstrap.rendezvous.exchange import Exchange
from pycoll.bootstrap.rendezvous.meeting import Meeting, offer, place_of
from pycoll.bootstrap.rendezvous.store import StoreExchange, join_unix, serve_store
from pycoll.comm.communicator import Communicator
from pycoll.config import WORKER, Config
from pycoll.errors import PycollError, TransportError
from pycoll.ps.messages import HEAD_BYTES, Message, pack, unpack

Bytes = npt.NDArray[np.uint8]

#: Payloads up to this length travel with their header, at the price of one copy.
INLINE_BYTES = 16 << 10
_HEAD_TAG, _PAYLOAD_TAG = 0, 1


class Link:
    """One end of a connection. Threads: one receives; one at a time sends.

    ``peer``: the rank of the process at the other end, or MANAGER.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        self.peer = peer
        self._comm = comm
        self._native = comm._native
        self._other = 1 - comm.rank
        #: Messages under way; a payload's memory must stay until its message has been sent.
        self._sending: deque[tuple[Any, Any]] = deque()

    @property
    def transport(self) -> str:
        """The name of the transport."""
        return self._native.transport_of(self._other)

    def send(self, message: Message) -> None:
        """Start to send. Raises PeerLostError and the other errors of a communicator."""
        payload = message.payload
        data = None if payload is None else memoryview(payload).cast("B")
        nbytes = 0 if data is None else data.nbytes
        apart = nbytes > INLINE_BYTES
        head = pack(message, nbytes, apart)
        self.tidy()
        if data is not None and not apart:
            head += data
        self._post(np.frombuffer(head, np.uint8), _HEAD_TAG, None)
        if data is not None and apart:
            self._post(np.frombuffer(data, np.uint8), _PAYLOAD_TAG, payload)

    def _post(self, memory: Bytes, tag: int, owner: Any) -> None:
        work = self._native.send(_core.view(memory), self._other, tag, True)
        if work is not None:
            self._sending.append((work, (memory, owner)))

    def tidy(self) -> None:
        """Forget messages that have been sent. Raises the errors of those that failed."""
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()[0].wait()

    def receive(
        self, patience_s: float, place: Callable[[Message, int], Bytes | None]
    ) -> Message | None:
        """Return the next message; None if none begins to come within ``patience_s`` seconds.

        ``place`` returns the memory for the payload of a message, of exactly so many bytes; None
        leaves the choice to this function. Raises PeerLostError where the peer is gone, and
        TransportError for bytes that no peer sends.
        """
        found = self._native.probe(self._other, _HEAD_TAG, patience_s)
        if found is None:
            return None
        nbytes = found[2]
        if nbytes > HEAD_BYTES + INLINE_BYTES:
            raise self._nonsense(f"a header of {nbytes} bytes")
        buffer = np.empty(nbytes, np.uint8)
        self._native.recv(_core.view(buffer), self._other, _HEAD_TAG, False)
        try:
            message, payload_bytes, apart = unpack(buffer.data)
        except ValueError as error:
            raise self._nonsense(str(error)) from None
        inline = nbytes - HEAD_BYTES
        if inline != (0 if apart else payload_bytes):
            raise self._nonsense(f"{inline} bytes with a header of {payload_bytes}")
        if payload_bytes == 0:
            return message
        memory = place(message, payload_bytes)
        if apart:
            if memory is None:
                memory = np.empty(payload_bytes, np.uint8)
            self._native.recv(_core.view(memory), self._other, _PAYLOAD_TAG, False)
        elif memory is None:
            memory = buffer[HEAD_BYTES:]
        else:
            memory[:] = buffer[HEAD_BYTES:]
        return message._replace(payload=memory)

    def _nonsense(self, what: str) -> TransportError:
        return TransportError(f"rank {self.peer} sent {what}, which is no message of a store")

    def close(self) -> None:
        """Close this end. The peer's calls raise PeerLostError, if they do not know of the end."""
        self._comm.close()
        while self._sending:
            try:
                self._sending.popleft()[0].wait()
            except PycollError:
                continue


class Circle(NamedTuple):
    """The ranks among which links are made, and how they meet.

    ``key``: known to these ranks only. ``meetings``: by rank where it can be met from other
    machines, for the ranks that offer that. ``tuning``: the text by which they choose algorithms.
    """

    rank: int
    config: Config
    key: bytes
    tuning: str
    oversubscription: float
    meetings: dict[int, Meeting]

    def link(
        self, host: int, guest: int, purpose: str, listener: socket.socket | None, limit: Deadline
    ) -> Communicator:
        """Connect ranks ``host`` and ``guest``, one of which is this one.

        ``purpose`` tells several links of a pair apart. The host offers the place, which is
        ``listener`` between machines. Raises the errors of ``init``.
        """
        job = f"{purpose} {host}-{guest}"
        key = hmac.digest(self.key, job.encode(), "sha256")
        place = int(self.rank != host)
        exchange: Exchange
        if host not in self.meetings:
            exchange = join_unix(job, place, 2, limit, key)
        elif listener is not None and place == 0:
            # The store owns its listener, and the caller closes the other one.
            exchange = serve_store(listener.dup(), job, key, job, 2, limit)
        else:
            where = place_of(self.meetings[host], self.config)
            exchange = StoreExchange(where, key, job, place, 2, limit)
        # The ends of a link are equals, whatever their roles in the job are.
        config = self.config._replace(role=WORKER, rank=None, size=None)
        try:
            connected = connect(
                exchange,
                config,
                communicator_id=job,
                deadline=limit,
                bring=lambda _: self.tuning,
                mailbox=False,
            )
        except BaseException:
            exchange.abandon()
            raise
        exchange.close()
        joined = Joined(place, 2, *connected, "store")
        shared = max(joined.oversubscription, self.oversubscription)
        return Communicator(joined._replace(oversubscription=shared), config, job)


def offered(config: Config, listener: socket.socket) -> bytes:
    """Return the text by which other machines find ``listener``."""
    return offer(config, listener, b"").to_bytes()


def pairs_of(workers: Sequence[int], servers: Sequence[int]) -> list[tuple[int, int, str]]:
    """Return all links as (host, guest, purpose), in the order in which every rank makes its own.

    One order for all ranks keeps them from waiting for each other in a circle. The first worker has
    a second link to each server, for the view manager.
    """
    made = []
    for turn in range(len(workers)):
        for place, server in enumerate(servers):
            made.append((server, workers[(place + turn) % len(workers)], "worker"))
    made += [(server, workers[0], "manager") for server in servers]
    made += [
        (one, other, "servers")
        for place, one in enumerate(servers)
        for other in servers[place + 1 :]
    ]
    return made
