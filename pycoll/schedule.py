"""The schedule language: who sends which chunk to whom, in which step, copied or reduced.

A schedule is a value. Its meaning is the textbook's: every rank holds one value per chunk; in each
step all transfers read their source's value as it was before the step, then every destination is
replaced (``COPY``) or combined (``REDUCE``). Nothing here knows bytes, devices or transports.

Chunks are numbered ``block * parts + part``. Behind the data chunks follow *temporaries*: values
that belong to no input or output (a running total). A transfer may land in another chunk than it
left (``into``) if both are sized by the same data chunk, and may stay on its own rank (local copy).
Any rank may hold any data chunk on its way, also one that its input and output lack.

Several REDUCE transfers of one step into one chunk are one fold: the values that stand in front in
listed order, then the chunk's own value, then those that stand behind in listed order, combined
from the left. It takes several rows if more values arrive than a row takes in (`fold_rows`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.collective import FROM_ROOT, TO_ROOT, Collective

COPY = False
REDUCE = True
#: The chunk of a transfer that moves no data: it only tells that its source came so far.
TOKEN = -1
#: Lanes of a schedule are 0..LANES_MAX-1; the transport's last channel carries tagged messages.
LANES_MAX = 7
#: Values that one row takes in, and peers that it sends to.
FAN_MAX = 8
#: Operands of one row: what it takes in, what the rank has, what earlier rows came to.
OPERANDS_MAX = 9


class ScheduleError(ValueError):
    """A schedule or a plan does not do what it promises; the text says where and why."""


class Transfer(NamedTuple):
    """``chunk`` of ``source`` goes to ``destination``, landing in ``into``.

    ``before`` says on which side the arriving value stands in a REDUCE: True puts it in front of
    the destination's own value (lower ranks' contributions first). ``partial`` marks a COPY of a
    sum that its receiver will combine further. ``lane`` numbers the independent row list that
    carries it; both ends use the same lane.
    """

    step: int
    chunk: int
    source: int
    destination: int
    reduce: bool = COPY
    into: int = -2
    before: bool = True
    lane: int = 0
    partial: bool = False

    @property
    def target(self) -> int:
        """The chunk the value lands in."""
        return self.chunk if self.into == -2 else self.into


class FoldRow(NamedTuple):
    """One row of a fold: what arrives, and before which of it the chunk's own value stands.

    ``own`` is -1 where the own value belongs to another row. Every row but the first begins with
    what the one before has come to.
    """

    arriving: list[Transfer]
    own: int


def fold_rows(arriving: Sequence[Transfer]) -> list[FoldRow]:
    """How the REDUCE transfers of one step into one chunk are cut into rows, from the left.

    Something arrives in every row.
    """
    front: list[Transfer | None] = [t for t in arriving if t.before]
    operands = [*front, None, *(t for t in arriving if not t.before)]
    rows: list[FoldRow] = []
    taken: list[Transfer] = []
    own = -1
    for operand in operands:
        held = len(taken) + (own >= 0) + bool(rows)
        if held == OPERANDS_MAX or (operand is not None and len(taken) == FAN_MAX):
            kept = 1 if operand is None else 0  # the own value shall not be alone
            rows.append(FoldRow(taken[: len(taken) - kept], own))
            taken, own = taken[len(taken) - kept :], -1
        if operand is None:
            own = len(taken)
        else:
            taken.append(operand)
    return [*rows, FoldRow(taken, own)]


def block_count(collective: Collective, size: int) -> int:
    """User-level pieces of the collective's data; FORMAT.md lists them."""
    if collective is Collective.BARRIER:
        return 0
    if collective is Collective.ALL_TO_ALL:
        return size * size
    if collective in (
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
        Collective.GATHER,
        Collective.SCATTER,
    ):
        return size
    return 1


class Schedule(NamedTuple):
    """The transfers of all ranks, or of one rank where ``only`` names it.

    ``temporaries`` are numbered from ``data_chunks`` up; entry ``i`` is the data chunk whose size
    temporary ``data_chunks + i`` has. ``transfers`` are sorted by step; their order within a step
    is the order in which segments enter a channel.
    """

    collective: Collective
    size: int
    parts: int
    transfers: tuple[Transfer, ...]
    root: int = 0
    temporaries: tuple[int, ...] = ()
    only: int | None = None

    @property
    def data_chunks(self) -> int:
        """Chunks that lie in an input or output; temporaries are numbered behind them."""
        return block_count(self.collective, self.size) * self.parts

    def sized_by(self, chunk: int) -> int:
        """The data chunk whose size ``chunk`` has."""
        beyond = chunk - self.data_chunks
        return chunk if beyond < 0 else self.temporaries[beyond]

    @property
    def steps(self) -> int:
        """Steps until the last transfer is done."""
        return 1 + max((t.step for t in self.transfers), default=-1)

    def part_of(self, rank: int) -> Schedule:
        """Only the transfers that ``rank`` takes part in."""
        mine = tuple(t for t in self.transfers if rank in (t.source, t.destination))
        return self._replace(transfers=mine, only=rank)


def shift(transfers: Iterable[Transfer], steps: int) -> list[Transfer]:
    """The same transfers, ``steps`` later."""
    return [t._replace(step=t.step + steps) for t in transfers]


def input_blocks(collective: Collective, size: int, root: int, rank: int) -> range:
    """The blocks that lie in the input of ``rank``, in their order there."""
    if collective is Collective.ALL_TO_ALL:
        return range(rank * size, (rank + 1) * size)
    if collective in (Collective.ALL_GATHER, Collective.GATHER):
        return range(rank, rank + 1)
    if collective in FROM_ROOT and rank != root:
        return range(0)
    return range(block_count(collective, size))


def output_blocks(collective: Collective, size: int, root: int, rank: int) -> range:
    """The blocks that lie in the output of ``rank``, in their order there."""
    if collective is Collective.ALL_TO_ALL:
        return range(rank, size * size, size)
    if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        return range(rank, rank + 1)
    if collective in TO_ROOT and rank != root:
        return range(0)
    return range(block_count(collective, size))
