"""The environment variables from which torch.distributed learns its rank, as torchrun sets them.

``pycoll run`` sets them too, so that ``init_process_group()`` works under it: rank 0 of torch's
world serves a store at MASTER_ADDR:MASTER_PORT, a port that the launcher reserves. Under
``pycoll run`` pycoll itself does not need these variables, since the PYCOLL_* variables say more.

``pycoll run`` also sets those of JAX, with a port of its own: jax.distributed.initialize() reads
JAX_COORDINATOR_ADDRESS, and ``pycoll.jax`` makes it read the other two.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pycoll.config import with_new_names

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")
_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_ALL = frozenset((*_PLACE, *_MEETING, *_JAX))
#: Ports that a node reserves for each start of a rank: torch's, and JAX's.
PORTS_PER_START = 2


class Share(NamedTuple):
    """The ranks of one node, a launcher on one host: ``ranks`` ranks from ``first`` on, of ``size``
    ranks on all nodes. ``node`` is the node's number."""

    first: int
    ranks: int
    size: int
    node: int = 0

    @classmethod
    def whole(cls, size: int) -> Share:
        """Return the share of the only node of a job."""
        return cls(0, size, size)


class Meeting:
    """A reserved port of this host, at which torch's store can still listen.

    The reserving socket is bound and does not listen. It sets SO_REUSEADDR, and so does torch, so
    torch can bind the same port while other processes do not get it.
    """

    def __init__(self) -> None:
        self._sock = _bind()
        self.host, self.port = self._sock.getsockname()[:2]

    def close(self) -> None:
        """Free the port."""
        self._sock.close()


def _bind() -> socket.socket:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, 0))
            return sock
        except OSError:
            if sock is not None:
                sock.close()
            if family == socket.AF_INET6:
                raise
    raise AssertionError("unreachable")


def unset_in(environ: Mapping[str, str]) -> frozenset[str]:
    """Return the names that this launcher may set. It sets no variable of ``_MEETING`` that is set
    already, and none of ``_PLACE`` or of ``_JAX`` if one of them is set."""
    groups = [group for group in (_PLACE, _JAX) if not any(name in environ for name in group)]
    free = [name for name in _MEETING if name not in environ]
    return frozenset((*(name for group in groups for name in group), *free))


def inherited_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that an outer ``pycoll run`` set for its rank, and
    with the new names of renamed variables."""
    environ = with_new_names(environ)
    if environ.get("PYCOLL_STORE") != "launcher" and "PYCOLL_ELASTIC" not in environ:
        return dict(environ)
    return {name: text for name, text in environ.items() if name not in _ALL}


def variables(
    share: Share, local_rank: int, host: str, port: int, names: frozenset[str]
) -> dict[str, str]:
    """Return the values of the variables ``names`` for a rank of the node with this share."""
    place = (share.first + local_rank, share.size, local_rank, share.ranks, share.node)
    both = dict(zip((*_PLACE, *_MEETING), map(str, (*place, host, port)), strict=True))
    return {name: text for name, text in both.items() if name in names}


class TorchPlaces:
    """The variables for the ranks of one node. Processes with the same number of starts get the
    same port: a rank that was started again does not meet at a port where an earlier process still
    listens. ``elsewhere``: the host of rank 0 and the ports that its node has reserved,
    PORTS_PER_START for each start of a rank."""

    def __init__(
        self,
        share: Share,
        environ: Mapping[str, str],
        elsewhere: tuple[str, Sequence[int]] | None = None,
    ) -> None:
        self._share = share
        self._names = unset_in(environ)
        self._elsewhere = elsewhere
        self._meetings: list[Meeting] = []
        self._starts = [0] * share.ranks

    def next_of(self, local_rank: int) -> dict[str, str]:
        """Return the variables for the next process of this rank of the node."""
        start = self._starts[local_rank]
        self._starts[local_rank] += 1
        host, port = self._meeting_of(start, 0)
        own = variables(self._share, local_rank, host, port, self._names)
        host, port = self._meeting_of(start, 1)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        place = (address, str(self._share.size), str(self._share.first + local_rank))
        jax = dict(zip(_JAX, place, strict=True))
        return own | {name: text for name, text in jax.items() if name in self._names}

    def _meeting_of(self, start: int, which: int) -> tuple[str, int]:
        if self._elsewhere is not None:
            host, ports = self._elsewhere
            last = len(ports) // PORTS_PER_START - 1
            return host, ports[PORTS_PER_START * min(start, last) + which]
        place = PORTS_PER_START * start + which
        while place >= len(self._meetings):
            self._meetings.append(Meeting())
        return self._meetings[place].host, self._meetings[place].port

    def close(self) -> None:
        """Free the ports."""
        for meeting in self._meetings:
            meeting.close()


class _Followed:
    """The names of the variables that this process sets again for every world of an elastic job."""

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None


_followed = _Followed()


def follow(share: Share, local_rank: int, host: str, port: int) -> None:
    """Set this process's variables for another world of its elastic job."""
    if _followed.names is None:
        _followed.names = unset_in(os.environ)
    os.environ.update(variables(share, local_rank, host, port, _followed.names))
