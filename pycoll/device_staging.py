"""Messages of device arrays that the hosts carry, because the ranks' devices have not met yet.

    rank 0   device --copy--> host --send--> host --copy--> device   rank 1

Devices meet when all ranks come to a collective, and a message has two. Until then streams copy to
the host and wait for it, and a thread sends and receives there (csrc/device/staging.h). From the
meeting on messages go from device to device, but for those that one end alone has begun before: the
ranks tell each other how many they had sent and received by then, and what is the k-th message of a
pair for one end is the k-th for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.device_copies import Copies
from pycoll.device_view import DeviceView
from pycoll.device_work import DeviceWork

if TYPE_CHECKING:
    from pycoll.messages import Message

#: How long close() waits for messages under way.
_LEAVES_WITHIN_S = 5.0


class Staging:
    """The messages of one rank that hosts carry.

    ``group`` is the same on all ranks, and no other communicator's.
    """

    def __init__(self, communicator: _core.Communicator, group: int) -> None:
        self._communicator = communicator
        self._group = group
        self._native: _core.DeviceStaging | None = None
        #: Begun so far, by whether they are sent, and peer.
        self._begun: Counter[tuple[bool, int]] = Counter()
        #: How many of a pair the hosts carry at all; None: all, since devices have not met.
        self._carried: Counter[tuple[bool, int]] | None = None
        self._is_over = False
        #: Arrays that others' allocators might give away while their messages use them.
        self._kept: list[tuple[_core.StagedMessage, tuple[Any, ...]]] = []

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

    def exchange(self, ordinal: int, messages: Sequence[Message]) -> list[DeviceWork]:
        """Begin them, on the device ``ordinal``; streams wait for those alone whose Works do."""
        if self._native is None:
            self._native = _core.DeviceStaging(self._communicator, ordinal, self._group)
        native = self._native
        self._drop_over(native)
        # Nothing may have begun if one of them cannot.
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

    def _end(self, native: _core.DeviceStaging, message: Message) -> tuple[DeviceView, Copies]:
        """Memory in C order, and the copies that it needs; its stream waits for what used it."""
        where, view = message.where, message.view
        assert isinstance(view, DeviceView)
        stream = where.handle()
        copies = Copies()
        packed = (copies.source if message.sends else copies.target)(view, where)
        assert packed is not None
        current = int(where.framework.stream(where.x))
        if copies.memory and current != stream:
            # It was given away by the framework's own stream, which may still use it.
            native.follow(stream, current)
        if view.order is not None:
            view.order(stream)
        return packed, copies

    def _drop_over(self, native: _core.DeviceStaging) -> None:
        self._kept = [one for one in self._kept if not native.is_over(one[0])]

    def check(self) -> None:
        """Raise what a message has failed with, if any has."""
        if self._native is not None:
            self._native.check()

    def leave(self) -> None:
        """Wait for what is under way, a few seconds at most."""
        if self._native is not None:
            self._native.leave(_LEAVES_WITHIN_S)

    def close(self) -> None:
        """What is still under way fails. The host's communicator is closed before."""
        if self._native is not None:
            self._native.close()
            self._kept.clear()


def _giver(result: Any) -> Callable[[], Any]:
    return lambda: result
