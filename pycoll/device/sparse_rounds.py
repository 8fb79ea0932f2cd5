"""The round of an all_reduce of device arrays whose ranks send the largest values only.

The number of values that a rank sends is known before the call, and equal on all ranks. So the call
is one exchange of known length: kernels choose the values of each array; an all_gather of bytes
brings the codes of all ranks to all ranks; kernels check their places, and add them up from the
first rank to the last one. No rank owns a part, and all ranks hold the same bits. If the places of
a rank do not ascend, or exceed the array, the result is NaN, and the communicator fails.

Each array of a list has codes of its own. Those of a rank lie end to end, so a list takes one
exchange, and neighbouring steps of one kind share launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pycoll import _core
from pycoll.device.coded_rounds import Ends, Round
from pycoll.device.device_codes import FLOAT_BYTES, WHOLE_VALUES, Floats, align
from pycoll.device.device_copies import Copy
from pycoll.schedule.collectives import Collective
from pycoll.types import DType

#: Bytes of a code: a place of 32 bits, and a float32.
_CODE_BYTES = 4 + FLOAT_BYTES


class Chosen(NamedTuple):
    """An array of ``length`` values of which ``number`` are sent. ``dtype``: of its result."""

    length: int
    number: int
    dtype: int

    @property
    def nbytes(self) -> int:
        """The bytes that the codes take."""
        return align(_CODE_BYTES * self.number)

    @property
    def work(self) -> int:
        """The bytes of memory in which kernels look for the values."""
        return align(_core.device_work_bytes(self.length)) if self.length else 0

    @property
    def sums(self) -> int:
        """The bytes of the sums, where they are not made in the result."""
        return 0 if self.dtype == DType.FLOAT32 else align(FLOAT_BYTES * self.length)


class _Place(NamedTuple):
    """The memory of an array in a call.

    ``offset``: the bytes from the first code of a rank to its codes of this array. ``work``: the
    address of the memory in which kernels look for the values.
    """

    array: Chosen
    ends: Ends
    offset: int
    work: int
    sums: Floats


class SparseCall(NamedTuple):
    """An all_reduce without its memory.

    ``divisor``: of the sums, or 0. ``warms``: whether later calls send other numbers of values.
    """

    arrays: Sequence[Chosen]
    size: int
    divisor: int
    warms: bool

    @property
    def stride(self) -> int:
        """The bytes of the codes of a rank."""
        return sum(one.nbytes for one in self.arrays)

    @property
    def exchange_bytes(self) -> int:
        """The bytes of the exchange."""
        return self.size * self.stride

    @property
    def scratch(self) -> int:
        """The bytes of memory that the call needs apart from its arrays."""
        return self.stride + self.exchange_bytes + sum(one.work + one.sums for one in self.arrays)

    def exchanges(self) -> Iterator[tuple[Collective, list[int]]]:
        """Yield the collective of bytes with its counts."""
        yield Collective.ALL_GATHER, [self.stride] * self.size

    def rounds(self, ends: Sequence[Ends], scratch: int) -> list[Round]:
        """Return the only round.

        ``ends``: the memory of each array. ``scratch``: the address of ``self.scratch`` bytes.
        """
        sent, arrived = (scratch, self.stride), (scratch + self.stride, self.exchange_bytes)
        work = arrived[0] + self.exchange_bytes
        nbytes = sum(one.work for one in self.arrays)
        places = list(self._places(ends, work, work + nbytes))
        made = Round(sent, arrived, [], [])
        if nbytes:
            zero = bytes(FLOAT_BYTES)
            made.before.append(("fill", work, FLOAT_BYTES, nbytes // FLOAT_BYTES, zero))
        for phase in range(_core.DEVICE_KEY_DIGITS):
            made.before.extend(_choose("count", phase, one, sent[0]) for one in places)
        for kind in ("tally", "gather"):
            made.before.extend(_choose(kind, 0, one, sent[0]) for one in places)
        made.after.extend(_clear_step(one) for one in places)
        codes = [arrived[0] + rank * self.stride for rank in range(self.size)]
        for rank, begin in enumerate(codes):
            made.after.extend(_check(rank, one, begin) for one in places)
        for rank, begin in enumerate(codes):
            made.after.extend(_spread(rank, one, begin) for one in places)
        made.after.extend(
            _finish_step(one, self.divisor) for one in places if self.divisor or one.array.sums
        )
        return [made]

    def _places(self, ends: Sequence[Ends], work: int, sums: int) -> Iterator[_Place]:
        """Yield the memory of each array that has values."""
        offset = 0
        for array, one in zip(self.arrays, ends, strict=True):
            total = Floats(sums, DType.FLOAT32) if array.sums else one.result
            if array.length:
                yield _Place(array, one, offset, work, total)
            offset, work, sums = offset + array.nbytes, work + array.work, sums + array.sums


def _choose(kind: str, phase: int, place: _Place, codes: int) -> Copy:
    """Return a step that chooses values of an array, for codes of this rank that begin there."""
    ends, array = place.ends, place.array
    begin = (kind, phase, codes + place.offset, array.number)
    return (*begin, *ends.values, ends.rests, ends.masks, place.work, array.length)


def _clear_step(place: _Place) -> Copy:
    """Return the step that makes the sums 0: the sum of no rows."""
    return ("total", WHOLE_VALUES, 0, 0, place.array.length, 0, DType.FLOAT32, *place.sums, 0)


def _check(rank: int, place: _Place, codes: int) -> Copy:
    """Return the step that checks what a rank has sent. ``codes``: where those of it begin."""
    array = place.array
    return ("check", 0, codes + place.offset, array.number, rank, place.work, array.length)


def _spread(rank: int, place: _Place, codes: int) -> Copy:
    """Return the step that adds what a rank has sent. ``codes``: where those of the rank begin."""
    array, begin = place.array, codes + place.offset
    address = place.sums.address
    return ("spread", rank, begin, array.number, address, place.work, array.length)


def _finish_step(place: _Place, divisor: int) -> Copy:
    """Return the step that divides the sums and rounds them to the result: a fold of one row."""
    ends = (*place.sums, *place.ends.result)
    return ("fold", WHOLE_VALUES, 0, 0, place.array.length, *ends, 1, 0, divisor)
