"""The local rendezvous: the processes of one host exchange descriptors through one of them.

Every rank opens a local address (a listening unix socket) before the ranks know which of them share
a host. The lowest rank of a host then serves the local rendezvous. The other ranks connect to its
local address, prove the key there (``handshake``) and send their descriptors. When all have come,
the serving rank sends each of them the descriptors of all others. So n processes make n - 1
connections, and all of them are closed afterwards.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import abstract_name, listen_unix
from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.handshake import (
    STRANGER_S,
    Claim,
    HandshakeError,
    Purpose,
    Verdict,
    ask,
)
from pycoll.bootstrap.rendezvous.frames import list_ranks

#: Descriptors of a rank: its shared file, its doorbell, its lifeline.
DESCRIPTORS = 3
_BYTE = b"F"
#: The kernel takes 253 descriptors in a message.
_RANKS_PER_MESSAGE = 64
#: selectors.EVENT_READ. Only the serving rank imports that module, since the import is slow.
_READ = 1
#: Seconds between two checks of a waiting rank whether another rank has failed.
_CHECK_S = 0.1
#: Seconds between attempts while the serving rank's backlog is full, or while more descriptors are
#: in flight than the limit of open files allows.
_PAUSE_S = 0.002


class LocalAddress:
    """A listening unix socket in the abstract namespace, without a file.

    Any process of the machine may connect; one that does not prove the key is refused. The
    constructor raises OSError if no descriptor is free.
    """

    def __init__(self) -> None:
        self.name = abstract_name(os.urandom(16).hex())
        self.listener = listen_unix(self.name)

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        self.listener.close()


class Party(NamedTuple):
    """The ranks of one host that meet, in order; the first serves the local rendezvous.

    ``names`` are those of all ranks of the world. ``key`` and ``scope`` go into the handshake.
    """

    rank: int
    ranks: Sequence[int]
    names: Sequence[str]
    key: bytes
    scope: bytes

    @property
    def rendezvous(self) -> int:
        """The rank that serves the local rendezvous."""
        return self.ranks[0]

    def label(self, rank: int) -> str:
        """Return "rank R (host:pid)", for error texts."""
        return f"rank {rank} ({self.names[rank]})"


#: By rank: descriptors that the owner of the mapping must close.
Found = Mapping[int, Sequence[int]]
#: Raises the failure of another rank once it is known.
Check = Callable[[], None]


def descriptors_of(shm: Any) -> list[int]:
    """Return a rank's descriptors; the transport keeps their ownership."""
    return [shm.shared_file_fd(), shm.doorbell_fd(), shm.lifeline_fd()]


def of_thread(shared_file: int, doorbell: int) -> list[int]:
    """Duplicate the descriptors of a rank in this process. A thread has no lifeline: -1."""
    return [os.dup(shared_file), os.dup(doorbell), -1]


def close_all(descriptors: Iterable[int]) -> None:
    """Close all descriptors and ignore the errors of single ones."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def pass_around(
    party: Party,
    local_address: LocalAddress,
    rendezvous_address: str,
    own: Sequence[int],
    deadline: Deadline,
    check: Check,
) -> Found:
    """Send the descriptors ``own`` to all other ranks of the host and return theirs.

    The caller keeps ``own`` and owns the result. ``local_address`` is this rank's and is closed on
    return; ``rendezvous_address`` is that of the serving rank. Raises TransportError, and every
    error of ``check``.
    """
    if party.rank != party.rendezvous:
        local_address.close()
        return _exchange(party, rendezvous_address, own, deadline, check)
    rendezvous = _LocalRendezvous(party)
    try:
        rendezvous.collect(local_address, deadline, check)
        rendezvous.hand_out(own, deadline, check)
    except BaseException:
        rendezvous.drop()
        raise
    finally:
        rendezvous.close()
    return rendezvous.received


class _LocalRendezvous:
    """The serving rank's side. One thread uses it."""

    def __init__(self, party: Party) -> None:
        self.received: dict[int, list[int]] = {}
        self._party = party
        import selectors

        self._selector = selectors.DefaultSelector()
        self._visitors: dict[int, socket.socket] = {}

    def collect(self, local_address: LocalAddress, deadline: Deadline, check: Check) -> None:
        """Receive until all other ranks have sent their descriptors."""
        from pycoll.bootstrap.admission import Admission

        party = self._party
        admission = Admission(self._selector, party.key, party.scope, self._decide, self._admit)
        admission.listen(local_address.listener, Purpose.SHM)
        next_check = time.monotonic() + _CHECK_S
        try:
            while len(self.received) < len(party.ranks) - 1:
                if deadline.passed():
                    raise self._absent(deadline, admission.refusals)
                for key, mask in self._selector.select(min(_CHECK_S, deadline.remaining())):
                    # A callback may have closed another ready connection of this batch.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(mask)
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _CHECK_S
                    admission.expire()
                    check()
        finally:
            admission.close()

    def hand_out(self, own: Sequence[int], deadline: Deadline, check: Check) -> None:
        """Send every rank the descriptors of all others."""
        held = {**self.received, self._party.rank: list(own)}
        for visitor, sock in self._visitors.items():
            others = [rank for rank in self._party.ranks if rank != visitor]
            for ranks in _messages(others):
                descriptors = [fd for rank in ranks for fd in held[rank]]
                try:
                    _send(sock, descriptors, deadline, check)
                except OSError as error:
                    _raise_known_failure(check)
                    raise errors.TransportError(
                        f"{self._party.label(self._party.rank)} could not pass shared memory on to "
                        f"{self._party.label(visitor)}: {error.strerror}",
                        rank=visitor,
                        operation="init",
                    ) from None

    def drop(self) -> None:
        """Close the descriptors that were received."""
        close_all(fd for descriptors in self.received.values() for fd in descriptors)
        self.received.clear()

    def close(self) -> None:
        """Close the connections; the other ranks still read what was sent."""
        for sock in self._visitors.values():
            sock.close()
        self._selector.close()

    def _decide(self, claim: Claim) -> Verdict:
        party = self._party
        if claim.peer != party.rank or claim.rank not in party.ranks[1:] or claim.number != 0:
            return Verdict.UNWANTED
        return Verdict.DUPLICATE if claim.rank in self._visitors else Verdict.ADMITTED

    def _admit(self, claim: Claim, sock: socket.socket) -> None:
        self._visitors[claim.rank] = sock
        self._selector.register(sock, _READ, lambda mask: self._take(claim.rank, sock))

    def _take(self, rank: int, sock: socket.socket) -> None:
        try:
            self.received[rank] = _receive(sock, DESCRIPTORS)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            # The process has ended, which the exchange reports better, or this process has no free
            # descriptor.
            del self._visitors[rank]
            self._selector.unregister(sock)
            sock.close()
            if isinstance(error, EOFError) and str(error):
                raise _nothing_from(self._party, rank, str(error)) from None
            return
        self._selector.unregister(sock)

    def _absent(self, deadline: Deadline, refusals: Sequence[str]) -> errors.TransportError:
        missing = [rank for rank in self._party.ranks[1:] if rank not in self.received]
        also = "; turned away: " + "; ".join(refusals) if refusals else ""
        return errors.TransportError(
            f"{self._party.label(self._party.rank)} waited {deadline.seconds:.3g} s in vain for "
            f"connections from {list_ranks(missing)}{also}",
            ranks=missing,
            operation="init",
        )


def _exchange(
    party: Party, rendezvous_address: str, own: Sequence[int], deadline: Deadline, check: Check
) -> Found:
    found: dict[int, list[int]] = {}
    others = [rank for rank in party.ranks if rank != party.rank]
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: close_all(fd for fds in found.values() for fd in fds))
        with _connect(party, rendezvous_address, deadline, check) as sock:
            _send(sock, own, deadline, check)
            for ranks in _messages(others):
                _wait_for(sock, select.POLLIN, deadline, check)
                try:
                    descriptors = _receive(sock, DESCRIPTORS * len(ranks))
                except (OSError, EOFError) as error:
                    _raise_known_failure(check)
                    reason = str(error) or "it hung up"
                    raise _nothing_from(party, party.rendezvous, reason) from None
                for at, rank in enumerate(ranks):
                    found[rank] = descriptors[DESCRIPTORS * at : DESCRIPTORS * (at + 1)]
        undo.pop_all()
    return found


def _connect(party: Party, local_address: str, deadline: Deadline, check: Check) -> socket.socket:
    """Return a non-blocking connection on which the serving rank has admitted this rank."""
    claim = Claim(Purpose.SHM, party.rank, party.rendezvous)
    reason = "no answer"
    while not deadline.passed():
        sock = end_with_process(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.settimeout(max(deadline.remaining(), 0.001))
            sock.connect(local_address)
            ask(sock, party.key, party.scope, claim, deadline.within(STRANGER_S))
        except (ConnectionRefusedError, HandshakeError) as error:
            sock.close()
            reason = str(getattr(error, "strerror", None) or error)
            break
        except (OSError, EOFError) as error:
            # The backlog is full, or too many strangers wait: try again.
            sock.close()
            reason = str(error) or type(error).__name__
            check()
        except BaseException:
            sock.close()
            raise
        else:
            sock.setblocking(False)
            return sock
        time.sleep(_PAUSE_S)
    _raise_known_failure(check)
    raise errors.TransportError(
        f"{party.label(party.rank)} cannot reach {party.label(party.rendezvous)} over shm: its "
        f"unix socket: {reason}",
        rank=party.rendezvous,
        operation="init",
    )


def _raise_known_failure(check: Check) -> None:
    """Raise the failure of another rank, if that is why the other end has closed. The exchange may
    report it a moment later, so wait first."""
    time.sleep(_CHECK_S)
    check()


def _messages(ranks: Sequence[int]) -> list[Sequence[int]]:
    """Group the ranks whose descriptors go into one message."""
    step = _RANKS_PER_MESSAGE
    return [ranks[at : at + step] for at in range(0, len(ranks), step)]


def _send(
    sock: socket.socket, descriptors: Sequence[int], deadline: Deadline, check: Check
) -> None:
    while True:
        try:
            socket.send_fds(sock, [_BYTE], descriptors)
        except OSError as error:
            # Too many descriptors are in flight to ranks that have not received them yet.
            if error.errno not in (errno.ETOOMANYREFS, errno.EAGAIN) or deadline.passed():
                raise
            check()
            time.sleep(_PAUSE_S)
        else:
            return


def _receive(sock: socket.socket, count: int) -> list[int]:
    """Receive ``count`` descriptors. Raises OSError, and EOFError at the end of the connection,
    with a text if descriptors were lost."""
    data, descriptors, flags, _ = socket.recv_fds(sock, 1, count, socket.MSG_CMSG_CLOEXEC)
    if data == _BYTE and len(descriptors) == count and not flags & socket.MSG_CTRUNC:
        return descriptors
    close_all(descriptors)
    raise EOFError("some of its descriptors were lost" if data else "")


def _wait_for(sock: socket.socket, events: int, deadline: Deadline, check: Check) -> None:
    poller = select.poll()  # select() knows no descriptor above 1023
    poller.register(sock, events)
    while not poller.poll(min(_CHECK_S, deadline.remaining()) * 1e3):
        check()
        if deadline.passed():
            return  # the caller's read then fails


def _nothing_from(party: Party, rank: int, reason: str) -> errors.TransportError:
    return errors.TransportError(
        f"rank {party.rank} got no shared memory from {party.label(rank)}: {reason}; is the limit "
        "of open files reached (ulimit -n)?",
        rank=rank,
        operation="init",
    )
