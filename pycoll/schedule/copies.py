"""The choice of the side that copies a segment, where both the sender and the receiver could.

Where peers reach each other's memory, a segment needs one copy: the receiver reads it in place, or
the sender writes it into the receiver's output. The choice is data of the plan: a field of each row
that sends. `pycoll.cost.copying` chooses from values that all ranks agree on, and the executors
read the field.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class CopyStrategy(IntEnum):
    """The side that copies the segments of a row.

    RECEIVER: the receiver reads them in place. SENDER: the sender writes them into the receiver's
    output. SPLIT: both sides copy segments in turn, unless the sender has a copy of its own to make
    from the same data. Where the chosen side cannot reach the memory, the other side copies, or the
    segment passes through a slot buffer.
    """

    RECEIVER = 0
    SENDER = 1
    SPLIT = 2


class Copies(NamedTuple):
    """The strategies of a plan for data that its rank sends from its own input or output.

    ``idle``: on a rank that receives nothing. Such a rank waits until its receivers have begun, if
    it is to write into their outputs. ``busy``: on a rank that also receives; RECEIVER or SENDER.
    """

    idle: CopyStrategy = CopyStrategy.RECEIVER
    busy: CopyStrategy = CopyStrategy.SENDER


#: The strategies of plans for which nobody has chosen.
USUAL = Copies()
