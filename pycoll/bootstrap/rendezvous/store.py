"""A rank's end of the store: meets over TCP or a unix socket, and gathers through the store."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.host import process_name
from pycoll.bootstrap.discovery.network import (
    abstract_name,
    listen_at,
    listen_unix,
    parse_address,
    peer_of,
    resolve,
)
from pycoll.bootstrap.handshake import STRANGER_S
from pycoll.bootstrap.rendezvous.frames import (
    GATHER_HEAD,
    HEAD,
    RANKS,
    SHARE_HEAD,
    Kind,
    Party,
    frame,
    unpack_blobs,
)
from pycoll.bootstrap.rendezvous.store_connection import (
    ADVICE,
    RETRY_S,
    StoreAddress,
    StoreConnection,
)
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.bootstrap.rendezvous.store_server import StoreServer

#: Seconds in which another rank 0 of this job answers, and in which it listens at a name that it
#: has bound.
_CONTEST_S = 1.0
#: Number of unix socket names under which the ranks of a job may meet on their host.
_NAMES = 16


class Loss(NamedTuple):
    """A loss that the meeting tolerates: of ``member`` if it is ``gone``, else of one of its
    ranks."""

    member: int
    text: str
    gone: bool


class MeetingWatch:
    """Pulses and losses between a member of a long meeting and the store, between rounds.

    ``size``: the number of members. Attributes: ``heard``, when the store last sent back a pulse,
    on the monotonic clock, 0 before the first one; ``news``, the losses with which the others go
    on, oldest first.
    """

    def __init__(self, connection: StoreConnection, size: int) -> None:
        self._connection, self._size = connection, size
        self.heard = 0.0
        self.news: deque[Loss] = deque()

    def pulse(self) -> None:
        """Tell the store that this process runs; the store sends the pulse back. Any thread may
        call it. A connection that has ended is noticed elsewhere."""
        with contextlib.suppress(errors.PycollError, OSError):
            self._connection.send(frame(Kind.PULSE))

    def skip_pulses(self) -> bool:
        """Take the pulses and the news that have come; returns whether something else follows them.
        Never waits for a frame."""
        sock = self._connection.sock
        while self._connection.is_readable():
            try:
                head = sock.recv(HEAD.size, socket.MSG_PEEK)
            except OSError:
                return True
            kind = HEAD.unpack(head)[1] if len(head) == HEAD.size else None
            if kind == Kind.NEWS:
                self._take_news(self._connection.receive()[1])
            elif kind == Kind.PULSE:
                sock.recv(HEAD.size)
            else:
                return len(head) in (0, HEAD.size)
            self.heard = time.monotonic()
        return False

    def _take_news(self, payload: bytes) -> None:
        try:
            news = json_object(read_json(payload), {"member": int, "text": str, "gone": bool})
            if not 0 <= news["member"] < self._size:
                member = self._connection.address.party.member
                raise ValueError(f"news about {member} {news['member']}")
        except ValueError as error:
            raise self._connection.unreadable(error) from None
        self.news.append(Loss(**news))

    def share(self, ranks: int, tolerated: int, proxy: bytes) -> None:
        """Tell the store that this member stands for ``ranks`` ranks, and that the meeting ends
        once all members together have lost more than ``tolerated`` ranks. ``proxy`` becomes this
        member's blob of later rounds if the member is lost."""
        self._connection.send(frame(Kind.SHARE, SHARE_HEAD.pack(ranks, tolerated) + proxy))

    def lose(self, text: str) -> None:
        """Tell the store that one of this member's ranks is lost. ``text`` becomes an alarm if more
        ranks are lost than the meeting tolerates."""
        self._connection.send(frame(Kind.LOST, text.encode()))


class StoreExchange:
    """An exchange through a store server; see exchange.Exchange. One thread at a time uses it.

    ``join_store`` and ``join_unix`` make it. On the rank that serves, it owns the server.

    Attributes: ``watch``, for meetings that last.
    """

    brief = True

    def __init__(
        self,
        address: StoreAddress,
        key: bytes,
        job_id: str,
        rank: int,
        size: int,
        deadline: Deadline,
        *,
        server: StoreServer | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.secret = key
        self._server = server
        self._round = 0
        self._failed: errors.PycollError | None = None
        with contextlib.ExitStack() as undo:
            if server is not None:
                undo.callback(server.close)
            self._connection = StoreConnection(address, key, job_id, rank, deadline)
            undo.callback(self._connection.sock.close)
            hello = json.dumps({"size": size, "name": process_name()}).encode()
            self._connection.send(frame(Kind.HELLO, hello))
            undo.pop_all()
        self.watch = MeetingWatch(self._connection, size)

    def all_gather(self, blob: bytes) -> list[bytes]:
        """Return the blobs of all ranks, in rank order.

        Raises pycoll's TimeoutError, which names the ranks that did not come, and PeerLostError for
        a rank that ended meanwhile. Raises InvalidArgumentError if the ranks contradict each other,
        and TransportError for an alarm or an unreadable frame.
        """
        self.post(blob)
        return self.collect()

    def post(self, blob: bytes) -> None:
        """Send this rank's blob of the next round without waiting for the others."""
        if self._failed is not None:
            raise self._failed
        left_ms, all_ms = (
            min(int(seconds * 1e3), 0xFFFFFFFF)
            for seconds in (
                self._connection.deadline.remaining(),
                self._connection.deadline.seconds,
            )
        )
        self._connection.send(
            frame(Kind.GATHER, GATHER_HEAD.pack(self._round, left_ms, all_ms) + blob)
        )
        self._round += 1

    def collect(self) -> list[bytes]:
        """Wait for the blobs of the round for which ``post`` has sent this rank's. The errors are
        those of ``all_gather``."""
        kind, payload = self._connection.receive()
        if kind == Kind.FAIL:
            raise self._connection.decode_failure(payload)
        try:
            if kind != Kind.RESULT:
                raise ValueError(f"a frame of kind {kind}")
            return unpack_blobs(payload, self.size)
        except ValueError as error:
            raise self._connection.unreadable(error) from None

    def alarm(self, text: str) -> None:
        """Send ``text`` to all ranks through the store; they raise TransportError with it."""
        self._connection.send(frame(Kind.ALARM, text.encode()))

    def check(self) -> None:
        """Raise the failure of another rank if the store has sent one. Never waits for a frame."""
        if self._connection.is_readable():
            kind, payload = self._connection.receive()
            if kind != Kind.FAIL:
                raise self._connection.unreadable(
                    ValueError(f"a frame of kind {kind} between rounds")
                )
            self._failed = self._connection.decode_failure(payload)
            raise self._failed

    def fileno(self) -> int:
        """Return the descriptor of the connection, readable when ``check`` or ``collect`` finds a
        frame."""
        return self._connection.sock.fileno()

    def prolong(self, deadline: Deadline) -> None:
        """Wait until ``deadline`` in later rounds."""
        self._connection.deadline = deadline

    @property
    def server_host(self) -> str:
        """The address, in numbers, at which this rank has reached the store."""
        return str(self._connection.sock.getpeername()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """Leave the store. A server that this rank owns ends after it has sent its last answers."""
        with contextlib.suppress(OSError):
            self._connection.sock.settimeout(1.0)
            self._connection.sock.sendall(frame(Kind.LEAVE))
        self.abandon()

    def detach(self) -> socket.socket:
        """Hand over the connection, on which other frames follow. The exchange is not used any
        more."""
        return self._connection.sock

    def abandon(self) -> None:
        """Close the connection without a LEAVE frame: the others learn that this rank is gone."""
        self._connection.sock.close()
        if self._server is not None:
            self._server.close()
            self._server = None


def join_store(
    address: str,
    secret: bytes,
    job_id: str,
    rank: int,
    size: int,
    deadline: Deadline,
    launcher: bool = False,
    party: Party = RANKS,
) -> StoreExchange:
    """Meet at ``address`` ("host:port"); the launcher or else rank 0 serves the store there.

    ``party``: the words for the ranks in error texts.

    Raises InvalidArgumentError for a wrong secret, and for an address that does not parse or
    resolve. Raises TransportError for a port in use, and TimeoutError if rank 0 does not come.
    """
    host, port = parse_address(address)
    targets = resolve(host, port)
    store = StoreAddress(f"address={address!r}", targets, launcher=launcher, party=party)
    if launcher or rank != 0:
        return StoreExchange(store, secret, job_id, rank, size, deadline)
    try:
        listener = listen_at(host, port, f"{party.member} 0")
    except errors.TransportError:
        # Another rank 0 of this job may hold the port. Then both sides raise InvalidArgumentError.
        _contest(store, secret, job_id, size, deadline)
        raise
    return serve_store(listener, address, secret, job_id, size, deadline, party)


def serve_store(
    listener: socket.socket,
    address: str,
    secret: bytes,
    job_id: str,
    size: int,
    deadline: Deadline,
    party: Party = RANKS,
) -> StoreExchange:
    """Serve a store on ``listener`` as rank 0, which meets the others there. ``address`` names the
    place in error texts."""
    bound, port = listener.getsockname()[:2]
    loopback = "127.0.0.1" if listener.family == socket.AF_INET else "::1"
    own = loopback if bound in ("0.0.0.0", "::") else bound
    target = (int(listener.family), (own, port))
    store = StoreAddress(f"address={address!r}", [target], party=party)
    server = _serve(listener, size, secret, job_id, address, party=party)
    return StoreExchange(store, secret, job_id, 0, size, deadline, server=server)


def join_unix(
    job_id: str, rank: int, size: int, deadline: Deadline, secret: bytes = b""
) -> StoreExchange:
    """Meet on this host at an abstract unix socket that rank 0 serves.

    Ranks are admitted by their user id, which the kernel reports, so ``secret`` may be empty. The
    socket's name is one of ``_NAMES`` that follow from user, job and secret. If another user holds
    a name, all ranks go on to the next one. Without a secret, other users can compute all names.
    """
    key = hashlib.sha256(f"{os.geteuid()}\0{job_id}".encode()).digest()
    if secret:
        key = hmac.digest(secret, key, "sha256")
    names = [_name_of(key, number) for number in range(_NAMES)]
    targets = [(int(socket.AF_UNIX), name) for name in names]
    store = StoreAddress(f"the unix socket of job {job_id}", targets, same_user=True)
    if rank != 0:
        return StoreExchange(store, key, job_id, rank, size, deadline)
    listener = _bind_unix(names, store, lambda: _contest(store, key, job_id, size, deadline))
    user = os.geteuid()
    server = _serve(
        listener, size, key, job_id, store.text, trust=lambda sock: peer_of(sock)[1] == user
    )
    own = [target for target in targets if target[1] == listener.getsockname().decode()]
    return StoreExchange(store._replace(targets=own), key, job_id, 0, size, deadline, server=server)


def _name_of(key: bytes, number: int) -> str:
    text = hmac.digest(key, b"pycoll meeting\0" + number.to_bytes(4, "little"), "sha256")
    return abstract_name(text.hex()[:40])


def _serve(
    listener: socket.socket,
    size: int,
    secret: bytes,
    job_id: str,
    host: str,
    trust: Callable[[socket.socket], bool] = lambda sock: True,
    party: Party = RANKS,
) -> StoreServer:
    from pycoll.bootstrap.rendezvous.store_server import StoreServer

    name = f"{party.member} 0 ({host})"
    server = StoreServer(listener, size, secret, job_id, name, once=True, trust=trust, party=party)
    server.start()
    return server


def _contest(
    store: StoreAddress, secret: bytes, job_id: str, size: int, deadline: Deadline
) -> None:
    """Claim rank 0 of a store that another process serves.

    If that process is rank 0 of the same job, both sides raise InvalidArgumentError. Otherwise the
    function returns.
    """
    brief = deadline.within(_CONTEST_S)
    try:
        exchange = StoreExchange(store, secret, job_id, 0, size, brief)
    except errors.PycollError:
        return
    try:
        exchange.all_gather(b"")
    except errors.InvalidArgumentError:
        raise
    except errors.PycollError:
        return
    finally:
        exchange.abandon()


def _bind_unix(
    names: Sequence[str], store: StoreAddress, contest: Callable[[], None]
) -> socket.socket:
    """Listen at the first name that no other user holds.

    An earlier meeting of this job, or another rank 0, may hold a name for a moment. So the function
    tries a name of this user again for a while.
    """
    limit, patience = Deadline(STRANGER_S), Deadline(_CONTEST_S)
    for name in names:
        while True:
            try:
                return listen_unix(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise _open_error(store, error.strerror) from None
            holder = _holder_of(name)
            if holder == os.geteuid():
                contest()
                if limit.passed():
                    raise _open_error(store, "it is in use")
            elif holder is not None or patience.passed():
                break
            time.sleep(RETRY_S)
    raise _open_error(store, f"other users hold all of its {len(names)} names; {ADVICE}")


def _open_error(store: StoreAddress, why: str | None) -> errors.TransportError:
    return errors.TransportError(
        f"rank 0 cannot open {store.text}: {why}", rank=0, operation="init"
    )


def _holder_of(name: str) -> int | None:
    """Return the user whose process listens at the name; None if no connection can be made."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return None
        return peer_of(sock)[1]
