"""Processes of Ray join a world over Ray's key-value store."""

from __future__ import annotations

from typing import Any

import pycoll
from pycoll.integrations.ray_store import RayStore
from pycoll.integrations.store_meeting import Gather, join_limit_s, meet


def init(name: str, rank: int, size: int, **words: Any) -> pycoll.Communicator:
    """Join a world of actors or tasks of Ray; every rank calls this once, from its own process.

    ``name``: a name that all ranks of this world give and no other world of the cluster.
    ``rank``, ``size``: as for ``pycoll.init``. ``words``: its other arguments, except address, comm
    and all_gather.

    Returns the communicator of all ranks.

    Raises the errors of ``pycoll.init``; TimeoutError names the ranks that did not come.

    Cost: 2 to 4 rounds over Ray's key-value store, and the connections of the ranks.

    >>> adapter.init("job", rank=0, size=1).size
    1
    >>> pycoll.finalize()
    """

    def make(all_gather: Gather) -> pycoll.Communicator:
        return pycoll.init(rank=rank, size=size, all_gather=all_gather, **words)

    has_world = pycoll.is_initialized()
    try:
        return meet(RayStore(name), rank, size, join_limit_s(words), make)
    except BaseException:
        if not has_world:
            pycoll.finalize()
        raise
