"""Many arrays as one message: the all_reduce of a list or tuple.

Arrays of equal dtype, of up to 256 KiB each, travel end to end in messages of up to 16 MiB. A
longer array travels alone, straight from its memory. The assignment of arrays to messages depends
only on their order, dtypes and lengths (bindings/calls/fusions.h), so all ranks compute the same
one. Native code repeats lists all of whose arrays it knows (bindings/calls/fused_calls.cpp); this
module runs the others.

Arrays on devices are not copied into messages. One kernel launch reduces all arrays of equal dtype,
of any length, in place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from pycoll import _core
from pycoll.arrays.device_view import DeviceView, Where
from pycoll.arrays.registry import aligned_memory
from pycoll.comm.codecs import CodedEnds, Coding, behind, coded_ends
from pycoll.comm.operations import CallOptions, CallRunner, Ends, ends_of, finisher, nothing
from pycoll.device.coded_calls import start_coded_list
from pycoll.errors import InvalidArgumentError
from pycoll.schedule.collectives import Collective
from pycoll.types import ITEM_BYTES

if TYPE_CHECKING:
    from pycoll.comm.plans import CallPlan
    from pycoll.comm.work import Work

_T = TypeVar("_T")
Memory: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

#: A view of fused memory needs only the size of an element, so any type of that size serves.
_BY_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class FusedMemory:
    """Memory of messages that have ended, kept for the next ones of a communicator.

    The pages of new memory cost as much as the copies into it. The memory of a message that fails
    is not kept. Threads: any.
    """

    _KEPT_MAX = 2

    def __init__(self) -> None:
        self._kept: list[Memory] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Memory:
        """Return memory of ``nbytes`` bytes or more, up to twice as much."""
        with self._lock:
            for place, memory in enumerate(self._kept):
                if nbytes <= memory.nbytes <= 2 * nbytes:
                    return self._kept.pop(place)
        return aligned_memory(nbytes)

    def give(self, memory: Memory) -> None:
        """Keep memory that nothing reads or writes any more, in place of the oldest."""
        with self._lock:
            self._kept = [*self._kept, memory][-self._KEPT_MAX :]


class FusedBatch(NamedTuple):
    """Arrays that travel together as one message, and their compiled operation."""

    members: list[Ends]
    compiled: CallPlan
    wheres: list[Where]
    #: The residual of each member; empty without feedback.
    residuals: Sequence[_core.BufferView] = ()

    def in_list(self, key: int) -> FusedBatch:
        """Return this batch with a key that includes the key of the whole list.

        Without that, a rank whose list is shorter could leave before another rank begins its last
        message.
        """
        return self._replace(compiled=self.compiled._replace(key=self.compiled.key ^ key))

    def with_codec(self, memories: Sequence[tuple[Any, int]]) -> tuple[FusedBatch, list[CodedEnds]]:
        """Return this batch with the arrays and residuals that a codec takes, and their ends.

        ``memories``: of each array the Feedback, or None for all, and its number there.
        """
        divisor = self.compiled.divisor
        ends = [
            coded_ends(one.source, one.target, divisor, *memory)
            for one, memory in zip(self.members, memories, strict=True)
        ]
        members = [
            one._replace(source=coded.source, target=coded.target)
            for one, coded in zip(self.members, ends, strict=True)
        ]
        residuals = [coded.residual for coded in ends if coded.residual is not None]
        return self._replace(members=members, residuals=residuals), ends

    def start(self, runner: CallRunner, finish: Callable[[], Any], async_op: bool) -> Work:
        """Start the operation. ``wait()`` of the Work unpacks the results and returns ``finish()``.

        On a device an operation without ``async_op`` runs in the stream of the array; with
        ``async_op`` it runs on a stream of pycoll.
        """
        first = self.members[0]
        if isinstance(first.source, DeviceView):
            return self._launch(runner, finish, async_op)
        if len(self.members) == 1:
            source, target, then = first.source, first.target, finish
            residual = self.residuals[0] if self.residuals else None
        else:
            nbytes = sum(one.source.nbytes for one in self.members)
            spare = runner.fused_memory
            memory = spare.take(nbytes)
            source = target = fused_view(memory[:nbytes], self.compiled.dtype)
            _core.pack([one.source for one in self.members], source)
            residual = packed_residual(self.residuals, nbytes)

            def then() -> Any:
                _core.unpack(target, [one.target for one in self.members])
                spare.give(memory)
                if residual is not None:
                    _core.unpack(residual, self.residuals)
                return finish()

        work: Work = runner.start(
            self.compiled,
            source,
            target,
            [source.count],
            True,
            then,
            self.wheres[0],
            residual=residual,
        )
        return work

    def _launch(self, runner: CallRunner, finish: Callable[[], Any], async_op: bool) -> Work:
        """Launch the operation on a device. The kernel reads each array in place; no copy."""
        from pycoll.device.device_operations import OnDevice

        members = [
            OnDevice(one.source, one.target, where)
            for one, where in zip(self.members, self.wheres, strict=True)
        ]
        lanes = runner.compiler.plans.lanes(self.compiled.plan)
        devices = runner.devices.open()
        made = devices.run_list(self.compiled, members, lanes, async_op, finish)
        work: Work = made if async_op else _core.open_work()
        if not async_op:
            _core.fill_work(work, made)
        return work


def packed_residual(residuals: Sequence[_core.BufferView], nbytes: int) -> _core.BufferView | None:
    """Return the residuals of a message as one array of ``nbytes`` bytes; None without any."""
    if not residuals:
        return None
    whole = _core.view(np.empty(nbytes // 4, np.float32))
    _core.pack(residuals, whole)
    return whole


def fused_view(memory: Any, dtype: int) -> _core.BufferView:
    """Return a view of bytes as elements of the type."""
    return _core.view(memory.view(_BY_ITEM[ITEM_BYTES[dtype]]))


class Member(NamedTuple):
    """One array of a list."""

    x: Any
    out: Any
    ends: Ends

    def finisher(self) -> Callable[[], Any]:
        """Return a function that returns this array's result."""
        return finisher(self.ends.framework, self.x, self.ends.memory, self.out)


def members_of(arrays: Sequence[Any], out: Any) -> list[Member]:
    """Return the members, with new memory where ``out`` is None. Errors name the array."""
    members = []
    for number, (x, one) in enumerate(zip(arrays, _outs_of(arrays, out), strict=True)):
        try:
            members.append(Member(x, one, ends_of(x, one)))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"array {number} of x: {error}") from None
    return members


def _outs_of(arrays: Sequence[Any], out: Any) -> Sequence[Any]:
    if out is None:
        return [None] * len(arrays)
    if not isinstance(out, list | tuple):
        raise InvalidArgumentError(
            f"out is a {type(out).__name__}, but x is a {type(arrays).__name__}: pass as many "
            f"arrays as x has, {len(arrays)}"
        )
    if len(out) != len(arrays):
        raise InvalidArgumentError(
            f"out has {len(out)} arrays, but x has {len(arrays)}: pass as many"
        )
    return out


def _arrays_per_message(members: list[Member], lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Return the arrays of each message, by their numbers.

    On devices all arrays of one dtype share launches, up to the limit of arrays per launch.
    Messages are in the order of their first arrays.
    """
    on_devices = [isinstance(one.ends.source, DeviceView) for one in members]
    if not any(on_devices):
        return _core.messages_of(lengths)
    here = [number for number, there in enumerate(on_devices) if not there]
    shared = [
        [here[number] for number in message]
        for message in _core.messages_of([lengths[number] for number in here])
    ]
    by_dtype: dict[int, list[int]] = {}
    for number, there in enumerate(on_devices):
        if there:
            by_dtype.setdefault(lengths[number][0], []).append(number)
    for numbers in by_dtype.values():
        shared += launches_of(numbers)
    return sorted(shared)


def launches_of(members: list[_T]) -> list[list[_T]]:
    """Split ``members`` into groups of at most as many as one launch takes."""
    most = _core.DEVICE_PARTS_MAX
    return [members[begin : begin + most] for begin in range(0, len(members), most)]


def start_list(
    runner: CallRunner,
    arrays: Sequence[Any],
    op: Any,
    options: CallOptions,
    coding: Coding | None = None,
    feedback: Any = None,
) -> Work:
    """Start all messages of a list. The Work's result is ``out``, or a list of results."""
    out, algorithm, async_op, deterministic, stream = options
    members = members_of(arrays, out)

    def results() -> Any:
        made = [member.finisher()() for member in members]
        return made if out is None else out

    lengths = [(one.ends.source.dtype, one.ends.source.nbytes) for one in members]
    if coding is not None and any(isinstance(one.ends.source, DeviceView) for one in members):
        words = (op, algorithm, deterministic, coding)
        return start_coded_list(runner, members, words, stream, results, async_op, feedback)
    shared = _arrays_per_message(members, lengths)
    batches = []
    call = _core.CallArrays()
    #: Message keys, by number of the array, for arrays that native code can add to messages.
    keys: dict[int, Any] = {}
    for numbers in shared:
        dtype = lengths[numbers[0]][0]
        nbytes = sum(lengths[number][1] for number in numbers)
        compiled = runner.compiler.compile(
            Collective.ALL_REDUCE, dtype, op, 0, nbytes, algorithm, deterministic, coding=coding
        )
        key = runner.compiler.plans.message_key(compiled, algorithm, deterministic)
        for number in numbers:
            compiled.check_shape(members[number].ends.source.shape)
            if not compiled.by_python and not isinstance(members[number].ends.source, DeviceView):
                keys[number] = key
        compiled = compiled.of_arrays(
            ((lengths[number][1], members[number].ends.source.shape) for number in numbers), call
        )
        mine = [members[number] for number in numbers]
        wheres = [Where(one.ends.framework, one.x, stream) for one in mine]
        batches.append(FusedBatch([one.ends for one in mine], compiled, wheres))
    if not batches:
        work = _core.open_work()
        _core.fill_work(work, results())
        return work
    if coding is not None:
        batches, results = _with_codec(batches, feedback, shared, results)
    for one in members:
        call.add(one.ends.source.dtype, batches[0].compiled.op, one.ends.source.shape)
    if len(batches) > 1:
        batches = [batch.in_list(call.key) for batch in batches]
    if len(keys) == len(members) and not async_op:
        for number, member in enumerate(members):
            runner.offer_member(member.ends, keys[number])
    return _start_all(runner, batches, results, async_op, feedback)


def _start_all(
    runner: CallRunner,
    batches: list[FusedBatch],
    results: Callable[[], Any],
    async_op: bool,
    feedback: Any,
) -> Work:
    """Start the batches of a list. The result of the Work is ``results()``."""

    def start(finish: Callable[[], Any]) -> Work:
        earlier: list[Work] = []

        def last() -> Any:
            for work in earlier:
                work.wait()
            return finish()

        with one_call(runner, len(batches) > 1):
            earlier.extend(one.start(runner, nothing, async_op) for one in batches[:-1])
            return batches[-1].start(runner, last, async_op)

    if feedback is None or not async_op:
        return start(results)
    begun: Work = feedback.serve(runner.engine.failure, results, start)
    return begun


def _with_codec(
    batches: list[FusedBatch],
    feedback: Any,
    shared: list[list[int]],
    results: Callable[[], Any],
) -> tuple[list[FusedBatch], Callable[[], Any]]:
    """Return the batches of one call as codecs take them, and ``results`` behind their results.

    ``shared``: the arrays of each batch, by their numbers.
    """
    if feedback is not None:
        feedback.check_free()
    made, ends = [], []
    for batch, numbers in zip(batches, shared, strict=True):
        coded, found = batch.with_codec([(feedback, number) for number in numbers])
        made.append(coded)
        ends += found
    if feedback is not None:
        feedback.ended()
    return made, behind(ends, results)


@contextlib.contextmanager
def one_call(runner: CallRunner, several: bool = True) -> Iterator[None]:
    """Make the collectives that begin inside the block parts of one call.

    A rank that refuses one of them takes no part in the later ones, and the other ranks end those
    too.
    """
    native = runner.engine
    if several:
        native.begin_call()
    try:
        yield
    finally:
        if several:
            native.end_call()
