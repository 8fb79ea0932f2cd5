"""The RDMA ports of this process, and its queue pairs while it joins.

Devices, ports and their addresses come from sysfs; reading them opens no device. Both ends decide
from the ports whether they try verbs: both need a port on the same kind of network, see ``rails``.
They use verbs if both have then made their queue pairs for each other.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pycoll.bootstrap.discovery.host import read_file
from pycoll.bootstrap.discovery.identity import Identity
from pycoll.bootstrap.discovery.rails import Port, match
from pycoll.config import Config
from pycoll.errors import PycollError, TransportError

_ROOT = Path("/sys/class/infiniband")
#: RoCE networks in order of preference. A port is used with its most preferred GID.
_ROCE = ("RoCE IPv4", "RoCE IPv6", "RoCE link-local")


class Pairs:
    """The queue pairs of one rank with ``peers``, one per rail.

    ``transport`` is None until ``prepare`` has made it. It opens the ports that the rails use.
    """

    def __init__(
        self,
        rank: int,
        identities: Sequence[Identity],
        peers: Sequence[int],
        make: Callable[..., Any],
    ) -> None:
        self._rank = rank
        self._identities = identities
        self._peers = list(peers)
        self._rails = {peer: self._rails_to(peer) for peer in peers}
        self._make = make
        self._own: dict[str, str] = {}
        self._theirs: dict[int, str] = {}
        self.transport: Any = None

    def _rails_to(self, peer: int) -> list[int]:
        """Return the indices of own ports, in the order in which both ends number the rails."""
        low, high = sorted((self._rank, peer))
        a, b = self._identities[low], self._identities[high]
        rails = match(a.verbs, b.verbs, min(a.verbs_rails, b.verbs_rails))
        return [rail[self._rank == high] for rail in rails]

    def prepare(self) -> dict[str, Any]:
        """Make the queue pairs. Returns the facts for the exchange: ``verbs`` maps a peer to the
        address of its pair.

        If the device or the system refuses a pair, ``without`` is the reason. The method raises the
        error itself if tcp cannot reach a peer without a pair.
        """
        told: dict[str, Any] = {"verbs": self._own}
        used = sorted({place for places in self._rails.values() for place in places})
        ports = [self._identities[self._rank].verbs[place] for place in used]
        try:
            self.transport = self._make(
                self._rank,
                len(self._identities),
                [(port.device, port.number, port.gid_index) for port in ports],
            )
            for peer in self._peers:
                rails = [used.index(place) for place in self._rails[peer]]
                address = self.transport.prepare(peer, rails)
                self._own[str(peer)] = base64.b64encode(address).decode()
        except PycollError as error:
            lacking = [peer for peer in self._peers if str(peer) not in self._own]
            if not all("tcp" in self._identities[p].transports for p in [self._rank, *lacking]):
                raise
            told["without"] = str(error)
        return told

    def agree(self, endpoints: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the peers with which both ends have made a pair; all others use tcp."""
        for peer in self._peers:
            address = endpoints[peer]["verbs"].get(str(self._rank))
            if address is not None and str(peer) in self._own:
                self._theirs[peer] = address
            elif str(peer) in self._own:
                self.transport.forget(peer)
        if not self._theirs:
            self.transport = None
        return sorted(self._theirs)

    def attach(self, peer: int, sock: socket.socket) -> None:
        """Connect the queue pair. The transport takes ``sock``, which is connected to the peer."""
        sock.setblocking(False)
        name = f"rank {peer} ({self._identities[peer].name})"
        address = base64.b64decode(self._theirs[peer])
        self.transport.attach(peer, address, sock.detach(), name)


def ports(root: Path = _ROOT) -> list[Port]:
    """Return every port that is up and has an address, in order of device names and numbers."""
    found = []
    for device in _in_numeric_order(root):
        for port in _in_numeric_order(device / "ports"):
            best = min(_addresses(device.name, port), key=_preference, default=None)
            if best is not None:
                found.append(best)
    return found


def choose_ports(config: Config, local_rank: int, root: Path = _ROOT) -> tuple[Port, ...]:
    """Return the ports of a rank: all that the settings allow, or without such a setting all that
    are faster than half the rate of their network's fastest port, or of unknown rate.

    Ranks of one host start with different ports. Raises TransportError if no port is left; its text
    lists the ports that were found.
    """
    found = ports(root)
    wanted = config.verbs_devices
    allowed = [
        port
        for port in found
        if port.device in wanted
        or f"{port.device}:{port.number}" in wanted
        or (not wanted and not _lags(port, found))
    ]
    if allowed:
        first = local_rank % len(allowed)
        return (*allowed[first:], *allowed[:first])
    there = ", ".join(str(port) for port in found) or "none"
    limit = f" PYCOLL_VERBS_DEVICES allows {', '.join(wanted)};" if wanted else ""
    raise TransportError(
        f"no RDMA port to use for verbs:{limit} active ports with an address: {there}; "
        "`ibv_devinfo -v` shows what the system knows",
        operation="init",
    )


def _lags(port: Port, others: Sequence[Port]) -> bool:
    """Return whether the port has at most half the rate of its network's fastest port. Rails carry
    equal shares, so it would delay the faster ones."""
    best = max(other.rate for other in others if other.network == port.network)
    return 0 < port.rate <= best / 2


def _in_numeric_order(folder: Path) -> list[Path]:
    """Return the entries in numeric order: mlx5_9 before mlx5_10."""

    def key(path: Path) -> tuple[str, int]:
        stem = path.name.rstrip("0123456789")
        return stem, int(path.name[len(stem) :] or 0)

    try:
        return sorted(folder.iterdir(), key=key)
    except OSError:
        return []


def _addresses(device: str, port: Path) -> Iterator[Port]:
    if "ACTIVE" not in read_file(port / "state"):
        return
    layer = read_file(port / "link_layer")
    for entry in _in_numeric_order(port / "gids"):
        gid = read_file(entry)
        kind = read_file(port / "gid_attrs" / "types" / entry.name)
        network = _network(layer, gid, kind)
        if network is not None:
            yield Port(device, int(port.name), int(entry.name), gid, network, _rate(port))


def _network(layer: str, gid: str, kind: str) -> str | None:
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return None
    if int(address) & (1 << 64) - 1 == 0:
        return None  # an empty entry of the table
    if layer == "InfiniBand":
        return f"InfiniBand {gid[:19]}"
    if "v2" not in kind:
        return None  # RoCE v1 cannot be routed, and few networks still use it
    if address.ipv4_mapped is not None:
        return _ROCE[0]
    return _ROCE[2] if address.is_link_local else _ROCE[1]


def _preference(port: Port) -> tuple[int, int]:
    rank = _ROCE.index(port.network) if port.network in _ROCE else 0
    return rank, port.gid_index


def _rate(port: Path) -> float:
    try:
        return float(read_file(port / "rate").split(" ")[0])
    except ValueError:
        return 0.0
