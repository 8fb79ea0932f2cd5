"""Joining a world: discover the other ranks, authenticate them, connect every pair.

The rest of pycoll calls one of five functions. ``join`` joins one process. ``join_threads`` joins
ranks that are threads of one process. ``join_part`` makes sub-communicators inside hosts where
``can_share`` allows it, and ``join_group`` makes any other sub-communicator. A rank that joins no
group during ``join_group`` calls ``sit_out``. A ``Successor`` shrinks a communicator.
"""

from pycoll.bootstrap.connect import sit_out
from pycoll.bootstrap.joining import Joined, join, join_group, join_part, join_threads
from pycoll.bootstrap.recovery.shrinking import Successor
from pycoll.bootstrap.subcommunicators import Parent, can_share

__all__ = [
    "Joined",
    "Parent",
    "Successor",
    "can_share",
    "join",
    "join_group",
    "join_part",
    "join_threads",
    "sit_out",
]
