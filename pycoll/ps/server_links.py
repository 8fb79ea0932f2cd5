"""A connection between two processes of a store: a communicator of two ranks of its own.

So each pair has its own transport, admission, deadlines and loss detection, and a process that dies
ends its own connections only. A short payload travels with its header. A longer one follows as a
message of its own, which the receiver stores in the caller's memory.
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
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of, offer
from pycoll.bootstrap.rendezvous.store import StoreExchange, join_unix, serve_store
from pycoll.comm.communicator import Communicator
from pycoll.comm.operations import internals_of
from pycoll.config import WORKER, Config
from pycoll.errors import InvalidArgumentError, PycollError, TransportError
from pycoll.ps.messages import HEAD_BYTES, Message, pack_into, unpack
from pycoll.ps.values.buffer_pool import BufferPool

Bytes = npt.NDArray[np.uint8]

#: Payloads up to this length, in bytes, travel with their header. That costs one copy.
INLINE_BYTES = 16 << 10
_HEAD_TAG, _PAYLOAD_TAG = 0, 1
#: Limits of every transport (transport.h): the bytes of a segment, and the segments that a channel
#: holds before its sender waits.
_SEGMENT_BYTES, _SEGMENTS_MAX = 64 << 10, 4
#: Seconds until a guest retries while the host serves another guest.
_RETRY_S = 0.01
#: Words in errors of transports that show the end of a process, or of its link.
_END_WORDS = ("closed", "ended", "is gone", "reset by")
#: Segments are counted modulo 2**32 on the wire.
_COUNT = 0xFFFFFFFF
#: The most unused bytes of payload buffers that a connection keeps for each size.
_RECEIVED_BYTES = 16 << 20
#: The most lengths of which a connection keeps send buffers.
_LENGTHS_MAX = 8


class Link:
    """One end of a connection. Threads: one receives; one at a time sends.

    ``peer``: the rank of the process at the other end. Each message carries the number of segments
    that its sender has received, so both ends know a lower bound of the channel's space. The caller
    sends a message itself only if the channel certainly has space; the engine's thread sends all
    others. So most sends wake no thread, and no caller waits for a stopped peer.
    """

    def __init__(self, comm: Communicator, peer: int) -> None:
        self.peer = peer
        self._comm = comm
        self._native = internals_of(comm).engine
        self._other = 1 - comm.rank
        #: Asynchronous sends with the owners of their memory, which must live until they are done.
        self._sending: deque[tuple[Any, Any]] = deque()
        self._sent = 0
        #: The segments that this end has received, and those that the peer has reported.
        self._taken = 0
        self._taken_by_peer = 0
        #: By length a buffer for a message, and the bound call that sends it. A repeated call runs
        #: no Python code.
        self._send_buffers: dict[int, tuple[memoryview, Callable[[], None]]] = {}
        self._receive_buffer = memoryview(bytearray(HEAD_BYTES + INLINE_BYTES))
        self._receive_view = _core.view(self._receive_buffer)
        self._buffers = BufferPool(_RECEIVED_BYTES)

    @property
    def transport(self) -> str:
        """The name of the transport."""
        return self._native.transport_of(self._other)

    def send(self, message: Message) -> None:
        """Begin to send a message. Raises PeerLostError and the other errors of a communicator."""
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
        """Take a buffer of this length, or make one; ``send`` puts it back when it is free."""
        buffer = self._send_buffers.pop(length, None)
        if buffer is None:
            if len(self._send_buffers) >= _LENGTHS_MAX:
                self._send_buffers.clear()
            # Peers may read memory that NumPy allocates in place, and a send then waits for them.
            memory = memoryview(bytearray(length))
            array = np.frombuffer(memory, np.uint8)
            buffer = memory, self._comm.send.bind(array, self._other, tag=_HEAD_TAG)
        return buffer

    def _post(self, view: _core.BufferView, tag: int, owner: Any) -> None:
        work = self._native.send(view, self._other, tag, True)
        if work is not None:
            self._sending.append((work, owner))

    def release_sent(self) -> None:
        """Release the memory of completed sends. Raises the errors of failed ones."""
        while self._sending and self._sending[0][0].done():
            self._sending.popleft()[0].wait()

    def receive(
        self, timeout_s: float, destination: Callable[[Message, int], Bytes | None]
    ) -> Message | None:
        """Return the next message; None if none begins to come within ``timeout_s`` seconds.

        ``destination`` returns memory of exactly so many bytes for the payload of a message, or
        None; then this method allocates it. Raises PeerLostError if the peer is gone, and
        TransportError for malformed bytes.
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
        payload: Any = destination(message, nbytes) if nbytes else None
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
        """Close this end. Calls of the peer raise PeerLostError from then on."""
        self._comm.close()
        while self._sending:
            try:
                self._sending.popleft()[0].wait()
            except PycollError:
                continue


def _segments_of(nbytes: int, is_separate: bool) -> int:
    """Return the number of segments of a message with such a payload."""
    return 1 - nbytes // -_SEGMENT_BYTES if is_separate else 1


class Connector(NamedTuple):
    """Connects this rank with other ranks of a store.

    ``key``: the secret of these ranks. ``meetings``: by rank its address for other machines, if it
    has one. ``tuning``: the text by which the communicators choose algorithms.
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

        ``purpose``: tells several links of a pair apart. ``listener``: on a host, where guests of
        other machines arrive; None on one machine. Raises the errors of ``init``.
        """
        job, key = self.rendezvous_of(host, guest, purpose)
        place = int(self.rank != host)
        exchange: Exchange
        if host not in self.meetings:
            exchange = join_unix(job, place, 2, limit, key)
        elif listener is not None and place == 0:
            # The exchange closes its own copy of the listener; the caller keeps the other one.
            exchange = serve_store(listener.dup(), job, key, job, 2, limit)
        else:
            exchange = self._meet(host, key, job, limit)
        # Both ends of a link are plain ranks, whatever their roles in the job are.
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
        """Return the name and the key of the rendezvous at which two ranks make a link."""
        job = f"{purpose} {host}-{guest}"
        return job, hmac.digest(self.key, job.encode(), "sha256")

    def _meet(self, host: int, key: bytes, job: str, limit: Deadline) -> StoreExchange:
        """Meet a host of another machine, which serves its guests one after another."""
        where = address_of(self.meetings[host], self.config)
        while True:
            try:
                return StoreExchange(where, key, job, 1, 2, limit)
            except InvalidArgumentError:
                # The host serves another guest now.
                if limit.remaining() <= _RETRY_S:
                    raise
                time.sleep(_RETRY_S)


def has_ended(error: PycollError) -> bool:
    """Return whether an error of a link shows that the peer's process or its link has ended.

    Then the kernel of the peer's host has reported the end. Silence shows no end: the peer may run
    on, and this host not reach it.
    """
    return any(sign in (error.how or "") for sign in _END_WORDS)


def meeting_text(config: Config, listener: socket.socket) -> bytes:
    """Return the text by which other machines find ``listener``."""
    return offer(config, listener, b"").to_bytes()


def pairs_of(workers: Sequence[int], servers: Sequence[int]) -> list[tuple[int, int, str]]:
    """Return all links as (host, guest, purpose), in the order in which every rank makes its own.

    All ranks use one order, so there is no cyclic wait.
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
