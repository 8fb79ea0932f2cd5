"""What torch.distributed reads of the environment to find its place, as torchrun sets it.

``pycoll run`` sets it too, so that ``init_process_group()`` works under it: rank 0 of torch's world
serves a store at MASTER_ADDR:MASTER_PORT, which the launcher keeps free for it. pycoll itself never
needs these variables there: PYCOLL_* say more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT")


class Meeting:
    """A port of this host that nobody else gets, and that torch's store can still listen at.

    The socket is bound and does not listen; both sides set SO_REUSEADDR, as torch does.
    """

    def __init__(self) -> None:
        self._sock = _bound()
        self.host, self.port = self._sock.getsockname()[:2]

    def close(self) -> None:
        """The port may be anybody's again."""
        self._sock.close()


def _bound() -> socket.socket:
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
    """The variables that are not somebody else's. A place is all of one maker, or none."""
    taken = any(name in environ for name in _PLACE)
    place = () if taken else _PLACE
    return frozenset((*place, *(name for name in _MEETING if name not in environ)))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what an outer ``pycoll run`` has set for one of its ranks."""
    if environ.get("PYCOLL_STORE") != "launcher" and "PYCOLL_ROSTER" not in environ:
        return dict(environ)
    return {name: text for name, text in environ.items() if name not in (*_PLACE, *_MEETING)}


def variables(rank: int, size: int, host: str, port: int, names: frozenset[str]) -> dict[str, str]:
    """Those of ``names``, for a rank of a world on one host."""
    place = (rank, size, rank, size)
    both = dict(zip((*_PLACE, *_MEETING), map(str, (*place, host, port)), strict=True))
    return {name: text for name, text in both.items() if name in names}


class TorchPlaces:
    """What ranks of one launch are told. Those that were started equally often meet: no rank that
    was started again comes to where an earlier one still listens."""

    def __init__(self, size: int, environ: Mapping[str, str]) -> None:
        self._size = size
        self._names = unset_in(environ)
        self._meetings: list[Meeting] = []
        self._starts = [0] * size

    def next_of(self, rank: int) -> dict[str, str]:
        """For the next process that is this rank."""
        start = self._starts[rank]
        self._starts[rank] += 1
        if start == len(self._meetings):
            self._meetings.append(Meeting())
        meeting = self._meetings[start]
        return variables(rank, self._size, meeting.host, meeting.port, self._names)

    def close(self) -> None:
        """Their ports may be anybody's again."""
        for meeting in self._meetings:
            meeting.close()


class _Followed:
    """What this process sets anew for every world of an elastic job."""

    def __init__(self) -> None:
        self.names: frozenset[str] | None = None


_followed = _Followed()


def follow(rank: int, size: int, host: str, port: int) -> None:
    """This process has a place in another world of its elastic job."""
    if _followed.names is None:
        _followed.names = unset_in(os.environ)
    os.environ.update(variables(rank, size, host, port, _followed.names))
