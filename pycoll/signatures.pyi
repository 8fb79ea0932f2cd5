"""The types of the communicator's calls, for type checkers; no program imports this module.

A result has the type of ``x``, or of ``out`` if it is passed. With ``async_op=True`` it is a
``Work`` of that type. A subclass of numpy.ndarray is typed as itself, but the result is a plain
numpy.ndarray. Inside a ``group()`` every call returns a Work; typed programs pass
``async_op=True`` there, which has no other effect. ``bind`` returns a BoundCall, mostly of Any.

``out`` and ``async_op`` are options that a call may leave out. So a call without them fits several
overloads, and type checkers take the first one: the call that waits and makes a new result.
"""

# mypy: disable-error-code="overload-overlap"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypedDict, TypeVar, overload

import numpy as np
from typing_extensions import Unpack

from pycoll._core import BoundCall, Work
from pycoll.compress import Codec, Feedback
from pycoll.types import ReduceOp

_X = TypeVar("_X")
_Out = TypeVar("_Out")
#: Python's numbers. A result of several numbers is a list.
_Number = TypeVar("_Number", bool, int, float, complex)
_Array = np.ndarray[Any, np.dtype[Any]]
_Op = str | ReduceOp
_Splits = Sequence[int] | None
_No = Literal[False]
_Yes = Literal[True]
_Async = TypeVar("_Async", bound=bool)

class Moves(TypedDict, Generic[_Out, _Async], total=False):
    """The options of all collectives on arrays."""

    out: _Out
    async_op: _Async
    algorithm: str | None
    stream: Any

class Reduces(Moves[_Out, _Async], total=False):
    """The options of collectives that reduce."""

    deterministic: bool | None

class Gathers(Moves[_Out, _Async], total=False):
    """The options of gather."""

    lengths: _Splits

class CodedMoves(Moves[_Out, _Async], total=False):
    """The options of broadcast."""

    compress: Codec | None
    feedback: Feedback | None

class CodedGathers(CodedMoves[_Out, _Async], total=False):
    """The options of all_gather."""

    lengths: _Splits

class CodedReduces(Reduces[_Out, _Async], total=False):
    """The options of all_reduce and reduce_scatter."""

    compress: Codec | None
    feedback: Feedback | None

class Call(Protocol):
    """The attributes of all calls."""

    __name__: str
    __qualname__: str
    __wrapped__: Any
    definition: Any

    @property
    def __self__(self) -> Any: ...
    @property
    def __func__(self) -> Any: ...
    @property
    def __signature__(self) -> Any: ...

class AllReduce(Call, Protocol):
    """The type of all_reduce."""

    @overload
    def __call__(
        self, x: tuple[_X, ...], op: _Op = "sum", **options: Unpack[CodedReduces[None, _No]]
    ) -> list[_X]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", **options: Unpack[CodedReduces[None, _No]]
    ) -> _X: ...
    @overload
    def __call__(
        self, x: tuple[_X, ...], op: _Op = "sum", **options: Unpack[CodedReduces[None, _Yes]]
    ) -> Work[list[_X]]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", **options: Unpack[CodedReduces[None, _Yes]]
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self, x: Any, op: _Op = "sum", **options: Unpack[CodedReduces[_Out, _No]]
    ) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, op: _Op = "sum", **options: Unpack[CodedReduces[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", **options: Unpack[CodedReduces[Any, bool]]
    ) -> _X | Work[_X]: ...
    def bind(
        self, x: Any, op: _Op = "sum", **options: Unpack[CodedReduces[Any, bool]]
    ) -> BoundCall[Any]: ...

class ReducesAlike(Call, Protocol):
    """The type of scan and exscan."""

    @overload
    def __call__(
        self, x: tuple[_X, ...], op: _Op = "sum", **options: Unpack[Reduces[None, _No]]
    ) -> list[_X]: ...
    @overload
    def __call__(self, x: _X, op: _Op = "sum", **options: Unpack[Reduces[None, _No]]) -> _X: ...
    @overload
    def __call__(
        self, x: tuple[_X, ...], op: _Op = "sum", **options: Unpack[Reduces[None, _Yes]]
    ) -> Work[list[_X]]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", **options: Unpack[Reduces[None, _Yes]]
    ) -> Work[_X]: ...
    @overload
    def __call__(self, x: Any, op: _Op = "sum", **options: Unpack[Reduces[_Out, _No]]) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, op: _Op = "sum", **options: Unpack[Reduces[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", **options: Unpack[Reduces[Any, bool]]
    ) -> _X | Work[_X]: ...
    def bind(
        self, x: Any, op: _Op = "sum", **options: Unpack[Reduces[Any, bool]]
    ) -> BoundCall[Any]: ...

class Reduce(Call, Protocol):
    """The type of reduce. Only the root has a result."""

    @overload
    def __call__(
        self, x: _X, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[None, _No]]
    ) -> _X | None: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[None, _Yes]]
    ) -> Work[_X | None]: ...
    @overload
    def __call__(
        self, x: Any, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[_Out, _No]]
    ) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[Any, bool]]
    ) -> _X | Work[_X | None] | None: ...
    def bind(
        self, x: Any, root: int = 0, op: _Op = "sum", **options: Unpack[Reduces[Any, bool]]
    ) -> BoundCall[Any]: ...

class ReduceScatter(Call, Protocol):
    """The type of reduce_scatter."""

    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[None, _No]],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[None, _Yes]],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[_Out, _No]],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[_Out, _Yes]],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[Any, bool]],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        op: _Op = "sum",
        splits: _Splits = None,
        **options: Unpack[CodedReduces[Any, bool]],
    ) -> BoundCall[Any]: ...

class Broadcast(Call, Protocol):
    """The type of broadcast."""

    @overload
    def __call__(self, x: _X, root: int = 0, **options: Unpack[CodedMoves[None, _No]]) -> _X: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, **options: Unpack[CodedMoves[None, _Yes]]
    ) -> Work[_X]: ...
    @overload
    def __call__(self, x: Any, root: int = 0, **options: Unpack[CodedMoves[_Out, _No]]) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, root: int = 0, **options: Unpack[CodedMoves[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, **options: Unpack[CodedMoves[Any, bool]]
    ) -> _X | Work[_X]: ...
    def bind(
        self, x: Any, root: int = 0, **options: Unpack[CodedMoves[Any, bool]]
    ) -> BoundCall[Any]: ...

class AllGather(Call, Protocol):
    """The type of all_gather. The result for a number is a list."""

    @overload
    def __call__(self, x: np.generic, **options: Unpack[CodedGathers[None, _No]]) -> _Array: ...
    @overload
    def __call__(self, x: _Number, **options: Unpack[CodedGathers[None, _No]]) -> list[_Number]: ...
    @overload
    def __call__(self, x: _X, **options: Unpack[CodedGathers[None, _No]]) -> _X: ...
    @overload
    def __call__(
        self, x: np.generic, **options: Unpack[CodedGathers[None, _Yes]]
    ) -> Work[_Array]: ...
    @overload
    def __call__(
        self, x: _Number, **options: Unpack[CodedGathers[None, _Yes]]
    ) -> Work[list[_Number]]: ...
    @overload
    def __call__(self, x: _X, **options: Unpack[CodedGathers[None, _Yes]]) -> Work[_X]: ...
    @overload
    def __call__(self, x: Any, **options: Unpack[CodedGathers[_Out, _No]]) -> _Out: ...
    @overload
    def __call__(self, x: Any, **options: Unpack[CodedGathers[_Out, _Yes]]) -> Work[_Out]: ...
    @overload
    def __call__(self, x: _X, **options: Unpack[CodedGathers[Any, bool]]) -> _X | Work[_X]: ...
    def bind(self, x: Any, **options: Unpack[CodedGathers[Any, bool]]) -> BoundCall[Any]: ...

class Gather(Call, Protocol):
    """The type of gather. Only the root has a result."""

    @overload
    def __call__(
        self,
        x: np.generic,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Gathers[None, _No]],
    ) -> _Array | None: ...
    @overload
    def __call__(
        self,
        x: _Number,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Gathers[None, _No]],
    ) -> list[_Number] | None: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[None, _No]]
    ) -> _X | None: ...
    @overload
    def __call__(
        self,
        x: np.generic,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Gathers[None, _Yes]],
    ) -> Work[_Array | None]: ...
    @overload
    def __call__(
        self,
        x: _Number,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Gathers[None, _Yes]],
    ) -> Work[list[_Number] | None]: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[None, _Yes]]
    ) -> Work[_X | None]: ...
    @overload
    def __call__(
        self, x: Any, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[_Out, _No]]
    ) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[Any, bool]]
    ) -> _X | Work[_X | None] | None: ...
    def bind(
        self, x: Any, root: int = 0, splits: _Splits = None, **options: Unpack[Gathers[Any, bool]]
    ) -> BoundCall[Any]: ...

class Scatter(Call, Protocol):
    """The type of scatter. Without x the result is a NumPy array."""

    @overload
    def __call__(
        self,
        x: None = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[None, _No]],
    ) -> _Array: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[None, _No]],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: None = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[None, _Yes]],
    ) -> Work[_Array]: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[None, _Yes]],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[_Out, _No]],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[_Out, _Yes]],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[Any, bool]],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any = None,
        root: int = 0,
        splits: _Splits = None,
        **options: Unpack[Moves[Any, bool]],
    ) -> BoundCall[Any]: ...

class AllToAll(Call, Protocol):
    """The type of all_to_all."""

    @overload
    def __call__(
        self, x: _X, splits: _Splits = None, **options: Unpack[Moves[None, _No]]
    ) -> _X: ...
    @overload
    def __call__(
        self, x: _X, splits: _Splits = None, **options: Unpack[Moves[None, _Yes]]
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self, x: Any, splits: _Splits = None, **options: Unpack[Moves[_Out, _No]]
    ) -> _Out: ...
    @overload
    def __call__(
        self, x: Any, splits: _Splits = None, **options: Unpack[Moves[_Out, _Yes]]
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, splits: _Splits = None, **options: Unpack[Moves[Any, bool]]
    ) -> _X | Work[_X]: ...
    def bind(
        self, x: Any, splits: _Splits = None, **options: Unpack[Moves[Any, bool]]
    ) -> BoundCall[Any]: ...

class Barrier(Call, Protocol):
    """The type of barrier."""

    @overload
    def __call__(
        self, *, algorithm: str | None = None, async_op: Literal[False] = False
    ) -> None: ...
    @overload
    def __call__(self, *, algorithm: str | None = None, async_op: Literal[True]) -> Work[None]: ...
    @overload
    def __call__(self, *, algorithm: str | None = None, async_op: bool) -> Work[None] | None: ...
    def bind(self, *, algorithm: str | None = None, async_op: bool = False) -> BoundCall[Any]: ...

class Send(Call, Protocol):
    """The type of send."""

    def __call__(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> None: ...
    def bind(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> BoundCall[None]: ...

class Isend(Call, Protocol):
    """The type of isend."""

    def __call__(self, x: Any, dest: int, tag: int = 0, *, stream: Any = None) -> Work[None]: ...
    def bind(
        self, x: Any, dest: int, tag: int = 0, *, stream: Any = None
    ) -> BoundCall[Work[None]]: ...

class Recv(Call, Protocol):
    """The type of recv, which returns its ``out``."""

    def __call__(self, out: _Out, source: int, tag: int = 0, *, stream: Any = None) -> _Out: ...
    def bind(
        self, out: _Out, source: int, tag: int = 0, *, stream: Any = None
    ) -> BoundCall[_Out]: ...

class Irecv(Call, Protocol):
    """The type of irecv."""

    def __call__(
        self, out: _Out, source: int, tag: int = 0, *, stream: Any = None
    ) -> Work[_Out]: ...
    def bind(
        self, out: _Out, source: int, tag: int = 0, *, stream: Any = None
    ) -> BoundCall[Work[_Out]]: ...

class IrecvAny(Call, Protocol):
    """The type of irecv_any. The Work returns the rank of the sender."""

    def __call__(self, out: Any, tag: int = 0) -> Work[int]: ...
    def bind(self, out: Any, tag: int = 0) -> BoundCall[Work[int]]: ...

class Sendrecv(Call, Protocol):
    """The type of sendrecv, which returns its ``out``."""

    def __call__(
        self,
        x: Any,
        dest: int,
        out: _Out,
        source: int,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        stream: Any = None,
    ) -> _Out: ...
    def bind(
        self,
        x: Any,
        dest: int,
        out: _Out,
        source: int,
        tag: int = 0,
        *,
        recv_tag: int | None = None,
        stream: Any = None,
    ) -> BoundCall[_Out]: ...
