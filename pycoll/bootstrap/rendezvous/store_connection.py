"""A rank's connection to a store: the handshake, and frames in both directions."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import peer_of, watch_host
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
from pycoll.bootstrap.rendezvous.frames import FRAME_BYTES_MAX, HEAD, RANKS, Party, to_error

#: Seconds between attempts to connect while no store listens yet. The first pause is short, since
#: ranks start together; on this host all pauses are short, since an attempt is cheap there.
_RETRY_FIRST_S, _RETRY_LOCAL_S, RETRY_S = 0.002, 0.01, 0.05
#: The store reports the missing ranks at the deadline; its message may take this much longer.
_SLACK_S = 2.0
_LOOPBACK = ("127.0.0.1", "::1")
ADVICE = (
    "set PYCOLL_SECRET on all ranks, so that other users cannot guess the names, or "
    "PYCOLL_ADDRESS and PYCOLL_SECRET"
)


class StoreAddress(NamedTuple):
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


class StoreConnection:
    """A connection that the store has admitted. Any thread may send; one at a time receives.

    Attributes: ``address`` of the store; ``rank``, the one that this end claims; ``deadline`` of
    every wait, which the owner may replace; ``sock``, which the owner closes.

    Raises TimeoutError where rank 0 does not come, TransportError where the launcher does not, and
    InvalidArgumentError for a wrong secret.
    """

    def __init__(
        self, address: StoreAddress, key: bytes, job_id: str, rank: int, deadline: Deadline
    ) -> None:
        self.address, self.rank, self.deadline = address, rank, deadline
        self._sending = threading.Lock()
        self.sock = self._enter(key, job_id)

    def is_readable(self) -> bool:
        """Return whether a frame, or the end of the connection, has come. Never waits."""
        poller = select.poll()  # select() knows no descriptor above 1023
        poller.register(self.sock, select.POLLIN)
        return bool(poller.poll(0))

    def send(self, data: bytes) -> None:
        """Send a frame. Does nothing where the connection has ended: the next receive tells why."""
        try:
            with self._sending:
                self.sock.settimeout(self.deadline.remaining() + _SLACK_S)
                self.sock.sendall(data)
        except ConnectionError:
            # A FAIL frame with the reason may still be unread; the next receive raises it.
            return
        except OSError as error:
            raise self._loss_error(error) from None

    def receive(self) -> tuple[int, bytes]:
        """Wait for a frame, and return its kind and payload."""
        limit = Deadline(self.deadline.remaining() + _SLACK_S)
        try:
            length, kind = HEAD.unpack(receive_exactly(self.sock, HEAD.size, limit))
            if length > FRAME_BYTES_MAX:
                raise errors.TransportError(
                    f"the store at {self.address.text} announced {length} bytes", operation="init"
                )
            return kind, receive_exactly(self.sock, length, limit)
        except (EOFError, OSError) as error:
            raise self._loss_error(error) from None

    def decode_failure(self, payload: bytes) -> errors.PycollError:
        """Return the error of a FAIL frame."""
        try:
            return to_error(payload)
        except ValueError as error:
            return self.unreadable(error)

    def unreadable(self, error: ValueError) -> errors.TransportError:
        """Return the error for data from the store that cannot be read."""
        return errors.TransportError(
            f"the store at {self.address.text} sent {self._me} unreadable data: {error}",
            rank=None if self.address.launcher else 0,
            operation="init",
        )

    def _loss_error(self, error: BaseException) -> errors.PycollError:
        # The kernel reports a vanished host as TimeoutError too, with a number.
        if isinstance(error, TimeoutError) and error.errno is None:
            return errors.TimeoutError(
                f"the store at {self.address.text} has not answered {self._me} within "
                f"{self.deadline.seconds:.3g} s",
                rank=None if self.address.launcher else 0,
                operation="init",
            )
        if self.address.launcher:
            return errors.TransportError(
                f"the launcher's store at {self.address.text} is gone ({error})", operation="init"
            )
        return errors.PeerLostError(
            f"{self.address.party.member} 0, which served the store at {self.address.text}, "
            f"{self.address.party.lost} ({error})",
            rank=0,
            ranks=[0],
            operation="init",
        )

    @property
    def _me(self) -> str:
        return f"{self.address.party.member} {self.rank}"

    def _enter(self, key: bytes, job_id: str) -> socket.socket:
        """Connect and run the handshake; try again until the deadline while no store answers."""
        claim = Claim(Purpose.STORE, self.rank, -1)
        scope = scope_of(job_id, "store")
        reason = "no attempt was made"
        pause_s = _RETRY_FIRST_S
        while not self.deadline.passed():
            foreign, taken = [], 0
            for family, target in self.address.targets:
                sock = end_with_process(socket.socket(family, socket.SOCK_STREAM))
                limit = self.deadline.within(STRANGER_S)
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
                    if self.address.party.watched:
                        watch_host(sock)
                    return sock
            if foreign:
                reason = "process {} of user {} listens there".format(*foreign[0])
            if len(foreign) + taken == len(self.address.targets):
                raise self._taken_error(reason)
            time.sleep(min(pause_s, self.deadline.remaining()))
            pause_s = min(1.5 * pause_s, _RETRY_LOCAL_S if self.address.local else RETRY_S)
        raise self._absent(reason)

    def _is_foreign(self, sock: socket.socket) -> bool:
        return self.address.same_user and peer_of(sock)[1] != os.geteuid()

    def _taken_error(self, reason: str) -> errors.TransportError:
        return errors.TransportError(
            f"rank {self.rank} cannot meet rank 0 of this job at {self.address.text}: {reason}, "
            f"and other users hold all other names that it may have; {ADVICE}",
            operation="init",
        )

    def _refusal_error(self, error: HandshakeError) -> errors.PycollError:
        text = f"{self._me} was not admitted to the store at {self.address.text}: {error}"
        if error.verdict in (Verdict.BAD_PROOF, Verdict.OTHER_JOB):
            return errors.InvalidArgumentError(text, rank=self.rank, operation="init")
        return errors.TransportError(text, rank=self.rank, operation="init")

    def _absent(self, reason: str) -> errors.PycollError:
        waited = f"within {self.deadline.seconds:.3g} s"
        if self.address.launcher:
            return errors.TransportError(
                f"rank {self.rank} could not reach the launcher's store at {self.address.text} "
                f"{waited}: {reason}",
                rank=self.rank,
                operation="init",
            )
        first = f"{self.address.party.member} 0"
        return errors.TimeoutError(
            f"{self._me} could not reach {first} at {self.address.text} {waited}: {reason}; "
            f"is {first} started, and is the address right and open to this host?",
            rank=0,
            ranks=[0],
            operation="init",
        )
