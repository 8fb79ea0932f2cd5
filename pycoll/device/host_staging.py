"""Host staging: messages of device arrays between ranks whose devices have not met yet.

    rank 0   device --copy--> host --send--> host --copy--> device   rank 1

Devices meet when all ranks call a collective, but a message has two ranks only. Until then streams
copy arrays to host memory and wait for the host, where a thread sends and receives
(csrc/device/host_proxy/staging.h). After the meeting messages go from device to device, except
messages that one end had begun before the meeting. For these the ranks exchange how many messages
they had sent and received by then. The k-th message of a pair at one end is the k-th message at the
other end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView
from pycoll.device.device_copies import Copies
from pycoll.device.device_work import DeviceWork

if TYPE_CHECKING:
    from pycoll.arrays.p2p_message import P2PMessage

#: How long close() waits for messages under way.
_LEAVES_WITHIN_S = 5.0


class Staging:
    """The messages of one rank that use host staging.

    ``group`` is the same on all ranks, and different from that of all other communicators.
    """

    def __init__(self, communicator: _core.Communicator, group: int) -> None:
        self._communicator = communicator
        self._group = group
        self._native: _core.DeviceStaging | None = None
        #: Number of messages begun so far, by direction (True: sends) and peer.
        self._begun: Counter[tuple[bool, int]] = Counter()
        #: Total number of staged messages by direction and peer; None until devices have met: all.
        self._staged: Counter[tuple[bool, int]] | None = None
        self._is_over = False
        #: Arrays whose allocators might reuse the memory while their messages use it.
        self._kept: list[tuple[_core.StagedMessage, tuple[Any, ...]]] = []

    def counts(self) -> bytes:
        """Return the numbers of sends and receives by peer, for the other ranks at the meeting."""
        peers = range(self._communicator.size)
        numbers = [self._begun[sends, peer] for sends in (True, False) for peer in peers]
        return np.array(numbers, "<i8").tobytes()

    def meet(self, counts: Sequence[bytes]) -> None:
        """Take over the numbers of all ranks; ``counts`` is by rank."""
        size, rank = self._communicator.size, self._communicator.rank
        self._staged = Counter()
        for peer, blob in enumerate(counts):
            sent, received = np.frombuffer(blob, "<i8").reshape(2, size)[:, rank]
            self._staged[True, peer] = max(self._begun[True, peer], int(received))
            self._staged[False, peer] = max(self._begun[False, peer], int(sent))

    def take(self, messages: Sequence[P2PMessage]) -> tuple[list[P2PMessage], list[P2PMessage]]:
        """Divide messages into those for host staging and those from device to device."""
        if self._staged is None:
            return list(messages), []
        if self._is_over:
            return [], list(messages)
        here: list[P2PMessage] = []
        there: list[P2PMessage] = []
        ahead: Counter[tuple[bool, int]] = Counter()
        for one in sorted(messages, key=lambda one: one.tag):
            way = one.sends, one.peer
            is_staged = self._begun[way] + ahead[way] < self._staged[way]
            ahead[way] += is_staged
            (here if is_staged else there).append(one)
        if not here:
            self._is_over = all(self._begun[way] >= n for way, n in self._staged.items())
        return here, there

    def exchange(self, ordinal: int, messages: Sequence[P2PMessage]) -> list[DeviceWork]:
        """Begin messages on device ``ordinal``; only the waits of their Works hold up streams."""
        if self._native is None:
            self._native = _core.DeviceStaging(self._communicator, ordinal, self._group)
        native = self._native
        self._drop_over(native)
        # If one message is refused, no message may have begun.
        for one in messages:
            native.check_stream(one.where.handle())
        ends = [self._end(native, one) for one in messages]
        marks = native.begin(
            [
                (
                    one.sends,
                    one.peer,
                    one.tag,
                    view.address,
                    view.nbytes,
                    one.where.handle(),
                    copies.before if one.sends else [],
                    copies.after,
                )
                for one, (view, copies) in zip(messages, ends, strict=True)
            ]
        )
        works = []
        for one, (_, copies), mark in zip(messages, ends, marks, strict=True):
            self._begun[one.sends, one.peer] += 1
            knows = one.sends and one.where.stream is None and not one.where.is_foreign
            if not knows or copies.memory:
                self._kept.append((mark, (one.where.x, one.view, *copies.memory)))
            works.append(DeviceWork(native, mark, one.where, _giver(one.result)))
        return works

    def _end(self, native: _core.DeviceStaging, message: P2PMessage) -> tuple[DeviceView, Copies]:
        """Return memory in C order and its copies; the stream waits for earlier uses of it."""
        where, view = message.where, message.view
        assert isinstance(view, DeviceView)
        stream = where.handle()
        copies = Copies()
        packed = (copies.source if message.sends else copies.target)(view, where)
        assert packed is not None
        current = int(where.framework.stream(where.x))
        if copies.memory and current != stream:
            # The memory was last used on the framework's own stream, which may still use it.
            native.follow(stream, current)
        if view.order is not None:
            view.order(stream)
        return packed, copies

    def _drop_over(self, native: _core.DeviceStaging) -> None:
        self._kept = [one for one in self._kept if not native.is_over(one[0])]

    def check(self) -> None:
        """Raise the failure of a message, if any has failed."""
        if self._native is not None:
            self._native.check()

    def leave(self) -> None:
        """Wait for messages under way, a few seconds at most."""
        if self._native is not None:
            self._native.leave(_LEAVES_WITHIN_S)

    def close(self) -> None:
        """Fail the messages under way. Requires: the host's communicator is closed."""
        if self._native is not None:
            self._native.close()
            self._kept.clear()


def _giver(result: Any) -> Callable[[], Any]:
    return lambda: result
