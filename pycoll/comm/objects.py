"""Python objects between ranks: pickled, with long buffers sent in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any, TypeVar, cast

from pycoll import _core
from pycoll.comm.operations import CallRunner, nothing, salt
from pycoll.comm.pickled import Part, Parts, dump, dump_refusal, lengths_of, load, memory_for
from pycoll.comm.point_to_point import TAG_MAX, PointToPoint, check_tag
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import DType, check_rank

_T = TypeVar("_T")

#: Tags of internal messages, beyond those that a user's recv or probe can name.
_TAG_GATHER = TAG_MAX + 1
_TAG_SCATTER = TAG_MAX + 2
#: Numbers in the root's first broadcast; more numbers take a second broadcast.
_FIRST_NUMBERS = 7
_OBJECTS = salt("objects")


class ObjectExchange:
    """Moves Python objects between ranks; the methods have the promises of the communicator's.

    Objects travel as pickles of protocol 5. Buffers of 64 KiB and more are not part of the pickle:
    the sender sends them in place, and the new object keeps the memory that the receiver received
    into. Lengths have 64 bits.
    """

    def __init__(self, runner: CallRunner, messages: PointToPoint) -> None:
        self._runner = runner
        self._messages = messages
        self._engine = runner.engine
        self._exchanges = runner.exchanges
        self._rank = runner.rank
        self._size = runner.size

    def broadcast(self, obj: _T, root: int) -> _T:
        """Run ``Communicator.broadcast_object``."""
        root = check_rank(root, "root", self._size)
        mine = _pickled_of(obj) if self._rank == root else None
        parts = self.broadcast_parts(mine, root)
        return obj if self._rank == root else cast(_T, load(parts))

    def all_gather(self, obj: _T) -> list[_T]:
        """Run ``Communicator.all_gather_object``."""
        found = self.all_gather_parts(_pickled_of(obj))
        return [obj if rank == self._rank else load(one) for rank, one in enumerate(found)]

    def gather(self, obj: _T, root: int) -> list[_T] | None:
        """Run ``Communicator.gather_object``."""
        root = check_rank(root, "root", self._size)
        mine = _pickled_of(obj)
        lengths = self._gather_lengths(mine)
        if self._rank != root:
            self._send_parts(_parts_of(mine), root, _TAG_GATHER)
            return None
        others = [rank for rank in range(self._size) if rank != root]
        posted = {rank: self._start_recv(lengths[rank], rank, _TAG_GATHER) for rank in others}
        for rank in others:
            for work in posted[rank][1]:
                work.wait()
        return [obj if rank == root else load(posted[rank][0]) for rank in range(self._size)]

    def scatter(self, objs: Sequence[_T] | None, root: int) -> _T:
        """Run ``Communicator.scatter_object``."""
        root = check_rank(root, "root", self._size)
        if self._rank != root:
            table = self._broadcast_list(None, root)
            parts, works = self._start_recv(_row_of(table, self._rank), root, _TAG_SCATTER)
            for work in works:
                work.wait()
            return cast(_T, load(parts))
        try:
            given = _one_for_each(objs, self._size)
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

    def send(self, obj: Any, dest: int, tag: int) -> None:
        """Run ``Communicator.send_object``."""
        dest, tag = check_rank(dest, "dest", self._size), check_tag(tag)
        try:
            parts = dump(obj)
        except InvalidArgumentError as error:
            self._send_parts([dump_refusal(str(error))], dest, tag)
            raise
        self._send_parts(parts, dest, tag)

    def recv(self, source: int, tag: int) -> Any:
        """Run ``Communicator.recv_object``."""
        source, tag = check_rank(source, "source", self._size), check_tag(tag)
        head = memory_for(self._messages.probe(source, tag).nbytes, source)
        self._engine.recv(_core.view(head), source, tag)
        buffers, works = self._start_recv(lengths_of(head, source), source, tag)
        for work in works:
            work.wait()
        return load([head, *buffers])

    def _gather_lengths(self, mine: Parts | InvalidArgumentError) -> list[list[int]]:
        """Return the bytes of each part of each rank. Raise on all ranks where one has an error."""
        refused = isinstance(mine, InvalidArgumentError)
        lengths = [] if refused else list(map(_nbytes, _parts_of(mine)))
        number = [-1, 0] if refused else [len(lengths), lengths[0]]
        heads = self._exchanges.all_gather_numbers(
            number, "objects", self._exchanges.quick_algorithm
        )
        refusing = [rank for rank, (count, _) in enumerate(heads) if count < 0]
        if refusing:
            reasons = self._exchanges.gather_blobs(str(mine).encode() if refused else b"")
            if isinstance(mine, InvalidArgumentError):
                raise mine
            raise _refusal_of(refusing[0], reasons[refusing[0]])
        counts = [count - 1 for count, _ in heads]
        if not any(counts):
            return [[length] for _, length in heads]
        from array import array

        every = array("q", bytes(8 * sum(counts)))
        line = array("q", lengths[1:])
        self._exchanges.all_gather_into(
            DType.INT64, line, every, counts, "objects", self._exchanges.quick_algorithm
        )
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
        count, *first = self._exchanges.broadcast_numbers(line, 1 + _FIRST_NUMBERS, root)
        if count < 0:
            text = bytearray(refusal if refusal else -count)
            self._broadcast_bytes(text, root)
            if not refusal:
                raise _refusal_of(root, text)
        if count <= _FIRST_NUMBERS:
            return first[:count]
        return self._exchanges.broadcast_numbers(
            None if isinstance(numbers, InvalidArgumentError) else numbers, count, root
        )

    def broadcast_parts(self, mine: Parts | InvalidArgumentError | None, root: int) -> Parts:
        """Return the root's parts on all ranks. Only the root's ``mine`` counts."""
        if isinstance(mine, InvalidArgumentError):
            self._broadcast_list(mine, root)
            raise mine
        lengths = self._broadcast_list(None if mine is None else list(map(_nbytes, mine)), root)
        parts: Parts = mine or [memory_for(length, root) for length in lengths]
        for part in parts:
            self._broadcast_bytes(part, root)
        return parts

    def all_gather_parts(self, mine: Parts | InvalidArgumentError) -> list[Parts]:
        """Return the parts of all ranks. The first all_gather moves all heads, the second the first
        buffer of each rank, and so on."""
        lengths = self._gather_lengths(mine)
        parts = _parts_of(mine)
        found: list[Parts] = [[] for _ in lengths]
        for number in range(max(map(len, lengths))):
            part = parts[number] if number < len(parts) else b""
            counts = [one[number] if number < len(one) else 0 for one in lengths]
            every = memory_for(sum(counts), self._rank)
            self._exchanges.all_gather_into(DType.UINT8, part, every, counts, "objects", None)
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
        compiled = self._runner.compiler.compile(
            Collective.BROADCAST, DType.UINT8, None, root, view.nbytes, None, None, (_OBJECTS,)
        )
        source = view if self._rank == root else None
        self._runner.start(compiled, source, view, [view.count], False, nothing)

    def _start_send(self, parts: Parts, dest: int, tag: int) -> list[Any]:
        return [self._engine.send(_core.view(part), dest, tag, True) for part in parts]

    def _send_parts(self, parts: Parts, dest: int, tag: int) -> None:
        for work in self._start_send(parts, dest, tag):
            work.wait()

    def _start_recv(self, lengths: list[int], source: int, tag: int) -> tuple[Parts, list[Any]]:
        parts: Parts = [memory_for(length, source) for length in lengths]
        return parts, [self._engine.recv(_core.view(one), source, tag, True) for one in parts]


def _pickled_of(obj: Any) -> Parts | InvalidArgumentError:
    """Return the parts, or the error, which the caller raises once other ranks know it."""
    try:
        return dump(obj)
    except InvalidArgumentError as error:
        return error


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
