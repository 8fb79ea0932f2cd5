"""Joining a world: find the other ranks, prove who one is, connect every pair.

``join`` (a process), ``join_threads`` (ranks in one process), ``join_part`` (a split inside hosts,
see ``can_share``) and ``join_group`` (any other split) are what the rest of pycoll uses;
``sit_out`` is for ranks that take no part in the latter.
"""

from pycoll.bootstrap.connect import sit_out
from pycoll.bootstrap.parts import Parent, can_share
from pycoll.bootstrap.world import Joined, join, join_group, join_part, join_threads

__all__ = [
    "Joined",
    "Parent",
    "can_share",
    "join",
    "join_group",
    "join_part",
    "join_threads",
    "sit_out",
]
