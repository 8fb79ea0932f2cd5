"""Joining a world: find the other ranks, prove who one is, connect every pair.

``join`` (a process), ``join_threads`` (ranks in one process) and ``join_group`` (a split) are what
the rest of pycoll uses; ``sit_out`` is for ranks that take no part in a split.
"""

from pycoll.bootstrap.connect import sit_out
from pycoll.bootstrap.world import Joined, join, join_group, join_threads

__all__ = ["Joined", "join", "join_group", "join_threads", "sit_out"]
