"""Messages between two ranks: send, isend, recv, irecv, irecv_any, sendrecv, probe and iprobe."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.p2p_message import P2PMessage
from pycoll.arrays.registry import framework_of
from pycoll.comm.operations import DeviceSide
from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.types import check_rank, check_timeout

TAG_MAX = 2**31 - 1


class Probe(NamedTuple):
    """A message that has arrived and waits for a receive."""

    source: int
    tag: int
    #: Bytes of the whole message.
    nbytes: int


class PointToPoint:
    """Reads and checks the arguments of messages, and runs them on the engine or on devices.

    Native code repeats messages of host memory. Threads: any.
    """

    def __init__(self, engine: _core.Communicator, devices: DeviceSide) -> None:
        self._engine = engine
        self._size = engine.size
        self._devices = devices

    def read_send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> P2PMessage:
        """Return the message of a send, after a check of the arguments."""
        dest, tag = check_rank(dest, "dest", self._size), check_tag(tag)
        framework = framework_of(x)
        view = framework.view(x, "x")
        return P2PMessage(True, dest, tag, view, Where(framework, x, stream), None)

    def read_recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> P2PMessage:
        """Return the message of a recv, after a check of the arguments."""
        source, tag = check_rank(source, "source", self._size), check_tag(tag)
        framework = framework_of(out, "out")
        view = framework.out(out, "out")
        if not view.writable:
            raise InvalidArgumentError("out is read-only: pass an array that can be written")
        if not view.contiguous and not isinstance(view, DeviceView):
            raise InvalidArgumentError(
                f"out of shape {view.shape} is not contiguous in C order: receive into one that is"
            )
        return P2PMessage(False, source, tag, view, Where(framework, out, stream), out)

    def send(self, x: Any, dest: int, tag: int, stream: Any, async_op: bool) -> Any:
        """Run ``Communicator.send``, or isend with ``async_op``."""
        return self.post(self.read_send(x, dest, tag, stream=stream), async_op)

    def recv(self, out: Any, source: int, tag: int, stream: Any, async_op: bool) -> Any:
        """Run ``Communicator.recv``, or irecv with ``async_op``."""
        return self.post(self.read_recv(out, source, tag, stream=stream), async_op)

    def post(self, message: P2PMessage, async_op: bool) -> Any:
        """Run the message, or start it and return its Work."""
        if isinstance(message.view, DeviceView):
            return self.exchange_on_devices([message], async_op)
        self._offer(message, async_op)
        return self._start_on_host(message, async_op)

    def exchange_on_devices(self, messages: Sequence[P2PMessage], async_op: bool) -> Any:
        """Run messages on device arrays; see ``Devices.exchange``."""
        return self._devices.open().exchange(messages, async_op)

    def irecv_any(self, out: Any, tag: int) -> Any:
        """Run ``Communicator.irecv_any``."""
        message = self.read_recv(out, self._engine.rank, tag)
        if isinstance(message.view, DeviceView):
            raise InvalidArgumentError(
                f"out is on {message.view.device}: on devices a recv has to name its source"
            )
        _core.offer_message(self._engine, message.view, False, -1, message.tag, True)
        return self._engine.recv_any(message.view, message.tag)

    def sendrecv(
        self, x: Any, dest: int, tag: int, out: Any, source: int, recv_tag: int, stream: Any
    ) -> Any:
        """Run ``Communicator.sendrecv``."""
        sent = self.read_send(x, dest, tag, stream=stream)
        received = self.read_recv(out, source, recv_tag, stream=stream)
        messages = [received, sent]
        if sent.view.device == received.view.device and sent.view.overlap(received.view):
            raise InvalidArgumentError("out overlaps x: pass memory apart from x")
        on_device = [one for one in messages if isinstance(one.view, DeviceView)]
        on_host = [one for one in messages if one not in on_device]
        for one in on_host:
            self._offer(one, False)
        works = [self._start_on_host(one, True) for one in on_host]
        if on_device:
            self.exchange_on_devices(on_device, False)
        _wait_for_all(works)
        return out

    def probe(self, source: int | None, tag: int | None, timeout: float | None = None) -> Probe:
        """Run ``Communicator.probe``."""
        patience_s = self._engine.timeout_s if timeout is None else check_timeout(timeout)
        found = self._probe_once(source, tag, patience_s)
        if found is None:
            sender = "any rank" if source is None else f"rank {source}"
            with_tag = "" if tag is None else f" with tag {tag}"
            raise TimeoutError(
                f"no message from {sender}{with_tag} has come within {patience_s:g} s",
                rank=source,
                ranks=() if source is None else (source,),
            )
        return found

    def iprobe(self, source: int | None, tag: int | None) -> Probe | None:
        """Run ``Communicator.iprobe``."""
        return self._probe_once(source, tag, 0.0)

    def _probe_once(self, source: int | None, tag: int | None, patience_s: float) -> Probe | None:
        rank = -1 if source is None else check_rank(source, "source", self._size)
        number = None if tag is None else check_tag(tag)
        found = self._engine.probe(rank, number, patience_s)
        return None if found is None else Probe(*found)

    def _offer(self, message: P2PMessage, leaves: bool) -> None:
        """Tell native code of a message that the call posts, so that it can repeat the call.

        ``leaves``: the call returns the Work of the message. Raises InvalidArgumentError where the
        caller has passed a stream, because the message is in host memory.
        """
        message.where.need_none("x" if message.sends else "out")
        _core.offer_message(
            self._engine, message.view, message.sends, message.peer, message.tag, leaves
        )

    def _start_on_host(self, message: P2PMessage, async_op: bool) -> Any:
        if message.sends:
            return self._engine.send(message.view, message.peer, message.tag, async_op)
        return self._engine.recv(message.view, message.peer, message.tag, async_op, message.result)


def _wait_for_all(works: Sequence[Any]) -> None:
    """Wait until all Works have ended, and raise the first error."""
    first: Exception | None = None
    for work in works:
        try:
            work.wait()
        except PycollError as error:
            first = first or error
    if first is not None:
        raise first


def check_tag(tag: Any) -> int:
    """Return the tag as an int. Raise InvalidArgumentError unless it is from 0 to TAG_MAX."""
    try:
        number = operator.index(tag)
    except TypeError:
        raise InvalidArgumentError(f"tag is {tag!r}: expected a whole number") from None
    if not 0 <= number <= TAG_MAX:
        raise InvalidArgumentError(f"tag is {number}: expected 0 to {TAG_MAX}")
    return number
