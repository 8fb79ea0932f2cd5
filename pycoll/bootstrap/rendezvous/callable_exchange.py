"""An exchange over a function of the program that gathers bytes: ``pycoll.init(all_gather=)``.

Each entry carries a head with the rank, the size, the round and a checksum. Every rank checks the
heads of all entries, so a function that breaks its contract raises an error that names the entry.

The function may block for ever, so a thread of its own calls it and the rank waits until its
deadline. Python cannot end that thread: it ends when the function returns, or with the process.
"""

from __future__ import annotations

import contextlib
import contextvars
import queue
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline

#: Magic, kind, round, rank, size, checksum of the rest.
_HEAD = struct.Struct("<7sBIIII")
_MAGIC = b"pycoll\1"
_BLOB, _FAILURE = 0, 1
#: A rank that found a wrong reply spends at most this long on telling the others.
_TELLING_S = 1.0

#: Callers whose function had not returned when their attempt ended.
_unfinished: list[_Caller] = []


class _Entry(NamedTuple):
    """One rank's bytes of one round, parsed."""

    kind: int
    round: int
    rank: int
    size: int
    blob: bytes

    def to_bytes(self) -> bytes:
        check = zlib.crc32(self.blob)
        return _HEAD.pack(_MAGIC, self.kind, self.round, self.rank, self.size, check) + self.blob

    @classmethod
    def from_bytes(cls, data: bytes) -> _Entry | None:
        """Return None for bytes that no rank sent."""
        if len(data) < _HEAD.size:
            return None
        magic, kind, number, rank, size, check = _HEAD.unpack_from(data)
        blob = data[_HEAD.size :]
        if magic != _MAGIC or zlib.crc32(blob) != check:
            return None
        return cls(kind, number, rank, size, blob)


class _Caller:
    """A thread that calls the function, always the same thread and one call at a time."""

    def __init__(self, function: Callable[[bytes], Any]) -> None:
        self.function = function
        self._sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._got: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="pycoll-all-gather", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            raise errors.TransportError(
                f"the thread that calls all_gather cannot start ({error}): raise the limit "
                "(ulimit -u)",
                operation="init",
            ) from None

    def call(self, sent: bytes, deadline: Deadline) -> Any:
        """Return the function's result, or raise its exception. Raises queue.Empty at the deadline;
        the function still runs then, and ``call`` must not be used again."""
        self._sent.put(sent)
        result, error = self._got.get(timeout=deadline.remaining())
        if error is not None:
            raise error
        return result

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self, wait_s: float) -> None:
        """End the thread after the call under way, and wait for it for at most ``wait_s``."""
        self._sent.put(None)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (sent := self._sent.get()) is not None:
            try:
                self._got.put((self.function(sent), None))
            except BaseException as error:
                self._got.put((None, error))


class CallableExchange:
    """One attempt of a rank to join over a function; see exchange.Exchange. One thread uses it.

    The constructor raises InvalidArgumentError if an attempt that timed out left a call of the same
    function under way: that call would take part in the rounds of this attempt.
    """

    brief = True

    def __init__(
        self, all_gather: Callable[[bytes], Any], rank: int, size: int, deadline: Deadline
    ) -> None:
        self.rank = rank
        self.size = size
        self.secret = b""
        self._deadline = deadline
        self._round = 0
        _unfinished[:] = [caller for caller in _unfinished if caller.is_running()]
        if any(caller.function == all_gather for caller in _unfinished):
            raise errors.InvalidArgumentError(
                "all_gather= still runs a call of an attempt to join that timed out: give the next "
                "attempt another function, over another group of the engine",
                operation="init",
            )
        self._caller: _Caller | None = _Caller(all_gather)

    def all_gather(self, blob: bytes) -> list[bytes]:
        """See Exchange. Raises InvalidArgumentError for a wrong reply, TransportError for an
        exception of the function or a failure of another rank, TimeoutError at the deadline."""
        number = self._round
        reply = self._call(_BLOB, blob, self._deadline)
        try:
            return self._check_reply(reply, number, blob)
        except errors.InvalidArgumentError as error:
            self._tell(str(error))
            raise

    def alarm(self, text: str) -> None:
        """Before the first round, tell the others there, which ends the attempt for all. Later the
        rank tells them in its next round."""
        if self._round == 0:
            self._tell(text)

    def check(self) -> None:
        """Do nothing: the exchange gets no news between rounds."""

    def close(self) -> None:
        """End the thread."""
        self._end_caller(_TELLING_S)

    def abandon(self) -> None:
        """End the thread. The other ranks fail in their next round, at their deadline."""
        self.close()

    def _call(self, kind: int, blob: bytes, deadline: Deadline) -> Any:
        number, self._round = self._round, self._round + 1
        if self._caller is None:
            raise errors.TransportError("the exchange over all_gather= is closed", operation="init")
        sent = _Entry(kind, number, self.rank, self.size, blob).to_bytes()
        try:
            return self._caller.call(sent, deadline)
        except queue.Empty:
            self._end_caller(0.0)
            raise errors.TimeoutError(
                f"init waited {self._deadline.seconds:.3g} s: all_gather has not returned in "
                f"{self._place(number)}, so one of the other ranks did not call it or failed "
                "(PYCOLL_INIT_TIMEOUT_S sets the limit)",
                operation="init",
            ) from None
        except errors.PycollError:
            raise
        except Exception as error:
            raise errors.TransportError(
                f"all_gather raised {type(error).__name__} in {self._place(number)}: {error}",
                rank=self.rank,
                operation="init",
            ) from error

    def _end_caller(self, wait_s: float) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.close(wait_s)
            if caller.is_running():
                _unfinished.append(caller)

    def _tell(self, text: str) -> None:
        """Send the failure in the next round, so that no rank waits for its deadline there."""
        with contextlib.suppress(errors.PycollError):
            self._call(_FAILURE, text.encode(), self._deadline.within(_TELLING_S))

    def _check_reply(self, reply: Any, number: int, sent: bytes) -> list[bytes]:
        if not isinstance(reply, list | tuple):
            raise self._wrong(number, f"returned a {type(reply).__name__}")
        for place, one in enumerate(reply):
            if not isinstance(one, bytes | bytearray | memoryview):
                raise self._wrong(number, f"returned a {type(one).__name__} at [{place}]")
        entries = [_Entry.from_bytes(bytes(one)) for one in reply]
        self._look_for_failures(entries)
        if len(entries) != self.size:
            raise self._wrong(number, f"returned {len(entries)} entries")
        for rank, entry in enumerate(entries):
            self._check_entry(number, rank, entry)
        found = [entry.blob for entry in entries if entry is not None]
        if found[self.rank] != sent:
            raise self._wrong(number, f"returned [{self.rank}] with other bytes than it was given")
        return found

    def _look_for_failures(self, entries: list[_Entry | None]) -> None:
        for entry in entries:
            if entry is not None and entry.kind == _FAILURE:
                raise errors.TransportError(
                    f"rank {entry.rank} broke off while the ranks were joining: "
                    f"{entry.blob.decode(errors='replace')}",
                    rank=entry.rank,
                    ranks=[entry.rank],
                    operation="init",
                )
        for entry in entries:
            if entry is not None and entry.size != self.size:
                raise errors.InvalidArgumentError(
                    f"rank {entry.rank} joins with size={entry.size} and rank {self.rank} with "
                    f"size={self.size}: give all ranks the same size",
                    rank=entry.rank,
                    ranks=[entry.rank],
                    operation="init",
                )

    def _check_entry(self, number: int, rank: int, entry: _Entry | None) -> None:
        if entry is None:
            raise self._wrong(number, f"returned [{rank}] with bytes that no rank gave it")
        if entry.rank != rank:
            raise self._wrong(
                number,
                f"returned the bytes of rank {entry.rank} at [{rank}], so either the order is not "
                f"that of ranks or two processes claim rank {entry.rank}",
            )
        if entry.round != number:
            raise self._wrong(
                number, f"returned [{rank}] of round {entry.round + 1} of rank {rank}"
            )

    def _wrong(self, number: int, what: str) -> errors.InvalidArgumentError:
        return errors.InvalidArgumentError(
            f"all_gather {what} in {self._place(number)}: expected a list of {self.size} bytes, "
            "one per rank in rank order, as the ranks gave them in this call",
            rank=self.rank,
            operation="init",
        )

    def _place(self, number: int) -> str:
        return f"round {number + 1} of joining on rank {self.rank} of {self.size}"
