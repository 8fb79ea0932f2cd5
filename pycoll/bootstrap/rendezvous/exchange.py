"""The exchange that joining needs: an all_gather of bytes between ranks that are not connected yet.

``StoreExchange`` (store.py) works over sockets, ``TorchStoreExchange`` (torch_store.py) over a
key-value store of torch, and ``CallableExchange`` (callable_exchange.py) over a function of the
program. This module has the others: between threads of one process, over an existing communicator,
and over MPI.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.rendezvous.frames import list_ranks

#: Seconds between two polls of a state that has no notification.
POLL_S = 0.002


class Exchange(Protocol):
    """``all_gather`` raises pycoll's errors, and TimeoutError at the exchange's own deadline.

    ``secret``: bytes that only the ranks know beforehand, or b"" if the exchange itself keeps other
    processes out. ``brief``: no other ranks take part in the rounds, so the ranks may skip a round
    that all of them know to be needless. The owner calls ``close`` at the end, or ``abandon`` if
    this rank failed.
    """

    rank: int
    size: int
    secret: bytes
    brief: bool

    def all_gather(self, blob: bytes) -> list[bytes]:
        """Return the blobs of all ranks in rank order. Every rank calls it equally often."""

    def alarm(self, text: str) -> None:
        """Tell the other ranks at once, if the exchange can, that this rank failed.

        ``text`` names this rank. The rank still takes part in the rounds.
        """

    def check(self) -> None:
        """Raise if the exchange knows that another rank failed. Never waits."""

    def close(self) -> None:
        """Release everything after the last round."""

    def abandon(self) -> None:
        """Release everything at once; the other ranks must not wait for this rank."""


class _Lasting:
    """Base of exchanges that own no resources and get no news between rounds."""

    brief = True

    def alarm(self, text: str) -> None:
        """Do nothing: the exchange cannot tell the other ranks."""

    def check(self) -> None:
        """Do nothing: the exchange gets no news."""

    def close(self) -> None:
        """Do nothing: the exchange owns nothing."""

    def abandon(self) -> None:
        """Do nothing: the other ranks fail at their deadline."""


class SoloExchange(_Lasting):
    """The exchange of a world of one rank."""

    rank = 0
    size = 1
    secret = b""

    def all_gather(self, blob: bytes) -> list[bytes]:
        """Return the blob itself."""
        return [blob]


class _Board:
    """The state that the threads of one set of MemoryExchange objects share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.failed: list[tuple[type[errors.PycollError], int, str]] = []


class MemoryExchange(_Lasting):
    """An exchange between ranks that are threads of this process. ``make`` makes a set of them."""

    secret = b""

    def __init__(self, board: _Board, rank: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = board.size
        self._board = board
        self._deadline = deadline
        self._round = 0

    @classmethod
    def make(cls, size: int, deadline: Deadline) -> list[MemoryExchange]:
        """Make one exchange per rank, each for one thread."""
        board = _Board(size)
        return [cls(board, rank, deadline) for rank in range(size)]

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange. PeerLostError if another rank broke off."""
        board, number = self._board, self._round
        self._round += 1
        with board.changed:
            blobs = board.rounds.setdefault(number, {})
            blobs[self.rank] = blob
            board.changed.notify_all()
            board.changed.wait_for(
                lambda: len(blobs) == self.size or board.failed, self._deadline.remaining()
            )
            if len(blobs) < self.size:
                raise self._incomplete(sorted(set(range(self.size)) - set(blobs)))
            return [blobs[rank] for rank in range(self.size)]

    def _incomplete(self, missing: list[int]) -> errors.PycollError:
        self.check()
        return errors.TimeoutError(
            f"init waited {self._deadline.seconds:.3g} s for {list_ranks(missing)}",
            ranks=missing,
            operation="init",
        )

    def abandon(self) -> None:
        """Wake the others: they raise PeerLostError."""
        text = f"rank {self.rank} broke off while the ranks were joining"
        self._tell(errors.PeerLostError, text)

    def alarm(self, text: str) -> None:
        """Wake the others: they raise TransportError."""
        self._tell(errors.TransportError, text)

    def check(self) -> None:
        """Raise the error of the rank that failed first."""
        if self._board.failed:
            kind, rank, text = self._board.failed[0]
            raise kind(text, rank=rank, ranks=[rank], operation="init")

    def _tell(self, kind: type[errors.PycollError], text: str) -> None:
        with self._board.changed:
            self._board.failed.append((kind, self.rank, text))
            self._board.changed.notify_all()


class ParentExchange(_Lasting):
    """An exchange between some ranks of an existing communicator, the parent.

    ``parent_gather`` gathers over the whole parent. Every rank of the parent takes part in every
    round, with its own group or through ``sit_out``. ``members`` are parent ranks in the new order.
    Deadlines are the parent's.
    """

    secret = b""
    brief = False

    def __init__(
        self,
        parent_gather: Callable[[bytes], Sequence[bytes]],
        members: Sequence[int],
        rank: int,
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self._gather = parent_gather
        self._members = tuple(members)

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange. Raises what the parent raises."""
        blobs = self._gather(blob)
        return [blobs[member] for member in self._members]


#: Communicators of mpi4py over which an attempt timed out.
_unfinished: list[Any] = []


class MpiExchange(_Lasting):
    """An exchange over an mpi4py communicator, with non-blocking calls so that it has a deadline.

    MPI cannot cancel a gather that has begun, and it matches the gathers of ranks by their order.
    So after an attempt that timed out, the constructor refuses the same communicator:
    InvalidArgumentError.
    """

    secret = b""

    def __init__(self, comm: Any, deadline: Deadline) -> None:
        self.rank = int(comm.Get_rank())
        self.size = int(comm.Get_size())
        self._comm = comm
        self._deadline = deadline
        if any(one == comm for one in _unfinished):
            raise errors.InvalidArgumentError(
                "comm= still has a gather under way, of an attempt to join that timed out, and MPI "
                "cannot take it back: the next attempt needs another communicator, for example a "
                "comm.Dup() that all ranks made beforehand",
                operation="init",
            )

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange. MPI cannot tell which rank is missing."""
        byte = importlib.import_module("mpi4py.MPI").BYTE
        lengths = bytearray(8 * self.size)
        mine = bytearray(len(blob).to_bytes(8, "little"))
        self._wait(self._comm.Iallgather([mine, byte], [lengths, byte]))
        counts = [int.from_bytes(lengths[8 * r : 8 * r + 8], "little") for r in range(self.size)]
        starts = [sum(counts[:r]) for r in range(self.size)]
        data = bytearray(sum(counts))
        self._wait(self._comm.Iallgatherv([bytearray(blob), byte], [data, (counts, starts), byte]))
        return [bytes(data[s : s + c]) for s, c in zip(starts, counts, strict=True)]

    def _wait(self, request: Any) -> None:
        while not request.Test():
            if self._deadline.passed():
                _unfinished.append(self._comm)
                raise errors.TimeoutError(
                    f"init waited {self._deadline.seconds:.3g} s in the gather over comm=: "
                    f"some of its {self.size} ranks did not call pycoll.init(comm=...)",
                    operation="init",
                )
            time.sleep(POLL_S)
