"""Ports of RDMA devices, and the choice of the rails between two ranks.

A rail is a pair of ports, one of each rank, over which the ranks exchange data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: The numbers of rails that the transport supports (``is_rail_count`` of verbs_layout.h).
RAIL_COUNTS = (4, 2, 1)


class Port(NamedTuple):
    """A port that is up. ``gid`` is one of its addresses, at ``gid_index`` in its table.

    ``network`` is equal for two ports that may reach each other: "RoCE IPv4", "RoCE IPv6", "RoCE
    link-local", or "InfiniBand" with the prefix of the subnet. ``rate`` is in Gb/s, 0 if unknown.
    """

    device: str
    number: int
    gid_index: int
    gid: str
    network: str
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.device}:{self.number} ({self.network})"


def networks_of(ports: Sequence[Port]) -> str:
    """List the networks of the ports, for texts."""
    return ", ".join(dict.fromkeys(port.network for port in ports)) or "no RDMA network"


def share_network(a: Sequence[Port], b: Sequence[Port]) -> bool:
    """Return whether a port of one may reach a port of the other."""
    return not {port.network for port in a}.isdisjoint(port.network for port in b)


def match(lower: Sequence[Port], higher: Sequence[Port], most: int) -> list[tuple[int, int]]:
    """Return the rails of two ranks as pairs of indices into their lists of ports.

    Both ends compute the same result. There are at most ``most`` rails, which is at least 1. A port
    is in at most one rail. All rails are on one network: the first network of the lower rank's
    ports that the higher rank has too. The rails are in the order of the lower rank's ports.
    """
    theirs = {port.network for port in higher}
    network = next((port.network for port in lower if port.network in theirs), None)
    likely = sorted(
        (-_likeness(a, b), i, j)
        for i, a in enumerate(lower)
        for j, b in enumerate(higher)
        if a.network == b.network == network
    )
    pairs: dict[int, int] = {}
    for _, i, j in likely:
        if i not in pairs and j not in pairs.values():
            pairs[i] = j
    count = next((count for count in RAIL_COUNTS if count <= min(most, len(pairs))), 0)
    return sorted(pairs.items())[:count]


def _likeness(a: Port, b: Port) -> int:
    """Rate how likely two ports are on one rail. Networks with separate rails give the ports of one
    rail equal address prefixes, or connect ports with equal names to one switch."""
    same_place = (a.device, a.number) == (b.device, b.number)
    return 2 * (a.gid[:-2] == b.gid[:-2]) + same_place
