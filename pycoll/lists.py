"""Many arrays as one message: what ``all_reduce`` does with a list or tuple.

Arrays of equal dtype, of up to 256 KiB each, travel end to end in messages of up to 16 MiB; longer
ones travel alone, straight from their memory. Which share a message depends on their order, dtypes
and lengths only (bindings/fusions.h), so it is alike on all ranks. Common lists never come here:
bindings/lists.cpp reads and runs them. Arrays on devices lie in no message: those of equal dtype,
whatever their lengths, are one launch, whose kernel finds each where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from pycoll import _core
from pycoll.arrays import aligned
from pycoll.collective import Collective
from pycoll.core import Core, Ends, ends_of, finisher, nothing
from pycoll.device_view import DeviceView, Where
from pycoll.errors import InvalidArgumentError
from pycoll.types import ITEM_BYTES

if TYPE_CHECKING:
    from pycoll.plans import Prepared
    from pycoll.work import Work

_T = TypeVar("_T")

#: The engine only wants the size of an element, so any type of that size names the memory.
_BY_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Message(NamedTuple):
    """Arrays that travel together, and the operation that they are."""

    members: list[Ends]
    prepared: Prepared
    wheres: list[Where]

    def start(self, communicator: Core, finish: Callable[[], Any], async_op: bool) -> Work:
        """Give it to the engine; wait() puts results in place, then gives ``finish()``.

        Without ``async_op`` what is on a device goes to the array's stream, not beside it.
        """
        first = self.members[0]
        dtype = first.source.dtype
        if isinstance(first.source, DeviceView):
            return self._launch(communicator, finish, async_op)
        if len(self.members) == 1:
            source, target, then = first.source, first.target, finish
        else:
            nbytes = sum(one.source.nbytes for one in self.members)
            source = target = fused_view(aligned(nbytes), dtype)
            _core.pack([one.source for one in self.members], source)

            def then() -> Any:
                _core.unpack(target, [one.target for one in self.members])
                return finish()

        count = source.count
        work: Work = communicator._start(
            self.prepared, source, target, dtype, [count], count, True, then, self.wheres[0]
        )
        return work

    def _launch(self, communicator: Core, finish: Callable[[], Any], async_op: bool) -> Work:
        """On a device nothing is copied: the kernel knows where each array lies."""
        from pycoll.devices import OnDevice

        members = [
            OnDevice(one.source, one.target, where)
            for one, where in zip(self.members, self.wheres, strict=True)
        ]
        lanes = communicator._plans.lanes(self.prepared.plan)
        devices = communicator._on_devices()
        made = devices.run_list(self.prepared, members, lanes, async_op, finish)
        work: Work = made if async_op else _core.open_work()
        if not async_op:
            _core.fill_work(work, made)
        return work


def fused_view(memory: Any, dtype: int) -> _core.BufferView:
    """Bytes as elements of the type."""
    return _core.view(memory.view(_BY_ITEM[ITEM_BYTES[dtype]]))


class Member(NamedTuple):
    """One array of a list."""

    x: Any
    out: Any
    ends: Ends

    def finisher(self) -> Callable[[], Any]:
        """What gives its result."""
        return finisher(self.ends.framework, self.x, self.ends.memory, self.out)


def members_of(arrays: Sequence[Any], out: Any) -> list[Member]:
    """The arrays, with new memory where ``out`` gives none; errors name the array."""
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


def _shared(members: list[Member], lengths: list[tuple[int, int]]) -> list[list[int]]:
    """Which arrays share a message; on devices all of one dtype, as far as a launch can name them.

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
    """In groups of as many as one launch takes."""
    most = _core.DEVICE_PARTS_MAX
    return [members[begin : begin + most] for begin in range(0, len(members), most)]


def start_list(
    communicator: Core,
    arrays: Sequence[Any],
    op: Any,
    out: Any,
    algorithm: str | None,
    deterministic: bool | None,
    stream: Any = None,
    async_op: bool = True,
) -> Work:
    """All messages of a list; the Work gives ``out``, or a list of results."""
    members = members_of(arrays, out)

    def results() -> Any:
        made = [member.finisher()() for member in members]
        return made if out is None else out

    lengths = [(one.ends.source.dtype, one.ends.source.nbytes) for one in members]
    messages = []
    for numbers in _shared(members, lengths):
        dtype = lengths[numbers[0]][0]
        nbytes = sum(lengths[number][1] for number in numbers)
        prepared = communicator._prepare(
            Collective.ALL_REDUCE, dtype, op, 0, nbytes, algorithm, deterministic
        )
        for number in numbers:
            prepared.check_shape(members[number].ends.source.shape)
        prepared = prepared.of_arrays(
            (lengths[number][1], members[number].ends.source.shape) for number in numbers
        )
        mine = [members[number] for number in numbers]
        wheres = [Where(one.ends.framework, one.x, stream) for one in mine]
        messages.append(Message([one.ends for one in mine], prepared, wheres))
    if not messages:
        work = _core.open_work()
        _core.fill_work(work, results())
        return work
    earlier: list[Work] = []

    def last() -> Any:
        for work in earlier:
            work.wait()
        return results()

    with one_call(communicator, len(messages) > 1):
        earlier.extend(message.start(communicator, nothing, async_op) for message in messages[:-1])
        return messages[-1].start(communicator, last, async_op)


@contextlib.contextmanager
def one_call(communicator: Core, several: bool = True) -> Iterator[None]:
    """Collectives that begin inside are parts of one call: a rank that refuses one of them takes no
    part in those behind it, and the others end them, too."""
    native = communicator._native
    if several:
        native.begin_call()
    try:
        yield
    finally:
        if several:
            native.end_call()
