"""Whole Python objects between ranks: pickled, their long buffers sent from where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar, cast

from pycoll import _core
from pycoll.collective import Collective
from pycoll.core import immediate, immediate_collective, nothing, salt
from pycoll.errors import InvalidArgumentError
from pycoll.messages import TAG_MAX, Messages, check_tag
from pycoll.pickled import Part, Parts, dump, dump_refusal, lengths_of, load, room
from pycoll.types import DType

_T = TypeVar("_T")

#: Tags of messages of our own, which no user's recv or probe takes.
_TAG_GATHER = TAG_MAX + 1
_TAG_SCATTER = TAG_MAX + 2
#: Numbers that the root tells in one broadcast; more take another.
_TOLD = 7
_OBJECTS = salt("objects")


class Objects(Messages):
    """Part of Communicator. What its calls for objects have in common:

    Objects travel as pickles of protocol 5. NumPy arrays and other buffers of 64 KiB and more are
    no part of the pickle: they are sent from their memory and received into the memory that the new
    object keeps. Lengths have 64 bits.

    **Unpickling runs code that the sender chooses.** The ranks of a job trust each other, as they
    have proved to hold its secret; never pass on bytes from elsewhere in this way.

    Raises InvalidArgumentError on all ranks, and leaves the communicator usable, where an object of
    one rank cannot be pickled; of what cannot be unpickled on a rank, only that rank hears. Not
    within a ``group()``. Otherwise raises what other collectives and messages do.
    """

    @immediate_collective
    def broadcast_object(self, obj: _T = None, root: int = 0) -> _T:  # type: ignore[assignment]
        """The root's object, on every rank; what other ranks pass does not matter.

        The root gets ``obj`` itself, the others a copy of their own. Unpickling runs code that the
        root chooses. Costs two broadcasts, and one more for each buffer of 64 KiB and more.

        >>> comm.broadcast_object({"lr": 0.1} if comm.rank == 0 else None)
        {'lr': 0.1}
        """
        root = self._check_rank(root, "root")
        mine = self._pickled_of(obj) if self.rank == root else None
        parts = self._broadcast_parts(mine, root)
        return obj if self.rank == root else load(parts)

    @immediate_collective
    def all_gather_object(self, obj: _T) -> list[_T]:
        """The objects of all ranks, in rank order, on every rank.

        This rank's own is ``obj`` itself, the others are copies. Unpickling runs code that the
        other ranks choose. Costs two all_gathers, and where there are buffers of 64 KiB and more
        one for the longest list of them.

        >>> comm.all_gather_object("r" * comm.rank)  # on 3 ranks
        ['', 'r', 'rr']
        """
        found = self._all_gather_parts(self._pickled_of(obj))
        return [obj if rank == self.rank else load(one) for rank, one in enumerate(found)]

    @immediate_collective
    def gather_object(self, obj: _T, root: int = 0) -> list[_T] | None:
        """The objects of all ranks, in rank order, on ``root``; None elsewhere.

        The root's own is ``obj`` itself. Unpickling on the root runs code that the other ranks
        choose. Costs an all_gather of a few numbers and the messages of each rank to the root.

        >>> comm.gather_object(comm.rank ** 2)  # on 3 ranks
        [0, 1, 4]
        """
        root = self._check_rank(root, "root")
        mine = self._pickled_of(obj)
        lengths = self._agree_on(mine)
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
        """Element r of the root's ``objs`` on rank r; what other ranks pass does not matter.

        ``objs``: a sequence of as many objects as there are ranks. The root gets its own element
        itself, the others a copy. Unpickling runs code that the root chooses. Costs a broadcast of
        all lengths and the messages of the root to each rank.

        >>> comm.scatter_object([["a"], ["b"]] if comm.rank == 0 else None)  # on 2 ranks; rank 1
        ['b']
        """
        root = self._check_rank(root, "root")
        if self.rank != root:
            table = self._tell(None, root)
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
            self._tell(error, root)
            raise
        self._tell([n for one in pickled for n in (len(one), *map(_nbytes, one))], root)
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
        """Send an object to rank ``dest``, which receives it by ``recv_object``.

        Returns when ``obj`` may be changed again. Where it cannot be pickled, both ranks raise
        InvalidArgumentError. Objects of one sender and tag keep their order; a buffer of 64 KiB and
        more is a message of its own, so no other thread may send with this tag meanwhile.
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
        """Receive what rank ``source`` sends by ``send_object``, and return it.

        Unpickling runs code that the sender chooses. ``probe`` tells who has sent, where any rank
        may. Raises MismatchError where the message is no object: it is lost then. No other thread
        may receive from this rank with this tag meanwhile.

        >>> comm.send_object({"step": 3}, dest=comm.rank)
        >>> comm.recv_object(source=comm.rank)
        {'step': 3}
        """
        source, tag = self._check_rank(source, "source"), check_tag(tag)
        head = room(self._probe(source, tag, None).nbytes, source)
        self._native.recv(_core.view(head), source, tag)
        buffers, works = self._start_recv(lengths_of(head, source), source, tag)
        for work in works:
            work.wait()
        return load([head, *buffers])

    def _pickled_of(self, obj: Any) -> Parts | InvalidArgumentError:
        """The error is raised once the other ranks know of it."""
        try:
            return dump(obj)
        except InvalidArgumentError as error:
            return error

    def _agree_on(self, mine: Parts | InvalidArgumentError) -> list[list[int]]:
        """Bytes of every part of every rank; raises on all ranks where one has none to send."""
        refused = isinstance(mine, InvalidArgumentError)
        lengths = [] if refused else list(map(_nbytes, _parts_of(mine)))
        number = [-1, 0] if refused else [len(lengths), lengths[0]]
        told = self._all_gather_numbers(number, "objects", self._quickly_chosen())
        guilty = [rank for rank, (count, _) in enumerate(told) if count < 0]
        if guilty:
            reasons = self._gather_blobs(str(mine).encode() if refused else b"")
            if isinstance(mine, InvalidArgumentError):
                raise mine
            raise _refusal_of(guilty[0], reasons[guilty[0]])
        counts = [count - 1 for count, _ in told]
        if not any(counts):
            return [[length] for _, length in told]
        from array import array

        every = array("q", bytes(8 * sum(counts)))
        line = array("q", lengths[1:])
        self._all_gather_own(DType.INT64, line, every, counts, "objects", self._quickly_chosen())
        rest = iter(every.tolist())
        return [[length, *islice(rest, count - 1)] for count, length in told]

    def _tell(self, numbers: list[int] | InvalidArgumentError | None, root: int) -> list[int]:
        """The root's numbers, on all ranks; where the root has an error instead the other ranks
        raise one that quotes it."""
        refusal = str(numbers).encode() if isinstance(numbers, InvalidArgumentError) else b""
        line = None
        if numbers is not None:
            given = [] if isinstance(numbers, InvalidArgumentError) else numbers
            shown = [*given[:_TOLD], *[0] * (_TOLD - len(given))]
            line = [-len(refusal) if refusal else len(given), *shown]
        count, *told = self._broadcast_numbers(line, 1 + _TOLD, root)
        if count < 0:
            text = bytearray(refusal if refusal else -count)
            self._broadcast_bytes(text, root)
            if not refusal:
                raise _refusal_of(root, text)
        if count <= _TOLD:
            return told[:count]
        return self._broadcast_numbers(
            None if isinstance(numbers, InvalidArgumentError) else numbers, count, root
        )

    def _broadcast_parts(self, mine: Parts | InvalidArgumentError | None, root: int) -> Parts:
        """The root's, on all ranks. ``mine`` counts there only."""
        if isinstance(mine, InvalidArgumentError):
            self._tell(mine, root)
            raise mine
        lengths = self._tell(None if mine is None else list(map(_nbytes, mine)), root)
        parts: Parts = mine or [room(length, root) for length in lengths]
        for part in parts:
            self._broadcast_bytes(part, root)
        return parts

    def _all_gather_parts(self, mine: Parts | InvalidArgumentError) -> list[Parts]:
        """Those of all ranks: first all heads, then every rank's first buffer, and so on."""
        lengths = self._agree_on(mine)
        parts = _parts_of(mine)
        found: list[Parts] = [[] for _ in lengths]
        for number in range(max(map(len, lengths))):
            part = parts[number] if number < len(parts) else b""
            counts = [one[number] if number < len(one) else 0 for one in lengths]
            every = room(sum(counts), self.rank)
            self._all_gather_own(DType.UINT8, part, every, counts, "objects", None)
            for rank, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
                if number < len(lengths[rank]):
                    found[rank].append(_aligned(every[end - count : end], end - count))
        return found

    def _broadcast_bytes(self, line: Part | bytearray, root: int) -> None:
        """The root's bytes, into as many on every other rank.

        In place on the root, whose memory a plan may write again with what it holds: so not in
        memory that is read-only.
        """
        view = _core.view(bytearray(line) if memoryview(line).readonly else line)
        prepared = self._prepare(
            Collective.BROADCAST, DType.UINT8, None, root, view.nbytes, None, None, (_OBJECTS,)
        )
        source, count = view if self.rank == root else None, view.count
        self._start(prepared, source, view, DType.UINT8, [count], count, False, nothing)

    def _start_send(self, parts: Parts, dest: int, tag: int) -> list[Any]:
        return [self._native.send(_core.view(part), dest, tag, True) for part in parts]

    def _send_parts(self, parts: Parts, dest: int, tag: int) -> None:
        for work in self._start_send(parts, dest, tag):
            work.wait()

    def _start_recv(self, lengths: list[int], source: int, tag: int) -> tuple[Parts, list[Any]]:
        parts: Parts = [room(length, source) for length in lengths]
        return parts, [self._native.recv(_core.view(one), source, tag, True) for one in parts]


def _parts_of(mine: Parts | InvalidArgumentError) -> Parts:
    """What is no error, as all ranks know."""
    assert not isinstance(mine, InvalidArgumentError)
    return mine


def _nbytes(part: Part) -> int:
    return memoryview(part).nbytes


def _aligned(part: memoryview, place: int) -> memoryview:
    """A copy where arrays of the largest elements could not begin at this byte."""
    if place % 64 == 0:
        return part
    copy = room(part.nbytes, -1)
    copy[:] = part
    return copy


def _row_of(table: list[int], rank: int) -> list[int]:
    """Rank's lengths in a table of each rank's count and lengths."""
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
