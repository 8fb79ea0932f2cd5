"""Sub-communicators inside hosts: made over the parent, without any new connection.

Each rank makes its memory for the sub-communicator and sends the descriptors to the inboxes of the
other members. An inbox is the other end of a rank's lifeline, which only the ranks of the parent
hold, so no handshake is needed. An all_gather on the parent follows. After it every descriptor has
arrived, so the receivers take them without waiting. The all_gather also reports a rank that failed,
and it raises if a rank died.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from pycoll import errors
from pycoll.bootstrap.connect import as_error, judge
from pycoll.bootstrap.discovery.identity import Identity, shares_memory
from pycoll.bootstrap.local_rendezvous import (
    DESCRIPTORS,
    close_all,
    descriptors_of,
    of_thread,
)
from pycoll.bootstrap.recovery.post import Post
from pycoll.bootstrap.rendezvous.checked_rounds import facts_of

_Given = TypeVar("_Given")

#: Head of a message in an inbox: the number of the parent's split, the sender's rank in the parent.
_HEAD = struct.Struct("<QI")
#: Most descriptors in flight at once; twice as many where a rank is one step behind another. They
#: count against the limit of open files, which is seldom below 1024.
_UNDER_WAY_MAX = 384


class Parent(NamedTuple):
    """The parts of the parent communicator that a split uses.

    ``numbers`` gathers equally many integers from every rank, ``blobs`` gathers bytes. ``shm`` is
    the shm transport, None in a parent of one rank. ``split`` numbers the parent's splits from 1.
    ``key`` is known to the ranks of the parent only.
    """

    rank: int
    identities: Sequence[Identity]
    shm: Any
    numbers: Callable[[list[int]], Sequence[Sequence[int]]]
    blobs: Callable[[bytes], Sequence[bytes]]
    split: int
    key: bytes


def can_share(identities: Sequence[Identity], groups: Sequence[Sequence[int]]) -> bool:
    """Return whether the ranks of each group share memory."""
    return all(
        shares_memory(identities[group[0]], identities[rank]) for group in groups for rank in group
    )


def make_part(
    parent: Parent,
    members: Sequence[int],
    largest: int,
    make: Callable[[int, int], Any],
) -> tuple[list[Any], Post | None]:
    """Return the transports of this rank in its sub-communicator, and its mailbox for shrinking.

    Every rank of the parent calls.

    ``members`` are parent ranks in the new order, empty if this rank is in no sub-communicator.
    ``largest`` is the number of ranks of the largest one. If one member fails, all ranks of its
    sub-communicator raise its error. Raises also every error of the parent.
    """
    part = _Part(parent, members)
    try:
        part.attempt(part.open, make)
        lines: list[Sequence[int]] = []
        for offsets in _steps(len(parent.identities), largest):
            part.attempt(part.leave, offsets)
            lines += part.agree()
            part.attempt(part.take, offsets)
        lines += part.agree()
        if any(line[0] for line in lines):
            facts = {} if part.failure is None else {"error": str(part.failure)}
            texts = facts_of(parent.blobs(json.dumps(facts).encode()))
            judge([texts[member] for member in members], part.failure)
        post, part.post = part.post, None
        return [] if part.shm is None else [part.shm], post
    finally:
        part.close()


def _steps(ranks: int, largest: int) -> Iterator[range]:
    """Return the distances between sender and receiver that each step covers; all ranks compute
    the same steps."""
    each = max(1, _UNDER_WAY_MAX // (DESCRIPTORS * ranks))
    for first in range(1, largest, each):
        yield range(first, min(first + each, largest))


class _Part:
    """One rank's share of the work. ``failure`` is its error once it has failed."""

    def __init__(self, parent: Parent, members: Sequence[int]) -> None:
        self.shm: Any = None
        self.post: Post | None = None
        self.failure: errors.PycollError | None = None
        self._parent = parent
        self._members = members
        #: By parent rank: the numbers of the last ``agree``; initially no failure.
        self._lines: Sequence[Sequence[int]] = [[0]] * len(parent.identities)
        self._stash: dict[int, list[int]] = {}
        mine = parent.identities[parent.rank].process
        self._threads = {r for r in members if parent.identities[r].process == mine}

    def attempt(self, action: Callable[[_Given], None], given: _Given) -> None:
        """Run ``action`` unless this rank, or another member, has failed already."""
        if self.failure is not None or any(self._lines[member][0] for member in self._members):
            return
        try:
            action(given)
        except (errors.PycollError, OSError) as error:
            self.failure = as_error(error)
            self.shm = None

    def agree(self) -> Sequence[Sequence[int]]:
        """Gather from every rank: whether it has failed, its segment, its doorbell (or -1)."""
        if self.shm is None:
            mine = [self.failure is not None, -1, -1]
        else:
            mine = [False, self.shm.segment_fd(), self.shm.doorbell_fd()]
        self._lines = self._parent.numbers([int(number) for number in mine])
        return self._lines

    def open(self, make: Callable[[int, int], Any]) -> None:
        """Make this rank's memory and its mailbox."""
        if len(self._members) > 1:
            here = self._members.index(self._parent.rank)
            text = f"{self._parent.split} {list(self._members)}".encode()
            key = hmac.digest(self._parent.key, text, "sha256")
            self.post = Post(key, here, [self._parent.identities[one] for one in self._members])
            self.shm = make(here, len(self._members))

    def leave(self, offsets: range) -> None:
        """Send this rank's descriptors to the members at ``offsets`` to its right."""
        if self.shm is None:
            return
        head = _HEAD.pack(self._parent.split, self._parent.rank)
        own = descriptors_of(self.shm)
        for peer in self._at(offsets, 1):
            if peer in self._threads:
                continue
            with _borrow(self._parent.shm.liveness_fd(peer)) as lifeline:
                try:
                    socket.send_fds(lifeline, [head], own, socket.MSG_NOSIGNAL)
                except OSError as error:
                    raise self._delivery_error(peer, error) from None

    def take(self, offsets: range) -> None:
        """Take the descriptors of the members at ``offsets`` to its left and attach them."""
        if self.shm is None:
            return
        for peer in self._at(offsets, -1):
            identity = self._parent.identities[peer]
            if peer in self._threads:
                segment, doorbell = map(int, self._lines[peer][1:])
                found = of_thread(segment, doorbell)
            else:
                found = self._from(peer)
            self.shm.attach(self._members.index(peer), *found, identity.pid)

    def close(self) -> None:
        """Close the descriptors that were received and not attached, and what was not handed
        over."""
        for descriptors in self._stash.values():
            close_all(descriptors)
        if self.post is not None:
            self.post.close()
        self.shm = None

    def _at(self, offsets: range, direction: int) -> Iterator[int]:
        size = len(self._members)
        here = self._members.index(self._parent.rank)
        for offset in offsets:
            if offset < size:
                yield self._members[(here + direction * offset) % size]

    def _from(self, peer: int) -> list[int]:
        while peer not in self._stash:
            with _borrow(self._parent.shm.inbox_fd()) as inbox:
                try:
                    head, found, flags, _ = socket.recv_fds(
                        inbox, _HEAD.size, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                except BlockingIOError:
                    raise self._arrival_error(peer, "nothing came") from None
            split, sender = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, -1)
            if split != self._parent.split:
                close_all(found)  # they belong to an earlier split, which failed
            elif len(found) != DESCRIPTORS or flags & socket.MSG_CTRUNC:
                close_all(found)
                raise self._arrival_error(sender, "some of its descriptors were lost")
            elif sender in self._stash or sender not in self._members:
                close_all(found)
            else:
                self._stash[sender] = found
        return self._stash.pop(peer)

    def _label(self, rank: int) -> str:
        return f"rank {self._members.index(rank)} ({self._parent.identities[rank].name})"

    def _arrival_error(self, peer: int, reason: str) -> errors.TransportError:
        return errors.TransportError(
            f"{self._label(self._parent.rank)} got no shared memory from {self._label(peer)}: "
            f"{reason}; is the limit of open files reached (ulimit -n)?",
            rank=self._members.index(peer),
            operation="split",
        )

    def _delivery_error(self, peer: int, error: OSError) -> errors.TransportError:
        limited = error.errno in (errno.ETOOMANYREFS, errno.EAGAIN)
        advice = " (raise the limit of open files, ulimit -n)" if limited else ""
        return errors.TransportError(
            f"{self._label(self._parent.rank)} could not pass shared memory to "
            f"{self._label(peer)}: {error.strerror}{advice}",
            rank=self._members.index(peer),
            operation="split",
        )


@contextlib.contextmanager
def _borrow(fd: int) -> Iterator[socket.socket]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fd)
    try:
        yield sock
    finally:
        sock.detach()
