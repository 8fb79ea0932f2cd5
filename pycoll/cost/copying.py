"""The choice of the side that copies, and what the busiest core then copies.

A segment between ranks that reach each other's memory needs one copy. The side with less other work
makes it. The root of a gather receives from everybody, so its peers write. The root of a broadcast
to one peer has nothing else to do, so both copy a half. Otherwise receivers read, all at the same
time, unless the message exceeds the caches: then the sender writes past its caches.

`choose_copies` is a function of values that are equal on all ranks, and the only choice. Lowering
makes the strategy of each row from its result, and profiles count with the same result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pycoll.schedule.collectives import REDUCING, Collective
from pycoll.schedule.copies import Copies, CopyStrategy

if TYPE_CHECKING:
    from pycoll.algorithms.formulas import Cost
    from pycoll.cost.model import Parameters

#: Collectives in which a rank copies its own block from its input to its output.
_KEEPING = (
    Collective.ALL_GATHER,
    Collective.ALL_TO_ALL,
    Collective.GATHER,
    Collective.REDUCE_SCATTER,
    Collective.SCATTER,
)


def choose_copies(collective: Collective, size: int, nbytes: int, parameters: Parameters) -> Copies:
    """The sides that copy a message of ``nbytes`` among ``size`` ranks, where both could.

    In a reducing collective busy ranks send results, which are in their caches.
    """
    if collective in REDUCING:
        return Copies()
    large = nbytes >= parameters.inside.cache_bytes
    busy = CopyStrategy.SENDER if large else CopyStrategy.RECEIVER
    several = nbytes > size * parameters.segment_bytes
    return Copies(_choose_idle(collective, several, parameters.per_core > 1), busy)


def _choose_idle(collective: Collective, several: bool, shares_cores: bool) -> CopyStrategy:
    """The side that copies the data of ranks that receive nothing.

    ``several``: a block of the message has several segments. A single one is read as quickly in
    place. ``shares_cores``: ranks share cores, so the core of the busy side also runs others.
    """
    if collective is Collective.GATHER and several:
        return CopyStrategy.SPLIT if shares_cores else CopyStrategy.SENDER
    if collective is Collective.BROADCAST and not shares_cores:
        return CopyStrategy.SPLIT
    return CopyStrategy.RECEIVER


def kept_by(collective: Collective, size: int) -> float:
    """The bytes that a rank copies from its own input to its output, in units of n.

    The result of a reduce_scatter counts as half a copy, because the reduction reads it in place.
    """
    if collective not in _KEEPING:
        return 0.0
    return (0.5 if collective is Collective.REDUCE_SCATTER else 1.0) / size


def copied_in_place(collective: Collective, size: int, cost: Cost, copies: Copies) -> float:
    """The bytes that the busiest core copies where peers reach each other's memory, in units of n.

    The receiver copies in addition to its own block, but the root of a scatter receives nothing,
    and the root of a gather sends nothing. SPLIT halves the copies of two ranks, and those of each
    leaf of a gather; more receivers of a broadcast read the same memory. Busy ranks send about as
    much as they receive, so their side does not count.
    """
    kept = kept_by(collective, size)
    sent, received = float(cost.sent), float(cost.received)
    if collective is Collective.GATHER and copies.idle is not CopyStrategy.RECEIVER:
        split = copies.idle is CopyStrategy.SPLIT
        return max(sent / 2, received / 2 + kept) if split else max(sent, kept)
    if collective is Collective.SCATTER:
        return max(received, kept)
    if collective is Collective.BROADCAST and size == 2 and copies.idle is CopyStrategy.SPLIT:
        return received / 2
    return received + kept
