"""The roles of ranks: workers, and the servers that combine their values.

Every rank sends its role when the ranks join. The last ranks serve, so a role follows from a rank
and the number of servers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pycoll.bootstrap.discovery.identity import Identity
from pycoll.config import SERVER
from pycoll.errors import InvalidArgumentError


def count_servers(identities: Sequence[Identity]) -> int:
    """Return how many ranks serve."""
    return sum(identity.role == SERVER for identity in identities)


def check_roles(identities: Sequence[Identity]) -> None:
    """Raise InvalidArgumentError, the same on all ranks, unless the last ranks serve, and only
    those, and at least one rank works."""
    servers = count_servers(identities)
    workers = len(identities) - servers
    if servers and workers == 0:
        raise InvalidArgumentError(
            f"all {servers} ranks serve: start at least one worker, which calls pycoll.init()",
            operation="init",
        )
    for rank, identity in enumerate(identities):
        if (identity.role == SERVER) == (rank >= workers):
            continue
        other = next(r for r in range(workers, len(identities)) if identities[r].role != SERVER)
        raise InvalidArgumentError(
            f"rank {rank} ({identity.name}) serves, and rank {other} ({identities[other].name}) "
            f"works: the ranks disagree on their roles; servers are the last ranks, here {workers} "
            f"to {len(identities) - 1}",
            rank=rank,
            operation="init",
        )
