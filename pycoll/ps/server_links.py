"""A connection between two processes of a store: a communicator of two ranks of its own.

So each pair has a transport, admission, deadlines and signs of loss, and a process that dies ends
its own connections only. Short payloads travel with their header; longer ones follow it as a
message of their own, and are received where they belong.
"""

from __future__ import annotations

import hmac
import socket
import time
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
from pycoll.errors import InvalidArgumentError, PycollError, TransportError
from pycoll.ps.messages import HEAD_BYTES, Message, pack_into, unpack
from pycoll.ps.values.buffer_pool import BufferPool

Bytes = npt.NDArray[np.uint8]

#: Payloads up to this length travel with their header, at the price of one copy.
INLINE_BYTES = 16 << 10
_HEAD_TAG, _PAYLOAD_TAG = 0, 1
#: Of every transport (transport.h): the longest segment, and how many segments a channel holds
#: before its sender waits.
_SEGMENT_BYTES, _SEGMENTS_MAX = 64 << 10, 4
#: Seconds until a guest that has come too early tries again.
_RETRY_S = 0.01
#: Words of errors by which transports tell the end of a process, or of its link.
_END_WORDS = ("closed", "ended", "is gone", "reset by")
#: Segments are counted modulo 2**32 on the wire.
_COUNT = 0xFFFFFFFF
#: The bytes of payloads that a connection keeps for the next ones.
_RECEIVED_BYTES = 16 << 20
#: Buffers of so many lengths are kept for reuse.
_LENGTHS_MAX = 8


class Link:
    """One end of a connection. Threads: one receives; one at a time sends.

    ``peer``: the rank of the process at the other end. Each message tells the peer how many
    segments this end has taken. A message for which the channel certainly has space is sent
    by its caller, and no other one: the engine's thread for asynchronous sends need not wake up,
    and a peer that stands still holds up no caller.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        self.peer = peer
        self._comm = comm
        self._native = comm._native
        self._other = 1 - comm.rank
        #: Messages under way; a payload's memory must stay until its message has been sent.
        self._sending: deque[tuple[Any, Any]] = deque()
        self._sent = 0
        #: How many segments this end has taken, and how many the peer has, as far as it has told.
        self._taken = 0
        self._taken_by_peer = 0
        #: By length a buffer for a message, and the call that sends it, which runs no Python when
        #: it is repeated.
        self._send_buffers: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._receive_buffer = memoryview(bytearray(HEAD_BYTES + INLINE_BYTES))
        self._receive_view = _core.view(self._receive_buffer)
        self._buffers = BufferPool(_RECEIVED_BYTES)

    @property
    def transport(self) -> str:
        """The name of the transport."""
        return self._native.transport_of(self._other)

    def send(self, message: Message) -> None:
        """Start to send. Raises PeerLostError and the other errors of a communicator."""
        payload = message.payload
        data = None if payload is None else memoryview(payload).cast("B")
        nbytes = 0 if data is None else data.nbytes
        is_separate = nbytes > INLINE_BYTES
        if self._sending:
            self.release_sent()
        self._sent += _segments_of(nbytes, is_separate)
        has_space = not self._sending and self._sent - self._taken_by_peer <= _SEGMENTS_MAX
        length = HEAD_BYTES if is_separate else HEAD_BYTES + nbytes
        head, send = self._take_buffer(length)
        pack_into(head, message, nbytes, is_separate, self._taken & _COUNT)
        if data is not None and not is_separate:
            head[HEAD_BYTES:] = data
        if has_space:
            send()
            self._send_buffers[length] = head, send
        else:
            self._post(_core.view(head), _HEAD_TAG, head)
        if data is not None and is_separate:
            self._post(_core.view(np.frombuffer(data, np.uint8)), _PAYLOAD_TAG, payload)

    def _take_buffer(self, length: int) -> tuple[memoryview, Callable[[], None]]:
        """Take a buffer of this length, or make one; ``send`` puts it back once it is free."""
        buffer = self._send_buffers.pop(length, None)
        if buffer is None:
            if len(self._send_buffers) >= _LENGTHS_MAX:
                self._send_buffers.clear()
            # NumPy's memory may be such that peers read it in place, which an answer must await.
            memory = memoryview(bytearray(length))
            array = np.frombuffer(memory, np.uint8)
            buffer = memory, self._comm.send.bind(array, self._other, tag=_HEAD_TAG)
        return buffer

    def _post(self, view: _core.BufferView, tag: int, owner: Any) -> None:
        work = self._native.send(view, self._other, tag, True)
        if work is not None:
            self._sending.append((work, owner))

    def release_sent(self) -> None:
        """Forget messages that have been sent. Raises the errors of those that failed."""
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()[0].wait()

    def receive(
        self, timeout_s: float, place: Callable[[Message, int], Bytes | None]
    ) -> Message | None:
        """Return the next message; None if none begins to come within ``timeout_s`` seconds.

        ``place`` returns the memory for the payload of a message, of exactly so many bytes; None
        leaves the choice to this function. Raises PeerLostError where the peer is gone, and
        TransportError for bytes that no peer sends.
        """
        length = self._native.recv_within(self._receive_view, self._other, _HEAD_TAG, timeout_s)
        if length is None:
            return None
        if length > len(self._receive_buffer):
            raise self._malformed(f"a header of {length} bytes")
        inline = length - HEAD_BYTES
        try:
            message, nbytes, is_separate, taken = unpack(self._receive_buffer[:length])
        except ValueError as error:
            raise self._malformed(str(error)) from None
        if inline != (0 if is_separate else nbytes):
            raise self._malformed(f"{inline} bytes with a header of {nbytes}")
        self._taken_by_peer += (taken - self._taken_by_peer) & _COUNT
        payload: Any = place(message, nbytes) if nbytes else None
        if is_separate:
            if payload is None:
                payload = self._buffers.take(nbytes)
            self._native.recv(_core.view(payload), self._other, _PAYLOAD_TAG, False)
        elif payload is not None:
            payload.data[:] = self._receive_buffer[HEAD_BYTES:length]
        elif nbytes:
            payload = bytes(self._receive_buffer[HEAD_BYTES:length])
        self._taken += _segments_of(nbytes, is_separate)
        return message if payload is None else message.with_payload(payload)

    def _malformed(self, what: str) -> TransportError:
        return TransportError(f"rank {self.peer} sent {what}, which is no message of a store")

    def close(self) -> None:
        """Close this end. The peer's calls raise PeerLostError, if they do not know of the end."""
        self._comm.close()
        while self._sending:
            try:
                self._sending.popleft()[0].wait()
            except PycollError:
                continue


def _segments_of(nbytes: int, is_separate: bool) -> int:
    """Return how many segments a message with such a payload takes."""
    return 1 - nbytes // -_SEGMENT_BYTES if is_separate else 1


class Connector(NamedTuple):
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
        job, key = self.rendezvous_of(host, guest, purpose)
        place = int(self.rank != host)
        exchange: Exchange
        if host not in self.meetings:
            exchange = join_unix(job, place, 2, limit, key)
        elif listener is not None and place == 0:
            # The store owns its listener, and the caller closes the other one.
            exchange = serve_store(listener.dup(), job, key, job, 2, limit)
        else:
            exchange = self._meet(host, key, job, limit)
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

    def rendezvous_of(self, host: int, guest: int, purpose: str) -> tuple[str, bytes]:
        """Return the name and the key of the meeting at which two ranks make a link."""
        job = f"{purpose} {host}-{guest}"
        return job, hmac.digest(self.key, job.encode(), "sha256")

    def _meet(self, host: int, key: bytes, job: str, limit: Deadline) -> StoreExchange:
        """Meet a host of another machine, which makes its links one after another at one place."""
        where = place_of(self.meetings[host], self.config)
        while True:
            try:
                return StoreExchange(where, key, job, 1, 2, limit)
            except InvalidArgumentError:
                # The host meets the guest of an earlier link there.
                if limit.remaining() <= _RETRY_S:
                    raise
                time.sleep(_RETRY_S)


def has_ended(error: PycollError) -> bool:
    """Return whether an error of a link shows that the peer takes part in nothing any more.

    The kernel of the peer's host has then told the end of its process or of its link. Silence is no
    such sign: the peer may run on where this host does not reach it.
    """
    return any(sign in (error.how or "") for sign in _END_WORDS)


def meeting_text(config: Config, listener: socket.socket) -> bytes:
    """Return the text by which other machines find ``listener``."""
    return offer(config, listener, b"").to_bytes()


def pairs_of(workers: Sequence[int], servers: Sequence[int]) -> list[tuple[int, int, str]]:
    """Return all links as (host, guest, purpose), in the order in which every rank makes its own.

    One order for all ranks keeps them from waiting for each other in a circle.
    """
    made = []
    for turn in range(len(workers)):
        for place, server in enumerate(servers):
            made.append((server, workers[(place + turn) % len(workers)], "worker"))
    made += [
        (one, other, "servers")
        for place, one in enumerate(servers)
        for other in servers[place + 1 :]
    ]
    return made
