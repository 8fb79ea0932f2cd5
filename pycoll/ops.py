"""The values of ``op=``: the builtin reductions, and those that users register by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pycoll import _core
from pycoll.errors import InvalidArgumentError, ReductionError
from pycoll.foreign_words import about_op
from pycoll.types import (
    LOCATION,
    OPS,
    ROUNDED,
    DType,
    ReduceOp,
    identity_bytes,
    is_defined,
    numpy_dtype,
    wire_form,
)


class Reduction(NamedTuple):
    """A reduction by name. Only a user's reduction has ``function`` and ``identity``."""

    name: str
    code: ReduceOp
    function: Callable[[Any, Any], Any] | None = None
    identity: Any = None
    commutative: bool = True

    def is_rounded(self, dtype: int) -> bool:
        """Return whether the bits of a result depend on the order of folding."""
        if self.function is not None:
            return True
        return dtype in ROUNDED and self.code in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG)

    def wire_bytes(self, dtype: int, nbytes: int) -> int:
        """Return the bytes that travel for an array of ``nbytes`` bytes."""
        form = wire_form(dtype, self.code)
        return nbytes if form is None else form.nbytes(dtype, nbytes)

    def check_shape(self, shape: tuple[int, ...], axes: int = 1) -> None:
        """Raise InvalidArgumentError unless the op reduces arrays of this shape.

        ``axes``: the least number of axes that an array of pairs must have.
        """
        if self.code in LOCATION and (len(shape) < axes or shape[-1] != 2):
            raise InvalidArgumentError(
                f"x has shape {shape}: op {self.name!r} takes pairs of a value and its place along "
                f"the last axis, so the shape must {'have two axes and ' if axes > 1 else ''}end "
                "in 2 (numpy.stack([values, places], axis=-1))"
            )

    def identity_bytes(self, dtype: int) -> bytes:
        """Return the bytes of the neutral element.

        Raise InvalidArgumentError if the user registered the op without ``identity``.
        """
        if self.function is None:
            return identity_bytes(dtype, self.code)
        if self.identity is None:
            raise InvalidArgumentError(
                f"op {self.name!r} was registered without identity=, which exscan gives to rank 0"
            )
        return np.asarray(self.identity).astype(numpy_dtype(dtype)).tobytes()

    def combine(self, target: Any, source: Any) -> None:
        """Combine two arrays with the user's function, and leave the result in ``target``."""
        assert self.function is not None
        result = self.function(target, source)
        if result is None or result is target:
            return
        made = np.asarray(result)
        loses = np.iscomplexobj(made) and not np.iscomplexobj(target)
        if made.shape != target.shape or loses:
            raise InvalidArgumentError(
                f"op {self.name!r} gave {made.dtype} of shape {made.shape} for two arrays of "
                f"{target.dtype} of shape {target.shape}: expected an array of this shape, of a "
                "dtype that converts to this one"
            )
        target[...] = made


class UserRun:
    """A user's reduction in one operation. It fails on all ranks or on none.

    If the function raises, this object keeps the exception, and further values of this rank pass on
    unchanged. After the operation all ranks exchange a ``record``: two bytes with the length of a
    text, and the text; zeros where nothing was raised. Threads: the thread that holds the GIL.
    """

    _BYTES = 256

    def __init__(self, reduction: Reduction, dtype: int, size: int) -> None:
        self._dtype = dtype
        self.record = bytearray(self._BYTES)
        self.records = bytearray(self._BYTES * size)
        #: The exchange of records, if it may still run.
        self.exchange: _core.Work | None = None
        self._reduction = reduction
        self._error: BaseException | None = None

    def native(self) -> _core.UserOp:
        """Return the object that the engine calls.

        It holds a reference to this one that the garbage collector does not see.
        """
        return _core.UserOp(self._combine, numpy_dtype(self._dtype))

    def guard(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that calls ``finish``, or raises if the user's function raised."""

        def judge() -> Any:
            if self.exchange is not None:
                self.exchange.wait()
            self._judge()
            return finish()

        return judge

    def _combine(self, target: Any, source: Any) -> None:
        if self._error is not None:
            return
        try:
            self._reduction.combine(target, source)
        except BaseException as error:
            self._error = error
            text = f"{type(error).__name__}: {error}".encode(errors="replace")[: self._BYTES - 2]
            self.record[:2] = len(text).to_bytes(2, "little")
            self.record[2 : 2 + len(text)] = text

    def _judge(self) -> None:
        every = bytes(self.records)
        records = [every[at : at + self._BYTES] for at in range(0, len(every), self._BYTES)]
        lengths = [int.from_bytes(one[:2], "little") for one in records]
        ranks = [rank for rank, length in enumerate(lengths) if length]
        if not ranks:
            return
        if self._error is not None and not isinstance(self._error, Exception):
            raise self._error  # such as KeyboardInterrupt
        first = ranks[0]
        text = records[first][2 : 2 + lengths[first]].decode(errors="replace")
        others = f" (and on ranks {ranks[1:]})" if len(ranks) > 1 else ""
        raise ReductionError(
            f"op {self._reduction.name!r} raised {text} on rank {first}{others}: the result is "
            "lost on all ranks, the communicator stays usable",
            rank=first,
            ranks=ranks,
        ) from self._error


_REDUCTIONS = {word: Reduction(word, code) for word, code in OPS.items()}


def register_op(
    name: str,
    function: Callable[[Any, Any], Any],
    *,
    identity: Any = None,
    commutative: bool = True,
) -> None:
    """Register ``function`` as the reduction ``op=name``. All ranks register the same reductions.

    ``name``: a text; it may be registered again, but must not be the name of a builtin reduction.
    ``function(a, b)``: combines two NumPy arrays of equal length element by element; it returns the
    result, or changes ``a`` and returns None. It must be associative; pycoll calls it for pieces of
    any length. ``identity``: the value that exscan gives to rank 0, or None. ``commutative``: False
    combines the operands in rank order.

    Raises InvalidArgumentError for an empty or builtin name, and for a function that cannot be
    called with two arrays.

    If the function raises in an operation, or returns an array of another shape, every rank of that
    operation raises ReductionError. Its text names the lowest such rank and the exception; on that
    rank the exception is the ``__cause__``. ``out`` then holds no result, and the communicator
    stays usable. An exception that is not an Exception, such as KeyboardInterrupt, is raised
    itself on its rank.

    Cost: the function runs under the GIL, so it is slower than builtin reductions. With several
    ranks an all_gather of 256 bytes per rank follows each operation.

    >>> pycoll.register_op("logaddexp", numpy.logaddexp, identity=-numpy.inf)
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"name is {name!r}: expected a text that is not empty")
    if name in OPS:
        raise InvalidArgumentError(
            f"name is {name!r}, which is a builtin reduction: choose another"
        )
    if not callable(function):
        raise InvalidArgumentError(f"function is {function!r}, which cannot be called")
    if not _takes_two(function):
        raise InvalidArgumentError(
            f"function is {function!r}, which cannot be called with two arrays: expected "
            "function(a, b)"
        )
    _REDUCTIONS[name] = Reduction(name, ReduceOp.USER, function, identity, commutative)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a call with two arguments would bind; True for an unknown signature."""
    if isinstance(function, np.ufunc):
        return function.nin == 2
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # builtins may have no signature
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def find_reduction(op: Any, dtype: int, operation: str) -> Reduction:
    """Return the reduction that ``op`` names.

    Raise InvalidArgumentError if it is unknown, or not defined for this dtype and operation.
    """
    word = op.word if isinstance(op, ReduceOp) else op
    reduction = _REDUCTIONS.get(word) if isinstance(word, str) else None
    if reduction is None:
        raise InvalidArgumentError(
            f"op is {op!r}{about_op(op, _REDUCTIONS)}; there are {', '.join(_REDUCTIONS)} "
            "(register_op adds others)"
        )
    if not is_defined(dtype, reduction.code):
        allowed = [w for w, code in OPS.items() if is_defined(dtype, code)]
        raise InvalidArgumentError(
            f"op {word!r} is not defined for {DType(dtype).word}; defined are {', '.join(allowed)}"
        )
    if reduction.code is ReduceOp.AVG and operation in ("scan", "exscan"):
        raise InvalidArgumentError(
            f"op 'avg' is not defined for {operation}: take 'sum' and divide by the ranks so far"
        )
    if reduction.code in LOCATION and operation == "exscan":
        raise InvalidArgumentError(
            f"op {word!r} is not defined for exscan: no pair leaves all others unchanged, which "
            "rank 0 would get; take scan"
        )
    return reduction
