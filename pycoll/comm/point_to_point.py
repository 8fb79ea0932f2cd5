"""Messages between two ranks: send, isend, recv, irecv, irecv_any, sendrecv, probe and iprobe."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.p2p_message import P2PMessage
from pycoll.arrays.registry import framework_of
from pycoll.comm.operations import Core, immediate, operation, repeatable
from pycoll.errors import InvalidArgumentError, PycollError, TimeoutError
from pycoll.types import check_timeout

TAG_MAX = 2**31 - 1


class Probe(NamedTuple):
    """A message that has arrived and waits for a receive."""

    source: int
    tag: int
    #: Bytes of the whole message.
    nbytes: int


class Messages(Core):
    """The messages between two ranks; one of the base classes of Communicator.

    The docstring of Communicator lists the kinds of arrays, ``stream`` and the errors. A tag is a
    whole number from 0 to 2**31-1.

    Host arrays: the earliest recv from the sender with the same tag takes the message. Both sides
    must pass the same number of bytes (else MismatchError); dtype and shape are not compared.
    Messages of one sender and tag keep their order. A rank may send to itself.

    Device arrays: a message runs in its stream, and messages between two ranks do not overtake each
    other. A rank receives them in the order in which they were sent; within one group in the order
    of their tags. Another tag or length than expected is a MismatchError. Ranks that send to each
    other, and a rank that sends to itself, put both calls in one ``group()``. Before the first
    collective of the communicator on device arrays, the hosts transfer the messages, also in the
    order of the streams. See docs/gpu.md.
    """

    @operation
    def send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None:
        """Send ``x`` to rank ``dest``; return when the program may change x again.

        ``x``: an array, in host memory or on a CUDA device. ``dest``: a rank from 0 to size - 1.
        ``tag``: a whole number from 0 to 2**31-1. ``stream``: only for device arrays, see
        Communicator.

        For a short message the call may return before the receiver has called recv; otherwise it
        returns after that. For a device array it returns at once, and the stream waits instead.

        Raises the errors of all operations, see Communicator.

        Cost: one message of the bytes of x.

        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        """
        self._post(self._look_send(x, dest, tag, stream=stream), False)

    @operation
    def isend(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start to send ``x`` to rank ``dest``.

        The arguments and errors are those of send. Returns a Work; the program must leave x
        unchanged until ``wait()`` has returned.

        >>> work = comm.isend(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        >>> work.wait()
        """
        return self._post(self._look_send(x, dest, tag, stream=stream), True)

    @operation
    def recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Receive a message from rank ``source`` into ``out``, and return out.

        ``out``: a writable array with exactly the bytes of the message; in host memory it must be
        contiguous in C order. ``source``: a rank from 0 to size - 1. ``tag``: the tag of the
        message, from 0 to 2**31-1. ``stream``: only for device arrays, see Communicator.

        Raises the errors of all operations, see Communicator; MismatchError where the message has
        another number of bytes.

        Cost: one message of the bytes of out.

        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> comm.recv(np.zeros(2), source=comm.rank)
        array([1., 1.])
        """
        self._post(self._look_recv(out, source, tag, stream=stream), False)
        return out

    @operation
    def irecv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> Any:
        """Start to receive a message from rank ``source`` into ``out``.

        The arguments and errors are those of recv. Returns a Work whose ``wait()`` returns out.

        >>> work = comm.irecv(np.zeros(2), source=comm.rank)
        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> work.wait()
        array([1., 1.])
        """
        return self._post(self._look_recv(out, source, tag, stream=stream), True)

    @operation
    def irecv_any(self, out: Any, tag: int = 0) -> Any:
        """Start to receive the next message with ``tag``, from any rank, into ``out``.

        ``out``: as in recv, but in host memory only. ``tag``: from 0 to 2**31-1. Where two receives
        could take the same message, the earlier call gets it.

        Returns a Work whose ``wait()`` returns the rank of the sender.

        Raises the errors of recv; InvalidArgumentError inside a ``group()`` and for device arrays.

        >>> work = comm.irecv_any(np.zeros(2))
        >>> comm.send(np.ones(2), dest=comm.rank)
        >>> work.wait()
        0
        """
        message = self._look_recv(out, self.rank, tag)
        if isinstance(message.view, DeviceView):
            raise InvalidArgumentError(
                f"out is on {message.view.device}: on devices a recv has to name its source"
            )
        _core.offer_message(self, message.view, False, -1, message.tag, True)
        return self._native.recv_any(message.view, message.tag)

    @repeatable
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
        """Send ``x`` to rank ``dest`` and receive from rank ``source`` into ``out`` at once.

        ``x`` and ``dest``: as in send. ``out`` and ``source``: as in recv; the memory of x and of
        out must not overlap. ``tag``: the tag of both messages, unless the received one has
        ``recv_tag``. ``stream``: only for device arrays, see Communicator.

        Ranks that shift data around a ring with this call cannot deadlock, whatever the lengths.

        Returns out.

        Raises the errors of send and recv, when both messages have ended; InvalidArgumentError
        inside a ``group()``, in which isend and irecv do the same.

        Cost: one message in each direction.

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
        on_host = [one for one in messages if one not in on_device]
        for one in on_host:
            self._offer(one, False)
        works = [self._start_on_host(one, True) for one in on_host]
        if on_device:
            self._exchange(on_device, False)
        _wait_for_all(works)
        return out

    @immediate
    def probe(
        self, source: int | None = None, tag: int | None = 0, *, timeout: float | None = None
    ) -> Probe:
        """Wait for a message in host memory, and return its source, tag and bytes.

        ``source``: the sending rank, or None for any rank. ``tag``: a tag, or None for any tag.
        ``timeout``: seconds, or None for the ``timeout_s`` of the communicator.

        The call does not receive the message. It does not see a message that an earlier irecv
        takes. pycoll keeps the part of a message that has arrived in memory of its own until a recv
        takes it.

        Returns a Probe with the fields ``source``, ``tag`` and ``nbytes``.

        Raises TimeoutError where no message has arrived in time; the communicator stays usable.
        Raises PeerLostError where the source is gone, and InvalidArgumentError inside a
        ``group()``.

        >>> comm.isend(np.zeros(3), dest=comm.rank, tag=7).wait()
        >>> comm.probe(comm.rank, tag=None)
        Probe(source=0, tag=7, nbytes=24)
        """
        return self._probe(source, tag, timeout)

    @immediate
    def iprobe(self, source: int | None = None, tag: int | None = 0) -> Probe | None:
        """Return what probe returns if such a message has arrived, otherwise None. Do not wait.

        ``source`` and ``tag``: as in probe. Raises the errors of probe, except TimeoutError.

        >>> comm.iprobe(tag=8) is None
        True
        """
        found = self._native.probe(*self._probe_arguments(source, tag), 0.0)
        return None if found is None else Probe(*found)

    def _probe(self, source: int | None, tag: int | None, timeout: float | None) -> Probe:
        patience_s = self._native.timeout_s if timeout is None else check_timeout(timeout)
        found = self._native.probe(*self._probe_arguments(source, tag), patience_s)
        if found is None:
            sender = "any rank" if source is None else f"rank {source}"
            with_tag = "" if tag is None else f" with tag {tag}"
            raise TimeoutError(
                f"no message from {sender}{with_tag} has come within {patience_s:g} s",
                rank=source,
                ranks=() if source is None else (source,),
            )
        return Probe(*found)

    def _probe_arguments(self, source: int | None, tag: int | None) -> tuple[int, int | None]:
        rank = -1 if source is None else self._check_rank(source, "source")
        return rank, None if tag is None else check_tag(tag)

    def _look_send(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> P2PMessage:
        dest, tag = self._check_rank(dest, "dest"), check_tag(tag)
        framework = framework_of(x)
        view = framework.view(x, "x")
        return P2PMessage(True, dest, tag, view, Where(framework, x, stream), None)

    def _look_recv(self, out: Any, source: int, tag: int = 0, *, stream: Any = None) -> P2PMessage:
        source, tag = self._check_rank(source, "source"), check_tag(tag)
        framework = framework_of(out, "out")
        view = framework.out(out, "out")
        if not view.writable:
            raise InvalidArgumentError("out is read-only: pass an array that can be written")
        if not view.contiguous and not isinstance(view, DeviceView):
            raise InvalidArgumentError(
                f"out of shape {view.shape} is not contiguous in C order: receive into one that is"
            )
        return P2PMessage(False, source, tag, view, Where(framework, out, stream), out)

    def _post(self, message: P2PMessage, asynchronous: bool) -> Any:
        """Run the message, or start it and return its Work."""
        if isinstance(message.view, DeviceView):
            return self._exchange([message], asynchronous)
        self._offer(message, asynchronous)
        return self._start_on_host(message, asynchronous)

    def _offer(self, message: P2PMessage, leaves: bool) -> None:
        """Tell native code of a message that the call posts, so that it can repeat the call.

        ``leaves``: the call returns the Work of the message. Raises InvalidArgumentError where the
        caller has passed a stream, because the message is in host memory.
        """
        message.where.need_none("x" if message.sends else "out")
        _core.offer_message(self, message.view, message.sends, message.peer, message.tag, leaves)

    def _start_on_host(self, message: P2PMessage, asynchronous: bool) -> Any:
        if message.sends:
            return self._native.send(message.view, message.peer, message.tag, asynchronous)
        return self._native.recv(
            message.view, message.peer, message.tag, asynchronous, message.result
        )

    def _exchange(self, messages: Sequence[P2PMessage], asynchronous: bool) -> Any:
        """Run messages on device arrays; see ``Devices.exchange``."""
        return self._on_devices().exchange(messages, asynchronous)


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
