"""Operations on device arrays: ordered on streams, never waited for by the host.

| step of the first operation | who is told |
|---|---|
| every rank opens its device and makes channels there | all, over the host's communicator |
| each maps the others' memory | all: it fails on all ranks or on none |

From then on nothing goes over the host. A failure is found by a thread that watches; every later
call raises it, and so does ``Work.synchronize``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _core
from pycoll.bootstrap.host import machine_identity, process_token
from pycoll.device_copies import Copies, order_memory
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError, TimeoutError
from pycoll.work import check_timeout

if TYPE_CHECKING:
    from pycoll.plans import Prepared

#: Between two looks of a thread that waits for a device.
_NAP_S = 50e-6
_NAP_MAX_S = 1e-3


class DeviceWork:
    """An operation on device arrays that runs beside its stream.

    Its arrays are kept until it has ended.
    """

    def __init__(
        self,
        native: _core.DeviceCommunicator,
        mark: _core.DeviceMark,
        where: Where,
        finish: Callable[[], Any],
    ) -> None:
        self._native = native
        self._mark = mark
        self._where = where
        self._finish = finish

    def done(self) -> bool:
        """Whether the device has run it; raises what it raised."""
        return self._native.passed(self._mark)

    def wait(self, timeout: float | None = None) -> Any:
        """Let the current stream wait for the operation, and return its result at once.

        ``timeout`` is there because other Works have it; this host waits for nothing.
        """
        if timeout is not None:
            check_timeout(timeout)
        self._native.join(self._mark, self._where.handle())
        return self._finish()

    def synchronize(self, timeout: float | None = None) -> Any:
        """Block the host until the device has run the operation, and return its result.

        Raises what the operation raised; TimeoutError if it still runs after ``timeout`` seconds.
        """
        limit = None if timeout is None else time.monotonic() + check_timeout(timeout)
        nap = _NAP_S
        while not self.done():
            if limit is not None and time.monotonic() >= limit:
                raise TimeoutError("the operation is still under way after the wait's timeout")
            time.sleep(nap)
            nap = min(2 * nap, _NAP_MAX_S)
        return self._finish()


class OnDevice(NamedTuple):
    """One array of several, with its result and its stream."""

    source: Any
    target: Any
    where: Where


class Launch(NamedTuple):
    """What an operation is, apart from its memory. ``total`` counts elements of all
    ranks' arrays as the descriptor does; ``lanes``: the most of any rank's plan."""

    prepared: Prepared
    dtype: int
    counts: list[int]
    total: int
    lanes: int
    async_op: bool
    where: Where

    def run(
        self,
        native: _core.DeviceCommunicator,
        source: tuple[int, int],
        target: tuple[int, int],
        copies: Copies,
        parts: Sequence[tuple[int, int, int]] = (),
    ) -> _core.DeviceMark | None:
        """Put it at the end of its stream; see ``_core.DeviceCommunicator.run``."""
        return native.run(
            self.prepared.plan,
            source,
            target,
            dtype=self.dtype,
            op=self.prepared.op,
            counts=self.counts,
            plan_key=self.prepared.key,
            count=self.total,
            lanes=self.lanes,
            stream=self.where.handle(),
            beside=self.async_op,
            parts=parts,
            before=copies.before,
            after=copies.after,
        )


class Devices:
    """The devices' side of one communicator; opened by its first operation on device arrays."""

    def __init__(
        self,
        communicator: _core.Communicator,
        names: Sequence[str],
        memory_max: int,
        exchange: Callable[[bytes], list[bytes]],
    ) -> None:
        self._communicator = communicator
        self._names = names
        self._memory_max = memory_max
        self._exchange = exchange
        self._native: _core.DeviceCommunicator | None = None
        self._ordinal = 0
        #: Arrays of operations beside their streams, each with its end.
        self._kept: deque[tuple[_core.DeviceMark, tuple[Any, ...]]] = deque()
        #: Packed copies that graphs use.
        self._captured: list[Any] = []

    def run(
        self,
        prepared: Prepared,
        ends: tuple[Any, Any],
        dtype: int,
        counts: list[int],
        count: int,
        lanes: int,
        async_op: bool,
        finish: Callable[[], Any],
        where: Where,
        fill: bytes | None = None,
    ) -> Any:
        """Launch; the result, or a DeviceWork. ``lanes``: the most of any rank's plan.

        ``fill``: what all elements of the result are then, whatever the operation gives.
        """
        source, target = ends
        native = self._opened(source, target)
        launch = Launch(prepared, dtype, counts, count, lanes, async_op, where)
        stream = where.handle()
        for view in (source, target):
            if view is not None and view.order is not None:
                view.order(stream)
        copies = Copies()
        packed, made = copies.source(source, where), copies.target(target, where)
        if fill is not None:
            copies.fill(made, fill)
        if copies.memory:
            order_memory(native, where, stream)
        mark = launch.run(native, _memory(packed), _memory(made), copies)
        self._keep(launch, native, mark, (source, target), copies.memory)
        return finish() if mark is None else DeviceWork(native, mark, where, finish)

    def run_list(
        self,
        prepared: Prepared,
        members: Sequence[OnDevice],
        lanes: int,
        async_op: bool,
        finish: Callable[[], Any],
    ) -> Any:
        """Launch one operation on many arrays, as if they were one; see ``run``.

        It is ordered on the streams of all. Requires: one dtype, and from 1 to
        ``_core.DEVICE_PARTS_MAX`` members.
        """
        copies = Copies()
        parts, nbytes, count = [], 0, 0
        for source, target, where in members:
            native = self._opened(source, target)
            nbytes += source.nbytes
            count += source.count
            if source.nbytes:
                packed, result = copies.source(source, where), copies.target(target, where)
                assert packed is not None
                assert result is not None  # every member has both
                parts.append((packed.address, result.address, nbytes))
        first = parts[0] if parts else (0, 0, 0)
        if len(parts) == 1:
            parts = []  # the kernels for one array are faster
        where = members[0].where
        launch = Launch(prepared, members[0].source.dtype, [count], count, lanes, async_op, where)
        stream = where.handle()
        others = {one.where.handle() for one in members} - {stream}
        for other in others:
            native.join(native.mark(other), stream)
        if copies.memory:
            order_memory(native, where, stream)
        for member in members:
            for view in (member.source, member.target):
                if view.order is not None:
                    view.order(stream)
        mark = launch.run(native, (first[0], nbytes), (first[1], nbytes), copies, parts)
        self._keep(launch, native, mark, tuple(members), copies.memory)
        if mark is not None:
            return DeviceWork(native, mark, where, finish)
        for other in others:
            native.join(native.mark(stream), other)
        return finish()

    def _keep(
        self,
        launch: Launch,
        native: _core.DeviceCommunicator,
        mark: _core.DeviceMark | None,
        arrays: tuple[Any, ...],
        copies: list[Any],
    ) -> None:
        """Hold arrays that others' allocators might give away while the operation runs.

        They know their own streams only. A graph's memory is the graph's matter, but for what the
        caller does not know of.
        """
        self._drop_past(native)
        where = launch.where
        if not launch.async_op and where.stream is None and not copies:
            return
        stream = where.handle()
        if native.capture_of(stream) == 0:
            end = mark if mark is not None else native.mark(stream)
            self._kept.append((end, (where.x, *arrays, *copies)))
        else:
            self._captured += copies

    def _opened(self, source: Any, target: Any) -> _core.DeviceCommunicator:
        views = [("x", source), ("out", target)]
        for name, view in views:
            if view is None:
                continue
            if not isinstance(view, DeviceView):
                raise InvalidArgumentError(
                    f"{name} is in host memory, but the other array is on a device: pass both alike"
                )
            if self._native is None:
                self._open(view.ordinal or 0)
            if view.count and view.ordinal != self._ordinal:
                raise InvalidArgumentError(
                    f"{name} is on {view.device}, but this rank uses cuda:{self._ordinal}: a "
                    "communicator stays with the device of its first device array"
                )
        assert self._native is not None  # one of the views made it
        return self._native

    def _open(self, ordinal: int) -> None:
        self._native = _core.DeviceCommunicator(
            self._communicator,
            self._names,
            ordinal,
            int(machine_identity()[:16], 16),
            int(process_token()[:16], 16),
            self._memory_max,
            self._exchange,
        )
        self._ordinal = ordinal

    def _drop_past(self, native: _core.DeviceCommunicator) -> None:
        while self._kept and native.passed(self._kept[0][0]):
            self._kept.popleft()

    def failure(self) -> str | None:
        """What ended it, or None."""
        return None if self._native is None else self._native.failure()

    def close(self) -> None:
        """Wait for the device, a few seconds at most; what still runs then is told to stop."""
        if self._native is not None:
            self._native.close()
        self._kept.clear()


def _memory(view: DeviceView | None) -> tuple[int, int]:
    return (0, 0) if view is None else (view.address, view.nbytes)
