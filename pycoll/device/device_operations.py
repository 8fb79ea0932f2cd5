"""Operations on device arrays: ordered on streams, without waits of the host.

The first collective lets the devices meet. All ranks exchange the result of each step over the
host's communicator, so a step fails on all ranks or on none:

1. Every rank opens its device and makes channels there.
2. Every rank maps the memory of the other ranks and tests it.
3. Ranks out of each other's reach connect their hosts once more, for the host proxy.
4. Every rank reports how many messages it has begun by host staging so far
   (``pycoll.device.host_staging``).

Later operations use the host's communicator no more. A watching thread finds failures; every later
call raises the failure, and so does ``Work.synchronize``.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.bootstrap.discovery.host import process_token
from pycoll.device.coded_rounds import CodedCall, Ends, Exchange
from pycoll.device.device_codes import Floats, Kept, Residual, residual_for, velocity_step
from pycoll.device.device_copies import Conversion, Copies, Copy, conversion, order_memory
from pycoll.device.device_messages import MessagePlans, rounds_of
from pycoll.device.device_registry import DeviceRegistry
from pycoll.device.device_work import DeviceWork
from pycoll.device.host_staging import Staging
from pycoll.device.sparse_rounds import SparseCall
from pycoll.errors import InvalidArgumentError
from pycoll.types import DType

if TYPE_CHECKING:
    from pycoll.arrays.p2p_message import P2PMessage
    from pycoll.comm.plans import CallPlan


class OnDevice(NamedTuple):
    """One array of a list, with its result and its stream."""

    source: Any
    target: Any
    where: Where


class Launch(NamedTuple):
    """An operation without its memory.

    ``lanes`` is the largest number of lanes that any rank's plan has.
    """

    compiled: CallPlan
    counts: list[int]
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
        """Put the operation at the end of its stream; see ``_core.DeviceCommunicator.run``."""
        wire, dtype, op, key = copies.wire, self.compiled.dtype, self.compiled.op, self.compiled.key
        items = 1
        if wire is not None:
            dtype, op, items = wire.form.dtype, wire.step, wire.form.wire_items
            key ^= wire.key
        counts = [items * count for count in self.counts]
        return native.run(
            _core.Request(self.compiled.plan, dtype=dtype, op=op, counts=counts, plan_key=key),
            source,
            target,
            lanes=self.lanes,
            stream=self.where.handle(),
            on_stream=self.async_op,
            parts=parts,
            before=copies.before,
            after=copies.after,
        )


class DeviceSettings(NamedTuple):
    """The names of this rank for its device, and the ways by which the device communicates.

    ``host`` is equal for ranks of one host, and different for all others. ``group`` is equal for
    the ranks of this communicator, and different for all others. ``memory_max``: the bytes of
    channels in device memory. ``protocol`` is the protocol of all collectives, or "auto".
    ``direct`` allows network cards to read and write this rank's device memory.
    """

    host: str
    group: str
    memory_max: int
    protocol: str
    direct: bool


class Devices:
    """The device side of one communicator; opened by its first collective on device arrays.

    ``exchange`` gathers bytes of all ranks. ``wires`` connects the hosts of all ranks for the host
    proxy alone; all ranks call it, or no rank does.
    """

    def __init__(
        self,
        communicator: _core.Communicator,
        names: Sequence[str],
        settings: DeviceSettings,
        exchange: Callable[[bytes], list[bytes]],
        wires: Callable[[], list[Any]],
    ) -> None:
        self._communicator = communicator
        self._names = names
        self._settings = settings
        self._exchange = exchange
        self._wires = wires
        self._native: _core.DeviceCommunicator | None = None
        self._coding = threading.Lock()
        self._rank = communicator.rank
        self._staging = Staging(communicator, _number(settings.group))
        self._message_plans = MessagePlans(len(names), communicator.rank)
        self._ordinal: int | None = None  # set by the first array that has elements
        #: Arrays of operations on other streams than their own, each with the operation's end.
        self._kept: deque[tuple[_core.DeviceMark, tuple[Any, ...]]] = deque()
        #: Packed copies that graphs use.
        self._captured: list[Any] = []
        self.registry = DeviceRegistry()

    def run(
        self,
        compiled: CallPlan,
        ends: tuple[Any, Any],
        counts: list[int],
        lanes: int,
        async_op: bool,
        finish: Callable[[], Any],
        where: Where,
        fill: bytes | None = None,
    ) -> Any:
        """Launch an operation and return its result, or a DeviceWork if ``async_op``.

        ``ends`` are the views of source and target, or None. ``lanes`` is the largest number of
        lanes that any rank's plan has. ``fill`` holds the bytes of one element: all elements of
        the result get that value, whatever the operation computes.
        """
        source, target = ends
        native = self._native_for(source, target)
        launch = Launch(compiled, counts, lanes, async_op, where)
        stream = where.handle()
        for view in (source, target):
            if view is not None and view.order is not None:
                view.order(stream)
        copies = Copies(self._conversion(compiled))
        packed, made = copies.source(source, where), copies.target(target, where)
        if fill is not None:
            copies.fill(made, fill)
        if copies.memory:
            order_memory(native, where, stream)
        mark = launch.run(native, _memory(packed), _memory(made), copies)
        self._keep(where, async_op, native, mark, (source, target), copies.memory)
        if mark is not None:
            return DeviceWork(native, mark, where, finish)
        _hand_on(native, where)
        return finish()

    def run_list(
        self,
        compiled: CallPlan,
        members: Sequence[OnDevice],
        lanes: int,
        async_op: bool,
        finish: Callable[[], Any],
    ) -> Any:
        """Launch one operation on many arrays, as if they were one; see ``run``.

        The operation is ordered on the streams of all members. Requires: one dtype, and from 1 to
        ``_core.DEVICE_PARTS_MAX`` members.
        """
        copies = Copies(self._conversion(compiled))
        parts, nbytes, count = [], 0, 0
        for source, target, where in members:
            native = self._native_for(source, target)
            count += source.count
            if source.nbytes:
                packed, result = copies.source(source, where), copies.target(target, where)
                assert packed is not None
                assert result is not None  # every member has both
                nbytes += packed.nbytes
                parts.append((packed.address, result.address, nbytes))
        first = parts[0] if parts else (0, 0, 0)
        if len(parts) == 1:
            parts = []  # the kernels for one array are faster
        where = members[0].where
        launch = Launch(compiled, [count], lanes, async_op, where)
        stream, others = _join_streams(native, members)
        if copies.memory:
            order_memory(native, where, stream)
        mark = launch.run(native, (first[0], nbytes), (first[1], nbytes), copies, parts)
        self._keep(where, async_op, native, mark, tuple(members), copies.memory)
        if mark is not None:
            return DeviceWork(native, mark, where, finish)
        for other in others:
            native.join(native.mark(stream), other)
        _hand_on(native, where)
        return finish()

    def run_coded(
        self,
        call: CodedCall | SparseCall,
        exchanges: Sequence[Exchange],
        members: Sequence[OnDevice],
        kept: Sequence[Kept | None],
        async_op: bool,
        finish: Callable[[], Any],
    ) -> Any:
        """Launch a collective with a codec; see ``run_list``, and the modules of the calls.

        ``kept``: the memory of each array's feedback; None without any.
        """
        for source, target, _ in members:
            native = self._native_for(source, target)
        where = members[0].where
        stream, others = _join_streams(native, members)
        if isinstance(call, SparseCall) and call.warms and native.capture_of(stream):
            raise InvalidArgumentError(
                "feedback is in its warm-up, and a graph would send the density of this call in "
                "each replay: make the calls of the warm-up before the capture begins"
            )
        copies, corrections = Copies(), list[Copy]()
        ends, changed = [], list[Residual]()
        for member, one in zip(members, kept, strict=True):
            values, result = copies.source(member.source, member.where), member.target
            found = _residuals(native, member, one, copies)
            memory = [_floats(each.view) for each in found]
            given = _floats(values)
            if one is not None and one.momentum:
                count, to = member.source.count, memory[1].address
                corrections.append(velocity_step(count, given, to, one.momentum))
                given = memory[1]
            rests = memory[0].address if memory else 0
            masks = memory[1].address if one is not None and one.momentum and one.masking else 0
            ends.append(Ends(given, _floats(copies.target(result, member.where)), rests, masks))
            changed += found
        copies.before += corrections
        copies.memory += changed
        if copies.memory:
            order_memory(native, where, stream)
        mark = None
        # Calls of several threads use the memory of codes one after the other, as they launch.
        with self._coding:
            rounds = call.rounds(ends, native.scratch(call.scratch))
            rounds[0].before[:0] = copies.before
            rounds[-1].after.extend(copies.after)
            for each, exchange in zip(rounds, exchanges, strict=True):
                steps = Copies()
                steps.before, steps.after = each.before, each.after
                launch = Launch(exchange.compiled, exchange.counts, exchange.lanes, async_op, where)
                mark = launch.run(native, each.source, each.target, steps)
        if changed and native.capture_of(stream) == 0:
            end = mark if mark is not None else native.mark(stream)
            for one_memory in changed:
                one_memory.note_change(end)
        self._keep(where, async_op, native, mark, tuple(members), copies.memory)
        if mark is not None:
            return DeviceWork(native, mark, where, finish)
        for other in others:
            native.join(native.mark(stream), other)
        _hand_on(native, where)
        return finish()

    def _conversion(self, compiled: CallPlan) -> Conversion | None:
        return conversion(compiled.dtype, compiled.reduction, len(self._names))

    def exchange(self, messages: Sequence[P2PMessage], async_op: bool) -> DeviceWork | None:
        """Launch messages, those of a group together, and return a Work if ``async_op``.

        Before the ranks' devices have met, messages use host staging; see
        ``pycoll.device.host_staging``. Requires: one message if ``async_op``, at least one
        otherwise.
        """
        for one in messages:
            self._check_device(one.view, "x" if one.sends else "out")
        rounds_of(messages, self._rank)  # raises for messages that can never match
        self._staging.check()
        by_hosts, direct = self._staging.take(messages)
        works = self._stage(by_hosts) if by_hosts else []
        mark = None
        if direct:
            assert self._native is not None  # the devices have met
            for members in rounds_of(direct, self._rank):
                mark = self._launch_messages(self._native, members, async_op)
        if works and async_op:
            return works[0]
        for work in works:
            work.wait()
        if self._native is None or mark is None:
            return None
        result = messages[0].result
        return DeviceWork(self._native, mark, messages[0].where, lambda: result)

    def _stage(self, messages: Sequence[P2PMessage]) -> list[DeviceWork]:
        for one in messages:
            if self._ordinal is None and one.view.count:
                assert isinstance(one.view, DeviceView)
                self._ordinal = one.view.ordinal
        return self._staging.exchange(self._ordinal or 0, messages)

    def _launch_messages(
        self, native: _core.DeviceCommunicator, members: Sequence[P2PMessage], async_op: bool
    ) -> _core.DeviceMark | None:
        stream = members[0].where.handle()
        others = {one.where.handle() for one in members} - {stream}
        for other in others:
            native.join(native.mark(other), stream)
        copies = Copies()
        words = []
        for one in members:
            view = one.view
            assert isinstance(view, DeviceView)
            if view.order is not None:
                view.order(stream)
            known = len(copies.memory)
            memory = (copies.source if one.sends else copies.target)(view, one.where)
            if len(copies.memory) > known:
                order_memory(native, one.where, stream)
            words.append((one.sends, one.peer, one.tag, *_memory(memory)))
        plan = self._message_plans.of(members, native.message_lanes)
        mark = native.run_messages(
            plan, words, stream=stream, on_stream=async_op, before=copies.before, after=copies.after
        )
        places = [one.where for one in members]
        where = next((one for one in places if one.stream is not None), places[0])
        self._keep(where, async_op, native, mark, tuple(members), copies.memory)
        for other in others:
            native.join(native.mark(stream), other)
        return mark

    def _keep(
        self,
        where: Where,
        async_op: bool,
        native: _core.DeviceCommunicator,
        mark: _core.DeviceMark | None,
        arrays: tuple[Any, ...],
        copies: list[Any],
    ) -> None:
        """Hold arrays whose allocators might reuse the memory while the operation runs.

        Allocators know their own streams only. The caller keeps the arrays of a graph alive, except
        packed copies, which the caller does not know of.
        """
        self._drop_past(native)
        knows = where.stream is None and not where.is_foreign
        if not async_op and knows and not copies:
            return
        stream = where.handle()
        if native.capture_of(stream) == 0:
            end = mark if mark is not None else native.mark(stream)
            self._kept.append((end, (where.x, *arrays, *copies)))
        else:
            self._captured += copies

    def check(self, source: Any, target: Any) -> None:
        """Raise InvalidArgumentError unless both views, if given, are on this rank's device."""
        ordinal = self._ordinal
        for name, view in (("x", source), ("out", target)):
            if view is None:
                continue
            if not isinstance(view, DeviceView):
                raise InvalidArgumentError(
                    f"{name} is in host memory, but the other array is on a device: pass both alike"
                )
            self._check_device(view, name, ordinal)
            if ordinal is None and view.count:
                ordinal = view.ordinal

    def _native_for(self, source: Any, target: Any) -> _core.DeviceCommunicator:
        self.check(source, target)
        self._staging.check()
        if self._native is None:
            views = [view for view in (source, target) if view is not None]
            self._open(next((one.ordinal for one in views if one.count), 0))
        assert self._native is not None  # made by _open
        return self._native

    def _check_device(self, view: Any, name: str, expected: int | None = None) -> None:
        expected = self._ordinal if expected is None else expected
        if view.count and expected is not None and view.ordinal != expected:
            raise InvalidArgumentError(
                f"{name} is on {view.device}, but this rank uses cuda:{expected}: a "
                "communicator stays with the device of its first device array"
            )

    def _open(self, ordinal: int) -> None:
        native = _core.DeviceCommunicator(
            self._communicator,
            self._names,
            ordinal,
            _number(self._settings.host),
            _number(process_token()),
            self._settings.memory_max,
            self._settings.protocol,
            self._settings.direct,
            self._exchange,
            self._wires,
        )
        self._staging.meet(self._exchange(self._staging.counts()))
        self._native = native
        self._ordinal = ordinal
        # Both are needed once.
        del self._exchange, self._wires
        if self._communicator.rank == 0:
            for line in native.warnings():
                warnings.warn(line, stacklevel=5)

    def register(
        self, views: Sequence[DeviceView], exchange: Callable[[bytes], list[bytes]]
    ) -> list[tuple[int, bool]]:
        """Register arrays that peers may write to; see ``DeviceRegistry.enter``."""
        native = self._native_for(views[0], None)
        for number, view in enumerate(views):
            self._check_device(view, f"arrays[{number}]")
        return self.registry.enter(native, views, exchange)

    def _drop_past(self, native: _core.DeviceCommunicator) -> None:
        self.registry.let_go()
        while self._kept and native.passed(self._kept[0][0]):
            self._kept.popleft()

    def failure(self) -> str | None:
        """Return the text of the failure that ended the communicator, or None."""
        return None if self._native is None else self._native.failure()

    def close(self) -> None:
        """Wait for the device, a few seconds at most, then tell running operations to stop."""
        self._staging.leave()
        if self._native is not None:
            self._native.close()
        self._kept.clear()
        self.registry.close()

    def end(self) -> None:
        """End the last thread; call after ``close`` and the close of the host's communicator."""
        self._staging.close()


def _number(text: str) -> int:
    """Hash the text to 64 bits; equal numbers mean equal texts, except for hash collisions."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def _join_streams(
    native: _core.DeviceCommunicator, members: Sequence[OnDevice]
) -> tuple[int, set[int]]:
    """Let the first member's stream wait for those of the others; return it, and them."""
    stream = members[0].where.handle()
    others = {one.where.handle() for one in members} - {stream}
    for other in others:
        native.join(native.mark(other), stream)
    for member in members:
        for view in (member.source, member.target):
            if view is not None and view.order is not None:
                view.order(stream)
    return stream, others


def _residuals(
    native: _core.DeviceCommunicator, member: OnDevice, kept: Kept | None, copies: Copies
) -> list[Residual]:
    """Return the residual of an array, and its velocities where there is momentum."""
    if kept is None:
        return []

    def here(found: Any) -> Residual:
        return residual_for(native, member.where, tuple(member.source.shape), found, copies)

    names = ["residuals", "velocities"] if kept.momentum else ["residuals"]
    return [kept.memory(here, name) for name in names]


def _hand_on(native: _core.DeviceCommunicator, where: Where) -> None:
    """Let the framework's later work on the result wait for the operation's stream."""
    hands_on = where.hands_on()
    if hands_on is not None:
        native.join(native.mark(where.handle()), hands_on)


def _floats(view: DeviceView | None) -> Floats:
    return Floats(0, DType.FLOAT32) if view is None else Floats(view.address, view.dtype)


def _memory(view: DeviceView | None) -> tuple[int, int]:
    return (0, 0) if view is None else (view.address, view.nbytes)
