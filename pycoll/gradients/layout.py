"""Memory of a step's gradients, laid out so that every message is one contiguous span."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from pycoll.arrays.rows import shares
from pycoll.gradients.buckets import Bucket, Shape, places
from pycoll.gradients.communication_plan import CommunicationPlan, GradientBucket, check
from pycoll.gradients.communication_plan import Gradient as Planned
from pycoll.types import ITEM_BYTES, DType

ITEM_BYTES_OF = {one.word: ITEM_BYTES[one] for one in DType}

#: Allocates an array of zeros from a number of elements and a dtype name. The array has one axis,
#: and its slices share its memory.
Allocate = Callable[[int, str], Any]


class Entry(NamedTuple):
    """A gradient of the caller, for ``Scheduler``.

    Arguments: ``name``, which no other entry has; ``shape``, a tuple of lengths; ``kind``, the name
    of the dtype that messages use.

    Errors: none here; ``Scheduler`` checks its entries. Cost: none.

    >>> pycoll.optim.Entry("weight", (2, 3)).nbytes
    24
    """

    name: str
    shape: Shape
    kind: str = "float32"

    @property
    def nbytes(self) -> int:
        """The number of bytes that messages carry."""
        return prod(self.shape) * ITEM_BYTES_OF[self.kind]

    def planned(self, ready_s: float) -> Planned:
        """The gradient of a communication plan, ready after ``ready_s`` seconds."""
        return Planned(self.nbytes, ready_s, self.kind)


class Span(NamedTuple):
    """The memory of one message.

    ``whole``: all of the message. ``mine``: where the plan uses reduce_scatter and all_gather, an
    array for this rank's share, else None. ``lengths``: the share of each rank in elements.
    ``begin``: the first element's place in the memory of its dtype.
    """

    whole: Any
    mine: Any
    lengths: list[int]
    begin: int


class Layout:
    """The memory of one communication plan: a bucket per dtype, in the order of the backward pass.

    ``order``: the numbers of ``entries`` in the order of the backward pass. The gradient n of
    ``comm_plan`` is the entry ``order[n]``.

    Attributes: ``views``, the memory of each entry, by entry number; ``spans``, the memory of each
    message; ``members``, the entry numbers of each message; ``messages_of``, the message numbers
    of each entry; ``starts``, the first element of each entry in the memory of its dtype.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        order: Sequence[int],
        comm_plan: CommunicationPlan,
        rank: int,
        size: int,
        allocate: Allocate,
    ) -> None:
        check(comm_plan, [entries[number].planned(0.0) for number in order])
        self.comm_plan = comm_plan
        self.views: list[Any] = [None] * len(entries)
        self.members: list[list[int]] = []
        self.messages_of: list[list[int]] = [[] for _ in entries]
        self.starts: dict[int, int] = {}
        self._flats: dict[str, Any] = {}
        for kind in dict.fromkeys(entry.kind for entry in entries):
            self._lay(entries, [n for n in order if entries[n].kind == kind], kind, allocate)
        self.spans: list[Span] = []
        for place, message in enumerate(comm_plan.messages):
            numbers = [order[piece.gradient] for piece in message.pieces]
            self.members.append(numbers)
            for number in numbers:
                self.messages_of[number].append(place)
            kind = entries[numbers[0]].kind
            begin, whole = self._memory(message, numbers, kind)
            lengths = shares(len(whole), size)
            halves = comm_plan.gathers is not None
            mine = allocate(lengths[rank], kind) if halves else None
            self.spans.append(Span(whole, mine, lengths, begin))

    def length(self, kind: str) -> int:
        """The number of elements of the memory of a dtype."""
        return len(self._flats[kind]) if kind in self._flats else 0

    def _lay(
        self, entries: Sequence[Entry], numbers: Sequence[int], kind: str, allocate: Allocate
    ) -> None:
        shapes = [entries[number].shape for number in numbers]
        starts = places([prod(shape) for shape in shapes], ITEM_BYTES_OF[kind])
        bucket = Bucket(shapes, kind, flat=allocate(starts[-1], kind))
        self._flats[kind] = bucket.flat
        for number, view, start in zip(numbers, bucket.views, starts, strict=False):
            self.views[number] = view
            self.starts[number] = start

    def _memory(
        self, message: GradientBucket, numbers: Sequence[int], kind: str
    ) -> tuple[int, Any]:
        """The first element of a message, and its memory."""
        item_bytes = ITEM_BYTES_OF[kind]
        first, last = message.pieces[0], message.pieces[-1]
        start = self.starts[numbers[0]] + first.start // item_bytes
        return start, self._flats[kind][start : self.starts[numbers[-1]] + last.stop // item_bytes]
