"""The exchanges of collectives that are composed: agreement, bytes to owners, bytes from owners.

A two-shot all_reduce cuts the values into one part per rank, its owner:

    agree          all ranks pass the same codec and arrays, and how many bytes go to each owner
    to_owners      each owner gets the codes of its part from all ranks, and folds them
    from_owners    all ranks get the codes of the folded parts

A rank whose codec raises tells the others with the next of these exchanges, so all ranks raise.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pycoll.arrays.rows import shares
from pycoll.compress.codec import Array
from pycoll.errors import InvalidArgumentError, MismatchError, PycollError, ReductionError

#: The bytes of a description that an error shows.
_TEXT_BYTES = 200


class ComposedWork:
    """The Work of a call whose last exchange is still under way. Threads: any."""

    def __init__(self, last: Any, finish: Callable[[Any], Any], name: str) -> None:
        self._last, self._name = last, name
        self._finish: Callable[[Any], Any] | None = finish
        self._result: Any = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Return whether the last exchange has ended."""
        return bool(self._last.done())

    def ended_s(self) -> float | None:
        """Return when the last exchange ended, as ``Work.ended_s``."""
        ended: float | None = self._last.ended_s()
        return ended

    def wait(self, timeout: float | None = None) -> Any:
        """Wait and return the result, as ``Work.wait``."""
        with named(self._name):
            received = self._last.wait(timeout)
            with self._lock:
                if self._finish is not None:
                    self._result = self._finish(received)
                    self._finish = None
                return self._result


@contextlib.contextmanager
def named(operation: str) -> Iterator[None]:
    """Put the name of the user's call into errors of the exchanges."""
    try:
        yield
    except PycollError as error:
        error.operation = operation
        raise


def owned(count: int, size: int) -> list[slice]:
    """Return the part of ``count`` values that each rank owns."""
    ends = np.cumsum([0, *shares(count, size)]).tolist()
    return [slice(ends[rank], ends[rank + 1]) for rank in range(size)]


def agree(comm: Any, name: str, facts: Sequence[Any], lengths: Sequence[int] = ()) -> Array:
    """Compare ``facts``, and return the ``lengths`` of all ranks, a row each. Collective.

    All ranks pass equally many lengths. Raises MismatchError on all ranks where facts differ; it
    names the ranks that differ from most others. The communicator stays usable.
    """
    text = f"{name} of {', '.join(map(str, facts))}"
    told = text.encode()
    digest = hashlib.blake2b(told, digest_size=8).digest()
    mine = np.array([[int.from_bytes(digest, "little", signed=True), *lengths]], np.int64)
    rows = comm.all_gather(mine, lengths=[1] * comm.size)
    if (rows[:, 0] == rows[0, 0]).all():
        return rows[:, 1:]
    line = np.zeros((1, _TEXT_BYTES), np.uint8)
    shown = np.frombuffer(told[:_TEXT_BYTES], np.uint8)
    line[0, : len(shown)] = shown
    lines = comm.all_gather(line, lengths=[1] * comm.size)
    texts = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in lines]
    tags = rows[:, 0].tolist()
    # Of equally frequent descriptions, that of the lowest rank counts.
    usual = Counter(tags).most_common(1)[0][0]
    odd = [rank for rank, one in enumerate(tags) if one != usual]
    first = tags.index(usual)
    raise MismatchError(
        f"ranks called with different arguments: rank {odd[0]} called {texts[odd[0]]}; rank "
        f"{first} called {texts[first]}",
        rank=odd[0],
        ranks=odd,
        operation=name,
    )


def to_owners(comm: Any, codes: Sequence[Array], lengths: Array) -> list[Array]:
    """Send ``codes[r]`` to each rank r, and return what each rank has sent here. Collective.

    ``lengths``: the bytes that each rank (row) sends to each rank (column).
    """
    sent = np.concatenate([np.asarray(one, np.uint8) for one in codes])
    received = comm.all_to_all(sent, [len(one) for one in codes])
    ends = np.cumsum([0, *lengths[:, comm.rank]]).tolist()
    return [received[ends[rank] : ends[rank + 1]] for rank in range(comm.size)]


@contextlib.contextmanager
def codes_of(rank: int) -> Iterator[None]:
    """Raise ReductionError that names the rank where codes of it do not decode."""
    try:
        yield
    except InvalidArgumentError as error:
        raise ReductionError(
            f"rank {rank} sent codes that do not decode: {error}", rank=rank, ranks=[rank]
        ) from None


class Reply:
    """The codes of this owner's part, or the error that it met while it made them."""

    def __init__(self, make: Callable[[], tuple[Array, int]]) -> None:
        """Run ``make``, which returns bytes and the form that they have."""
        self.error: Exception | None = None
        try:
            self.codes, self.form = make()
        except Exception as error:
            self.error, self.codes, self.form = error, np.empty(0, np.uint8), 0


def from_owners(comm: Any, reply: Reply, name: str) -> tuple[Any, list[tuple[slice, int]]]:
    """Start to send this owner's reply to all ranks. Collective; it waits for the lengths.

    Returns the Work of all bytes, and the place and form of each owner's codes among them. Raises
    the error of ``reply``; on ranks without one, ReductionError that names the rank at fault: that
    which sent codes that do not decode, or the owner whose codec raised.
    """
    failed = reply.error is not None
    # The rank whose codes do not decode.
    sender = reply.error.rank if isinstance(reply.error, ReductionError) else None
    told = [len(reply.codes), reply.form, failed, -1 if sender is None else sender]
    rows = comm.all_gather(np.array([told], np.int64), lengths=[1] * comm.size).tolist()
    if reply.error is not None:
        raise reply.error
    bad = [(owner, row[3]) for owner, row in enumerate(rows) if row[2]]
    if bad:
        owner, at_fault = bad[0]
        why = f"rank {at_fault} sent codes that do not decode: they reached rank {owner}"
        if at_fault < 0:
            why = f"the codec failed on rank {owner}, which raised an exception of its own"
        ranks = sorted({one if one >= 0 else rank for rank, one in bad})
        rank = owner if at_fault < 0 else at_fault
        raise ReductionError(why, rank=rank, ranks=ranks, operation=name)
    ends = np.cumsum([0, *(row[0] for row in rows)]).tolist()
    places = [(slice(ends[r], ends[r + 1]), rows[r][1]) for r in range(comm.size)]
    work = comm.all_gather(reply.codes, lengths=[row[0] for row in rows], async_op=True)
    return work, places
