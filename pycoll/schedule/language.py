"""The schedule language: the transfers of a collective, without bytes, devices or transports.

A transfer names a step, a chunk, a source rank, a destination rank, and whether the destination
copies or reduces. A schedule is an immutable value. Its semantics are the textbook's: every rank
holds one value per chunk. In each step all transfers read the value that their source had before
the step. Then each transfer replaces (``COPY``) or combines (``REDUCE``) the destination's value.

Chunks are numbered ``block * parts + part``. *Temporaries* are numbered after the data chunks; they
hold values that belong to no input or output (a running total). A transfer may write another chunk
than it read (``into``) if both are sized by the same data chunk. Its source may equal its
destination (local copy). Any rank may hold any data chunk in transit, even one that is neither in
its input nor in its output.

Several REDUCE transfers of one step into one chunk form one fold. The fold combines, from the left:
the values that arrive with ``before=True`` in listed order, the chunk's own value, and the values
that arrive with ``before=False`` in listed order. A fold with more operands than one row accepts
takes several rows (`fold_rows`).

The last ``servers`` ranks of a schedule *serve*: they contribute nothing and receive no result. A
rank that serves begins without a value in any chunk, so its first fold of a chunk combines only the
values that arrive. The other ranks are workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pycoll.schedule.collectives import FROM_ROOT, TO_ROOT, Collective

COPY = False
REDUCE = True
#: The chunk number of a transfer without data, which signals that its source reached this step.
TOKEN = -1
#: Lanes of a schedule are 0..LANES_MAX-1; the transport reserves its last channel for tagged
#: point-to-point messages.
LANES_MAX = 7
#: The most values that one row receives, and the most peers that it sends to.
FAN_MAX = 8
#: The most operands of one row: received values, the local chunk, the result of an earlier row.
OPERANDS_MAX = 9


class ScheduleError(ValueError):
    """A schedule or a plan does not implement its collective; the text names place and reason."""


class Transfer(NamedTuple):
    """Moves ``chunk`` of ``source`` into chunk ``into`` of ``destination``.

    ``before`` is the operand order of a REDUCE: True puts the arriving value before the
    destination's own value (contributions of lower ranks come first). ``partial`` marks a COPY of a
    partial sum that its receiver combines further. ``lane`` numbers the row list that executes the
    transfer; lanes progress independently, and both ends use the same lane.
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
        """The chunk of the destination that receives the value."""
        return self.chunk if self.into == -2 else self.into


class FoldRow(NamedTuple):
    """One row of a fold: the values that arrive, and the position of the chunk's own value.

    ``own`` is the number of arriving values that precede the own value. It is -1 where the own
    value belongs to another row. The first operand of every row but the first is the result of the
    previous row.
    """

    arriving: list[Transfer]
    own: int


def fold_rows(arriving: Sequence[Transfer], has_own: bool = True) -> list[FoldRow]:
    """Splits the REDUCE transfers of one step into one chunk into rows, from the left.

    At least one value arrives in every row. ``has_own``: whether the destination has a value of its
    own; a rank that serves has none at first.
    """
    front: list[Transfer | None] = [t for t in arriving if t.before]
    middle = [None] if has_own else []
    operands = [*front, *middle, *(t for t in arriving if not t.before)]
    rows: list[FoldRow] = []
    taken: list[Transfer] = []
    own = -1
    for operand in operands:
        held = len(taken) + (own >= 0) + bool(rows)
        if held == OPERANDS_MAX or (operand is not None and len(taken) == FAN_MAX):
            kept = 1 if operand is None else 0  # the row of the own value receives a value too
            rows.append(FoldRow(taken[: len(taken) - kept], own))
            taken, own = taken[len(taken) - kept :], -1
        if operand is None:
            own = len(taken)
        else:
            taken.append(operand)
    return [*rows, FoldRow(taken, own)]


def block_count(collective: Collective, size: int) -> int:
    """The number of user-level blocks of the collective's data; FORMAT.md lists them."""
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
    """The transfers of all ranks, or of rank ``only`` if it is not None.

    Temporaries are numbered from ``data_chunks`` up; entry ``i`` of ``temporaries`` is the data
    chunk that has the size of temporary ``data_chunks + i``. ``transfers`` are sorted by step;
    their order within a step is the order in which segments enter a channel. The last ``servers``
    ranks serve.

    ``coded``: None, or one label per rank. Data between ranks of different labels travels as the
    codes of a codec. A value that several ranks hold in the end is encoded once where it is
    complete, and all of them hold what its codes decode to.
    """

    collective: Collective
    size: int
    parts: int
    transfers: tuple[Transfer, ...]
    root: int = 0
    temporaries: tuple[int, ...] = ()
    only: int | None = None
    servers: int = 0
    coded: tuple[int, ...] | None = None

    def is_coded(self, source: int, destination: int) -> bool:
        """Whether data from ``source`` to ``destination`` travels as codes."""
        return self.coded is not None and self.coded[source] != self.coded[destination]

    @property
    def workers(self) -> int:
        """The number of ranks that contribute and receive; they are the first ranks."""
        return self.size - self.servers

    def inputs_of(self, rank: int) -> range:
        """The blocks of the input of ``rank``, in the order in which the input stores them."""
        if rank >= self.workers:
            return range(0)
        return input_blocks(self.collective, self.size, self.root, rank)

    def outputs_of(self, rank: int) -> range:
        """The blocks of the output of ``rank``, in the order in which the output stores them."""
        if rank >= self.workers:
            return range(0)
        return output_blocks(self.collective, self.size, self.root, rank)

    @property
    def data_chunks(self) -> int:
        """The number of chunks of inputs and outputs; temporaries are numbered after them."""
        return block_count(self.collective, self.size) * self.parts

    def sized_by(self, chunk: int) -> int:
        """The data chunk that has the size of ``chunk``."""
        beyond = chunk - self.data_chunks
        return chunk if beyond < 0 else self.temporaries[beyond]

    @property
    def steps(self) -> int:
        """The number of steps until the last transfer is done."""
        return 1 + max((t.step for t in self.transfers), default=-1)


def shift(transfers: Iterable[Transfer], steps: int) -> list[Transfer]:
    """Returns copies of the transfers that are delayed by ``steps`` steps."""
    return [t._replace(step=t.step + steps) for t in transfers]


def input_blocks(collective: Collective, size: int, root: int, rank: int) -> range:
    """The blocks of the input of a worker, in the order in which the input stores them."""
    if collective is Collective.ALL_TO_ALL:
        return range(rank * size, (rank + 1) * size)
    if collective in (Collective.ALL_GATHER, Collective.GATHER):
        return range(rank, rank + 1)
    if collective in FROM_ROOT and rank != root:
        return range(0)
    return range(block_count(collective, size))


def output_blocks(collective: Collective, size: int, root: int, rank: int) -> range:
    """The blocks of the output of a worker, in the order in which the output stores them."""
    if collective is Collective.ALL_TO_ALL:
        return range(rank, size * size, size)
    if collective in (Collective.REDUCE_SCATTER, Collective.SCATTER):
        return range(rank, rank + 1)
    if collective in TO_ROOT and rank != root:
        return range(0)
    return range(block_count(collective, size))
