"""The contribution algebra: which contributions a value holds, and which a collective requires.

The schedule proof (`pycoll.schedule.proof`) and the plan verifier (`pycoll.plan.verifier`) use it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pycoll.schedule.collectives import FROM_ROOT, REDUCING, Collective
from pycoll.schedule.language import Schedule, ScheduleError

#: Numbers of combinations: the trees of both operands (lower number first) -> tree of the result.
Trees = dict[tuple[int, int], int]
#: Less than any tree; stands for the encoding of a value in the place of the second operand.
_ENCODES = -(1 << 62)


class Value(NamedTuple):
    """The content of a chunk at one moment: contributions of ``ranks`` to data chunk ``chunk``.

    ``ranks`` is a bit mask. ``first`` and ``last`` are set if the value is exactly the left fold of
    ranks first, first+1, ... last in this order; otherwise both are -1. ``tree`` identifies the
    order of the combinations: operations commute but do not associate in their last bits, so two
    values of one chunk have the same bits if their trees are equal. A negative tree stands for the
    contribution of one rank.
    """

    chunk: int
    ranks: int
    first: int
    last: int
    tree: int

    def __str__(self) -> str:
        return f"chunk {self.chunk} of {ranks_text(self.ranks)}"


def initial(chunk: int, rank: int) -> Value:
    """The value that holds only the contribution of ``rank`` to ``chunk``."""
    return Value(chunk, 1 << rank, rank, rank, -1 - rank)


def combine(left: Value, right: Value, trees: Trees) -> Value:
    """The value of ``left op right``.

    Raises ScheduleError if the operands belong to different chunks or share a contribution.
    """
    if left.chunk != right.chunk:
        raise ScheduleError(f"combines {left} with {right}")
    if left.ranks & right.ranks:
        raise ScheduleError(
            f"the contribution of {ranks_text(left.ranks & right.ranks)} would count twice: "
            f"combines {left} with {right}"
        )
    low, high = sorted((left.tree, right.tree))
    tree = trees.setdefault((low, high), len(trees))
    ranks = left.ranks | right.ranks
    if left.first >= 0 and right.first == right.last == left.last + 1:
        return Value(left.chunk, ranks, left.first, right.last, tree)
    return Value(left.chunk, ranks, -1, -1, tree)


def encode_value(value: Value, rank: int, trees: Trees) -> Value:
    """The value that the codes of ``value`` decode to, if ``rank`` encodes it.

    The bits are those of no other value: another rank may round otherwise.
    """
    tree = trees.setdefault((value.tree, _ENCODES - rank), len(trees))
    return value._replace(tree=tree)


def wanted_ranks(collective: Collective, workers: int, root: int, rank: int, block: int) -> int:
    """The mask of ranks whose contributions ``block`` of the output of ``rank`` must hold.

    ``workers``: the number of ranks that contribute; they are the first ranks. The mask is zero
    where the collective leaves the output undefined (exscan on rank 0).
    """
    if collective is Collective.SCAN:
        return (2 << rank) - 1
    if collective is Collective.EXSCAN:
        return (1 << rank) - 1
    if collective in REDUCING:
        return (1 << workers) - 1
    if collective in FROM_ROOT:
        return 1 << root
    if collective is Collective.ALL_TO_ALL:
        return 1 << block // workers
    return 1 << block


def outputs_of(schedule: Schedule, rank: int) -> Iterator[tuple[int, int]]:
    """(chunk, mask of required ranks) for every output chunk of ``rank`` that is defined."""
    kind, workers, root, parts = (
        schedule.collective,
        schedule.workers,
        schedule.root,
        schedule.parts,
    )
    for block in schedule.outputs_of(rank):
        if ranks := wanted_ranks(kind, workers, root, rank, block):
            for chunk in range(block * parts, (block + 1) * parts):
                yield chunk, ranks


def ranks_text(ranks: int) -> str:
    """The text for a mask of ranks: "rank 3", "ranks 0-2, 7", "no rank"."""
    spans: list[list[int]] = []
    for rank in range(ranks.bit_length()):
        if ranks >> rank & 1:
            if spans and spans[-1][1] == rank - 1:
                spans[-1][1] = rank
            else:
                spans.append([rank, rank])
    if not spans:
        return "no rank"
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank {text}" if ranks.bit_count() == 1 else f"ranks {text}"


def check_same_bits(
    schedule: Schedule, values: Iterable[tuple[int, Value]], coded: bool = False
) -> None:
    """Raises ScheduleError unless all ranks of an all_reduce combined each chunk in one order.

    ``values`` are pairs of a rank and the value of one of its output chunks. Other collectives pass
    without a check, unless their values were ``coded``.
    """
    if schedule.collective is not Collective.ALL_REDUCE and not coded:
        return
    seen: dict[int, tuple[int, int]] = {}
    for rank, value in values:
        other, tree = seen.setdefault(value.chunk, (rank, value.tree))
        if tree != value.tree:
            raise ScheduleError(
                f"ranks {other} and {rank} combine chunk {value.chunk} in different orders, "
                "so their results may differ in the last bits"
            )
