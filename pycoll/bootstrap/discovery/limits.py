"""Checks the limit of open files before a rank waits for others.

``check_alone`` runs before the first connection. It counts the descriptors that joining needs at
least, whatever the other ranks are. ``check_together`` runs once the identities of all ranks are
known. It counts the need of every rank, so all ranks raise the same error. Both count the
descriptors that are open at the same time while ranks join.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence

from pycoll.bootstrap.discovery.host import process_name
from pycoll.bootstrap.discovery.identity import (
    Identity,
    choose_transport,
    shares_memory,
    socket_count,
)
from pycoll.config import Config
from pycoll.errors import TransportError

# Numbers of descriptors.
#: Spare ones for the process itself, which imports modules and opens libraries meanwhile.
_SPARE = 3
#: A rank's own: its segment, doorbell, both ends of its lifeline, its local address.
_ENDS = 5
#: A rank's own for sleeping once it has joined, over shared memory or sockets.
_WAITING = 3
#: A rank that accepts connections: a listener, those of the accepting thread, a stranger.
_ACCEPTING = 5
#: Per peer in shared memory: those that it sends; at the serving rank also a connection. Afterwards
#: a doorbell and a lifeline remain.
_PASSED, _AT_RENDEZVOUS, _KEPT = 3, 4, 2
#: A rank that serves the store, in addition to a connection per rank.
_SERVING = 5
#: RDMA devices: a context, its events and completions for some rails.
_DEVICES = 8


def free_descriptors() -> int:
    """Return how many more files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        soft = 1 << 30
    try:
        return max(0, soft - (len(os.listdir("/proc/self/fd")) - 1))
    except OSError:
        return 0  # no descriptor is left to list them


def check_alone(rank: int, size: int, config: Config, serves: bool, together: bool) -> None:
    """Raise TransportError if this process may open too few files to join any world of ``size``.

    ``serves``: this rank serves the store where ranks meet. ``together``: all ranks are known to be
    on this host.
    """
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
    """Raise TransportError, the same on all ranks, if the limit of one of them is too low."""
    ranks = Counter(identity.process for identity in identities)
    each = max(_AT_RENDEZVOUS, *(identity.tcp_sockets for identity in identities))
    most = _WAITING + _ACCEPTING + _DEVICES + each * len(identities) + _SPARE
    for rank, identity in enumerate(identities):
        if identity.descriptors >= most * ranks[identity.process]:
            continue  # an upper bound fits; the exact count takes a loop over all ranks
        own = [r for r, other in enumerate(identities) if other.process == identity.process]
        total = sum(_count_descriptors(r, identities) for r in own) + _SPARE
        if identity.descriptors < total:
            name = f"rank {rank} ({identity.name})"
            raise _too_few(name, len(identities), identity.descriptors, total, rank)


def _count_descriptors(rank: int, identities: Sequence[Identity]) -> int:
    """Count the further descriptors of a rank whose own memory and local address are open."""
    mine = identities[rank]
    sharing = [
        peer
        for peer, other in enumerate(identities)
        if other.process != mine.process and shares_memory(mine, other)
    ]
    rendezvous = rank < min(sharing, default=rank + 1)
    passing = 1 + (_AT_RENDEZVOUS if rendezvous else _PASSED) * len(sharing)
    sockets = 0
    for peer, other in enumerate(identities):
        kind = None if peer == rank else choose_transport(mine, other)
        sockets += socket_count(mine, other) if kind == "tcp" else kind == "verbs"
    if sockets:
        sockets += _ACCEPTING + (_DEVICES if mine.verbs else 0)
    return max(passing, _WAITING + _KEPT * len(sharing) + sockets)


def _too_few(name: str, size: int, free: int, needed: int, rank: int) -> TransportError:
    return TransportError(
        f"{name} may open {free} more files, and to join {size} ranks takes {needed}: raise the "
        "limit of open files (ulimit -n)",
        rank=rank,
        ranks=[rank],
        operation="init",
    )
