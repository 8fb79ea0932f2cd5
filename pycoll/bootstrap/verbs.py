"""Where this process is on RDMA networks: devices, ports and their addresses, from sysfs.

Nothing here opens a device. What is found decides, alike on both ends, whether two ranks may talk
over verbs: both need a port on the same kind of network, see ``Port.network``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pycoll.config import Config
from pycoll.errors import TransportError

_ROOT = Path("/sys/class/infiniband")
#: Networks in order of preference; of one port the best GID counts.
_ROCE = ("RoCE IPv4", "RoCE IPv6", "RoCE link-local")


@dataclass(frozen=True, slots=True)
class Port:
    """A port that is up. ``gid`` is one of its addresses, ``index`` where that stands in its table.

    ``network`` is equal for two ports that may reach each other: "RoCE IPv4", "RoCE IPv6", "RoCE
    link-local", or "InfiniBand" with the prefix of the subnet.
    """

    device: str
    number: int
    index: int
    gid: str
    network: str

    def __str__(self) -> str:
        return f"{self.device}:{self.number} ({self.network})"


def ports(root: Path = _ROOT) -> list[Port]:
    """Every port that is up and has an address, in order of device names and numbers."""
    found = []
    for device in _numbered(root):
        for port in _numbered(device / "ports"):
            best = min(_addresses(device.name, port), key=_preference, default=None)
            if best is not None:
                found.append(best)
    return found


def choose_port(config: Config, local_rank: int, root: Path = _ROOT) -> Port:
    """The port of a rank: ranks of one host take turns among those that the settings allow.

    Raises TransportError if there is none, with what was found.
    """
    found = ports(root)
    wanted = config.verbs_devices
    allowed = [
        port
        for port in found
        if not wanted or port.device in wanted or f"{port.device}:{port.number}" in wanted
    ]
    if allowed:
        return allowed[local_rank % len(allowed)]
    there = ", ".join(str(port) for port in found) or "none"
    limit = f" PYCOLL_VERBS_DEVICES allows {', '.join(wanted)};" if wanted else ""
    raise TransportError(
        f"no RDMA port to use for verbs:{limit} active ports with an address: {there}; "
        "`ibv_devinfo -v` shows what the system knows",
        operation="init",
    )


def _numbered(folder: Path) -> list[Path]:
    """Entries in order, with mlx5_10 behind mlx5_9."""

    def key(path: Path) -> tuple[str, int]:
        stem = path.name.rstrip("0123456789")
        return stem, int(path.name[len(stem) :] or 0)

    try:
        return sorted(folder.iterdir(), key=key)
    except OSError:
        return []


def _addresses(device: str, port: Path) -> Iterator[Port]:
    if "ACTIVE" not in _read(port / "state"):
        return
    layer = _read(port / "link_layer")
    for entry in _numbered(port / "gids"):
        gid = _read(entry)
        kind = _read(port / "gid_attrs" / "types" / entry.name)
        network = _network(layer, gid, kind)
        if network is not None:
            yield Port(device, int(port.name), int(entry.name), gid, network)


def _network(layer: str, gid: str, kind: str) -> str | None:
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return None
    if int(address) & (1 << 64) - 1 == 0:
        return None  # an empty place in the table
    if layer == "InfiniBand":
        return f"InfiniBand {gid[:19]}"
    if "v2" not in kind:
        return None  # version 1 is not routed, and few networks carry it still
    if address.ipv4_mapped is not None:
        return _ROCE[0]
    return _ROCE[2] if address.is_link_local else _ROCE[1]


def _preference(port: Port) -> tuple[int, int]:
    rank = _ROCE.index(port.network) if port.network in _ROCE else 0
    return rank, port.index


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
