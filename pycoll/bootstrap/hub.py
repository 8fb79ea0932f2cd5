"""Descriptors between the processes of one host: all of them by way of one, the hub.

Every rank opens a door before anybody knows who is on its host. The host's lowest rank is the hub:
the others come to its door, are proven there (handshake.py) and hand over their descriptors, and
when all have come, each gets everybody's. So n processes make n - 1 connections, of which none
stays.
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
from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.frames import list_ranks
from pycoll.bootstrap.handshake import (
    STRANGER_S,
    Claim,
    HandshakeError,
    Purpose,
    Verdict,
    ask,
)
from pycoll.bootstrap.network import abstract_name, listen_unix

#: Of a rank: its segment, its doorbell, its lifeline.
DESCRIPTORS = 3
_BYTE = b"F"
#: The kernel takes 253 descriptors in a message.
_RANKS_PER_MESSAGE = 64
#: selectors.EVENT_READ, whose module only the hub imports, since that takes a while.
_READ = 1
#: How often a rank that waits asks whether another one has failed.
_CHECK_S = 0.1
#: Between attempts while the hub's backlog is full, or more descriptors are on their way than the
#: limit of open files allows.
_PAUSE_S = 0.002


class Door:
    """A listening unix socket that has no file; strangers may find it, and are turned away.

    Raises OSError if there is no descriptor for it.
    """

    def __init__(self) -> None:
        self.name = abstract_name(os.urandom(16).hex())
        self.listener = listen_unix(self.name)

    def close(self) -> None:
        """Nobody comes in any more. May be called twice."""
        self.listener.close()


class Party(NamedTuple):
    """The ranks of a host that meet, in order; the first is the hub. ``names`` are those of all
    ranks of the world, ``key`` and ``scope`` what they prove."""

    rank: int
    ranks: Sequence[int]
    names: Sequence[str]
    key: bytes
    scope: bytes

    @property
    def hub(self) -> int:
        """Whose door it is."""
        return self.ranks[0]

    def who(self, rank: int) -> str:
        """For texts."""
        return f"rank {rank} ({self.names[rank]})"


#: By rank: descriptors that belong to whoever holds the mapping.
Found = Mapping[int, Sequence[int]]
#: Raises when going on has become pointless.
Check = Callable[[], None]


def descriptors_of(shm: Any) -> list[int]:
    """A rank's, which stay its transport's."""
    return [shm.segment_fd(), shm.doorbell_fd(), shm.lifeline_fd()]


def of_thread(segment: int, doorbell: int) -> list[int]:
    """Descriptors of a rank in this process, to be attached: threads have no lifelines."""
    return [os.dup(segment), os.dup(doorbell), -1]


def close_all(descriptors: Iterable[int]) -> None:
    """Close them, whatever is wrong with any."""
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def pass_around(
    party: Party, door: Door, hub_door: str, own: Sequence[int], deadline: Deadline, check: Check
) -> Found:
    """Give ``own``, which stay this rank's, to all others; returns theirs.

    ``door`` is this rank's and closed on return. Raises TransportError, and what ``check`` raises.
    """
    if party.rank != party.hub:
        door.close()
        return _visit(party, hub_door, own, deadline, check)
    hub = _Hub(party)
    try:
        hub.collect(door, deadline, check)
        hub.hand_out(own, deadline, check)
    except BaseException:
        hub.drop()
        raise
    finally:
        hub.close()
    return hub.brought


class _Hub:
    """The hub's side; one thread."""

    def __init__(self, party: Party) -> None:
        self.brought: dict[int, list[int]] = {}
        self._party = party
        import selectors

        self._selector = selectors.DefaultSelector()
        self._visitors: dict[int, socket.socket] = {}

    def collect(self, door: Door, deadline: Deadline, check: Check) -> None:
        """Until all others have brought theirs."""
        from pycoll.bootstrap.doorkeeper import Doorkeeper

        party = self._party
        keeper = Doorkeeper(self._selector, party.key, party.scope, self._decide, self._admit)
        keeper.listen(door.listener, Purpose.SHM)
        next_check = time.monotonic() + _CHECK_S
        try:
            while len(self.brought) < len(party.ranks) - 1:
                if deadline.passed():
                    raise self._absent(deadline, keeper.refusals)
                for key, mask in self._selector.select(min(_CHECK_S, deadline.remaining())):
                    # A callback may have closed another ready connection of this batch.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(mask)
                if time.monotonic() >= next_check:
                    next_check = time.monotonic() + _CHECK_S
                    keeper.expire()
                    check()
        finally:
            keeper.close()

    def hand_out(self, own: Sequence[int], deadline: Deadline, check: Check) -> None:
        """Everybody's to everybody."""
        held = {**self.brought, self._party.rank: list(own)}
        for visitor, sock in self._visitors.items():
            others = [rank for rank in self._party.ranks if rank != visitor]
            for ranks in _messages(others):
                descriptors = [fd for rank in ranks for fd in held[rank]]
                try:
                    _send(sock, descriptors, deadline, check)
                except OSError as error:
                    _listen(check)
                    raise errors.TransportError(
                        f"{self._party.who(self._party.rank)} could not pass shared memory on to "
                        f"{self._party.who(visitor)}: {error.strerror}",
                        rank=visitor,
                        operation="init",
                    ) from None

    def drop(self) -> None:
        """Close what was brought."""
        close_all(fd for descriptors in self.brought.values() for fd in descriptors)
        self.brought.clear()

    def close(self) -> None:
        """The visitors read on what was sent."""
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
            self.brought[rank] = _receive(sock, DESCRIPTORS)
        except BlockingIOError:
            return
        except (OSError, EOFError) as error:
            # Its process has ended, which the exchange tells better; or there is no room here.
            del self._visitors[rank]
            self._selector.unregister(sock)
            sock.close()
            if isinstance(error, EOFError) and str(error):
                raise _nothing_from(self._party, rank, str(error)) from None
            return
        self._selector.unregister(sock)

    def _absent(self, deadline: Deadline, refusals: Sequence[str]) -> errors.TransportError:
        missing = [rank for rank in self._party.ranks[1:] if rank not in self.brought]
        also = "; turned away: " + "; ".join(refusals) if refusals else ""
        return errors.TransportError(
            f"{self._party.who(self._party.rank)} waited {deadline.seconds:.3g} s in vain for "
            f"connections from {list_ranks(missing)}{also}",
            ranks=missing,
            operation="init",
        )


def _visit(
    party: Party, hub_door: str, own: Sequence[int], deadline: Deadline, check: Check
) -> Found:
    found: dict[int, list[int]] = {}
    others = [rank for rank in party.ranks if rank != party.rank]
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: close_all(fd for fds in found.values() for fd in fds))
        with _knock(party, hub_door, deadline, check) as sock:
            _send(sock, own, deadline, check)
            for ranks in _messages(others):
                _await(sock, select.POLLIN, deadline, check)
                try:
                    descriptors = _receive(sock, DESCRIPTORS * len(ranks))
                except (OSError, EOFError) as error:
                    _listen(check)
                    reason = str(error) or "it hung up"
                    raise _nothing_from(party, party.hub, reason) from None
                for at, rank in enumerate(ranks):
                    found[rank] = descriptors[DESCRIPTORS * at : DESCRIPTORS * (at + 1)]
        undo.pop_all()
    return found


def _knock(party: Party, door: str, deadline: Deadline, check: Check) -> socket.socket:
    """A connection on which the hub has admitted this rank; non-blocking."""
    claim = Claim(Purpose.SHM, party.rank, party.hub)
    reason = "no answer"
    while not deadline.passed():
        sock = end_with_process(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            sock.settimeout(max(deadline.remaining(), 0.001))
            sock.connect(door)
            ask(sock, party.key, party.scope, claim, deadline.within(STRANGER_S))
        except (ConnectionRefusedError, HandshakeError) as error:
            sock.close()
            reason = str(getattr(error, "strerror", None) or error)
            break
        except (OSError, EOFError) as error:
            # A full backlog, or drowned by strangers: ask again.
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
    _listen(check)
    raise errors.TransportError(
        f"{party.who(party.rank)} cannot reach {party.who(party.hub)} over shm: its unix socket: "
        f"{reason}",
        rank=party.hub,
        operation="init",
    )


def _listen(check: Check) -> None:
    """Perhaps the other end has left because joining has failed elsewhere: then that is the news,
    and the word of it may be a moment behind."""
    time.sleep(_CHECK_S)
    check()


def _messages(ranks: Sequence[int]) -> list[Sequence[int]]:
    """Whose descriptors travel together."""
    step = _RANKS_PER_MESSAGE
    return [ranks[at : at + step] for at in range(0, len(ranks), step)]


def _send(
    sock: socket.socket, descriptors: Sequence[int], deadline: Deadline, check: Check
) -> None:
    while True:
        try:
            socket.send_fds(sock, [_BYTE], descriptors)
        except OSError as error:
            # Too many are on their way to ranks that have not taken them yet.
            if error.errno not in (errno.ETOOMANYREFS, errno.EAGAIN) or deadline.passed():
                raise
            check()
            time.sleep(_PAUSE_S)
        else:
            return


def _receive(sock: socket.socket, count: int) -> list[int]:
    """Raises EOFError at the end, with a text where descriptors were lost; OSError."""
    data, descriptors, flags, _ = socket.recv_fds(sock, 1, count, socket.MSG_CMSG_CLOEXEC)
    if data == _BYTE and len(descriptors) == count and not flags & socket.MSG_CTRUNC:
        return descriptors
    close_all(descriptors)
    raise EOFError("some of its descriptors were lost" if data else "")


def _await(sock: socket.socket, events: int, deadline: Deadline, check: Check) -> None:
    poller = select.poll()  # select() knows no descriptor above 1023
    poller.register(sock, events)
    while not poller.poll(min(_CHECK_S, deadline.remaining()) * 1e3):
        check()
        if deadline.passed():
            return  # what is read next says so


def _nothing_from(party: Party, rank: int, reason: str) -> errors.TransportError:
    return errors.TransportError(
        f"rank {party.rank} got no shared memory from {party.who(rank)}: {reason}; is the limit of "
        "open files reached (ulimit -n)?",
        rank=rank,
        operation="init",
    )
