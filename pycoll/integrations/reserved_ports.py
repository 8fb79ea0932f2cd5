"""A port on the host of rank 0 that stays reserved until rank 0 listens there, and the variables by
which ``pycoll.init()`` finds it. For engines that can set the variables of their processes."""

from __future__ import annotations

import os
import socket

_reserved: list[socket.socket] = []


def reserve_port(host: str) -> str:
    """Reserve a port of the numeric address ``host`` in this process; returns "host:port".

    The reserving socket is bound and does not listen. It sets SO_REUSEADDR, and so does rank 0
    where it listens, so rank 0 can use the port while other programs do not get it. Raises OSError
    if this host has no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
    except OSError:
        sock.close()
        raise
    _reserved.append(sock)
    port = sock.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_ports() -> None:
    """Free the ports that this process has reserved."""
    while _reserved:
        _reserved.pop().close()


def set_place(rank: int, size: int, address: str, secret: str, job_id: str) -> None:
    """Set the variables of this process so that ``pycoll.init()`` joins as this rank."""
    os.environ.update(_place(rank, size, address, secret, job_id))


def clear_place() -> None:
    """Remove the variables that ``set_place`` has set."""
    for name in _place(0, 1, "", "", ""):
        os.environ.pop(name, None)


def _place(rank: int, size: int, address: str, secret: str, job_id: str) -> dict[str, str]:
    return {
        "PYCOLL_RANK": str(rank),
        "PYCOLL_SIZE": str(size),
        "PYCOLL_ADDRESS": address,
        "PYCOLL_SECRET": secret,
        "PYCOLL_JOB_ID": job_id,
    }
