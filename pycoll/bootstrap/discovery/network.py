"""Addresses: parsing and resolving them, this machine's interfaces, listening sockets."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll.bootstrap.forks import end_with_process
from pycoll.errors import InvalidArgumentError, TransportError

if TYPE_CHECKING:
    # Ranks of one host use no networks, so they do not pay for this import.
    import ipaddress

BACKLOG = 512
#: Seconds; see ``watch_host``.
HOST_LOST_S = 3.5
_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFNETMASK = 0x8912, 0x8913, 0x891B
_IFREQ_BYTES = 40
_IFF_UP = 1
_SCOPE_GLOBAL = 0
_CONGESTION = (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
#: Congestion controls without pacing. The first one is chosen where another one is set.
_UNPACED = (b"cubic", b"dctcp")


class Interface(NamedTuple):
    """One usable address of this machine: the interface's name, the address, its network, and the
    speed in Mbit/s (0: unknown)."""

    name: str
    address: str
    network: str
    speed: int = 0

    @property
    def loopback(self) -> bool:
        """Whether the address reaches only this machine."""
        import ipaddress

        return ipaddress.ip_address(self.address).is_loopback


def parse_address(text: str) -> tuple[str, int]:
    """Parse "host:port" or "[ipv6]:port" into a pair. Raises InvalidArgumentError."""
    host, colon, port_text = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgumentError(
            f"address={text!r}: write an IPv6 address in brackets, [{host.strip('[]')}]:port"
        )
    port = int(port_text) if port_text.isascii() and port_text.isdigit() else 0
    if not colon or not host or not 1 <= port <= 65535:
        raise InvalidArgumentError(f'address={text!r}: expected "host:port", port within 1-65535')
    return host, port


def resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return (family, socket address) of all addresses of ``host``. Raises InvalidArgumentError if
    the name does not resolve."""
    # A str goes through the idna codec, whose import is slow; bytes do not.
    name = host.encode() if host.isascii() else host
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgumentError(
            f"address='{host}:{port}': {host!r} does not resolve ({why}); "
            "check the name, or give the address in numbers"
        ) from None
    return [(int(family), tuple(address)) for family, _, _, _, address in found]


def interfaces(only: Iterable[str] = ()) -> list[Interface]:
    """Return all addresses of interfaces that are up, or of those named by ``only``.

    Link-local IPv6 addresses are left out: they need a scope that has no meaning on another
    machine. Raises InvalidArgumentError if a name in ``only`` has no address.
    """
    found = _ipv4() + _ipv6()
    names = tuple(only)
    for name in names:
        if not any(interface.name == name for interface in found):
            known = ", ".join(sorted({interface.name for interface in found})) or "none"
            raise InvalidArgumentError(
                f"PYCOLL_INTERFACES names {name!r}, which has no address; with addresses: {known}"
            )
    return [i for i in found if not names or i.name in names]


def _ipv4() -> list[Interface]:
    import ipaddress

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        buffer = array.array("B", bytes(_IFREQ_BYTES * 256))
        # struct ifconf: length of the buffer in bytes, pointer to the buffer.
        ifconf = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (length, _) = struct.unpack("iL", fcntl.ioctl(sock, _SIOCGIFCONF, ifconf))
        data = buffer.tobytes()[:length]
        for at in range(0, len(data), _IFREQ_BYTES):
            raw_name = data[at : at + 16].split(b"\0", 1)[0]
            if not _flags(sock, raw_name) & _IFF_UP:
                continue
            address = socket.inet_ntoa(data[at + 20 : at + 24])
            request = struct.pack("16s24x", raw_name)
            mask = socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFNETMASK, request)[20:24])
            network = ipaddress.ip_network(f"{address}/{mask}", strict=False)
            name = raw_name.decode(errors="replace").split(":")[0]
            found.append(Interface(name, address, str(network), _speed(name)))
    return found


def _speed(name: str) -> int:
    try:
        with open(f"/sys/class/net/{name}/speed") as file:
            return max(0, int(file.read()))
    except (OSError, ValueError):
        return 0


def _flags(sock: socket.socket, name: bytes) -> int:
    reply = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s24x", name))
    return int(struct.unpack_from("H", reply, 16)[0])


def _ipv6() -> list[Interface]:
    import ipaddress

    found = []
    try:
        with open("/proc/net/if_inet6") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        digits, _, prefix, scope, _, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if int(scope, 16) != _SCOPE_GLOBAL and not address.is_loopback:
            continue
        network = ipaddress.ip_network((address, int(prefix, 16)), strict=False)
        found.append(Interface(name, str(address), str(network), _speed(name)))
    return found


def tcp_socket(host: str) -> socket.socket:
    """Make an unconnected socket for the address's family, with unpaced congestion control.

    The choice must be made before the socket connects: a socket that began with bbr, which paces
    for the internet, keeps pacing after a later change. Accepted sockets inherit the congestion
    control of their listener.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = end_with_process(socket.socket(family, socket.SOCK_STREAM))
    with contextlib.suppress(OSError):
        if not sock.getsockopt(*_CONGESTION, 16).startswith(_UNPACED):
            sock.setsockopt(*_CONGESTION, _UNPACED[0])
    return sock


def watch_host(sock: socket.socket) -> None:
    """Make a TCP connection fail ``HOST_LOST_S`` after the first bytes that a vanished host does
    not acknowledge: those of a pulse, or the kernel's probe after a second without any.

    It is for connections whose ends always read, so that no full window delays the kernel's probes.
    """
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, int(HOST_LOST_S)),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(HOST_LOST_S * 1000)),
    )
    for level, option, value in options:
        with contextlib.suppress(OSError):
            sock.setsockopt(level, option, value)


def listen_tcp(host: str, port: int = 0, both: bool = False) -> socket.socket:
    """Make a listening socket. Raises OSError if the address cannot be bound.

    ``both``: a socket on the IPv6 wildcard also accepts IPv4.
    """
    sock = tcp_socket(host)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def listen_anywhere(port: int = 0) -> socket.socket:
    """Listen on all addresses of all families that this machine has. Raises OSError."""
    try:
        return listen_tcp("::", port, both=True)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return listen_tcp("0.0.0.0", port)


def listen_in_range(host: str | None, ports: tuple[int, int] | None) -> socket.socket:
    """Listen on ``host`` (None: all addresses), at a free port within ``ports`` if given.

    Raises TransportError if no port of the range is free or the host cannot be bound.
    """
    first, last = ports or (0, 0)
    span = last - first + 1
    # Ranks of one host start the search at different ports, so they seldom collide.
    start = os.getpid() % span
    for step in range(span):
        port = first + (start + step) % span
        try:
            return listen_anywhere(port) if host is None else listen_tcp(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise TransportError(
                    f"cannot listen on {host or 'any address'}, port {port}: {error.strerror}",
                    operation="init",
                ) from None
    raise TransportError(
        f"PYCOLL_PORT_RANGE={first}-{last}: all {span} ports are in use on this host; "
        "widen the range (each rank needs one port while it joins)",
        operation="init",
    )


def listen_at(host: str, port: int, server: str = "rank 0") -> socket.socket:
    """Listen at the address that all ranks were given, on rank 0. Listens on all addresses if
    ``host`` is not a local address. ``server`` is rank 0 in the words of error texts.

    A host name may resolve to 127.x.y.z here (Debian's /etc/hosts) and to another address on other
    hosts. So only "localhost" and numeric addresses are bound as given. Raises TransportError.
    """
    import ipaddress

    try:
        numeric: ipaddress.IPv4Address | ipaddress.IPv6Address | None = ipaddress.ip_address(host)
    except ValueError:
        numeric = None
    try:
        if host == "localhost":
            return listen_tcp("127.0.0.1", port)
        if numeric is not None:
            try:
                return listen_tcp(host, port)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
        return listen_anywhere(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise TransportError(
                f"{server} cannot listen at address='{host}:{port}': {error.strerror}",
                rank=0,
                operation="init",
            ) from None
        raise TransportError(
            f"{server} cannot listen at address='{host}:{port}': the port is in use; choose "
            "another one, or see whether an earlier job still runs",
            rank=0,
            operation="init",
        ) from None


def abstract_name(text: str) -> str:
    """Return the address of an abstract unix socket, which has no file and ends with its last
    descriptor."""
    return "\0pycoll-" + text


def listen_unix(name: str) -> socket.socket:
    """Make a listening unix socket. Raises OSError if the name is taken."""
    sock = end_with_process(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    try:
        sock.bind(name)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of the process at the other end of a unix socket, as seen from this
    process's namespaces."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("iII", raw)
    return int(pid), int(uid)
