"""Ranks on several hosts meet at a store whose place their launcher's exchange has told them.

PMI-1 or PMIx carries one blob of rank 0, the meeting of the job: a random secret, the addresses of
its host, and a port. All rounds of joining, and all later worlds of the process, go through a store
that rank 0 serves there. So the store names ranks that are missing and tells failures at once, and
a process uses the launcher's exchange only once. All ranks have left this exchange before
``init()`` returns on any rank, because the store's first round needs all ranks. An MPI that begins
later finds it unused.

Rank 0 keeps the port for the life of its process, by a socket that does not listen.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable
from typing import Any, Protocol

from pycoll import errors
from pycoll.bootstrap.deadline import Deadline
from pycoll.bootstrap.discovery.network import listen_in_range
from pycoll.bootstrap.forks import end_with_process
from pycoll.bootstrap.rendezvous.meeting import Meeting, address_of, offer
from pycoll.bootstrap.rendezvous.store import StoreExchange, serve_store
from pycoll.config import Config

#: Attempts to keep a free port, which another process may take in between.
_ATTEMPTS = 16


class LauncherExchange(Protocol):
    """The launcher's way to hand a blob of rank 0 to all ranks."""

    def blob_of_first(self, blob: bytes) -> bytes:
        """Return rank 0's blob, on every rank. The other ranks give an empty one."""

    def close(self) -> None:
        """Leave the exchange."""

    def abandon(self) -> None:
        """Leave the exchange at once, after a failure."""


class _Process:
    """The meeting of this process's job, and the socket that keeps rank 0's port."""

    meeting: Meeting | None = None
    kept: socket.socket | None = None


def meet(
    launcher: Callable[[], LauncherExchange],
    rank: int,
    size: int,
    config: Config,
    deadline: Deadline,
) -> StoreExchange:
    """Return the exchange of this world. The first call of a process asks ``launcher``.

    Raises the errors of the launcher's exchange and of the store; TransportError if rank 0 offers
    no address that another host can use.
    """
    meeting = _Process.meeting
    listener = None
    try:
        if rank == 0:
            listener = _listen(config)
        if meeting is None:
            meeting = _ask(launcher(), config, listener)
            _Process.meeting = meeting
        if listener is not None:
            text = ", ".join(map(str, meeting.candidates))
            # The store owns the listener from here on.
            mine, listener = listener, None
            return serve_store(mine, text, meeting.secret, "", size, deadline)
        address = address_of(meeting, config)
        return StoreExchange(address, meeting.secret, "", rank, size, deadline)
    finally:
        if listener is not None:
            listener.close()


def _ask(exchange: LauncherExchange, config: Config, listener: socket.socket | None) -> Meeting:
    """Return the meeting that rank 0, the rank with a ``listener``, offers. Leaves the exchange."""
    try:
        mine = b"" if listener is None else offer(config, listener).to_bytes()
        told = exchange.blob_of_first(mine)
    except BaseException:
        with contextlib.suppress(Exception):
            exchange.abandon()
        raise
    exchange.close()
    try:
        found = Meeting.from_bytes(told)
        if not found.secret:
            raise ValueError("no secret")
        return found
    except (ValueError, TypeError) as error:
        raise errors.TransportError(
            f"rank 0 told an unreadable meeting place over the launcher's exchange: {error}; "
            "install the same pycoll everywhere",
            rank=0,
            operation="init",
        ) from None


def _listen(config: Config) -> socket.socket:
    """Listen on all addresses, at the port that this process keeps."""
    for _ in range(_ATTEMPTS):
        try:
            if _Process.kept is None:
                # A socket that listens excludes the one that keeps its port, so it is closed first.
                with listen_in_range(None, config.port_range) as found:
                    family, name = found.family, found.getsockname()
                _Process.kept = _bind(family, name)
            listener = _bind(_Process.kept.family, _Process.kept.getsockname())
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise errors.TransportError(
                    f"rank 0 cannot listen for the other hosts: {error.strerror}", operation="init"
                ) from None
            if _Process.meeting is not None:
                raise errors.TransportError(
                    "rank 0 still serves another world of this process at its port: finalize it "
                    "before the next init()",
                    operation="init",
                ) from None
            if _Process.kept is not None:
                _Process.kept.close()
                _Process.kept = None
    raise errors.TransportError(
        f"rank 0 found no port that stays free in {_ATTEMPTS} attempts: widen PYCOLL_PORT_RANGE",
        operation="init",
    )


def _bind(family: int, name: Any) -> socket.socket:
    sock = end_with_process(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(name)
    except OSError:
        sock.close()
        raise
    return sock
