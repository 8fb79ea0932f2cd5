"""The exchanges of collectives that are composed: agreement, bytes to owners, bytes from owners.

A two-shot all_reduce cuts the values into parts, each of which has an owner:

    to_owners      each owner gets the codes of its part from all ranks, and folds them
    from_owners    all ranks get the codes of the folded parts

Each of them begins with a message that has one length on all ranks. It has a head, which tells the
lengths of codes and compares the arguments of the ranks, and space for the codes themselves. Codes
that exceed the space follow in a second message, whose lengths all ranks then know.

A rank whose codec raises reports that in the next of these exchanges, so all ranks raise.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from pycoll.arrays.rows import shares
from pycoll.compress.codec import Array
from pycoll.cost.codec_costs import NUMBER_BYTES, inline_bytes
from pycoll.errors import (
    InvalidArgumentError,
    MismatchError,
    PycollError,
    ReductionError,
    odd_ranks,
)

#: The bytes of a description that an error shows.
_TEXT_BYTES = 200
#: The codes of a rank that sends none.
NO_CODES = np.empty(0, np.uint8)


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
        with name_errors(self._name):
            received = self._last.wait(timeout)
            with self._lock:
                if self._finish is not None:
                    self._result = self._finish(received)
                    self._finish = None
                return self._result


class _EndedWork:
    """The Work of an exchange that has no second message."""

    def __init__(self) -> None:
        self._ended_s = time.perf_counter()

    def done(self) -> bool:
        return True

    def ended_s(self) -> float:
        return self._ended_s

    def wait(self, timeout: float | None = None) -> Array:
        return NO_CODES


@contextlib.contextmanager
def name_errors(operation: str) -> Iterator[None]:
    """Put the name of the user's call into errors of the exchanges."""
    try:
        yield
    except PycollError as error:
        error.operation = operation
        raise


def owned_parts(count: int, size: int) -> list[slice]:
    """Return the part of ``count`` values that each rank owns."""
    ends = np.cumsum([0, *shares(count, size)]).tolist()
    return [slice(ends[rank], ends[rank + 1]) for rank in range(size)]


def agree(comm: Any, name: str, facts: Sequence[Any], lengths: Sequence[int] = ()) -> Array:
    """Compare ``facts``, and return the ``lengths`` of all ranks, a row each. Collective.

    All ranks pass equally many lengths. Raises MismatchError on all ranks where facts differ; it
    names the ranks that differ from most others. The communicator stays usable.
    """
    told = _describe(name, facts)
    rows = comm.all_gather(np.array([[_tag(told), *lengths]], np.int64), lengths=[1] * comm.size)
    _compare(comm, name, told, rows[:, 0].tolist())
    return rows[:, 1:]


def agree_first(comm: Any, name: str, facts: Sequence[Any]) -> None:
    """Compare ``facts`` by the message that begins ``to_owners``. Collective.

    So ranks that pass different codecs to one collective all begin with this message, and raise
    MismatchError as in ``agree``.
    """
    to_owners(comm, name, facts, Encoded(lambda: ([NO_CODES] * comm.size, 0)))


class Encoded:
    """The codes to send, or the error that the codec raised, which other ranks receive instead.

    ``codes``: those of one owner's part, or a list with those for each rank.
    """

    def __init__(self, make: Callable[[], tuple[Any, int]]) -> None:
        """Run ``make``, which returns codes and the form that they have."""
        self.error: Exception | None = None
        self.codes: Any = None
        self.form = 0
        try:
            self.codes, self.form = make()
        except Exception as error:
            self.error = error


def to_owners(comm: Any, name: str, facts: Sequence[Any], mine: Encoded) -> list[Array]:
    """Send ``mine.codes[r]`` to each rank r, and return the codes from each rank. Collective.

    It compares ``facts`` before, and raises as ``agree`` does. Raises the error of ``mine``; on
    other ranks ReductionError that names the rank whose codec raised.
    """
    told, space = _describe(name, facts), inline_bytes(comm.size)
    codes = [NO_CODES] * comm.size if mine.error is not None else mine.codes
    head = np.array([_tag(told), mine.error is not None, *map(len, codes)], np.int64)
    received = comm.all_to_all(np.stack([_slot(head, one, space) for one in codes]))
    heads = _heads(received, len(head))
    _compare(comm, name, told, heads[:, 0].tolist())
    _raise_failures(mine, [(rank, -1) for rank in np.flatnonzero(heads[:, 1]).tolist()], name)
    lengths = heads[:, 2:]
    sent_here = lengths[:, comm.rank].tolist()
    begin = head.nbytes
    firsts = [line[begin : begin + n] for line, n in zip(received, sent_here, strict=True)]
    rests = np.maximum(lengths - space, 0)
    if not rests.any():
        return firsts
    later = comm.all_to_all(
        np.concatenate([np.asarray(one, np.uint8)[space:] for one in codes]), lengths=rests.tolist()
    )
    cuts = np.cumsum(rests[:, comm.rank])[:-1]
    return [_concatenate(*both) for both in zip(firsts, np.split(later, cuts), strict=True)]


@contextlib.contextmanager
def codes_of(rank: int) -> Iterator[None]:
    """Raise an error of the block as ReductionError: codes of ``rank`` do not decode."""
    try:
        yield
    except InvalidArgumentError as error:
        raise ReductionError(
            f"rank {rank} sent codes that do not decode: {error}", rank=rank, ranks=[rank]
        ) from None


class Replies:
    """The replies of all owners. ``work``: the Work of their second message; ``forms``: of each."""

    def __init__(self, work: Any, forms: list[int], firsts: list[Array], rests: list[int]) -> None:
        self.work, self.forms = work, forms
        self._firsts, self._cuts = firsts, np.cumsum(rests)[:-1]

    def codes(self, received: Array) -> list[Array]:
        """Return the codes of each owner, from what ``work.wait()`` returns."""
        later = np.split(received, self._cuts)
        return [_concatenate(*both) for both in zip(self._firsts, later, strict=True)]


def from_owners(comm: Any, mine: Encoded, name: str) -> Replies:
    """Start to send this owner's codes to all ranks. Collective; it waits for the first message.

    Raises the error of ``mine``; on other ranks ReductionError that names the rank at fault: the
    sender of codes that do not decode, or the owner whose codec raised.
    """
    failed, space = mine.error is not None, inline_bytes(comm.size)
    codes = NO_CODES if failed else mine.codes
    # The rank whose codes do not decode.
    sender = mine.error.rank if isinstance(mine.error, ReductionError) else None
    head = np.array([len(codes), mine.form, failed, -1 if sender is None else sender], np.int64)
    received = comm.all_gather(_slot(head, codes, space)[None], lengths=[1] * comm.size)
    rows = _heads(received, len(head)).tolist()
    _raise_failures(mine, [(owner, row[3]) for owner, row in enumerate(rows) if row[2]], name)
    begin, lengths = head.nbytes, [row[0] for row in rows]
    firsts = [line[begin : begin + n] for line, n in zip(received, lengths, strict=True)]
    rests = [max(n - space, 0) for n in lengths]
    work: Any = _EndedWork()
    if any(rests):
        rest = np.ascontiguousarray(codes[space:], np.uint8)
        work = comm.all_gather(rest, lengths=rests, async_op=True)
    return Replies(work, [row[1] for row in rows], firsts, rests)


def _raise_failures(mine: Encoded, failed: list[tuple[int, int]], name: str) -> None:
    """Raise the error of this rank, else one that names the ranks at fault; none without errors.

    ``failed``: the ranks with errors, each with the rank that has sent it wrong codes, or -1.
    """
    if mine.error is not None:
        raise mine.error
    if not failed:
        return
    owner, at_fault = failed[0]
    why = f"rank {at_fault} sent codes that do not decode: they reached rank {owner}"
    if at_fault < 0:
        why = f"the codec failed on rank {owner}, which raised an exception of its own"
    ranks = sorted({one if one >= 0 else rank for rank, one in failed})
    rank = owner if at_fault < 0 else at_fault
    raise ReductionError(why, rank=rank, ranks=ranks, operation=name)


def _slot(head: Array, codes: Array, space: int) -> Array:
    """Return a head and the first codes behind it, a single axis of one length on all ranks."""
    slot = np.zeros(head.nbytes + space, np.uint8)
    slot[: head.nbytes] = head.view(np.uint8)
    first = codes[:space]
    slot[head.nbytes : head.nbytes + len(first)] = first
    return slot


def _heads(slots: Array, numbers: int) -> Array:
    """Return the heads of some slots, a row of so many numbers each."""
    heads = np.ascontiguousarray(slots[:, : NUMBER_BYTES * numbers])
    return heads.view(np.int64)


def _concatenate(first: Array, later: Array) -> Array:
    return np.concatenate([first, later]) if len(later) else first


def _describe(name: str, facts: Sequence[Any]) -> bytes:
    return f"{name} of {', '.join(map(str, facts))}".encode()


def _tag(told: bytes) -> int:
    digest = hashlib.blake2b(told, digest_size=NUMBER_BYTES).digest()
    return int.from_bytes(digest, "little", signed=True)


def _compare(comm: Any, name: str, told: bytes, tags: Sequence[int]) -> None:
    """Raise MismatchError unless the tags of all ranks are equal. Collective where they are not."""
    if all(tag == tags[0] for tag in tags):
        return
    line = np.zeros((1, _TEXT_BYTES), np.uint8)
    shown = np.frombuffer(told[:_TEXT_BYTES], np.uint8)
    line[0, : len(shown)] = shown
    lines = comm.all_gather(line, lengths=[1] * comm.size)
    texts = [bytes(one).rstrip(b"\0").decode(errors="replace") for one in lines]
    first, odd = odd_ranks(dict(enumerate(tags)))
    raise MismatchError(
        f"ranks called with different arguments: rank {odd[0]} called {texts[odd[0]]}; rank "
        f"{first} called {texts[first]}",
        rank=odd[0],
        ranks=odd,
        operation=name,
    )
