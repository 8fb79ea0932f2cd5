"""Messages between two ranks: send, recv and their non-blocking twins."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays import framework_of
from pycoll.core import Core, operation
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError

TAG_MAX = 2**31 - 1


class Message(NamedTuple):
    """A send or a recv. ``view`` is its memory, ``result`` what the caller gets."""

    sends: bool
    peer: int
    tag: int
    view: _core.BufferView
    where: Where
    result: Any

    @property
    def text(self) -> str:
        """For errors."""
        return f"{'send' if self.sends else 'recv'} with tag {self.tag}"


class Messages(Core):
    """Part of Communicator. ``x`` and errors: see Reducing.

    A message goes to the earliest recv from its sender with its tag, from 0 to 2**31-1. Both sides
    must agree on the bytes (MismatchError); dtype and shape are not compared. The order between
    messages of one sender and tag is kept. A rank may send to itself.

    Device arrays are sent in their stream, or in ``stream``, where nothing overtakes: messages of
    two ranks are received in the order sent, within one group in that of their tags, and another
    tag is a MismatchError as another length is. Ranks that send to each other, and a rank that
    sends to itself, put both calls in one ``group()``. Before the communicator's first collective
    on device arrays the hosts carry them, in the order of streams, too. See docs/gpu.md.
    """

    @operation
    def send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dest``; returns when x may be changed again.

        That may be before the receiver asked for it (short messages) or only then. On a device it
        returns at once, and the stream goes on then.
        """
        self._post(self._look_send(x, dest, tag, stream=stream), False)

    @operation
    def isend(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start sending; returns a Work. Leave x unchanged until it is done."""
        return self._post(self._look_send(x, dest, tag, stream=stream), True)

    @operation
    def recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Receive into ``out`` from rank ``source`` and return out.

        out must be writable, in host memory contiguous, and have exactly the bytes of the message.
        """
        self._post(self._look_recv(out, source, tag, stream=stream), False)
        return out

    @operation
    def irecv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start receiving; returns a Work whose wait() gives ``out``."""
        return self._post(self._look_recv(out, source, tag, stream=stream), True)

    @operation
    def irecv_any(self, out: Any, tag: int = 0) -> Any:
        """Start receiving from whoever sends first; returns a Work whose wait() gives the rank.

        ``out`` is as in ``recv``, in host memory. Not within a ``group()``. Of two receives that
        would take the same message the one that was called first gets it.
        """
        message = self._look_recv(out, self.rank, tag)
        if isinstance(message.view, DeviceView):
            raise InvalidArgumentError(
                f"out is on {message.view.device}: on devices a recv has to name its source"
            )
        return self._native.recv_any(message.view, message.tag)

    def _look_send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Message:
        dest, tag = self._check_rank(dest, "dest"), _check_tag(tag)
        framework = framework_of(x)
        view = framework.view(x, "x")
        return Message(True, dest, tag, view, Where(framework, x, stream), None)

    def _look_recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Message:
        source, tag = self._check_rank(source, "source"), _check_tag(tag)
        framework = framework_of(out, "out")
        view = framework.out(out, "out")
        if not view.writable:
            raise InvalidArgumentError("out is read-only: pass an array that can be written")
        if not view.contiguous and not isinstance(view, DeviceView):
            raise InvalidArgumentError(
                f"out of shape {view.shape} is not contiguous in C order: receive into one that is"
            )
        return Message(False, source, tag, view, Where(framework, out, stream), out)

    def _post(self, message: Message, asynchronous: bool) -> Any:
        """Run the message, or start it and give its Work."""
        if isinstance(message.view, DeviceView):
            return self._exchange([message], asynchronous)
        message.where.need_none("x" if message.sends else "out")
        if message.sends:
            return self._native.send(message.view, message.peer, message.tag, asynchronous)
        return self._native.recv(
            message.view, message.peer, message.tag, asynchronous, message.result
        )

    def _exchange(self, messages: Sequence[Message], asynchronous: bool) -> Any:
        """Messages on device arrays; see ``Devices.exchange``."""
        return self._on_devices().exchange(messages, asynchronous)


def _check_tag(tag: Any) -> int:
    try:
        number = operator.index(tag)
    except TypeError:
        raise InvalidArgumentError(f"tag is {tag!r}: expected a whole number") from None
    if not 0 <= number <= TAG_MAX:
        raise InvalidArgumentError(f"tag is {number}: expected 0 to {TAG_MAX}")
    return number
