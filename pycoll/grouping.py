"""Several operations as one: what is called inside a ``with comm.group():`` runs when it ends.

    inside the block      at its end
    all_reduce a  ---+--> one message [a | c], if op and dtype are equal and both are short
    isend b       ---|--> posted first, so that sends and receives meet whatever their order
    all_reduce c  ---+
    broadcast d   ------> in order of the calls

The members are independent of each other: none may read what another writes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from pycoll import _core
from pycoll.arrays import empty
from pycoll.collective import Collective
from pycoll.core import finisher, nothing
from pycoll.errors import InvalidArgumentError
from pycoll.reducing import Ends, ends_of
from pycoll.types import ITEM_BYTES
from pycoll.work import Work

if TYPE_CHECKING:
    from pycoll.communicator import Communicator

#: Longer arrays gain nothing from sharing a message, and packing them costs two copies.
FUSED_BYTES_MAX = 1 << 20
#: A message of several arrays grows to this at most.
MESSAGE_BYTES_MAX = 1 << 24

_Finish = Callable[[], Any]
_MESSAGES = {"send": "isend", "isend": "isend", "recv": "irecv", "irecv": "irecv"}
#: The engine only wants the size of an element, so any type of that size names the memory.
_BY_ITEM = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


class _UserReduction:
    """An all_reduce with a user's reduction, which waits for the end of the group."""

    def __init__(self, key: tuple[Any, ...], ends: Ends, work: Work, finish: _Finish) -> None:
        self.key = key
        self.ends = ends
        self.work = work
        self.finish = finish


class _UserFusion(list["_UserReduction"]):
    """Those that share a message."""

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(one.ends.source.nbytes for one in self)


class Group:
    """The operations called inside one group, in order.

    Native calls of all_reduce come into ``fusions`` by themselves.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._messages: list[tuple[str, tuple[Any, ...], dict[str, Any], Work]] = []
        self._others: list[tuple[str, tuple[Any, ...], dict[str, Any], Work] | _UserFusion | int]
        self._others = []
        self.fusions = _core.Fusions(self._others, FUSED_BYTES_MAX, MESSAGE_BYTES_MAX)
        self._open: dict[tuple[Any, ...], _UserFusion] = {}
        self._works: list[Work] = []

    def add(self, name: str, args: tuple[Any, ...], words: dict[str, Any]) -> Work:
        """Note a call; its result is in the Work once the group has ended."""
        work = _core.open_work()
        words = {word: value for word, value in words.items() if word != "async_op"}
        if name in _MESSAGES:
            self._messages.append((_MESSAGES[name], args, words, work))
        elif name == "all_reduce":
            self._add_reduction(work, *args, **words)
        else:
            self._others.append((name, args, words, work))
        self._works.append(work)
        return work

    def _add_reduction(
        self,
        work: Work,
        x: Any,
        op: Any = "sum",
        *,
        out: Any = None,
        algorithm: str | None = None,
        deterministic: bool | None = None,
    ) -> None:
        ends = ends_of(x, out)
        finish = finisher(ends.framework, x, ends.memory, out)
        dtype, nbytes = ends.source.dtype, ends.source.nbytes
        # Wrong arguments are found where they are written, not at the end of the block.
        prepared = self._communicator._prepare(
            Collective.ALL_REDUCE, dtype, op, 0, nbytes, algorithm, deterministic
        )
        word = prepared.reduction.name if prepared.reduction is not None else "sum"
        name = None if algorithm is None else str(algorithm)
        strict = None if deterministic is None else bool(deterministic)
        key = (dtype, word, 0, -1, name, strict, ())
        if prepared.user is None:
            self.fusions.add(work, key, ends.source, ends.target, finish, (x, ends, out))
            return
        one = _UserReduction(key, ends, work, finish)
        fusion = self._open.get(key)
        if nbytes > FUSED_BYTES_MAX:
            self._others.append(_UserFusion([one]))
        elif fusion is not None and fusion.nbytes + nbytes <= MESSAGE_BYTES_MAX:
            fusion.append(one)
        else:
            fusion = self._open[key] = _UserFusion([one])
            self._others.append(fusion)

    def run(self) -> None:
        """The end of the block. What fails first is raised; members without a result get it too."""
        communicator = self._communicator
        try:
            pending = []
            for name, args, words, work in self._messages:
                pending.append((work, getattr(communicator, name)(*args, **words)))
            for entry in self._others:
                if isinstance(entry, int):
                    self._run_fusion(entry)
                elif isinstance(entry, _UserFusion):
                    self._run_user_fusion(entry)
                else:
                    name, args, words, work = entry
                    _core.fill_work(work, getattr(communicator, name)(*args, **words))
            for work, started in pending:
                _core.fill_work(work, started.wait())
        except BaseException as error:
            self.abandon(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Tell every member that has no result yet why it will get none."""
        self.fusions.abandon(error)
        for work in self._works:
            if not work.done():
                _core.fail_work(work, error)

    def _run_fusion(self, number: int) -> None:
        communicator = self._communicator
        if not self.fusions.run(communicator, number):
            dtype, op, root, _, algorithm, deterministic, _ = self.fusions.key(number)
            nbytes = self.fusions.nbytes(number)
            communicator._prepare(
                Collective.ALL_REDUCE, dtype, op, root, nbytes, algorithm, deterministic
            )
            self.fusions.run(communicator, number)

    def _run_user_fusion(self, fusion: _UserFusion) -> None:
        communicator, first = self._communicator, fusion[0]
        if len(fusion) == 1:
            source, target = first.ends.source, first.ends.target
        else:
            source = target = communicator._fusion_view(fusion.nbytes, first.ends.source.dtype)
            _core.pack([one.ends.source for one in fusion], source)
        dtype, op, _, _, algorithm, deterministic, _ = first.key
        prepared = communicator._prepare(
            Collective.ALL_REDUCE, dtype, op, 0, source.nbytes, algorithm, deterministic
        )
        count = source.count
        communicator._start(prepared, source, target, dtype, [count], count, False, nothing)
        if len(fusion) > 1:
            _core.unpack(target, [one.ends.target for one in fusion])
        for one in fusion:
            _core.fill_work(one.work, one.finish())


class FusionBuffer:
    """Memory for fused messages; grows and is kept, since its pages are warm."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def view(self, nbytes: int, dtype: int) -> _core.BufferView:
        """The first ``nbytes`` as elements of the type."""
        if self._memory.nbytes < nbytes:
            self._memory = empty(1 << (nbytes - 1).bit_length(), np.uint8)
        return _core.view(self._memory[:nbytes].view(_BY_ITEM[ITEM_BYTES[dtype]]))


class group:  # noqa: N801  # read as the with statement that it is made for
    """See Communicator.group."""

    __slots__ = ("_communicator", "_members")

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._members: Group | None = None

    def __enter__(self) -> Group:
        outer: Group | None = self._communicator._group
        if outer is not None:
            return outer
        members = self._members = self._communicator._group = Group(self._communicator)
        return members

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        members = self._members
        if members is None:
            return
        self._communicator._group = self._members = None
        if error is None:
            members.run()
        else:
            reason = "the group was left by an exception; nothing ran"
            members.abandon(InvalidArgumentError(reason))
