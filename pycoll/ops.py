"""What ``op=`` may be: the builtin reductions, and those that users register by name."""

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
    """A reduction by name. ``function`` and ``identity`` belong to users' ones only."""

    name: str
    code: ReduceOp
    function: Callable[[Any, Any], Any] | None = None
    identity: Any = None
    commutative: bool = True

    def is_rounded(self, dtype: int) -> bool:
        """Whether the bits of a result depend on the order of folding."""
        if self.function is not None:
            return True
        return dtype in ROUNDED and self.code in (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.AVG)

    def wire_bytes(self, dtype: int, nbytes: int) -> int:
        """How many bytes travel for an array of so many."""
        form = wire_form(dtype, self.code)
        return nbytes if form is None else form.nbytes(dtype, nbytes)

    def check_shape(self, shape: tuple[int, ...], axes: int = 1) -> None:
        """InvalidArgumentError unless arrays of the shape can be reduced; ``axes``: at least."""
        if self.code in LOCATION and (len(shape) < axes or shape[-1] != 2):
            raise InvalidArgumentError(
                f"x has shape {shape}: op {self.name!r} takes pairs of a value and its place along "
                f"the last axis, so the shape must {'have two axes and ' if axes > 1 else ''}end "
                "in 2 (numpy.stack([values, places], axis=-1))"
            )

    def identity_bytes(self, dtype: int) -> bytes:
        """The element that changes nothing; InvalidArgumentError if the user gave none."""
        if self.function is None:
            return identity_bytes(dtype, self.code)
        if self.identity is None:
            raise InvalidArgumentError(
                f"op {self.name!r} was registered without identity=, which exscan gives to rank 0"
            )
        return np.asarray(self.identity).astype(numpy_dtype(dtype)).tobytes()

    def combine(self, target: Any, source: Any) -> None:
        """Leave what the user's function makes of both in ``target``."""
        assert self.function is not None
        result = self.function(target, source)
        if result is None or result is target:
            return
        found = np.asarray(result)
        loses = np.iscomplexobj(found) and not np.iscomplexobj(target)
        if found.shape != target.shape or loses:
            raise InvalidArgumentError(
                f"op {self.name!r} gave {found.dtype} of shape {found.shape} for two arrays of "
                f"{target.dtype} of shape {target.shape}: expected as many elements, of a dtype "
                "that becomes this one"
            )
        target[...] = found


class UserRun:
    """A user's reduction in one operation.

    It fails on all ranks or on none: what the function raises is kept, values pass on unchanged
    from then on, and behind the operation all ranks get each other's ``record``: two bytes that
    count the rest, and a text, or zeros where nothing was raised. Threads: whichever holds the GIL.
    """

    _BYTES = 256

    def __init__(self, reduction: Reduction, dtype: int, size: int) -> None:
        self._dtype = dtype
        self.record = bytearray(self._BYTES)
        self.records = bytearray(self._BYTES * size)
        #: The exchange of records that is under way, if it is not over.
        self.exchange: _core.Work | None = None
        self._reduction = reduction
        self._error: BaseException | None = None

    def native(self) -> _core.UserOp:
        """What the engine calls. It refers to this, unseen by the garbage collector."""
        return _core.UserOp(self._combine, numpy_dtype(self._dtype))

    def judged(self, finish: Callable[[], Any]) -> Callable[[], Any]:
        """``finish``, unless the function raised on some rank."""

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
            raise self._error  # as KeyboardInterrupt
        first = ranks[0]
        text = records[first][2 : 2 + lengths[first]].decode(errors="replace")
        others = f" (and on ranks {ranks[1:]})" if len(ranks) > 1 else ""
        raise ReductionError(
            f"op {self._reduction.name!r} raised {text} on rank {first}{others}: the result is "
            "lost on all ranks, the communicator goes on",
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
    """Make ``op=name`` mean ``function`` from now on; to be done on every rank alike.

    ``function(a, b)`` combines two NumPy arrays of equal length element by element, and returns the
    result or changes ``a`` and returns None. It must be associative, and is called for any pieces
    of the arrays. ``identity`` is what exscan gives to rank 0.
    With ``commutative=False`` operands are combined in rank order. A name can be registered again;
    builtin ones cannot.

    If the function raises, or gives an array of another shape, every rank of the operation raises
    ReductionError, which names the lowest such rank and what was raised; there the exception is its
    ``__cause__``. ``out`` holds no result then, and the communicator goes on. For that each
    operation on several ranks is followed by an all_gather of 256 bytes. An exception that is no
    Exception, as KeyboardInterrupt, is raised itself on its rank.

    The function runs under the GIL, so it is slower than builtin reductions. Raises
    InvalidArgumentError for a name that is empty or builtin, and for a function that cannot be
    called with two arrays.

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
    """Whether a call with two arguments would bind; True where nobody can tell."""
    if isinstance(function, np.ufunc):
        return function.nin == 2
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True  # of a builtin
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True


def find_reduction(op: Any, dtype: int, operation: str) -> Reduction:
    """The reduction that ``op`` names. InvalidArgumentError if it is unknown or undefined here."""
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
