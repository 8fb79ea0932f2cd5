"""Several operations as one: what is called inside a ``with comm.group():`` runs when it ends.

    inside the block      at its end
    all_reduce a  ---+--> one message [a | c], if op and dtype are equal and both are short
    isend b       ---|--> posted first, so that sends and receives meet whatever their order
    all_reduce c  ---+
    broadcast d   ------> in order of the calls

The members are independent of each other: none may read what another writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.arrays import empty
from pycoll.collective import Collective
from pycoll.core import nothing
from pycoll.errors import InvalidArgumentError
from pycoll.reducing import Ends, ends_of
from pycoll.types import ITEM_BYTES
from pycoll.work import GroupWork

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

#: Longer arrays gain nothing from sharing a message, and packing them costs two copies.
FUSED_BYTES_MAX = 1 << 20
#: A message of several arrays grows to this at most.
MESSAGE_BYTES_MAX = 1 << 24

_MESSAGES = {"send": "isend", "isend": "isend", "recv": "irecv", "irecv": "irecv"}
#: The engine only wants the size of an element, so any type of that size names the memory.
_BY_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class _Reduction:
    """An all_reduce that waits for the end of the group."""

    def __init__(self, x: Any, words: dict[str, Any], work: GroupWork) -> None:
        self.x = x
        self.out = words.get("out")
        self.op = words.get("op", "sum")
        self.algorithm = words.get("algorithm")
        self.deterministic = words.get("deterministic")
        self.work = work
        self.ends: Ends = ends_of(x, self.out)

    @property
    def key(self) -> tuple[Any, ...]:
        """Reductions with equal keys may share a message."""
        return (self.ends.source.dtype, self.op, self.algorithm, self.deterministic)

    def finish(self) -> None:
        """The target holds the result."""
        framework, _, memory, _ = self.ends
        out = self.out
        self.work.fill(out if out is not None else framework.finish(self.x, memory))


class Fusion(list["_Reduction"]):
    """all_reduces that share a message."""

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(one.ends.source.nbytes for one in self)


class Group:
    """The operations called inside one group, in order."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._messages: list[tuple[str, tuple[Any, ...], dict[str, Any], GroupWork]] = []
        self._others: list[tuple[str, tuple[Any, ...], dict[str, Any], GroupWork] | Fusion] = []
        self._open: dict[tuple[Any, ...], Fusion] = {}
        self._works: list[GroupWork] = []

    def add(self, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> GroupWork:
        """Note a call; its result is in the Work once the group has ended."""
        work = GroupWork()
        words = {word: value for word, value in words.items() if word != "async_op"}
        if name in _MESSAGES:
            self._messages.append((_MESSAGES[name], args, words, work))
        elif name == "all_reduce":
            self._add_reduction(work, *args, **words)
        else:
            self._others.append((name, args, words, work))
        self._works.append(work)
        return work

    def _add_reduction(self, work: GroupWork, x: Any, op: Any = "sum", **words: Any) -> None:
        one = _Reduction(x, {**words, "op": op}, work)
        source = one.ends.source
        # Wrong arguments are found where they are written, not at the end of the block.
        self._communicator._prepare(
            Collective.ALL_REDUCE,
            source.dtype,
            op,
            0,
            source.nbytes,
            one.algorithm,
            one.deterministic,
        )
        fusion = self._open.get(one.key)
        fits = fusion is not None and fusion.nbytes + source.nbytes <= MESSAGE_BYTES_MAX
        if source.nbytes > FUSED_BYTES_MAX:
            self._others.append(Fusion([one]))
        elif fusion is not None and fits:
            fusion.append(one)
        else:
            fusion = self._open[one.key] = Fusion([one])
            self._others.append(fusion)

    def run(self) -> None:
        """The end of the block. What fails first is raised; members without a result get it too."""
        communicator = self._communicator
        try:
            pending = []
            for name, args, words, work in self._messages:
                pending.append((work, getattr(communicator, name)(*args, **words)))
            for entry in self._others:
                if isinstance(entry, Fusion):
                    self._run_fusion(entry)
                else:
                    name, args, words, work = entry
                    work.fill(getattr(communicator, name)(*args, **words))
            for work, started in pending:
                work.fill(started.wait())
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Tell every member that has no result yet why it will get none."""
        for work in self._works:
            if not work.done():
                work.fail(error)

    def _run_fusion(self, fusion: Fusion) -> None:
        communicator, first = self._communicator, fusion[0]
        if len(fusion) == 1:
            source, target = first.ends.source, first.ends.target
        else:
            source = target = communicator._fusion_view(fusion.nbytes, first.ends.source.dtype)
            _core.pack([one.ends.source for one in fusion], source)
        dtype, count = first.ends.source.dtype, source.count
        prepared = communicator._prepare(
            Collective.ALL_REDUCE,
            dtype,
            first.op,
            0,
            source.nbytes,
            first.algorithm,
            first.deterministic,
        )
        communicator._start(prepared, source, target, dtype, [count], count, False, nothing)
        if len(fusion) > 1:
            _core.unpack(target, [one.ends.target for one in fusion])
        for one in fusion:
            one.finish()


class FusionBuffer:
    """Memory for fused messages; grows and is kept, since its pages are warm."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def view(self, nbytes: int, dtype: int) -> _core.BufferView:
        """The first ``nbytes`` as elements of the type."""
        if self._memory.nbytes < nbytes:
            self._memory = empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return _core.view(self._memory[:nbytes].view(_BY_ITEM[ITEM_BYTES[dtype]]))


@contextlib.contextmanager
def group(communicator: Communicator) -> Iterator[Group]:
    """See Communicator.group."""
    outer = communicator._group
    if outer is not None:
        yield outer
        return
    members = Group(communicator)
    communicator._group = members
    try:
        yield members
    except BaseException:
        members.abandon(InvalidArgumentError("the group was left by an exception; nothing ran"))
        raise
    finally:
        communicator._group = None
    members.run()
