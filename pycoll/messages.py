"""Messages between two ranks: send, recv and their non-blocking twins, sendrecv and probe."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays import framework_of
from pycoll.core import Core, immediate, operation
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError, TimeoutError
from pycoll.work import check_timeout

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


class Probe(NamedTuple):
    """A message that has come and waits for a receive."""

    source: int
    tag: int
    #: Of the whole message.
    nbytes: int


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

    @immediate
    def sendrecv(
        self,
        x: Any,
        dest: int,
        out: Any,
        source: int,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        stream: Any = None,
    ) -> Any:
        """Send ``x`` to rank ``dest`` while receiving into ``out`` from rank ``source``; gives out.

        Ranks that shift data around a ring cannot wait for each other, whatever the lengths. ``x``
        and ``out`` are as in ``send`` and ``recv`` and must lie apart; ``tag`` is that of both
        messages unless the received one has ``recv_tag``. Not within a ``group()``, where isend and
        irecv do the same.

        >>> left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        >>> comm.sendrecv(np.full(2, comm.rank), right, np.zeros(2, int), left)  # on 3 ranks
        array([2, 2])
        """
        sent = self._look_send(x, dest, tag, stream=stream)
        wanted = tag if recv_tag is None else recv_tag
        received = self._look_recv(out, source, wanted, stream=stream)
        messages = [received, sent]
        if sent.view.device == received.view.device and sent.view.overlap(received.view):
            raise InvalidArgumentError("out overlaps x: pass memory apart from x")
        on_device = [one for one in messages if isinstance(one.view, DeviceView)]
        on_host = [self._post(one, True) for one in messages if one not in on_device]
        if on_device:
            self._exchange(on_device, False)
        for work in on_host:
            work.wait()
        return out

    @immediate
    def probe(
        self, source: int | None = None, tag: int | None = 0, *, timeout: float | None = None
    ) -> Probe:
        """Wait for a message, and tell its source, tag and bytes without receiving it.

        ``source``: the sender, or None for any rank; ``tag``: a tag, or None for any. A message
        that an earlier irecv takes is not seen. ``timeout``: seconds, or None for the
        communicator's ``timeout_s``. Messages in host memory only.

        Raises TimeoutError where none has come by then, which leaves the communicator usable, and
        PeerLostError where the source is gone. What has come in part lies in memory of pycoll
        until a recv takes it.

        >>> comm.isend(np.zeros(3), dest=comm.rank, tag=7).wait()
        >>> comm.probe(comm.rank, tag=None)
        Probe(source=0, tag=7, nbytes=24)
        """
        return self._probe(source, tag, timeout)

    @immediate
    def iprobe(self, source: int | None = None, tag: int | None = 0) -> Probe | None:
        """What ``probe`` tells, if such a message has come already; otherwise None, at once.

        >>> comm.iprobe(tag=8) is None
        True
        """
        found = self._native.probe(*self._probed(source, tag), 0.0)
        return None if found is None else Probe(*found)

    def _probe(self, source: int | None, tag: int | None, timeout: float | None) -> Probe:
        patience_s = self._native.timeout_s if timeout is None else check_timeout(timeout)
        found = self._native.probe(*self._probed(source, tag), patience_s)
        if found is None:
            sender = "any rank" if source is None else f"rank {source}"
            with_tag = "" if tag is None else f" with tag {tag}"
            raise TimeoutError(
                f"no message from {sender}{with_tag} has come within {patience_s:g} s",
                rank=source,
                ranks=() if source is None else (source,),
            )
        return Probe(*found)

    def _probed(self, source: int | None, tag: int | None) -> tuple[int, int | None]:
        rank = -1 if source is None else self._check_rank(source, "source")
        return rank, None if tag is None else check_tag(tag)

    def _look_send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Message:
        dest, tag = self._check_rank(dest, "dest"), check_tag(tag)
        framework = framework_of(x)
        view = framework.view(x, "x")
        return Message(True, dest, tag, view, Where(framework, x, stream), None)

    def _look_recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Message:
        source, tag = self._check_rank(source, "source"), check_tag(tag)
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


def check_tag(tag: Any) -> int:
    """The tag as a number. InvalidArgumentError for what is none."""
    try:
        number = operator.index(tag)
    except TypeError:
        raise InvalidArgumentError(f"tag is {tag!r}: expected a whole number") from None
    if not 0 <= number <= TAG_MAX:
        raise InvalidArgumentError(f"tag is {number}: expected 0 to {TAG_MAX}")
    return number
