"""Messages between two ranks: send, recv and their non-blocking twins."""

from __future__ import annotations

import operator
from typing import Any

from pycoll.arrays import framework_of
from pycoll.core import Core, operation
from pycoll.device_view import need_host
from pycoll.errors import InvalidArgumentError

TAG_MAX = 2**31 - 1


class Messages(Core):
    """Part of Communicator. ``x`` and errors: see Reducing.

    A message goes to the earliest recv from its sender with its tag, from 0 to 2**31-1. Both sides
    must agree on the bytes (MismatchError); dtype and shape are not compared. The order between
    messages of one sender and tag is kept. A rank may send to itself.
    """

    @operation
    def send(self, x: Any, dest: int, tag: int = 0) -> None:
        """Send ``x`` to rank ``dest``; returns when x may be changed again.

        That may be before the receiver asked for it (short messages) or only then.
        """
        self._send(x, dest, tag, False)

    @operation
    def isend(self, x: Any, dest: int, tag: int = 0) -> Any:
        """Start sending; returns a Work. Leave x unchanged until it is done."""
        return self._send(x, dest, tag, True)

    @operation
    def recv(self, out: Any, source: int, tag: int = 0) -> Any:
        """Receive into ``out`` from rank ``source`` and return out.

        out must be writable, contiguous, and have exactly the bytes of the message.
        """
        return self._recv(out, source, tag, False)

    @operation
    def irecv(self, out: Any, source: int, tag: int = 0) -> Any:
        """Start receiving; returns a Work whose wait() gives ``out``."""
        return self._recv(out, source, tag, True)

    def _send(self, x: Any, dest: int, tag: int, asynchronous: bool) -> Any:
        dest, tag = self._check_rank(dest, "dest"), _check_tag(tag)
        view = framework_of(x).view(x, "x")
        need_host(view, "x", "send takes")
        return self._native.send(view, dest, tag, asynchronous)

    def _recv(self, out: Any, source: int, tag: int, asynchronous: bool) -> Any:
        source, tag = self._check_rank(source, "source"), _check_tag(tag)
        view = framework_of(out, "out").out(out, "out")
        need_host(view, "out", "recv takes")
        if not view.writable:
            raise InvalidArgumentError("out is read-only: pass an array that can be written")
        if not view.contiguous:
            raise InvalidArgumentError(
                f"out of shape {view.shape} is not contiguous in C order: receive into one that is"
            )
        work = self._native.recv(view, source, tag, asynchronous, out)
        return out if work is None else work


def _check_tag(tag: Any) -> int:
    try:
        number = operator.index(tag)
    except TypeError:
        raise InvalidArgumentError(f"tag is {tag!r}: expected a whole number") from None
    if not 0 <= number <= TAG_MAX:
        raise InvalidArgumentError(f"tag is {number}: expected 0 to {TAG_MAX}")
    return number
