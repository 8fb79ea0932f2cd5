"""The types of the communicator's calls, for type checkers; no program imports this module.

A result has the type of ``x``, or of ``out`` if it is passed. With ``async_op=True`` it is a
``Work`` of that type. A subclass of numpy.ndarray is typed as itself, but the result is a plain
numpy.ndarray. Inside a ``group()`` every call returns a Work; typed programs pass
``async_op=True`` there, which has no other effect. ``bind`` returns a BoundCall, mostly of Any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypedDict, TypeVar, overload

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

class Moves(TypedDict, total=False):
    """The options of all collectives on arrays."""

    algorithm: str | None
    stream: Any

class Exchanges(Moves, total=False):
    """The options of all_to_all."""

    lengths: Sequence[Sequence[int]] | None

class Reduces(Moves, total=False):
    """The options of collectives that reduce."""

    deterministic: bool | None

class CodedMoves(Moves, total=False):
    """The options of broadcast and all_gather."""

    compress: Codec | None
    feedback: Feedback | None

class CodedReduces(Reduces, total=False):
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
        self,
        x: tuple[_X, ...],
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedReduces],
    ) -> list[_X]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedReduces],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: tuple[_X, ...],
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedReduces],
    ) -> Work[list[_X]]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedReduces],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[CodedReduces],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[CodedReduces],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[CodedReduces],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[CodedReduces],
    ) -> BoundCall[Any]: ...

class ReducesAlike(Call, Protocol):
    """The type of scan and exscan."""
    @overload
    def __call__(
        self,
        x: tuple[_X, ...],
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Reduces],
    ) -> list[_X]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Reduces],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: tuple[_X, ...],
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Reduces],
    ) -> Work[list[_X]]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Reduces],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[Reduces],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[Reduces],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self, x: _X, op: _Op = "sum", *, out: Any = None, async_op: bool, **options: Unpack[Reduces]
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        op: _Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[Reduces],
    ) -> BoundCall[Any]: ...

class Reduce(Call, Protocol):
    """The type of reduce. Only the root has a result."""
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Reduces],
    ) -> _X | None: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Reduces],
    ) -> Work[_X | None]: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[Reduces],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[Reduces],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[Reduces],
    ) -> _X | Work[_X | None] | None: ...
    def bind(
        self,
        x: Any,
        root: int = 0,
        op: _Op = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[Reduces],
    ) -> BoundCall[Any]: ...

class ReduceScatter(Call, Protocol):
    """The type of reduce_scatter."""
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedReduces],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedReduces],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[CodedReduces],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[CodedReduces],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[CodedReduces],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        op: _Op = "sum",
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[CodedReduces],
    ) -> BoundCall[Any]: ...

class Broadcast(Call, Protocol):
    """The type of broadcast."""
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[CodedMoves],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[CodedMoves],
    ) -> BoundCall[Any]: ...

class AllGather(Call, Protocol):
    """The type of all_gather. The result for a number is a list."""
    @overload
    def __call__(
        self,
        x: np.generic,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> _Array: ...
    @overload
    def __call__(
        self,
        x: _Number,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> list[_Number]: ...
    @overload
    def __call__(
        self,
        x: _X,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: np.generic,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[_Array]: ...
    @overload
    def __call__(
        self,
        x: _Number,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[list[_Number]]: ...
    @overload
    def __call__(
        self,
        x: _X,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | None = None,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[CodedMoves],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | None = None,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[CodedMoves],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool,
        **options: Unpack[CodedMoves],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[CodedMoves],
    ) -> BoundCall[Any]: ...

class Gather(Call, Protocol):
    """The type of gather. Only the root has a result."""
    @overload
    def __call__(
        self,
        x: np.generic,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _Array | None: ...
    @overload
    def __call__(
        self,
        x: _Number,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> list[_Number] | None: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _X | None: ...
    @overload
    def __call__(
        self,
        x: np.generic,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_Array | None]: ...
    @overload
    def __call__(
        self,
        x: _Number,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[list[_Number] | None]: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_X | None]: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool,
        **options: Unpack[Moves],
    ) -> _X | Work[_X | None] | None: ...
    def bind(
        self,
        x: Any,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[Moves],
    ) -> BoundCall[Any]: ...

class Scatter(Call, Protocol):
    """The type of scatter. Without x the result is a NumPy array."""
    @overload
    def __call__(
        self,
        x: None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _Array: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_Array]: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[Moves],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[Moves],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X | None = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[Moves],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any = None,
        root: int = 0,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[Moves],
    ) -> BoundCall[Any]: ...

class AllToAll(Call, Protocol):
    """The type of all_to_all."""
    @overload
    def __call__(
        self,
        x: _X,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[False] = False,
        **options: Unpack[Exchanges],
    ) -> _X: ...
    @overload
    def __call__(
        self,
        x: _X,
        splits: Sequence[int] | None = None,
        *,
        out: None = None,
        async_op: Literal[True],
        **options: Unpack[Exchanges],
    ) -> Work[_X]: ...
    @overload
    def __call__(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[False] = False,
        **options: Unpack[Exchanges],
    ) -> _Out: ...
    @overload
    def __call__(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        out: _Out,
        async_op: Literal[True],
        **options: Unpack[Exchanges],
    ) -> Work[_Out]: ...
    @overload
    def __call__(
        self,
        x: _X,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool,
        **options: Unpack[Exchanges],
    ) -> _X | Work[_X]: ...
    def bind(
        self,
        x: Any,
        splits: Sequence[int] | None = None,
        *,
        out: Any = None,
        async_op: bool = False,
        **options: Unpack[Exchanges],
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

_Definition = Callable[..., Any]

# The type of ``pycoll.comm.operations.operation``.
@overload
def operation(signature: Literal["AllReduce"]) -> Callable[[_Definition], AllReduce]: ...
@overload
def operation(signature: Literal["Reduce"]) -> Callable[[_Definition], Reduce]: ...
@overload
def operation(signature: Literal["ReduceScatter"]) -> Callable[[_Definition], ReduceScatter]: ...
@overload
def operation(signature: Literal["ReducesAlike"]) -> Callable[[_Definition], ReducesAlike]: ...
@overload
def operation(signature: Literal["Broadcast"]) -> Callable[[_Definition], Broadcast]: ...
@overload
def operation(signature: Literal["AllGather"]) -> Callable[[_Definition], AllGather]: ...
@overload
def operation(signature: Literal["Gather"]) -> Callable[[_Definition], Gather]: ...
@overload
def operation(signature: Literal["Scatter"]) -> Callable[[_Definition], Scatter]: ...
@overload
def operation(signature: Literal["AllToAll"]) -> Callable[[_Definition], AllToAll]: ...
@overload
def operation(signature: Literal["Barrier"]) -> Callable[[_Definition], Barrier]: ...
@overload
def operation(signature: Literal["Send"]) -> Callable[[_Definition], Send]: ...
@overload
def operation(signature: Literal["Isend"]) -> Callable[[_Definition], Isend]: ...
@overload
def operation(signature: Literal["Recv"]) -> Callable[[_Definition], Recv]: ...
@overload
def operation(signature: Literal["Irecv"]) -> Callable[[_Definition], Irecv]: ...
@overload
def operation(signature: Literal["IrecvAny"]) -> Callable[[_Definition], IrecvAny]: ...
