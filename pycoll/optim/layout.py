"""Where the gradients of a step lie, so that every message of an agenda is one piece of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from pycoll.optim.agenda import Agenda, Message, check
from pycoll.optim.agenda import Gradient as Planned
from pycoll.optim.bucket import Bucket, Shape, places
from pycoll.rows import shares
from pycoll.types import ITEM_BYTES, DType

ITEM_BYTES_OF = {one.word: ITEM_BYTES[one] for one in DType}

#: Gives memory for so many elements of a type, filled with zeros: an array of one axis whose
#: slices share its memory.
Allocate = Callable[[int, str], Any]


class Entry(NamedTuple):
    """A gradient as its user knows it: ``kind`` is the name of its type as it travels."""

    name: str
    shape: Shape
    kind: str = "float32"

    @property
    def nbytes(self) -> int:
        """What travels."""
        return prod(self.shape) * ITEM_BYTES_OF[self.kind]

    def planned(self, ready_s: float) -> Planned:
        """As agendas know it."""
        return Planned(self.nbytes, ready_s, self.kind)


class Span(NamedTuple):
    """One message's memory. ``mine`` takes this rank's share of it where halves are reduced."""

    whole: Any
    mine: Any
    lengths: list[int]


class Layout:
    """The memory of one agenda: buckets by kind, in the order of the backward pass.

    ``order``: the numbers of ``entries`` in that order, in which the agenda counts. ``views``:
    every entry's part, by its number. ``spans``: every message's. ``members``: every message's
    entries; ``messages_of``: every entry's messages.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        order: Sequence[int],
        agenda: Agenda,
        rank: int,
        size: int,
        allocate: Allocate,
    ) -> None:
        check(agenda, [entries[number].planned(0.0) for number in order])
        self.agenda = agenda
        self.views: list[Any] = [None] * len(entries)
        self.members: list[list[int]] = []
        self.messages_of: list[list[int]] = [[] for _ in entries]
        self._starts: dict[int, int] = {}
        self._flats: dict[str, Any] = {}
        for kind in dict.fromkeys(entry.kind for entry in entries):
            self._lay(entries, [n for n in order if entries[n].kind == kind], kind, allocate)
        self.spans: list[Span] = []
        for place, message in enumerate(agenda.messages):
            numbers = [order[piece.gradient] for piece in message.pieces]
            self.members.append(numbers)
            for number in numbers:
                self.messages_of[number].append(place)
            whole = self._memory(message, numbers, entries[numbers[0]].kind)
            lengths = shares(len(whole), size)
            halves = agenda.gathers is not None
            mine = allocate(lengths[rank], entries[numbers[0]].kind) if halves else None
            self.spans.append(Span(whole, mine, lengths))

    def _lay(
        self, entries: Sequence[Entry], numbers: Sequence[int], kind: str, allocate: Allocate
    ) -> None:
        shapes = [entries[number].shape for number in numbers]
        starts = places([prod(shape) for shape in shapes], ITEM_BYTES_OF[kind])
        bucket = Bucket(shapes, kind, flat=allocate(starts[-1], kind))
        self._flats[kind] = bucket.flat
        for number, view, start in zip(numbers, bucket.views, starts, strict=False):
            self.views[number] = view
            self._starts[number] = start

    def _memory(self, message: Message, numbers: Sequence[int], kind: str) -> Any:
        item_bytes = ITEM_BYTES_OF[kind]
        first, last = message.pieces[0], message.pieces[-1]
        start = self._starts[numbers[0]] + first.start // item_bytes
        return self._flats[kind][start : self._starts[numbers[-1]] + last.stop // item_bytes]
