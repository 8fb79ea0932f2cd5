"""The limit of open files: looked at before a rank waits for others, since it is known then.

``check_alone`` counts what joining takes at least, whoever the other ranks are, before the first
connection. ``check_together`` counts what it takes of every rank once all have told who they are,
so all raise the same error. Both count descriptors that are open at once while ranks join.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence

from pycoll.bootstrap.host import process_name
from pycoll.bootstrap.identity import (
    Identity,
    choose_transport,
    shares_memory,
    socket_count,
)
from pycoll.config import Config
from pycoll.errors import TransportError

#: Left to the process itself, which imports modules and opens libraries meanwhile.
_SPARE = 3
#: Of a rank: its segment, doorbell, both ends of its lifeline, its door.
_ENDS = 5
#: What a rank waits by when it has joined, over shared memory or sockets.
_WAITING = 3
#: Of a rank that accepts connections: a listener, its thread's own, a stranger.
_ACCEPTING = 5
#: Of a peer in shared memory: while descriptors are passed, those and at the hub a connection too;
#: afterwards a doorbell and a lifeline.
_PASSED, _AT_HUB, _KEPT = 3, 4, 2
#: Of a store that a rank serves, beside a connection for each rank.
_SERVING = 5
#: Of RDMA devices: a context, its events and completions for some rails.
_DEVICES = 8


def free_descriptors() -> int:
    """How many files this process may open still."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 30
    try:
        return max(0, soft - (len(os.listdir("/proc/self/fd")) - 1))
    except OSError:
        return 0  # not even one for the list of them


def check_alone(rank: int, size: int, config: Config, serves: bool, together: bool) -> None:
    """TransportError if this process can never join. ``serves``: it serves the store where ranks
    meet; ``together``: all ranks are known to be on this host."""
    if size == 1:
        return
    inside, across = "shm" in config.transports, config.tcp_sockets
    if "verbs" in config.transports:
        across = 1
    if inside and (together or set(config.transports) == {"shm"}):
        each = _PASSED
    else:
        each = min(_PASSED, across) if inside else across
    needed = 1 + _WAITING + _SPARE + each * (size - 1)
    needed += _ENDS if inside else 0
    needed += _SERVING + size if serves else 0
    free = free_descriptors()
    if free < needed:
        raise _too_few(f"rank {rank} ({process_name()})", size, free, needed, rank)


def check_together(identities: Sequence[Identity]) -> None:
    """TransportError, the same on all ranks, if the limit of one of them is too low."""
    ranks = Counter(identity.process for identity in identities)
    each = max(_AT_HUB, *(identity.tcp_sockets for identity in identities))
    most = _WAITING + _ACCEPTING + _DEVICES + each * len(identities) + _SPARE
    for rank, identity in enumerate(identities):
        if identity.descriptors >= most * ranks[identity.process]:
            continue  # to count exactly takes a look at all others
        own = [r for r, other in enumerate(identities) if other.process == identity.process]
        total = sum(_needed(r, identities) for r in own) + _SPARE
        if identity.descriptors < total:
            who = f"rank {rank} ({identity.name})"
            raise _too_few(who, len(identities), identity.descriptors, total, rank)


def _needed(rank: int, identities: Sequence[Identity]) -> int:
    """By a rank whose own memory and door are open already."""
    mine = identities[rank]
    sharing = [
        peer
        for peer, other in enumerate(identities)
        if other.process != mine.process and shares_memory(mine, other)
    ]
    hub = rank < min(sharing, default=rank + 1)
    passing = 1 + (_AT_HUB if hub else _PASSED) * len(sharing)
    sockets = 0
    for peer, other in enumerate(identities):
        kind = None if peer == rank else choose_transport(mine, other)
        sockets += socket_count(mine, other) if kind == "tcp" else kind == "verbs"
    if sockets:
        sockets += _ACCEPTING + (_DEVICES if mine.verbs else 0)
    return max(passing, _WAITING + _KEPT * len(sharing) + sockets)


def _too_few(who: str, size: int, free: int, needed: int, rank: int) -> TransportError:
    return TransportError(
        f"{who} may open {free} more files, and to join {size} ranks takes {needed}: raise the "
        "limit of open files (ulimit -n)",
        rank=rank,
        ranks=[rank],
        operation="init",
    )
