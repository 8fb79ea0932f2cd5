"""Many arrays as one message: what ``all_reduce`` does with a list or tuple.

Arrays of equal dtype, of up to 1 MiB each, travel end to end in messages of up to 16 MiB; longer
ones travel alone, straight from their memory. Which share a message depends on their order, dtypes
and lengths only (bindings/fusions.h), so it is alike on all ranks. Common lists never come here:
bindings/lists.cpp reads and runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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

#: The engine only wants the size of an element, so any type of that size names the memory.
_BY_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class Message(NamedTuple):
    """Arrays that travel together, and the operation that they are."""

    members: list[Ends]
    prepared: Prepared
    where: Where

    def start(self, communicator: Core, finish: Callable[[], Any]) -> Work:
        """Give it to the engine; wait() puts results in place, then gives ``finish()``."""
        first = self.members[0]
        dtype = first.source.dtype
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
            self.prepared, source, target, dtype, [count], count, True, then, self.where
        )
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
    """Which arrays share a message: those on devices none, since nothing is packed there."""
    if any(isinstance(one.ends.source, DeviceView) for one in members):
        return [[number] for number in range(len(members))]
    return _core.messages_of(lengths)


def start_list(
    communicator: Core,
    arrays: Sequence[Any],
    op: Any,
    out: Any,
    algorithm: str | None,
    deterministic: bool | None,
    stream: Any = None,
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
        first = members[numbers[0]]
        where = Where(first.ends.framework, first.x, stream)
        messages.append(Message([members[number].ends for number in numbers], prepared, where))
    if not messages:
        work = _core.open_work()
        _core.fill_work(work, results())
        return work
    earlier: list[Work] = []

    def last() -> Any:
        for work in earlier:
            work.wait()
        return results()

    earlier.extend(message.start(communicator, nothing) for message in messages[:-1])
    return messages[-1].start(communicator, last)
