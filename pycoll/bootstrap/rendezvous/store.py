"""A rank's end of the store: connects over TCP or a unix socket, and gathers through the store."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
    watch_host,
)
from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.handshake import (
    STRANGER_S,
    Claim,
    HandshakeError,
    Purpose,
    Verdict,
    ask,
    receive_exactly,
    scope_of,
)
from pycoll.bootstrap.rendezvous.frames import (
    FRAME_BYTES_MAX,
    GATHER_HEAD,
    HEAD,
    RANKS,
    SHARE_HEAD,
    Kind,
    Party,
    frame,
    to_error,
    unpack_blobs,
)
from pycoll.untrusted import json_object, read_json

if TYPE_CHECKING:
    from pycoll.bootstrap.rendezvous.store_server import StoreServer

#: Seconds between attempts to connect while no store listens yet. The first pause is short, since
#: ranks start together; on this host all pauses are short, since an attempt is cheap there.
_RETRY_FIRST_S, _RETRY_LOCAL_S, _RETRY_S = 0.002, 0.01, 0.05
#: The store reports the missing ranks at the deadline; its message may take this much longer.
_SLACK_S = 2.0
_LOOPBACK = ("127.0.0.1", "::1")
#: Within this time another rank 0 of this job answers, and a name that it has bound becomes a
#: listening one.
_CONTEST_S = 1.0
#: Number of unix socket names under which the ranks of a job may meet on their host.
_NAMES = 16
_ADVICE = (
    "set PYCOLL_SECRET on all ranks, so that other users cannot guess the names, or "
    "PYCOLL_ADDRESS and PYCOLL_SECRET"
)


class Place(NamedTuple):
    """The addresses of a store. ``targets``: (family, socket address); ``text``: for error texts.
    ``launcher``: the launcher serves it. ``same_user``: its process must be of this user.
    ``party``: the words for its members."""

    text: str
    targets: Sequence[tuple[int, Any]]
    launcher: bool = False
    same_user: bool = False
    party: Party = RANKS

    @property
    def local(self) -> bool:
        """Whether all targets are surely on this host."""
        return all(
            family == socket.AF_UNIX or target[0] in _LOOPBACK for family, target in self.targets
        )


class Loss(NamedTuple):
    """A loss with which the other members go on: that of ``member`` if it is ``gone``, else that of
    one of its ranks."""

    member: int
    text: str
    gone: bool


class StoreExchange:
    """An exchange through a store server; see exchange.Exchange. One thread at a time uses it.

    ``join_store`` and ``join_unix`` make it. On the rank that serves, it owns the server.
    """

    brief = True

    def __init__(
        self,
        place: Place,
        key: bytes,
        job_id: str,
        rank: int,
        size: int,
        deadline: Deadline,
        server: StoreServer | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.secret = key
        self._place = place
        self._deadline = deadline
        self._server = server
        self._party = place.party
        self._round = 0
        self._failed: errors.PycollError | None = None
        self._sending = threading.Lock()
        #: When the store last sent back a pulse, on the monotonic clock; 0 before the first one.
        self.heard = 0.0
        #: Losses with which the others go on, oldest first.
        self.news: deque[Loss] = deque()
        with contextlib.ExitStack() as undo:
            if server is not None:
                undo.callback(server.close)
            self._sock = self._enter(key, job_id)
            undo.callback(self._sock.close)
            hello = json.dumps({"size": size, "name": process_name()}).encode()
            self._send(frame(Kind.HELLO, hello))
            undo.pop_all()

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
            for seconds in (self._deadline.remaining(), self._deadline.seconds)
        )
        self._send(frame(Kind.GATHER, GATHER_HEAD.pack(self._round, left_ms, all_ms) + blob))
        self._round += 1

    def collect(self) -> list[bytes]:
        """Wait for the blobs of the round for which ``post`` has sent this rank's. The errors are
        those of ``all_gather``."""
        kind, payload = self._receive()
        if kind == Kind.FAIL:
            raise self._decode_failure(payload)
        try:
            if kind != Kind.RESULT:
                raise ValueError(f"a frame of kind {kind}")
            return unpack_blobs(payload, self.size)
        except ValueError as error:
            raise self._unreadable(error) from None

    def alarm(self, text: str) -> None:
        """Have the store tell all ranks, which raise TransportError."""
        self._send(frame(Kind.ALARM, text.encode()))

    def share(self, ranks: int, tolerated: int, proxy: bytes) -> None:
        """Tell the store that this member stands for ``ranks`` ranks, and that the meeting goes on
        until all members have lost more than ``tolerated``. ``proxy`` becomes this member's blob of
        later rounds if the member is lost."""
        self._send(frame(Kind.SHARE, SHARE_HEAD.pack(ranks, tolerated) + proxy))

    def lose(self, text: str) -> None:
        """Tell the store that one of this member's ranks is lost. ``text`` becomes an alarm if that
        is one too many."""
        self._send(frame(Kind.LOST, text.encode()))

    def check(self) -> None:
        """Raise the failure of another rank if the store has sent one. Never waits for a frame."""
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(self._sock, select.POLLIN)
        if poller.poll(0):
            kind, payload = self._receive()
            if kind != Kind.FAIL:
                raise self._unreadable(ValueError(f"a frame of kind {kind} between rounds"))
            self._failed = self._decode_failure(payload)
            raise self._failed

    def pulse(self) -> None:
        """Tell the store that this process runs; the store sends the pulse back. Any thread may
        call it. A connection that has ended is noticed elsewhere."""
        with contextlib.suppress(errors.PycollError, OSError):
            self._send(frame(Kind.PULSE))

    def skip_pulses(self) -> bool:
        """Take the pulses and the news that have come; returns whether something else follows them.
        Never waits for a frame."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        while poller.poll(0):
            try:
                head = self._sock.recv(HEAD.size, socket.MSG_PEEK)
            except OSError:
                return True
            kind = HEAD.unpack(head)[1] if len(head) == HEAD.size else None
            if kind == Kind.NEWS:
                self._take_news(self._receive()[1])
            elif kind == Kind.PULSE:
                self._sock.recv(HEAD.size)
            else:
                return len(head) in (0, HEAD.size)
            self.heard = time.monotonic()
        return False

    def _take_news(self, payload: bytes) -> None:
        try:
            news = json_object(read_json(payload), {"member": int, "text": str, "gone": bool})
            if not 0 <= news["member"] < self.size:
                raise ValueError(f"news about {self._party.member} {news['member']}")
        except ValueError as error:
            raise self._unreadable(error) from None
        self.news.append(Loss(**news))

    def fileno(self) -> int:
        """Return the descriptor of the connection, readable when ``check`` or ``collect`` finds a
        frame."""
        return self._sock.fileno()

    def prolong(self, deadline: Deadline) -> None:
        """Wait until ``deadline`` in later rounds."""
        self._deadline = deadline

    @property
    def server_host(self) -> str:
        """The address, in numbers, at which this rank has reached the store."""
        return str(self._sock.getpeername()[0]).removeprefix("::ffff:")

    def close(self) -> None:
        """Leave the store. A server that this rank owns ends after it has sent its last answers."""
        with contextlib.suppress(OSError):
            self._sock.settimeout(1.0)
            self._sock.sendall(frame(Kind.LEAVE))
        self.abandon()

    def detach(self) -> socket.socket:
        """Hand over the connection, on which other frames follow. The exchange is not used any
        more."""
        return self._sock

    def abandon(self) -> None:
        """Close the connection without a LEAVE frame: the others learn that this rank is gone."""
        self._sock.close()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _send(self, data: bytes) -> None:
        try:
            with self._sending:
                self._sock.settimeout(self._deadline.remaining() + _SLACK_S)
                self._sock.sendall(data)
        except ConnectionError:
            # A FAIL frame with the reason may still be unread; the next receive raises it.
            return
        except OSError as error:
            raise self._loss_error(error) from None

    def _receive(self) -> tuple[int, bytes]:
        limit = Deadline(self._deadline.remaining() + _SLACK_S)
        try:
            length, kind = HEAD.unpack(receive_exactly(self._sock, HEAD.size, limit))
            if length > FRAME_BYTES_MAX:
                raise errors.TransportError(
                    f"the store at {self._place.text} announced {length} bytes", operation="init"
                )
            return kind, receive_exactly(self._sock, length, limit)
        except (EOFError, OSError) as error:
            raise self._loss_error(error) from None

    def _decode_failure(self, payload: bytes) -> errors.PycollError:
        try:
            return to_error(payload)
        except ValueError as error:
            return self._unreadable(error)

    def _unreadable(self, error: ValueError) -> errors.TransportError:
        return errors.TransportError(
            f"the store at {self._place.text} sent {self._me} unreadable data: {error}",
            rank=None if self._place.launcher else 0,
            operation="init",
        )

    def _loss_error(self, error: BaseException) -> errors.PycollError:
        # The kernel reports a vanished host as TimeoutError too, with a number.
        if isinstance(error, TimeoutError) and error.errno is None:
            return errors.TimeoutError(
                f"the store at {self._place.text} has not answered {self._me} within "
                f"{self._deadline.seconds:.3g} s",
                rank=None if self._place.launcher else 0,
                operation="init",
            )
        if self._place.launcher:
            return errors.TransportError(
                f"the launcher's store at {self._place.text} is gone ({error})", operation="init"
            )
        return errors.PeerLostError(
            f"{self._party.member} 0, which served the store at {self._place.text}, "
            f"{self._party.lost} ({error})",
            rank=0,
            ranks=[0],
            operation="init",
        )

    @property
    def _me(self) -> str:
        return f"{self._party.member} {self.rank}"

    def _enter(self, key: bytes, job_id: str) -> socket.socket:
        """Connect and run the handshake; try again until the deadline while no store answers."""
        claim = Claim(Purpose.STORE, self.rank, -1)
        scope = scope_of(job_id, "store")
        reason = "no attempt was made"
        pause_s = _RETRY_FIRST_S
        while not self._deadline.passed():
            foreign, taken = [], 0
            for family, target in self._place.targets:
                sock = end_with_process(socket.socket(family, socket.SOCK_STREAM))
                limit = self._deadline.within(STRANGER_S)
                try:
                    # A connect to a unix socket never blocks. BlockingIOError means a full backlog,
                    # perhaps of another user's process that holds the name.
                    unix = family == socket.AF_UNIX
                    sock.settimeout(0.0 if unix else max(limit.remaining(), 0.001))
                    sock.connect(target)
                    if self._is_foreign(sock):
                        foreign.append(peer_of(sock))
                        sock.close()
                        continue
                    ask(sock, key, scope, claim, limit)
                except (OSError, EOFError) as error:
                    sock.close()
                    taken += isinstance(error, BlockingIOError)
                    reason = str(error) or type(error).__name__
                except HandshakeError as error:
                    sock.close()
                    raise self._refusal_error(error) from None
                except BaseException:
                    sock.close()
                    raise
                else:
                    if family != socket.AF_UNIX:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    if self._party.watched:
                        watch_host(sock)
                    return sock
            if foreign:
                reason = "process {} of user {} listens there".format(*foreign[0])
            if len(foreign) + taken == len(self._place.targets):
                raise self._taken_error(reason)
            time.sleep(min(pause_s, self._deadline.remaining()))
            pause_s = min(1.5 * pause_s, _RETRY_LOCAL_S if self._place.local else _RETRY_S)
        raise self._absent(reason)

    def _is_foreign(self, sock: socket.socket) -> bool:
        return self._place.same_user and peer_of(sock)[1] != os.geteuid()

    def _taken_error(self, reason: str) -> errors.TransportError:
        return errors.TransportError(
            f"rank {self.rank} cannot meet rank 0 of this job at {self._place.text}: {reason}, and "
            f"other users hold all other names that it may have; {_ADVICE}",
            operation="init",
        )

    def _refusal_error(self, error: HandshakeError) -> errors.PycollError:
        text = f"{self._me} was not admitted to the store at {self._place.text}: {error}"
        if error.verdict in (Verdict.BAD_PROOF, Verdict.OTHER_JOB):
            return errors.InvalidArgumentError(text, rank=self.rank, operation="init")
        return errors.TransportError(text, rank=self.rank, operation="init")

    def _absent(self, reason: str) -> errors.PycollError:
        waited = f"within {self._deadline.seconds:.3g} s"
        if self._place.launcher:
            return errors.TransportError(
                f"rank {self.rank} could not reach the launcher's store at {self._place.text} "
                f"{waited}: {reason}",
                rank=self.rank,
                operation="init",
            )
        first = f"{self._party.member} 0"
        return errors.TimeoutError(
            f"{self._me} could not reach {first} at {self._place.text} {waited}: {reason}; "
            f"is {first} started, and is the address right and open to this host?",
            rank=0,
            ranks=[0],
            operation="init",
        )


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
    place = Place(f"address={address!r}", targets, launcher=launcher, party=party)
    if launcher or rank != 0:
        return StoreExchange(place, secret, job_id, rank, size, deadline)
    try:
        listener = listen_at(host, port, f"{party.member} 0")
    except errors.TransportError:
        # Another rank 0 of this job may hold the port. Then both sides raise InvalidArgumentError.
        _contest(place, secret, job_id, size, deadline)
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
    place = Place(f"address={address!r}", [target], party=party)
    server = _serve(listener, size, secret, job_id, address, party=party)
    return StoreExchange(place, secret, job_id, 0, size, deadline, server)


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
    place = Place(f"the unix socket of job {job_id}", targets, same_user=True)
    if rank != 0:
        return StoreExchange(place, key, job_id, rank, size, deadline)
    listener = _bind_unix(names, place, lambda: _contest(place, key, job_id, size, deadline))
    user = os.geteuid()
    server = _serve(
        listener, size, key, job_id, place.text, trust=lambda sock: peer_of(sock)[1] == user
    )
    own = [target for target in targets if target[1] == listener.getsockname().decode()]
    return StoreExchange(place._replace(targets=own), key, job_id, 0, size, deadline, server)


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
    server = StoreServer(listener, size, secret, job_id, name, True, trust, party)
    server.start()
    return server


def _contest(place: Place, secret: bytes, job_id: str, size: int, deadline: Deadline) -> None:
    """Claim rank 0 at a place that another process serves.

    If that process is rank 0 of the same job, both sides raise InvalidArgumentError. Otherwise the
    function returns.
    """
    brief = deadline.within(_CONTEST_S)
    try:
        exchange = StoreExchange(place, secret, job_id, 0, size, brief)
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


def _bind_unix(names: Sequence[str], place: Place, contest: Callable[[], None]) -> socket.socket:
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
                    raise _open_error(place, error.strerror) from None
            holder = _holder_of(name)
            if holder == os.geteuid():
                contest()
                if limit.passed():
                    raise _open_error(place, "it is in use")
            elif holder is not None or patience.passed():
                break
            time.sleep(_RETRY_S)
    raise _open_error(place, f"other users hold all of its {len(names)} names; {_ADVICE}")


def _open_error(place: Place, why: str | None) -> errors.TransportError:
    return errors.TransportError(
        f"rank 0 cannot open {place.text}: {why}", rank=0, operation="init"
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
