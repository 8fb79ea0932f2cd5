"""Python objects between ranks: pickled, with long buffers sent in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar, cast

from pycoll import _core
from pycoll.comm.operations import immediate, immediate_collective, nothing, salt
from pycoll.comm.pickled import Part, Parts, dump, dump_refusal, lengths_of, load, memory_for
from pycoll.comm.point_to_point import TAG_MAX, Messages, check_tag
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import DType

_T = TypeVar("_T")

#: Tags of internal messages, beyond those that a user's recv or probe can name.
_TAG_GATHER = TAG_MAX + 1
_TAG_SCATTER = TAG_MAX + 2
#: Numbers in the root's first broadcast; more numbers take a second broadcast.
_FIRST_NUMBERS = 7
_OBJECTS = salt("objects")


class Objects(Messages):
    """The operations on Python objects; one of the base classes of Communicator.

    Objects travel as pickles of protocol 5. NumPy arrays and other buffers of 64 KiB and more are
    not part of the pickle: the sender sends them in place, and the new object keeps the memory that
    the receiver received into. Lengths have 64 bits.

    **Unpickling runs code that the sender chooses.** The ranks of a job trust each other, because
    each has proved that it holds the secret of the job. Never send objects that came from elsewhere
    in this way.

    Errors: where one rank cannot pickle its object, all ranks raise InvalidArgumentError and the
    communicator stays usable. Where a rank cannot unpickle an object, only that rank raises the
    error. Inside a ``group()`` these calls raise InvalidArgumentError. Otherwise they raise the
    errors of collectives and messages, see Communicator.
    """

    @immediate_collective
    def broadcast_object(self, obj: _T = None, root: int = 0) -> _T:  # type: ignore[assignment]
        """Copy the root's object to every rank.

        ``obj``: on the root any object that pickle can serialise; on other ranks it is not used.
        ``root``: the sending rank, from 0 to size - 1, the same on all ranks.

        Returns ``obj`` itself on the root, and a copy on the other ranks. Unpickling runs code that
        the root chooses.

        Raises InvalidArgumentError on all ranks where the object cannot be pickled, and the errors
        of all operations, see Communicator.

        Cost: two broadcasts, and one more for each buffer of 64 KiB and more.

        >>> comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
        {'lr': 0.1}
        """
        root = self._check_rank(root, "root")
        mine = self._pickled_of(obj) if self.rank == root else None
        parts = self._broadcast_parts(mine, root)
        return obj if self.rank == root else load(parts)

    @immediate_collective
    def all_gather_object(self, obj: _T) -> list[_T]:
        """Collect the objects of all ranks on every rank.

        ``obj``: any object that pickle can serialise.

        Returns a list in rank order. This rank's element is ``obj`` itself, the others are copies.
        Unpickling runs code that the other ranks choose.

        Raises InvalidArgumentError on all ranks where an object cannot be pickled, and the errors
        of all operations, see Communicator.

        Cost: two all_gathers. With buffers of 64 KiB and more, one all_gather of their lengths and
        one for each buffer of the rank that has most of them.

        >>> comm.all_gather_object("r" * comm.rank)  # on 3 ranks
        ['', 'r', 'rr']
        """
        found = self._all_gather_parts(self._pickled_of(obj))
        return [obj if rank == self.rank else load(one) for rank, one in enumerate(found)]

    @immediate_collective
    def gather_object(self, obj: _T, root: int = 0) -> list[_T] | None:
        """Collect the objects of all ranks on ``root``.

        ``obj``: any object that pickle can serialise. ``root``: the receiving rank, from 0 to
        size - 1, the same on all ranks.

        Returns on the root a list in rank order; its own element is ``obj`` itself. Returns None on
        the other ranks. Unpickling on the root runs code that the other ranks choose.

        Raises InvalidArgumentError on all ranks where an object cannot be pickled, and the errors
        of all operations, see Communicator.

        Cost: an all_gather of a few numbers, and the messages of each rank to the root.

        >>> comm.gather_object(comm.rank ** 2)  # on 3 ranks
        [0, 1, 4]
        """
        root = self._check_rank(root, "root")
        mine = self._pickled_of(obj)
        lengths = self._gather_lengths(mine)
        if self.rank != root:
            self._send_parts(_parts_of(mine), root, _TAG_GATHER)
            return None
        others = [rank for rank in range(self.size) if rank != root]
        posted = {rank: self._start_recv(lengths[rank], rank, _TAG_GATHER) for rank in others}
        for rank in others:
            for work in posted[rank][1]:
                work.wait()
        return [obj if rank == root else load(posted[rank][0]) for rank in range(self.size)]

    @immediate_collective
    def scatter_object(self, objs: Sequence[_T] | None = None, root: int = 0) -> _T:
        """Send element r of the root's ``objs`` to rank r.

        ``objs``: on the root a sequence of one object per rank; on other ranks it is not used.
        ``root``: the sending rank, from 0 to size - 1, the same on all ranks.

        Returns the element of this rank: on the root the object itself, on the other ranks a copy.
        Unpickling runs code that the root chooses.

        Raises InvalidArgumentError on all ranks where an object cannot be pickled or ``objs`` has
        another length, and the errors of all operations, see Communicator.

        Cost: a broadcast of all lengths, and the messages of the root to each rank.

        >>> comm.scatter_object([["a"], ["b"]] if comm.rank == 0 else None)  # on 2 ranks; rank 1
        ['b']
        """
        root = self._check_rank(root, "root")
        if self.rank != root:
            table = self._broadcast_list(None, root)
            parts, works = self._start_recv(_row_of(table, self.rank), root, _TAG_SCATTER)
            for work in works:
                work.wait()
            return cast(_T, load(parts))
        try:
            given = _one_for_each(objs, self.size)
            pickled = [
                [] if rank == root else dump(one, f"objs[{rank}]") for rank, one in enumerate(given)
            ]
        except InvalidArgumentError as error:
            self._broadcast_list(error, root)
            raise
        self._broadcast_list([n for one in pickled for n in (len(one), *map(_nbytes, one))], root)
        works = [
            work
            for rank, parts in enumerate(pickled)
            for work in self._start_send(parts, rank, _TAG_SCATTER)
        ]
        for work in works:
            work.wait()
        return given[root]

    @immediate
    def send_object(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object to rank ``dest``, which receives it with ``recv_object``.

        ``obj``: any object that pickle can serialise. ``dest``: a rank from 0 to size - 1. ``tag``:
        from 0 to 2**31-1.

        Returns when the program may change ``obj`` again. Objects of one sender and tag keep their
        order. Each buffer of 64 KiB and more is a separate message. Therefore no other thread may
        send to this rank with this tag until the call returns.

        Raises InvalidArgumentError on both ranks where the object cannot be pickled, and the errors
        of send.

        Cost: one message, and one more for each buffer of 64 KiB and more.

        >>> comm.send_object({"step": 3}, dest=comm.rank)
        >>> comm.recv_object(source=comm.rank)
        {'step': 3}
        """
        dest, tag = self._check_rank(dest, "dest"), check_tag(tag)
        try:
            parts = dump(obj)
        except InvalidArgumentError as error:
            self._send_parts([dump_refusal(str(error))], dest, tag)
            raise
        self._send_parts(parts, dest, tag)

    @immediate
    def recv_object(self, source: int, tag: int = 0) -> Any:
        """Receive an object that rank ``source`` sends with ``send_object``, and return it.

        ``source``: a rank from 0 to size - 1; ``probe`` finds the sender where any rank may send.
        ``tag``: from 0 to 2**31-1. No other thread may receive from this rank with this tag until
        the call returns. Unpickling runs code that the sender chooses.

        Raises InvalidArgumentError where the sender cannot pickle its object; MismatchError where
        the message is not an object, and then the message is lost; and the errors of recv.

        Cost: as send_object.

        >>> comm.send_object({"step": 3}, dest=comm.rank)
        >>> comm.recv_object(source=comm.rank)
        {'step': 3}
        """
        source, tag = self._check_rank(source, "source"), check_tag(tag)
        head = memory_for(self._probe(source, tag, None).nbytes, source)
        self._native.recv(_core.view(head), source, tag)
        buffers, works = self._start_recv(lengths_of(head, source), source, tag)
        for work in works:
            work.wait()
        return load([head, *buffers])

    def _pickled_of(self, obj: Any) -> Parts | InvalidArgumentError:
        """Return the parts, or the error, which the caller raises once other ranks know it."""
        try:
            return dump(obj)
        except InvalidArgumentError as error:
            return error

    def _gather_lengths(self, mine: Parts | InvalidArgumentError) -> list[list[int]]:
        """Return the bytes of each part of each rank. Raise on all ranks where one has an error."""
        refused = isinstance(mine, InvalidArgumentError)
        lengths = [] if refused else list(map(_nbytes, _parts_of(mine)))
        number = [-1, 0] if refused else [len(lengths), lengths[0]]
        heads = self._all_gather_numbers(number, "objects", self._quick_algorithm())
        refusing = [rank for rank, (count, _) in enumerate(heads) if count < 0]
        if refusing:
            reasons = self._gather_blobs(str(mine).encode() if refused else b"")
            if isinstance(mine, InvalidArgumentError):
                raise mine
            raise _refusal_of(refusing[0], reasons[refusing[0]])
        counts = [count - 1 for count, _ in heads]
        if not any(counts):
            return [[length] for _, length in heads]
        from array import array

        every = array("q", bytes(8 * sum(counts)))
        line = array("q", lengths[1:])
        self._all_gather_own(DType.INT64, line, every, counts, "objects", self._quick_algorithm())
        rest = iter(every.tolist())
        return [[length, *islice(rest, count - 1)] for count, length in heads]

    def _broadcast_list(
        self, numbers: list[int] | InvalidArgumentError | None, root: int
    ) -> list[int]:
        """Broadcast the root's numbers and return them on all ranks. Where the root passes an error
        instead, the other ranks raise one that quotes it."""
        refusal = str(numbers).encode() if isinstance(numbers, InvalidArgumentError) else b""
        line = None
        if numbers is not None:
            given = [] if isinstance(numbers, InvalidArgumentError) else numbers
            shown = [*given[:_FIRST_NUMBERS], *[0] * (_FIRST_NUMBERS - len(given))]
            line = [-len(refusal) if refusal else len(given), *shown]
        count, *first = self._broadcast_numbers(line, 1 + _FIRST_NUMBERS, root)
        if count < 0:
            text = bytearray(refusal if refusal else -count)
            self._broadcast_bytes(text, root)
            if not refusal:
                raise _refusal_of(root, text)
        if count <= _FIRST_NUMBERS:
            return first[:count]
        return self._broadcast_numbers(
            None if isinstance(numbers, InvalidArgumentError) else numbers, count, root
        )

    def _broadcast_parts(self, mine: Parts | InvalidArgumentError | None, root: int) -> Parts:
        """Return the root's parts on all ranks. Only the root's ``mine`` counts."""
        if isinstance(mine, InvalidArgumentError):
            self._broadcast_list(mine, root)
            raise mine
        lengths = self._broadcast_list(None if mine is None else list(map(_nbytes, mine)), root)
        parts: Parts = mine or [memory_for(length, root) for length in lengths]
        for part in parts:
            self._broadcast_bytes(part, root)
        return parts

    def _all_gather_parts(self, mine: Parts | InvalidArgumentError) -> list[Parts]:
        """Return the parts of all ranks. The first all_gather moves all heads, the second the first
        buffer of each rank, and so on."""
        lengths = self._gather_lengths(mine)
        parts = _parts_of(mine)
        found: list[Parts] = [[] for _ in lengths]
        for number in range(max(map(len, lengths))):
            part = parts[number] if number < len(parts) else b""
            counts = [one[number] if number < len(one) else 0 for one in lengths]
            every = memory_for(sum(counts), self.rank)
            self._all_gather_own(DType.UINT8, part, every, counts, "objects", None)
            for rank, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
                if number < len(lengths[rank]):
                    found[rank].append(_align(every[end - count : end], end - count))
        return found

    def _broadcast_bytes(self, line: Part | bytearray, root: int) -> None:
        """Broadcast the root's bytes into ``line`` of every other rank.

        The root broadcasts in place. A plan may write the root's memory again with the same bytes,
        so the root copies read-only memory first.
        """
        view = _core.view(bytearray(line) if memoryview(line).readonly else line)
        prepared = self._prepare(
            Collective.BROADCAST, DType.UINT8, None, root, view.nbytes, None, None, (_OBJECTS,)
        )
        source = view if self.rank == root else None
        self._start(prepared, source, view, [view.count], False, nothing)

    def _start_send(self, parts: Parts, dest: int, tag: int) -> list[Any]:
        return [self._native.send(_core.view(part), dest, tag, True) for part in parts]

    def _send_parts(self, parts: Parts, dest: int, tag: int) -> None:
        for work in self._start_send(parts, dest, tag):
            work.wait()

    def _start_recv(self, lengths: list[int], source: int, tag: int) -> tuple[Parts, list[Any]]:
        parts: Parts = [memory_for(length, source) for length in lengths]
        return parts, [self._native.recv(_core.view(one), source, tag, True) for one in parts]


def _parts_of(mine: Parts | InvalidArgumentError) -> Parts:
    """Return the parts. Its callers have excluded the error on all ranks."""
    assert not isinstance(mine, InvalidArgumentError)
    return mine


def _nbytes(part: Part) -> int:
    return memoryview(part).nbytes


def _align(part: memoryview, place: int) -> memoryview:
    """Return the part, or a copy where ``place`` is not aligned for arrays of any element type."""
    if place % 64 == 0:
        return part
    copy = memory_for(part.nbytes, -1)
    copy[:] = part
    return copy


def _row_of(table: list[int], rank: int) -> list[int]:
    """Return the lengths of ``rank`` from a table that holds a count and lengths per rank."""
    place = 0
    for _ in range(rank):
        place += 1 + table[place]
    return table[place + 1 : place + 1 + table[place]]


def _refusal_of(rank: int, why: bytes | bytearray) -> InvalidArgumentError:
    text = bytes(why).decode(errors="replace")
    return InvalidArgumentError(f"rank {rank} has refused its arguments: {text}", rank=rank)


def _one_for_each(objs: Sequence[_T] | None, size: int) -> Sequence[_T]:
    if isinstance(objs, str | bytes) or not isinstance(objs, Sequence):
        raise InvalidArgumentError(
            f"objs is a {type(objs).__name__}: expected a sequence of {size} objects, one per rank"
        )
    if len(objs) != size:
        raise InvalidArgumentError(
            f"objs has {len(objs)} objects: expected one for each of the {size} ranks"
        )
    return objs
