"""Messages of device arrays that the hosts carry, because the ranks' devices have not met yet.

    rank 0   device --copy--> host --send--> host --copy--> device   rank 1

Devices meet when all ranks come to a collective, and a message has two. Until then a send waits for
its stream, and for no receiver; a recv waits for the message. From the meeting on messages go from
device to device, but for those that one end alone has begun before: the ranks tell each other how
many they had sent and received by then, and what is the k-th message of a pair for one end is the
k-th for the other.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.device_copies import Copies
from pycoll.device_view import DeviceView
from pycoll.device_work import StagedWork
from pycoll.errors import PycollError

if TYPE_CHECKING:
    from pycoll.messages import Message

#: Keeps them apart from messages of host arrays, whose tags are below.
_TAGS = 1 << 31
#: How long close() waits for those that receivers have not asked for yet.
_LEAVES_WITHIN_S = 5.0


class Staging:
    """The messages of one rank that hosts carry."""

    def __init__(self, communicator: _core.Communicator) -> None:
        self._communicator = communicator
        self._memory: _core.DeviceStaging | None = None
        self._ordinal = 0  # of that memory
        #: Begun so far, by whether they are sent, and peer.
        self._begun: Counter[tuple[bool, int]] = Counter()
        #: How many of a pair the hosts carry at all; None: all, since devices have not met.
        self._carried: Counter[tuple[bool, int]] | None = None
        self._is_over = False
        self._sending: deque[_core.Work] = deque()

    def told(self) -> bytes:
        """For the other ranks when devices meet: how many are sent and received, by peer."""
        peers = range(self._communicator.size)
        counts = [self._begun[sends, peer] for sends in (True, False) for peer in peers]
        return np.array(counts, "<i8").tobytes()

    def meet(self, told: Sequence[bytes]) -> None:
        """What all ranks have told, by rank."""
        size, rank = self._communicator.size, self._communicator.rank
        self._carried = Counter()
        for peer, blob in enumerate(told):
            sent, received = np.frombuffer(blob, "<i8").reshape(2, size)[:, rank]
            self._carried[True, peer] = max(self._begun[True, peer], int(received))
            self._carried[False, peer] = max(self._begun[False, peer], int(sent))

    def take(self, messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Those that the hosts carry, and those that go from device to device."""
        if self._carried is None:
            return list(messages), []
        if self._is_over:
            return [], list(messages)
        here: list[Message] = []
        there: list[Message] = []
        ahead: Counter[tuple[bool, int]] = Counter()
        for one in sorted(messages, key=lambda one: one.tag):
            way = one.sends, one.peer
            is_carried = self._begun[way] + ahead[way] < self._carried[way]
            ahead[way] += is_carried
            (here if is_carried else there).append(one)
        if not here:
            self._is_over = all(self._begun[way] >= n for way, n in self._carried.items())
        return here, there

    def exchange(self, ordinal: int, messages: Sequence[Message]) -> list[StagedWork]:
        """Begin them; those that are sent need no ``wait``. ``ordinal`` is the device."""
        if self._memory is None or self._ordinal != ordinal:
            self._memory, self._ordinal = _core.DeviceStaging(ordinal), ordinal
        # Nothing may have begun if one of them cannot.
        for one in messages:
            self._memory.check_stream(one.where.handle())
        ends = [self._end(one) for one in messages]
        hosts = [np.empty(one.view.nbytes, np.uint8) for one in messages]
        works = []
        for one, (view, copies), host in zip(messages, ends, hosts, strict=True):
            if one.sends:
                self._memory.read(view.address, host, one.where.handle(), copies.before)
        for one, (view, copies), host in zip(messages, ends, hosts, strict=True):
            works.append(self._begin(self._memory, one, view, copies, host))
        return works

    def _end(self, message: Message) -> tuple[DeviceView, Copies]:
        """Memory in C order, and the copies that it needs."""
        where, view = message.where, message.view
        assert isinstance(view, DeviceView)
        assert self._memory is not None  # made by whoever calls this
        copies = Copies()
        packed = (copies.source if message.sends else copies.target)(view, where)
        assert packed is not None
        if copies.memory and where.stream is not None:
            # It was given away by the framework's own stream, which may still use it.
            self._memory.read(0, bytearray(), int(where.framework.stream(where.x)), [])
        if view.order is not None:
            view.order(where.handle())
        return packed, copies

    def _begin(
        self,
        memory: _core.DeviceStaging,
        message: Message,
        view: DeviceView,
        copies: Copies,
        host: Any,
    ) -> StagedWork:
        call = self._communicator.send if message.sends else self._communicator.recv
        work = call(_core.view(host), message.peer, _TAGS | message.tag, True)
        assert work is not None  # it is asynchronous
        self._begun[message.sends, message.peer] += 1
        stream = message.where.handle()

        def finish() -> Any:
            memory.write(view.address, host, stream, copies.after)
            return message.result

        if message.sends:
            self._sending = deque(one for one in self._sending if not one.done())
            self._sending.append(work)
        tag = f"tag {_TAGS | message.tag}"

        def translate(text: str) -> str:
            return text.replace(tag, f"tag {message.tag} of device arrays")

        return StagedWork(work, (lambda: None) if message.sends else finish, translate)

    def close(self) -> None:
        """Wait for what is still sent, a few seconds at most."""
        limit = time.monotonic() + _LEAVES_WITHIN_S
        while self._sending:
            try:
                self._sending.popleft().wait(max(limit - time.monotonic(), 1e-3))
            except PycollError:
                return  # the communicator has failed, or nobody receives it
