"""What joining needs from the world: every rank gives some bytes and gets everyone's.

``StoreExchange`` (store.py) does it over sockets; here are the ways that stand on something else:
threads of one process, a communicator that exists already, MPI. torch_store.py has torch's.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.frames import list_ranks

#: Between two looks at what nobody tells of.
POLL_S = 0.002


class Exchange(Protocol):
    """``all_gather`` raises pycoll's errors, and TimeoutError at the deadline it was made with.

    ``secret``: bytes that only the ranks know beforehand, or b"" where the way itself keeps others
    out. ``brief``: rounds that all these ranks know to be needless may be left out, since nobody
    else takes part. ``close`` is called on every path; ``abandon`` instead if this rank broke off.
    """

    rank: int
    size: int
    secret: bytes
    brief: bool

    def all_gather(self, blob: bytes) -> list[bytes]:
        """The blobs of all ranks in rank order; called equally often by every rank."""

    def alarm(self, text: str) -> None:
        """Tell the others, if there is a way, that this rank failed, in words that name it.

        It still takes part in the rounds.
        """

    def check(self) -> None:
        """Raise if it is known already that another rank failed. Never waits."""

    def close(self) -> None:
        """Release everything; the ranks have finished."""

    def abandon(self) -> None:
        """Release everything at once; the others must not wait for this rank."""


class _Lasting:
    """An exchange that holds nothing of its own and knows nothing between rounds."""

    brief = True

    def alarm(self, text: str) -> None:
        """No way to tell."""

    def check(self) -> None:
        """Nothing is known."""

    def close(self) -> None:
        """Nothing to release."""

    def abandon(self) -> None:
        """Nothing to release; the others find out at their deadline."""


class SoloExchange(_Lasting):
    """A world of one."""

    rank = 0
    size = 1
    secret = b""

    def all_gather(self, blob: bytes) -> list[bytes]:
        """The blob itself."""
        return [blob]


class _Board:
    """What the threads of a MemoryExchange share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, bytes]] = {}
        self.failed: list[tuple[type[errors.PycollError], int, str]] = []


class MemoryExchange(_Lasting):
    """Ranks are threads of this process. Made in sets by ``make``."""

    secret = b""

    def __init__(self, board: _Board, rank: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = board.size
        self._board = board
        self._deadline = deadline
        self._round = 0

    @classmethod
    def make(cls, size: int, deadline: Deadline) -> list[MemoryExchange]:
        """One exchange per rank, each for one thread."""
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
        """Raise what the first rank that failed has told."""
        if self._board.failed:
            kind, rank, text = self._board.failed[0]
            raise kind(text, rank=rank, ranks=[rank], operation="init")

    def _tell(self, kind: type[errors.PycollError], text: str) -> None:
        with self._board.changed:
            self._board.failed.append((kind, self.rank, text))
            self._board.changed.notify_all()


class ParentExchange(_Lasting):
    """Some ranks of an existing communicator form a new one.

    ``parent_gather`` gathers over the whole parent; each of its ranks takes part in every round,
    with whichever group it is in (or through ``sit_out``). ``members`` are parent ranks in the new
    order. Deadlines are the parent's.
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
    """Over an mpi4py communicator, with non-blocking calls so that a deadline can be kept.

    MPI cannot take back a gather that has begun, and matches the gathers of ranks by their order.
    So after an attempt that timed out the communicator serves no other one: InvalidArgumentError.
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
                "cannot take it back: the next attempt needs another communicator, such as a "
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
